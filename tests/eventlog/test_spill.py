"""Windows that grow large or old leave the memory in parts, which are one window once it is drained."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import numpy as np
import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker
from eventlog import RunReader, arrays, moments, process, recovery, spill
from eventlog.errors import LogError
from eventlog.following import Follower
from eventlog.frame import Series
from eventlog.overflow import ROOM, Spilled, valve, window
from eventlog.reduction import Kind, Spread
from eventlog.rundir import Problems, RunDir
from eventlog.schema import Stream
from eventlog.sealed import SealedSegment
from eventlog.specs import Specs
from tests.storage import settle, tell

SMALL = 3000


@pytest.fixture(autouse=True)
def stopped():
    """Leave no log behind, whatever failed."""
    yield
    eventlog.stop()


@pytest.fixture
def log(tmp_path):
    """Yield a log into which recorders are spilled early."""
    yield eventlog.start(tmp_path / "run", spill_bytes=SMALL, spill_seconds=0)
    eventlog.stop()


def fill(recorder, calls, width=10):
    """Record so many masks with a stat each."""
    for i in range(calls):
        recorder.denominator({"n": np.arange(width) < width // 2})
        recorder.stat("n", {"x": np.full(width, float(i))})


def frames(path, stream=Stream.RECORDS):
    """Return (window, frame, last, rows) of each frame of a run."""
    found = []
    for file in RunDir.open(path).segments(stream):
        with SealedSegment(file, Problems(), newest=True) as segment:
            found += [record for _, record in segment.entries() if record and record.window >= 0]
    return [(r.window, r.frame, r.last_of_window, r.rows) for r in found]


@pytest.mark.parametrize("stream", [Stream.RECORDS, Stream.PAYLOAD])
def test_parts_of_a_window_are_numbered_and_the_last_one_says_so(log, stream):
    """What is spilled goes under the open window's number; the drain's frame completes it."""
    recorder = eventlog.Recorder()
    number = window.open
    fill(recorder, 10)
    settle(log.writer)
    before = frames(log.run.path, stream)
    assert len(before) > 2
    assert [(number, i, False) for i in range(len(before))] == [part[:3] for part in before]
    log.write(eventlog.drain([recorder]).frame)
    settle(log.writer)
    after = frames(log.run.path, stream)
    assert before == after[:-1]
    assert (number, len(before), True) == after[-1][:3]
    assert 20 == sum(rows for *_, rows in after)


def test_a_window_that_was_spilled_whole_is_completed_too(log):
    """Where nothing came since, the last frame is empty."""
    recorder = eventlog.Recorder()
    fill(recorder, 1)
    log.overflow.take(recorder)
    assert ([], {}) == (recorder.masks, recorder.series)
    log.write(eventlog.drain([recorder]).frame)
    log.write(eventlog.drain([recorder]).frame)  # nothing at all: no frame
    settle(log.writer)
    (state,) = tell_sessions(log.run.path)
    assert (1, 1, 0) == (len(state.complete), len(state.payload), len(state.incomplete))
    with open_run(log.run.path) as run:
        assert [{"complete": True, "records": 2}] == run.sql(
            "select complete, records from windows"
        ).to_pylist()
    for stream in (Stream.RECORDS, Stream.PAYLOAD):
        assert [(0, False, 2), (1, True, 0)] == [part[1:] for part in frames(log.run.path, stream)]


def test_a_window_is_completed_though_the_next_one_has_begun(log):
    """Another thread may spill between a drain and its hand-over: each window gets its own last frame."""
    recorder, other = eventlog.Recorder(), eventlog.Recorder("other")
    fill(recorder, 1)
    log.overflow.take(recorder)
    drained = eventlog.drain([recorder])
    fill(other, 1)
    log.overflow.take(other)
    log.write(drained.frame)
    log.write(eventlog.drain([other]).frame)
    settle(log.writer)
    (state,) = tell_sessions(log.run.path)
    assert (2, 2, 0) == (len(state.complete), len(state.payload), len(state.incomplete))


def test_a_follower_gets_the_parts_of_a_window_with_its_commit(log):
    """Every record of a window comes once, when a commit binds it, however many frames it lies in."""
    recorder = eventlog.Recorder()
    for step in range(3):
        fill(recorder, 10)
        log.write(eventlog.drain([recorder]).frame)
        fill(recorder, 2)  # the next window has begun
        log.overflow.take(recorder)
        assert log.commit(0, step, step)
    told = list(Follower(log.run.path).poll())
    rows = [[row["key"] for batch in one.records for row in batch.to_pylist()] for one in told]
    assert [20, 24, 24] == [len(keys) for keys in rows]
    assert [(0, ()), (1, ()), (2, ())] == [(one.step, one.incomplete) for one in told]


def test_an_incomplete_window_counts_nowhere_until_it_is_drained(log):
    """A live reader sees the parts and that they are not all; no default metric has them."""
    log.claim_attempt()
    recorder = eventlog.Recorder()
    fill(recorder, 10)
    assert log.commit(0, 0, 0, [{"other": 1.0}])
    settle(log.writer)
    told = tell(log.run.path)
    (state,) = told.states
    assert ([], 1) == (told.problems, len(state.incomplete))
    with open_run(log.run.path) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {False} == set(run.sql("select complete from records")["complete"].to_pylist())
        assert [] == run.metrics(["x/avg", "n"], source="recomputed").to_pylist()
        assert ["other"] == run.metrics()["key"].to_pylist()
    log.write(eventlog.drain([recorder]).frame)
    settle(log.writer)
    (state,) = tell(log.run.path).states
    assert (1, 0) == (len(state.complete), len(state.incomplete))


KILLED = """
import os, signal, sys
import numpy as np
import eventlog
from tests.storage import settle
log = eventlog.start(sys.argv[1], spill_bytes=3000, spill_seconds=0)
log.claim_attempt()
recorder = eventlog.Recorder()
for step in range(2):
    for i in range(10):
        recorder.denominator({"n": np.arange(10) < 5})
        recorder.stat("n", {"x": np.full(10, 100.0 * step + i)})
    if step == 0:
        drained = eventlog.drain([recorder])
        log.write(drained.frame)
        log.write_export(export_id="e0", members=None, window=drained.frame.window,
                         window_first=drained.first_window, step=0, reset=True, outcome="ok")
        assert log.commit(0, 0, 0, [{"x/avg": 4.5}])
