"""Telling a run while it is written: each step soon, across kills and resumes, until it has finished."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aggregator import open_run, stats_tracker
from eventlog import RunDir
from eventlog.errors import BackendError, BackendGoneError, ConfigError, NotARunError, QueryError
from replay import Capabilities, MemoryBackend, Order, follow, open_backend, play
from replay.backends.base import Selection
from replay.steps import Row
from replay.succession import Succession
from replay.supplement import Supplement
from tests.replay.committed import FAST, build, later, logger, value
from tests.replay.readers import (
    Rows,
    tensorboard_events,
    tensorboard_rows,
    trackio_rows,
    wandb_files,
    wandb_rows,
)
from tests.replay.servers import Trouble
from tests.replay.targets import PATIENCE, STAND_INS, Target
from tests.replay.test_statistics import recorded
from tests.replay.waiting import ROOT, meanwhile, until
from tests.runs import RunBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def finished(run: Path) -> Path:
    """Say that the newest attempt of a run ended in order."""
    found = RunDir.open(run)
    found.end_attempt(found.attempts()[-1].number, "finished")
    return run


def crashed(path: Path, *, begin: int = 10) -> Path:
    """Build a run of steps 0 to 15 that was resumed at 10 and went on to 20, and finished."""
    return finished(build(path, (range(16), value), (range(begin, 21), later)))


CRASHED = [(step, {"v": float(step if step < 10 else 100 + step)}) for step in range(21)]


def steps(rows: Rows) -> list[tuple[int, dict[str, float]]]:
    return [(step, row) for step, row, _ in rows]


class Lasting(MemoryBackend):
    """A target with strict steps that outlives the process: the same rows whoever opens it."""

    def __init__(self, rows: Rows, *, target: str = "t", **options: Any) -> None:
        super().__init__(strict=True, **options)
        self.capabilities = Capabilities(order=Order.STRICT)
        self.target = target
        self.rows = rows


def test_a_finished_run_is_told_as_by_replay_and_ends(tmp_path: Path) -> None:
    """Every kind of target gets what the log says, what was taken back is named; again, nothing is sent."""
    run = crashed(tmp_path / "run")
    rows: Rows = []
    for sent, skipped in ((21, 0), (0, 21)):
        backends = [
            Lasting(rows),
            open_backend("tensorboard"),
            open_backend("trackio", path=tmp_path / "trackio"),
            open_backend("wandb", mode="offline"),
        ]
        for report in follow(run, backends, **FAST):
            assert (sent, skipped, 6, "10-15", 0, True) == (
                report.sent,
                report.skipped,
                report.superseded,
                report.superseded_steps,
                report.withheld,
                report.complete,
            ), report
    told = (
        rows,
        tensorboard_rows(run / "live" / "tensorboard"),
        trackio_rows(tmp_path / "trackio" / "exp.db"),
        wandb_rows(run / "wandb"),
    )
    for got in told:
        assert CRASHED == steps(got)
        assert rows == got


def so_far(database: Path) -> Rows:
    """Return what Trackio's file holds, which may be just being made."""
    with suppress(sqlite3.OperationalError):
        return trackio_rows(database)
    return []


