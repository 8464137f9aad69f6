"""The background writer: order, bounded queues, counted losses, segments, the end; failing file systems."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

import eventlog
from eventlog import writer as writer_module
from eventlog.clock import now_us
from eventlog.errors import LogError, RunDirectoryError
from eventlog.rivals import rivals
from eventlog.rundir import Problems, RunDir
from eventlog.schema import LossCause as Cause
from eventlog.schema import RecordType, Stream
from eventlog.sealed import SealedSegment
from eventlog.segment import Loss, SegmentWriter
from eventlog.windows import Completeness
from eventlog.writer import Writer
from tests.disk import small
from tests.storage import (
    commits,
    only,
    payload,
    producer,
    put_payload,
    put_records,
    put_window,
    records,
    settle,
    tell,
    write_run,
)


@pytest.fixture
def run(tmp_path):
    """Return a fresh run."""
    return RunDir.create(tmp_path / "run")


@pytest.fixture
def make(run):
    """Return a function that starts writers, which are closed at the end."""
    started = []

    def start(**options):
        started.append(Writer(run, producer(run), **options))
        return started[-1]

    yield start
    for writer in started:
        writer.close()


class Gate:
    """Batches that come only when the gate is open; `entered` says that the thread waits at it."""

    def __init__(self, batch):
        self.batch, self.open, self.entered = batch, threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        self.open.wait(100)
        return [self.batch]


def hold(writer, stream=Stream.RECORDS, nbytes=0):
    """Make the writer's thread wait, with `nbytes` of the stream's queue taken."""
    gate = Gate(records(0) if stream is Stream.RECORDS else payload(0))
    writer.put(stream, gate, nbytes=nbytes)
    assert gate.entered.wait(60)
    return gate


def index_of(path, problems=None):
    """Return the index records of the one file that a run's index pattern matches."""
    (file,) = [f for f in RunDir.open(path).segments() if f.stream is Stream.RECORDS]
    with SealedSegment(file, problems or Problems(), newest=True) as segment:
        return [record for _, record in segment.entries()]


# What is written


def test_what_is_put_is_read(run, make):
    """Records, payload and commits of every window come back with their values."""
    writer = make()
    for window in range(5):
        put_window(writer, window)
    assert writer.close()
    told = tell(run.path)
    assert ([], []) == (told.problems, writer.losses())
    for key, rows in told.frames.items():
        batch = {Stream.RECORDS: records, Stream.PAYLOAD: payload, Stream.COMMITS: commits}[key[0]](key[4])
        assert batch.to_pylist() == rows
    assert [[0, 1, 2, 3, 4]] * 3 == [told.windows(stream) for stream in Stream]


def test_the_records_file_is_there_from_the_start_others_when_they_are_needed(run, make):
    """A producer that has written nothing is visible already, with who it is (report b2)."""
    make(attempt=3)
    names = sorted(path.name.split("-")[1][33:] for path in run.path.rglob("*.*") if "-" in path.name)
    assert ["records.0000.arrows", "records.0000.idx"] == names
    told = tell(run.path)
    assert [os.getpid()] == [who.pid for who in told.reader.producers()]
    assert b"attempt" in only(run.path, "*.arrows").read_bytes()
    assert [] == told.problems


def test_records_and_commits_go_before_payload(make):
    """What waits is written by priority: payload behind every record and commit."""
    writer = make()
    gate = hold(writer)
    order = []
    for window in range(3):
        writer.put(Stream.PAYLOAD, lambda w=window: order.append(("payload", w)) or [payload(w)], nbytes=1)
        writer.put(Stream.RECORDS, lambda w=window: order.append(("records", w)) or [records(w)], nbytes=1)
        writer.put(Stream.COMMITS, lambda w=window: order.append(("commits", w)) or [commits(w)], nbytes=1)
    gate.open.set()
    settle(writer)
    assert [(s, w) for w in range(3) for s in ("records", "commits")] == order[:6]
    assert [("payload", w) for w in range(3)] == order[6:]


