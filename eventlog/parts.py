"""A frame as the parts it lies in: what is large goes to the file from where it lies in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from .message import serialize
from .schema import SCHEMAS, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    Part = bytes | pa.Buffer

_WORTH_IT: Final = 256 << 10  # below, one copy costs less than the parts do
_SMALL: Final = 4096  # parts below are joined: a write call costs more than copying them
# A part is checksummed and written in pieces that the processor's cache still holds the second time. Not
# smaller: after every write a thread that computes in Python may keep the interpreter for 5 ms.
PIECE: Final = 2 << 20
_SCHEMA_SIZES: Final = {stream: schema.serialize().size for stream, schema in SCHEMAS.items()}


class _Gathered:
    """A file that keeps what is written to it, Arrow's buffers uncopied."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._size = 0

    def write(self, part: Part) -> None:
        self.parts.append(part)
        self._size += len(part)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing waits."""


def of(batch: pa.RecordBatch, stream: Stream) -> list[Part]:
    """Return the frame of a batch (see `message.serialize`), a large payload's as the buffers it lies in.

    TypeError when the batch has not the columns of its stream.
    """
    schema = SCHEMAS[stream]
    if (
        stream is not Stream.PAYLOAD
        or batch.get_total_buffer_size() < _WORTH_IT
        or not batch.schema.equals(schema)
    ):
        return [serialize(batch, stream)]
    gathered = _Gathered()
    pa.ipc.new_stream(pa.PythonFile(gathered, "w"), schema).write_batch(batch)
    at, skipped = 0, 0
    while skipped < _SCHEMA_SIZES[stream]:  # a stream begins with its schema, which the segment has
        skipped += len(gathered.parts[at])
        at += 1
    return list(_joined(gathered.parts[at:]))


def _joined(parts: list[Part]) -> Iterator[Part]:
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


def pieces(parts: list[Part]) -> Iterator[Part]:
    """Yield a frame in pieces of at most PIECE bytes."""
    for part in parts:
        if len(part) <= PIECE:
            yield part
        else:
            whole = part if isinstance(part, pa.Buffer) else pa.py_buffer(part)
            yield from (whole[at : at + PIECE] for at in range(0, len(part), PIECE))
