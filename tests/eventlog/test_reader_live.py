"""What a reader makes of processes that live, died or were followed by others, and what it costs it."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from eventlog.clock import now_us
from eventlog.manifest import write_json
from eventlog.reader import RunReader
from eventlog.rundir import RunDir
from eventlog.schema import ENTRY_SIZE, IndexHeader, IndexRecord, RecordType, Stream, crc32c
from eventlog.sealed import SILENT_SECONDS
from eventlog.writer import Writer
from tests.eventlog.test_reader import entry, rewrite
from tests.storage import only, payload, producer, put_window, records, settle, tell, write_run

RECORDS_DATA = "*.records.0000.arrows"
RECORDS_INDEX = "*.records.0000.idx"
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def no_signs(monkeypatch):
    """Let indexes hold what the tests put there, however long that takes, and no sign of life."""
    monkeypatch.setattr("eventlog.writer.HEARTBEAT_SECONDS", 1e6)


@pytest.fixture
def torn(tmp_path):
    """Return a run whose process died while it wrote the last index record, as if a moment ago."""
    run = RunDir.create(tmp_path / "source")
    writer = Writer(run, producer(run))
    for window in range(3):
        put_window(writer, window)
    settle(writer)
    shutil.copytree(run.path, tmp_path / "run")
    writer.close()
    index = only(tmp_path / "run", RECORDS_INDEX)
    index.write_bytes(index.read_bytes()[:-5])
    return tmp_path / "run"


def seen(path, moment_us):
    """Let the process's only sign of life be of another time: when it opened its segment."""
    index = only(path, RECORDS_INDEX)
    content = index.read_bytes()
    header = IndexHeader.unpack(content[:ENTRY_SIZE])
    other = IndexHeader(header.stream, header.segment, header.segment_uid, header.fingerprint, moment_us)
    index.write_bytes(other.pack() + content[ENTRY_SIZE:])


TORN = f"ends in {ENTRY_SIZE - 5} bytes of an index record"


def test_a_torn_index_record_of_a_live_process_is_not_yet(torn):
    """As long as the process may be writing it, half an index record is no damage."""
    told = tell(torn)
    assert ([0, 1], []) == (told.windows(), told.problems)


@pytest.mark.parametrize("seconds", [-SILENT_SECONDS - 5, SILENT_SECONDS + 5])
def test_a_torn_index_record_of_a_silent_process_is_reported(torn, seconds):
    """After a time without a sign of life, or with one of another time, half an index record is a problem."""
    seen(torn, now_us() + int(seconds * SECOND))
    told = tell(torn)
    assert [0, 1] == told.windows()
    assert TORN in told.reasons()


def test_a_torn_index_record_before_a_later_attempt_is_reported(torn):
    """A process that fell silent before a later attempt began does not come back."""
    seen(torn, now_us() - 12 * SECOND)
    assert [] == tell(torn).problems
    RunDir.open(torn).claim_attempt({})
    assert TORN in tell(torn).reasons()


def test_a_torn_index_record_of_an_earlier_attempt_is_reported(tmp_path):
    """Where the process knew its attempt, a higher one decides, whatever the clocks say."""
    run = RunDir.create(tmp_path / "run")
    run.claim_attempt({})
    writer = Writer(run, producer(run), attempt=0)
    put_window(writer, 0)
    settle(writer)
    with only(run.path, RECORDS_INDEX).open("ab") as index:
        index.write(b"\x01\x02")
    assert [] == tell(run.path).problems
    run.claim_attempt({})
    assert "ends in 2 bytes of an index record" in tell(run.path).reasons()
    writer.close()


def test_a_torn_index_record_before_a_later_process_is_reported(torn):
    """A process of the same role and rank that began afterwards has taken its place."""
    seen(torn, now_us() - 12 * SECOND)
    run = RunDir.open(torn)
    Writer(run, producer(run, rank=1)).close()
    assert [] == tell(torn).problems
    Writer(run, producer(run)).close()
    assert TORN in tell(torn).reasons()