def test_what_is_urgent_waits_for_no_more_than_a_frame_of_payload(make):
    """A commit is written between two frames of a window's values, and each frame is progress."""
    writer, told = make(), []
    begun, go_on = threading.Event(), threading.Event()

    def note(name, batch):
        told.append((name, writer.progress))
        return batch

    def values():
        yield note("values", payload(0))
        yield note("values", payload(0))
        begun.set()
        assert go_on.wait(100)
        for _ in range(3):
            yield note("values", payload(0))

    writer.put(Stream.PAYLOAD, values, window=0, nbytes=320)
    assert begun.wait(60)
    put_records(writer, 0)
    ticket = writer.put(Stream.COMMITS, lambda: [note("commit", commits(0))], window=0, nbytes=300)
    go_on.set()
    settle(writer)
    assert ["values", "values", "values", "commit", "values", "values"] == [name for name, _ in told]
    moved = [progress for _, progress in told]
    assert moved[2:] == sorted(set(moved[2:]))
    assert writer.wait(ticket, 0)


def test_puts_wait_for_a_disk_that_moves_frame_by_frame(make):
    """A put that waited in vain does not keep the next one from waiting when values went on."""
    writer = make(payload_queue_bytes=100, block_seconds=0.3)
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def values():
        yield payload(0)
        begun.set()
        assert go_on.wait(100)
        yield payload(0)
        yield payload(0)
        assert over.wait(100)

    writer.put(Stream.PAYLOAD, values, window=0, nbytes=100)
    assert begun.wait(60)
    put_payload(writer, 1)
    before, moved = writer.waited, writer.progress
    put_payload(writer, 2)
    assert (True, before) == (before >= 0.3, writer.waited)
    go_on.set()
    while writer.progress == moved:
        time.sleep(0.001)
    put_payload(writer, 3)
    assert writer.waited >= before + 0.3
    over.set()


def test_waiting_for_what_was_put_is_measured(make):
    """Seconds in which a caller waits for its commit count as waited, as those for room do."""
    writer = make()
    gate = hold(writer)
    ticket = put_records(writer, 1)
    assert not writer.wait(ticket, 0.2)
    assert writer.waited >= 0.2
    gate.open.set()


def test_wait_means_written(run, make):
    """A ticket is done when all records and commits up to it are in the file; payload is not waited for."""
    writer = make()
    block = hold(writer, Stream.PAYLOAD)
    ticket = put_records(writer, 0)
    assert not writer.wait(ticket, 0.05)
    block.open.set()
    assert writer.wait(ticket, 60)
    assert [0] == tell(run.path).windows()
    gate = hold(writer)
    assert writer.wait(ticket, 0)
    assert not writer.wait(put_records(writer, 1), 0.05)
    gate.open.set()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs Linux")
def test_the_thread_takes_no_core_from_one_that_runs(make):
    """It is a batch thread, which interrupts nobody when it is woken; all others stay what they are."""
    before = {each.native_id for each in threading.enumerate()}
    writer = make()
    assert writer.wait(put_records(writer, 0), 60.0)
    (own,) = {each.native_id for each in threading.enumerate()} - before
    assert os.SCHED_BATCH == os.sched_getscheduler(own)
    assert os.SCHED_OTHER == os.sched_getscheduler(threading.get_native_id())


def test_only_the_last_batch_of_the_last_put_completes_a_window(run, make):
    """A window in several puts and batches is complete with its last one only, its frames counted on."""
    writer = make()
    batches = [records(7).slice(0, 1), records(7).slice(1, 2)]
    put = {"window": 7, "first_id": 700, "last_id": 702, "nbytes": 1}
    writer.put(Stream.RECORDS, lambda: iter(batches), last=False, **put)
    assert writer.wait(1, 60)
    assert [(0, False), (1, False)] == [(r.frame, r.last_of_window) for r in index_of(run.path)]
    assert {7} == tell(run.path).states[0].incomplete
    writer.put(Stream.RECORDS, lambda: iter(batches[:1]), **put)
    assert writer.wait(2, 60)
    assert (2, True) == [(r.frame, r.last_of_window) for r in index_of(run.path)][-1]
    assert [(700, 700), (701, 702), (700, 702)] == [(r.first_id, r.last_id) for r in index_of(run.path)]
    assert {7} == tell(run.path).states[0].complete


