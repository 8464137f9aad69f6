"""Commits that are missing, sessions that wrote nothing, folders that hold nothing."""

import os
import shutil
import time

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlog.clock import now_us
from eventlog.gaps import gaps
from eventlog.reader import RunReader
from eventlog.recovery import recover, verify
from eventlog.rundir import Problems, RunDir
from eventlog.schema import COMMITS, ENTRY_SIZE, IndexHeader, IndexRecord, LossCause, RecordType, Stream
from eventlog.sealed import SILENT_SECONDS, SealedSegment
from eventlog.segment import Loss
from eventlog.windows import Completeness
from eventlog.writer import Writer
from tests.storage import commits, flip, only, producer, put_window, settle, tell, write_run

RECORDS_INDEX = "*.records.0000.idx"
OLD_US = 60_000_000


def frames_of(run, stream):
    """Return the index records of a stream's only segment by place."""
    (file,) = run.segments(stream)
    with SealedSegment(file, Problems(), newest=True) as segment:
        return file, dict(segment.entries())


def spoil(run, *slots):
    """Turn a bit of some frames of commits over; the first one is at 1."""
    file, records = frames_of(run, Stream.COMMITS)
    for slot in slots:
        flip(file.data, records[slot].offset + records[slot].length - 20)


def cut_out(run, slot):
    """Take a commit's index record out, as if its process had never come to write it."""
    file, _ = frames_of(run, Stream.COMMITS)
    index = file.index.read_bytes()
    place = (1 + slot) * ENTRY_SIZE
    file.index.write_bytes(index[:place] + index[place + ENTRY_SIZE :])


def lost(run):
    """Return the losses of the only session of a run."""
    (state,) = RunReader(run.path).sessions()
    return state.losses


def missing(number, detail, rows=1):
    """Return the loss of commits that nobody has noted."""
    return Loss(Stream.COMMITS, LossCause.MISSING, number, rows, detail=detail)


@pytest.fixture
def run(tmp_path):
    """Return a finished run of six commits: that of number n is of step n."""
    return write_run(tmp_path / "run", 6)


def test_a_damaged_commit_is_named(run):
    """A commit whose frame is damaged is a loss with the steps around it, and verify is not clean."""
    spoil(run, 3)
    expected = missing(2, "commit 2, after step 1 and before step 3")
    assert [expected] == lost(run)
    found = verify(run.path)
    assert ([expected], False) == ([loss for _, loss in found.losses], found.clean)


def test_a_commit_that_left_no_trace_is_named(run):
    """A number that is missing before later ones is a loss even where nothing is damaged."""
    cut_out(run, 4)
    assert [missing(3, "commit 3, after step 2 and before step 4")] == lost(run)
    assert not verify(run.path).clean


def test_missing_commits_in_a_row_are_one_loss(run):
    """Several at the beginning are one loss, whose only edge is the one behind them."""
    spoil(run, 1, 2)
    assert [missing(0, "commits 0 to 1, before step 2", rows=2)] == lost(run)


def test_a_damaged_last_commit_is_named(run):
    """The index still tells that there was one more."""
    spoil(run, 6)
    assert [missing(5, "commit 5, after step 4")] == lost(run)


def test_the_attempt_is_named(tmp_path):
    """What the commits around a gap say of their attempt is told with it."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    for number in (0, 2):
        row = pa.RecordBatch.from_pylist([{**commits(number).to_pylist()[0], "attempt": 7}], schema=COMMITS)
        writer.put(Stream.COMMITS, lambda row=row: [row], window=number, nbytes=300)
    writer.close()
    assert [missing(1, "commit 1 of attempt 7, after step 0 and before step 2")] == lost(run)


def test_a_noted_commit_is_not_concluded_anew(run):
    """A loss that the process noted itself, and those that recovery notes, are told once."""
    spoil(run, 3)
    recover(run.path, run.path.with_name("saved"))
    (loss,) = lost(RunDir.open(run.path.with_name("saved")))
    assert (LossCause.DAMAGED, 2, 1) == (loss.cause, loss.window, loss.rows)


def test_a_commit_on_its_way_is_not_missing(tmp_path):
    """A live process may write two commits in the other order: the earlier one is missing once a third is."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    for number in (0, 2):
        writer.put(Stream.COMMITS, lambda number=number: [commits(number)], window=number, nbytes=300)
    settle(writer)
    assert [] == lost(run)
    writer.put(Stream.COMMITS, lambda: [commits(3)], window=3, nbytes=300)
    settle(writer)
    assert [1] == [loss.window for loss in lost(run)]
    writer.close()


