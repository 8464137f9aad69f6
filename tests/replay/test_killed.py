"""Replays that are killed at random moments and made again: each target ends as if told once."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aggregator import open_run
from replay import open_backend, play
from tests.replay.backend_contract import snapshot
from tests.replay.committed import build
from tests.replay.targets import FILES, SERVICES, Target
from tests.replay.waiting import run_python

if TYPE_CHECKING:
    from tests.replay.readers import Rows

REPLAYS = """
import os, signal, sys, threading, time
from pathlib import PosixPath
from replay import open_backend, play
backend, seconds = open_backend(sys.argv[2], **eval(sys.argv[3])), float(sys.argv[4])
name = "rewrite" if hasattr(backend, "rewrite") else "open"
begins = getattr(backend, name)
def timed(*given, **options):
    global began
    began = time.monotonic()
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return begins(*given, **options)
setattr(backend, name, timed)
play(sys.argv[1], [backend], cursors=sys.argv[5])
print(time.monotonic() - began, flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def lengthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    """Return a run of 1100 steps, fifty of them made twice, and its rows."""
    run = tmp_path_factory.mktemp("lengthy") / "run"
    build(
        run,
        (range(1050), lambda step: {f"k{i}": float(step) for i in range(8)}),
        (range(1000, 1100), lambda step: {"v": 100.0 + step}),
    )
    rows: dict[int, tuple[dict[str, float], float]] = {}
    with open_run(run) as session:
        for row in session.metrics().to_pylist():
            rows.setdefault(row["step"], ({}, row["time"].timestamp()))[0][row["key"]] = row["value"]
    return run, [(step, *rows[step]) for step in sorted(rows)]


def kill_and_repeat(lengthy: tuple[Path, Rows], target: Target, kills: int) -> None:
    """Kill replays at random moments, each to a run of its own there; the first one is only timed."""
    run, expected = lengthy
    chance, longest = random.Random(target.name), 1000.0
    for number in range(kills + 1):
        options, cursors = target.another(number), target.path / f"cursors{number}"
        moment = chance.uniform(0.0, longest) if number else longest
        told = run_python(REPLAYS, run, target.backend, repr(options), moment, cursors)
        assert told.returncode in ((-signal.SIGKILL, 0) if number else (0,)), told.stderr
        longest = longest if number else float(told.stdout.split()[-1])
        (report,) = play(run, [open_backend(target.backend, **options)], cursors=cursors)
        sent, skipped = report.sent, report.skipped
        print(f"{target.name}: killed after {moment:.2f} s: {skipped} steps lay there, {sent} were sent")
        assert expected == target.runs()[number]
        assert (0, 1100) == (sent, skipped) or number
        before = _files(target)
        (report,) = play(run, [open_backend(target.backend, **options)], cursors=cursors)
        assert (0, 1100, True) == (report.sent, report.skipped, report.complete), report
        assert before == _files(target)
        assert expected == target.runs()[number]


def _files(target: Target) -> object:
    """Return every file of a target; SQLite touches its file to read it."""
    folders = [] if "trackio" in target.name else sorted(target.path.glob("told*"))
    found = {folder.name: snapshot(folder) for folder in folders}
    assert not [name for files in found.values() for name in files if Path(name).name.startswith(".areal-")]
    return found


@pytest.mark.parametrize(
    "kills", [pytest.param(5, marks=pytest.mark.long), pytest.param(20, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("target", [*FILES, *SERVICES], indirect=True)
def test_a_replay_killed_at_random_moments_ends_as_if_made_once(
    lengthy: tuple[Path, Rows], target: Target, kills: int
) -> None:
    """SIGKILL; again: the target says what the log says; once more, and nothing is sent (report b5)."""
    kill_and_repeat(lengthy, target, kills)