def test_an_empty_window_is_complete(run, make):
    """A window in which nothing was recorded, or whose last part is empty, is complete all the same."""
    writer = make()
    writer.put(Stream.RECORDS, list, window=0, nbytes=0)
    writer.put(Stream.RECORDS, lambda: [records(1)], window=1, nbytes=0, last=False)
    writer.put(Stream.RECORDS, list, window=1, nbytes=0)
    writer.put(Stream.RECORDS, list, nbytes=0)
    writer.close()
    (state,) = tell(run.path).states
    assert ({0, 1}, set()) == (state.complete, state.incomplete)


def test_records_are_compressed_and_payload_is_not(run, make):
    """Records shrink; payload lies in the file as it was in memory."""
    writer = make()
    put_records(writer, 0, rows=240)
    put_payload(writer, 1, values=1000)
    writer.close()
    assert records(0, 240).nbytes > 2 * only(run.path, "*.records.0000.arrows").stat().st_size
    values = payload(1, 1000)["values32"].values.buffers()[1].to_pybytes()[:4000]
    assert values in only(run.path, "*.payload.0000.arrows").read_bytes()


# Segments


def test_segments_are_bounded_in_bytes(run, make):
    """Past its size a segment is ended and the next one begun; a frame larger than that has one to itself."""
    writer = make(segment_bytes=5000)
    for window in range(12):
        put_payload(writer, window, values=5000 if window == 6 else 250)
    writer.close()
    told = tell(run.path)
    sizes = [file.data.stat().st_size for file in run.segments(Stream.PAYLOAD)]
    assert len(sizes) > 4
    assert 1 == sum(size > 5000 for size in sizes)
    assert (list(range(12)), []) == (told.windows(Stream.PAYLOAD), told.problems)


def test_the_number_of_files_does_not_grow_with_the_steps(run, make):
    """Thousands of windows go into a few files (report d8)."""
    writer = make()
    for window in range(1000):
        put_window(writer, window)
    writer.close()
    assert 6 == len([path for path in run.path.rglob("*") if path.suffix in (".arrows", ".idx")])
    assert list(range(1000)) == tell(run.path).windows()


def test_a_segment_is_an_arrow_stream(run, make):
    """Any Arrow reader opens a segment and finds in it who wrote it."""
    writer = make(attempt=4)
    put_records(writer, 0)
    put_records(writer, 1)
    writer.close()
    with pa.ipc.open_stream(only(run.path, "*.records.0000.arrows")) as stream:
        table = stream.read_all()
    assert [*records(0).to_pylist(), *records(1).to_pylist()] == table.to_pylist()
    said = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert {
        "run": run.id, "role": "actor", "rank": "0", "world": "w", "world_size": "2", "stream": "records",
        "host": socket.gethostname(), "pid": str(os.getpid()), "attempt": "4", "format": "1.0",
    }.items() <= said.items()  # fmt: skip
    assert {"session", "started_us"} <= set(said)


# Losses


def test_a_full_queue_waits_a_bounded_time_and_then_counts(run, make):
    """What does not fit in time is lost, listed with its window, and noted on the disk; nothing raises."""
    writer = make(records_queue_bytes=1000, block_seconds=0.1)
    gate = hold(writer, nbytes=900)
    assert writer.put(Stream.RECORDS, lambda: [records(1)], window=1, first_id=100, last_id=102, nbytes=200)
    assert [Loss(Stream.RECORDS, Cause.QUEUE_FULL, 1, 3, 200)] == writer.losses()
    gate.open.set()
    settle(writer)
    put_records(writer, 2)
    writer.close()
    (state,) = tell(run.path).states
    assert ([Loss(Stream.RECORDS, Cause.QUEUE_FULL, 1, 3, 200)], {1}, {2}) == (
        state.losses,
        state.incomplete,
        state.complete,
    )


def test_lost_records_are_counted_apart(make):
    """Whether a commit is durable shows in a counter of lost records and commits; payload is none of it."""
    writer = make(payload_queue_bytes=100, block_seconds=0)
    gate = hold(writer, Stream.PAYLOAD, nbytes=100)
    put_payload(writer, 1)
    gate.open.set()
    settle(writer)
    assert (1, 0) == (len(writer.losses()), writer.records_lost)
    writer.put(Stream.COMMITS, lambda: 1 / 0, nbytes=1)
    settle(writer)
    assert (2, 1) == (len(writer.losses()), writer.records_lost)


