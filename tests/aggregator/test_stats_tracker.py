"""The tracker as AReaL users know it: names, scopes, defaults; and what ours does better."""

import asyncio
import math
import threading

import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker
from aggregator.stats_tracker import DistributedStatsTracker, ReduceType
from eventlog import RunReader, workflow_context
from eventlog.errors import PeerError, RecordingError, StepError
from tests import gloo


@pytest.fixture
def tracker():
    return DistributedStatsTracker()


def test_the_default_exports_avg_min_max(tracker):
    """A stat exports avg, min and max over the selected values, its denominator the number of them."""
    with tracker.scope("ppo_actor"):
        tracker.denominator(n_tokens=torch.tensor([True, False, True]))
        tracker.stat(denominator="n_tokens", kl=torch.tensor([1.0, math.nan, 3.0]))
    assert tracker.export() == {
        "ppo_actor/n_tokens": 2, "ppo_actor/kl/avg": 2.0, "ppo_actor/kl/min": 1.0, "ppo_actor/kl/max": 3.0,
    }  # fmt: skip
    assert tracker.export() == {}


@pytest.mark.parametrize(
    ("reduce_type", "expected"),
    [("AVG", 2.0), ("SUM", 4.0), ("MIN", 1.0), ("MAX", 3.0)],
)
def test_single_reductions_export_under_the_plain_key(tracker, reduce_type, expected):
    """AVG, SUM, MIN and MAX export one number under the key itself."""
    tracker.denominator(m=torch.tensor([True, False, True]))
    tracker.stat("m", ReduceType[reduce_type], x=torch.tensor([1.0, 9.0, 3.0]))
    assert tracker.export()["x"] == expected


def test_scalars_export_mean_and_count(tracker):
    """A scalar exports the mean of its calls and how many there were, large integers too (report c11)."""
    for value in (30565379, True, torch.tensor(1.5, dtype=torch.bfloat16)):
        tracker.scalar(x=value)
    assert tracker.export() == {"x": (30565379 + 1 + 1.5) / 3, "x__count": 3}


def test_counters_export_their_sum(tracker):
    """counter() adds up where a scalar would read 1.0 for ever."""
    for _ in range(3):
        tracker.counter(accepted=1)
        tracker.scalar(as_scalar=1)
    found = tracker.export()
    assert (3, 1.0) == (found["accepted"], found["as_scalar"])


def test_nothing_selected_is_absent(tracker):
    """Mean and extremes of nothing are absent; a SUM and a denominator of nothing are 0 (reports c3, c20)."""
    nothing = torch.zeros(3, dtype=torch.bool)
    tracker.denominator(m=nothing)
    tracker.stat("m", x=torch.tensor([math.nan, 1.0, math.inf]))
    tracker.stat("m", ReduceType.SUM, s=torch.ones(3))
    tracker.stat("m", ReduceType.AVG, a=torch.ones(3))
    assert tracker.export() == {"m": 0, "s": 0.0}


def test_micro_batches_pool(tracker):
    """Sums over counts across micro-batches; an empty one contributes nothing (reports c3, c7)."""
    for values, mask in (([2.0, 4.0], [1, 1]), ([9.0, 9.0], [0, 0])):
        tracker.denominator(m=torch.tensor(mask, dtype=torch.bool))
        tracker.stat("m", x=torch.tensor(values))
    assert tracker.export() == {"m": 2, "x/avg": 3.0, "x/min": 2.0, "x/max": 4.0}
    for total, count in ((10.0, 5), (6.0, 1)):
        tracker.denominator(tokens=torch.ones(count, dtype=torch.bool))
        tracker.stat("tokens", ReduceType.AVG, loss=torch.full((count,), total / count))
    assert tracker.export()["loss"] == pytest.approx(16 / 6, rel=1e-6)


def test_half_types_do_not_stop_at_256(tracker):
    """A thousand bfloat16 ones sum to a thousand (report c10)."""
    tracker.denominator(m=torch.ones(1000, dtype=torch.bool))
    tracker.stat("m", ReduceType.SUM, total=torch.ones(1000, dtype=torch.bfloat16))
    tracker.stat("m", ReduceType.AVG, avg=torch.ones(1000, dtype=torch.float16))
    assert (1000.0, 1.0) == tuple(map(tracker.export().get, ("total", "avg")))


def test_float64_stays_float64(tracker):
    """What float32 cannot tell from 1 is told, live and in the moments."""
    tracker.denominator(m=torch.ones(2, dtype=torch.bool))
    tracker.stat("m", x=torch.full((2,), 1 + 2**-40, dtype=torch.float64))
    assert {1 + 2**-40} == {value for name, value in tracker.export().items() if name != "m"}


