"""What an opened target is taken to hold: never more than it was seen to be told, whatever came between."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

import eventlog
from eventlog import RunDir
from eventlog.errors import BackendError
from replay import Capabilities, MemoryBackend, Order, follow, play
from tests.replay.committed import FAST, build, later, logger, value
from tests.replay.servers import SwanlabServer, Trouble
from tests.replay.waiting import run_python

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.replay.readers import Rows


class Lasting(MemoryBackend):
    """A target that outlives the process; `dies` is the step that it takes and a kill then comes."""

    def __init__(
        self, rows: Rows, order: Order = Order.STRICT, *, dies: int | None = None, **can: bool
    ) -> None:
        super().__init__(strict=order is Order.STRICT)
        self.capabilities = Capabilities(order=order, **can)
        self.target, self.rows, self.dies = "t", rows, dies

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        super().log(step, metrics, time)
        if step == self.dies:
            raise KeyboardInterrupt

    def last_step(self) -> int | None:
        return super().last_step() if self.capabilities.reads_back else None


class Completing(Lasting):
    """As SwanLab's server: of a step it has, only the keys that are missing are taken."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows, Order.FORWARD, completes=True)

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        there = [row for at, row, _ in self.rows if at == step]
        for row in there:
            row.update({key: value for key, value in metrics.items() if key not in row})
        if not there:
            super().log(step, metrics, time)


def both(step: int) -> dict[str, float]:
    return {"v": float(step), "w": float(step)}


def values(rows: Rows) -> list[tuple[int, float]]:
    return [(step, row["v"]) for step, row, _ in rows]


# -- the row that was on its way when a kill came --------------------------------------------------


@pytest.mark.parametrize("tell", [play, follow])
@pytest.mark.parametrize("order", [Order.STRICT, Order.FORWARD])
def test_a_step_that_was_done_again_is_not_the_one_a_kill_came_over(
    tmp_path: Path, tell: Any, order: Order
) -> None:
    """Killed over step 2, which the resumed training does anew: the target keeps the old, and it is named."""
    rows: Rows = []
    build(tmp_path / "killed", (range(3), value))
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "killed", [Lasting(rows, order, dies=2)], cursors=tmp_path / "cursors")
    run = build(tmp_path / "run", (range(3), value), (range(2, 5), later))
    RunDir.open(run).end_attempt(1, "finished")
    for sent in (2, 0):
        options = FAST if tell is follow else {}
        (report,) = tell(run, [Lasting(rows, order)], cursors=tmp_path / "cursors", **options)
        assert (sent, "2", False) == (report.sent, report.withheld_steps, report.complete)
        assert 4 - sent == report.skipped
    assert [(0, 0.0), (1, 1.0), (2, 2.0), (3, 103.0), (4, 104.0)] == values(rows)


def test_a_late_commit_is_not_the_one_a_kill_came_over(tmp_path: Path) -> None:
    """Killed over step 2, at which an evaluation is committed then: that is withheld, the rest is there."""
    rows: Rows = []
    with logger(tmp_path, run=tmp_path / "run") as log:
        for step in range(3):
            log.commit(0, step, step, value(step))
        with pytest.raises(KeyboardInterrupt):
            play(tmp_path / "run", [Lasting(rows, dies=2)])
        log.commit(0, 2, 2, {"eval": 1.0})
    for _ in range(2):
        (report,) = play(tmp_path / "run", [Lasting(rows)])
        assert (0, 2, "2") == (report.sent, report.skipped, report.withheld_steps)


def test_a_target_that_cannot_say_what_a_kill_left_is_not_told_twice(tmp_path: Path) -> None:
    """The row that was on its way may be there: it is withheld, and what follows is told."""
    run, rows = build(tmp_path / "run", (range(6), value)), []
    with pytest.raises(KeyboardInterrupt):
        play(run, [Lasting(rows, Order.FORWARD, dies=3, reads_back=False)])
    for sent, skipped in ((2, 3), (0, 5)):
        (report,) = play(run, [Lasting(rows, Order.FORWARD, reads_back=False)])
        assert (sent, skipped, "3") == (report.sent, report.skipped, report.withheld_steps)
    assert list(range(6)) == [step for step, _, _ in rows]


