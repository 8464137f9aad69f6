"""How a frame reaches its segment: whole, checksummed, in pieces, into space that was taken for it before."""

import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventlog import extent, segment
from eventlog.rundir import RunDir
from eventlog.schema import Stream, crc32c
from eventlog.segment import FrameInfo, SegmentWriter
from tests.storage import producer

PIECE = 4096
LENGTHS = st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=5)


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run")


def parts_of(lengths):
    """Return parts of such lengths, bytes and Arrow buffers in turns."""
    drawn = [np.random.default_rng(n).bytes(n) for n in lengths]
    return [pa.py_buffer(data) if i % 2 else data for i, data in enumerate(drawn)]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=LENGTHS, place=st.integers(0, 2 * PIECE), held_up=st.booleans())
def test_a_frame_is_written_whole_whatever_its_parts_and_place(
    tmp_path, monkeypatch, lengths, place, held_up
):
    """In pieces that end where pages do, larger ones when a write took long, it is the same bytes and sum."""
    monkeypatch.setattr(segment, "_PIECE", PIECE)
    monkeypatch.setattr(segment, "_HELD_UP", -1.0 if held_up else 60.0)
    parts = parts_of(lengths)
    whole = b"".join(parts)
    with (tmp_path / "stream").open("w+b", buffering=0) as file:
        file.write(bytes(place))
        assert crc32c(whole) == segment._write_checked(file.fileno(), parts, place)
        file.seek(0)
        assert bytes(place) + whole == file.read()


def test_a_large_frame_takes_its_space_before_it_is_written(tmp_path):
    """The space is there, the size of the file is not more for it (ext4, xfs, btrfs, tmpfs)."""
    with (tmp_path / "stream").open("wb", buffering=0) as file:
        file.write(b"a" * 100)
        extent.take(file.fileno(), 100, 8 << 20)
        found = os.fstat(file.fileno())
        if not found.st_blocks * 512 > 4 << 20:
            pytest.skip("this file system takes no space beforehand")
        assert 100 == found.st_size


@pytest.mark.parametrize("size", [100, 8 << 20])
def test_space_that_cannot_be_had_is_left_to_the_write(size):
    """Where the call is refused nothing is raised: the write says what is wrong."""
    reading, writing = os.pipe()
    try:
        extent.take(writing, 0, size)
        extent.take(-1, 0, size)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_segment_with_a_large_frame_is_no_longer_than_its_frames(run):
    """What the index says is where the file ends, for a reader that comes in between too."""
    who = producer(run)
    writer = SegmentWriter(run.segment(Stream.PAYLOAD, who, 0), who)
    for number, lengths in enumerate([(100, 3 << 20, 7), (50,), (2 << 20,)]):
        writer.append(parts_of(lengths), FrameInfo(number, last=True))
        assert writer.size == writer.file.data.stat().st_size
    writer.close()