def live(path: Path, lives: list[range], go_on: Callable[[int, int], None]) -> None:
    """Train: commit steps in each lifetime but the last without an end, asking `go_on` before each commit."""
    for number, some in enumerate(lives):
        log = logger(path.parent, run=path)
        if number:
            log.load_state_dict({"last_commit_step": some.start - 1})
        for step in some:
            go_on(number, step)
            log.commit(0, step, step, {"v": 100.0 * number + step})
        if number < len(lives) - 1:
            log._log.end("exception", "killed")
        log.close()


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "strict"])
def test_a_resumed_run_is_followed_across_the_crash(tmp_path: Path, name: str) -> None:
    """Told while it went on; what the second attempt takes back is told anew, or withheld and named (a5)."""
    rows: Rows = []
    place = tmp_path / "told"
    read: dict[str, Callable[[], Rows]] = {
        "tensorboard": lambda: tensorboard_rows(place) if place.exists() else [],
        "trackio": lambda: so_far(place / "exp.db"),
        "strict": lambda: list(rows),
    }
    seen: list[int] = []

    def go_on(number: int, step: int) -> None:
        """Crash only after step 5 was told, and finish only after step 8 was."""
        wanted = {(1, 3): 5, (1, 9): 8}.get((number, step))
        until(lambda: wanted is None or wanted in {step for step, _, _ in read[name]()})
        seen.append(step)

    backend = Lasting(rows) if name == "strict" else open_backend(name, path=place)
    with meanwhile(live, tmp_path / "run", [range(6), range(3, 10)], go_on):
        (report,) = follow(tmp_path / "run", [backend], **FAST)
    assert [*range(6), *range(3, 10)] == seen
    assert (3, "3-5") == (report.superseded, report.superseded_steps)
    got = {step: row["v"] for step, row, _ in read[name]()}
    if name == "strict":
        assert {s: float(s) if s < 6 else 100.0 + s for s in range(10)} == got
        assert (10, 3, "3-5", False) == (
            report.sent,
            report.withheld,
            report.withheld_steps,
            report.complete,
        )
    else:
        assert {s: float(s) if s < 3 else 100.0 + s for s in range(10)} == got
        assert (13, 0, True) == (report.sent, report.withheld, report.complete)


def test_following_again_goes_on_where_tensorboard_stands(tmp_path: Path) -> None:
    """Stopped within the second attempt and begun again: the rest is told, in a file of its own (report a6).

    The file of the second attempt begins with a session start at its first step.
    """
    stop, place = threading.Event(), tmp_path / "tb"

    def go_on(number: int, step: int) -> None:
        wanted = {(1, 3): 5, (1, 9): 8}.get((number, step))
        until(lambda: wanted is None or wanted in {step for step, _, _ in event_rows(place, "v")})
        if (number, step) == (1, 9):
            stop.set()
            until(lambda: not following.is_alive())

    backend = open_backend("tensorboard", path=place)
    with meanwhile(follow, tmp_path / "run", [backend], **FAST, stop=stop) as following:
        live(tmp_path / "run", [range(6), range(3, 10)], go_on)
    (report,) = follow(tmp_path / "run", [open_backend("tensorboard", path=place)], **FAST)
    assert (1, 9) == (report.sent, report.skipped)
    files = [tensorboard_events(file) for file in sorted(place.glob("*tfevents*"))]
    assert [3, 9] == [event.step for file in files for event in file if event.HasField("session_log")]
    assert [float(s) if s < 3 else 100.0 + s for s in range(10)] == [
        row["v"] for _, row, _ in tensorboard_rows(place)
    ]


def watched(backend: Any) -> set[int]:
    """Return the steps that a backend is told, as they come."""
    told, log = set[int](), backend.log

    def noting(step: int, metrics: Mapping[str, float], time: float) -> None:
        log(step, metrics, time)
        told.add(step)

    backend.log = noting
    return told


@pytest.mark.long
@pytest.mark.parametrize("trouble", [{"status": 500, "times": 2}, {"seconds": 1.5, "times": 1}])
@pytest.mark.parametrize("target", STAND_INS, indirect=True)
def test_a_service_in_trouble_is_followed_to(target: Target, tmp_path: Path, trouble: dict[str, Any]) -> None:
    """Uploads that fail or are slow, a crash and a resume: each step once, the rest counted (a5, b3)."""
    assert target.server is not None
    target.server.trouble.append(Trouble(STAND_INS[target.name], **trouble))
    backend = target.make()
    told = watched(backend)

    def go_on(number: int, step: int) -> None:
        wanted = {(1, 3): 5, (1, 9): 8}.get((number, step))
        until(lambda: wanted is None or wanted in told)

    with meanwhile(live, tmp_path / "run", [range(6), range(3, 10)], go_on):
        (report,) = follow(tmp_path / "run", [backend], **FAST)
    assert (10, 3, "3-5", False) == (report.sent, report.withheld, report.withheld_steps, report.complete)
    assert not any(rule.times > 0 for rule in target.server.trouble)
    with open_run(tmp_path / "run", attempts="all") as session:
        rows = session.metrics().to_pylist()
    at = {(row["step"], row["value"]): row["time"].timestamp() for row in rows}
    expected = [(step, float(step if step < 6 else 100 + step)) for step in range(10)]
    assert [(step, {"v": v}, at[step, v]) for step, v in expected] == target.rows()
    (report,) = follow(tmp_path / "run", [target.make()], **FAST)
    assert (0, 7, "3-5") == (report.sent, report.skipped, report.withheld_steps)
    assert 10 == len(target.rows())