def test_the_queue_waits_for_room_before_it_loses(make):
    """A put that finds the queue full is taken as soon as there is room."""
    writer = make(records_queue_bytes=1000)
    gate = hold(writer, nbytes=900)
    threading.Timer(0.1, gate.open.set).start()
    put_records(writer, 1)
    assert writer.close()
    assert [] == writer.losses()


def test_a_stuck_disk_costs_the_waiting_time_once(make):
    """While nothing moves, only the first put waits: training is not slowed at every call (report d4)."""
    writer = make(records_queue_bytes=1000, block_seconds=0.5)
    gate = hold(writer, nbytes=1000)
    waited = []
    put = writer._changed.wait_for
    writer._changed.wait_for = lambda *args: waited.append(args) or put(*args)
    for window in range(50):
        put_records(writer, window)
    assert (1, 50) == (len(waited), len(writer.losses()))
    gate.open.set()


def test_a_window_larger_than_the_queue_is_taken_alone(make):
    """Bytes bound the queue, not what one window may hold."""
    writer = make(payload_queue_bytes=100)
    put_payload(writer, 0, values=10_000)
    settle(writer)
    put_payload(writer, 1, values=10_000)
    assert writer.close()
    assert [] == writer.losses()


def test_payload_that_does_not_fit_hides_no_records(run, make):
    """A window without its payload is complete, its missing payload listed."""
    writer = make(payload_queue_bytes=100, block_seconds=0)
    gate = hold(writer, Stream.PAYLOAD, nbytes=100)
    put_window(writer, 0)
    gate.open.set()
    writer.close()
    (state,) = tell(run.path).states
    assert ({0}, set()) == (state.complete, state.payload)
    assert [(Stream.PAYLOAD, Cause.QUEUE_FULL, 0)] == [(x.stream, x.cause, x.window) for x in state.losses]


def test_what_cannot_be_encoded_is_a_loss(run, make):
    """An error of the encoding, or columns of another stream, cost their own window and nothing else."""
    writer = make()

    def half():
        yield records(1).slice(0, 1)
        raise ZeroDivisionError("boom")

    put = {"first_id": 100, "last_id": 102, "nbytes": 900}
    writer.put(Stream.RECORDS, half, window=1, **put)
    writer.put(Stream.RECORDS, lambda: [payload(2)], window=2, **put)
    writer.put(Stream.RECORDS, lambda: None, window=3, **put)
    put_records(writer, 4)
    assert writer.close()
    assert [(1, Cause.ENCODE_FAILED, 3), (2, Cause.ENCODE_FAILED, 3), (3, Cause.ENCODE_FAILED, 3)] == [
        (loss.window, loss.cause, loss.rows) for loss in writer.losses()
    ]
    details = [loss.detail for loss in writer.losses()]
    assert "ZeroDivisionError: boom" == details[0]
    assert "expected the columns of records, got ['record_id'" in details[1]
    (state,) = tell(run.path).states
    assert ({4}, {1, 2, 3}) == (state.complete, state.incomplete)


def test_a_lost_part_is_not_hidden_by_the_last_one(run, make):
    """A window that lost a middle part stays incomplete though its last part arrived, whatever was noted."""
    writer = make(records_queue_bytes=1000, block_seconds=0)
    writer.put(Stream.RECORDS, lambda: [records(5)], window=5, nbytes=1, last=False)
    settle(writer)
    gate = hold(writer, nbytes=1000)
    writer.put(Stream.RECORDS, lambda: [records(5)], window=5, nbytes=1, last=False)
    gate.open.set()
    settle(writer)
    writer.put(Stream.RECORDS, lambda: [records(5)], window=5, nbytes=1)
    writer.close()
    frames = Completeness()
    for record in index_of(run.path):
        if record.type == RecordType.FRAME:  # the loss notes aside
            frames.frame(record, good=True)
    assert (set(), {5}) == (frames.complete, frames.incomplete)


# The end


def test_closing_ends_every_segment_and_may_be_repeated(run, make):
    """After close each stream has its end mark; closing again, or putting, changes nothing (b11, g5)."""
    writer = make()
    put_window(writer, 0)
    assert not tell(run.path).states[0].ended
    assert (True, True) == (writer.close(), writer.close())
    put_window(writer, 1)
    assert 3 == len(writer.losses())
    told = tell(run.path)
    assert ([0], True) == (told.windows(), told.states[0].ended)
    for file in run.segments():
        with SealedSegment(file, Problems(), newest=True) as segment:
            assert RecordType.END == [record.type for _, record in segment.entries()][-1]