def test_zeros_for_an_index_record_of_a_dead_process_are_reported(torn):
    """The page of zeros that a crash left where an index record should be is a problem, then."""
    index = only(torn, RECORDS_INDEX)
    rewrite(index, lambda b: b.__setitem__(slice(len(b) - ENTRY_SIZE + 5, None), bytes(ENTRY_SIZE)))
    assert [] == tell(torn).problems
    seen(torn, 1)
    assert "damaged index record" in tell(torn).reasons()


# Clocks


def test_clocks_that_jump_change_no_row(tmp_path):
    """Sessions that begin in the future or the past, and heartbeats that run backwards, cost nothing."""
    run = RunDir.create(tmp_path)
    for rank, start in enumerate((1, 4_000_000_000 * SECOND, now_us())):
        writer = Writer(run, producer(run, rank=rank, started_us=start))
        put_window(writer, 0)
        settle(writer)
        for moment in (50 * SECOND, 10 * SECOND):
            segment = writer._segments.of(Stream.RECORDS)
            segment._note(IndexRecord(RecordType.HEARTBEAT, first_id=moment))
        put_window(writer, 1)
        writer.close()
    told = tell(tmp_path)
    assert ([0, 1] * 3, []) == (told.windows(), told.problems)
    assert [{0, 1}] * 3 == [state.complete for state in told.states]


# Frames that come twice


def test_an_index_record_that_is_there_twice_is_read_once(tmp_path):
    """A frame listed a second time is not served again, and reported."""
    path = write_run(tmp_path, 5).path
    index = only(path, RECORDS_INDEX)
    rewrite(
        index,
        lambda b: b.__setitem__(slice(4 * ENTRY_SIZE, 4 * ENTRY_SIZE), b[3 * ENTRY_SIZE : 4 * ENTRY_SIZE]),
    )
    frames = [record.window for _, record, _ in RunReader(path).records()]
    assert [0, 1, 2, 3, 4] == frames
    assert "damaged index record" in tell(path).reasons()


# Many frames at once


def test_blocks_are_the_frames_joined(tmp_path):
    """Blocks hold the rows of the good frames in order, all columns or some."""
    for rank in (0, 1):
        write_run(tmp_path, 30, rank=rank, segment_bytes=20_000)
    reader = RunReader(tmp_path)
    for stream, frames in ((Stream.RECORDS, reader.records), (Stream.COMMITS, reader.commits)):
        expected = [(who.rank, record.window, row) for who, record, b in frames() for row in b.to_pylist()]
        blocks = list(reader.blocks(stream))
        rows = [(block.producer.rank, row) for block in blocks for row in block.batch.to_pylist()]
        assert [(rank, row) for rank, _, row in expected] == rows
        numbers = [window for b in blocks for window in np.repeat(b.entries["window"], b.entries["rows"])]
        assert [window for _, window, _ in expected] == numbers
    some = list(reader.blocks(Stream.RECORDS, ["sum", "key"], lambda _, those: those["window"] % 2 == 1))
    assert {("key", "sum")} == {tuple(block.batch.schema.names) for block in some}
    windows = [window for block in some for window in block.entries["window"]]
    assert [n for _ in (0, 1) for n in range(1, 30, 2)] == windows


