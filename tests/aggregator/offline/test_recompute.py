"""What the log says a committed number was, against what a live export returned."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eventlog
from aggregator import open_run, stats_tracker
from eventlog import ReduceType, Spread
from replay import MemoryBackend, play
from tests.runs import RunBuilder


def actors(run, n=2, **options):
    return [run.producer("actor", rank, world="w", world_size=n, **options) for rank in range(n)]


def told(session, keys=None, **options):
    """Return name → row of a run with one step."""
    rows = session.metrics(keys, source="recomputed", **options).to_pylist()
    return {row["key"]: row for row in rows}


def numbers(rows):
    return {key: row["value"] if row["value_int"] is None else row["value_int"] for key, row in rows.items()}


def record(producer, key, values, mask=None, **options):
    values = np.asarray(values, np.float32)
    mask = np.ones(values.shape, bool) if mask is None else np.asarray(mask, bool)
    tracker = producer.tracker()
    tracker.denominator({f"{key}_n": mask}, options.get("label"))
    tracker.stat(f"{key}_n", {key: values}, **options)


# -- live and offline ------------------------------------------------------------------------------------


def test_one_global_sum_over_one_global_count(run):
    """Ranks with few tokens weigh as much as they have tokens (report c2)."""
    ranks = actors(run)
    record(ranks[0], "x", np.ones(100), np.arange(100) < 1)
    record(ranks[1], "x", np.zeros(100), np.arange(100) < 99)
    ranks[0].commit(0, run.export(ranks), time=1, leader=True)
    found = told(run.open())
    assert 0.01 == found["x/avg"]["value"]
    assert 100 == found["x_n"]["value_int"]


def test_what_is_masked_out_adds_nothing(run):
    """A micro-batch without a selected value contributes neither a sum nor a count (report c3)."""
    leader = run.producer()
    record(leader, "x", [2, 4])
    record(leader, "x", [9, 9], [False, False])
    leader.commit(0, run.export(leader), time=1, leader=True)
    assert {"x/avg": 3, "x/min": 2, "x/max": 4, "x_n": 2} == numbers(told(run.open()))


def test_masked_nan_and_inf_are_never_looked_at(run):
    """Padding may hold anything (report c21)."""
    leader = run.producer()
    record(leader, "x", [1, np.nan, 3, np.inf], [True, False, True, False])
    leader.commit(0, run.export(leader), time=1, leader=True)
    assert {"x/avg": 2, "x/min": 1, "x/max": 3, "x_n": 2} == numbers(told(run.open()))


def test_a_key_nobody_selected_is_absent(run):
    """Fully masked on one rank: the other's value; fully masked everywhere: no number at all (report c20)."""
    ranks = actors(run)
    record(ranks[0], "some", [5, 7], [False, False])
    record(ranks[1], "some", [5, 7], [True, False])
    for producer in ranks:
        record(producer, "none", [1, 2], [False, False])
    ranks[0].commit(0, run.export(ranks), time=1, leader=True)
    assert {"some/avg": 5, "some/min": 5, "some/max": 5, "some_n": 1, "none_n": 0} == numbers(
        told(run.open())
    )


def test_a_selected_nan_makes_the_number_nan(run):
    """NaN and Inf mean what they mean live."""
    leader = run.producer()
    record(leader, "nan", [1, np.nan, 3])
    record(leader, "inf", [1, np.inf, 3])
    leader.commit(0, run.export(leader), time=1, leader=True)
    found = told(run.open())
    assert all(math.isnan(found[f"nan/{name}"]["value"]) for name in ("avg", "min", "max"))
    assert [math.inf, 1, math.inf] == [found[f"inf/{name}"]["value"] for name in ("avg", "min", "max")]
    assert not any(row["differs"] for row in found.values())


floats = st.floats(-(2.0**99), 2.0**99, width=32) | st.sampled_from(
    [math.nan, math.inf, -math.inf, 0.0, -0.0]
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.lists(st.lists(st.tuples(floats, st.booleans()), min_size=1, max_size=5), max_size=3),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([t for t in ReduceType if t is not ReduceType.SCALAR]),
)
def test_live_and_offline_agree_to_the_bit(tmp_path_factory, ranks, reduce_type):
    """Whatever ranks record, a group export's numbers come out of the log exactly as they were returned."""
    path = tmp_path_factory.mktemp("run")
    with RunBuilder(path) as run:
        producers = actors(run, len(ranks))
        for producer, calls in zip(producers, ranks, strict=True):
            producer.tracker().counter({"calls": len(calls)})
            for n, call in enumerate(calls):
                values, mask = zip(*call, strict=True)
                record(producer, "x", values, mask, reduce_type=reduce_type)
                producer.tracker().scalar({"s": values[0] if math.isfinite(values[0]) else n})
        live = run.export(producers, time=1)
        producers[0].commit(0, live, time=2, leader=True)
    with open_run(path) as session:
        found = told(session)
    assert {k: repr(float(v)) for k, v in live.items()} == {k: repr(row["value"]) for k, row in found.items()}
    assert not any(row["differs"] for row in found.values())