def test_non_finite_values_are_not_hidden(tracker):
    """A selected NaN makes the numbers NaN, an infinity follows IEEE (reports c21, s5, D3)."""
    tracker.denominator(m=torch.ones(2, dtype=torch.bool))
    tracker.stat("m", i=torch.tensor([1.0, math.inf]), n=torch.tensor([1.0, math.nan]))
    found = tracker.export()
    assert (math.inf, 1.0, math.inf) == tuple(found[f"i/{part}"] for part in ("avg", "min", "max"))
    assert all(math.isnan(found[f"n/{part}"]) for part in ("avg", "min", "max"))


def test_named_trackers_are_drained_apart():
    """Exporting one named tracker leaves the others; counts travel along (report c31)."""
    stats_tracker.get("rollout").scalar(r=1)
    stats_tracker.get("train").scalar(l=2)
    assert {"train/l": 2.0, "train/l__count": 1} == stats_tracker.get("train").export()
    assert {"rollout/r": 1.0, "rollout/r__count": 1} == stats_tracker.get("rollout").export()
    assert stats_tracker.get("rollout").export() == {}


def test_named_trackers_have_scopes_of_their_own():
    """A named tracker inside another tracker's scope keeps its plain name."""
    with stats_tracker.scope("ppo_actor"):
        stats_tracker.get("rollout").scalar(r=1)
        stats_tracker.scalar(s=1)
    assert {"rollout/r", "rollout/r__count", "ppo_actor/s", "ppo_actor/s__count"} == set(
        stats_tracker.export_all()
    )


def test_timings_live_under_timeperf_and_combine():
    """Timings ignore scopes; two trackers timing one key combine by count (report s7)."""
    with stats_tracker.scope("a"), stats_tracker.record_timing("step"):
        pass
    other = stats_tracker.get("other")
    for _ in range(2):
        with other.record_timing("step"):
            pass
    found = stats_tracker.export_all()
    assert set(found) == {"timeperf/step", "timeperf/step__count"}
    assert found["timeperf/step__count"] == 3


def test_a_timing_is_kept_when_the_block_raises(tracker):
    """The duration of a block that failed is recorded, and its error passes through."""
    with pytest.raises(KeyError), tracker.record_timing("t"):
        raise KeyError
    assert tracker.export()["timeperf/t__count"] == 1


def test_a_refused_timing_does_not_hide_what_the_block_raised(tracker, monkeypatch):
    """Its own error comes when the block went well; where mistakes are forgiven it is a warning."""
    tracker.scalar(**{"timeperf/x": 1.0})
    with pytest.raises(KeyError, match="theirs"), tracker.record_timing("x"):
        raise KeyError("theirs")
    with pytest.raises(RecordingError, match="timeperf/x"), tracker.record_timing("x"):
        pass
    monkeypatch.setenv("AREAL_METRICS_ON_MISTAKE", "warn")
    with pytest.warns(UserWarning, match="timeperf/x"), tracker.record_timing("x"):
        pass
    assert {"timeperf/x": 1.0, "timeperf/x__count": 1} == dict(tracker.export())


def test_names_that_are_one_key_are_all_counted(tracker):
    """Slashes around a name do not belong to it, also within a call."""
    tracker.scalar(**{"a": 1.0, "a/": 3.0})
    tracker.counter(**{"c": 1, "/c": 2})
    assert {"a": 2.0, "a__count": 2, "c": 3} == dict(tracker.export())
    with pytest.raises(RecordingError, match="fits int64"):
        tracker.counter(**{"c": 2**62, "c/": 2**62})


