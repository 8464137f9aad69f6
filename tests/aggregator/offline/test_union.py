"""Several runs as one: their steps moved, the overlap decided as after a restart, the inputs untouched."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from aggregator import merge_runs, open_run
from eventlog import errors
from tests.runs import RunBuilder
from tests.storage import flip


def uid(*parts):
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def record(path, steps, gain, lives=1):
    """Record a run of two ranks; rank r's x at step s is gain * s + r, per token and as a scalar."""
    with RunBuilder(path) as run:
        for attempt in range(lives):
            place = {"world": f"w{path.name}{attempt}", "world_size": 2, "attempt": attempt}
            ranks = [
                run.producer("actor", r, started=1000 * attempt, session=uid(path.name, attempt, r), **place)
                for r in range(2)
            ]
            begin = steps // 2 if attempt else 0
            resumed = begin if attempt else None
            run.attempt(
                attempt, leader=ranks[0], started=1000 * attempt, resume_step=resumed, outcome="finished"
            )
            for step in range(begin, steps):
                for producer in ranks:
                    producer.tracker().denominator({"m": np.ones(3, bool)})
                    producer.tracker().stat("m", {"x": np.full(3, gain * step + producer.rank)})
                    producer.tracker().scalar({"lr": gain})
                at = 1000 * attempt + 10 * step
                stats = run.export(ranks, time=at)
                ranks[0].commit(step, stats, time=at + 5, epoch=1, leader=True)
                ranks[1].commit(step, time=at + 5)
    return path


