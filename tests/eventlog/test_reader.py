"""The verified reader: live runs, every kind of damage, other versions, what it says of each session."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pytest

from eventlog import follow, recover, verify
from eventlog.errors import FormatVersionError, NotARunError
from eventlog.manifest import write_json
from eventlog.message import serialize
from eventlog.reader import RunReader
from eventlog.rundir import RunDir
from eventlog.schema import (
    ENTRY_SIZE,
    PAYLOAD,
    RECORDS,
    SCHEMAS,
    IndexHeader,
    IndexRecord,
    RecordType,
    Stream,
    crc32c,
    fingerprint,
)
from eventlog.schema import LossCause as Cause
from eventlog.segment import FrameInfo, Loss, SegmentWriter, to_metadata
from eventlog.windows import Completeness, WindowSet
from eventlog.writer import Writer
from tests.storage import (
    commits,
    flip,
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

RECORDS_DATA = "*.records.0000.arrows"
RECORDS_INDEX = "*.records.0000.idx"


@pytest.fixture
def ten(tmp_path):
    """Return a finished run of ten windows, of one producer."""
    return write_run(tmp_path / "run", 10).path


@pytest.fixture
def live(tmp_path):
    """Return a function that copies a run of some windows while its writer is at work."""

    def copy(windows):
        run = RunDir.create(tmp_path / "source")
        writer = Writer(run, producer(run))
        for window in range(windows):
            put_window(writer, window)
        settle(writer)
        shutil.copytree(run.path, tmp_path / "run")
        writer.close()
        return tmp_path / "run"

    return copy


def entry(path, slot):
    """Return one index record of a run's records."""
    index = only(path, RECORDS_INDEX).read_bytes()
    uid = IndexHeader.unpack(index[:ENTRY_SIZE]).segment_uid
    return IndexRecord.unpack(index[(1 + slot) * ENTRY_SIZE :][:ENTRY_SIZE], uid)


def rewrite(path, change):
    """Write a file anew with its bytes changed."""
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


# Live runs


