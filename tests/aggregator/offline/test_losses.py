"""What of a run never reached its log, as a session says it."""

from __future__ import annotations

import pytest

from aggregator import open_run
from eventlog import losses
from eventlog.schema import Stream

WORDS = {"records": Stream.RECORDS, "payload": Stream.PAYLOAD, "commits": Stream.COMMITS}


def lose(producer, stream, number, step=None):
    """Let a process note a loss of a window, or of a commit."""
    producer.writer.put(stream, lambda: 1 / 0, window=number, nbytes=1, step=step)


def train(run, attempt, steps, lost=(), **claim):
    """Record an attempt of one process; of the `lost` steps it notes the loss of all that it wrote."""
    leader = run.producer("actor", attempt=attempt, started=1000 * attempt)
    run.attempt(attempt, leader=leader, started=1000 * attempt, **claim)
    for step in steps:
        time = 1000 * attempt + 10 * step
        leader.tracker().scalar({"x": float(step)})
        if step in lost:
            leader.drain(time=time, lose=True)
            for stream in WORDS.values():
                lose(leader, stream, leader.commits if stream is Stream.COMMITS else leader.windows - 1, step)
            leader.commits, leader.committed = leader.commits + 1, leader.windows
        else:
            leader.commit(step, run.export(leader, time=time), time=time + 5, leader=True)


def test_losses_are_those_of_steps_that_count(run):
    """What a later attempt told again is lost no more."""
    train(run, 0, range(6), lost=(1, 4))
    train(run, 1, range(3, 8), lost=(6,), resume_step=3)
    session = run.open()
    assert ["actor-0: records of steps 1, 6; values of steps 1, 6; commits of steps 1, 6"] == losses.lines(
        session.losses
    )
    assert {1, 4, 6} == {row["step"] for row in session.info()["losses"]}


@pytest.mark.parametrize(
    ("streams", "bounds", "steps"),
    [
        (["commits"], (), [1, 3]),
        (["commits"], (2,), [3]),
        (["records", "commits"], (None, 2), [1, 1]),
        (["payload"], (), [1, 3]),
    ],
)
def test_an_answer_lacks_what_is_of_its_streams_and_steps(run, streams, bounds, steps):
    """Values that are lost are counted where they are asked for; a lost commit is of no other step."""
    train(run, 0, range(5), lost=(1, 3))
    found = losses.concerning(run.open().losses, [WORDS[name] for name in streams], *bounds)
    assert steps == sorted(loss.step for _, loss in found)
    assert len(steps) == losses.number(found)


def test_a_loss_without_a_step_has_that_of_its_window(run):
    """The commit of its process, or an export, says it."""
    leader = run.producer("actor")
    leader.tracker().scalar({"x": 1.0})
    leader.drain(time=1, lose=True)
    lose(leader, Stream.RECORDS, 0)
    leader.commit(7, time=2, leader=True)
    run.close()
    with open_run(run.path) as session:
        assert ["actor-0: records of steps 7"] == losses.lines(session.losses)
