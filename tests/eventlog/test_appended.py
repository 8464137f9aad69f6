"""Recovering segments behind whose stream lies another one, as `cat` leaves them."""

import pyarrow as pa
import pytest

from eventlog.message import serialize
from eventlog.recovery import recover, verify
from eventlog.rundir import RunDir
from eventlog.schema import COMMITS, ENTRY_SIZE, SCHEMAS, Stream
from eventlog.writer import Writer
from tests.storage import commits, only, producer, records, tell, write_run

LEFT = {"ended": None, "killed": -ENTRY_SIZE, "lost": 0}  # how far an index goes


@pytest.fixture
def pair(tmp_path):
    """Return a run of two ranks of five windows that both ended in order."""
    path = tmp_path / "run"
    write_run(path, 5)
    write_run(path, 5, rank=1)
    return path


def data_of(path, stream, rank=0):
    """Return the stream of a rank's only segment."""
    root = "commits" if stream is Stream.COMMITS else "events"
    kind = "" if stream is Stream.COMMITS else f"{stream.name.lower()}."
    return only(path / root / f"actor-{rank}", f"*.{kind}0000.arrows")


def cut(data, index):
    """Leave of the index of a stream what a process has that ended, was killed, or whose index is lost."""
    index_file = data.with_suffix(".idx")
    index_file.write_bytes(index_file.read_bytes()[: LEFT[index]])


def without_schema(data):
    """Return the frames of a stream."""
    index = data.with_suffix(".idx").read_bytes()
    return data.read_bytes()[int.from_bytes(index[ENTRY_SIZE + 40 : ENTRY_SIZE + 48], "little") :]


def saved(path):
    """Recover a run; return the report, and the rows of the copy, which is without a problem or a loss."""
    report = recover(path, path.with_name("saved"))
    told = tell(path.with_name("saved"))
    assert "" == told.reasons()
    assert [] == [loss for state in told.states for loss in state.losses]
    return report, rows(told)


def rows(told):
    """Return the rows of every frame that was read, each with whose it is."""
    return [(key[:4], batch) for key, batch in told.frames.items()]


@pytest.mark.parametrize("index", LEFT)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stream", Stream)
def test_a_stream_behind_another_is_left_out(pair, stream, rank, index):
    """Whosever it is, the copy has each frame once, none of another process, and is whole (report g6)."""
    expected = rows(tell(pair))
    data = data_of(pair, stream)
    data.write_bytes(data.read_bytes() + data_of(pair, stream, rank).read_bytes())
    cut(data, index)
    report, told = saved(pair)
    assert expected == told
    (file,) = [file for file in report.files if file.discarded]
    assert (data.name, 5, 1) == (file.path.name, file.frames, file.discarded)
    assert verify(pair.with_name("saved")).clean


@pytest.mark.parametrize("rank", [0, 1])
def test_frames_behind_the_end_are_left_out(pair, rank):
    """Behind its end nothing is of a stream, whatever it looks like (report g6)."""
    expected = rows(tell(pair))
    data = data_of(pair, Stream.RECORDS)
    frames = without_schema(data_of(pair, Stream.RECORDS, rank))
    reason = f"{len(frames)} bytes at {data.stat().st_size} lie behind the end of the stream"
    data.write_bytes(data.read_bytes() + frames)
    report, told = saved(pair)
    assert expected == told
    assert [(reason,)] == [file.reasons for file in report.files if file.discarded]


@pytest.mark.parametrize("index", ["killed", "lost"])
@pytest.mark.parametrize("stream", Stream)
def test_frames_are_taken_once(pair, stream, index):
    """Frames that lie in a stream of a killed process twice are in the copy once (report g6)."""
    expected = rows(tell(pair))
    data = data_of(pair, stream)
    data.write_bytes(data.read_bytes() + without_schema(data))
    cut(data, index)
    report, told = saved(pair)
    assert expected == told
    (file,) = [file for file in report.files if file.discarded]
    assert (5, 5) == (file.frames, file.discarded)
    assert file.reasons[0].endswith("its rows are there already")


@pytest.mark.parametrize(("stream", "of"), [(Stream.RECORDS, records), (Stream.COMMITS, commits)])
def test_frames_that_say_what_is_taken_are_left_out(pair, stream, of):
    """Records and commits whose numbers are taken already are none of a process, whatever they hold (g6)."""
    expected = rows(tell(pair))
    data = data_of(pair, stream)
    cut(data, "killed")
    name = {"records": "key", "commits": "tags"}[stream.name.lower()]
    with data.open("ab") as file:
        for number in (1, 2):
            other = [row | {name: "another's"} for row in of(number).to_pylist()]
            file.write(serialize(pa.RecordBatch.from_pylist(other, schema=SCHEMAS[stream]), stream))
    report, told = saved(pair)
    assert expected == told
    assert [(5, 2)] == [(file.frames, file.discarded) for file in report.files if file.discarded]


def test_a_commit_of_several_frames_is_found_whole(tmp_path):
    """Without an index a commit that takes several frames has all of them: they are no repetition."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run))
    parts = [[{"commit": 0, "key": f"k{i}", "value": i}] for i in range(3)]
    batches = [pa.RecordBatch.from_pylist(rows, schema=COMMITS) for rows in parts]
    writer.put(Stream.COMMITS, lambda: batches, window=0, nbytes=300)
    assert writer.close()
    cut(only(run.path / "commits", "*.arrows"), "lost")
    report, told = saved(run.path)
    assert [batch.to_pylist() for batch in batches] == [batch for _, batch in told]
    assert report.complete
