"""A run that crashed and was resumed, told to every tracker: each reader finds what the log's metrics say."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from aggregator import open_run
from replay import MemoryBackend, play
from tests.replay.committed import build, logger
from tests.replay.readers import Rows
from tests.replay.targets import SERVICES, TARGETS, Target
from tests.replay.waiting import run_python


def logged(run: Path, *, single: bool) -> Rows:
    """Return the metrics of a run's log as rows; `single`: as float32, which TensorBoard keeps."""
    with open_run(run) as session:
        table = session.metrics().to_pylist()
    found: dict[int, tuple[dict[str, float], float]] = {}
    for row in table:
        value = struct.unpack("f", struct.pack("f", row["value"]))[0] if single else row["value"]
        found.setdefault(row["step"], ({}, row["time"].timestamp()))[0][row["key"]] = value
    return [(step, *found[step]) for step in sorted(found)]


@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_a_resumed_run_is_retold_as_it_is(target: Target, tmp_path: Path) -> None:
    """Names, values and times at every step equal the log's, the superseded left out (reports a1, a4, f9)."""
    run = build(
        tmp_path / "run",
        (range(16), lambda step: {"loss": step / 7, "ppo_actor/n": float(step)}),
        (range(10, 21), lambda step: {"loss": -step / 7, "ppo_actor/n": float(step), "ppo_actor/new": 1.0}),
    )
    (report,) = play(run, [target.make()])
    assert (21, 6, True) == (report.sent, report.superseded, report.complete)
    assert logged(run, single=target.name == "tensorboard") == target.rows()
    (report,) = play(run, [target.make()])
    assert (0, 21) == (report.sent, report.skipped)
    assert 21 == len(target.rows())


@pytest.mark.parametrize("target", ["tensorboard", "trackio"], indirect=True)
def test_a_resumed_run_is_right_live(target: Target, tmp_path: Path) -> None:
    """Targets that can go back show the newer of two attempts at every step (reports a1, a4, a6)."""
    for steps in (range(16), range(10, 21)):
        with logger(tmp_path, backends=[target.make()]) as live:
            live.load_state_dict({"last_commit_step": steps.start - 1})
            for step in steps:
                live.commit(0, step, step, {"loss": step / 7 + steps.start})
        assert 0 == live.status()[0].withheld
    (run,) = (path.parent for path in tmp_path.rglob("run.json"))
    assert logged(run, single=target.name == "tensorboard") == target.rows()


@pytest.mark.parametrize("target", ["wandb", "swanlab"], indirect=True)
def test_each_lifetime_has_files_of_its_own_live(target: Target, tmp_path: Path) -> None:
    """Offline files hold what their lifetime committed, at its times; a replay makes one run of it (b12)."""
    for steps in (range(16), range(10, 21)):
        with logger(tmp_path, run=tmp_path / "run", backends=[target.make()]) as live:
            live.load_state_dict({"last_commit_step": steps.start - 1})
            for step in steps:
                live.commit(0, step, step, {"loss": step / 7 + steps.start})
    with open_run(tmp_path / "run", attempts="all") as session:
        rows = (
            session.metrics(["loss"]).sort_by([("attempt", "ascending"), ("step", "ascending")]).to_pylist()
        )
    every = [(row["step"], {"loss": row["value"]}, row["time"].timestamp()) for row in rows]
    assert [every[:16], every[16:]] == target.runs()
    (report,) = play(tmp_path / "run", [target.make(path=tmp_path / "whole")])
    assert (21, 6) == (report.sent, report.superseded)


