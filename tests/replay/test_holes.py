"""Holes in what a target holds: filled where they can be, counted where they cannot, never called told."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

import eventlog
from eventlog import RunDir
from replay import Capabilities, MemoryBackend, Order, follow, open_backend, play
from replay.cursor import CursorFile
from replay.delivery import Delivery
from replay.steps import Row
from tests.replay.backend_contract import run_info
from tests.replay.committed import build, logger
from tests.replay.readers import Rows, tensorboard_rows, trackio_rows, wandb_files, wandb_history, wandb_rows
from tests.replay.servers import Trouble, WandbServer
from tests.replay.targets import PATIENCE, STAND_INS, Target
from tests.replay.waiting import run_python, until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def value(step: int) -> dict[str, float]:
    return {"v": float(step)}


class Lasting(MemoryBackend):
    """A target that outlives the process: the same rows whoever opens it; `draws`: it shows histograms."""

    def __init__(self, rows: Rows, *, order: Order = Order.STRICT, draws: bool = False) -> None:
        super().__init__(strict=order is Order.STRICT)
        self.capabilities = Capabilities(order=order, histograms=draws)
        self.target, self.rows = "t", rows

    def histogram(self, step: int, name: str, histogram: Any, time: float) -> None:
        pass


def told(run: Path, rows: Rows, **options: Any) -> tuple[int, int, str]:
    """Replay to an append-only target; return what was sent, skipped and withheld."""
    (report,) = play(run, [Lasting(rows)], **options)
    assert report.complete == (report.withheld == 0)
    return report.sent, report.skipped, report.withheld_steps


def steps_of(rows: Rows) -> list[int]:
    return [step for step, _, _ in rows]


# -- made by selections ----------------------------------------------------------------------------


@pytest.mark.parametrize("tell", [play, follow])
def test_steps_that_were_left_out_are_withheld_not_skipped(tmp_path: Path, tell: Any) -> None:
    """Told from step 5 on, then all: what lies before is too late for an append-only target, each time."""
    run = build(tmp_path / "run", (range(10), value))
    RunDir.open(run).end_attempt(0, "finished")
    rows: Rows = []
    for since, last, expected in (
        (3, 5, (3, 0, "")),
        (8, None, (2, 0, "")),
        (None, None, (0, 5, "0-2, 6-7")),
        (None, None, (0, 5, "0-2, 6-7")),
        (8, None, (0, 2, "")),
    ):
        (report,) = tell(run, [Lasting(rows)], since=since, until=last)
        assert expected == (report.sent, report.skipped, report.withheld_steps)
        assert report.complete == (expected[2] == "")
    play(run, [Lasting(rows)], new_run=True)


def test_a_target_that_takes_any_step_gets_what_it_lacks(tmp_path: Path) -> None:
    """The steps before the first that was told, and in between, each once, by one's own adapter."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = []
    for since, last in ((3, 5), (8, None), (None, None), (None, None)):
        (report,) = play(run, [Lasting(rows, order=Order.ANY)], since=since, until=last)
        assert report.complete
    assert [3, 4, 5, 8, 9, 0, 1, 2, 6, 7] == steps_of(rows)
    assert (0, 10) == (report.sent, report.skipped)


def test_a_step_told_below_the_last_is_told_at_most_once(tmp_path: Path) -> None:
    """Killed over it, nobody can say whether it arrived: it is withheld, and said."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = []

    class Killed(Lasting):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            super().log(step, metrics, time)
            if step == 2:
                raise KeyboardInterrupt

    play(run, [Lasting(rows, order=Order.ANY)], since=5)
    with pytest.raises(KeyboardInterrupt):
        play(run, [Killed(rows, order=Order.ANY)])
    for sent, skipped in ((2, 7), (0, 9)):
        (report,) = play(run, [Lasting(rows, order=Order.ANY)])
        assert (sent, skipped, "2") == (report.sent, report.skipped, report.withheld_steps)
    assert list(range(10)) == sorted(steps_of(rows))


def test_other_names_are_withheld_and_do_not_stick(tmp_path: Path) -> None:
    """Under new names nothing is there; under the old ones all is, before and after."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = []
    assert (10, 0, "") == told(run, rows)
    for lost in (False, True):
        if lost:
            shutil.rmtree(run / "cursors")
        assert (0, 0, "0-9") == told(run, rows, rename={"^v": "w"})
        assert (0, 10, "") == told(run, rows)
    assert (0, 0, "0-9") == told(run, rows, source="recomputed", keys="window")