def test_every_kind_and_spread_comes_back(run):
    """Timings, counters, shares of one number and copies of one value are reduced as they were live."""
    ranks = actors(run)
    for producer in ranks:
        tracker = producer.tracker()
        tracker.declare(["share"], Spread.SHARES)
        tracker.declare(["copy"], Spread.REPLICATED)
        tracker.scalar({"share": 0.25 + producer.rank / 2, "copy": 0.1})
        tracker.counter({"tokens": 10 + producer.rank})
        tracker.timing("train", 1.0 + 2 * producer.rank)
    live = run.export(ranks)
    ranks[0].commit(0, live, time=1, leader=True)
    found = told(run.open())
    assert live == numbers(found)
    assert (1.0, 0.1, 21, 2.0) == tuple(live[key] for key in ("share", "copy", "tokens", "timeperf/train"))
    assert not any(row["differs"] for row in found.values())


# -- what an export covers -------------------------------------------------------------------------------


def test_an_export_without_reset_is_counted_in_both_steps(run):
    """The records are in the log once; the later export's number is over both windows."""
    ranks = actors(run)
    values = [1.0, 5.0]
    for step, reset in enumerate([False, True]):
        for producer in ranks:
            record(producer, "x", [values[step] + producer.rank])
            producer.tracker().scalar({"s": values[step]})
        live = run.export(ranks, time=10 * step, reset=reset)
        ranks[0].commit(step, live, time=10 * step + 5, leader=True)
    session = run.open()
    rows = session.metrics(["x/avg", "s__count"], source="recomputed").to_pylist()
    assert [("s__count", 0, 2), ("x/avg", 0, 1.5), ("s__count", 1, 4), ("x/avg", 1, 3.5)] == [
        (r["key"], r["step"], r["value"]) for r in rows
    ]
    assert not any(r["differs"] for r in session.metrics(source="recomputed").to_pylist())
    assert 2 * 2 == session.sql("select count(*) as n from records where key = 'x'")["n"][0].as_py()


def test_a_single_key_s_export_leaves_the_rest_to_the_next(run):
    """`export(key=…)` and the export after it together say everything once."""
    leader = run.producer()
    tracker = leader.tracker()
    tracker.scalar({"a": 1.0, "b": 2.0})
    first = run.export(leader, tracker="", key="a", time=1)
    tracker.scalar({"b": 4.0})
    second = run.export(leader, time=2)
    leader.commit(0, first | second, time=3, leader=True)
    found = told(run.open())
    assert {"a": 1.0, "a__count": 1, "b": 3.0, "b__count": 2} == numbers(found)
    assert not any(row["differs"] for row in found.values())


def test_trackers_exported_apart_stay_apart(run):
    """Exports of single trackers into one commit, as a trainer does with actor and rollout."""
    leader = run.producer()
    leader.tracker().scalar({"loss": 1.0})
    leader.tracker("rollout").scalar({"reward": 2.0})
    stats = run.export(leader, tracker="", time=1) | run.export(leader, tracker="rollout", time=2)
    leader.commit(0, stats, time=3, leader=True)
    found = told(run.open())
    assert {"loss": 1.0, "rollout/reward": 2.0} == {k: v for k, v in numbers(found).items() if "__" not in k}
    assert {False} == {row["differs"] for row in found.values()}


# -- which ranks count -----------------------------------------------------------------------------------


def tensor_parallel(run, values):
    """Four ranks as two data-parallel groups of copies: ranks 0 and 2, ranks 1 and 3."""
    ranks = actors(run, 4)
    for producer, value in zip(ranks, values, strict=True):
        if value is not None:
            producer.tracker().scalar({"x": value})
    even = run.export([ranks[0], ranks[2]], time=1)
    odd = run.export([ranks[1], ranks[3]], time=1)
    return ranks, even, odd


def test_tensor_parallel_copies_count_once(run):
    """Two groups hold the same data: the key is not summed over them."""
    ranks, even, _ = tensor_parallel(run, [1.0, 1.0, 3.0, 3.0])
    ranks[0].commit(0, even, time=2, leader=True)
    found = told(run.open())
    assert (2.0, 2) == (found["x"]["value"], found["x__count"]["value_int"])
    assert ("group", False, False) == tuple(found["x"][name] for name in ("source", "differs", "incomplete"))


