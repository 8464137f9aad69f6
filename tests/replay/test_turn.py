"""Clocks that are set back: a commit is told from those before it all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eventlog
from replay import Capabilities, MemoryBackend, Order, follow, play
from replay.turn import Turn
from tests.replay.committed import logger

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.readers import Rows

FAST: dict[str, Any] = {"poll": 0.02, "wait": 0.05, "give_up": 60.0}
SECONDS = [0, 1, 2, 10, 3, 4]  # when steps 0 to 5 are committed: after step 3 the clock is set back


class Lasting(MemoryBackend):
    def __init__(self, rows: Rows) -> None:
        super().__init__(strict=True)
        self.capabilities, self.target, self.rows = Capabilities(order=Order.STRICT), "t", rows


@given(st.lists(st.integers(0, 50)))
def test_a_turn_is_the_time_or_behind_all_before(times: list[int]) -> None:
    """Turns never go back; where the clock does not either they are the times, else new ones."""
    turn, turns = Turn(), []
    for time in times:
        turns.append(turn.of(time))
        assert time <= turns[-1]
    assert turns == sorted(turns)
    if times == sorted(times):
        assert turns == times
    for at in range(1, len(times)):
        if times[at] < times[at - 1]:
            assert turns[at] > turns[at - 1]


@pytest.mark.parametrize("tell", [play, follow])
def test_a_late_row_after_the_clock_was_set_back_is_withheld(tmp_path: Path, tell: Any) -> None:
    """Its time lies among those that were told; it came behind them, and the target lacks it."""
    rows, options = [], FAST if tell is follow else {}
    log = eventlog.start(tmp_path / "run", role="actor")
    log.claim_attempt()
    for step, seconds in enumerate(SECONDS):
        log.commit(0, step, step, [{"v": float(step)}], time_us=(1_790_000_000 + seconds) * 1_000_000)
    play(tmp_path / "run", [Lasting(rows)])
    log.commit(0, 2, 2, [{"eval": 1.0}], time_us=1_790_000_004_500_000)
    log.end("finished")
    eventlog.stop()
    for _ in range(2):
        (report,) = tell(tmp_path / "run", [Lasting(rows)], **options)
        assert (0, 5, "2") == (report.sent, report.skipped, report.withheld_steps)
    (report,) = tell(tmp_path / "run", [Lasting([])], cursors=tmp_path / "other", **options)
    assert (6, "" if tell is play else "2") == (report.sent, report.withheld_steps)
    assert report.complete == (tell is play)


def test_live_a_late_row_after_the_clock_was_set_back_is_withheld(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the logger notes is what a replay finds."""
    rows: Rows = []
    clock = iter([*SECONDS, 5])
    with logger(tmp_path, run=tmp_path / "run", backends=[Lasting(rows)]) as log:
        monkeypatch.setattr(eventlog, "now_us", lambda: (1_790_000_000 + next(clock)) * 1_000_000)
        for step in range(6):
            log.commit(0, step, step, {"v": float(step)})
        log.commit(0, 2, 2, {"eval": 1.0})
        monkeypatch.undo()
    assert ("2", 6) == (log.status()[0].withheld_steps, log.status()[0].sent)
    for _ in range(2):
        (report,) = play(tmp_path / "run", [Lasting(rows)])
        assert (0, 5, "2") == (report.sent, report.skipped, report.withheld_steps)
