"""Tests against real servers: each needs a marker, and skips where its server isn't there."""