@pytest.mark.long
@pytest.mark.parametrize("lost", ["deleted", "down"])
@pytest.mark.parametrize("target", STAND_INS, indirect=True)
def test_a_service_that_is_lost_ends_its_own_part_alone(target: Target, tmp_path: Path, lost: str) -> None:
    """A run that is deleted, a server that stays down: an error, in time; the others are told (b4, b9)."""
    assert target.server is not None
    backend, mine = target.make(timeout=PATIENCE), MemoryBackend(strict=True)
    told = watched(backend)

    def go_on(number: int, step: int) -> None:
        del number
        until(lambda: step != 5 or {1, 2} & told)
        if step == 5 and lost == "deleted":
            target.delete()
        elif step == 5:
            target.server.trouble.append(Trouble("", 500))  # pyright: ignore[reportOptionalMemberAccess]

    kind = BackendGoneError if lost == "deleted" else BackendError
    with (
        meanwhile(live, tmp_path / "run", [range(10)], go_on),
        pytest.raises(kind, match="expected") as caught,
    ):
        follow(tmp_path / "run", [backend, mine], **FAST)
    assert kind is caught.type
    assert list(range(10)) == [step for step, _, _ in mine.rows]


class Looked(threading.Event):
    """A stop signal that says when it is waited for: all there was at the last look is handed on then."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_for.set()
        return super().wait(timeout)


class Interrupting(Lasting):
    """Presses Ctrl-C at a step, once the run was looked at."""

    def __init__(self, rows: Rows, looked: Looked) -> None:
        super().__init__(rows)
        self.looked = looked

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        super().log(step, metrics, time)
        if step == 7:
            assert self.looked.waited_for.wait(60)
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let Ctrl-C be Python's own, as in a terminal: what runs tests in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_it_with_everything_told_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C finishes what was read and returns the reports; following again tells only the rest."""
    run = build(tmp_path / "run", (range(12), value))  # not finished: without the interrupt it would wait
    rows: Rows = []
    looked = Looked()
    (report,) = follow(run, [Interrupting(rows, looked)], **FAST, stop=looked)
    assert "interrupted: what was handed over is told" in caplog.text
    assert (12, 0) == (report.sent, report.skipped)
    (report,) = follow(finished(run), [Lasting(rows)], **FAST)
    assert (0, 12) == (report.sent, report.skipped)
    assert [(step, value(step)) for step in range(12)] == steps(rows)


