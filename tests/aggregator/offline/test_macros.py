"""Statistics in plain SQL, against the same questions in Python and against numpy."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from aggregator import open_run
from aggregator.offline import unpacking
from eventlog import ReduceType, Spread, errors
from tests.runs import RunBuilder, two_attempts


def commit(run, ranks, step):
    stats = run.export(ranks, time=10 * step)
    for producer in ranks:
        leads = producer is ranks[0]
        producer.commit(step, stats if leads else (), time=10 * step + 5, leader=leads)


@pytest.fixture
def trained(run):
    """Two data-parallel ranks and their tensor-parallel copies, three steps; odd values at the last two."""
    rng = np.random.default_rng(3)
    ranks = [run.producer("actor", rank, world="w", world_size=4) for rank in range(4)]
    made = {}
    for step in range(3):
        x = rng.normal(size=(2, 3, 4))
        if step:
            x[0, 0, 0] = [math.inf, math.nan][step - 1]
        mask = rng.random((2, 3, 4)) < 0.8
        mask[0, 0, 0] = True
        for producer in ranks:
            half = producer.rank % 2
            producer.tracker().denominator({"m": mask[half]})
            producer.tracker().stat("m", {"x": x[half]})
            producer.tracker().counter({"c": 1 + producer.rank})
        made[step] = [x[half][mask[half]] for half in range(2)]
        stats = run.export(ranks[:2], time=10 * step)
        run.export(ranks[2:], time=10 * step)
        for producer in ranks:
            leads = producer.rank == 0
            producer.commit(step, stats if leads else (), time=10 * step + 5, leader=leads)
    return run.open(), made


def rows(session, sql):
    return [tuple(row.values()) for row in session.sql(sql).to_pylist()]


def test_percentile_is_the_session_s(trained):
    """It pools what counts, copies once, and is NaN where a value is."""
    session, made = trained
    found = rows(session, "from percentile('x', 0.99)")
    want = session.percentiles("x", 0.99).to_pylist()
    assert [(r["step"], r["count"], 0) for r in want] == [(step, *counted) for step, _, *counted in found]
    assert [r["p99"] for r in want[:2]] == [row[1] for row in found[:2]]
    assert found[0][1] == pytest.approx(np.quantile(np.concatenate(made[0]), 0.99), rel=1e-12)
    assert math.isnan(found[2][1])
    assert [found[1]] == rows(session, "select * from percentile('x', 0.99) where step = 1")


def test_by_rank_is_the_session_s(trained):
    """Every process stands for itself; sums, means and extremes mean what they mean live."""
    session, made = trained
    found = session.sql("from by_rank('x')").to_pylist()
    assert 12 == len(found)
    stats = ["count", "avg", "sum", "min", "max", "nonfinite"]
    want = session.reduce("x", stats, by=["step", "role", "rank"]).to_pylist()
    for one, other in zip(want, found, strict=True):
        for name, value in one.items():
            assert repr(value) == repr(other[name]), (name, one, other)
    assert math.inf == found[4]["max"]
    assert math.isnan(found[8]["min"])
    assert found[0]["sum"] == pytest.approx(made[0][0].sum(), rel=1e-12)
    assert (1, 1.0, None) == tuple(
        session.sql("from by_rank('c')").to_pylist()[0][name] for name in ("count", "avg", "min")
    )


def test_by_sequence_is_the_session_s(trained):
    """A row for each sequence that counts."""
    session, _ = trained
    found = session.sql("from by_sequence('x')").to_pylist()
    want = session.reduce("x", ["count", "avg", "sum", "min", "max"], by="sequence").to_pylist()
    assert 18 == len(found)
    assert list(map(repr, want)) == list(map(repr, found))


def test_histogram_is_the_session_s(trained):
    """The same bins and counts; 50 bins where no number is given."""
    session, _ = trained
    want = session.histogram("x", 7)
    found = session.sql("select * from histogram('x', 7)")
    for name in ("left", "right", "count", "missing"):
        assert want[name].to_pylist() == found[name].to_pylist()
    assert list(range(1, 8)) == found["bin"].to_pylist()
    assert 50 == session.sql("from histogram('x')").num_rows
    assert session.histogram("c", 3)["count"].to_pylist() == [
        row[-2] for row in rows(session, "from histogram('c', 3)")
    ]


def test_macros_are_composed_with_the_rest(trained):
    """They are tables like any other."""
    session, _ = trained
    found = rows(
        session,
        "select p.step, value <= max from percentile('x', 0.5) p join "
        "(select step, max(max) as max from by_rank('x') group by step) r using (step) where p.step = 0",
    )
    assert [(0, True)] == found


def test_macros_have_a_run_column_for_several_runs(run, tmp_path):
    """With several runs each row says which it is of; histograms share their bins."""
    with RunBuilder(tmp_path / "other") as other:
        for one, value in ((run, 1.0), (other, 9.0)):
            leader = one.producer()
            leader.tracker().scalar({"x": value})
            commit(one, [leader], 0)
    session = run.open(tmp_path / "other")
    assert [("other", 0, 9.0, 1, 0), ("run", 0, 1.0, 1, 0)] == rows(session, "from percentile('x', 0.5)")
    assert ["run", "step"] == session.sql("from by_rank('x')").column_names[:2]
    assert [("other", 2, 1), ("run", 1, 1)] == rows(
        session, "select run, bin, count from histogram('x', 2) where count > 0 order by run"
    )


def test_superseded_rows_are_left_out(run):
    """What a later attempt did again counts only when all attempts are asked for."""
    two_attempts(run)
    with open_run(run.path) as latest, open_run(run.path, attempts="all") as every:
        assert [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)] == rows(
            latest, "select step, value from percentile('x', 0.5)"
        )
        assert [0.0, 1.0, 12.0, 13.0, 14.0] == [
            row[0] for row in rows(latest, "select avg from by_rank('x')")
        ]
        assert 7 == len(rows(every, "from by_rank('x')"))
        assert 7 == sum(row[-2] for row in rows(every, "from percentile('x', 0.5)"))


def test_macros_are_documented(trained):
    """The schema lists their columns as it does a view's."""
    session, _ = trained
    listed = {row["view"]: [] for row in session.schema().to_pylist()}
    for row in session.schema().to_pylist():
        listed[row["view"]].append(row["column"])
    for view, columns in listed.items():
        if "(" in view:
            call = view.replace("'key'", "'x'")
            assert session.sql(f"from {call}").column_names == columns


