"""`resume`: going on with a run, and what its exit code says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.agents import fails, fetches, fetches_async, refunds, spends
from tests.cli.conftest import Command, process


def test_a_stopped_run_goes_on_under_a_larger_budget(command: Command, store: str) -> None:
    """Exit code 3 while it doesn't complete, 0 once it does."""
    refunds.run(0, run_id="r1")
    done = command("resume", "tests.cli.agents:refunds", "r1", "--usd", "2", "--max", "4")
    assert done.code == 3
    assert "waiting" in done.out
    (question,) = json.loads(command("pending", "--json").out)
    command("approve", question["id"])
    done = command("resume", "tests.cli.agents:refunds", "r1")
    assert (done.code, done.out) == (0, "refunds completed after 1 iteration (max_iterations)\n")


def test_a_finished_run_gives_its_recorded_result(command: Command, store: str) -> None:
    """As JSON, with its value, its cost and why it stopped."""
    fetches.run(0, run_id="r1")
    done = command("resume", "tests.cli.agents:fetches", "r1", "--json")
    told = json.loads(done.out)
    assert done.code == 0
    assert {name: told[name] for name in ("run_id", "stop_reason", "completed", "iterations", "value", "cost")} == {
        "run_id": "r1",
        "stop_reason": "until",
        "completed": True,
        "iterations": 2,
        "value": 2,
        "cost": "0.5",
    }


def test_an_async_loop_is_resumed(command: Command, store: str) -> None:
    """Its result is awaited."""
    import asyncio

    asyncio.run(fetches_async.run(0, run_id="r1"))
    assert command("resume", "tests.cli.agents:fetches_async", "r1").code == 0


def test_what_the_body_raises_is_shown_whole_and_safely(command: Command, store: str) -> None:
    """Exit code 3, and a traceback that can't steer the terminal."""
    with pytest.raises(RuntimeError):
        fails.run(0, run_id="r1")
    done = command("resume", "tests.cli.agents:fails", "r1")
    assert (done.code, done.out) == (3, "")
    assert "Traceback" in done.err
    assert "RuntimeError" in done.err
    assert "\x1b" not in done.err


@pytest.mark.parametrize(("target", "run_id"), [("spends", "r1"), ("fetches", "r2")])
def test_a_run_of_another_loop_or_none_exits_with_1(command: Command, store: str, target: str, run_id: str) -> None:
    """A RunConflict, and a RunNotFound."""
    fetches.run(0, run_id="r1")
    assert command("resume", f"tests.cli.agents:{target}", run_id).code == 1


def test_a_flow_has_no_ceiling_to_raise(command: Command, store: str) -> None:
    """--max is a mistake there, and no failure of the flow."""
    done = command("resume", "tests.cli.agents:steps", "r1", "--max", "2")
    assert (done.code, "--max" in done.err, "Traceback" in done.err) == (2, True, False)


def test_a_module_in_the_current_folder_is_found(store: str, tmp_path: Path) -> None:
    """As `python -m` would find it, in a real process."""
    fetches.run(0, run_id="r1")
    (tmp_path / "mine.py").write_text("from tests.cli.agents import fetches\n", encoding="utf-8")
    import os

    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = process("resume", "mine:fetches", "r1", cwd=tmp_path, env=environment)
    out, err = done.communicate(timeout=30)
    assert (done.returncode, out) == (0, "fetches completed after 2 iterations (until, $0.5)\n"), err


def test_the_store_option_is_that_of_loops_without_one(
    command: Command, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--store does what LOOPGUARD_STORE does."""
    spends.run(0, run_id="r1")
    monkeypatch.delenv("LOOPGUARD_STORE")
    assert command("resume", "tests.cli.agents:spends", "r1", "--store", store).code == 3
