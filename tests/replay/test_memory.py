"""The target in memory, and what can be switched on to go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlog.errors import BackendError, BackendGoneError, RefusedError, RewindError
from replay import MemoryBackend, open_backend, play
from replay.backends.base import Capabilities
from tests.replay.backend_contract import run_info
from tests.replay.committed import build


def steps(backend: MemoryBackend) -> list[int]:
    return [step for step, _, _ in backend.rows]


def opened(path: Path, **switches: object) -> MemoryBackend:
    backend = open_backend("memory", **switches)
    backend.open(run_info(path))
    assert isinstance(backend, MemoryBackend)
    return backend


def test_strict_refuses_what_a_tracker_would_drop(tmp_path: Path) -> None:
    """A step that is not above the last raises instead of vanishing (report a2)."""
    backend = opened(tmp_path, strict=True)
    backend.log(5, {"a": 1.0}, 0.0)
    with pytest.raises(RewindError, match="expected a step above 5, got 5"):
        backend.log(5, {"b": 1.0}, 0.0)


def test_drops_is_silent(tmp_path: Path) -> None:
    """Some servers take everything and keep only what is new (report a5)."""
    backend = opened(tmp_path, drops=True)
    for step in (5, 4, 5, 6):
        backend.log(step, {"a": 1.0}, 0.0)
    assert ([5, 6], 4) == (steps(backend), backend.asked)


def test_a_moment_without_an_answer_is_survived(tmp_path: Path) -> None:
    """Replay tries again, and every step is there once."""
    run = build(tmp_path / "run", (range(6), lambda step: {"v": float(step)}))
    backend = MemoryBackend(fails={2, 3, 5})
    play(run, [backend])
    assert (list(range(6)), 9) == (steps(backend), backend.asked)


def test_a_dead_target_takes_nothing_more(tmp_path: Path) -> None:
    """From its death on every call raises, and replay does not try again (report b4)."""
    run = build(tmp_path / "run", (range(6), lambda step: {"v": float(step)}))
    backend = MemoryBackend(dies=3)
    with pytest.raises(BackendGoneError, match="expected a run, got none any more"):
        play(run, [backend])
    assert ([0, 1], 3) == (steps(backend), backend.asked)


def test_one_oversize_row_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Ten rows, of which row 5 has 10,000 keys, and a limit of 100 kB: nine arrive (report b13)."""
    run = build(
        tmp_path / "run",
        (range(10), lambda step: dict.fromkeys((f"k{i}" for i in range(10_000 if step == 5 else 3)), 1.0)),
    )
    backend = MemoryBackend(limit=100_000)
    (report,) = play(run, [backend])
    assert (9, 1, False) == (report.sent, report.refused, report.complete)
    assert [step for step in range(10) if step != 5] == steps(backend)


def test_names_may_be_refused(tmp_path: Path) -> None:
    """A row with a name the target does not want is refused, and said by its name."""
    backend = opened(tmp_path, refuses=r"\.")
    with pytest.raises(RefusedError, match=r"expected names without .*, got 'a\.b' at step 0"):
        backend.log(0, {"a.b": 1.0}, 0.0)
    backend.log(1, {"a/b": 1.0}, 0.0)
    assert [1] == steps(backend)


def test_it_may_be_slow_and_forgetful(tmp_path: Path) -> None:
    """Each call takes its time; a call that fails leaves nothing behind."""
    backend = opened(tmp_path, seconds=0.001, fails=[1])
    with pytest.raises(BackendError, match="expected an answer, got none at call 1"):
        backend.log(0, {"a": 1.0}, 0.0)
    assert [] == backend.rows
    assert not MemoryBackend(strict=True).capabilities.lasts
    assert Capabilities(lasts=False) == MemoryBackend().capabilities
