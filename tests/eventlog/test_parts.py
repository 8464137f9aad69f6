"""A frame as the buffers it lies in: the same bytes as Arrow's own, uncopied where they are many."""

import pyarrow as pa
import pytest

from eventlog import parts
from eventlog.message import serialize
from eventlog.schema import Stream, crc32c
from tests.storage import commits, payload, records


def joined(pieces):
    """Return what would lie in the file."""
    return b"".join(bytes(memoryview(piece)) for piece in pieces)


@pytest.mark.parametrize("values", [0, 1, 1000, 65_535, 65_537, 100_000, 1_300_001])
def test_a_frame_in_pieces_is_the_frame(values, monkeypatch):
    """Whatever a payload's size, its pieces are the bytes that Arrow serializes, none larger than PIECE."""
    monkeypatch.setattr(parts, "PIECE", 1 << 20)
    batch = payload(3, values)
    frame = parts.of(batch, Stream.PAYLOAD)
    expected = serialize(batch, Stream.PAYLOAD).to_pybytes()
    pieces = list(parts.pieces(frame))
    assert (expected, len(expected)) == (joined(pieces), parts.size(frame))
    assert max(map(len, pieces)) <= 1 << 20
    crc = 0
    for piece in pieces:
        crc = crc32c(piece, crc=crc)
    assert crc32c(expected) == crc


def test_large_values_are_not_copied():
    """The values of a large payload go to the file from where they lie."""
    batch = payload(0, 100_000)
    address = batch["values32"].values.buffers()[1].address
    assert address in [
        part.address for part in parts.of(batch, Stream.PAYLOAD) if isinstance(part, pa.Buffer)
    ]


def test_a_slice_of_a_batch_is_its_rows_alone():
    """A batch that is a slice of a larger one takes the bytes of its own rows."""
    whole = pa.concat_tables(pa.Table.from_batches([payload(w, 100_000)]) for w in range(4))
    part = whole.combine_chunks().to_batches()[0].slice(1, 2)
    frame = joined(parts.of(part, Stream.PAYLOAD))
    assert len(frame) < 2 * 400_000 + 10_000
    found = pa.ipc.read_record_batch(pa.py_buffer(frame), part.schema)
    assert part.to_pylist() == found.to_pylist()


@pytest.mark.parametrize(("batch", "stream"), [(records(1), Stream.RECORDS), (commits(1), Stream.COMMITS)])
def test_records_and_commits_are_one_part(batch, stream):
    """What is compressed, or small, is one buffer."""
    (part,) = parts.of(batch, stream)
    assert serialize(batch, stream) == part


def test_columns_of_another_stream_are_refused():
    """A batch that is not of its stream is no frame of it, however large."""
    with pytest.raises(TypeError, match="expected the columns of payload, got"):
        parts.of(records(1, 5000), Stream.PAYLOAD)