def test_a_run_is_read_while_it_is_written(tmp_path):
    """Another process sees every sealed frame of a live run, and the next pass the new ones (report b2)."""
    script = """
import sys
from eventlog.rundir import RunDir
from eventlog.writer import Writer
from tests.storage import producer, put_window, settle
run = RunDir.create(sys.argv[1])
writer = Writer(run, producer(run))
window = 0
for line in sys.stdin:
    for _ in range(int(line)):
        put_window(writer, window)
        window += 1
    settle(writer)
    print(window, flush=True)
writer.close()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        reader = None
        for more, total in ((0, 0), (10, 10), (5, 15)):
            print(more, file=other.stdin, flush=True)
            assert f"{total}\n" == other.stdout.readline()
            reader = reader or RunReader(tmp_path / "run")
            told = tell(tmp_path / "run", reader)
            assert [list(range(total))] * 3 == [told.windows(stream) for stream in Stream]
            (state,) = reader.sessions()
            assert ([], False, set(range(total))) == (told.problems, state.ended, state.complete)
    assert reader.sessions()[0].ended
    assert [] == reader.problems


def test_a_torn_newest_tail_is_not_yet(live):
    """Half a frame, half an index record, a page of zeros where the next record comes: no problem, no row."""
    path = live(3)
    for stream in ("records", "payload"):
        data, index = only(path, f"*.{stream}.0000.arrows"), only(path, f"*.{stream}.0000.idx")
        with data.open("ab") as file:
            frame = serialize(records(3), Stream.RECORDS) if stream == "records" else payload(3).serialize()
            file.write(frame.to_pybytes()[:-9])
        for tail in (b"\x01" * 63, bytes(ENTRY_SIZE), bytes(10)):
            before = index.read_bytes()
            index.write_bytes(before + tail)
            told = tell(path)
            assert ([0, 1, 2], []) == (told.windows(), told.problems)
            index.write_bytes(before)
    (state,) = RunReader(path).sessions()
    assert len(serialize(records(3), Stream.RECORDS)) - 9 == state.unsealed[Stream.RECORDS]


def test_what_was_late_is_no_problem_any_more(live):
    """A frame whose bytes came after its index record (a network file system) is taken by the next pass."""
    path = live(3)
    data = only(path, RECORDS_DATA)
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    reader = RunReader(path)
    assert ([0, 1], 1) == (tell(path, reader).windows(), len(reader.problems))
    assert ({0, 1}, {2}) == (reader.sessions()[0].complete, reader.sessions()[0].incomplete)
    data.write_bytes(whole)
    assert ([0, 1, 2], []) == (tell(path, reader).windows(), reader.problems)
    assert {0, 1, 2} == reader.sessions()[0].complete


def test_a_session_that_has_only_just_begun_is_no_problem(tmp_path):
    """Whatever of the first two files exists yet, it is "not yet"."""
    run = RunDir.create(tmp_path)
    file = run.segment(Stream.RECORDS, producer(run), 0)
    SegmentWriter(file, producer(run, session=file.session, started_us=file.started_us)).close()
    index, data = file.index.read_bytes(), file.data.read_bytes()
    file.data.unlink()
    for size in (0, 10, ENTRY_SIZE):
        file.index.write_bytes(index[:size])
        assert [] == tell(tmp_path).problems
    for size in [*range(0, len(data), 29), len(data)]:
        file.data.write_bytes(data[:size])
        assert [] == tell(tmp_path).problems
    for size in range(ENTRY_SIZE, 2 * ENTRY_SIZE):
        file.index.write_bytes(index[:size])
        assert [] == tell(tmp_path).problems


def test_a_run_without_close_is_read_and_told_from_a_finished_one(live):
    """That a session is finished is known from its end mark, not from reaching the end (report g5)."""
    path = live(4)
    assert [0, 1, 2, 3] == tell(path).windows() == tell(path.parent / "source").windows()
    assert not RunReader(path).sessions()[0].ended
    assert RunReader(path.parent / "source").sessions()[0].ended


# Damage


def test_no_run_is_said():
    """What is no run is refused at once."""
    with pytest.raises(NotARunError, match="expected a run directory, got nothing"):
        RunReader("/no/such/run")


def test_frames_alone_are_enough(ten):
    """Without the manifest, or anything else but the frame files, everything is read (report b6)."""
    (ten / "run.json").unlink()
    told = tell(ten)
    missing = [(ten / "run.json", "is missing: of which run this is the segments alone say")]
    assert (list(range(10)), missing) == (told.windows(), [(p.path, p.reason) for p in told.problems])
    assert ["actor"] == [who.role for who in told.reader.producers()]


def test_a_file_of_random_bytes_costs_only_its_rows(tmp_path):
    """Of four ranks, one with a file of garbage, three are read in full, and the file is named (b10, g4)."""
    for rank in range(4):
        write_run(tmp_path, 3, rank=rank)
    for pattern, frames in (
        ("events/actor-2/*.records.0000.arrows", 9),
        ("events/actor-1/*.records.0000.idx", 6),
    ):
        path = only(tmp_path, pattern)
        path.write_bytes(os.urandom(path.stat().st_size))
        told = tell(tmp_path)
        rows = [row for key, rows in told.frames.items() if key[0] is Stream.RECORDS for row in rows]
        assert frames == len(rows) / 3
        expected = {
            i: records(i // 100).to_pylist()[i % 100] for i in (0, 1, 2, 100, 101, 102, 200, 201, 202)
        }
        assert all(expected[row["record_id"]] == row for row in rows)
        assert path in {problem.path for problem in told.problems}
    assert ({"actor-1", "actor-2"}, 4) == (
        {p.path.parent.name for p in told.problems},
        len(told.reader.producers()),
    )


def test_one_flipped_bit_costs_one_frame(ten):
    """Of ten frames with a flip in the fifth, nine are read, one is reported with its place (report g1)."""
    data = only(ten, RECORDS_DATA)
    record = entry(ten, 5)
    flip(data, record.offset + record.length // 2)
    told = tell(ten)
    assert [0, 1, 2, 3, 5, 6, 7, 8, 9] == told.windows()
    (problem,) = told.problems
    assert (data, 5, record.offset) == (problem.path, problem.frame, problem.offset)
    assert str(problem).startswith("expected checksum 0x")
    assert str(problem).endswith(f", frame 5, offset {record.offset}: {data}")
    (state,) = told.states
    assert ({4}, set(range(10)) - {4}) == (state.incomplete, state.complete)


def test_the_states_are_right_without_reading_first(ten):
    """A session's windows are judged by the bytes of its records, whoever asks first."""
    flip(only(ten, RECORDS_DATA), entry(ten, 5).offset)
    assert {4} == RunReader(ten).sessions()[0].incomplete
    reader = RunReader(ten)
    next(reader.records())
    assert {4} == reader.sessions()[0].incomplete


