"""What is lost is told: by step, to the caller, to the user and on the disk; and how long callers waited."""

import threading
import warnings

import pytest

import eventlog
from aggregator import open_run, stats_tracker
from eventlog.losses import Losses
from eventlog.rundir import Problems, RunDir
from eventlog.schema import LossCause as Cause
from eventlog.schema import RecordType, Stream
from eventlog.sealed import SealedSegment
from eventlog.segment import Loss, SegmentWriter
from eventlog.writer import Writer
from tests.storage import payload, producer, put_payload, put_records, put_window, records, settle


def notes(path, stream, kind):
    """Return the index records of one type in a run's only producer's stream."""
    found = []
    for file in RunDir.open(path).segments(stream):
        with SealedSegment(file, Problems(), newest=True) as segment:
            found += [entry[1] for entry in segment.entries() if entry[1] and entry[1].type == kind]
    return found


@pytest.fixture
def run(tmp_path):
    """Return a fresh run."""
    return RunDir.create(tmp_path / "run")


def held(writer, stream, nbytes):
    """Keep the writer's thread busy with so many bytes of a queue; return what lets it go on."""
    entered, go_on = threading.Event(), threading.Event()
    batch = payload(0) if stream is Stream.PAYLOAD else records(0)

    def encode():
        entered.set()
        assert go_on.wait(60)
        return [batch]

    writer.put(stream, encode, nbytes=nbytes)
    assert entered.wait(60)
    return go_on


def test_losses_are_listed_by_step(run):
    """A loss has the step that was given, that a commit bound, before or after it, or the commit's own."""
    writer = Writer(run, producer(run), payload_queue_bytes=100, block_seconds=0)
    go_on = held(writer, Stream.PAYLOAD, 100)
    put_payload(writer, 1)
    writer.put(Stream.PAYLOAD, lambda: [payload(2)], window=2, nbytes=64, step=20)
    writer.bind(0, 3, 10)
    writer.put(Stream.COMMITS, lambda: 1 / 0, window=0, nbytes=1, step=10)
    put_payload(writer, 7)
    go_on.set()
    settle(writer)
    expected = {
        (Stream.PAYLOAD, 1): 10,
        (Stream.PAYLOAD, 2): 20,
        (Stream.COMMITS, 0): 10,
        (Stream.PAYLOAD, 7): None,
    }
    assert expected == {(loss.stream, loss.window): loss.step for loss in writer.losses()}
    writer.close()
    said = {(r.window): (r.first_id, r.last_id) for r in notes(run.path, Stream.PAYLOAD, RecordType.LOSS)}
    assert {1: (10, 10), 2: (20, 20), 7: (0, -1)} == said
    (commit,) = notes(run.path, Stream.COMMITS, RecordType.LOSS)
    assert (10, 10) == (commit.first_id, commit.last_id)


def test_what_waits_when_a_commit_binds_it_has_its_step_when_it_is_lost(run):
    """A window still queued when its commit comes is lost under that step."""
    writer = Writer(run, producer(run))
    go_on = held(writer, Stream.PAYLOAD, 100)
    put_payload(writer, 5)
    put_records(writer, 5)
    writer.bind(5, 5, 77)
    assert not writer.close(0.1)
    assert {(Stream.PAYLOAD, 77), (Stream.RECORDS, 77)} == {
        (loss.stream, loss.step) for loss in writer.losses() if loss.window == 5
    }
    go_on.set()


def test_a_window_lost_whole_is_listed_under_its_step(tmp_path, monkeypatch):
    """The log names the step of what its commit lost (reports b14, d4)."""
    log = eventlog.start(tmp_path)
    recorder = eventlog.Recorder()
    for step in range(3):
        recorder.scalar({"x": step})
        with monkeypatch.context() as patched:
            if step == 1:
                patched.setattr("eventlog.log.encode.records", lambda *_: 1 / 0)
            log.write(eventlog.drain([recorder]).frame)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert (step != 1) == log.commit(0, step, 100 + step)
    eventlog.stop()
    assert [(Stream.RECORDS, Cause.ENCODE_FAILED, 101)] == [(x.stream, x.cause, x.step) for x in log.losses()]


def test_the_user_is_told_once_that_values_are_lost(tmp_path, monkeypatch):
    """The first loss of payload of a kind warns with the next commit; the commit itself is durable."""
    log = eventlog.start(tmp_path)
    recorder = eventlog.Recorder()
    messages = []
    monkeypatch.setattr("eventlog.log.encode.payload", lambda _: 1 / 0)
    for step in range(3):
        recorder.scalar({"x": step})
        log.write(eventlog.drain([recorder]).frame)
        assert log.writer.flush(60)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert log.commit(0, step, step)
        messages += [str(one.message) for one in caught]
    eventlog.stop()
    expected = "values were lost (encode failed), records stay; later ones are counted"
    assert [f"{expected}: {tmp_path}"] == messages
    assert 3 == len(log.losses())


def test_how_long_callers_waited_is_counted_and_kept(run):
    """Waiting for room is measured, whether it came or not, and stands in the index (report d4)."""
    writer = Writer(run, producer(run), records_queue_bytes=1000, block_seconds=0.2)
    put_records(writer, 0)
    settle(writer)
    assert 0 == writer.waited
    go_on = held(writer, Stream.RECORDS, 1000)
    put_records(writer, 1)
    assert (0.2 <= writer.waited, 1) == (True, len(writer.losses()))
    before = writer.waited
    put_records(writer, 2)  # nothing moved: it does not wait again
    assert before == writer.waited
    go_on.set()
    settle(writer)
    writer.close()
    (end,) = notes(run.path, Stream.RECORDS, RecordType.END)
    assert (int(writer.waited * 1e6), 0) == (end.offset, end.length)


