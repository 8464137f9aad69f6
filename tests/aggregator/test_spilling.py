"""Windows that are spilled come to the same numbers as windows that are not, live and from the log."""

import math
import threading
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eventlog
from aggregator import open_run, stats_tracker
from aggregator.offline.compact import compact
from aggregator.stats_tracker import ReduceType

SMALL = 3000  # bytes that a tracker may hold: two or three records
NUMBERS = [0.0, -0.0, 1.0, -2.5, 1e9, 0.1, math.nan, math.inf, -math.inf]


@pytest.fixture(autouse=True)
def stopped():
    """Leave no log behind, whatever failed."""
    yield
    eventlog.stop()


def record(tracker, call):
    """Carry out one call of a program."""
    kind, seed = call
    rng = np.random.default_rng(seed)
    if kind == "mask":
        tracker.denominator(n=rng.random(9) < 0.6, tags={"call": seed} if seed % 2 else None)
    elif kind == "stat":
        x = rng.choice(NUMBERS if seed % 4 == 0 else NUMBERS[:6], 9)
        tracker.stat("n", x=x.astype(np.float32), y=x)
    elif kind == "sum":
        tracker.stat("n", ReduceType.SUM, total=rng.normal(size=9).astype(np.float32))
    elif kind == "quantiles":
        tracker.stat("n", quantiles=(0.25, 0.9), q=rng.normal(size=9).astype(np.float32))
    elif kind == "scalar":
        tracker.scalar(s=rng.normal(), t=seed)
    elif kind == "counter":
        tracker.counter(c=seed)
    elif kind == "timing":
        tracker.recorder.timing("t", float(rng.random()))


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["mask", "stat", "sum", "quantiles", "scalar", "counter", "timing"]),
        st.integers(0, 99),
    ),
    max_size=25,
)
EXPORTS = st.sampled_from(["all", "all", "kept", "n", "x", "q", "s", "c", "other"])


def told(path, programs, spill_bytes):
    """Return what a program exports, and what the log says of it."""
    live = []
    log = eventlog.start(path, spill_bytes=spill_bytes, spill_seconds=0)
    log.claim_attempt()
    trackers = [stats_tracker.DistributedStatsTracker(name) for name in ("", "rollout")]
    for step, (first, second, export) in enumerate([*programs, ([], [], "all")]):
        for tracker, calls in zip(trackers, (first, second), strict=True):
            tracker.denominator(n=np.arange(9) < 5)
            for call in calls:
                record(tracker, call)
        if export == "other":
            made = [trackers[1].export()]
        elif export in ("all", "kept"):
            made = [tracker.export(reset=export == "all") for tracker in trackers]
        else:
            made = [trackers[0].export(export)]
        live += made
        assert log.commit(0, step, step, [{k: v for one in made for k, v in one.items()}])
    eventlog.stop()
    with open_run(path) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = run.metrics(source="recomputed").to_pylist()
        windows = run.sql("select complete from windows").to_pylist()
        values = {
            key: run.reduce(key, ["count", "min", "max", 0.5]).to_pylist()
            for key in ("x", "y", "total", "q", "s", "rollout/x", "rollout/s")
            if key in {row["key"] for row in run.sql("select distinct key from records").to_pylist()}
        }
    return live, said, windows, values


PROGRAMS = st.lists(st.tuples(CALLS, CALLS, EXPORTS), max_size=4)
FREELY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=6, **FREELY)
@given(PROGRAMS)
def test_a_spilled_window_is_the_window(tmp_path_factory, programs):
    """Whatever is recorded and exported: the same numbers live, the same from the log, nothing incomplete.

    Keys alone, windows kept, another tracker's export in between, quantiles, NaN and Inf included. Sums of
    series may differ in the last bit: they are added part by part.
    """
    compare(tmp_path_factory, programs)


@pytest.mark.long
@pytest.mark.timeout(600)
@settings(max_examples=200, **FREELY)
@given(PROGRAMS)
def test_many_spilled_windows_are_the_windows(tmp_path_factory, programs):
    """The same, for hundreds of programs."""
    compare(tmp_path_factory, programs)