def test_unknown_keys_and_quantiles_are_refused(trained):
    """A key nobody recorded is an error, not an empty answer; so is a percentile beyond 1."""
    session, _ = trained
    for call in ("percentile('y', 0.5)", "histogram('y', 5)", "by_rank('y')", "by_sequence('y')"):
        with pytest.raises(errors.QueryError, match="expected a recorded key, got 'y'"):
            session.sql(f"from {call}")
    with pytest.raises(errors.QueryError, match=r"expected percentiles from 0 to 1, got 99"):
        session.sql("from percentile('x', 99)")
    with pytest.raises(errors.QueryError, match="expected at least one bin, got 0"):
        session.sql("from histogram('x', 0)")


def test_bins_between_unknown_ends():
    """Where no value is finite there are bins all the same."""
    none, bins = pa.chunked_array([pa.array([None], pa.float64())]), pa.chunked_array([[2]])
    assert [[0.0, 0.5, 1.0]] == unpacking.edges(none, none, bins).to_pylist()
    nothing = pa.chunked_array([pa.array([None], pa.list_(pa.float64()))])
    assert [[0, 0]] == unpacking.counts(nothing, none, none, bins).to_pylist()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("histogram('y', 0)", "expected a recorded key, got 'y'"),
        ("percentile('y', 2)", "expected a recorded key, got 'y'"),
        ("histogram('m', 0)", "expected a key with values, got the mask 'm'"),
        ("percentile('m', 2)", "expected a key with values, got the mask 'm'"),
        ("percentile(null, 0.5)", "expected a recorded key, got null"),
        ("histogram(null, 5)", "expected a recorded key, got null"),
        ("by_sequence(null)", "expected a recorded key, got null"),
        ("by_rank(null)", "expected a recorded key, got null"),
        ("by_sequence('c')", "expected a key recorded under a mask, which has sequences, got 'c'"),
        ("histogram('x', null)", "expected at least one bin, got None"),
        ("percentile('x', null)", "expected percentiles from 0 to 1, got None"),
    ],
)
def test_of_two_errors_the_key_s_comes_first(trained, call, said):
    """What is wrong with the key is said, whatever else is wrong and whatever DuckDB works out first."""
    session, _ = trained
    for _ in range(20):
        with pytest.raises(errors.QueryError, match=said):
            session.sql(f"from {call}")