def test_a_run_that_gives_no_sign_of_life_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a dead run left is told, then it is said that nothing comes any more."""
    run = build(tmp_path / "run", (range(3), value))
    mine = MemoryBackend()
    (report,) = follow(run, [mine], **FAST | {"give_up": 0.3})
    assert (3, True) == (report.sent, report.complete)
    assert "no sign of life of the run for 0.3 s: given up" in caplog.text


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    """Without a directory nothing is opened and nothing given up; the stop signal ends the wait."""
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    mine = MemoryBackend()
    (report,) = follow(tmp_path / "run", [mine], stop=stop, **FAST)
    assert (0, None) == (report.sent, mine.run)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("made", ["nothing", "folder", "file"])
def test_what_never_becomes_a_run_is_given_up(tmp_path: Path, made: str) -> None:
    """A path where no run begins is waited for as long as for a sign of life; a file is none at once."""
    path = tmp_path / "path"
    if made == "folder":
        path.mkdir()
    elif made == "file":
        path.write_text("stats_logger:")
    said = "a file" if made == "file" else "expected a run within 0.2 s, got none"
    with pytest.raises(NotARunError, match=said):
        follow(path, [MemoryBackend()], **FAST | {"give_up": 60 if made == "file" else 0.2})


def test_an_evaluation_beside_the_training_takes_nothing_back(tmp_path: Path) -> None:
    """An attempt that trained nothing adds to old steps, where the target takes that (report a17)."""
    with RunBuilder(tmp_path / "run") as run:
        train = run.producer(attempt=0)
        run.attempt(0, leader=train)
        for step in range(10):
            train.tracker().scalar({"loss": step})
            run.export(train, time=step)
            train.commit(step, {"loss": float(step)}, time=step, leader=True)
        judge = run.producer("eval", attempt=1, started=20)
        run.attempt(1, leader=judge, started=20, outcome="finished")
        for step in (6, 2):
            judge.tracker("eval-rollout").scalar({"reward": step})
            run.export(judge, time=30 - step)
            judge.commit(step, {"eval/reward": float(step)}, time=30 - step, leader=True)
    mine, rows = MemoryBackend(), list[Any]()
    reports = follow(tmp_path / "run", [mine, Lasting(rows)], **FAST)
    assert [0, 0] == [report.superseded for report in reports]
    assert [(6, {"eval/reward": 6.0}), (2, {"eval/reward": 2.0})] == steps(mine.rows)[10:]
    assert list(range(10)) == [step for step, _, _ in rows]
    assert "2, 6" == reports[1].withheld_steps


def test_a_part_can_be_followed_under_other_names(tmp_path: Path) -> None:
    """Steps, keys and renaming are chosen as for replay; two metrics may not get one name (report f6)."""
    run = finished(build(tmp_path / "run", (range(10), lambda step: {"a/x": step, "a/y": step, "b": step})))
    mine = MemoryBackend()
    follow(run, [mine], since=3, until=5, keys=["a/*"], rename={"^a/": "c/"}, **FAST)
    assert [(step, {"c/x": step, "c/y": step}) for step in (3, 4, 5)] == steps(mine.rows)
    with pytest.raises(QueryError, match="got 'a/x' for 'a/x' and 'a/y'"):
        follow(run, [MemoryBackend()], rename={"y$": "x"}, **FAST)
    once = MemoryBackend()
    follow(run, [once], keys=iter(["a/*"]), rename=iter([("^a/", "c/")]), **FAST)
    assert {"c/x", "c/y"} == {name for _, found in steps(once.rows) for name in found}


def test_brackets_in_a_key_are_themselves(tmp_path: Path) -> None:
    """The key of a layer selects that layer, not one that a class of characters would mean."""
    keys = ("layers[0]/g", "layers0/g", "layers[0]/w")
    run = finished(build(tmp_path / "run", (range(2), lambda step: dict.fromkeys(keys, float(step)))))
    for selection, expected in (("layers[0]/g", keys[:1]), ("layers[0]/*", keys[::2])):
        mine = MemoryBackend()
        follow(run, [mine], keys=selection, **FAST)
        assert [(step, dict.fromkeys(expected, float(step))) for step in range(2)] == steps(mine.rows)


def test_one_backend_that_fails_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    """The others are told to the end, then the error is raised; when all fail nothing is waited for."""
    run = finished(build(tmp_path / "run", (range(5), value)))

    class Gone(MemoryBackend):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            if step == 2:
                raise BackendGoneError("run deleted")
            super().log(step, metrics, time)

    fine = MemoryBackend()
    with pytest.raises(BackendGoneError, match="run deleted"):
        follow(run, [Gone(), fine], **FAST)
    assert [(step, value(step)) for step in range(5)] == steps(fine.rows)
    endless = build(tmp_path / "endless", (range(5), value))
    with pytest.raises(BackendError, match="run deleted"):
        follow(endless, [Gone(), Gone()], **FAST | {"give_up": None})


def test_a_target_can_be_followed_to_once(tmp_path: Path) -> None:
    """Two backends of one target would tell everything twice: that is refused."""
    run = finished(build(tmp_path / "run", (range(3), value)))
    with pytest.raises(ConfigError, match="expected different targets, got tensorboard twice"):
        follow(run, [open_backend("tensorboard"), open_backend("tensorboard")], **FAST)


def test_what_was_refused_stays_refused(tmp_path: Path) -> None:
    """Followed again, a step that the target would not take is named again, and not skipped (report b13)."""
    run = build(tmp_path / "run", (range(6), lambda s: {f"k{i}": 1.0 for i in range(100 if s == 2 else 1)}))
    rows: Rows = []
    for sent, skipped in ((5, 0), (0, 5)):
        (report,) = follow(finished(run), [Lasting(rows, limit=1000)], **FAST)
        assert (sent, skipped, "2", 0, False) == (
            report.sent,
            report.skipped,
            report.refused_steps,
            report.withheld,
            report.complete,
        )


def test_a_run_without_attempts_is_known_again(tmp_path: Path) -> None:
    """What was followed of a run that claimed no attempt, replay skips, and the other way round."""
    with RunBuilder(tmp_path / "run") as run:
        leader = run.producer()
        for step in range(4):
            leader.commit(step, {"v": float(step)}, time=step, leader=True)
    rows: Rows = []
    (report,) = follow(tmp_path / "run", [Lasting(rows)], **FAST | {"give_up": 0.2})
    assert (4, 0) == (report.sent, report.skipped)
    (report,) = play(tmp_path / "run", [Lasting(rows)])
    assert (0, 4, 0) == (report.sent, report.skipped, report.withheld)
    (report,) = follow(tmp_path / "run", [Lasting(rows)], **FAST | {"give_up": 0.2})
    assert (0, 4, 0) == (report.sent, report.skipped, report.withheld)


def test_what_trackio_was_told_live_is_not_written_again(tmp_path: Path) -> None:
    """Whatever the order of a commit's keys, following and replaying write the same row (report b3)."""
    told = {"z": 1.0, "a": 2, "m": 3.0}
    live = open_backend("trackio", path=tmp_path / "t")
    with logger(tmp_path, run=tmp_path / "run", backends=[live]) as log:
        for step in range(3):
            log.commit(0, step, step, told)
    for tell in (play, follow):
        (report,) = tell(tmp_path / "run", [open_backend("trackio", path=tmp_path / "t")])
        assert (0, 3) == (report.sent, report.skipped)
    (report,) = follow(tmp_path / "run", [open_backend("trackio", path=tmp_path / "again")], **FAST)
    assert (3, 0) == (report.sent, report.skipped)