def test_what_failed_is_told_again_to_a_target_that_cannot_say_whether_it_is_there(tmp_path: Path) -> None:
    """No kill came between: a call that raised is made again by the next replay."""
    run, rows = build(tmp_path / "run", (range(6), value)), []

    class Failing(Lasting):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            if step == 3:
                raise ConnectionError("no route")
            super().log(step, metrics, time)

    with pytest.raises(BackendError, match="no route"):
        play(run, [Failing(rows, Order.FORWARD, reads_back=False)])
    (report,) = play(run, [Lasting(rows, Order.FORWARD, reads_back=False)])
    assert (3, 3, True) == (report.sent, report.skipped, report.complete)
    assert list(range(6)) == [step for step, _, _ in rows]


def test_followed_below_its_last_step_a_target_is_told_at_most_once(tmp_path: Path) -> None:
    """One that takes steps in any order, killed over a late row: nobody knows whether that arrived."""
    run = build(tmp_path / "run", (range(10), value))
    RunDir.open(run).end_attempt(0, "finished")
    rows: Rows = []
    play(run, [Lasting(rows, Order.ANY)], since=5)
    with pytest.raises(KeyboardInterrupt):
        play(run, [Lasting(rows, Order.ANY, dies=2)])
    (report,) = follow(run, [Lasting(rows, Order.ANY)], **FAST)
    assert (2, 7, "2") == (report.sent, report.skipped, report.withheld_steps)
    assert list(range(10)) == sorted(step for step, _, _ in rows)


def test_steps_that_an_older_cursor_was_unsure_of_stay_withheld(tmp_path: Path) -> None:
    """A file that names only the steps which were on their way, below the last."""
    run, rows = build(tmp_path / "run", (range(6), value)), []
    play(run, [Lasting(rows, Order.ANY)], since=3)
    (file,) = (run / "cursors").iterdir()
    data = eventlog.read_json(file)
    del data["trying"]
    eventlog.write_json(file, data | {"unsure": "1"})
    for sent in (2, 0):
        (report,) = play(run, [Lasting(rows, Order.ANY)])
        assert (sent, "1") == (report.sent, report.withheld_steps)


# -- a target that completes the step it ends on ---------------------------------------------------


def cut_short(rows: Rows, last: int) -> None:
    """Leave what had been uploaded: up to a step, of that one key only."""
    rows[:] = [row for row in rows if row[0] <= last]
    del rows[-1][1]["w"]


@pytest.mark.parametrize("tell", ["live", "play", "follow"])
def test_a_step_that_was_told_in_part_is_completed(tmp_path: Path, tell: str) -> None:
    """Killed with uploads behind: the same commit is told again, and once it is whole no more."""
    run, rows = tmp_path / "run", []
    with logger(tmp_path, run=run, backends=[Completing(rows)]) as log:
        for step in range(8):
            log.commit(0, step, step, both(step))
    cut_short(rows, 3)
    if tell == "live":
        with logger(tmp_path, run=run, backends=[Completing(rows)]) as log:
            log.load_state_dict({"last_commit_step": 7})
            log.commit(0, 8, 8, both(8))
    else:
        (report,) = (
            play(run, [Completing(rows)]) if tell == "play" else follow(run, [Completing(rows)], **FAST)
        )
        assert (5, 3, 0) == (report.sent, report.skipped, report.withheld)
    assert [(step, both(step)) for step in range(9 if tell == "live" else 8)] == [row[:2] for row in rows]
    (report,) = play(run, [Completing(rows)])
    assert (0, True) == (report.sent, report.complete)


