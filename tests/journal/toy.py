"""A toy codec for tests: authenticated encryption out of the standard library. Don't use it for anything real."""

from __future__ import annotations

import hashlib
import hmac
import os


class ToyCodec:
    """A keystream from SHA-256 in counter mode, and an HMAC over nonce and text."""

    def __init__(self, key: bytes = b"a key for tests", name: str = "toy") -> None:
        self.name = name
        self._key = key

    def encode(self, data: bytes, /) -> bytes:
        """Nonce, MAC and text."""
        nonce = os.urandom(12)
        text = self._mixed(nonce, data)
        return nonce + self._mac(nonce + text) + text

    def decode(self, data: bytes, /) -> bytes:
        """ValueError where it was changed, or encoded with another key."""
        nonce, mac, text = data[:12], data[12:44], data[44:]
        if not hmac.compare_digest(mac, self._mac(nonce + text)):
            raise ValueError("the MAC is wrong")
        return self._mixed(nonce, text)

    def _mac(self, data: bytes) -> bytes:
        return hmac.new(self._key, data, hashlib.sha256).digest()

    def _mixed(self, nonce: bytes, data: bytes) -> bytes:
        blocks = range(len(data) // 32 + 1)
        stream = b"".join(hashlib.sha256(self._key + nonce + block.to_bytes(8)).digest() for block in blocks)
        return bytes(a ^ b for a, b in zip(data, stream, strict=False))