@pytest.mark.parametrize("kind", ["records", "payload", "commits"])
def test_a_stream_that_was_cut_is_told_without_reading_it(ten, kind):
    """Where frames need not be read, as those in tables and of payload, their stream's size still tells."""
    data = min(file for file in ten.glob("*/*/*.arrows") if kind in str(file.relative_to(ten)))
    data.write_bytes(data.read_bytes()[:-8])
    reader = RunReader(ten)
    reader.leave_out({data: WindowSet(range(1, 100))})
    reader.sessions()
    (problem,) = reader.problems
    assert (data, "ends before its last sealed frame does") == (problem.path, problem.reason)


def test_a_torn_tail_costs_its_frame_only(tmp_path):
    """Cut off in the last frame, all before it and all other ranks are read; the file stays (report g2)."""
    for rank in (0, 1):
        write_run(tmp_path, 4, rank=rank)
    data = only(tmp_path, f"actor-1/{RECORDS_DATA}")
    data.write_bytes(data.read_bytes()[:-20])
    told = tell(tmp_path)
    assert [0, 1, 2, 3, 0, 1, 2] == told.windows()
    assert [data] == [problem.path for problem in told.problems]
    assert "ends before its last sealed frame does" in told.reasons()
    assert data.exists()


def test_zero_filled_holes_and_tails_cost_what_they_cover(ten):
    """Zeros over frames, index records or the end hide only those, and are reported."""
    data, index = only(ten, RECORDS_DATA), only(ten, RECORDS_INDEX)
    record = entry(ten, 3)

    def zero(path, start, size):
        rewrite(path, lambda b: b.__setitem__(slice(start, start + size), bytes(size)))

    zero(data, record.offset, record.length)  # window 2
    zero(index, 6 * ENTRY_SIZE, ENTRY_SIZE)  # the record of window 4
    with data.open("ab") as file:
        file.write(bytes(4096))
    with index.open("ab") as file:
        file.write(bytes(256))
    told = tell(ten)
    assert [0, 1, 3, 5, 6, 7, 8, 9] == told.windows()
    assert {(data, 3), (index, 5)} <= {(problem.path, problem.frame) for problem in told.problems}
    (state,) = told.states
    assert ({2, 4}, {0, 1, 3, 5, 6, 7, 8, 9}) == (state.incomplete, state.complete)


def test_zeros_where_a_crash_cut_the_index_are_reported(live):
    """More than one record's place of zeros at the end is no writer at work, but lost records."""
    path = live(4)
    rewrite(only(path, RECORDS_INDEX), lambda b: b.__setitem__(slice(-128, None), bytes(128)))
    told = tell(path)
    assert [0, 1] == told.windows()
    assert 2 == told.reasons().count("damaged index record")


def test_a_second_stream_behind_the_first_is_reported(ten, tmp_path):
    """A stream appended to a segment, ended or not, is not read and not overlooked (report g6)."""
    shutil.copytree(ten, tmp_path / "killed")
    rewrite(only(tmp_path / "killed", RECORDS_INDEX), lambda b: b.__delitem__(slice(-64, None)))
    for path in (ten, tmp_path / "killed"):
        data = only(path, RECORDS_DATA)
        size = data.stat().st_size
        data.write_bytes(data.read_bytes() * 2)
        told = tell(path)
        assert list(range(10)) == told.windows()
        assert (
            f"{size} bytes behind the last sealed frame are not read, offset {size}: {data}" == told.reasons()
        )