def test_the_group_that_reproduces_the_committed_value_speaks(run):
    """What was committed came from the other group: that one is named, though the leader is in the first."""
    ranks, _, odd = tensor_parallel(run, [1.0, 10.0, 3.0, 30.0])
    ranks[0].commit(0, odd, time=2, leader=True)
    found = told(run.open())
    assert (20.0, False) == (found["x"]["value"], found["x"]["differs"])


def test_else_the_leader_s_group_speaks_and_differs(run):
    """A committed number that no candidate explains is flagged, beside the leader's own account."""
    ranks, _, _ = tensor_parallel(run, [1.0, 10.0, 3.0, 30.0])
    ranks[0].commit(0, {"x": 999.0}, time=2, leader=True)
    found = told(run.open())
    assert (2.0, 999.0, True) == tuple(found["x"][name] for name in ("value", "committed", "differs"))
    assert None is found["x__count"]["differs"]


def test_pipeline_stages_keys_are_found_where_they_live(run):
    """A key that only other groups hold is taken from the group of the lowest rank that holds it."""
    ranks, _, _ = tensor_parallel(run, [None, 10.0, None, 30.0])
    ranks[0].commit(0, {}, time=2, leader=True)
    found = told(run.open())
    assert (20.0, None, "group") == tuple(found["x"][name] for name in ("value", "differs", "source"))


def test_the_later_of_two_exports_in_a_step_speaks(run):
    """Two exports of one key in one step: the committed dict held the later one's number."""
    leader = run.producer()
    stats = {}
    for time, value in enumerate([1.0, 5.0]):
        leader.tracker().scalar({"x": value})
        stats |= run.export(leader, time=time)
    leader.commit(0, stats, time=9, leader=True)
    found = told(run.open())
    assert (5.0, False, "own") == tuple(found["x"][name] for name in ("value", "differs", "source"))


def test_the_union_of_own_exports_may_be_what_was_committed(run):
    """A leader that merged its own exports of a step is understood."""
    leader = run.producer()
    for time, value in enumerate([1.0, 5.0]):
        leader.tracker().scalar({"x": value})
        run.export(leader, time=time)
    leader.commit(0, {"x": 3.0, "x__count": 2}, time=9, leader=True)
    found = told(run.open())
    assert (3.0, False, None) == tuple(found["x"][name] for name in ("value", "differs", "export_id"))


def test_workers_are_merged_as_the_controller_does(run):
    """Rollout workers without a group: their union is the weighted mean that was committed."""
    leader = run.producer("actor")
    workers = [run.producer("rollout", rank) for rank in range(2)]
    for worker, values in zip(workers, ([1.0], [2.0, 6.0]), strict=True):
        for value in values:
            worker.tracker("rollout").scalar({"reward": value})
        run.export(worker, time=1)
    leader.commit(0, {"rollout/reward": 3.0, "rollout/reward__count": 3}, time=2, leader=True)
    found = told(run.open())["rollout/reward"]
    assert (3.0, False, "workers", False) == tuple(
        found[name] for name in ("value", "differs", "source", "incomplete")
    )


def test_a_key_with_a_group_of_its_own(run):
    """A labelled key is reduced over its ranks alone, by the first of the call's groups that holds them."""
    ranks = actors(run, 4)
    for producer in ranks:
        label = "0,1" if producer.rank < 2 else "2,3"
        producer.tracker().scalar({"cp": float(producer.rank)}, label)
        producer.tracker().scalar({"dp": float(producer.rank)})
        producer.drain(time=1)
        pair = (producer.rank % 2, producer.rank % 2 + 2)
        producer.note_export(f"dp{producer.rank % 2}:1", members=pair, time=1)
        producer.note_export("all:1", members=(0, 1, 2, 3), time=1)
    ranks[0].commit(0, {"cp": 0.5, "dp": 1.0}, time=2, leader=True)
    found = told(run.open())
    assert (0.5, 2, False) == (found["cp"]["value"], found["cp__count"]["value_int"], found["cp"]["differs"])
    assert (1.0, 2, False) == (found["dp"]["value"], found["dp__count"]["value_int"], found["dp"]["differs"])
    assert ("all:1", "dp0:1") == (found["cp"]["export_id"], found["dp"]["export_id"])


def test_each_part_of_a_list_commit_finds_its_export(run):
    """Mini-batches committed as a list: each sub-index is explained by the export it came from."""
    leader = run.producer()
    parts = []
    for time, value in enumerate([1.0, 5.0, 3.0]):
        leader.tracker().scalar({"loss": value})
        parts.append(run.export(leader, time=time))
    parts[1]["loss"] = 77.0  # one that nothing explains: the export in its turn is the likeliest
    leader.commit(0, parts, time=9, leader=True)
    rows = run.open().metrics(["loss"], source="recomputed").to_pylist()
    assert [(0, 1.0, False), (1, 5.0, True), (2, 3.0, False)] == [
        (row["sub_index"], row["value"], row["differs"]) for row in rows
    ]