def test_closing_never_takes_longer_than_it_is_given(run, make):
    """A thread that hangs does not hang the process: what is queued is lost and counted (report b15)."""
    writer = make()
    put_records(writer, 0)
    assert writer.wait(1, 60)
    gate = hold(writer)
    put_records(writer, 1)
    put_payload(writer, 2)
    assert (False, False) == (writer.close(0.2), writer.close(0.2))
    assert [-1, 1, 2] == sorted(loss.window for loss in writer.losses())
    assert {Cause.CLOSE_TIMED_OUT} == {loss.cause for loss in writer.losses()}
    gate.open.set()
    writer._thread.join(60)
    (state,) = tell(run.path).states
    assert (True, {0}, {1}) == (state.ended, state.complete, state.incomplete)


def test_a_waiting_put_is_let_go_by_close(make):
    """A thread that waits for room comes back when another one closes."""
    writer = make(records_queue_bytes=100, block_seconds=60)
    gate = hold(writer, nbytes=100)
    waiting = threading.Thread(target=put_records, args=(writer, 1))
    waiting.start()
    while not writer._changed._waiters:
        time.sleep(0.001)
    writer.close(0)
    waiting.join(60)
    assert not waiting.is_alive()
    gate.open.set()


def test_a_signal_handler_may_close(run):
    """Closing from a handler that interrupts a put neither hangs nor loses what was put before."""
    script = """
import os, signal, sys, time
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_records
run = RunDir.create(sys.argv[1])
writer = Writer(run, producer(run), records_queue_bytes=100_000)
def end(*_):
    assert writer.close(50)
    print(windows, flush=True)
    os._exit(0)
signal.signal(signal.SIGALRM, end)
signal.setitimer(signal.ITIMER_REAL, 0.2)
windows = 0
while True:
    put_records(writer, windows)
    windows += 1
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(run.path)], capture_output=True, text=True, check=True, timeout=60
    )
    count = int(done.stdout)
    assert list(range(count)) == tell(run.path).windows()[:count]
    assert tell(run.path).states[0].ended


def test_a_forked_child_leaves_the_parents_files_alone(run, make):
    """A child that abandons the writer writes nothing, waits for nothing, and the parent goes on."""
    writer = make()
    put_records(writer, 0)
    assert writer.wait(1, 60)
    gate = hold(writer)
    put_records(writer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: a fork beside threads, which is the point
        pid = os.fork()
    if pid == 0:
        writer.abandon()
        put_records(writer, 2)
        os._exit(writer.wait(1, 60) or not writer.close(60))
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    gate.open.set()
    put_records(writer, 3)
    assert writer.close()
    assert [0, -1, 1, 3] == tell(run.path).windows()


def test_a_run_that_cannot_be_written_is_an_error_at_the_start(run):
    """Where not even the first segment can be made, starting says so."""
    (run.path / "events").write_text("in the way")
    with pytest.raises(RunDirectoryError, match=r"expected to write a segment, got .*events/actor-0$"):
        Writer(run, producer(run))


def test_unknown_fsync_levels_are_refused(run):
    """An option that is none is refused with those there are."""
    with pytest.raises(LogError, match="expected fsync of False, 'periodic' or 'commit', got 'always'"):
        Writer(run, producer(run), fsync="always")


# Levels of durability, signs of life


@pytest.mark.parametrize(("fsync", "synced"), [(False, 0), ("periodic", 0), ("commit", 4), (True, 4)])
def test_commits_are_synced_when_asked(make, monkeypatch, fsync, synced):
    """At the level "commit" records and commits are synced, with their indexes, before the ticket is done."""
    calls = []
    monkeypatch.setattr("eventlog.segment._sync", calls.append)
    writer = make(fsync=fsync)
    assert writer.wait(put_window(writer, 0), 60)
    assert synced == len(calls)


def test_periodic_syncs_come_with_the_heartbeat(run, make, monkeypatch):
    """A producer that does nothing still says that it lives, and syncs what it has."""
    calls = []
    monkeypatch.setattr("eventlog.segment._sync", calls.append)
    monkeypatch.setattr(writer_module, "HEARTBEAT_SECONDS", 0.02)
    writer = make(fsync="periodic")
    put_records(writer, 0)
    while not calls or len(index_of(run.path)) < 4:
        time.sleep(0.01)
    beats = [record for record in index_of(run.path) if record.type == RecordType.HEARTBEAT]
    assert now_us() - 10_000_000 < beats[-1].first_id <= now_us()
    assert beats[-1].first_id <= tell(run.path).states[0].heartbeat_us


def test_a_failed_sync_is_a_loss_and_a_new_segment(run, make, monkeypatch):
    """What the system could not bring to the disk is counted; the next frames go elsewhere."""

    def fail(_):
        raise OSError(5, "Input/output error")

    writer = make(fsync="commit")
    with monkeypatch.context() as patch:
        patch.setattr("eventlog.segment._sync", fail)
        put_window(writer, 0)
        settle(writer)
    put_window(writer, 1)
    writer.close()
    causes = {(loss.stream, loss.cause) for loss in writer.losses()}
    assert {(Stream.RECORDS, Cause.PREVIOUS_SEGMENT), (Stream.COMMITS, Cause.PREVIOUS_SEGMENT)} == causes
    assert [0, 0, 1] == sorted(file.number for file in run.segments(Stream.RECORDS, Stream.COMMITS))[:3]
    assert [0, 1] == tell(run.path).windows()


# Failing file systems


LIMITED = """
import resource, sys
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_window, settle
run = RunDir.create(sys.argv[1])
writer = Writer(run, producer(run))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # Python ignores SIGXFSZ: EFBIG
for window in range(30):
    put_window(writer, window, values=50_000 if window in (10, 11, 20) else 5_000)
    settle(writer)