def test_a_device_clock_is_a_series_of_its_own(tracker):
    """record_timing(device=…) also records the device's time; on the CPU both are equal (report d7)."""
    with pytest.raises(KeyError), tracker.record_timing("t", device="cpu"):
        raise KeyError
    found = tracker.export()
    assert {f"timeperf/{key}" for key in ("t", "t__count", "t/cpu", "t/cpu__count")} == set(found)
    assert found["timeperf/t"] == found["timeperf/t/cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_clock_that_is_not_there_is_refused(tracker):
    """The block does not run under a clock that this process does not have."""
    message = r"expected a device with a clock .*, got 'cuda'"
    with pytest.raises(ValueError, match=message), tracker.record_timing("t", device="cuda"):
        raise AssertionError
    assert tracker.export() == {}


def test_sequences_of_packed_batches_reach_the_log(tracker, tmp_path):
    """cu_seqlens, sample_ids and tags go to the log; a bool tensor of such a name is a mask."""
    eventlog.start(tmp_path)
    tokens = torch.tensor([1, 0, 1, 1, 1], dtype=torch.bool)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    tracker.denominator(n_tokens=tokens, cu_seqlens=bounds, sample_ids=["a", "b"], tags={"lang": "de"})
    tracker.stat("n_tokens", ReduceType.AVG, x=torch.arange(5.0))
    tracker.denominator(cu_seqlens=tokens, tags=~tokens)
    assert tracker.export(step=0) == {"n_tokens": 4, "x": 2.25, "cu_seqlens": 4, "tags": 1}
    eventlog.stop()
    with open_run(tmp_path) as run:
        found = run.reduce("x", ["avg"], by=["sequence"]).to_pylist()
    assert [("a", 0.0), ("b", 3.0)] == [(row["sample_id"], row["avg"]) for row in found]
    reader = RunReader(tmp_path)
    rows = [row for _, _, batch in reader.records() for row in batch.to_pylist() if row["kind"] != "export"]
    assert ['{"lang": "de"}', None, None, None] == [row["tags"] for row in rows]
    payload = [row for _, _, batch in RunReader(tmp_path).payload() for row in batch.to_pylist()]
    assert [([1, 3], ["a", "b"]), (None, None), (None, None)] == [
        (row["selected"], row["sample_ids"]) for row in payload if row["mask"]
    ]


def test_the_same_name_from_two_trackers_warns():
    """A name produced by two trackers warns instead of vanishing silently."""
    stats_tracker.get("a").scalar(x=1)
    with stats_tracker.scope("a"):
        stats_tracker.scalar(x=3)
    with pytest.warns(UserWarning, match="a/x"):
        stats_tracker.export_all()


def test_scope_func_wrapper_keeps_metadata_sync_and_async(tracker):
    """The decorator scopes the body of functions and coroutines and keeps their names."""

    @tracker.scope_func_wrapper("f")
    def plain(x):
        """Say it."""
        tracker.scalar(v=x)

    @tracker.scope_func_wrapper("g")
    async def later(x):
        await asyncio.sleep(0)
        tracker.scalar(v=x)

    plain(1)
    asyncio.run(later(2))
    assert ("plain", "Say it.", "later") == (plain.__name__, plain.__doc__, later.__name__)
    assert {"f/v": 1.0, "f/v__count": 1, "g/v": 2.0, "g/v__count": 1} == tracker.export()


def test_disable_scope_records_plain_keys(tracker):
    """Inside disable_scope keys have no prefix; afterwards they have."""
    with tracker.scope("a"):
        with tracker.disable_scope():
            tracker.scalar(x=1)
        tracker.scalar(x=2)
    assert {"x", "x__count", "a/x", "a/x__count"} == set(tracker.export())


def test_single_key_export_leaves_the_rest(tracker):
    """export(key) reduces and resets that key alone, under the current scope (report s2)."""
    with tracker.scope("a"):
        tracker.denominator(m=torch.ones(2, dtype=torch.bool))
        tracker.stat("m", ReduceType.AVG, x=torch.ones(2), y=torch.zeros(2))
        assert tracker.export(key="x") == {"a/x": 1.0}
        tracker.stat("m", ReduceType.AVG, z=torch.ones(2))
    assert tracker.export() == {"a/m": 2, "a/y": 0.0, "a/z": 1.0}


def test_a_timing_is_exported_by_its_key_from_anywhere():
    """It has no tracker and no scope: its key is full already."""
    tracker = DistributedStatsTracker("rollout")
    with tracker.scope("a"), tracker.record_timing("step"):
        tracker.scalar(x=1)
    with tracker.scope("a"):
        timed = tracker.export("timeperf/step")
    assert {"timeperf/step", "timeperf/step__count"} == set(timed)
    assert {"rollout/a/x": 1.0, "rollout/a/x__count": 1} == tracker.export()


@pytest.mark.parametrize("name", [None, 0, b"r", "/", "\ud800"])
def test_what_is_no_name_of_a_tracker_is_refused(name):
    """It would be found out in an export, on all ranks and for good."""
    before = set(stats_tracker.TRACKERS)
    for make in (stats_tracker.get, DistributedStatsTracker):
        with pytest.raises((TypeError, ValueError), match=r"expected a .*tracker name"):
            make(name)
    assert before == set(stats_tracker.TRACKERS)


def test_slashes_around_a_trackers_name_are_no_part_of_it():
    """Two spellings are one tracker, as its keys are the same."""
    tracker = stats_tracker.get("/a/b/")
    assert ("a/b", tracker) == (tracker.name, stats_tracker.get("a/b"))
    assert stats_tracker.get("") is stats_tracker.DEFAULT_TRACKER


def test_without_reset_values_stay(tracker):
    """reset=False exports the same again, with what came since."""
    tracker.scalar(x=1)
    assert tracker.export(reset=False) == {"x": 1.0, "x__count": 1}
    tracker.scalar(x=3)
    assert tracker.export() == {"x": 2.0, "x__count": 2}
    assert tracker.export() == {}


def test_an_export_carries_kinds_and_pickles(tracker):
    """The dict of an export is a plain dict to its users and keeps what merging needs."""
    tracker.counter(c=1)
    found = tracker.export()
    assert isinstance(found, dict)
    assert found == {"c": 1}


def test_the_window_is_logged_before_an_error_is_raised(tmp_path):
    """A bad step raises from the export, and what was recorded is exported by the next one."""
    eventlog.start(tmp_path)
    stats_tracker.scalar(x=1)
    with pytest.raises(StepError, match="got -1"):
        stats_tracker.export_all(step=-1)
    assert stats_tracker.export_all() == {"x": 1.0, "x__count": 1}
    eventlog.stop()
    rows = [row for _, _, batch in RunReader(tmp_path).records() for row in batch.to_pylist()]
    assert ["StepError", "ok"] == [row["outcome"] for row in rows if row["kind"] == "export"]
    assert ["x"] == [row["key"] for row in rows if row["kind"] != "export"]


def _fails_on_rank_0(rank):
    """Export a bad step on rank 0 alone, then a good one."""
    import torch.distributed as dist

    group = dist.group.WORLD
    stats_tracker.scalar(q=1.5)
    with pytest.raises((StepError, PeerError)):
        stats_tracker.export_all(reduce_group=group, step=-1 if rank == 0 else 2)
    stats_tracker.scalar(q=2)
    return dict(stats_tracker.export_all(reduce_group=group))


def test_a_failed_export_leaves_all_ranks_with_the_same():
    """After an export that failed on one rank no rank counts its window again, and none is ahead."""
    assert [{"q": 2.0, "q__count": 2}] * 2 == gloo.run(_fails_on_rank_0, ranks=2)


@pytest.mark.parametrize("reduce_type", ["avg", 3, object()])
def test_what_is_no_reduce_type_is_refused_at_the_call(tracker, reduce_type):
    """A reduce type that is none fails the call, not the export of all ranks."""
    tracker.denominator(m=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"expected a ReduceType \(AVG_MIN_MAX, .*\), got"):
        tracker.stat("m", reduce_type, x=torch.ones(2))


def test_workflow_context_separates_training_from_evaluation():
    """stat_scope() names the tracker of the running episode, task by task."""

    async def episode(is_eval):
        workflow_context.set(workflow_context.WorkflowContext(is_eval=is_eval))
        await asyncio.sleep(0)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=float(is_eval))

    async def main():
        await asyncio.gather(*(episode(i % 3 == 0) for i in range(9)))

    asyncio.run(main())
    assert stats_tracker.export_all() == {
        "rollout/reward": 0.0, "rollout/reward__count": 6,
        "eval-rollout/reward": 1.0, "eval-rollout/reward__count": 3,
    }  # fmt: skip


def test_threads_record_while_another_exports(tracker):
    """Nothing is lost and nothing mixed when threads record under scopes while one exports."""
    done = threading.Event()
    totals = {}

    def record(name):
        for i in range(300):
            with tracker.scope(name):
                tracker.denominator(m=torch.ones(2, dtype=torch.bool))
                tracker.stat("m", ReduceType.SUM, x=torch.full((2,), float(i)))
                tracker.counter(n=1)

    def export():
        while not done.is_set():
            add(tracker.export())

    def add(found):
        for key, value in found.items():
            totals[key] = totals.get(key, 0) + value

    workers = [threading.Thread(target=record, args=(f"t{i}",)) for i in range(4)]
    exporter = threading.Thread(target=export)
    exporter.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.set()
    exporter.join()
    add(tracker.export())
    expected = {"m": 600, "x": 2.0 * sum(range(300)), "n": 300}
    assert {f"t{i}/{key}": value for i in range(4) for key, value in expected.items()} == totals
