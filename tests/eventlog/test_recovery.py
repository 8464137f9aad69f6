"""Checking a run, and saving what can be saved of a damaged one."""

import hashlib
import os
import shutil
import signal
import threading
import time

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventlog.attempt import LOST
from eventlog.errors import NotARunError, RunDirectoryError
from eventlog.judge import Judge, Seen
from eventlog.manifest import write_json
from eventlog.message import serialize
from eventlog.reader import RunReader
from eventlog.recovery import recover, verify
from eventlog.rundir import RunDir
from eventlog.schema import (
    ENTRY_SIZE,
    PAYLOAD,
    RECORDS,
    IndexHeader,
    IndexRecord,
    LossCause,
    RecordType,
    Stream,
)
from eventlog.segment import Loss
from eventlog.writer import Writer
from tests.crash.test_storage_crash import DAMAGE, damage
from tests.eventlog.test_reader import entry, write_other
from tests.storage import (
    IDS_A_WINDOW,
    commits,
    flip,
    only,
    payload,
    producer,
    put_window,
    records,
    settle,
    tell,
    write_run,
)

BATCHES = {Stream.RECORDS: records, Stream.PAYLOAD: payload, Stream.COMMITS: commits}
LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
RECORDS_DATA = "*.records.0000.arrows"
RECORDS_INDEX = "*.records.0000.idx"


@pytest.fixture
def ten(tmp_path):
    """Return a finished run of ten windows, of one producer, with an attempt."""
    run = write_run(tmp_path / "run", 10)
    run.claim_attempt({"role": "actor"})
    return run.path


@pytest.fixture
def saved(tmp_path):
    """Return a function that recovers a run, and checks what always holds; it returns report and rows."""

    def save(path):
        before = fingerprints(path)
        report = recover(path, tmp_path / "saved")
        assert before == fingerprints(path)
        told = tell(tmp_path / "saved")
        assert [] == told.problems
        for (stream, *_, window, _, first), rows in told.frames.items():
            number = first // IDS_A_WINDOW if stream is Stream.PAYLOAD else window
            assert BATCHES[stream](number).to_pylist() == rows
        return report, told

    return save