def test_a_new_run_can_be_followed_to(tmp_path: Path) -> None:
    """With new_run everything is told again, to another directory, across a resume too."""
    run = crashed(tmp_path / "run")
    for folder in ("tb", "tb-2"):
        backend = open_backend("tensorboard", path=tmp_path / "tb")
        (report,) = follow(run, [backend], new_run=folder != "tb", **FAST)
        assert (21, 0, str(tmp_path / folder)) == (report.sent, report.skipped, report.target)
        assert CRASHED == steps(tensorboard_rows(tmp_path / folder))


def test_statistics_are_told_with_their_step_while_the_run_goes_on(tmp_path: Path) -> None:
    """A step that has closed is told with the statistics of its values; a replay has nothing to add (f10)."""
    rows: Rows = []

    def train() -> None:
        with logger(tmp_path, run=tmp_path / "run") as log:
            for step in range(6):
                until(lambda step=step: step != 5 or 3 in {told for told, _, _ in rows})
                for more in (0.0, 1.0, 5.0):
                    stats_tracker.scalar(reward=step + more)
                stats = stats_tracker.export_all()
                assert log._log.writer.flush(60)  # its values, too, which are written behind a commit
                log.commit(0, step, step, stats)

    with meanwhile(train):
        (report,) = follow(
            tmp_path / "run", [Lasting(rows)], stats=["p50", "max"], rename={"^": "a/"}, **FAST
        )
    assert (6, 0, True) == (report.sent, report.partial, report.complete)
    expected = [
        {"a/reward": pytest.approx(step + 2), "a/reward/p50": step + 1.0, "a/reward/max": step + 5.0}
        for step in range(6)
    ]
    assert expected == [row for _, row, _ in rows]
    options: dict[str, Any] = {"stats": ["p50", "max"], "rename": {"^": "a/"}}
    (report,) = play(tmp_path / "run", [Lasting(rows)], **options)
    assert (0, 6) == (report.sent, report.skipped)
    play(tmp_path / "run", [fresh := MemoryBackend()], **options)
    assert fresh.rows == rows