def test_shares_are_counted_as_their_number_is(run):
    """Parts of one number on several ranks are summed, and are as many numbers as each rank holds parts."""
    ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
    for step in range(2):
        for producer in ranks:
            producer.tracker().declare(["x", "s"], Spread.SHARES)
            producer.tracker().denominator({"n": np.ones(2, bool)})
            producer.tracker().stat(
                "n", {"x": np.array([1.0, 2.0]) + producer.rank}, reduce_type=ReduceType.AVG
            )
            producer.tracker().scalar({"s": 0.5 + producer.rank + step})
        commit(run, ranks, step)
    session = run.open()
    metrics = {(row["step"], row["key"]): row["value"] for row in session.metrics().to_pylist()}
    for key in "xs":
        found = session.reduce(key, ["avg", "sum", "count"]).to_pylist()
        assert [metrics[step, key] for step in range(2)] == [row["avg"] for row in found]
        (whole,) = session.reduce(key, ["avg", "sum", "count"], by=[]).to_pylist()
        assert whole == {
            "avg": whole["sum"] / whole["count"],
            "sum": sum(r["sum"] for r in found),
            "count": sum(r["count"] for r in found),
        }
        beside = session.reduce([key, "n"], ["avg", "max", "std", "median"]).to_pylist()
        assert {(key, True), ("n", False)} == {
            (row["key"], row["max"] is row["std"] is row["median"] is None) for row in beside
        }
    assert [2, 2] == session.reduce("x", "count")["count"].to_pylist()
    assert [(0, 1.5), (1, 2.5)] == [
        (r["rank"], r["avg"]) for r in session.reduce("x", ["avg", "max"], by="rank").to_pylist()
    ]


@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.reduce("s", ["avg", "max"]),
        lambda s: s.reduce("s", "std", by=[]),
        lambda s: s.reduce("s", "p99"),
        lambda s: s.percentiles("s", 0.5),
        lambda s: s.histogram("s", 5),
        lambda s: s.histogram("*", "log"),
        lambda s: s.correlation("s", "s"),
        lambda s: s.sql("from percentile('s', 0.5)"),
        lambda s: s.sql("from histogram('s', 5)"),
    ],
    ids=range(9),
)
def test_shares_have_no_extremes_and_quantiles(run, ask):
    """What parts of numbers say nothing of is refused, pooled in any way."""
    leader = run.producer()
    leader.tracker().declare(["s"], Spread.SHARES)
    leader.tracker().scalar({"s": 1.0, "t": 2.0})
    commit(run, [leader], 0)
    with pytest.raises(errors.UnansweredError, match="whose values are shares of one number"):
        ask(run.open())


def test_sequences_packed_in_few_elements_are_no_samples(run):
    """A value belongs to a sample where each element is one, not where as many lie packed in them."""
    leader = run.producer()
    tracker = leader.tracker()
    ids = {"sample_ids": ["a", "b"]}
    tracker.denominator({"packed": np.ones(2, bool)}, about={"cu_seqlens": np.array([0, 2, 2]), **ids})
    tracker.stat("packed", {"p": np.array([1.0, 5.0])})
    tracker.denominator({"single": np.ones(2, bool)}, about={"cu_seqlens": np.array([0, 1, 2]), **ids})
    tracker.stat("single", {"s": np.array([1.0, 5.0])})
    tracker.denominator({"flat": np.array([True, False])}, about=ids)
    tracker.stat("flat", {"f": np.array([1.0, 5.0])})
    tracker.denominator({"deep": np.array([[False], [True]])}, about=ids)
    tracker.stat("deep", {"d": np.array([[1.0], [5.0]])})
    commit(run, [leader], 0)
    found = rows(run.open(), "select key, sample_id, value from samples order by all")
    assert [("d", "b", 5.0), ("f", "a", 1.0), ("s", "a", 1.0), ("s", "b", 5.0)] == found


def test_histograms_of_nothing_finite(run):
    """Scalars that are infinite or NaN, and masks that select nothing, leave the bins empty."""
    leader = run.producer()
    leader.tracker().scalar({"i": -math.inf, "s": math.nan})
    leader.tracker().denominator({"m": np.zeros(3, bool)})
    leader.tracker().stat("m", {"x": np.ones(3)})
    commit(run, [leader], 0)
    session = run.open()
    for key in "isx":
        assert [0, 0] == session.sql(f"from histogram('{key}', 2)")["count"].to_pylist()