def fingerprints(path):
    """Return what every file of a run holds."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file: hashlib.blake2b(file.read_bytes()).hexdigest() for file in files}


def of(report, pattern):
    """Return what a report says of the one file that matches."""
    (found,) = [file for file in report.files if file.path.match(pattern)]
    return found


# verify


def test_a_whole_run_is_clean(ten):
    """Every file has a line: frames and rows of the segments, bytes of all, nothing bad."""
    found = verify(ten)
    assert found.clean
    counts = {file.kind: (file.frames, file.rows, file.bad) for file in found.files}
    expected = {"records": (10, 30, 0), "payload": (10, 10, 0), "commits": (10, 10, 0), "manifest": (0, 0, 0)}
    assert expected == counts
    files = [file for file in ten.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) == sum(file.bytes for file in found.files)


def test_progress_is_told(ten):
    """Whoever waits is told how many bytes are done, up to all of them."""
    told = []
    verify(ten, progress=lambda done, total: told.append((done, total)))
    segments = sum(file.stat().st_size for file in ten.rglob("*-*.*") if file.is_file())
    assert (segments, segments) == told[-1]
    assert sorted(told) == told


def test_damage_is_told_by_file(ten):
    """A flipped bit in a frame, in an index record and in a JSON file are each told with their file (g1)."""
    flip(only(ten, RECORDS_DATA), entry(ten, 5).offset + 100)
    flip(only(ten, "*.payload.0000.idx"), 3 * ENTRY_SIZE + 9)
    flip(only(ten, "0000.json"), 30)
    found = verify(ten)
    assert not found.clean
    assert (9, 1) == (of(found, RECORDS_DATA).frames, of(found, RECORDS_DATA).bad)
    assert (9, 1) == (of(found, "*.payload.0000.arrows").frames, of(found, "*.payload.0000.arrows").bad)
    wrong = [file.path.name for file in found.files if file.problems]
    expected = ["0000.json", only(ten, RECORDS_DATA).name, only(ten, "*.payload.0000.arrows").name]
    assert sorted(expected) == sorted(wrong)


def test_a_file_that_is_missing_or_foreign_is_told(ten):
    """A segment that is gone, and a file that is named like none, have a line of their own."""
    gone = only(ten, RECORDS_DATA)
    gone.unlink()
    only(ten, RECORDS_INDEX).unlink()
    stray = only(ten, "*.payload.0000.idx").with_name("stray.idx")
    stray.write_bytes(b"x")
    write_json(ten / "cursors.json", {})  # not where cursors lie
    (ten / "cursors").mkdir()
    (ten / "cursors" / "c.json").write_text("{")
    found = verify(ten)
    assert {path.relative_to(ten) for path in (gone, stray, ten / "cursors" / "c.json")} == {
        file.path for file in found.files if file.problems
    }


def test_what_a_process_lost_is_told(tmp_path):
    """Losses that the processes noted themselves make a run not clean."""
    run = RunDir.create(tmp_path)
    writer = Writer(run, producer(run))
    put_window(writer, 0)

    def fail():
        raise ValueError("no")

    writer.put(Stream.RECORDS, fail, window=1, first_id=100, last_id=104, nbytes=10)
    writer.close()
    found = verify(tmp_path)
    assert not found.clean
    ((_, loss),) = found.losses
    assert (LossCause.ENCODE_FAILED, 1, 5) == (loss.cause, loss.window, loss.rows)


def test_rows_that_arrow_refuses_are_bad(tmp_path):
    """A frame whose checksum is right and whose rows are broken all the same is found."""
    offsets = pa.array([0, 3], pa.int64()).buffers()[1]
    text = pa.Array.from_buffers(pa.large_string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe\xfd")])
    columns = [text if f.name == "key" else pa.nulls(1, f.type) for f in RECORDS]
    batch = pa.RecordBatch.from_arrays(columns, schema=RECORDS)
    write_other(tmp_path, RECORDS, batch)
    found = verify(tmp_path)
    assert (0, 1) == (of(found, RECORDS_DATA).frames, of(found, RECORDS_DATA).bad)
    assert "holds what Arrow refuses" in of(found, RECORDS_DATA).problems[0]


def test_a_live_run_is_clean(tmp_path):
    """What is being written while it is checked is no damage."""
    run = RunDir.create(tmp_path)
    writer = Writer(run, producer(run))
    for window in range(3):
        put_window(writer, window)
    settle(writer)
    with only(tmp_path, RECORDS_DATA).open("ab") as file:
        file.write(serialize(records(3), Stream.RECORDS).to_pybytes()[:-9])
    with only(tmp_path, RECORDS_INDEX).open("ab") as file:
        file.write(b"x" * 5)
    assert verify(tmp_path).clean
    writer.close()


# recover


def test_a_whole_run_is_copied(ten, saved):
    """Of a run without damage the copy has every row, attempt and end mark, and nothing is discarded."""
    report, told = saved(ten)
    assert report.complete
    assert list(tell(ten).frames.items()) == list(told.frames.items())
    before = [(s.producer, s.complete, s.payload, s.ended, s.heartbeat_us) for s in tell(ten).states]
    assert before == [(s.producer, s.complete, s.payload, s.ended, s.heartbeat_us) for s in told.states]
    assert RunDir.open(ten).attempts() == told.reader.run.attempts()
    assert RunDir.open(ten).manifest == told.reader.run.manifest
    assert verify(told.reader.run.path).clean


def test_a_damaged_frame_is_counted_and_noted(ten, saved):
    """A frame with a flipped bit is left out, and the copy says which window lost its rows (report g2)."""
    flip(only(ten, RECORDS_DATA), entry(ten, 5).offset + 100)
    report, told = saved(ten)
    file = of(report, RECORDS_DATA)
    assert (9, 27, 0, 1, entry(ten, 5).length) == (
        file.frames,
        file.rows,
        file.unverified,
        file.discarded,
        file.discarded_bytes,
    )
    (state,) = told.states
    assert ({4}, set(range(10)) - {4}) == (state.incomplete, state.complete)
    assert [Loss(Stream.RECORDS, LossCause.DAMAGED, 4, 3, entry(ten, 5).length)] == state.losses
    assert not verify(told.reader.run.path).clean


def test_a_lost_index_is_made_good(ten, saved):
    """Without its index every frame of a stream is found by walking it, and marked as not verified."""
    only(ten, RECORDS_INDEX).unlink()
    report, told = saved(ten)
    file = of(report, RECORDS_DATA)
    assert (10, 10, 0) == (file.frames, file.unverified, file.discarded)
    assert list(range(10)) == told.windows()
    assert set(range(9)) == told.states[0].complete  # of the last one nobody knows whether it was whole
    assert {9} == told.states[0].incomplete


@pytest.mark.parametrize("stream", ["payload", "commits"])
def test_other_streams_are_walked_too(ten, saved, stream):
    """Payload finds its windows by its records' ids, commits by their numbers."""
    index = only(ten, "*.payload.0000.idx") if stream == "payload" else only(ten / "commits", "*.idx")
    index.write_bytes(b"")
    report, told = saved(ten)
    assert (10, 0) == (
        sum(file.unverified for file in report.files),
        sum(file.discarded for file in report.files),
    )
    assert list(range(10)) == told.windows(Stream[stream.upper()])
    assert set(range(10)) == told.states[0].complete