def test_blocks_leave_damage_out(tmp_path):
    """A bad frame among others, or one of another schema, costs itself and no other (report g7)."""
    path = write_run(tmp_path, 10).path
    data, record = only(path, RECORDS_DATA), entry(path, 4)
    index = only(path, RECORDS_INDEX)
    uid = IndexHeader.unpack(index.read_bytes()[:ENTRY_SIZE]).segment_uid
    foreign = payload(3).serialize().to_pybytes()
    assert len(foreign) <= record.length
    rewrite(data, lambda b: b.__setitem__(slice(record.offset, record.offset + len(foreign)), foreign))
    said = IndexRecord(
        RecordType.FRAME, 3, 1, 0, 0, 300, 302, record.offset, len(foreign), 3, crc32c(foreign)
    ).pack(uid)
    rewrite(index, lambda b: b.__setitem__(slice(5 * ENTRY_SIZE, 6 * ENTRY_SIZE), said))
    rewrite(data, lambda b: b.__setitem__(entry(path, 7).offset + 50, 0xAA))
    reader = RunReader(path)
    windows = [window for block in reader.blocks(Stream.RECORDS) for window in block.entries["window"]]
    assert [0, 1, 2, 4, 5, 7, 8, 9] == windows
    # The one behind the foreign frame, which is shorter than what it replaced, has a hole before it.
    assert [4, 5, 7] == sorted(problem.frame for problem in reader.problems)
    assert {3, 6} == reader.sessions()[0].incomplete


def test_two_sorts_of_frames_come_in_one_pass(tmp_path):
    """Each sort has the frames, columns and problems that it has alone, whatever is damaged between them."""
    path = write_run(tmp_path, 30).path
    rewrite(only(path, RECORDS_DATA), lambda b: b.__setitem__(entry(path, 8).offset + 50, 0xAA))
    both, alone = RunReader(path), RunReader(path)
    asked = [
        (["sum", "key"], lambda _, those: those["window"] % 3 == 0),
        (None, lambda _, those: those["window"] % 3 == 1),
    ]
    found = [[], []]
    for sort, block in both.sorts(Stream.RECORDS, asked):
        found[sort] += block.batch.to_pylist()
    expected = [[r for b in alone.blocks(Stream.RECORDS, *one) for r in b.batch.to_pylist()] for one in asked]
    assert all(expected)
    assert expected == found
    assert alone.problems == both.problems
    assert [8] == [problem.frame for problem in both.problems]
    assert {7} == both.sessions()[0].incomplete


def test_what_was_passed_over_is_still_checked(tmp_path):
    """After some frames were read the states still rest on all of them."""
    path = write_run(tmp_path, 10).path
    rewrite(only(path, RECORDS_DATA), lambda b: b.__setitem__(entry(path, 3).offset + 50, 0xAA))
    reader = RunReader(path)
    list(reader.blocks(Stream.RECORDS, None, lambda _, those: those["window"] % 2 == 1))
    assert [] == reader.problems
    assert {2} == reader.sessions()[0].incomplete


LIMITED = """
import json, resource, sys
import eventlog
from eventlog import RunReader
from eventlog.schema import Stream
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
reader = RunReader(sys.argv[1])
rows = sum(batch.num_rows for _, _, batch in reader.records())
blocks = sum(block.batch.num_rows for block in reader.blocks(Stream.RECORDS))
payload = sum(1 for _ in reader.payload())
complete = sum(len(state.complete) for state in reader.sessions())
followed = sum(len(told.windows) for told in eventlog.Follower(sys.argv[1]).poll())
clean = eventlog.verify(sys.argv[1]).clean
saved = eventlog.recover(sys.argv[1], sys.argv[3]).complete
print(json.dumps([rows, blocks, payload, complete, followed, clean, saved, len(reader.problems)]))
"""


def test_files_are_not_held_open(tmp_path):
    """With many producers and segments and few descriptors allowed, all is read, followed and saved."""
    for rank in range(12):
        write_run(tmp_path / "run", 4, rank=rank, segment_bytes=2500)
    files = sum(1 for _ in (tmp_path / "run").rglob("*.arrows"))
    limit = 20
    assert files > 5 * limit
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "run"), str(limit), str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "" == done.stderr
    assert [144, 144, 48, 48, 48, True, True, 0] == json.loads(done.stdout)


