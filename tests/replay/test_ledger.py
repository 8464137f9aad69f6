"""What a live delivery keeps of its target: while a run is begun anew, and of rows that come out of turn."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from replay import Capabilities, MemoryBackend, Order, play
from replay.backends.base import begun, named_there
from replay.cursor import CursorFile
from replay.delivery import Delivery
from replay.steps import Row
from tests.replay.backend_contract import run_info
from tests.replay.committed import logger
from tests.replay.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.replay.readers import Rows


class Renewed(MemoryBackend):
    """A service whose `runs` outlive the process; a fresh one waits for `go` in `slow`: open, or log."""

    def __init__(self, runs: dict[str, Rows], slow: str = "", go: threading.Event | None = None) -> None:
        super().__init__(strict=True)
        self.capabilities = Capabilities(order=Order.STRICT)
        self.runs, self.slow, self.go, self.at = runs, slow, go or threading.Event(), ""
        self.fresh = False

    def open(self, run: Any) -> None:
        name = named_there(run, "place ", "first")
        self.fresh = run.fresh
        self._wait("open")
        super().open(run)
        self.target, self.rows = name, self.runs.setdefault(name, [])
        begun(run, "place ", "first", name)

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self._wait("log")
        super().log(step, metrics, time)

    def _wait(self, where: str) -> None:
        if self.fresh and self.slow == where:
            self.at = where
            assert self.go.wait(60)


def trained(path: Path, runs: dict[str, Rows], first: int, last: int, policy: str, *keys: str) -> None:
    with logger(path, run=path / "run", backends=[Renewed(runs)], on_rewind=policy) as log:
        log.load_state_dict({"last_commit_step": first - 1})
        for step in range(first, last):
            log.commit(0, step, step, dict.fromkeys(("v", *keys), float(step + 100 * first)))


@pytest.mark.parametrize(
    ("policy", "slow", "lacking"),
    [("new_run", "open", "4"), ("new_run", "log", "4"), ("rewrite", "log", "4"), ("rewrite", "open", "")],
)
def test_what_is_withheld_while_a_run_begins_anew_stays_withheld(
    tmp_path: Path, policy: str, slow: str, lacking: str
) -> None:
    """Replay names it each time; where the log was read behind it, it was told with the rest (report a5)."""
    runs: dict[str, Rows] = {}
    trained(tmp_path, runs, 0, 6, policy)
    backend = Renewed(runs, slow)
    with logger(tmp_path, run=tmp_path / "run", backends=[backend], on_rewind=policy) as log:
        log.load_state_dict({"last_commit_step": 2})
        for step in range(3, 6):
            log.commit(0, step, step, {"v": float(step)})
        until(lambda: backend.at == slow)
        log.commit(0, 4, 4, {"eval": 1.0})
        backend.go.set()
        for step in range(6, 9):
            log.commit(0, step, step, {"v": float(step)})
    assert "4" == log.status()[0].withheld_steps
    assert (not lacking) == any("eval" in row for rows in runs.values() for _, row, _ in rows)
    for _ in range(2):
        (report,) = play(tmp_path / "run", [Renewed(runs)])
        assert (0, lacking) == (report.sent, report.withheld_steps)
    assert 2 == len(runs)


@pytest.mark.parametrize("policy", ["new_run", "rewrite"])
def test_what_only_the_run_before_shows_is_not_withheld_for_ever(tmp_path: Path, policy: str) -> None:
    """A key that was taken back and never came again: the new run does not show it, only the old one does."""
    runs: dict[str, Rows] = {}
    trained(tmp_path, runs, 0, 8, policy, "once")
    trained(tmp_path, runs, 3, 10, policy, "twice")
    assert 2 == len(runs)
    for _ in range(2):
        (report,) = play(tmp_path / "run", [Renewed(runs)])
        assert (0, 10, True) == (report.sent, report.skipped, report.complete)
    trained(tmp_path, runs, 7, 12, "warn")  # now the new one shows what was taken back
    for _ in range(2):
        (report,) = play(tmp_path / "run", [Renewed(runs)])
        assert (0, 9, "7-9") == (report.sent, report.skipped, report.withheld_steps)


def test_two_runs_begun_anew_at_once_are_two(tmp_path: Path) -> None:
    """However many trials begin theirs in a second, none has another's name."""
    runs: dict[str, Rows] = {}
    for number in range(8):
        trained(tmp_path / str(number), {}, 0, 2, "warn")
        play(tmp_path / str(number) / "run", [Renewed(runs)], new_run=True)
    assert [2] * 8 == [len(rows) for rows in runs.values()]


def test_a_row_of_another_process_that_comes_behind_is_not_told(tmp_path: Path) -> None:
    """Its time lies among those of the rows that were told; a target that goes on ahead lacks it."""

    class Lasting(MemoryBackend):
        def __init__(self) -> None:
            super().__init__(strict=True)
            self.capabilities, self.target = Capabilities(order=Order.STRICT), "t"

    delivery = Delivery(Lasting(), run_info(tmp_path), tmp_path / "cursors", keeps=True)
    leader = [Row(step, {"v": 1.0}, 10.0 * step, {0: 10.0 * step}) for step in range(5)]
    behind = Row(2, {"other": 1.0}, 25.0, {0: 25.0})
    assert [True] * 5 == [delivery.tell(row) for row in leader]
    until(lambda: delivery.status().sent == 4)
    assert not delivery.tell(behind)
    delivery.finish()
    assert delivery.join(60)
    cursor = CursorFile(tmp_path / "cursors", "memory", "t").load()
    assert [True] * 5 == [cursor.knows(row) for row in leader]
    assert not cursor.knows(behind)