def test_a_torn_header_loses_nothing(ten, saved):
    """A header with a flipped bit still holds what its records are sealed with."""
    flip(only(ten, RECORDS_INDEX), 50)
    report, told = saved(ten)
    assert report.complete
    assert 0 == sum(file.unverified for file in report.files)
    assert set(range(10)) == told.states[0].complete


def test_a_hole_in_the_index_is_bridged(ten, saved):
    """A frame whose index record alone is damaged is found between its neighbours."""
    for place in (20, 21):
        flip(only(ten, RECORDS_INDEX), 6 * ENTRY_SIZE + place)
    report, told = saved(ten)
    assert (10, 1, 0) == (
        of(report, RECORDS_DATA).frames,
        of(report, RECORDS_DATA).unverified,
        of(report, RECORDS_DATA).discarded,
    )
    assert set(range(10)) == told.states[0].complete


@pytest.mark.parametrize("place", [11, 16, 40, ENTRY_SIZE + 40, 6 * ENTRY_SIZE + 20, 11 * ENTRY_SIZE + 1])
def test_one_bit_of_an_index_costs_nothing(ten, saved, place):
    """Header and records whose checksum is right but for one bit are read: every frame is still sealed."""
    flip(only(ten, RECORDS_INDEX), place)
    report, told = saved(ten)
    file = of(report, RECORDS_DATA)
    assert (10, 0, 0) == (file.frames, file.unverified, file.discarded)
    assert set(range(10)) == told.states[0].complete
    assert told.states[0].ended


def test_records_of_a_stream_that_is_gone_are_counted(ten, saved):
    """Where neither a record nor its frame is left, the report and the copy say so."""
    only(ten, "*.payload.0000.arrows").unlink()
    for place in (20, 21):
        flip(only(ten, "*.payload.0000.idx"), 6 * ENTRY_SIZE + place)
    report, _ = saved(ten)
    file = of(report, "*.payload.0000.arrows")
    assert (0, 10) == (file.frames, file.discarded)
    assert "1 index records: damaged, and the stream that they tell of is missing" == file.reasons[-1]


def test_a_damaged_schema_message_costs_nothing(ten, saved):
    """Where it ends the index says: the head of the stream may be damaged, too."""
    for place in (2, 6, 300):
        flip(only(ten, RECORDS_DATA), place)
    report, told = saved(ten)
    assert report.complete
    assert list(range(10)) == told.windows()
    assert [] == told.states[0].losses


def test_the_walk_goes_on_behind_a_hole(ten, saved):
    """Zeros in a stream without an index cost the frames they cover, and no other."""
    data = only(ten, RECORDS_DATA)
    third, sixth = entry(ten, 3), entry(ten, 6)
    content = bytearray(data.read_bytes())
    content[third.offset + 8 : sixth.offset + 40] = bytes(sixth.offset - third.offset + 32)
    data.write_bytes(content)
    only(ten, RECORDS_INDEX).unlink()
    report, told = saved(ten)
    assert [0, 1, 6, 7, 8, 9] == told.windows()
    assert of(report, RECORDS_DATA).discarded == 1
    assert {0, 6, 7, 8} == told.states[0].complete  # what lies before a hole may not have been all of it


def test_a_frame_that_was_being_written_is_no_loss(tmp_path, saved):
    """Part of a frame at the end of a killed process's stream is told apart from damage."""
    run = RunDir.create(tmp_path / "source")
    writer = Writer(run, producer(run))
    for window in range(3):
        put_window(writer, window)
    settle(writer)
    shutil.copytree(run.path, tmp_path / "run")
    writer.close()
    part = serialize(records(3, 50), Stream.RECORDS).to_pybytes()[:-9]
    with only(tmp_path / "run", RECORDS_DATA).open("ab") as file:
        file.write(part)
    report, told = saved(tmp_path / "run")
    assert (True, len(part)) == (report.complete, of(report, RECORDS_DATA).unfinished_bytes)
    assert ([0, 1, 2], [], False) == (told.windows(), told.states[0].losses, told.states[0].ended)