@pytest.mark.parametrize(
    "tail", [b"x", b"\xff\xff\xff\xff\xff\xff\xff\xff", bytes(100), bytes(range(7, 250)) * 12]
)
def test_foreign_bytes_behind_a_growing_stream_are_reported(live, tail):
    """Bytes that no frame begins with are not taken for one being written (report g6)."""
    path = live(2)
    with only(path, RECORDS_DATA).open("ab") as file:
        file.write(tail)
    told = tell(path)
    assert [0, 1] == told.windows()
    assert f"{len(tail)} bytes behind the last sealed frame are not read" in told.reasons()


def test_a_missing_index_is_reported(ten):
    """Without its index nothing of a stream is believed; the other streams are read."""
    only(ten, RECORDS_INDEX).unlink()
    told = tell(ten)
    size = only(ten, RECORDS_DATA).stat().st_size
    assert ([], list(range(10))) == (told.windows(), told.windows(Stream.COMMITS))
    assert f"is missing: {size} bytes of frames are not read" in told.reasons()


@pytest.mark.parametrize("size", [0, 1, 63])
def test_an_index_with_a_torn_header_is_reported(ten, size):
    """An index cut in its header is skipped and named."""
    index = only(ten, RECORDS_INDEX)
    index.write_bytes(index.read_bytes()[:size])
    told = tell(ten)
    assert ([], [index]) == (told.windows(), [problem.path for problem in told.problems])
    assert "has no intact header" in told.reasons()


def test_a_missing_stream_is_reported(ten):
    """An index without its stream names what is missing, and its windows are incomplete."""
    data = only(ten, RECORDS_DATA)
    data.unlink()
    told = tell(ten)
    assert ([], f"is missing, with the frames its index lists: {data}") == (told.windows(), told.reasons())
    assert set(range(10)) == told.states[0].incomplete


def test_a_missing_segment_is_reported(tmp_path):
    """When a segment between others is gone, it is named and its windows are not taken for complete."""
    run = write_run(tmp_path, 10, segment_bytes=6000)
    files = run.segments(Stream.RECORDS)
    assert len(files) > 3
    before, after = (tell(tmp_path).windows(), files[1])
    after.data.unlink()
    after.index.unlink()
    told = tell(tmp_path)
    missing = set(before) - set(told.windows())
    assert [f"is missing: {after.data}"] == [str(problem) for problem in told.problems]
    (state,) = told.states
    assert (missing, set(told.windows())) == (state.incomplete, state.complete)


def test_a_segment_of_a_far_number_is_one_problem(ten):
    """However many segments seem to be missing, what is there is read and checked at once."""
    run = RunDir.open(ten)
    (file,) = run.segments(Stream.RECORDS)
    far = replace(file, number=999_999_999)
    for old, new in ((file.data, far.data), (file.index, far.index)):
        shutil.copy(old, new)
    told = tell(ten)
    assert list(range(10)) == told.windows()
    first, last = replace(file, number=1).data, replace(file, number=999_999_998).data.name
    expected = [
        f"is missing, as are those after it up to {last}: {first}",
        f"is of segment 0 of stream 1: {far.index}",
    ]
    assert sorted(expected) == sorted(str(problem) for problem in told.problems)
    assert not verify(ten).clean
    saved = ten.with_name("saved")
    (left,) = [file for file in recover(ten, saved).files if file.discarded]
    assert ("its number is 999999999, expected 1", True) == (
        left.reasons[0].partition(":")[0],
        verify(saved).clean,
    )