def test_statistics_of_told_steps_are_withheld(tmp_path: Path) -> None:
    """Numbers and histograms that come after their step; the committed ones are skipped, then as before."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = []
    for stats, expected in (((), (10, 0, "")), (("max",), (0, 0, "0-9")), (("histogram",), (0, 0, "0-9"))):
        (report,) = play(run, [Lasting(rows, draws=True)], stats=stats)
        assert expected == (report.sent, report.skipped, report.withheld_steps)
    assert (0, 10, "") == told(run, rows)
    fresh: Rows = []
    for sent, skipped in ((10, 0), (0, 10)):
        (report,) = play(
            run, [Lasting(fresh, draws=True)], stats=["max", "histogram"], cursors=tmp_path / "c"
        )
        assert (sent, skipped, True) == (report.sent, report.skipped, report.complete)


def test_a_histogram_leaves_the_number_of_its_name(tmp_path: Path) -> None:
    """A scalar is recorded and committed under one name: that keeps its value, the histogram has another."""
    from aggregator import stats_tracker

    with logger(tmp_path, run=tmp_path / "run") as log:
        for step in range(3):
            stats_tracker.scalar(lr=0.5 + step)
            log.commit(0, step, step, stats_tracker.export_all())
    trackio = tmp_path / "trackio"
    backends = [open_backend("wandb", mode="offline"), open_backend("trackio", path=trackio)]
    play(tmp_path / "run", backends, stats=["histogram"])
    (file,), (database,) = wandb_files(tmp_path / "run" / "wandb"), trackio.glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        found = [
            json.loads(row) for (row,) in connection.execute("SELECT metrics FROM metrics ORDER BY step")
        ]
    for rows in (wandb_history(file), found):
        assert [0.5, 1.5, 2.5] == [row["lr"] for row in rows]
        assert {"histogram", "trackio.histogram"} >= {row["lr/histogram"]["_type"] for row in rows}


# -- cursors ---------------------------------------------------------------------------------------


def test_what_an_older_cursor_knew_is_known(tmp_path: Path) -> None:
    """A file of the former form: newest commits, names, what was withheld and refused."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = [(step, value(step), 0.0) for step in range(10) if step not in (3, 4, 6)]
    play(run, [Lasting([])])
    (file,) = (run / "cursors").iterdir()
    times = CursorFile(run / "cursors", "memory", "t").load().told.spans[0].end
    former = {"backend": "memory", "target": "t", "last_step": 9, "acknowledged": {"0": times}, "keys": ["v"]}
    eventlog.write_json(file, former | {"withheld": "3-4", "refused": "6", "run_id": None})
    (report,) = play(run, [Lasting(rows)])
    assert (0, 7, "3-4", "6") == (
        report.sent,
        report.skipped,
        report.withheld_steps,
        report.refused_steps,
    )