def test_a_frame_that_was_never_sealed_is_found(tmp_path, saved):
    """A process killed between a frame and its index record has lost nothing: the walk finds it."""
    run = write_run(tmp_path / "run", 3)
    index = only(run.path, RECORDS_INDEX)
    index.write_bytes(index.read_bytes()[: -2 * ENTRY_SIZE])
    report, told = saved(run.path)
    assert (3, 1) == (of(report, RECORDS_DATA).frames, of(report, RECORDS_DATA).unverified)
    assert [0, 1, 2] == told.windows()


def test_a_missing_segment_becomes_an_empty_one(tmp_path, saved):
    """The copy has a segment of every number, and names the windows that nobody has any more."""
    run = write_run(tmp_path / "run", 10, segment_bytes=6000)
    files = run.segments(Stream.RECORDS)
    files[1].data.unlink()
    files[1].index.unlink()
    before = tell(run.path).states[0]
    report, told = saved(run.path)
    assert "is missing" in of(report, files[1].data.name).reasons
    assert (before.complete, before.incomplete) == (told.states[0].complete, told.states[0].incomplete)
    assert before.incomplete == {loss.window for loss in told.states[0].losses if loss.window >= 0}


def test_pruned_payload_stays_pruned(tmp_path, saved):
    """What a process removed to keep its budget is no damage, in the copy neither."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run), segment_bytes=1000)
    for window in range(4):
        put_window(writer, window, values=16)
    settle(writer)
    oldest = run.segments(Stream.PAYLOAD)[0]
    writer.close()
    newest = run.segments(Stream.PAYLOAD)[-1]
    uid = IndexHeader.unpack(newest.index.read_bytes()[:ENTRY_SIZE]).segment_uid
    said = IndexRecord(RecordType.PRUNE, last_id=oldest.number).pack(uid)
    content = newest.index.read_bytes()
    newest.index.write_bytes(content[:-ENTRY_SIZE] + said + content[-ENTRY_SIZE:])
    oldest.data.unlink()
    assert verify(run.path).clean
    report, told = saved(run.path)
    assert report.complete
    assert ({oldest.number}, True) == (told.states[0].pruned, verify(told.reader.run.path).clean)


def test_payload_that_compaction_moved_is_counted(ten, saved):
    """What stands in derived tables alone is no damage of the run, and is counted as not copied."""
    data = only(ten, "*.payload.0000.arrows")
    moved = [record for _, record, _ in RunReader(ten).payload()]
    data.unlink()
    (ten / "tables").mkdir()
    write_json(ten / "tables" / "moved.json", {"streams": [data.name]})
    assert verify(ten).clean
    report, told = saved(ten)
    file = of(report, data.name)
    assert ("10 frames: their rows are in tables alone, which are not copied",) == file.reasons
    assert (10, sum(record.length for record in moved)) == (file.discarded, file.discarded_bytes)
    assert (list(range(10)), []) == (told.windows(), told.windows(Stream.PAYLOAD))


def test_manifests_are_saved_or_made_anew(ten, saved):
    """A damaged run.json is made anew with the id its segments know; a damaged claim leaves its number."""
    known = RunDir.open(ten).id
    flip(ten / "run.json", 30)
    flip(only(ten, "0000.json"), 30)
    report, told = saved(ten)
    assert known == told.reader.run.id
    assert [(0, LOST)] == [(claim.number, claim.outcome) for claim in told.reader.run.attempts()]
    assert ["run.json", "0000.json"] == [file.path.name for file in report.files if file.discarded]


def test_what_is_not_of_this_version_is_left_out(tmp_path, saved):
    """A segment of a newer major version, or of another type of column, is discarded and says why."""
    schema = RECORDS.set(RECORDS.get_field_index("key"), pa.field("key", pa.int64()))
    file = write_other(tmp_path / "run", schema, pa.RecordBatch.from_pylist([{"key": 3}], schema=schema))
    newer = write_other(tmp_path / "other", RECORDS, records(0), major=2)
    newer.folder.rename(tmp_path / "run" / "events" / "actor-1")
    for name in (newer.data.name, newer.index.name):
        moved = tmp_path / "run" / "events" / "actor-1" / name
        moved.rename(tmp_path / "run" / "events" / "actor-0" / name)
    (tmp_path / "run" / "events" / "actor-1").rmdir()
    report, told = saved(tmp_path / "run")
    assert {} == told.frames
    assert ("expected column key as large_string, got int64",) == of(report, file.data.name).reasons
    assert ("expected format 1.x, got 2.0 of a newer release",) == of(report, newer.data.name).reasons


def test_columns_of_a_newer_minor_version_are_kept(tmp_path):
    """A segment with more columns is copied as it is: a reader that knows them finds them."""
    schema = RECORDS.append(pa.field("mood", pa.large_string()))
    batch = pa.RecordBatch.from_pylist([{"record_id": 1, "key": "k", "mood": "good"}], schema=schema)
    write_other(tmp_path / "run", schema, batch, minor=3)
    assert recover(tmp_path / "run", tmp_path / "saved").complete
    assert (
        pa.ipc.open_stream(only(tmp_path / "saved", RECORDS_DATA).read_bytes())
        .read_all()
        .equals(pa.ipc.open_stream(only(tmp_path / "run", RECORDS_DATA).read_bytes()).read_all())
    )
    assert [] == tell(tmp_path / "saved").problems


def test_nothing_is_overwritten(ten, tmp_path):
    """A target with anything in it, the run itself or a place inside it is refused, and left as it is."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    before = fingerprints(tmp_path)
    for into in (tmp_path / "taken", tmp_path / "taken" / "mine"):
        with pytest.raises(RunDirectoryError, match="expected a new or an empty directory, got one in use"):
            recover(ten, into)
    for into in (ten, ten / "saved"):
        with pytest.raises(RunDirectoryError, match="expected a directory outside the run"):
            recover(ten, into)
    with pytest.raises(NotARunError):
        recover(tmp_path / "none", tmp_path / "other")
    assert before == fingerprints(tmp_path)