@pytest.mark.parametrize("made", ["pipe", "folder", "device"])
@pytest.mark.parametrize("ending", ["arrows", "idx", "json"])
def test_what_is_no_file_is_reported_and_not_waited_for(ten, made, ending):
    """A pipe, a folder or a device under the name of a run's file costs that file."""
    pattern = "events/*/*.records.0000." if ending != "json" else "run."
    (path,) = ten.glob(f"{pattern}{ending}")
    path.unlink()
    if made == "pipe":
        os.mkfifo(path)
    elif made == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    told = tell(ten)
    assert path in {problem.path for problem in told.problems}
    assert any("Not a regular file" in problem.reason for problem in told.problems)
    assert (list(range(10)) if ending == "json" else []) == told.windows()
    assert not verify(ten).clean
    recover(ten, ten.with_name("saved"))
    assert 10 == len(list(follow(ten, timeout=0.01)))


def test_a_damaged_schema_message_costs_no_frame(ten):
    """Frames are parsed by the built-in schema: a bad one in the file is reported and not needed."""
    flip(only(ten, RECORDS_DATA), 300)
    told = tell(ten)
    assert (list(range(10)), [0]) == (told.windows(), [problem.frame for problem in told.problems])
    (who,) = told.reader.producers()
    assert ("actor", 0) == (who.role, who.rank)


def test_producers_are_known_by_their_names_when_nothing_else_is_left(ten):
    """Without any readable schema message, role, rank, session and start come from the file names."""
    (before,) = RunReader(ten).producers()
    for data in ten.rglob("*.arrows"):
        flip(data, 300)
    (who,) = RunReader(ten).producers()
    assert (before.role, before.rank, before.session, before.started_us) == (
        who.role,
        who.rank,
        who.session,
        who.started_us,
    )
    assert ("", 0) == (who.host, who.pid)


def test_files_under_a_wrong_name_are_refused(ten):
    """A copy under another number, session, rank or stream is not read twice, and reported."""
    (folder,) = (ten / "events").iterdir()
    (ten / "events" / "actor-7").mkdir()
    names = [only(ten, RECORDS_DATA).name, only(ten, RECORDS_INDEX).name]
    session = RunReader(ten).producers()[0].session
    for name in names:
        for other in (
            folder / name.replace("records", "payload").replace("0000", "0001"),
            folder / name.replace("0000", "0001"),
            folder / name.replace(session, "f" * 32),
            ten / "events" / "actor-7" / name,
        ):
            shutil.copy(folder / name, other)
    told = tell(ten)
    assert list(range(10)) == told.windows()
    assert 4 == len({problem.path.with_suffix("") for problem in told.problems})


def test_a_file_that_may_not_be_read_is_reported(ten):
    """What the system refuses to open or list is named with its reason."""
    index = only(ten, RECORDS_INDEX)
    index.unlink()
    index.mkdir()
    told = tell(ten)
    assert list(range(10)) == told.windows(Stream.COMMITS)
    assert index in {problem.path for problem in told.problems}


def test_vanished_files_are_no_problem(ten):
    """A segment whose files go away between listing and opening is passed over."""
    reader = RunReader(ten)
    frames = reader.payload()
    next(frames)
    shutil.rmtree(ten / "commits")
    assert 9 == len(list(frames))
    assert [] == list(reader.commits())
    assert [] == reader.problems


# Other schemas and versions


def write_other(path, schema, batch, *, minor=0, major=1, declared=None):
    """Write a run with one frame of records as a writer of another version would."""
    run = RunDir.create(path)
    who = producer(run)
    file = run.segment(Stream.RECORDS, who, 0)
    file.folder.mkdir(parents=True)
    uid = os.urandom(16)
    head = IndexHeader(Stream.RECORDS, 0, uid, declared or fingerprint(schema), 1, major, minor)
    message = schema.with_metadata(to_metadata(who, Stream.RECORDS, None)).serialize().to_pybytes()
    frame = batch.serialize().to_pybytes()
    said = [
        IndexRecord(RecordType.FRAME, length=len(message), crc=crc32c(message)),
        IndexRecord(
            RecordType.FRAME, 0, 1, 0, 0, 0, 2, len(message), len(frame), batch.num_rows, crc32c(frame)
        ),
        IndexRecord(77, 5),  # a kind of record of a newer minor version
    ]
    file.data.write_bytes(message + frame)
    file.index.write_bytes(head.pack() + b"".join(record.pack(uid) for record in said))
    return file