BOUNDED = """
import resource, sys
from eventlog import RunReader
reader = RunReader(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = 0
for _, _, batch in reader.payload():
    total += batch.nbytes
    del batch
print(total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_memory_holds_one_frame_not_a_run(tmp_path):
    """Reading payload takes the memory of a few frames, however many there are."""
    run = RunDir.create(tmp_path)
    writer = Writer(run, producer(run))
    for window in range(12):
        put_window(writer, window, values=1_000_000)
        settle(writer)
    assert writer.close(60)
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    total, more = map(int, done.stdout.split())
    assert 12 * 4_000_000 <= total
    assert more < total / 2


# Files that go away


def test_a_segment_that_vanishes_while_it_is_read_costs_itself(tmp_path):
    """Files removed between two frames are passed over, or reported; nothing raises."""
    run = write_run(tmp_path, 12, segment_bytes=4000)
    reader = RunReader(tmp_path)
    frames = reader.records()
    first = next(frames)
    for file in run.segments(Stream.RECORDS)[1:3]:
        file.data.unlink()
    run.segments(Stream.RECORDS)[-1].index.unlink()
    rest = list(frames)
    for _, record, batch in [first, *rest]:
        assert records(record.window).to_pylist() == batch.to_pylist()
    assert len(rest) < 11
    assert reader.problems


def test_pruning_and_reading_go_together(tmp_path):
    """While a process removes its oldest payload to keep a budget, reading finds no damage (report b14)."""
    run = RunDir.create(tmp_path)
    writer = Writer(run, producer(run), segment_bytes=20_000, payload_budget=100_000)

    reader, passes, written = RunReader(tmp_path), 0, 0

    def write():
        nonlocal written
        while written < 120 or passes < 2:  # a reader is at work meanwhile, however slow it is
            put_window(writer, written, values=1000)
            written += 1
            time.sleep(0.002)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    while thread.is_alive():
        for _, record, batch in reader.payload():
            assert payload(record.window, 1000).equals(batch)
        reader.sessions()
        assert [] == reader.problems
        passes += 1
    assert writer.close(60)
    (state,) = reader.sessions()
    assert (set(range(written)), []) == (state.complete, reader.problems)
    assert sorted(state.pruned) == [gone.number for gone in state.prunes]
    assert len(state.pruned) > 5


def test_temporary_files_are_not_read(tmp_path):
    """What a killed process left under a temporary name is no file of the run (report g3)."""
    path = write_run(tmp_path, 3).path
    RunDir.open(path).claim_attempt({})
    for folder in (path, path / "attempts", path / "events", path / "events" / "actor-0"):
        (folder / ".0001.json.1234.tmp").write_bytes(b"{")
        (folder / ".x.arrows").write_bytes(b"x")
    told = tell(path)
    assert ([0, 1, 2], 1) == (told.windows(), len(told.reader.run.attempts()))
    assert [".x.arrows"] == [problem.path.name for problem in told.problems]


def test_a_directory_that_vanishes_is_no_error(tmp_path):
    """A run removed while it is read ends the reading."""
    write_run(tmp_path / "run", 5, segment_bytes=4000)
    reader = RunReader(tmp_path / "run")
    frames = reader.records()
    next(frames)
    shutil.rmtree(tmp_path / "run")
    for _ in frames:
        pass
    assert [] == reader.sessions()


def test_empty_files_are_no_frames(tmp_path):
    """Empty files of every kind are read as nothing, and reported where something is lost by it."""
    path = write_run(tmp_path, 3).path
    for file in [file for file in path.rglob("*-*.*") if file.is_file()]:
        os.truncate(file, 0)
    told = tell(path)
    assert {} == told.frames
    (path / "run.json").write_bytes(b"")
    assert "expected a JSON object" in tell(path).reasons()
    write_json(path / "run.json", {"id": "x", "format": [1, 0], "created_us": 1})
    assert "expected a JSON object" not in tell(path).reasons()