def test_elsewhere_the_runs_own_cursor_is_known(tmp_path: Path) -> None:
    """A replay with cursors in another folder begins with what the run's say."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = []
    play(run, [Lasting(rows)], since=5)
    assert (0, 5, "0-4") == told(run, rows, cursors=tmp_path / "elsewhere")


# -- made by accidents -----------------------------------------------------------------------------


def test_a_target_that_lost_its_end_is_told_it_before_anything_new(tmp_path: Path, caplog: Any) -> None:
    """Killed before the upload: resumed, the log tells what the target lacks, then comes the new."""
    rows: Rows = []
    with logger(tmp_path, run=tmp_path / "run", backends=[Lasting(rows)]) as log:
        for step in range(8):
            log.commit(0, step, step, value(step))
    for held, first in ((4, 8), (0, 12), (12, 14)):
        del rows[held:]
        with (
            caplog.at_level(logging.INFO, "areal_metrics.replay"),
            logger(tmp_path, run=tmp_path / "run", backends=[Lasting(rows)]) as log,
        ):
            log.load_state_dict({"last_commit_step": first - 1})
            for step in range(first, first + 4 if first < 12 else first + 2):
                log.commit(0, step, step, value(step))
    assert list(range(16)) == steps_of(rows)
    assert "memory: did not get steps 4-7 before: they are told from the log" in caplog.text
    assert "did not get steps 0-11 before" in caplog.text
    assert (0, 16, "") == told(tmp_path / "run", rows)


@pytest.mark.parametrize(("name", "late"), [("tensorboard", ()), ("trackio", ()), ("trackio", ("2",))])
def test_what_a_killed_training_did_not_tell_is_told_when_it_resumes(
    tmp_path: Path, name: str, late: tuple[str, ...]
) -> None:
    """Steps whose commits had returned are in files, too, each once; an evaluation may come before them."""
    run, path = tmp_path / "run", tmp_path / "told"
    for first, last, dies in ((0, 10, 1), (10, 20, 1), (15, 30, 1), (30, 33, 0)):
        done = run_python(TRAINING, run, name, repr({"path": path}), first, last, dies, *late)
        assert (-signal.SIGKILL if dies else 0) == done.returncode, done.stderr
    rows = tensorboard_rows(path) if name == "tensorboard" else trackio_rows(path / "exp.db")
    assert [(step, float(step)) for step in range(33)] == sorted((s, r["v"]) for s, r, _ in rows if "v" in r)
    assert [(2, 30.0)] * len(late) == [(s, r["eval"]) for s, r, _ in rows if "eval" in r]


def test_what_the_resumed_run_does_anew_is_not_told_from_before(tmp_path: Path) -> None:
    """Restored after step 5: of the killed lifetime only what lies before is told."""
    rows: Rows = []
    for first, last in ((0, 10), (6, 9)):
        with logger(tmp_path, run=tmp_path / "run", backends=[Lasting(rows)]) as log:
            log.load_state_dict({"last_commit_step": first - 1})
            for step in range(first, last):
                log.commit(0, step, step, {"v": float(step + 100 * first)})
        if not first:
            del rows[3:]
    assert [(s, float(s if s < 6 else 600 + s)) for s in range(9)] == [(s, row["v"]) for s, row, _ in rows]


def test_what_cannot_be_filled_is_withheld(tmp_path: Path) -> None:
    """Where no log tells it, the hole stays, and replay names it each time."""
    run = build(tmp_path / "run", (range(10), value))
    rows: Rows = []
    play(run, [Lasting(rows)], until=5)
    del rows[2:]
    start = RunDir.open(run).attempts()[0].started_us / 1e6
    delivery = Delivery(Lasting(rows), run_info(run), run / "cursors")
    for step in (6, 7):
        delivery.tell(Row(step, value(step), start + 10 * (step + 1), {0: start + 10 * (step + 1)}))
    delivery.finish()
    assert delivery.join(60)
    for sent, skipped in ((2, 4), (0, 6)):
        assert (sent, skipped, "2-5") == told(run, rows)


def test_a_queue_that_overflows_leaves_one_gap_at_the_end(tmp_path: Path, caplog: Any) -> None:
    """An append-only target gets nothing more, said once; replay fills what it lacks."""
    run = build(tmp_path / "run", (range(60), value))
    start = RunDir.open(run).attempts()[0].started_us / 1e6
    rows: Rows = []
    leave = threading.Event()

    class Slow(Lasting):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            leave.wait(60)
            super().log(step, metrics, time)

    delivery = Delivery(Slow(rows), run_info(run), run / "cursors", queue_rows=10)
    with caplog.at_level(logging.WARNING):
        for step in range(60):
            if step == 30:
                leave.set()
                until(lambda: not delivery.status().waiting)
            at = start + 10 * (step + 1)
            delivery.tell(Row(step, value(step), at, {0: at}))
        delivery.finish()
        assert delivery.join(60)
    status = delivery.status()
    assert list(range(status.sent)) == steps_of(rows)
    assert (60, False) == (status.sent + status.dropped, status.off)
    assert status.dropped > 30
    assert 1 == caplog.text.count("is slower than the training: nothing is sent from step")
    assert (60 - status.sent, status.sent, "") == told(run, rows)
    assert list(range(60)) == steps_of(rows)


def test_what_was_lost_when_it_was_closed_is_counted_as_left(tmp_path: Path, caplog: Any) -> None:
    """A service that does not take the last rows: not sent but dropped, in the cursor too."""
    run = build(tmp_path / "run", (range(6), value))
    start = RunDir.open(run).attempts()[0].started_us / 1e6
    rows: Rows = []

    class Lossy(Lasting):
        def close(self) -> None:
            del self.rows[4:]
            raise ConnectionError("no route")

    delivery = Delivery(Lossy(rows), run_info(run), run / "cursors")
    for step in range(6):
        delivery.tell(Row(step, value(step), start + 10 * (step + 1), {0: start + 10 * (step + 1)}))
    delivery.finish()
    assert delivery.join(60)
    status = delivery.status()
    assert (4, 2, "ConnectionError: no route") == (status.sent, status.dropped, status.error)
    assert "closing failed, 2 steps that were sent are left to replay: no route" in caplog.text
    assert 3 == CursorFile(run / "cursors", "memory", "t").load().last_step
    assert (2, 4, "") == told(run, rows)


def test_a_close_that_does_not_end_confirms_nothing(tmp_path: Path, caplog: Any) -> None:
    """What was sent is then not known to have arrived."""
    leave = threading.Event()

    class Hanging(MemoryBackend):
        def close(self) -> None:
            leave.wait(60)

    delivery = Delivery(Hanging(), run_info(tmp_path), tmp_path / "cursors")
    for step in range(3):
        delivery.tell(Row(step, value(step), 1000.0 + step, {0: 1000.0 + step}))
    delivery.finish()
    until(lambda: delivery.status().sent == 3)
    assert not delivery.join(0.05)
    assert "0 steps are left to replay; of 3 that were sent none is confirmed" in caplog.text
    assert (3, "TimeoutError: it did not finish in time") == (
        delivery.status().unconfirmed,
        delivery.status().error,
    )
    leave.set()
    assert delivery.join(60)
    assert 0 == delivery.status().unconfirmed


def test_an_offline_file_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    """As a full disk leaves it: what the file does not have is not counted as sent."""
    backend: Any = open_backend("wandb", mode="offline", path=tmp_path / "w")
    finish = backend._finish

    def cut() -> None:
        finish()
        os.truncate(backend._file, 100_000)

    backend._finish = cut
    delivery = Delivery(backend, run_info(tmp_path), tmp_path / "cursors")
    for step in range(600):
        delivery.tell(Row(step, {f"k{i}": step * 1.1 for i in range(10)}, 1000.0 + step, {0: 1000.0 + step}))
    delivery.finish()
    assert delivery.join(60)
    (file,) = wandb_files(tmp_path / "w")
    status, held = delivery.status(), len(wandb_rows(file))
    assert (held, 600 - held, True) == (status.sent, status.dropped, 0 < held < 600)
    assert f"expected step 599 in the file, got {held - 1} as its last" in str(status.error)


TRAINING = """
import os, signal, sys, time
from pathlib import PosixPath
import tests.patience
from replay import StatsLogger, StatsLoggerConfig, open_backend
run, backend, options, (first, last, dies) = *sys.argv[1:3], eval(sys.argv[3]), map(int, sys.argv[4:7])
log = StatsLogger(StatsLoggerConfig("exp", "t0", run), backends=[open_backend(backend, **options)], run=run)
if first:
    log.load_state_dict({"last_commit_step": first - 1})