def test_a_newer_minor_version_is_read(tmp_path):
    """Columns it has more are ignored, those it lacks are null, unknown index records passed over."""
    schema = RECORDS.append(pa.field("mood", pa.large_string())).remove(RECORDS.get_field_index("count"))
    rows = [{"record_id": i, "key": f"k{i}", "mood": "good", "sum": 1.5} for i in range(3)]
    write_other(tmp_path, schema, pa.RecordBatch.from_pylist(rows, schema=schema), minor=3)
    told = tell(tmp_path)
    ((_, _, batch),) = told.reader.records()
    assert (RECORDS, []) == (batch.schema, told.problems)
    assert [("k0", None, 1.5), ("k1", None, 1.5), ("k2", None, 1.5)] == [
        (row["key"], row["count"], row["sum"]) for row in batch.to_pylist()
    ]
    assert {0} == told.states[0].complete


def test_a_newer_major_version_is_refused(tmp_path):
    """A run of a newer major version is refused; a segment of one is skipped and says so."""
    file = write_other(tmp_path, RECORDS, records(0), major=2)
    told = tell(tmp_path)
    assert ([], f"expected format 1.x, got 2.0 of a newer release: {file.index}") == (
        told.windows(),
        told.reasons(),
    )
    write_json(tmp_path / "run.json", {"id": "x", "format": [2, 0], "created_us": 1})
    with pytest.raises(FormatVersionError, match=r"expected format 1\.x, got 2\.0"):
        RunReader(tmp_path)


def test_a_column_of_another_type_names_column_types_and_file(tmp_path):
    """A file with `key` as a number is refused as a whole, with the column and both types (report g15)."""
    schema = RECORDS.set(RECORDS.get_field_index("key"), pa.field("key", pa.int64()))
    file = write_other(tmp_path, schema, pa.RecordBatch.from_pylist([{"key": 3}], schema=schema))
    told = tell(tmp_path)
    assert ([], f"expected column key as large_string, got int64: {file.data}") == (
        told.windows(),
        told.reasons(),
    )
    assert {0} == told.states[0].incomplete


def test_unknown_columns_without_their_schema_are_refused(tmp_path):
    """When the fingerprint is another one and the schema message damaged, no frame is guessed at."""
    schema = RECORDS.append(pa.field("mood", pa.int64()))
    file = write_other(tmp_path, schema, pa.RecordBatch.from_pylist([{"key": "x"}], schema=schema))
    flip(file.data, 200)
    told = tell(tmp_path)
    assert [] == told.windows()
    assert "has other columns than this version, and does not say which" in told.reasons()


def test_a_frame_of_another_schema_is_refused(tmp_path):
    """A frame with other columns than its segment says is refused, however well sealed (report g7)."""
    for n, schema in enumerate(
        (RECORDS.insert(1, pa.field("extra", pa.int64())), RECORDS.remove(1), PAYLOAD)
    ):
        batch = pa.RecordBatch.from_pylist([{"record_id": 1}], schema=schema)
        file = write_other(tmp_path / str(n), RECORDS, batch)
        told = tell(tmp_path / str(n))
        assert ([], 1, 0) == (told.windows(), told.problems[0].frame, len(told.problems) - 1)
        assert f"expected a batch of {len(RECORDS)} columns" in told.reasons()
        assert file.data == told.problems[0].path


def test_a_frame_with_other_rows_than_its_index_says_is_refused(tmp_path):
    """Rows are counted against the index."""
    file = write_other(tmp_path, RECORDS, records(0))
    index = file.index.read_bytes()
    uid = IndexHeader.unpack(index[:64]).segment_uid
    wrong = replace(IndexRecord.unpack(index[128:192], uid), rows=4).pack(uid)
    file.index.write_bytes(index[:128] + wrong + index[192:])
    told = tell(tmp_path)
    assert ([], True) == (told.windows(), "expected 4 rows, got 3" in told.reasons())


