"""Several processes of one attempt commit metrics: the leader's are the run's, the others' stand beside."""

from __future__ import annotations

import pytest

import eventlog
from aggregator import open_run
from eventlog import Log, Options
from replay import MemoryBackend, follow, play


def said(session, **options):
    """Return (step, key) → value; a key said twice at a step is an error."""
    rows = session.metrics(**options).to_pylist()
    found = {(row["step"], row["key"]): row["value"] for row in rows}
    assert len(found) == len(rows)
    return found


def life(run, attempt, steps, *, order=(0, 1, 2), claims=True, restored=None):
    """One attempt of three ranks that all commit `x`; ranks above 0 say `y` too, which rank 0 does not."""
    begun = {rank: 1000 * attempt + place for place, rank in enumerate(order)}
    ranks = [run.producer("actor", rank, attempt=attempt, started=begun[rank]) for rank in range(3)]
    if claims:
        run.attempt(attempt, leader=ranks[0], started=begun[0], outcome="finished")
    for step in steps:
        for rank in order:
            time = 1000 * attempt + 10 * step + order.index(rank)
            ranks[rank].tracker().scalar({"x": 100.0 * rank + step})
            stats = run.export(ranks[rank], time=time)
            more = {"y": float(rank)} if rank else {}
            leads = claims and not rank
            ranks[rank].commit(step, stats | more, time=time + 0.5, leader=leads, restored=restored)
    return ranks


ORDERS = pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])


@ORDERS
@pytest.mark.parametrize("claims", [True, False])
def test_the_leaders_metrics_are_the_runs(run, order, claims):
    """Whoever began last, rank 0 speaks, for what it does not say the lowest rank; nothing is superseded."""
    life(run, 0, range(3), order=order, claims=claims)
    expected = {(step, "x"): float(step) for step in range(3)}
    expected |= {(step, "x__count"): 1.0 for step in range(3)} | {(step, "y"): 1.0 for step in range(3)}
    session = run.open()
    assert expected == said(session)
    assert expected == said(run.open(attempts="all"))
    info = session.info()
    assert (9, 0, 0) == (info["metrics"], info["superseded_rows"], info["superseded_steps"])
    (attempt,) = info["attempts"]
    assert (3 if claims else 9, 3, 0) == (attempt["commits"], attempt["steps"], attempt["superseded_steps"])


@ORDERS
def test_only_a_later_attempt_supersedes(run, order):
    """Two attempts of three ranks: what the second took back is counted once, not rank by rank."""
    life(run, 0, range(6), order=order)
    life(run, 1, range(4, 8), order=order, restored=3)
    session, every = run.open(), run.open(attempts="all")
    values = {step: value for (step, key), value in said(session).items() if key == "x"}
    assert {step: float(step) for step in range(8)} == values
    steps = [(row["attempt"], row["steps"], row["superseded_steps"]) for row in session.info()["attempts"]]
    assert [(0, 4, 2), (1, 4, 0)] == steps
    rows = every.metrics(["x"]).select(["step", "attempt", "superseded"]).to_pylist()
    expected = [(step, 0, step >= 4) for step in range(6)] + [(step, 1, False) for step in range(4, 8)]
    assert sorted(expected) == sorted((row["step"], row["attempt"], row["superseded"]) for row in rows)


@ORDERS
def test_the_recomputed_value_is_held_against_the_leaders(run, order):
    """The leader's own export reproduces what it committed, and is what statistics are made of."""
    life(run, 0, range(3), order=order)
    session = run.open()
    rows = session.metrics(["x"], source="recomputed").to_pylist()
    assert [(step, float(step), float(step), False) for step in range(3)] == [
        (row["step"], row["value"], row["committed"], row["differs"]) for row in rows
    ]
    assert [0.0, 1.0, 2.0] == session.reduce("x", ["avg"], by=["step"])["avg"].to_pylist()


@ORDERS
def test_what_stands_beside_can_be_asked_for(run, order):
    """No row is gone: SQL tells which of the commits are beside the leader's."""
    life(run, 0, range(2), order=order)
    sql = "select rank, key from commits where beside and key <> 'x__count' group by all order by all"
    assert [(1, "x"), (2, "x"), (2, "y")] == [tuple(row.values()) for row in run.open().sql(sql).to_pylist()]


@ORDERS
def test_trackers_are_told_the_leaders(run, order):
    """Replay tells each key once a step, and following the run tells the same."""
    life(run, 0, range(3), order=order)
    run.close()
    expected = [(step, {"x": float(step), "y": 1.0}) for step in range(3)]
    replayed, followed = MemoryBackend(), MemoryBackend()
    (report,) = play(run.path, [replayed])
    assert (3, 0, 0, 0) == (report.sent, report.superseded, report.folded, report.withheld)
    (report,) = follow(run.path, [followed], poll=0.01, wait=0.01, give_up=5)
    assert (3, 0, 0) == (report.sent, report.superseded, report.withheld)
    for backend in (replayed, followed):
        assert expected == [(step, metrics) for step, metrics, _ in backend.rows]


def test_a_key_said_in_several_parts_is_the_leaders_in_all(run):
    """The parts of a list commit are one step: no other process adds a part to the leader's key."""
    leader, other = run.producer("actor", 0, attempt=0), run.producer("actor", 1, attempt=0, started=9)
    leader.commit(0, [{"a": 1.0}], time=1, leader=True)
    other.commit(0, [{"a": 2.0, "b": 3.0}, {"a": 4.0}], time=2)
    assert {(0, "a"): 1.0, (0, "b"): 3.0} == said(run.open())


def test_a_process_without_the_claim_adds_what_the_leader_does_not_say(run):
    """A late evaluation by another process has its own keys; the leader's value of a step stays."""
    leader, judge = run.producer("actor", 0, attempt=0), run.producer("eval", 0, attempt=0, started=99)
    for step in range(3):
        leader.commit(step, {"v": float(step)}, time=step, leader=True)
    judge.commit(1, {"eval/accuracy": 0.5, "v": 77.0}, time=200)
    session = run.open()
    assert {(0, "v"): 0.0, (1, "v"): 1.0, (2, "v"): 2.0, (1, "eval/accuracy"): 0.5} == said(session)
    assert 0 == session.info()["superseded_rows"]


@pytest.mark.parametrize("first", [0, 1])
def test_logs_of_two_ranks_write_so(tmp_path, first):
    """The same call on both ranks, the claim by rank 0: whoever is first, the values of rank 0 stand."""
    logs = {rank: Log(Options(str(tmp_path / "run"), role="actor", rank=rank)) for rank in (first, 1 - first)}
    logs[0].claim_attempt()
    for step in range(3):
        for rank, log in logs.items():
            assert log.commit(0, step, step, [{"x": 100.0 * rank + step}])
    for log in logs.values():
        log.close()
    with open_run(tmp_path / "run") as session:
        assert {(step, "x"): float(step) for step in range(3)} == said(session)
        assert (3, 0) == (session.info()["attempts"][0]["steps"], session.info()["superseded_rows"])
    assert eventlog.current() is None