def test_null_is_not_nan(run):
    """Not logged is null, logged as NaN is NaN, in long and wide tables and in SQL (report f7)."""
    leader = run.producer()
    for step, value in enumerate([1.0, math.nan, None]):
        leader.tracker().scalar({"other": 0.0} | ({} if value is None else {"x": value}))
        commit(run, [leader], step)
    session = run.open()
    wide = session.metrics(["x", "other"], wide=True)["x"].to_pylist()
    assert (1.0, None) == (wide[0], wide[2])
    assert math.isnan(wide[1])
    sql = """
        select o.step, x.value is null as absent, isnan(x.value) as odd
        from metrics o left join metrics x on o.step = x.step and x.key = 'x' where o.key = 'other' order by 1
    """
    assert [(0, False, False), (1, False, True), (2, True, None)] == rows(session, sql)


@pytest.mark.parametrize("call", ["percentile('m', 0.5)", "histogram('m', 3)", "by_sequence('m')"])
def test_a_mask_has_no_values(trained, call):
    """What reads values refuses a mask, and says what to ask instead."""
    session, _ = trained
    with pytest.raises(
        errors.QueryError, match=r"^expected a key with values, got the mask 'm': see by_rank"
    ):
        session.sql(f"from {call}")


def test_values_that_are_not_kept_are_counted(run):
    """A step whose payload is gone is there, and says how many values are missing, as in Python."""
    ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
    for step in range(2):
        for producer in ranks[: 2 - step]:
            producer.tracker().denominator({"m": np.ones((2, 3), bool)})
            producer.tracker().stat("m", {"x": np.arange(6.0).reshape(2, 3) + 10 * producer.rank})
        commit(run, ranks, step)
    run.close()
    (file,) = (run.path / "events" / "actor-0").glob("*.payload.*.arrows")
    file.unlink()
    with open_run(run.path) as session:
        found = rows(session, "from percentile('x', 0.5)")
        assert [(0, 12.5, 6, 6), (1, None, 0, 6)] == found
        assert found == [tuple(row.values()) for row in session.percentiles("x", 0.5).to_pylist()]
        counted = rows(session, "select * exclude (bin) from histogram('x', 3)")
        assert {12} == {missing for *_, missing in counted}
        want = session.histogram("x", 3).to_pylist()
        names = ("left", "right", "count", "missing")
        assert counted == [tuple(row[name] for name in names) for row in want]
        sequences = session.sql("from by_sequence('x')").to_pylist()
        assert [(0, 0, None, 6), (0, 1, 0, 0), (0, 1, 1, 0), (1, 0, None, 6)] == [
            tuple(row[name] for name in ("step", "rank", "sequence", "missing")) for row in sequences
        ]
        want = session.reduce("x", ["count", "avg", "sum", "min", "max"], by="sequence").to_pylist()
        assert list(map(repr, want)) == list(map(repr, sequences))


def test_what_an_export_without_reset_covers_again_counts_for_both_steps(run):
    """SQL says of a step what Python says of it, and what its export said."""
    leader = run.producer()
    for step in range(3):
        leader.tracker().denominator({"m": np.ones(4, bool)})
        leader.tracker().stat("m", {"x": np.arange(4.0) + 100 * step})
        leader.commit(
            step, run.export(leader, time=10 * step, reset=step != 1), time=10 * step + 5, leader=True
        )
    session = run.open()
    want = [(0, 1.5, 4, 0), (1, 101.5, 4, 0), (2, 151.5, 8, 0)]
    assert want == [tuple(r.values()) for r in session.percentiles("x", 0.5).to_pylist()]
    assert want == rows(session, "from percentile('x', 0.5)")
    each = session.reduce("x", "avg", by="sequence").to_pylist()
    assert [(r["step"], r["window"], r["sequence"], r["avg"]) for r in each] == rows(
        session, "select step, \"window\", sequence, avg from by_sequence('x')"
    )
    once = session.histogram("x", 2)["count"].to_pylist()
    assert (12, once) == (sum(once), [n for (n,) in rows(session, "select count from histogram('x', 2)")])