def test_frames_moved_between_segments_are_refused(tmp_path):
    """An index record, or a whole index, of another segment seals nothing here."""
    first, second = write_run(tmp_path / "a", 3).path, write_run(tmp_path / "b", 3).path
    theirs = only(second, RECORDS_INDEX).read_bytes()
    rewrite(only(first, RECORDS_INDEX), lambda b: b.__setitem__(slice(128, 192), theirs[128:192]))
    told = tell(first)
    assert ([1, 2], "damaged index record, frame 1") == (
        told.windows(),
        told.reasons().partition(", offset")[0],
    )
    only(first, RECORDS_INDEX).write_bytes(theirs)
    told = tell(first)
    assert told.problems
    assert all(
        records(key[4]).to_pylist() == rows for key, rows in told.frames.items() if key[0] is Stream.RECORDS
    )


# What is asked of it


def test_payload_is_read_only_where_it_is_wanted(ten):
    """`wanted` is asked with session and index record, before a byte of the frame is read."""
    flip(only(ten, "*.payload.0000.arrows"), 3000)
    asked = []

    def wanted(session, record):
        asked.append((session, record.window))
        return record.window == 9

    reader = RunReader(ten)
    ((who, record, batch),) = reader.payload(wanted)
    assert payload(9).to_pylist() == batch.to_pylist()
    assert (9, True) == (record.window, record.last_of_window)
    assert [(who.session, window) for window in range(10)] == asked
    assert [] == reader.problems


def test_everything_comes_in_the_order_of_producers(tmp_path):
    """By role, rank as a number, start and window."""
    for role, rank in (("rollout", 0), ("actor", 10), ("actor", 9)):
        write_run(tmp_path, 2, role=role, rank=rank)
    reader = RunReader(tmp_path)
    places = [(who.role, who.rank, record.window) for who, record, _ in reader.records()]
    assert sorted(places) == places
    assert [("actor", 9), ("actor", 10), ("rollout", 0)] == [
        (who.role, who.rank) for who in reader.producers()
    ]
    assert [who.session for who in reader.producers()] == [
        state.producer.session for state in reader.sessions()
    ]
    assert [0, 1] * 3 == [batch["commit"][0].as_py() for _, _, batch in reader.commits()]


def test_a_session_tells_what_was_lost(tmp_path):
    """Losses noted in the index, of whatever cause, come back; a window that lost records is incomplete.

    What was refused when it was recorded was never a part of its window.
    """
    run = RunDir.create(tmp_path)
    who = producer(run)
    segment = SegmentWriter(run.segment(Stream.RECORDS, who, 0), who)
    noted = [Loss(Stream.RECORDS, cause, window, 5, 7) for window, cause in enumerate([*Cause, 99])]
    for loss in noted:
        segment.lost(loss)
    segment.append([serialize(records(20), Stream.RECORDS)], FrameInfo(20, 0, True, 2000, 2002, 3))
    segment.finish()
    (state,) = RunReader(tmp_path).sessions()
    refused, *others = sorted(state.losses, key=lambda loss: loss.cause != Cause.REFUSED)
    assert [loss for loss in noted if loss.cause != Cause.REFUSED] == others
    assert (Cause.REFUSED, -1, 5, 7) == (refused.cause, refused.window, refused.rows, refused.bytes)
    assert ({20}, {loss.window for loss in others}) == (state.complete, state.incomplete)


def test_sizes_and_unsealed_bytes_are_told(live):
    """A session's bytes on disk are those of its files."""
    path = live(3)
    (state,) = RunReader(path).sessions()
    for stream, folder in ((Stream.COMMITS, "commits"), (Stream.RECORDS, "events")):
        files = (path / folder).rglob("*.records.*" if folder == "events" else "*.*")
        assert sum(file.stat().st_size for file in files) == state.bytes[stream]
    assert 0 == state.unsealed[Stream.RECORDS]