@pytest.mark.parametrize("lost", ["records", "export"])
def test_a_missing_rank_is_said(run, lost):
    """Records or an export row that are not there make the number incomplete, not silently another."""
    ranks = actors(run)
    for producer in ranks:
        producer.tracker().scalar({"x": 1.0 + producer.rank})
    if lost == "export":
        ranks[0].drain(time=1)
        ranks[0].note_export("g:1", members=(0, 1), time=1)
    else:
        run.export(ranks, time=1)
        run.close()
        (file,) = (run.path / "events" / "actor-1").glob("*.records.*.arrows")
        file.write_bytes(file.read_bytes()[:-5])
        with RunBuilder(run.path) as more:
            more.producer("late", attempt=0).commit(0, {"x": 1.5}, time=2, leader=True)
        row = told(open_run(run.path))["x"]
        assert (1.0, 1.5, True, True) == tuple(
            row[name] for name in ("value", "committed", "differs", "incomplete")
        )
        return
    ranks[0].commit(0, {"x": 1.5}, time=2, leader=True)
    row = told(run.open())["x"]
    assert (1.0, 1.5, True, True) == tuple(
        row[name] for name in ("value", "committed", "differs", "incomplete")
    )


def test_later_attempts_win_here_too(run):
    """Recomputed numbers follow the same attempts as committed ones; superseded ones are there on request."""
    for attempt, steps in enumerate([range(4), range(2, 5)]):
        leader = run.producer("actor", 0, attempt=attempt, started=100 * attempt)
        for step in steps:
            leader.tracker().scalar({"x": 10.0 * attempt + step})
            stats = run.export(leader, time=100 * attempt + step)
            restored = 1 if attempt else None
            leader.commit(step, stats, time=100 * attempt + step + 0.5, leader=True, restored=restored)
    run.close()
    with open_run(run.path) as latest, open_run(run.path, attempts="all") as every:
        assert [0, 1, 12, 13, 14] == latest.metrics(["x"], source="recomputed")["value"].to_pylist()
        rows = every.metrics(["x"], source="recomputed")
        assert 7 == rows.num_rows
        assert 2 == sum(rows["superseded"].to_pylist())
        assert latest.metrics(["x"])["value"].equals(latest.metrics(["x"], source="recomputed")["value"])


def test_values_without_a_commit_can_still_be_recomputed(run):
    """With `step=` given and nobody committing, the log's account stands alone."""
    ranks = actors(run)
    for step in range(2):
        for producer in ranks:
            producer.tracker().scalar({"x": float(step + producer.rank)})
        run.export(ranks, time=step, step=step)
    rows = run.open().metrics(["x"], source="recomputed").to_pylist()
    assert [(0, 0.5, None), (1, 1.5, None)] == [(r["step"], r["value"], r["differs"]) for r in rows]


@pytest.mark.parametrize("payload", ["off", "sample:2"])
def test_a_committed_quantile_without_its_values_is_said_to_be_unknown(tmp_path, payload):
    """What was committed and can be recomputed no more has a row without a number, never none."""
    log = eventlog.start(tmp_path, payload=payload)
    log.claim_attempt()
    for step in range(2):
        stats_tracker.denominator(n=np.ones(100, bool))
        stats_tracker.stat("n", x=np.arange(100.0), quantiles=0.9)
        log.commit(0, step, step, [stats_tracker.export_all()])
    eventlog.stop()
    with open_run(tmp_path) as session:
        found = {row["key"]: row for row in session.metrics(source="recomputed", until=0).to_pylist()}
        p90 = session.metrics(["x/p90"], until=0)["value"][0].as_py()
        expected = (None, p90, None, True, None)
        assert expected == tuple(
            found["x/p90"][name] for name in ("value", "committed", "differs", "incomplete", "source")
        )
        assert (49.5, False) == (found["x/avg"]["value"], found["x/avg"]["incomplete"])
        wide = session.metrics(["x/avg", "x/p90"], source="recomputed", wide=True)
        assert ([49.5, 49.5], [None, None]) == (wide["x/avg"].to_pylist(), wide["x/p90"].to_pylist())
    backend = MemoryBackend()
    play(tmp_path, [backend], source="recomputed")
    assert [{"n", "x/avg", "x/min", "x/max"}] * 2 == [set(metrics) for _, metrics, _ in backend.rows]


def test_unbound_windows_are_in_no_number(run):
    """What was drained after the last commit belongs to no step."""
    leader = run.producer()
    leader.tracker().scalar({"x": 1.0})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    leader.tracker().scalar({"x": 100.0})
    run.export(leader, time=3)
    assert [1.0] == run.open().metrics(["x"], source="recomputed")["value"].to_pylist()