def test_an_interrupted_recovery_leaves_nothing(ten, tmp_path):
    """The copy appears when it is complete: half of it could be taken for the whole."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = fingerprints(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        recover(ten, tmp_path / "saved", progress=interrupt)
    assert before == fingerprints(tmp_path)
    (tmp_path / "saved").mkdir()
    assert recover(ten, tmp_path / "saved").complete
    assert [] == tell(tmp_path / "saved").problems


def test_a_segment_in_the_folder_of_another_rank_is_left_out(ten, tmp_path):
    """Files that were copied to another rank are none of that rank's, and are not in the copy."""
    shutil.copytree(ten / "commits" / "actor-0", ten / "commits" / "actor-7")
    report = recover(ten, tmp_path / "saved")
    assert ["actor-7"] == [f.path.parent.name for f in report.files if f.discarded]
    assert not (tmp_path / "saved" / "commits" / "actor-7").exists()
    assert verify(tmp_path / "saved").clean


@pytest.mark.parametrize("stream", [Stream.RECORDS, Stream.COMMITS])
def test_only_payload_is_pruned(tmp_path, stream):
    """Of a run with a budget, a stream that is gone is no payload that was pruned; the copy reads cleanly."""
    path = write_run(tmp_path / "run", 40, payload_budget=1).path
    saved = recover(path, tmp_path / "whole")
    assert (True, True) == (saved.complete, verify(tmp_path / "whole").clean)
    (file,) = [f for f in RunDir.open(path).segments(stream) if f.number == 0]
    file.data.unlink()
    assert not recover(path, tmp_path / "saved").complete
    assert not verify(tmp_path / "saved").clean
    assert [] == tell(tmp_path / "saved").problems