def test_a_pruned_segment_is_no_damage(tmp_path):
    """Payload removed to keep a budget is known by its prune record; records and the rest are read (b14)."""
    run = RunDir.create(tmp_path)
    writer = Writer(run, producer(run), segment_bytes=1000)
    for window in range(4):
        put_window(writer, window, values=200)
    settle(writer)
    oldest, *_, newest = run.segments(Stream.PAYLOAD)
    writer._segments.of(Stream.PAYLOAD)._note(IndexRecord(RecordType.PRUNE, last_id=oldest.number))
    oldest.data.unlink()
    writer.close()
    told = tell(tmp_path)
    assert ([0, 1, 2, 3], [1, 2, 3], []) == (told.windows(), told.windows(Stream.PAYLOAD), told.problems)
    (state,) = told.states
    assert ({oldest.number}, {1, 2, 3}, {0, 1, 2, 3}) == (state.pruned, state.payload, state.complete)
    newest.data.unlink()
    assert "is missing" in tell(tmp_path).reasons()
    reader = RunReader(tmp_path)  # the states alone tell it, too
    reader.sessions()
    assert [newest.data] == [problem.path for problem in reader.problems]


def test_large_frames_are_read_whole(tmp_path):
    """A frame of some megabytes comes back equal, and lists keep 64-bit offsets (report g8)."""
    run = RunDir.create(tmp_path)
    writer = Writer(run, producer(run))
    put_payload(writer, 1, values=2_000_000)
    put_records(writer, 1, rows=99)
    assert writer.close(60)
    ((_, _, batch),) = RunReader(tmp_path).payload()
    assert payload(1, 2_000_000).equals(batch)
    assert SCHEMAS[Stream.PAYLOAD].equals(batch.schema)


def test_commits_say_what_was_committed(ten):
    """Commit rows come back as they were."""
    rows = [row for _, _, batch in RunReader(ten).commits() for row in batch.to_pylist()]
    assert [row for number in range(10) for row in commits(number).to_pylist()] == rows


# Windows


def test_a_window_set_is_a_set():
    """Runs of numbers behave as the set of them, and cost what a run costs."""
    windows = WindowSet([5, 1, 2, 3, 9])
    assert {1, 2, 3, 5, 9} == windows
    assert [(1, 4), (5, 6), (9, 10)] == windows.runs()
    windows.add(4)
    windows.discard(2)
    windows.discard(77)
    assert ([1, 3, 4, 5, 9], 5, False, False) == (list(windows), len(windows), 2 in windows, "1" in windows)
    assert {1, 2} == windows & {1} | {2}
    windows.update(0, 1_000_000)
    assert ([(0, 1_000_000)], "WindowSet(0..999999)") == (windows.runs(), repr(windows))


def _frame(window, frame=0, last=True):
    return IndexRecord(RecordType.FRAME, window, int(last), 0, frame)


@pytest.mark.parametrize(
    ("events", "complete", "incomplete"),
    [
        ([(0, 0, True), (1, 0, True)], {0, 1}, set()),
        ([(0, 0, False), (0, 1, False), (0, 2, True)], {0}, set()),
        ([(0, 0, False)], set(), {0}),
        ([(0, 0, False), (0, 2, True)], set(), {0}),
        ([(0, 1, True), (1, 0, True)], {1}, {0}),
        ([(0, 0, True), "gap", (4, 0, True)], {0, 4}, {1, 2, 3}),
        ([(0, 0, False), "gap", (0, 2, True), (1, 0, True)], {1}, {0}),
        (["gap", (2, 0, True)], {2}, {0, 1}),
        ([(0, 0, True), (7, 0, True)], {0, 7}, set()),
        ([(0, 0, True), "lost"], set(), {0}),
    ],
)
def test_a_window_is_complete_when_all_its_frames_are_there(events, complete, incomplete):
    """Frames 0 … k without a gap, the last one flagged, nothing noted as lost; else it is incomplete."""
    windows = Completeness()
    for event in events:
        if event == "gap":
            windows.gap()
        elif event == "lost":
            windows.lost(0)
        else:
            windows.frame(_frame(*event), good=True)
    assert (complete, incomplete) == (windows.complete, windows.incomplete)
