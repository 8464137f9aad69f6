"""Values that do not fit on the disk: none of them is begun, and records and commits go on."""

import ctypes
import errno
import os
import warnings

import numpy as np
import pytest

import eventlog
from eventlog import extent
from eventlog.extent import NoRoomError
from eventlog.rundir import RunDir
from eventlog.schema import Stream
from eventlog.segment import FrameInfo, SegmentWriter
from tests.disk import small
from tests.storage import producer

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of 8 MiB, where one may be mounted."""
    with small(tmp_path / "disk", "size=8m") as path:
        yield path


@pytest.fixture(params=["fallocate", "statvfs"])
def _asked(request, monkeypatch):
    """Let the file system be asked with one call or the other; not every one has the first."""
    if request.param == "statvfs":
        monkeypatch.setattr(extent, "_fallocate", None)


def segment(run):
    """Return a segment of values."""
    who = producer(run)
    return SegmentWriter(run.segment(Stream.PAYLOAD, who, 0), who)


def frame(nbytes, number):
    """Return what the index says of a frame, and its bytes."""
    return [bytes(nbytes)], FrameInfo(window=number, last=True, rows=1)


def fill(writer, nbytes, many):
    """Write so many frames."""
    for number in range(many):
        writer.append(*frame(nbytes, number))


@pytest.mark.usefixtures("_asked")
def test_what_does_not_fit_is_not_begun(small_disk):
    """The segment is as it was, and takes what does fit."""
    writer = segment(RunDir.create(small_disk / "run"))
    writer.append(*frame(5 * MIB, 0))
    before = writer.size, writer.file.data.stat().st_size, writer.file.index.stat().st_size
    blocks = writer.file.data.stat().st_blocks
    with pytest.raises(NoRoomError, match="No space left on device for values of 5242880 bytes"):
        writer.append(*frame(5 * MIB, 1))
    assert before == (writer.size, writer.file.data.stat().st_size, writer.file.index.stat().st_size)
    assert blocks == writer.file.data.stat().st_blocks
    writer.append(*frame(MIB, 2))
    assert (2, (0, 2)) == (writer.frames, writer.windows)
    writer.finish()


@pytest.mark.usefixtures("_asked")
@pytest.mark.parametrize("nbytes", [3000, 300_000, 2 * MIB])
def test_a_share_of_a_small_disk_is_left_free(small_disk, nbytes):
    """Values of any size end before the disk is full, not much before it, and what marks a window goes on."""
    writer = segment(RunDir.create(small_disk / "run"))
    many = 8 * MIB // nbytes
    with pytest.raises(NoRoomError, match="No space left"):
        fill(writer, nbytes, many)
    assert writer.frames < many
    free = os.statvfs(small_disk)
    left = free.f_bavail * free.f_frsize
    assert MIB // 4 <= left <= MIB + nbytes
    writer.append([bytes(500)], FrameInfo(window=9999, last=True))
    writer.finish()


@pytest.mark.skipif(extent._fallocate is None, reason="this system has no fallocate")
def test_what_was_taken_in_vain_is_given_back(tmp_path, monkeypatch):
    """Space that was found before the quota ended is free again, and what is in the file stays."""
    writer = segment(RunDir.create(tmp_path / "run"))
    writer.append(*frame(1000, 0))
    before = writer.file.data.stat().st_blocks, writer.file.data.read_bytes()

    def half(fd, mode, place, size, take=extent._fallocate):
        assert take(fd, mode, place, size // 2) == 0 or ctypes.get_errno() != errno.ENOSPC
        ctypes.set_errno(errno.EDQUOT)
        return -1

    monkeypatch.setattr(extent, "_fallocate", half)
    with pytest.raises(NoRoomError, match="quota exceeded for values of 4194304 bytes"):
        writer.append(*frame(4 * MIB, 1))
    assert before == (writer.file.data.stat().st_blocks, writer.file.data.read_bytes())
    writer.finish()


def test_values_that_find_no_room_cost_nothing_else(small_disk):
    """Forty steps of 3 MB on 8 MiB: every step has its metrics, and each step without values is listed."""
    from aggregator import open_run, stats_tracker

    values, mask = np.arange(750_000, dtype=np.float32), np.ones(750_000, bool)
    log = eventlog.start(small_disk / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        durable = []
        for step in range(40):
            stats_tracker.denominator(m=mask)
            stats_tracker.stat("m", x=values)
            durable.append(log.commit(0, step, step, [stats_tracker.export_all()]))
            assert log.writer.flush(20)
        eventlog.stop()
    assert [True] * 40 == durable
    with open_run(small_disk / "run") as run:
        steps = run.metrics(["x/avg"])["step"].to_pylist()
        lost = run.info()["losses"]
        there = run.percentiles("x", [0.5], by=["step"]).to_pylist()
        problems = run.problems
    assert (list(range(40)), []) == (steps, problems)
    assert {("payload", step) for step in range(2, 40)} == {(loss["stream"], loss["step"]) for loss in lost}
    assert {0, 1} == {row["step"] for row in there if not row["missing"]}


def test_a_file_system_that_does_not_say_is_written_to(tmp_path, monkeypatch):
    """Where the free space cannot be had the write says what is wrong."""

    def unknown(_):
        raise OSError("not here")

    monkeypatch.setattr("os.statvfs", unknown)
    writer = segment(RunDir.create(tmp_path / "run"))
    writer.append(*frame(MIB, 0))
    assert 1 == writer.frames
    writer.finish()
