"""Targets of which no cursor is found: what they must have been told is believed, and nothing else."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import eventlog
from replay import Capabilities, MemoryBackend, Order, play
from replay.found import Box, believed
from tests.replay.committed import build, logger
from tests.runs import EPOCH, RunBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.replay.readers import Rows


class Lasting(MemoryBackend):
    def __init__(self, rows: Rows) -> None:
        super().__init__(strict=True)
        self.capabilities, self.target, self.rows = Capabilities(order=Order.STRICT), "t", rows


def value(step: int) -> dict[str, float]:
    return {"v": float(step)}


@pytest.mark.parametrize("loss", ["elsewhere", "deleted", "damaged"])
def test_without_a_cursor_what_was_done_again_counts_as_withheld(
    tmp_path: Path, loss: str, caplog: Any
) -> None:
    """The target was told attempt 0; what attempt 1 did anew, and a late row, nobody saw it be told."""
    run, rows = tmp_path / "run", []
    for first, last in ((0, 6), (3, 6)):
        with logger(tmp_path, run=run) as log:
            log.load_state_dict({"last_commit_step": first - 1})
            for step in range(first, last):
                log.commit(0, step, step, {"v": 100.0 * first + step})
            if first:
                log.commit(0, 1, 1, {"eval": 1.0})
        if not first:
            play(run, [Lasting(rows)], cursors=tmp_path / "told" if loss == "elsewhere" else None)
    if loss == "deleted":
        shutil.rmtree(run / "cursors")
    elif loss == "damaged":
        next((run / "cursors").iterdir()).write_text("{")
    with caplog.at_level(logging.WARNING):
        (report,) = play(run, [Lasting(rows)])
    assert (0, 2, "1, 3-5") == (report.sent, report.skipped, report.withheld_steps)
    assert "memory: no cursor was found" in caplog.text
    with logger(tmp_path, run=run, backends=[Lasting(rows)]) as log:  # what it notes says no more
        log.load_state_dict({"last_commit_step": 5})
        log.commit(0, 6, 6, value(6))
    (report,) = play(run, [Lasting(rows)])
    assert (0, 3, "1, 3-5") == (report.sent, report.skipped, report.withheld_steps)


def test_what_an_older_cursor_found_is_looked_at_again(tmp_path: Path) -> None:
    """Its file believes all steps of any attempt: only what must have been told stays known."""
    run, rows = build(tmp_path / "run", (range(6), value), (range(3, 6), value)), []
    build(tmp_path / "before", (range(6), value))
    play(tmp_path / "before", [Lasting(rows)])
    (file,) = (tmp_path / "before" / "cursors").iterdir()
    data = eventlog.read_json(file)
    del data["trying"]
    data["tellings"][0] |= {"chosen": "found", "keys": None}
    data["told"] = [[0, -2, 0, 5, 0.0, EPOCH]]
    (run / "cursors").mkdir()
    eventlog.write_json(run / "cursors" / file.name, data)
    for _ in range(2):
        (report,) = play(run, [Lasting(rows)])
        assert (0, 3, "3-5") == (report.sent, report.skipped, report.withheld_steps)


def test_what_is_believed_was_committed_once_and_in_its_turn(tmp_path: Path) -> None:
    """Not: twice at a step, by a later attempt, behind a later step; of no run, nothing."""
    with RunBuilder(tmp_path / "run") as run:
        for number, commits in enumerate(
            ([(0, 10), (1, 20), (2, 30), (4, 50), (2, 55), (5, 60), (3, 65), (6, 70)], [(7, 80), (8, 90)])
        ):
            leader = run.producer(started=commits[0][1] - 1, attempt=number)
            run.attempt(number, leader=leader, started=commits[0][1] - 1)
            for step, seconds in commits:
                leader.commit(step, value(step), time=seconds, leader=True)
    epoch = EPOCH / 1e6
    boxes = believed(tmp_path / "run", 8, "memory", "t")
    assert [(0, 0, 1, 10, 20), (0, 4, 6, 50, 70)] == [
        (attempt, first, last, begin - epoch, end - epoch) for attempt, first, last, begin, end in boxes
    ]
    assert [Box(0, 0, 0, epoch + 10, epoch + 10)] == believed(tmp_path / "run", 0, "memory", "t")
    assert [] == believed(tmp_path / "none", 8, "memory", "t")