@pytest.mark.parametrize("tell", ["live", "play", "follow"])
def test_what_was_done_again_does_not_complete_another_attempts_step(tmp_path: Path, tell: str) -> None:
    """Resumed at the step on which the server ends: the old value stays there, so the new is withheld."""
    run, rows = tmp_path / "run", []
    for first, last in ((0, 8), (3, 9)):
        backends = [Completing(rows)] if not first or tell == "live" else []
        with logger(tmp_path, run=run, backends=backends) as log:
            log.load_state_dict({"last_commit_step": first - 1})
            for step in range(first, last):
                log.commit(0, step, step, {key: 100.0 * first + v for key, v in both(step).items()})
        if not first:
            cut_short(rows, 3)
    if tell == "follow":
        follow(run, [Completing(rows)], **FAST)
    reports = [play(run, [Completing(rows)])[0] for _ in range(2)]
    assert ["3", "3"] == [report.withheld_steps for report in reports]
    assert (0, 8) == (reports[1].sent, reports[1].skipped)
    assert [float(step if step < 4 else 300 + step) for step in range(9)] == [row["v"] for _, row, _ in rows]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from replay import StatsLogger, StatsLoggerConfig, open_backend
run, host, go = sys.argv[1:4]
backend = open_backend("swanlab", host=host, api_key="key")
log = StatsLogger(StatsLoggerConfig("exp", "t0", run), backends=[backend], run=run)
for step in range(5):
    log.commit(0, step, step, {"v": float(step)})
print(flush=True)
while not Path(go).exists():
    time.sleep(0.02)
for step in range(5, 9):
    log.commit(0, step, step, {"v": float(step)})
while log.status()[0].sent < 8:
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
@pytest.mark.parametrize("first", [2, 3, 4])
def test_a_training_resumed_where_swanlabs_server_ends_is_not_taken_for_told(
    tmp_path: Path, first: int
) -> None:
    """SIGKILL with uploads behind; every step of the log is there as it is, or is named (seed 1004)."""
    from threading import Thread

    from replay import open_backend

    run = tmp_path / "run"
    with SwanlabServer() as server:
        ended: list[int] = []
        train = Thread(
            target=lambda: ended.append(run_python(KILLED, run, server.url, tmp_path / "go").returncode)
        )
        train.start()
        while not any(len(server.rows(one)) > 3 for one in list(server.experiments)):
            train.join(0.05)
            assert train.is_alive()
        server.trouble.append(Trouble("POST /api/house/metrics", seconds=30))
        (tmp_path / "go").touch()
        train.join()
        assert [-signal.SIGKILL] == ended
        server.trouble.clear()
        make = {"host": server.url, "api_key": "key"}
        with logger(tmp_path, run=run, backends=[open_backend("swanlab", **make)]) as log:
            log.load_state_dict({"last_commit_step": first - 1})
            for step in range(first, 9):
                log.commit(0, step, step, later(step))
        (report,) = play(run, [open_backend("swanlab", **make)])
        (experiment,) = server.experiments
        found = dict(values(server.rows(experiment)))
    wrong = [step for step in range(9) if found[step] != (step if step < first else 100 + step)]
    print(f"resumed at {first}: steps {wrong} keep what they had")
    assert eventlog.ranges(wrong) == report.withheld_steps
    assert (0, 9 - len(wrong)) == (report.sent, report.skipped)


# -- begun anew ------------------------------------------------------------------------------------


def test_a_fresh_run_that_holds_something_is_refused(tmp_path: Path) -> None:
    """It would be told everything once more, into what another was told."""
    run = build(tmp_path / "run", (range(3), value))

    class Old(Lasting):
        def open(self, run: Any) -> None:
            del run

    rows: Rows = []
    play(run, [Lasting(rows)])
    with pytest.raises(BackendError, match=r"expected memory to begin a new run, got one .* up to 2: t$"):
        play(run, [Old(rows)], new_run=True)
    assert 3 == len(rows)
