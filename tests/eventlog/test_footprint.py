"""What a run takes: files, bytes on the disk, bytes read for one key, memory of a frame."""

import os

import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker
from eventlog import encode
from eventlog.rundir import RunDir
from eventlog.schema import Stream
from eventlog.writer import Writer
from tests.storage import producer, put_records, put_window, records, settle, tell


@pytest.mark.parametrize("commits", [pytest.param(500), pytest.param(5000, marks=pytest.mark.long)])
def test_thousands_of_commits_go_into_a_few_files(tmp_path, commits):
    """However many steps two ranks commit, there are six files a rank, and all of it is read (report d8)."""
    run = RunDir.create(tmp_path / "run")
    writers = [Writer(run, producer(run, rank=rank)) for rank in range(2)]
    for window in range(commits):
        for writer in writers:
            put_window(writer, window)
    assert [True, True] == [writer.close() for writer in writers]
    assert 12 == len([p for p in run.path.rglob("*") if p.suffix in (".arrows", ".idx")])
    assert 2 * list(range(commits)) == tell(run.path).windows(Stream.COMMITS)


def test_a_rare_key_costs_only_the_frames_that_hold_it(tmp_path, monkeypatch):
    """Of a million values of one key and 26 of another, the few are read without the many (report d9)."""
    log = eventlog.start(tmp_path)
    for step in range(100):
        stats_tracker.denominator(m=torch.ones(100, 100, dtype=torch.bool))
        stats_tracker.stat("m", often=torch.full((100, 100), float(step)))
        for _ in range(13 if step in (40, 80) else 0):
            stats_tracker.scalar(rare=step)
        assert log.commit(0, step, step, [stats_tracker.export_all()])
    eventlog.stop()
    (payload,) = tmp_path.rglob("*.payload.*.arrows")
    read, real = [0], os.pread

    def pread(fd, n, offset):
        data = real(fd, n, offset)
        if os.path.samestat(os.fstat(fd), payload.stat()):
            read[0] += len(data)
        return data

    with open_run(tmp_path) as run:
        monkeypatch.setattr(os, "pread", pread)
        table = run.percentiles("rare", 0.5, by=["step"]).to_pydict()
    assert ([40, 80], [40.0, 80.0], [13, 13]) == (table["step"], table["p50"], table["count"])
    assert read[0] < 0.05 * payload.stat().st_size


def test_a_window_of_many_records_goes_into_several_frames(tmp_path, monkeypatch):
    """Records and commits too are written in frames of bounded size, which are one window (report g8)."""
    monkeypatch.setattr(encode, "FRAME_ROWS", 100)
    log = eventlog.start(tmp_path)
    recorder = eventlog.Recorder()
    for i in range(450):
        recorder.scalar({f"key{i}": i})
    log.write(eventlog.drain([recorder]).frame)
    assert log.commit(0, 0, 0, [{f"key{i}": i for i in range(450)}])
    eventlog.stop()
    reader = eventlog.RunReader(tmp_path)
    assert [100, 100, 100, 100, 50] == [batch.num_rows for *_, batch in reader.records()]
    assert [100, 100, 100, 100, 51] == [batch.num_rows for *_, batch in reader.commits()]
    assert 450 == len({row["key"] for *_, batch in reader.records() for row in batch.to_pylist()})
    (state,) = reader.sessions()
    assert (1, 0) == (len(state.complete), len(state.incomplete))


def test_segments_of_every_stream_rotate_by_size(tmp_path):
    """Records and commits begin a new segment at the size, as payload does; no window is torn apart by it."""
    run = RunDir.create(tmp_path / "run")
    writer = Writer(run, producer(run), segment_bytes=30_000)
    for window in range(200):
        put_records(writer, window, rows=20)
        put_window(writer, 1000 + window, values=100)
    settle(writer)
    assert writer.close()
    for stream in Stream:
        files = [file.data.stat().st_size for file in run.segments(stream)]
        assert len(files) > 2
        assert max(files) <= 30_000
    told = tell(run.path)
    assert [] == told.problems
    assert 400 == len(told.windows())
    rows = {key[4]: rows for key, rows in told.frames.items() if key[0] is Stream.RECORDS}
    assert records(7, 20).to_pylist() == rows[7]


def test_parts_of_a_series_are_read_as_one(tmp_path, monkeypatch):
    """A series that was written in parts is one row again, times included (report g8)."""
    monkeypatch.setattr(encode, "FRAME_BYTES", 4096)
    log = eventlog.start(tmp_path)
    for i in range(1000):
        stats_tracker.scalar(s=i / 8)
    assert log.commit(0, 0, 0, [stats_tracker.export_all()])
    eventlog.stop()
    (payload,) = tmp_path.rglob("*.payload.*.idx")
    assert payload.stat().st_size > 4 * 64
    with open_run(tmp_path) as run:
        (row,) = run.sql("select values, times from payload where key = 's'").to_pylist()
        table = run.percentiles("s", 1.0, by=["step"]).to_pydict()
    assert [i / 8 for i in range(1000)] == row["values"]
    assert (1000, sorted(row["times"])) == (len(row["times"]), row["times"])
    assert ([999 / 8], [1000], [0]) == (table["p100"], table["count"], table["missing"])


def test_a_series_larger_than_a_frame_is_split(monkeypatch):
    """A scalar recorded very often comes in parts that join to the same values and times (report g8)."""
    monkeypatch.setattr(encode, "FRAME_BYTES", 4096)
    recorder = eventlog.Recorder()
    for i in range(1000):
        recorder.scalar({"s": i / 8})
    recorder.scalar({"t": 1.0})
    frame = eventlog.drain([recorder]).frame
    batches = [message.batch() for message in encode.payload(frame)]
    assert max(batch.nbytes for batch in batches) < 2 * 4096
    rows = [row for batch in batches for row in batch.to_pylist()]
    values, times = [], []
    for row in rows[:-1]:
        assert (frame.first_id, len(values)) == (row["record_id"], row["element"])
        values += row["values64"]
        times += row["times"]
        assert row["last"] == (len(values) == 1000)
    assert [i / 8 for i in range(1000)] == values
    assert frame.pieces[0].times == times
    assert ([1.0], True) == (rows[-1]["values64"], rows[-1]["last"])