@pytest.mark.parametrize("examples", [pytest.param(8), pytest.param(300, marks=LONG)])
def test_whatever_the_damage_the_copy_is_clean(ten, tmp_path_factory, examples):
    """Whatever is done to a run, its copy reads without a problem, true rows once, and all that was read."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(damages=st.lists(DAMAGE, min_size=1, max_size=4), seed=st.integers(0, 1000))
    def law(damages, seed):
        _damage_and_save(ten, tmp_path_factory, damages, seed)

    law()


def _damage_and_save(ten, tmp_path_factory, damages, seed):
    root = tmp_path_factory.mktemp("damaged")
    shutil.copytree(ten, root / "run")
    damage(root / "run", damages, seed)
    before = fingerprints(root / "run")
    readable = tell(root / "run")
    recover(root / "run", root / "saved")
    assert before == fingerprints(root / "run")
    told = tell(root / "saved")
    assert [] == told.problems
    assert set(readable.frames) <= set(told.frames)
    numbers = set()
    for (stream, *_, window, _, first), rows in told.frames.items():
        number = first // IDS_A_WINDOW if stream is Stream.PAYLOAD else window
        assert BATCHES[stream](number).to_pylist() == rows
        numbers.add((stream, number))
    assert len(numbers) == len(told.frames)
    shutil.rmtree(root)


# The judge


def test_a_judge_tells_what_a_frame_holds(ten):
    """Rows, window and ids of a frame come from the frame itself; what is none is said."""
    data, record = only(ten, RECORDS_DATA), entry(ten, 5)
    with Judge() as judge:
        assert Seen(3, 4, 400, 402) == judge.look(data, record.offset, record.length, Stream.RECORDS)
        first = judge.pid
        assert "expected a batch of" in judge.look(data, record.offset, record.length - 8, Stream.RECORDS)
        assert "expected a batch of" in judge.look(data, record.offset, record.length, Stream.PAYLOAD)
        assert "FileNotFoundError" in judge.look(ten / "none", 0, 8, Stream.RECORDS)
        assert first == judge.pid


@pytest.mark.parametrize(
    ("batch", "wrong"),
    [
        (pa.RecordBatch.from_pylist([], schema=RECORDS), "holds no rows"),
        (pa.RecordBatch.from_pylist([{"window": 1}], schema=RECORDS), "lacks 1 of 1 numbers"),
        (
            pa.RecordBatch.from_pylist([{"record_id": 1, "window": w} for w in (1, 2)], schema=RECORDS),
            r"expected records of one window, got [1, 2]",
        ),
    ],
)
def test_a_judge_refuses_what_no_writer_writes(tmp_path, batch, wrong):
    """Rows that no process of ours can have written are not taken from a stream without an index."""
    (tmp_path / "frame").write_bytes(batch.serialize())
    with Judge() as judge:
        assert wrong in judge.look(tmp_path / "frame", 0, batch.serialize().size, Stream.RECORDS)


def test_export_rows_belong_to_no_window(tmp_path):
    """The index says of an export row that it is of no window, whatever window it tells of."""
    batch = pa.RecordBatch.from_pylist([{"record_id": 7, "window": 3, "kind": "export"}], schema=RECORDS)
    (tmp_path / "frame").write_bytes(batch.serialize())
    with Judge() as judge:
        assert Seen(1, -1, 7, 7) == judge.look(tmp_path / "frame", 0, batch.serialize().size, Stream.RECORDS)


def test_a_frame_that_kills_its_reader_is_survived(tmp_path, ten):
    """When the child dies over a frame, that frame is refused, and a new child looks at the next one."""
    os.mkfifo(tmp_path / "fifo")  # the child waits in it, until it is killed
    data, record = only(ten, RECORDS_DATA), entry(ten, 5)
    with Judge() as judge:
        judge.look(data, record.offset, record.length, Stream.RECORDS)
        child = judge.pid
        killer = threading.Timer(0.3, os.kill, (child, signal.SIGKILL))
        killer.start()
        answer = judge.look(tmp_path / "fifo", 0, 8, Stream.RECORDS)
        killer.join()
        assert "crashed the process that looked at it (SIGKILL)" == answer
        assert Seen(3, 4, 400, 402) == judge.look(data, record.offset, record.length, Stream.RECORDS)
        assert child != judge.pid


def test_a_frame_that_takes_too_long_is_refused(tmp_path):
    """A child that does not answer is ended, and its frame refused."""
    os.mkfifo(tmp_path / "fifo")
    with Judge(seconds=0.2) as judge:
        while "took more than 0.2 s" not in str(judge.look(tmp_path / "fifo", 0, 8, Stream.RECORDS)):
            time.sleep(0.01)
        assert judge.pid is None


def test_a_payload_frame_keeps_its_ids(tmp_path):
    """Of payload only the ids are known."""
    batch = payload(3)
    (tmp_path / "frame").write_bytes(batch.serialize())
    assert PAYLOAD.equals(batch.schema)
    with Judge() as judge:
        assert Seen(1, -1, 300, 300) == judge.look(
            tmp_path / "frame", 0, batch.serialize().size, Stream.PAYLOAD
        )