def compare(tmp_path_factory, programs):
    """Run a program with and without spilling, and compare what comes of it."""
    whole = told(tmp_path_factory.mktemp("run"), programs, 0)
    spilled = told(tmp_path_factory.mktemp("run"), programs, SMALL)
    for expected, found in zip(whole[0], spilled[0], strict=True):
        assert expected.keys() == found.keys()
        for name in expected:
            assert math.isclose(expected[name], found[name], rel_tol=1e-12, abs_tol=1e-12) or (
                repr(expected[name]) == repr(found[name])
            )
    for found in (whole, spilled):
        assert [] == [row for row in found[1] if row["differs"] or row["incomplete"]]
        assert [] == [row for row in found[2] if not row["complete"]]
    names = [[(row["step"], row["key"]) for row in found[1]] for found in (whole, spilled)]
    assert names[0] == names[1]
    assert repr(whole[3]) == repr(spilled[3])


def test_live_and_log_agree_to_the_bit(tmp_path):
    """What an export adds to what was spilled, the log adds in the same order: sums included."""
    log = eventlog.start(tmp_path, spill_bytes=50_000, spill_seconds=0)
    rng = np.random.default_rng(0)
    for step in range(3):
        for _ in range(200):
            stats_tracker.denominator(n=rng.random(50) < 0.5)
            stats_tracker.stat("n", x=(rng.normal(size=50) * 1e3).astype(np.float32))
            stats_tracker.scalar(s=rng.normal())
        log.commit(0, step, step, [stats_tracker.export_all()])
    assert log.writer.flush(100)
    eventlog.stop()
    with open_run(tmp_path) as run:
        rows = run.metrics(source="recomputed").to_pylist()
        (parts,) = run.sql("select count(*) as n from records where key = 's' and step = 1").to_pylist()
    assert parts["n"] > 3
    assert [row["committed"] for row in rows] == [row["value"] for row in rows]
    assert compact(tmp_path, workers=1).rows > 1000
    with open_run(tmp_path) as run:
        assert rows == run.metrics(source="recomputed").to_pylist()
        assert [True] == run.sql("select distinct complete from windows")["complete"].to_pylist()


def test_a_mask_that_was_spilled_is_still_a_mask(tmp_path):
    """A stat binds to the mask of its task by identity, whether that mask lies in memory or in the log."""
    eventlog.start(tmp_path, spill_bytes=SMALL, spill_seconds=0)
    mask = np.array([True, False, True, False])
    stats_tracker.denominator(n=mask)
    for i in range(20):
        stats_tracker.stat("n", x=np.full(4, float(i)))
        stats_tracker.scalar(s=i)
    exported = stats_tracker.export_all(step=7)
    eventlog.stop()
    assert (2, 9.5, 20) == (exported["n"], exported["x/avg"], exported["s__count"])
    with open_run(tmp_path) as run:
        rows = run.sql("select dense from tensors where key = 'x' order by record_id").to_pylist()
        (masks,) = run.sql("select count(*) as n from masks where key = 'n'").to_pylist()
        frames = run.sql("select count(distinct record_id) as n from records where step = 7").to_pylist()
    assert [{"dense": [float(i), None, float(i), None]} for i in range(20)] == rows
    assert (1, True) == (masks["n"], frames[0]["n"] > 21)


def test_kept_windows_are_logged_once(tmp_path):
    """Without reset the values leave the memory, are reduced again from their moments, and stand once."""
    log = eventlog.start(tmp_path, spill_bytes=SMALL, spill_seconds=0)
    for step in range(4):
        stats_tracker.denominator(n=np.ones(50, np.bool_))
        for i in range(10):
            stats_tracker.stat("n", quantiles=0.5, x=np.full(50, 10.0 * step + i))
        exported = stats_tracker.export_all(reset=False)
        assert (50 * (step + 1), (10 * step + 9) / 2) == (exported["n"], exported["x/avg"])
        assert 0.01 * exported["x/max"] >= abs(exported["x/p50"] - exported["x/avg"])
        log.commit(0, step, step, [exported])
    assert exported == stats_tracker.export_all()
    assert {} == stats_tracker.export_all()
    eventlog.stop()
    with open_run(tmp_path) as run:
        rows = run.sql("select count(*) as n, count(distinct min) as distinct from records where key = 'x'")
        assert [{"n": 40, "distinct": 40}] == rows.to_pylist()
        rows = run.metrics(source="recomputed").to_pylist()
        assert [] == [row for row in rows if row["differs"] or row["incomplete"]]