@given(st.lists(st.sampled_from(["whole", "bad", "begun", "noted", "gone"]), max_size=12))
def test_every_number_is_whole_noted_or_missing(kinds):
    """Of the numbers up to the newest frame none is forgotten and none told twice."""
    said, noted = Completeness(), set()
    for number, kind in enumerate(kinds):
        if kind == "noted":
            said.lost(number)
            noted.add(number)
        elif kind != "gone":
            record = IndexRecord(RecordType.FRAME, number, flags=kind != "begun")
            said.frame(record, good=kind != "bad")
    numbers = [number for gap in gaps(said, noted) for number in gap]
    newest = max((number for number, kind in enumerate(kinds) if kind != "gone"), default=-1)
    latest = max((number for number, kind in enumerate(kinds) if kind not in ("gone", "noted")), default=-1)
    expected = [
        number
        for number, kind in enumerate(kinds[: newest + 1])
        if kind in ("bad", "gone") or (kind == "begun" and number < latest)
    ]
    assert expected == numbers


# Sessions that wrote nothing


def begun(path, size, *, data=None, ago_us=OLD_US):
    """Return a run of one session of which so many bytes of the index are there, and of the stream."""
    run = RunDir.create(path)
    writer = Writer(run, producer(run, started_us=now_us() - ago_us))
    put_window(writer, 0)
    writer.close()
    for file in [*run.segments(Stream.PAYLOAD), *run.segments(Stream.COMMITS)]:
        file.data.unlink()
        file.index.unlink()
    shutil.rmtree(run.path / "commits")
    (file,) = run.segments(Stream.RECORDS)
    content = file.index.read_bytes()[:size]
    file.index.write_bytes(content)
    if data is None:
        file.data.unlink()
    else:
        file.data.write_bytes(file.data.read_bytes()[:data])
    if size >= ENTRY_SIZE and ago_us:
        age(file.index, ago_us)
    return run


def age(index, ago_us):
    """Let a segment have been opened that long ago."""
    content = index.read_bytes()
    header = IndexHeader.unpack(content[:ENTRY_SIZE])
    said = (header.stream, header.segment, header.segment_uid, header.fingerprint, now_us() - ago_us)
    index.write_bytes(IndexHeader(*said).pack() + content[ENTRY_SIZE:])


@pytest.mark.parametrize(("size", "data"), [(0, None), (0, 0), (20, 0), (ENTRY_SIZE, None), (ENTRY_SIZE, 0)])
def test_a_session_that_wrote_nothing_is_told(tmp_path, size, data):
    """Files of no bytes, and a header alone, are a session without windows, and a problem (report b2)."""
    run = begun(tmp_path / "run", size, data=data)
    told = tell(run.path)
    assert (1, set()) == (len(told.states), set(told.states[0].complete))
    assert "seals nothing: its process wrote no more" in told.reasons()
    found = verify(run.path)
    assert not found.clean
    assert 1 == len([file for file in found.files if file.problems])


@pytest.mark.parametrize("size", [0, 20, ENTRY_SIZE])
def test_a_session_that_begins_is_not_told(tmp_path, size):
    """A process that started a moment ago may be about to write."""
    run = begun(tmp_path / "run", size, data=0, ago_us=0)
    assert [] == tell(run.path).problems
    assert verify(run.path).clean


def test_a_live_process_that_begins_a_segment_is_no_dead_one(tmp_path):
    """Between a segment's index and its header the one before says that the process lives."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run, started_us=now_us() - OLD_US))
    put_window(writer, 0)
    settle(writer)
    (file,) = run.segments(Stream.RECORDS)
    file.index.with_name(file.index.name.replace("records.0000", "records.0001")).write_bytes(b"")
    with only(run.path, "*.payload.0000.idx").open("ab") as index:
        index.write(b"x" * 5)
    assert [] == tell(run.path).problems
    writer.close()


def test_a_stream_that_is_gone_is_told_even_without_rows(tmp_path):
    """An index that seals only the schema of a stream says that there was one."""
    run = RunDir.create(tmp_path / "run")
    Writer(run, producer(run)).close()
    only(run.path, "*.records.0000.arrows").unlink()
    assert "is missing" in tell(run.path).reasons()


def test_an_empty_folder_is_told(tmp_path):
    """A folder of a producer without any segment is a problem once it cannot just have been made."""
    run = write_run(tmp_path / "run", 1)
    folder = run.path / "events" / "actor-3"
    folder.mkdir()
    assert [] == tell(run.path).problems
    old = time.time() - SILENT_SECONDS - 5
    os.utime(folder, (old, old))
    assert "holds no segment" in tell(run.path).reasons()
    assert not verify(run.path).clean