print(writer.close(), [[int(x.stream), int(x.cause), x.window, x.rows] for x in writer.losses()])
"""


def test_files_that_may_not_grow_are_left_for_new_ones(run):
    """A write that fails or is cut short goes into a new segment; what fits nowhere is lost and noted."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(run.path)], capture_output=True, text=True, check=True, timeout=60
    )
    lost = [[2, 2, 10, 1], [2, 2, 11, 1], [2, 2, 20, 1]]
    assert f"True {lost}" == done.stdout.strip()
    told = tell(run.path)
    assert [window for window in range(30) if window not in (10, 11, 20)] == told.windows(Stream.PAYLOAD)
    assert list(range(30)) == told.windows() == told.windows(Stream.COMMITS)
    (state,) = told.states
    assert (lost, True) == ([[x.stream, x.cause, x.window, x.rows] for x in state.losses], state.ended)
    assert [] == told.problems
    assert {5000, 50000} >= {
        len(rows[0]["values32"]) for key, rows in told.frames.items() if key[0] == Stream.PAYLOAD
    }
    assert all(path.stat().st_size <= 100_000 for path in run.path.rglob("*.*"))


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of 1 MiB, where one may be mounted."""
    with small(tmp_path / "disk") as path:
        yield path


def test_a_full_disk_is_survived_and_its_losses_listed(small_disk):
    """Nothing raises while the disk is full; recording goes on with room; what is missing is listed."""
    run = RunDir.create(small_disk / "run")
    writer = Writer(run, producer(run))
    put_window(writer, 0, 30_000)
    settle(writer)
    (small_disk / "ballast").write_bytes(bytes(700_000))
    with (small_disk / "rest").open("wb", buffering=0) as rest:
        while True:
            try:
                rest.write(bytes(1000))
            except OSError:
                break
    for window in range(1, 5):
        put_window(writer, window, 30_000)
        settle(writer)
    (small_disk / "ballast").unlink()
    for window in range(5, 8):
        put_window(writer, window, 30_000)
        settle(writer)
    assert writer.close()
    lost = {loss.window for loss in writer.losses() if loss.stream == Stream.PAYLOAD}
    assert {2, 3, 4} <= lost <= {1, 2, 3, 4}
    told = tell(run.path)
    (state,) = told.states
    assert {0, 5, 6, 7} == set(told.windows(Stream.PAYLOAD)) - {1}
    assert {0, 5, 6, 7} <= state.complete
    assert set(range(8)) == state.complete | state.incomplete
    assert lost == {loss.window for loss in state.losses if loss.stream == Stream.PAYLOAD}


def test_a_failed_write_leaves_no_litter(run, make, monkeypatch):
    """While writes fail, no file is left for each try; sealed frames stay, and the next one follows them."""
    writer = make()
    put_records(writer, 0)
    settle(writer)
    before = sorted(run.path.rglob("*.*"))
    real, failing = os.write, True

    def write(fd, data):
        if failing and threading.current_thread() is writer._thread:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    for window in range(1, 20):
        put_records(writer, window)
    settle(writer)
    assert before == sorted(run.path.rglob("*.*"))
    failing = False
    put_records(writer, 20)
    writer.close()
    assert [0, 20] == tell(run.path).windows()
    assert (set(range(1, 20)), {0, 20}) == (
        tell(run.path).states[0].incomplete,
        tell(run.path).states[0].complete,
    )


# Rivals


def test_two_processes_of_one_rank_get_two_files_and_are_told(run, make):
    """Both logs are complete, and each can name the other one while it lives (report b7)."""
    script = """
