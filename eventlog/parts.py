"""A frame as the parts it lies in: what is large goes to the file from where it lies in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .message import Message, is_small, serialize
from .schema import SCHEMAS, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    Part = bytes | pa.Buffer

_WORTH_IT: Final = 256 << 10  # below, one copy costs less than the parts do
_SMALL: Final = 4096  # parts below are joined: a write call costs more than copying them


def of(batch: pa.RecordBatch | Message, stream: Stream) -> list[Part]:
    """Return the frame of a batch, compressed where `message.serialize` does, else as it lies.

    TypeError when the batch has not the columns of its stream.
    """
    if not isinstance(batch, Message):
        return [serialize(batch, stream)]
    if batch.schema is SCHEMAS[stream] and is_small(stream, batch.num_rows, batch.nbytes):
        return batch.parts
    return [serialize(batch.batch(), stream)]


def gathered(parts: Sequence[Part]) -> list[Part]:
    """Return parts that together are the same bytes: few where they are small, the large ones uncopied."""
    if sum(map(len, parts)) < _WORTH_IT:
        return [b"".join(parts)]
    return list(_joined(parts))


def _joined(parts: Sequence[Part]) -> Iterator[Part]:
    small = bytearray()
    for part in parts:
        if len(part) < _SMALL:
            small += part
            continue
        if small:
            yield bytes(small)
            small = bytearray()
        yield part
    if small:
        yield bytes(small)


def size(parts: list[Part]) -> int:
    """Return the bytes of a frame."""
    return sum(map(len, parts))