def test_each_attempts_statistics_are_its_own(tmp_path: Path) -> None:
    """Across a resume every kind of target gets what a replay would tell, histograms too; no row twice."""
    run = finished(recorded(tmp_path / "run"))
    asked: dict[str, Any] = {"stats": ["p99", "histogram"], "keys": "a/*"}
    plain = MemoryBackend()
    trackio = open_backend("trackio", path=tmp_path / "trackio")
    reports = follow(run, [plain, open_backend("tensorboard"), trackio], **asked, **FAST)
    assert [(5, 2, 5), (5, 2, 0), (5, 2, 0)] == [(r.sent, r.superseded, r.untold) for r in reports]
    play(run, [fresh := MemoryBackend()], **asked)
    assert fresh.rows == plain.rows
    (report,) = play(run, [open_backend("trackio", path=tmp_path / "trackio")], **asked)
    assert (0, 5) == (report.sent, report.skipped)


def test_a_step_is_told_behind_those_of_attempts_before(tmp_path: Path) -> None:
    """Steps that wait for their values keep what follows waiting, of whichever attempt, and wait at once."""
    run, wait = recorded(tmp_path / "run", payload=False), 0.05
    supplement = Supplement(run, ["p99"], Selection(), Succession(run), wait)
    rows = [Row(step, {"v": 1.0}, 0.0, {step // 2: 0.0}) for step in (0, 1, 2)]
    assert [] == supplement.take(rows)
    time.sleep(2 * wait)
    assert [] == supplement.take([])  # the values are asked for, and are given more time
    time.sleep(2 * wait)
    assert [0, 1, 2] == [row.step for row in supplement.take([])]


def test_values_that_are_not_there_cost_only_their_statistics(tmp_path: Path) -> None:
    """Without a payload, or where nothing was recorded, every commit is told, and then that is an error."""
    for run, keys, message in (
        (recorded(tmp_path / "off", payload=False), None, "the payload was off or pruned"),
        (recorded(tmp_path / "none"), "n", "expected recorded values for the statistics, got none"),
    ):
        mine = MemoryBackend()
        with pytest.raises(QueryError, match=message):
            follow(finished(run), [mine], stats=["p99"], keys=keys, **FAST)
        assert list(range(5)) == [step for step, _, _ in mine.rows]
    with pytest.raises(QueryError, match=r"expected statistics of .*got 'mode'"):
        follow(run, [mine := MemoryBackend()], stats=["mode"], **FAST)
    assert None is mine.run


def test_a_late_evaluation_is_told_without_holding_up_the_training(tmp_path: Path) -> None:
    """Steps that have closed come in their order; what comes to one of them later, as it is (report a17)."""
    held = Supplement(recorded(tmp_path / "run"), ["max"], Selection(), Succession(tmp_path / "run"), 0.0)
    told = held.take([Row(step, {"n": 500}, 1.0, {0: 1.0}) for step in (1, 0)])
    assert [(0, {"n", "reward/max", "a/v/max"}), (1, {"n", "reward/max", "a/v/max"})] == [
        (row.step, set(row.metrics)) for row in told
    ]
    late = Row(0, {"eval": 1.0}, 2.0, {0: 2.0})
    assert [late] == held.take([late])


TRAINER = """
import os, signal, sys, time
from pathlib import Path
import tests.patience
from replay import StatsLogger, StatsLoggerConfig
from aggregator import stats_tracker
place, first, last, dies = Path(sys.argv[1]), *map(int, sys.argv[2:5])
with StatsLogger(StatsLoggerConfig("exp", "t0", str(place)), run=place / "run") as log:
    if first:
        log.load_state_dict({"last_commit_step": first - 1})
    for step in range(first, last):
        stats_tracker.scalar(loss=float(step + first))
        assert log.commit(0, step, step, stats_tracker.export_all())
        time.sleep(0.1)
    sys.stdin.readline()  # goes on while all of this is told
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def event_rows(place: Path, key: str = "loss") -> Rows:
    """Return all points in event files, those to discard, too."""
    files = sorted(place.glob("*tfevents*")) if place.exists() else []
    events = [event for file in files for event in tensorboard_events(file)]
    return [
        (event.step, {item.tag: round(item.simple_value, 3) for item in event.summary.value}, event.wall_time)
        for event in events
        if any(item.tag == key for item in event.summary.value)
    ]


@pytest.mark.long
def test_a_second_process_follows_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    """Started before the run, it tells every step while that goes on, and ends by itself (report b2)."""
    run, trackio = tmp_path / "run", tmp_path / "trackio" / "exp.db"
    command = [
        sys.executable, "-c", "from cli.app import main; main()", "replay", str(run), "--follow",
        "--give-up", "100", "--to", "tensorboard", "-o",
        f"tensorboard.path={tmp_path / 'tb'}", "--to", "trackio", "-o", f"trackio.path={trackio.parent}",
    ]  # fmt: skip
    readers: dict[str, Callable[[], Rows]] = {
        "tensorboard": lambda: event_rows(tmp_path / "tb"),
        "trackio": lambda: so_far(trackio),
    }
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as following:
        found: dict[Any, float] = {}  # when each step with each value was first seen at each target

        def all_told(wanted: set[Any]) -> bool:
            for name, read in readers.items():
                for step, row, _ in read():
                    found.setdefault((name, step, row["loss"]), time.time())
            return wanted <= found.keys()

        for first, last, dies in ((0, 25, 1), (15, 45, 0)):
            trainer = [sys.executable, "-c", TRAINER, str(tmp_path), *map(str, (first, last, dies))]
            wanted = {(name, step, float(step + first)) for name in readers for step in range(first, last)}
            with subprocess.Popen(trainer, cwd=ROOT, stdin=subprocess.PIPE) as training:
                until(lambda wanted=wanted: all_told(wanted), 100)
                assert training.poll() is None
            assert (-signal.SIGKILL if dies else 0) == training.returncode
        out, _ = following.communicate(timeout=120)
        assert 0 == following.returncode, out
    with open_run(run, attempts="all") as session:
        metrics = session.metrics(["loss"]).to_pylist()
    delays = {
        (name, row["step"], row["value"]): found[name, row["step"], row["value"]] - row["time"].timestamp()
        for row in metrics
        for name in readers
    }
    print(f"the slowest step was there {max(delays.values()):.2f} s after its commit")
    assert 2 * (25 + 30) == len(delays)
    expected = [(step, {"loss": float(step if step < 15 else step + 15)}) for step in range(45)]
    assert expected == steps(tensorboard_rows(tmp_path / "tb"))
    assert expected == steps(trackio_rows(trackio))
    (report,) = play(run, [MemoryBackend()])
    assert "15-24" == report.superseded_steps
    assert [] == wandb_files(run)