import sys
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_records
run = RunDir.create(sys.argv[1])
writer = Writer(run, producer(run))
print("started", flush=True)
for window in range(10):
    put_records(writer, window)
sys.stdin.readline()
writer.close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline()
        writer = make()
        for window in range(10):
            put_records(writer, window)
        (line,) = rivals(run, writer._producer)
        assert f"on {socket.gethostname()}, pid {other.pid}, last seen " in line
        assert [] == rivals(run, producer(run, rank=1))
        other.stdin.write("\n")
    assert [] == rivals(run, writer._producer)
    writer.close()
    told = tell(run.path)
    assert 2 == len({key[3] for key in told.frames})
    assert [list(range(10))] * 2 == [
        [key[4] for key in told.frames if key[3] == who.session] for who in told.reader.producers()
    ]


def _write_and_stay(path, ready):
    run = RunDir.create(path)
    put_records(Writer(run, producer(run)), 0)
    ready.set()
    time.sleep(60)


def test_the_dead_are_no_rivals(run):
    """A killed process of this host is none, reaped or not, nor is one whose id now is another's."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=_write_and_stay, args=(run.path, ready))
    other.start()
    assert ready.wait(60)
    me = producer(run)
    assert 1 == len(rivals(run, me))
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert [] == rivals(run, me)
    other.join()
    assert [] == rivals(run, me)
    reused = producer(run, pid=os.getppid(), started_us=1_000_000)  # long before that process was born
    SegmentWriter(run.segment(Stream.RECORDS, reused, 0), reused).close()
    assert [] == rivals(run, me)


def test_another_host_is_a_rival_while_it_gives_signs(run, monkeypatch):
    """A process elsewhere counts as alive for 30 s after its last sign of life."""
    far = producer(run, host="elsewhere", pid=1)
    segment = SegmentWriter(run.segment(Stream.RECORDS, far, 0), far)
    me = producer(run)
    assert f"session {far.session} on elsewhere, pid 1, last seen" in rivals(run, me)[0]
    monkeypatch.setattr("eventlog.rivals.now_us", lambda: now_us() + 31_000_000)
    assert [] == rivals(run, me)
    monkeypatch.undo()
    segment.finish()
    assert [] == rivals(run, me)


def test_rivals_survive_damage(run):
    """Files that cannot be read are nobody's sign of life."""
    write_run(run.path, 1)
    only(run.path, "*.records.0000.idx").write_bytes(b"\\x00" * 500)
    assert [] == rivals(run, producer(run))


def test_no_descriptors_are_left_open(run):
    """Writing and reading give back every descriptor."""
    write_run(run.path, 5, segment_bytes=2000)
    tell(run.path)
    rivals(run, producer(run))
    held = set()
    for place in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of another thread, and closed meanwhile
            held.add(place.readlink())
    assert [] == [path for path in held if path.is_relative_to(run.path)]


def test_flush_waits_for_payload_too(tmp_path):
    """After flush everything that was put is written, payload included."""
    log = eventlog.start(tmp_path)
    recorder = eventlog.Recorder()
    recorder.scalar({"x": 1})
    log.write(eventlog.drain([recorder]).frame)
    assert log.writer.flush(60)
    assert [1] == [batch.num_rows for _, _, batch in eventlog.RunReader(tmp_path).payload()]
    eventlog.stop()