settle(log.writer)
print(len(recorder.masks), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_what_it_spilled(tmp_path):
    """The parts of a window that was never drained can be read, the window is incomplete, metrics omit it."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path / "run"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert -signal.SIGKILL == done.returncode, done.stderr
    held = int(done.stdout)
    told = tell(tmp_path / "run")
    (state,) = told.states
    assert ([0], [1]) == (sorted(state.complete), sorted(state.incomplete))
    spilled = [
        row for key, rows in told.frames.items() if key[0] is Stream.RECORDS and key[4] == 1 for row in rows
    ]
    assert [100.0 + i for i in range(10 - held)] == [row["min"] for row in spilled if row["key"] == "x"]
    values = [
        row for key, rows in told.frames.items() if key[0] is Stream.PAYLOAD and key[4] == 1 for row in rows
    ]
    assert [[100.0 + i] * 5 for i in range(10 - held)] == [
        row["values64"] for row in values if row["values64"]
    ]
    assert [] == told.problems
    assert recovery.verify(tmp_path / "run").clean
    recovery.recover(tmp_path / "run", tmp_path / "copy")
    (state,) = tell(tmp_path / "copy").states
    assert ([0], [1]) == (sorted(state.complete), sorted(state.incomplete))
    with open_run(tmp_path / "run") as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = run.metrics(source="recomputed").to_pylist()
        assert [(0, "n", 50.0), (0, "x/avg", 4.5), (0, "x/max", 9.0), (0, "x/min", 0.0)] == [
            (row["step"], row["key"], row["value"]) for row in rows
        ]
        assert [50] == run.reduce("x", "count", by=[])["count"].to_pylist()


BOUNDED = """
import resource, sys
import numpy as np
import eventlog
from eventlog import moments
from eventlog.writer import Writer
limit, queue = 8 << 20, 16 << 20
Writer.__init__.__kwdefaults__["payload_queue_bytes"] = queue
Writer.__init__.__kwdefaults__["block_seconds"] = 60.0
eventlog.start(sys.argv[1], spill_bytes=limit)
recorder = eventlog.Recorder()
rng = np.random.default_rng(0)
mask = rng.random(100_000) < 0.5
row = rng.normal(size=100_000).astype(np.float32)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
def record(n):
    total = 0
    for i in range(n):
        row[:] *= np.float32(1.0001)
        if i % 7 == 0:
            recorder.denominator({"n": mask})
        recorder.stat("n", {"x": row})
        recorder.scalar({"s": i})
        total += int(mask.sum()) * 4
        seen.append(row[mask].astype(np.float64).sum())
    return total
seen = []
record(100)
before = peak()
seen_before = len(seen)
total = record(20 * limit // 200_000)
grown = peak() - before
drained = eventlog.drain([recorder])
eventlog.current().write(drained.frame)
keys = [spec.key for spec in drained.specs]
rows = {key: moments.merge(drained.rows[[k == key for k in keys]][:, None])[0] for key in "xs"}
x = moments.floats(rows["x"])
assert abs(x[moments.SUM] - np.sum(seen)) <= 1e-9 * np.abs(seen).sum(), (x[moments.SUM], np.sum(seen))
assert int(rows["x"][moments.COUNT]) == len(seen) * int(mask.sum())
assert int(rows["s"][moments.COUNT]) == len(seen)
lost = len(eventlog.current().losses())
eventlog.stop()
print(total, grown, limit + queue, lost, len(seen))
"""


def test_memory_stays_bounded_however_long_nothing_is_exported(tmp_path):
    """Twenty times the limit is recorded without an export: the process grows by what it may hold."""
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, tmp_path / "run"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    recorded, grown, held, lost, calls = map(int, done.stdout.split())
    assert recorded > 19 * (8 << 20)
    assert (0, True) == (lost, grown < 3 * held), grown
    (state,) = tell_sessions(tmp_path / "run")
    assert ([0], []) == (sorted(state.complete), sorted(state.incomplete))
    assert [0] == sorted(state.payload)
    assert calls == sum(
        int((batch["key"].to_numpy(zero_copy_only=False) == "x").sum())
        for *_, batch in eventlog.RunReader(tmp_path / "run").records()
    )


def tell_sessions(path):
    """Return the states of a run's sessions, without its values."""
    return eventlog.RunReader(path).sessions()


def test_a_part_larger_than_the_queue_is_written_all_the_same(tmp_path, monkeypatch):
    """A window of many parts, each as large as the queue, loses nothing: recording waits for the disk."""
    monkeypatch.setitem(eventlog.log.Writer.__init__.__kwdefaults__, "payload_queue_bytes", 1000)
    monkeypatch.setitem(eventlog.log.Writer.__init__.__kwdefaults__, "records_queue_bytes", 1000)
    log = eventlog.start(tmp_path, spill_bytes=20_000, spill_seconds=0)
    recorder = eventlog.Recorder()
    fill(recorder, 200, width=500)
    log.write(eventlog.drain([recorder]).frame)
    eventlog.stop()
    (state,) = tell_sessions(tmp_path)
    assert ([], 1, 1) == (log.losses(), len(state.complete), len(state.payload))
    assert 400 == sum(rows for *_, rows in frames(tmp_path))


def test_what_is_old_is_spilled_by_the_clock(tmp_path, monkeypatch):
    """A process that records and then hangs has on the disk what it recorded."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 0.02)
    log = eventlog.start(tmp_path, spill_seconds=0.1)
    recorder = eventlog.Recorder("old")  # other tests' recorders are old, too
    fill(recorder, 3)
    recorder.scalar({"s": 1.0})
    deadline = time.monotonic() + 60
    while (recorder.masks or recorder.series) and time.monotonic() < deadline:
        time.sleep(0.02)
    settle(log.writer)
    rows = [row for *_, batch in eventlog.RunReader(tmp_path).records() for row in batch.to_pylist()]
    assert "nnnsxxx" == "".join(sorted(row["key"][-1] for row in rows if row["tracker"] == "old"))
    assert {False} == {last for *_, last, _ in frames(tmp_path)}
    drained = eventlog.drain([recorder])
    log.write(drained.frame)
    found = dict(zip((spec.key for spec in drained.specs), drained.rows, strict=True))
    assert (15, 15, 1.0) == (
        moments.exact(found["old/n"]), int(found["old/x"][moments.COUNT]), moments.mean(found["old/s"])
    )  # fmt: skip
    eventlog.stop()
    assert [] == log.losses()


def test_the_clock_waits_for_nobody(tmp_path, monkeypatch):
    """While a recorder is in use, or the queue is full, what is old is left for the next look."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 1e6)  # nobody but the test looks
    log = eventlog.start(tmp_path, spill_seconds=1e-6)
    recorder = eventlog.Recorder()
    fill(recorder, 1)
    with monkeypatch.context() as patched:
        patched.setattr(log.overflow, "_fits", lambda _: False)
        log.overflow.look()
        assert 1 == len(recorder.masks)
    with recorder.lock:
        in_thread(log.overflow.look)
        assert 1 == len(recorder.masks)
    with window.lock:
        in_thread(log.overflow.look)
        assert 1 == len(recorder.masks)
    log.overflow.look()
    assert [] == recorder.masks
    eventlog.stop()


def in_thread(call):
    """Call something in another thread, to its end."""
    import threading

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_a_look_that_fails_is_told_once(tmp_path, monkeypatch):
    """The writer goes on; the user hears of it with the next commit."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 0.01)
    log = eventlog.start(tmp_path, spill_seconds=1e-6)
    monkeypatch.setattr(log.overflow, "_fits", lambda _: 1 / 0)
    recorder = eventlog.Recorder()
    fill(recorder, 1)
    deadline = time.monotonic() + 60
    while not log.writer.news and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.warns(UserWarning, match="expected to spill what is old, got ZeroDivisionError"):
        assert log.commit(0, 0, 0)
    assert [] == log.writer.news
    eventlog.stop()


def test_what_lies_on_a_device_stays_there(log, monkeypatch):
    """Spilling waits for no device: masks, values and numbers on one are exported from there."""
    recorder = eventlog.Recorder()
    mask, x = torch.tensor([True, False, True]), torch.tensor([1.0, 2.0, 3.0])
    with monkeypatch.context() as patched:
        patched.setattr(arrays, "on_host", lambda value: not isinstance(value, torch.Tensor))
        recorder.denominator({"there": mask})
        recorder.stat("there", {"y": x})
        recorder.scalar({"late": x.sum()})
        fill(recorder, 4)
        recorder.stat("n", {"mixed": torch.ones(10)})
        log.overflow.take(recorder)
        assert ["there", "n"] == [masked.spec.key for masked in recorder.masks]
        assert ["late"] == [spec.key for spec, *_ in recorder.series]
        drained = eventlog.drain([recorder])
    log.write(drained.frame)
    keys = [spec.key for spec in drained.specs]
    rows = [drained.rows[i] for i, key in enumerate(keys) if key == "n"]
    assert 20 == sum(moments.exact(row) for row in rows)
    assert 6.0 == moments.mean(drained.rows[keys.index("late")])


@pytest.mark.parametrize("fault", [None, RuntimeError("device-side assert"), "hang"])
@pytest.mark.filterwarnings("ignore:lost, and noted nowhere else")
def test_what_lies_on_a_device_at_the_end_is_waited_for_a_bounded_time(tmp_path, monkeypatch, fault):
    """What the host has is written all the same; where the device does not answer that is said."""
    log, recorder = eventlog.start(tmp_path), eventlog.Recorder()
    hung, settle = threading.Event(), spill.settle

    def broken(*args):
        if isinstance(fault, Exception):
            raise fault
        if fault:
            hung.wait(60)
        settle(*args)

    with monkeypatch.context() as patched:
        patched.setattr(arrays, "on_host", lambda value: not isinstance(value, torch.Tensor))
        patched.setattr(spill, "settle", broken)
        hangs = fault == "hang"  # else all may take its time
        patched.setattr(process, "END_SECONDS", 0.5 if hangs else 60.0)
        patched.setattr(process, "CLOSE_SECONDS", 3.0 if hangs else 60.0)
        patched.setattr(spill, "LEAVE_SECONDS", 0.1 if hangs else 60.0)
        recorder.denominator({"there": torch.tensor([True, False, True])})
        recorder.stat("there", {"y": torch.tensor([1.0, math.nan, 3.0])})
        recorder.scalar({"here": 1.5, "late": torch.tensor(2.0)})
        if fault:
            with pytest.warns(UserWarning, match="expected a device to give what it did not export"):
                eventlog.stop()
        else:
            eventlog.stop()
    hung.set()
    log.writer._thread.join()
    kept = {row["key"]: row["sum"] for *_, b in RunReader(tmp_path).records() for row in b.to_pylist()}
    assert ({"here": 1.5} if fault else {"here": 1.5, "late": 2.0, "there": 2.0, "y": 4.0}) == kept
    assert 3 == len({spec.key for spec in eventlog.drain([recorder]).specs} - {"here"})


def test_what_has_to_stay_makes_nothing_else_old(tmp_path):
    """Young records are not spilled because an old one, of a copy, stays until its export."""
    log = eventlog.start(tmp_path, spill_seconds=30)
    recorder = eventlog.Recorder()
    recorder.declare(["copy", "under"], Spread.REPLICATED)
    fill(recorder, 1)
    recorder.stat("n", {"under": np.ones(10)})
    recorder.scalar({"copy": 1.0, "s": 2.0})
    for series in recorder.series.values():
        series.times[0] -= 60_000_000 * (series.spec.key == "copy")
    recorder.masks[0].time -= 60_000_000
    log.overflow.look()
    assert (1, 2) == (len(recorder.masks), len(recorder.series))
    for series in recorder.series.values():
        series.times[0] -= 60_000_000 * (series.spec.key == "s")
    log.overflow.look()
    assert (1, ["copy"]) == (len(recorder.masks), [spec.key for spec, *_ in recorder.series])


def test_a_forked_child_begins_with_nothing(log):
    """What the parent spilled is the parent's to export, and its log the parent's to write."""
    recorder = eventlog.Recorder()
    fill(recorder, 5)
    assert recorder.spilled.rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads are running
        pid = os.fork()
    if pid == 0:
        fill(recorder, 50)
        clean = not recorder.spilled.rows and valve.spill is None and len(recorder.masks) == 50
        os._exit(0 if clean else 1)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert (valve.spill, valve.room) == (log.overflow.take, SMALL)


def test_recorders_have_the_room_of_the_log_that_is_started(tmp_path):
    """Also those that were made before; without a log it is the usual one again."""
    recorder = eventlog.Recorder()
    eventlog.start(tmp_path, spill_bytes="1MB")
    assert (1_000_000, 1_000_000) == (recorder.room, eventlog.Recorder().room)
    eventlog.stop()
    assert (ROOM, None) == (eventlog.Recorder().room, valve.spill)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spill_bytes": -1}, "expected spill_bytes in bytes of 0 or more, .* got -1"),
        ({"spill_bytes": "much"}, "expected spill_bytes in bytes of 0 or more, .* got 'much'"),
        ({"spill_seconds": -1}, r"expected spill_seconds of 0 \(never\) or more, got -1"),
        ({"spill_seconds": "1"}, r"expected spill_seconds of 0 \(never\) or more, got '1'"),
        ({"spill_seconds": float("nan")}, r"expected spill_seconds of 0 \(never\) or more, got nan"),
    ],
)
def test_wrong_limits_are_refused(tmp_path, options, message):
    """A limit that is none starts no log."""
    with pytest.raises(LogError, match=message):
        eventlog.start(tmp_path, **options)
    assert eventlog.current() is None


def test_the_environment_sets_the_limits(tmp_path):
    """AREAL_METRICS_SPILL_BYTES and AREAL_METRICS_SPILL_SECONDS are options as others are."""
    code = "import eventlog; o = eventlog.current().options; print(o.spill_size, o.spill_seconds)"
    said = {"DIR": str(tmp_path / "run"), "SPILL_BYTES": "2MiB", "SPILL_SECONDS": "5"}
    env = {**os.environ, **{f"AREAL_METRICS_{name}": value for name, value in said.items()}}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert f"{2 << 20} 5" == done.stdout.strip()


def test_what_is_spilled_adds_up():
    """Moments of a key merge in order, histograms add, a key can be dropped, a counter's sum is known."""
    specs = Specs("")
    x, c = specs.of("x", Kind.SCALAR, None), specs.of("c", Kind.COUNTER, None)
    spilled = Spilled()
    spilled.add([], moments.empty(0), {})
    spilled.add(
        [x, c, x], np.stack([moments.of([1.0]), moments.of_integers([1], [7])[0], moments.of([3.0])]), {}
    )
    spilled.add([x], moments.of([8.0])[None], {x: np.array([1, 2])})
    spilled.add([x], moments.of([])[None], {x: np.array([1, 0])})
    found, rows = [], []
    spilled.give(None, found, rows)
    assert ([x, c], 4.0, 7, 0) == (found, moments.mean(rows[0][0]), spilled.total(c), spilled.total(x))
    assert [2, 2] == dict(spilled.counts_of("x"))[x].tolist()
    assert [] == spilled.counts_of("c")
    spilled.forget_key("x")
    found.clear()
    spilled.give("x", found, rows)
    assert ([], [c], 0) == (found, list(spilled.rows), Series(x, None, total=spilled.total(x)).total)


def test_an_export_counts_what_its_own_log_holds(tmp_path):
    """What was spilled into a log that was stopped stays there, with a warning: live and offline agree."""
    run, before = tmp_path / "second", tmp_path / "first"
    log = eventlog.start(before, spill_bytes=SMALL, spill_seconds=0)
    for _ in range(40):
        stats_tracker.denominator(n=torch.ones(10, dtype=torch.bool))
        stats_tracker.stat("n", x=torch.zeros(10))
        stats_tracker.counter(k=1)
    log.overflow.take(stats_tracker.DEFAULT_TRACKER.recorder)
    stats_tracker.scalar(kept=1.0)
    eventlog.stop()
    with pytest.warns(UserWarning, match=r"\d+ values of 'k', 'n', 'x' were written down in it, in a window"):
        log = eventlog.start(run, spill_bytes=0)
    log.claim_attempt()
    stats_tracker.stat("n", x=torch.ones(10))  # under a mask that was spilled
    live = stats_tracker.export_all()
    log.commit(0, 0, 0, [live])
    eventlog.stop()
    with open_run(run) as session:
        assert live == _by_key(session.metrics(source="recomputed"))
        assert live == _by_key(session.metrics())
        (row,) = session.percentiles("x", [0.5], by=["step"]).to_pylist()
        assert (10, 10, 0) == (live["n"], row["count"], row["missing"])
    with open_run(before) as session:
        held = session.sql("select sum(count) as n from records where key = 'x' and not complete").to_pylist()
    assert (400, 1.0, False) == (held[0]["n"], live["kept"], "k" in live)


@pytest.mark.parametrize("first", [True, False])
def test_what_is_kept_in_memory_is_whole_in_the_log_that_starts(tmp_path, first):
    """The export's log holds it, though it was recorded, and exported with reset=False, before."""
    if first:
        eventlog.start(tmp_path / "first").claim_attempt()
    for i in range(3):
        stats_tracker.denominator(n=torch.ones(10, dtype=torch.bool))
        stats_tracker.stat("n", x=torch.full((10,), float(i)))
        stats_tracker.scalar(s=i)
    stats_tracker.export_all(reset=False)
    eventlog.stop()
    log = eventlog.start(tmp_path / "second")
    log.claim_attempt()
    stats_tracker.scalar(s=9)
    live = stats_tracker.export_all()
    log.commit(0, 0, 0, [live])
    eventlog.stop()
    with open_run(tmp_path / "second") as session:
        assert live == _by_key(session.metrics(source="recomputed"))
        assert 3.0 == live["s"] == session.percentiles("s", [0.5], by=["step"]).to_pylist()[0]["p50"] + 1.5


def test_an_export_without_a_log_has_all_that_was_recorded(tmp_path):
    """Between a stop and the next start the tracker knows everything, spilled or not."""
    eventlog.start(tmp_path, spill_bytes=SMALL, spill_seconds=0)
    for _ in range(200):
        stats_tracker.counter(k=1)
    eventlog.stop()
    assert {"k": 200} == stats_tracker.export_all()


def _by_key(table):
    """Return the values of one step by key."""
    return {row["key"]: row["value"] for row in table.to_pylist()}