def digests(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def metric(session, key="x/avg"):
    table = session.metrics(key)
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_two_runs_that_are_one_training(tmp_path):
    """Run A at steps 0..299 and run B at 0..99 with an offset of 300 are steps 0..399 (report f8)."""
    a, b = record(tmp_path / "a", 300, 1.0), record(tmp_path / "b", 100, 2.0)
    before = digests(a), digests(b)
    made = merge_runs(tmp_path / "out", a, b, offsets=[300])
    assert [({0: 0}, 0), ({0: 1}, 300)] == [(one.attempts, one.offset) for one in made]
    assert before == (digests(a), digests(b))
    with open_run(tmp_path / "out") as session:
        found = metric(session)
        assert list(range(400)) == list(found)
        assert [s + 0.5 for s in range(300)] + [2.0 * s + 0.5 for s in range(100)] == list(found.values())
        again = session.metrics("x/avg", source="recomputed")
        assert list(found.values()) == again["value"].to_pylist()
        assert {False} == set(again["differs"].to_pylist())
        assert (350, 100.5) == (
            session.percentiles("x", 0.5, since=350, until=350)["step"][0].as_py(),
            session.percentiles("x", 0.5, since=350, until=350)["p50"][0].as_py(),
        )
        assert [] == session.problems


def test_overlapping_steps_are_the_later_run_s(tmp_path):
    """The later run owns the steps from where it begins; what it replaced is still there."""
    a, b = record(tmp_path / "a", 10, 1.0), record(tmp_path / "b", 4, 2.0)
    merge_runs(tmp_path / "out", a, b, offsets=[7])
    with open_run(tmp_path / "out") as latest, open_run(tmp_path / "out", attempts="all") as every:
        assert [s + 0.5 for s in range(7)] + [2.0 * s + 0.5 for s in range(4)] == list(
            metric(latest).values()
        )
        assert 14 == every.metrics("x/avg").num_rows
        info = latest.info()
        assert [(0, 0, 3), (1, 7, 0)] == [
            (row["attempt"], row["owned_from"], row["superseded_steps"]) for row in info["attempts"]
        ]


def test_restarted_runs_keep_their_attempts(tmp_path):
    """Attempts follow each other; times, hosts and outcomes stay what they were."""
    a, b = record(tmp_path / "a", 6, 1.0, lives=2), record(tmp_path / "b", 4, 2.0, lives=2)
    merge_runs(tmp_path / "out", a, b, offsets=[0, 6])
    with open_run(tmp_path / "out") as session, open_run(a) as first:
        assert list(range(10)) == list(metric(session))
        rows = session.sql("select attempt, owned_from, outcome, started from attempts").to_pylist()
        assert [(0, 0), (1, 3), (2, 6), (3, 8)] == [(row["attempt"], row["owned_from"]) for row in rows]
        assert rows[:2] == first.sql("select attempt, owned_from, outcome, started from attempts").to_pylist()
        times = "select step, key, value, time, attempt from metrics where step < 6 order by step, key"
        assert first.sql(times).equals(session.sql(times))
        seen = "select session, started, last_seen, ended, windows from producers order by session"
        assert {str(r) for r in first.sql(seen).to_pylist()} <= {
            str(r) for r in session.sql(seen).to_pylist()
        }


def test_damage_stays_damage(tmp_path):
    """What cannot be read of an input cannot be read of the new run, and is told there too."""
    a, b = record(tmp_path / "a", 5, 1.0), record(tmp_path / "b", 5, 2.0)
    segment = next((a / "events" / "actor-1").glob("*.records.0000.arrows"))
    flip(segment, segment.stat().st_size // 2)
    with open_run(a) as session:
        problems = len(session.problems)
        incomplete = session.info()["incomplete_windows"]
    merge_runs(tmp_path / "out", a, b, offsets=[5])
    with open_run(tmp_path / "out") as session:
        assert problems == len(session.problems) > 0
        assert incomplete == session.info()["incomplete_windows"] > 0
        assert list(range(10)) == list(metric(session))


@pytest.mark.parametrize("offset", [-3, -(1 << 70), 1 << 63, "3", 1.5, True])
def test_no_step_is_moved_to_where_there_is_none(tmp_path, offset):
    """An offset that takes steps below 0 or beyond 64 bits is refused before anything is written."""
    for name in "ab":
        with RunBuilder(tmp_path / name) as run:
            leader = run.producer(session=name * 32)
            for step in (2, 3):
                leader.tracker().scalar({"x": 1.0})
                leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
    a, b = tmp_path / "a", tmp_path / "b"
    with pytest.raises(errors.QueryError, match=r"expected (an offset that leaves|a list of offsets)"):
        merge_runs(tmp_path / "out", a, b, offsets=[0, offset])
    assert ["a", "b"] == sorted(path.name for path in tmp_path.iterdir())
    merge_runs(tmp_path / "out", a, b, offsets=[0, -2])
    with open_run(tmp_path / "out") as session:
        assert [0, 1] == session.metrics("x")["step"].to_pylist()


@pytest.mark.parametrize("offsets", [5, "12", {1: 2}])
def test_offsets_are_a_list(tmp_path, offsets):
    """What is no list of steps is told, wherever runs are put together."""
    for name in "ab":
        RunBuilder(tmp_path / name).close()
    a, b = tmp_path / "a", tmp_path / "b"
    with pytest.raises(errors.QueryError, match="expected a list of offsets in steps, got "):
        merge_runs(tmp_path / "out", a, b, offsets=offsets)
    with pytest.raises(errors.QueryError, match="expected a whole number of steps for each of 2 runs, got "):
        open_run(a, b, offsets=offsets)


def test_steps_are_whole_numbers_wherever_they_are_given(tmp_path):
    """Integers of numpy are, booleans are none: for offsets as for since, until and bins."""
    a, b = record(tmp_path / "a", 3, 1.0), record(tmp_path / "b", 2, 2.0)
    three = np.int64(3)
    merge_runs(tmp_path / "out", a, b, offsets=[three])
    for opened in (open_run(tmp_path / "out"), open_run(a, b, offsets=[np.uint8(0), three])):
        with opened as session:
            assert [3, 4] == session.metrics("x/avg", since=three, until=np.int32(4))["step"].to_pylist()
            assert 3 == session.histogram("x", three, since=three).num_rows
    with open_run(a, memory_limit=np.int64(1 << 28), engine="local", workers=np.int64(1)) as session:
        assert 3 == session.reduce("x", "median").num_rows
    for no in (True, np.True_, 1.0):
        with pytest.raises(errors.QueryError, match="expected a list of offsets in steps, got "):
            merge_runs(tmp_path / "none", a, b, offsets=[no])
        with pytest.raises(errors.QueryError, match="expected a whole number of steps for each of 2 runs"):
            open_run(a, b, offsets=[0, no])
        with open_run(a) as session, pytest.raises(errors.QueryError, match="expected since to be a step"):
            session.metrics(since=no)


def test_offsets_in_one_session(tmp_path):
    """Without writing anything, each run's steps are moved, and each row says whose it is (report f8)."""
    a, b = record(tmp_path / "a", 3, 1.0), record(tmp_path / "b", 2, 2.0)
    with open_run(a, b, offsets=[0, 3]) as session:
        rows = session.metrics("x/avg").to_pylist()
        assert [("a", 0), ("a", 1), ("a", 2), ("b", 3), ("b", 4)] == [(r["run"], r["step"]) for r in rows]
        assert [3, 4] == session.reduce("x", since=3)["step"].to_pylist()
        assert [3, 4] == session.sql("select distinct step from records where run = 'b' order by 1")[
            "step"
        ].to_pylist()
        first = session.sql("select run, min(global_step) as step from commits group by run").to_pylist()
        assert {"a": 0, "b": 3} == {row["run"]: row["step"] for row in first}
    with pytest.raises(
        errors.QueryError, match=r"expected a whole number of steps for each of 2 runs, got \[1\]"
    ):
        open_run(a, b, offsets=[1])


def test_summaries_are_of_the_whole_run(tmp_path):
    """Least, greatest and last values come from all attempts (report a13)."""
    path = tmp_path / "run"
    with RunBuilder(path) as run:
        for attempt in range(2):
            leader = run.producer("actor", 0, attempt=attempt, started=100 * attempt)
            for step in range(10 * attempt, 10 * attempt + 10):
                leader.tracker().scalar({"x": float(step)})
                run.export(leader, time=100 * attempt + step)
                leader.commit(
                    step, {"x": float(step)}, time=100 * attempt + step + 0.5, leader=True,
                    restored=9 if attempt else None,
                )  # fmt: skip
    with open_run(path) as session:
        sql = "select min(value) a, max(value) b, arg_max(value, step) c, count(*) n from metrics"
        assert [(0.0, 19.0, 19.0, 20)] == [tuple(row.values()) for row in session.sql(sql).to_pylist()]
        assert [(0.0, 19.0)] == [
            tuple(r.values()) for r in session.reduce("x", ["min", "max"], by=[]).to_pylist()
        ]


def test_merges_that_cannot_be(tmp_path):
    """One run, a full directory, a run twice, too many offsets: refused, and nothing is left."""
    a, b = record(tmp_path / "a", 2, 1.0), record(tmp_path / "b", 2, 2.0)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(errors.QueryError, match="expected two runs or more, got 1"):
        merge_runs(tmp_path / "out", a)
    with pytest.raises(
        errors.RunDirectoryError, match=r"expected a new or an empty directory, got one in use: .*b"
    ):
        merge_runs(b, a, b)
    with pytest.raises(
        errors.QueryError, match=r"expected runs of different processes, got actor-0 .* in two of them"
    ):
        merge_runs(tmp_path / "out", a, a)
    with pytest.raises(errors.QueryError, match="expected an offset for each of 2 runs, got 3"):
        merge_runs(tmp_path / "out", a, b, offsets=[1, 2, 3])
    with pytest.raises(errors.NotARunError):
        merge_runs(tmp_path / "out", a, tmp_path / "none")
    assert before == sorted(tmp_path.iterdir())