def test_a_key_is_one_kind_and_a_counter_fits_also_after_a_spill(tmp_path):
    """What was spilled is part of the window: a second kind of a key, and a sum too large, are refused."""
    eventlog.start(tmp_path, spill_bytes=SMALL, spill_seconds=0)
    stats_tracker.counter(c=2**63 - 5)
    for i in range(100):
        stats_tracker.scalar(s=i)
    with pytest.raises(ValueError, match="expected a sum that fits int64 for counter 'c'"):
        stats_tracker.counter(c=5)
    with pytest.raises(ValueError, match="expected one kind of 's' until its export"):
        stats_tracker.counter(s=1)
    stats_tracker.counter(c=4)
    assert {"c": 2**63 - 1, "s": 49.5, "s__count": 100} == stats_tracker.export_all()
    eventlog.stop()


def test_copies_are_equal_to_the_bit_whenever_each_rank_spills(tmp_path):
    """Values declared to be replicated stay in memory: parts would be added in another order."""
    numbers = np.random.default_rng(1).normal(size=999)
    found = []
    for place, size in (("a", 0), ("b", SMALL)):
        eventlog.start(tmp_path / place, spill_bytes=size, spill_seconds=0)
        tracker = stats_tracker.DistributedStatsTracker()
        tracker.declare("s", "x", spread="replicated")
        tracker.denominator(n=np.ones(3, np.bool_))
        for number in numbers:
            tracker.scalar(s=number)
            tracker.stat("n", x=np.full(3, number, np.float32))
        found.append(tracker.export())
        eventlog.stop()
    assert found[0] == found[1]


def test_without_a_log_everything_stays_in_memory(tmp_path):
    """A tracker whose process has no log works as AReaL's does, also after it had one."""
    eventlog.start(tmp_path, spill_bytes=SMALL, spill_seconds=0)
    eventlog.stop()
    for i in range(2000):
        stats_tracker.scalar(s=i)
    recorder = stats_tracker.DEFAULT_TRACKER.recorder
    assert [2000] == [len(series.values) for series in recorder.series.values()]
    assert {"s": 999.5, "s__count": 2000} == stats_tracker.export_all()


def test_threads_record_spill_and_export_at_once(tmp_path):
    """Four threads with trackers of their own and one that exports: every number counts exactly once."""
    log = eventlog.start(tmp_path, spill_bytes=SMALL, spill_seconds=0)
    trackers = [stats_tracker.get(f"t{i}") for i in range(4)]
    failed = []

    def work(tracker):
        try:
            for i in range(400):
                tracker.counter(c=1)
                tracker.denominator(n=np.arange(10) < 7)
                tracker.stat("n", x=np.full(10, float(i)))
        except Exception as error:  # noqa: BLE001 - the test tells
            failed.append(error)

    threads = [threading.Thread(target=work, args=(tracker,)) for tracker in trackers]
    for thread in threads:
        thread.start()
    exports = []
    over = False
    while not over:
        over = not any(thread.is_alive() for thread in threads)
        exports.append(stats_tracker.export_all())
        log.commit(0, len(exports), len(exports), [exports[-1]])
    assert log.writer.flush(100)
    eventlog.stop()
    assert ([], []) == (failed, log.losses())
    for i in range(4):
        assert 400 == sum(one.get(f"t{i}/c", 0) for one in exports)
        assert 2800 == sum(one.get(f"t{i}/n", 0) for one in exports)
    with open_run(tmp_path) as run:
        assert [True] == run.sql("select distinct complete from windows")["complete"].to_pylist()
        assert [] == [r for r in run.metrics(source="recomputed").to_pylist() if r["differs"]]
        table = run.reduce("t0/x", ["count", "sum"], by=[]).to_pylist()
    assert [{"count": 2800, "sum": 7.0 * sum(range(400))}] == table


@pytest.mark.parametrize("payload", ["off", "sample:4"])
def test_other_policies_spill_too(tmp_path, payload):
    """Without payload the records leave the memory; of a sample each record keeps its own."""
    log = eventlog.start(tmp_path, payload=payload, spill_bytes=SMALL, spill_seconds=0)
    for i in range(20):
        stats_tracker.denominator(n=np.arange(16) < 8)
        stats_tracker.stat("n", x=np.arange(16.0) + i)
    log.commit(0, 0, 0, [stats_tracker.export_all()])
    eventlog.stop()
    with open_run(tmp_path) as run:
        rows = run.metrics(["x/avg", "n"], source="recomputed").to_pylist()
        kept = payload != "off" and run.sql("select len(values) as n from tensors").to_pylist()
    assert [("n", 160.0, False), ("x/avg", 13.0, False)] == [
        (row["key"], row["value"], row["differs"]) for row in rows
    ]
    assert (payload != "off" and [{"n": 4}] * 20) == kept
