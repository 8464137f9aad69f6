"""Statistics of the values of a key, against numpy on the pooled selected values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator import open_run
from aggregator.offline.pooling import quantiles
from eventlog import errors
from tests.runs import RunBuilder, two_attempts

STATS = ["avg", "sum", "min", "max", "count", "nonfinite", "std", "var", "std_pop", "var_pop", "median"]
values = st.floats(-(2.0**40), 2.0**40, width=32) | st.sampled_from([math.nan, math.inf, -math.inf])
calls = st.lists(st.lists(st.tuples(values, st.booleans()), min_size=1, max_size=6), max_size=3)


def expected(pooled):
    """Return the statistics of selected values as numpy and IEEE say."""
    v = np.concatenate([*pooled, np.empty(0)]).astype(np.float64)
    none = None if len(v) == 0 else ...
    with np.errstate(invalid="ignore"):
        found = {
            "avg": none and v.mean(),
            "sum": v.sum(),
            "min": none and v.min(),
            "max": none and v.max(),
            "count": len(v),
            "nonfinite": np.count_nonzero(~np.isfinite(v)),
            "median": none
            and (
                np.sort(v)[(len(v) - 1) // 2 : len(v) // 2 + 1].mean() if not np.isnan(v).any() else math.nan
            ),
        }
        for name, ddof in (("var", 1), ("var_pop", 0)):
            variance = v.var(ddof=ddof) if len(v) > ddof else None
            found[name] = variance
            found[name.replace("var", "std")] = None if variance is None else math.sqrt(variance)
    return found


def same(want, got, largest):
    if want is None or got is None:
        return want is got
    if math.isnan(want) or math.isnan(got):
        return math.isnan(want) and math.isnan(got)
    return math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-9 * largest)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(calls, min_size=1, max_size=2), min_size=1, max_size=3))
def test_every_statistic_is_numpy_s(tmp_path_factory, steps):
    """On runs with masks, NaN, Inf, missing keys and a restart, by step and by step and rank (report f10)."""
    path = tmp_path_factory.mktemp("run")
    pooled = {}
    lives = [(0, step, by_rank) for step, by_rank in enumerate(steps)]
    lives += [(1, len(steps) - 1, steps[0])]  # the last step again, after a restart
    with RunBuilder(path) as run:
        worlds = [
            [
                run.producer("actor", r, world=f"w{a}", world_size=2, attempt=a, started=100 * a)
                for r in range(2)
            ]
            for a in range(2)
        ]
        for attempt, step, by_rank in lives:
            ranks = worlds[attempt]
            if attempt:
                run.attempt(1, leader=ranks[0], started=100, resume_step=step)
                pooled = {place: those for place, those in pooled.items() if place[0] != step}
            for producer, made in zip(ranks, by_rank, strict=False):
                for call in made:
                    row, mask = (np.array(part) for part in zip(*call, strict=True))
                    producer.tracker().denominator({"n": mask.astype(bool)})
                    producer.tracker().stat("n", {"x": row.astype(np.float32)})
                    pooled.setdefault((step, producer.rank), []).append(
                        row.astype(np.float32)[mask.astype(bool)]
                    )
            stats = run.export(ranks, time=100 * attempt + step)
            ranks[0].commit(step, stats, time=100 * attempt + step + 0.5, leader=True)
    if not pooled:
        return
    everything = np.concatenate([np.concatenate(v) for v in pooled.values()])
    finite = np.abs(everything[np.isfinite(everything)]).astype(np.float64)
    largest = finite.max(initial=0) ** 2 * max(1, len(finite)) if len(finite) else 0.0
    with open_run(path) as session:
        for by in (["step"], ["step", "rank"]):
            groups = {}
            for (step, rank), those in pooled.items():
                groups.setdefault((step, rank)[: len(by)], []).extend(those)
            rows = session.reduce("x", STATS, by=by).to_pylist()
            assert sorted(groups) == [tuple(row[name] for name in by) for row in rows]
            for row in rows:
                want = expected(groups[tuple(row[name] for name in by)])
                wrong = [s for s in STATS if not same(want[s], row[s], largest if s != "median" else 0)]
                assert [] == [(s, want[s], row[s]) for s in wrong]


@given(
    st.lists(st.floats(-(2.0**40), 2.0**40), max_size=30), st.lists(st.floats(0, 1), min_size=1, max_size=4)
)
def test_quantiles_are_numpy_s(found, asked):
    """Linear interpolation, to 1e-12."""
    made = quantiles(np.array(found, np.float64), asked)
    if not found:
        assert [None] * len(asked) == made
        return
    assert made == pytest.approx(np.quantile(found, asked).tolist(), rel=1e-12, abs=1e-12)


def test_quantiles_of_infinities_and_nan():
    """Infinities stand for themselves, also between neighbours; one NaN makes all of them NaN."""
    assert [-math.inf, 1.0, math.inf] == quantiles(
        np.array([-math.inf, -math.inf, 1, math.inf, math.inf]), [0.1, 0.5, 1]
    )
    assert [-math.inf, -math.inf] == quantiles(np.array([-math.inf, 0]), [0.1, 0.5])
    assert math.isnan(quantiles(np.array([-math.inf, math.inf]), [0.5])[0])
    assert all(math.isnan(q) for q in quantiles(np.array([1, math.nan]), [0, 1]))


@pytest.fixture
def session(run):
    """Two data-parallel ranks and their tensor-parallel copies, two steps, an epoch each."""
    ranks = [run.producer("actor", rank, world="w", world_size=4) for rank in range(4)]
    for step in range(2):
        for producer in ranks:
            producer.tracker().denominator({"n": np.ones(4, bool)})
            first = 10 * step + 4 * (producer.rank % 2)
            producer.tracker().stat("n", {"x": np.arange(first, first + 4, dtype=np.float32)})
        stats = run.export([ranks[0], ranks[1]], time=step)
        run.export([ranks[2], ranks[3]], time=step)
        ranks[0].commit(step, stats, time=step + 0.5, epoch=step, leader=True)
    return run.open()


def test_copies_count_once_unless_processes_are_asked_about(session):
    """By step the ranks that count are pooled, as in the metric; by rank each stands for itself."""
    assert [8, 8] == session.reduce("x", "count")["count"].to_pylist()
    assert session.reduce("x")["avg"].equals(session.metrics(["x/avg"])["value"])
    assert [4] * 8 == session.reduce("x", "count", by=["step", "rank"])["count"].to_pylist()
    assert [16] == session.reduce("x", "count", by=[])["count"].to_pylist()


def test_by_anything(session):
    """Groups come sorted, with a column for each thing they are grouped by."""
    table = session.reduce("x", ["min", "max"], by=["epoch", "role", "rank"])
    assert ["epoch", "role", "rank", "min", "max"] == table.column_names
    assert [(0, "actor", 0, 0, 3), (0, "actor", 1, 4, 7)] == [tuple(r.values()) for r in table.to_pylist()][
        :2
    ]
    assert [(0, 0, 17)] == [
        tuple(r.values()) for r in session.reduce("x", ["min", "max"], by="attempt").to_pylist()
    ]
    by_tracker = session.percentiles("x", [0.5], by=["tracker", "session"])
    assert [""] * 4 == by_tracker["tracker"].to_pylist()


def test_percentiles_have_a_column_each(session):
    """`p50` and `p99.9`, with how many values they are of."""
    table = session.percentiles("x", [0.0, 0.5, 0.999, 1])
    assert ["step", "p0", "p50", "p99.9", "p100", "count", "missing"] == table.column_names
    assert (0.0, 3.5, 6.993, 7.0, 8, 0) == pytest.approx(tuple(table.to_pylist()[0].values())[1:])


@pytest.mark.parametrize(
    "values",
    [[0.3, 0.1 + 0.2], [1e17, 1e17], [-1.7e308, 1.7e308], [0.0, 5e-324], [0.1, math.nextafter(0.1, 1)]],
    ids=str,
)
def test_any_values_have_a_histogram(run, values):
    """Nearly equal, huge and tiny values lie in bins, the same in SQL and on an engine."""
    leader = run.producer()
    for step, value in enumerate(values):
        leader.tracker().scalar({"x": value})
        leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
    session = run.open()
    found = session.histogram("x").to_pylist()
    assert 2 == sum(row["count"] for row in found)
    assert found[0]["left"] <= values[0] <= values[1] <= found[-1]["right"]
    listed = [(row["left"], row["right"], row["count"]) for row in found]
    told = session.sql("select * from histogram('x')").to_pylist()
    assert listed == [(row["left"], row["right"], row["count"]) for row in told]
    assert found == run.open(engine="local", workers=1).histogram("x").to_pylist()


def test_histograms_share_their_bins(session):
    """Equal bins from the least to the greatest value, the last one closed; counts add up."""
    table = session.histogram("x", bins=4, by="step")
    rows = table.to_pylist()
    edges = np.linspace(0, 17, 5)
    assert edges[:-1].tolist() * 2 == [row["left"] for row in rows]
    assert edges[1:].tolist() * 2 == [row["right"] for row in rows]
    for step in range(2):
        counts = [row["count"] for row in rows if row["step"] == step]
        assert np.histogram(np.arange(10 * step, 10 * step + 8), edges)[0].tolist() == counts
    assert 16 == sum(session.histogram("x")["count"].to_pylist())


def test_histograms_count_what_has_no_place(run):
    """NaN and Inf lie in no bin and are counted; a constant gets a bin around it."""
    leader = run.producer()
    leader.tracker().denominator({"n": np.ones(5, bool)})
    leader.tracker().stat("n", {"x": np.array([3, 3, math.nan, math.inf, 3])})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    (row,) = run.open().histogram("x", bins=1).to_pylist()
    assert (3, 2) == (row["count"], row["nonfinite"])
    assert row["left"] < 3 < row["right"]


def test_a_constant_does_not_deviate(run):
    """5.4 over several windows deviates by exactly 0; a single value has no sample deviation (report g14)."""
    leader = run.producer()
    for step, n in enumerate([1000, 999, 1]):
        for _ in range(n):
            leader.tracker().scalar({"x": 5.4})
        run.export(leader, time=step)
        leader.commit(step, time=step + 0.5, leader=True)
    session = run.open()
    assert [(0.0, 0.0, 0)] == [
        tuple(r.values()) for r in session.reduce("x", ["std", "var_pop"], by=[]).to_pylist()
    ]
    single = session.reduce("x", ["std", "var", "std_pop", "var_pop"]).to_pylist()[2]
    assert {"step": 2, "std": None, "var": None, "std_pop": 0.0, "var_pop": 0.0, "missing": 0} == single


def test_answers_repeat_bit_for_bit(run):
    """Sums of many values of many sizes are the same each time, and in each session (report g13)."""
    rng = np.random.default_rng(3)
    ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
    for producer in ranks:
        producer.tracker().denominator({"n": np.ones(50_000, bool)})
        producer.tracker().stat("n", {"x": rng.normal(size=50_000) * 10.0 ** rng.integers(-8, 8, 50_000)})
    ranks[0].commit(0, run.export(ranks, time=1), time=2, leader=True)
    run.close()
    found = set()
    for _ in range(5):
        with open_run(run.path) as session:
            found |= {
                repr(session.reduce("x", ["sum", "avg", "std"], by=by).to_pylist())
                for by in (["step"], ["step"])
            }
    assert 1 == len(found)


def test_an_export_without_reset_counts_once_in_all_and_in_each_step(run):
    """Grouped by step the earlier records belong to both; in all they are there once."""
    leader = run.producer()
    for step, value in enumerate([1.0, 3.0]):
        leader.tracker().scalar({"x": value})
        run.export(leader, time=step, reset=False)
        leader.commit(step, time=step + 0.5, leader=True)
    session = run.open()
    assert [(0, 1, 1.0), (1, 2, 2.0)] == [
        tuple(r.values()) for r in session.reduce("x", ["count", "avg"]).to_pylist()
    ]
    assert [(2, 2.0)] == [tuple(r.values()) for r in session.reduce("x", ["count", "avg"], by=[]).to_pylist()]
    assert [1.0, 2.0] == session.percentiles("x", 0.5)["p50"].to_pylist()


def test_later_attempts_win_here_too(run):
    """Superseded records are pooled only when all attempts are asked for."""
    two_attempts(run)
    with open_run(run.path) as latest, open_run(run.path, attempts="all") as every:
        assert [0, 1, 12, 13, 14] == latest.reduce("x")["avg"].to_pylist()
        assert [0, 1, 12, 13, 14] == latest.reduce("x", by=["step", "rank"])["avg"].to_pylist()
        assert [4, 3] == every.reduce("x", "count", by="attempt")["count"].to_pylist()


def test_several_runs_are_kept_apart(run, tmp_path):
    """A run never mixes with another; both share the bins of a histogram."""
    with RunBuilder(tmp_path / "other") as other:
        for path, value in ((run, 1.0), (other, 9.0)):
            leader = path.producer()
            leader.tracker().scalar({"x": value})
            path.export(leader, time=1)
            leader.commit(0, time=2, leader=True)
    session = run.open(tmp_path / "other")
    assert [("other", 9.0), ("run", 1.0)] == sorted(
        tuple(r.values()) for r in session.reduce("x", by=[]).to_pylist()
    )
    assert [(1, 0), (0, 1)] == [
        tuple(r["count"] for r in session.histogram("x", 2).to_pylist() if r["run"] == name)
        for name in ("run", "other")
    ]


@pytest.mark.parametrize("engine", [{}, {"engine": "local", "workers": 1}])
def test_a_run_that_has_nothing_of_what_is_asked_answers_nothing(run, tmp_path, engine):
    """Beside a run that lacks the key, or has none of the steps, the other is answered."""
    with RunBuilder(tmp_path / "other") as other:
        for builder, keys in ((run, "xy"), (other, "x")):
            leader = builder.producer()
            for step in range(3):
                leader.tracker().scalar({key: float(step) for key in keys})
                builder.export(leader, time=step)
                leader.commit(step, time=step + 0.5, leader=True)
    asks = [
        lambda s, key, **o: s.percentiles(key, 0.5, **o)["p50"],
        lambda s, key, **o: s.reduce(key, ["median", "p50", "std", "avg"], **o)["p50"],
        lambda s, key, **o: s.reduce(key, "p50", where=f"{key} >= 0", **o)["p50"],
    ]
    both = run.open(other.path, **engine)
    moved = run.open(other.path, offsets=[0, 10], **engine)
    for ask in asks:
        assert [0.0, 1.0, 2.0] == ask(both, "y").to_pylist()
        assert [1.0] == ask(both, "y", by=()).to_pylist()
        assert [0.0, 1.0, 2.0] == ask(moved, "x", since=10).to_pylist()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.reduce("y"), "expected a recorded key, got 'y'; there are 2, none of them near"),
        (lambda s: s.reduce("x", "mode"), "expected statistics of avg, .*, median, p99 or 0.99, got 'mode'"),
        (
            lambda s: s.reduce("x", by="hour"),
            "expected to group by any of step, .*, and tags, .*, got 'hour'",
        ),
        (lambda s: s.percentiles("x", 99), "expected percentiles from 0 to 1, got 99"),
        (lambda s: s.reduce("x", None), "expected statistics of avg, .*, got None"),
        (lambda s: s.reduce("x", [["avg"]]), "expected statistics of avg, .*, got .*avg"),
        (lambda s: s.reduce("x", where=5), "expected a condition as a text, got 5"),
        (lambda s: s.reduce("X"), "expected a recorded key, got 'X'; near: 'x'"),
        (lambda s: s.percentiles("x", [0.5, math.nan]), "expected percentiles from 0 to 1, got nan"),
        (lambda s: s.histogram("x", 0), "expected at least one bin, got 0"),
        (lambda s: s.histogram("x", 10**9), "expected at most 1000000 bins, got 1000000000"),
        (lambda s: s.reduce([]), "expected at least one recorded key, got none"),
        (lambda s: s.reduce(None), "expected a recorded key, got None"),
        (lambda s: s.reduce("x", by=None), "expected to group by any of step, .*, got None"),
        (lambda s: s.reduce("x", since="a"), "expected since to be a step, got 'a'"),
        (lambda s: s.metrics(until=1.5), "expected until to be a step, got 1.5"),
        (lambda s: s.reduce("x", where="(" * 1000 + "n"), "expected at most 50 brackets and 'not' within"),
        (lambda s: s.reduce("x", where="not " * 2000 + "n"), "expected at most 50 brackets and 'not' within"),
        (lambda s: s.sql("from percentile('xy', 0.5)"), "^expected a recorded key, got 'xy'; near: 'x'"),
        (lambda s: s.sql("from percentile('x', 5)"), "^expected percentiles from 0 to 1, got 5"),
    ],
)
def test_wrong_questions_get_right_errors(session, ask, message):
    """Unknown keys, statistics, groups and percentiles are named with what there is."""
    with pytest.raises(errors.QueryError, match=message):
        ask(session)


def test_values_that_belong_to_no_step_are_said(run):
    """A run nobody committed has no steps to pool by: the errors say so, and what to do."""
    leader = run.producer()
    for time in range(2):
        leader.tracker().scalar({"x": 1.0})
        run.export(leader, time=time)
    session = run.open()
    for by in ("step", "rank"):
        with pytest.raises(
            errors.UnansweredError,
            match=r"^expected values of 'x' at some step, got 2 windows without a step \(commit what",
        ):
            session.reduce("x", by=by)
    with pytest.raises(errors.UnansweredError, match=r"^expected committed metrics, got none: a StatsLogger"):
        session.metrics("x")
    assert 0 == session.metrics().num_rows


def test_what_windows_lack_is_told_one_by_one(run):
    """Incomplete, superseded, exported in vain: each is counted, with what to do about it."""
    old, new = (run.producer("actor", 0, attempt=a, world=f"w{a}", started=100 * a) for a in range(2))
    for time, lost in enumerate([(), (0,)]):
        old.tracker().scalar({"x": 1.0})
        old.tracker().scalar({"y": 1.0})
        run.export(old, time=time, lose=lost)
        old.commit(5 + time, time=time + 0.5, leader=True)
    old.tracker().scalar({"x": 1.0})
    old.drain(time=5)
    old.note_export(time=5, step=3, outcome="PeerError")
    new.tracker().scalar({"z": 1.0})
    run.export(new, time=200)
    new.commit(4, time=201, leader=True, restored=3)
    session = run.open()
    with pytest.raises(errors.UnansweredError) as caught:
        session.reduce("x")
    said = str(caught.value)
    assert "1 window superseded (a later attempt tells these steps: see attempts='all')" in said
    assert "1 window in no export that counts (it failed, or was of one rank beside the leader" in said
    assert "without a step" not in said
    assert [3] == session.reduce("x", by=["step", "rank"])["step"].to_pylist()


def test_steps_that_were_not_asked_for_are_told(run):
    """Where there are values, but of other steps than between the bounds, the error says of which."""
    leader = run.producer()
    for step in range(2, 5):
        leader.tracker().scalar({"x": 1.0})
        run.export(leader, time=step)
        leader.commit(step, time=step + 0.5, leader=True)
    for by in ("step", "rank"):
        with pytest.raises(
            errors.UnansweredError,
            match=r"^expected values of 'x' since 7 and until 9, got some of steps 2 to 4 alone$",
        ):
            run.open().reduce("x", since=7, until=9, by=by)
