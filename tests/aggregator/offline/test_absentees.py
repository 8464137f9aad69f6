"""Ranks that took part in an export and left nothing of it in the log."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import eventlog
from aggregator import open_run, verify
from eventlog import now_us
from tests.aggregator.offline.test_macros import commit
from tests.runs import EPOCH
from tests.storage import flip, only

STEPS = 4


def ranks_of(run, n=2, **fields):
    return [run.producer("actor", rank, world="w", world_size=n, **fields) for rank in range(n)]


def record(producer, step):
    producer.tracker().denominator({"m": np.ones(4, bool)})
    producer.tracker().stat("m", {"x": np.arange(4.0) + 100 * producer.rank + step})


def export_alone(producer, step, members, *, time=None, **fields):
    """Export a step as one of several ranks, of which the others write nothing."""
    record(producer, step)
    time = 10 * step if time is None else time
    producer.drain(time=time)
    producer.note_export(f"{producer.session}:{step}", members=members, time=time, **fields)
    producer.commit(step, time=time + 5, leader=True)


@pytest.fixture
def halved(run):
    """Write a run of two ranks, of which everything that rank 1 wrote is gone."""
    for step in range(STEPS):
        ranks = run.producers or ranks_of(run)
        for producer in ranks:
            record(producer, step)
        commit(run, ranks, step)
    run.close()
    for root in ("events", "commits"):
        shutil.rmtree(run.path / root / "actor-1")
    return run.path


def test_a_rank_of_which_nothing_is_left_is_said_once(halved):
    """A line for all steps, in `info` and `verify` too: what is merged lacks the rank."""
    said = (
        "actor-1 took part in exports of steps 0-3 and left nothing of them in the log: "
        f"{halved / 'events' / 'actor-1'}"
    )
    with open_run(halved) as session:
        assert ([said], [said]) == (session.problems, session.info()["problems"])
    found = verify(halved)
    assert (False, [(said,)]) == (found.clean, [f.problems for f in found.files if f.problems])


def test_what_a_statistic_lacks_of_a_rank_nobody_can_count(halved):
    """`missing` is null where a rank's part is not in the log, in Python and SQL alike."""
    with open_run(halved) as session:
        assert [(1.5 + step, 4, None) for step in range(STEPS)] == [
            (r["p50"], r["count"], r["missing"]) for r in session.percentiles("x", 0.5).to_pylist()
        ]
        for made in (session.histogram("x", 2), session.reduce("x", "std"), session.reduce("x", "std", ())):
            assert {None} == {*made["missing"].to_pylist()}
        for macro in ("percentile('x', 0.5)", "histogram('x', 2)"):
            assert {None} == {*session.sql(f"select missing from {macro}")["missing"].to_pylist()}


def test_a_window_that_is_noted_as_lost_is_missing_nobody_knows_how_much_of(run):
    """On the copy of a damaged run, too: of the other steps it is known that all is there."""
    ranks = ranks_of(run)
    for step in range(STEPS):
        for producer in ranks:
            record(producer, step)
        commit(run, ranks, step)
    run.close()
    file = only(run.path, "events/actor-1/*.records.0000.arrows")
    flip(file, file.stat().st_size * 5 // 8)
    copy = run.path.with_name("copy")
    assert not eventlog.recover(run.path, copy).complete
    with open_run(copy) as session:
        assert [] == session.problems
        (step,) = {loss.step for _, loss in session.losses}
        assert [None if s == step else 0 for s in range(STEPS)] == session.percentiles("x", 0.5)[
            "missing"
        ].to_pylist()


def test_ranks_that_lack_the_same_are_said_together(run):
    """A line for all ranks without a log, one for a rank that lacks other steps."""
    first, second = (run.producer("actor", rank, world="w", world_size=40) for rank in range(2))
    for step in range(60):
        export_alone(first, step, range(40))
        if step % 2:
            second.drain(time=10 * step)
            second.note_export(f"{first.session}:{step}", members=range(40), time=10 * step)
    lone, rest = sorted(run.open().problems)
    assert lone.startswith("actor-1 took part in exports of steps 0, 2, 4, 6, 8, 10, 12, 14, … and left")
    assert rest.startswith("ranks 2-39 of actor took part in exports of steps 0-59 and left nothing")


def test_what_a_later_attempt_took_back_lacks_nothing(run):
    """The last step of a killed attempt need not be whole: the next one told it again."""
    before, after = (ranks_of(run, attempt=attempt, started=1000 * attempt) for attempt in range(2))
    run.attempt(0, leader=before[0])
    run.attempt(1, leader=after[0], started=1000, resume_step=1)
    export_alone(before[0], 1, (0, 1))
    for producer in after:
        record(producer, 1)
    run.export(after, time=1010)
    after[0].commit(1, time=1015, leader=True)
    session = run.open()
    assert ([], [0]) == (session.problems, session.percentiles("x", 0.5)["missing"].to_pylist())


def test_a_rank_whose_process_lives_is_only_late(run):
    """It has not written its window yet; when it has ended without, its part is missing."""
    now = (now_us() - EPOCH) / 1e6
    log = eventlog.start(run.path, role="actor", rank=1, world_size=2)
    export_alone(run.producer("actor", 0, world="w", world_size=2), 0, (0, 1), time=now)
    run.close()
    with open_run(run.path) as session:
        assert ([], [None]) == (session.problems, session.percentiles("x", 0.5)["missing"].to_pylist())
    assert log.close()
    with open_run(run.path) as session:
        (problem,) = session.problems
    assert problem.startswith("actor-1 took part in the export of step 0 and left nothing of it in the log: ")
    eventlog.stop()