for step in map(int, sys.argv[7:]):
    log.commit(0, step, step, {"eval": float(first)})
for step in range(first, last):
    log.commit(0, step, step, {"v": float(step)})
    time.sleep(0.02)
if dies:
    os.kill(os.getpid(), signal.SIGKILL)
log.close()
print(log.status()[0].sent, log.status()[0].withheld, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("target", STAND_INS, indirect=True)
def test_a_training_killed_and_resumed_leaves_no_hole_at_a_service(target: Target, tmp_path: Path) -> None:
    """SIGKILL before the rows were uploaded, resumed, closed: the server has every step, replay adds none."""
    run = tmp_path / "run"
    for first, last, dies in ((0, 100, 1), (100, 200, 1), (200, 220, 0)):
        done = run_python(TRAINING, run, target.backend, repr(target.options), first, last, dies)
        assert (-signal.SIGKILL if dies else 0) == done.returncode, done.stderr
    sent, withheld = done.stdout.split()[-2:]
    print(f"{target.name}: {sent} sent after the last resume, {withheld} withheld")
    assert (True, "0") == (int(sent) >= 20, withheld)
    assert [(step, value(step)) for step in range(220)] == [row[:2] for row in target.rows()]
    (report,) = play(run, [target.make()])
    assert (0, 220, True) == (report.sent, report.skipped, report.complete)


@pytest.mark.long
@pytest.mark.parametrize("target", STAND_INS, indirect=True)
@pytest.mark.parametrize("trouble", [{"status": 500}, {"status": 404}])
def test_what_a_service_did_not_take_is_not_counted_as_sent(
    target: Target, tmp_path: Path, trouble: dict[str, Any]
) -> None:
    """Uploads that fail from some step on: what closing could not bring there is left, and counted so."""
    assert target.server is not None
    with logger(tmp_path, run=tmp_path / "run", backends=[target.make(timeout=PATIENCE)]) as log:
        target.server.trouble.append(Trouble(STAND_INS[target.name], **trouble))
        for step in range(30):
            log.commit(0, step, step, value(step))
    (status,) = log.status()
    print(f"{target.name}: {status}")
    assert (0, 30) == (status.sent, status.dropped)
    assert status.error
    target.server.trouble.clear()


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_finished_run_that_is_followed_counts_each_step_once(tmp_path: Path, name: str) -> None:
    """Told as it was read, then put right: a step is one step; again, nothing is sent."""
    run = build(tmp_path / "run", (range(16), value), (range(10, 21), value))
    RunDir.open(run).end_attempt(1, "finished")
    for expected in ((21, 0), (0, 21)):
        (report,) = follow(run, [open_backend(name, path=tmp_path / "told")])
        assert expected == (report.sent, report.skipped)


def test_services_say_what_they_hold_only_when_asked(tmp_path: Path) -> None:
    """A dry run of a service believes the cursor: what was told is not counted as to be sent."""
    run = build(tmp_path / "run", (range(10), value))
    with WandbServer() as server:
        options = {"mode": "online", "base_url": server.url, "api_key": "x" * 40, "path": tmp_path / "w"}
        play(run, [open_backend("wandb", **options)], until=6)
        (report,) = play(run, [open_backend("wandb", **options)], dry_run=True)
        assert (3, 7) == (report.sent, report.skipped)