@pytest.mark.long
@pytest.mark.parametrize("target", SERVICES, indirect=True)
def test_what_a_service_cannot_take_back_is_counted(target: Target, tmp_path: Path) -> None:
    """Steps told before the crash keep their values there; how many is said, the log has all (report a5)."""
    for steps, sent, withheld in ((range(16), 16, 0), (range(10, 21), 5, 6)):
        with logger(tmp_path, backends=[target.make()]) as live:
            live.load_state_dict({"last_commit_step": steps.start - 1})
            for step in steps:
                live.commit(0, step, step, {"loss": step / 7 + steps.start})
        (status,) = live.status()
        assert (sent, withheld, 0, None) == (status.sent, status.withheld, status.failures, status.error)
    assert [(s, {"loss": s / 7 + (0 if s < 16 else 10)}) for s in range(21)] == [
        row[:2] for row in target.rows()
    ]


@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_a_run_that_was_begun_anew_is_gone_on_with(target: Target, tmp_path: Path) -> None:
    """After --new-run a later replay goes on with the new run, not with the first (report a16)."""
    for steps, new in ((range(4), False), (range(4, 4), True), (range(4, 7), False)):
        with logger(tmp_path, run=tmp_path / "run") as live:
            for step in steps:
                live.commit(0, step, step, {"loss": step / 4, "a": 1.0})
        (report,) = play(tmp_path / "run", [target.make()], new_run=new)
        assert (True, 0) == (report.complete, report.withheld)
    told = logged(tmp_path / "run", single=False)
    assert [told[:4], told] == target.runs()
    for dry_run in (True, False):
        (report,) = play(tmp_path / "run", [target.make()], dry_run=dry_run)
        assert (0, 7) == (report.sent, report.skipped)
    assert [told[:4], told] == target.runs()


@pytest.mark.long
@pytest.mark.parametrize("policy", ["new_run", "rewrite"])
@pytest.mark.parametrize("target", SERVICES, indirect=True)
def test_a_resumed_process_goes_on_with_the_run_that_was_begun_anew(
    target: Target, tmp_path: Path, policy: str
) -> None:
    """Live and in replay: what the new run and the one before it hold is all there is to tell (a5, a16)."""
    for steps in (range(6), range(3, 8), range(8, 10)):
        with logger(tmp_path, run=tmp_path / "run", backends=[target.make()], on_rewind=policy) as live:
            live.load_state_dict({"last_commit_step": steps.start - 1})
            for step in steps:
                live.commit(0, step, step, {"v": step / 2 + steps.start})
        assert (0, 0) == (live.status()[0].withheld, live.status()[0].failures)
    told = logged(tmp_path / "run", single=False)
    first, second = target.runs()
    assert [(step, {"v": step / 2}) for step in range(6)] == [row[:2] for row in first]
    assert told[3 if policy == "new_run" else 0 :] == second
    (report,) = play(tmp_path / "run", [target.make()])
    assert (0, 10, 0, True) == (report.sent, report.skipped, report.withheld, report.complete)
    assert [first, second] == target.runs()


MONITOR = """
import sys
import eventlog
from aggregator import stats_tracker
eventlog.start(sys.argv[1], role="gpu")
for point in range(1000):
    stats_tracker.get("gpu").scalar(util=float(point))
eventlog.stop()
"""


def test_a_monitor_that_records_does_not_move_the_trainings_step(tmp_path: Path) -> None:
    """Its thousand points, beside ten steps, lie in the log; a strict target is told the training's (a11)."""
    run, target = tmp_path / "run", MemoryBackend(strict=True)
    with logger(tmp_path, run=run) as log:
        for step in range(20):
            log.commit(0, step, step, {"loss": float(step)})
            if step == 9:
                done = run_python(MONITOR, run)
                assert (0, "") == (done.returncode, done.stderr)
                (report,) = play(run, [target])
                assert (10, True) == (report.sent, report.complete)
    (report,) = play(run, [target])
    assert (10, 10, True) == (report.sent, report.skipped, report.complete)
    assert [(step, {"loss": float(step)}) for step in range(20)] == [row[:2] for row in target.rows]
    with open_run(run) as session:
        found = session.sql("select count(*) as points from scalars where key = 'gpu/util'")
    assert [{"points": 1000}] == found.to_pylist()