def test_commits_that_are_not_durable_are_counted_and_kept(tmp_path, monkeypatch):
    """The number of commits that were not on the disk when they returned stands in heartbeats and the end."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 0.02)
    log = eventlog.start(tmp_path)
    for step in range(4):
        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if step % 2:
                patched.setattr("eventlog.log.encode.commit", lambda _: 1 / 0)
            assert (step % 2 == 0) == log.commit(0, step, step)
        assert step % 2 == len(caught)
    while 2 not in [beat.length for beat in notes(tmp_path, Stream.RECORDS, RecordType.HEARTBEAT)]:
        threading.Event().wait(0.01)
    eventlog.stop()
    (end,) = notes(tmp_path, Stream.RECORDS, RecordType.END)
    assert (2, 2) == (log.not_durable, end.length)


def test_losses_that_were_noted_in_files_that_are_gone_are_noted_again(run, monkeypatch):
    """A note in a segment that is removed, because nothing else is in it, goes into the next one."""
    writer = Writer(run, producer(run), payload_queue_bytes=10, block_seconds=0)
    go_on = held(writer, Stream.PAYLOAD, 10)
    put_payload(writer, 3)
    go_on.set()
    with monkeypatch.context() as patched:
        patched.setattr("eventlog.segment.SegmentWriter.append", _fail)
        settle(writer)
        put_window(writer, 4)
        settle(writer)
    put_window(writer, 5)
    writer.close()
    lost = {loss.window for loss in writer.losses() if loss.stream is Stream.PAYLOAD}
    assert {3, 4} <= lost
    assert lost == {record.window for record in notes(run.path, Stream.PAYLOAD, RecordType.LOSS)}


def test_losses_are_noted_before_what_ends_them_is_acknowledged(run, monkeypatch):
    """When the disk takes something again, what it did not take is noted before anybody is told so.

    The process may be killed right after, or the disk be full again: there is no later.
    """
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 1e6)
    writer = Writer(run, producer(run))
    with monkeypatch.context() as patched:
        for call in ("append", "lost"):
            patched.setattr(f"eventlog.segment.SegmentWriter.{call}", _fail)
        for window in (0, 1):
            put_window(writer, window)
            settle(writer)
    assert writer.wait(put_records(writer, 2), 60)
    for stream in (Stream.RECORDS, Stream.PAYLOAD, Stream.COMMITS):
        assert {0, 1} == {record.window for record in notes(run.path, stream, RecordType.LOSS)}
    writer.close()


def test_a_stream_that_takes_nothing_does_not_hide_the_losses_of_the_others(run, monkeypatch):
    """At the end losses are noted wherever that is possible."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 1e6)
    writer = Writer(run, producer(run), payload_queue_bytes=10, block_seconds=0)
    go_on = held(writer, Stream.PAYLOAD, 10)
    put_payload(writer, 3)
    writer.lose(Loss(Stream.RECORDS, Cause.QUEUE_FULL, 3, 1))
    noted = SegmentWriter.lost
    monkeypatch.setattr(
        SegmentWriter, "lost", lambda one, loss: (_fail if loss.stream == 2 else noted.__get__(one))(loss)
    )
    go_on.set()
    writer.close()
    assert [3] == [record.window for record in notes(run.path, Stream.RECORDS, RecordType.LOSS)]


@pytest.mark.parametrize("early", [False, True])
def test_a_lost_export_row_is_listed_under_its_window_and_step(tmp_path, monkeypatch, early):
    """Without it nobody knows what a window came to: the window is incomplete, and its loss has a step.

    Also where the loss was noted before its step was known.
    """
    if early:
        monkeypatch.setattr("eventlog.writer.Writer.bind", lambda *_: None)
    log = eventlog.start(tmp_path)
    log.claim_attempt()
    for step in range(3):
        stats_tracker.scalar(x=step)
        with monkeypatch.context() as patched:
            if step == 1:
                patched.setattr("eventlog.log.encode.export", lambda *_: 1 / 0)
            stats = stats_tracker.export_all()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                log.commit(0, step, step, [stats])
    eventlog.stop()
    (loss,) = log.losses()
    assert (Stream.RECORDS, Cause.ENCODE_FAILED) == (loss.stream, loss.cause)
    assert (None if early else 1) == loss.step
    with open_run(tmp_path) as run:
        rows = run.sql("select step, complete from windows order by step").to_pylist()
        assert [(0, True), (1, False), (2, True)] == [(row["step"], row["complete"]) for row in rows]
        assert [(1, loss.window)] == [(row["step"], row["window"]) for row in run.info()["losses"]]
        rows = run.metrics(["x"], source="recomputed").to_pylist()
        assert [(0, False), (None, True), (2, False)] == [(row["value"], row["incomplete"]) for row in rows]


def _fail(*_):
    raise OSError(28, "No space left on device")


def test_losses_add_up():
    """Losses of one place are one entry; binding reaches those counted and those still to be noted."""
    losses = Losses()
    for rows in (1, 2):
        losses.count(Loss(Stream.PAYLOAD, Cause.QUEUE_FULL, 3, rows, 10 * rows))
    losses.count(Loss(Stream.RECORDS, Cause.WRITE_FAILED, 4, 5, 6, "why", 9), owed=False)
    losses.bind(0, 10, 8)
    first = Loss(Stream.PAYLOAD, Cause.QUEUE_FULL, 3, 3, 30, step=8)
    assert [first, Loss(Stream.RECORDS, Cause.WRITE_FAILED, 4, 5, 6, "why", 9)] == list(losses)
    assert (2, 1, first, None) == (len(losses), losses.of_records, losses.pay(), losses.pay())
    assert not losses.owed
    losses.owe(first)
    assert losses.owed
