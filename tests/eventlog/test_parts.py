"""A frame as the parts it lies in: the same bytes as Arrow's own, uncopied where they are many."""

import numpy as np
import pytest

from eventlog import parts
from eventlog.columns import Table, lists_of
from eventlog.message import Decoder, Message, serialize
from eventlog.schema import PAYLOAD, RECORDS, Stream
from tests.storage import commits, payload, records

TABLE = Table(PAYLOAD)


def message(values: int) -> Message:
    """Return a payload of one record."""
    columns = TABLE.of({"record_id": [3], "element": [0], "last": [True]})
    columns["values32"] = TABLE["values32"].lists(lists_of(np.array([values])), array(values))
    return TABLE.message(1, columns)


def array(values: int) -> np.ndarray:
    """Return numbers."""
    return np.arange(values, dtype=np.float32)


def joined(frame):
    """Return what would lie in the file."""
    return b"".join(bytes(memoryview(part)) for part in frame)


@pytest.mark.parametrize("values", [0, 1, 999, 1000, 65_535, 65_537, 100_000, 1_300_001])
def test_a_frame_in_parts_is_the_frame(values):
    """Whatever a payload's size, its parts are the bytes that Arrow serializes."""
    frame = parts.of(message(values), Stream.PAYLOAD)
    expected = message(values).batch().serialize().to_pybytes()
    assert (expected, len(expected)) == (joined(frame), parts.size(frame))
    assert [array(values).tolist()] == message(values).batch()["values32"].to_pylist()


@pytest.mark.parametrize(("values", "most"), [(1000, 1), (60_000, 1), (100_000, 3)])
def test_small_frames_are_one_part(values, most):
    """What is small is one buffer; a large one keeps its values apart from all the rest."""
    assert most == len(message(values).parts)


@pytest.mark.parametrize(
    ("batch", "stream"),
    [
        (records(1), Stream.RECORDS),
        (records(1, 500), Stream.RECORDS),
        (commits(1), Stream.COMMITS),
        (payload(1), Stream.PAYLOAD),
    ],
)
def test_batches_of_arrow_are_one_part(batch, stream):
    """A batch that Arrow made is one buffer."""
    (part,) = parts.of(batch, stream)
    assert serialize(batch, stream) == part


@pytest.mark.parametrize("n", [8, 9])
def test_many_records_are_compressed(n):
    """A few records stay as they are, more are compressed: both are read as the same."""
    recorded = records(1, n)
    raw = Message(recorded.schema, n, [recorded.serialize().to_pybytes()])
    (frame,) = parts.of(raw._replace(schema=RECORDS), Stream.RECORDS)
    assert (n == 8) == (bytes(memoryview(frame)) == raw.parts[0])
    assert recorded.equals(Decoder(RECORDS).batch(bytes(memoryview(frame))))


def test_columns_of_another_stream_are_refused():
    """A batch that is not of its stream is no frame of it, however it was made."""
    for batch in (records(1, 5000), message(3)):
        stream = Stream.COMMITS if isinstance(batch, Message) else Stream.PAYLOAD
        with pytest.raises(TypeError, match=f"expected the columns of {stream.name.lower()}, got"):
            parts.of(batch, stream)
