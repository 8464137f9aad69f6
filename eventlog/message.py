"""Arrow messages: a batch as the bytes of a frame, a frame's bytes as a batch, a head read without Arrow."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from .schema import SCHEMAS, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    Bytes = bytes | memoryview

# lz4, not zstd: 240 records take 0.05 ms instead of 0.57 to write, and a quarter to read, for 20 kB instead
# of 13 (uncompressed 83). A codec's context is set up anew for each of a batch's many small buffers.
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_FEW_ROWS: Final = 8  # so few are hardly larger uncompressed, and take a quarter of the time …
_FEW_BYTES: Final = 6144  # … unless they are long, as the members of a large group are
_SCHEMA_SIZES: Final = {stream: schema.serialize().size for stream, schema in SCHEMAS.items()}
_PREFIX: Final = b"\xff\xff\xff\xff"
_LONGEST_HEAD: Final = 1 << 24
_SCHEMA: Final = 1
_BATCH: Final = 3
_FIRST_COLUMNS: Final = {schema.names[0].encode() for schema in SCHEMAS.values()}


class Message(NamedTuple):
    """A batch as the bytes of its frame, in the parts these lie in."""

    schema: pa.Schema
    num_rows: int
    parts: list[bytes | pa.Buffer]
    ids: tuple[int, int] | None = None  # of its first and last record, where it is part of more

    @property
    def nbytes(self) -> int:
        """The size of the frame."""
        return sum(map(len, self.parts))

    def batch(self) -> pa.RecordBatch:
        """Return it as a reader gets it."""
        return pa.ipc.read_record_batch(pa.py_buffer(b"".join(self.parts)), self.schema)


def serialize(batch: pa.RecordBatch, stream: Stream) -> pa.Buffer:
    """Return the frame of a batch; buffers are compressed where it is of more than a few records or commits.

    TypeError when the batch has not the columns of its stream.
    """
    schema = SCHEMAS[stream]
    if not batch.schema.equals(schema):
        raise TypeError(f"expected the columns of {stream.name.lower()}, got {batch.schema.names}")
    if stream is Stream.PAYLOAD or batch.num_rows <= _FEW_ROWS:
        frame = batch.serialize()
        if is_small(stream, batch.num_rows, frame.size):
            return frame
    return _compressed(batch, _SCHEMA_SIZES[stream])


def compressed_frame(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the frame of a batch, of columns of whatever version, its buffers compressed."""
    return _compressed(batch, batch.schema.serialize().size)


def _compressed(batch: pa.RecordBatch, schema_size: int) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, batch.schema, options=_COMPRESSED).write_batch(batch)
    return sink.getvalue()[schema_size:]


def is_small(stream: Stream, rows: int, size: int) -> bool:
    """Whether the buffers of a frame of so many rows and bytes stay as they are; a payload's always do."""
    return stream is Stream.PAYLOAD or (rows <= _FEW_ROWS and size <= _FEW_BYTES)


class Decoder:
    """Turns frames whose checksum was right into batches of one schema, or of some of its columns."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str] | None = None) -> None:
        self.schema = schema
        self._message = schema.serialize().to_pybytes()
        nothing = [pa.nulls(0, field.type) for field in schema]  # `from_pylist` would import pandas
        empty = head(pa.RecordBatch.from_arrays(nothing, schema=schema).serialize().to_pybytes())
        self._layout = empty.layout if empty else (0, 0)
        self._forms: list[_Form] = []
        self._every = columns is None
        places = [i for i, name in enumerate(schema.names) if columns is None or name in columns]
        # Only a stream can be told to use one thread: four times as fast for compressed batches of this size.
        self._options = pa.ipc.IpcReadOptions(
            use_threads=False, **({} if columns is None else {"included_fields": places})
        )

    def batch(self, frame: bytes) -> pa.RecordBatch:
        """Return the batch; ValueError when it is of another schema.

        Arrow itself takes a batch with more columns for one with fewer, and the wrong ones.
        """
        compressed = self._compressed(frame)
        try:
            if self._every and not compressed:
                return pa.ipc.read_record_batch(pa.py_buffer(frame), self.schema)
            return self._stream([frame]).read_next_batch()
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise ValueError(f"expected an Arrow batch, got: {error}") from error

    def batches(self, frames: Sequence[bytes]) -> list[pa.RecordBatch | ValueError]:
        """Return the batch of each frame, or why it is none; many small ones cost half of one by one."""
        if len(frames) > 1:
            try:
                for frame in frames:
                    self._compressed(frame)
                stream = self._stream(frames)
                return [stream.read_next_batch() for _ in frames]
            except (ValueError, pa.ArrowException, OSError, StopIteration):
                pass  # one of them is no frame of ours: the others are
        return [self._judged(frame) for frame in frames]

    def _judged(self, frame: bytes) -> pa.RecordBatch | ValueError:
        try:
            return self.batch(frame)
        except ValueError as error:
            return error

    def _stream(self, frames: Sequence[bytes]) -> pa.RecordBatchReader:
        return pa.ipc.open_stream(pa.py_buffer(b"".join([self._message, *frames])), options=self._options)

    def _compressed(self, frame: bytes) -> bool:
        """Whether the buffers of a frame are compressed; ValueError when it is of another schema."""
        for form in self._forms:
            if form.fits(frame):
                return form.compressed
        found = head(frame)
        if found is None or found.size != len(frame) or found.layout != self._layout:
            raise ValueError(f"expected a batch of {len(self.schema)} columns, got {found or 'no message'}")
        if max(found.numbers) < min(found.vectors):  # as Arrow lays a head out
            self._forms = [_Form.of(frame, found), *self._forms[:3]]
        return found.compressed

    def size_of(self, data: Bytes) -> int | None:
        """Return the size of the frame that begins with `data`, as its head says; None: none begins here."""
        found = head(data)
        if found is None or found.layout != self._layout or found.size <= 8 or found.size % 8:
            return None
        return found.size

    def may_begin(self, data: Bytes, size: int) -> bool:
        """Whether `size` bytes that begin with `data` can be a frame, or the first part of one."""
        if data[:4] != _PREFIX[: len(data)]:
            return False
        if len(data) >= 8 and not 0 < _read(data, "<i", 4) < _LONGEST_HEAD:
            return False
        if len(data) < 8 or size < 8 + _read(data, "<i", 4):
            return True  # the head itself is not all there
        found = head(data)
        return found is not None and found.layout == self._layout and found.size >= size


class Head(NamedTuple):
    """What the head of a message says: its type, its size with the body; of a batch its nodes and buffers."""

    type: int
    size: int
    layout: tuple[int, int] = (0, 0)
    compressed: bool = False
    numbers: tuple[int, ...] = ()  # where the lengths of body and batch stand, 8 bytes each
    vectors: tuple[int, ...] = ()  # where the nodes and the buffers begin, each with its length
    before_body: int = 0


class _Form(NamedTuple):
    """What the heads of frames of one schema have in common: all but the numbers in it."""

    parts: tuple[tuple[int, int, bytes], ...]
    body: int
    before_body: int
    compressed: bool

    @classmethod
    def of(cls, frame: bytes, found: Head) -> Self:
        """Return the form of a frame by its head."""
        near, far = sorted(found.vectors)
        stops = [*sorted(place for place in found.numbers if place), near + 4]
        starts = [0, *(place + 8 for place in stops[:-1])]
        bounds = [*zip(starts, stops, strict=True), (far, far + 4)]
        parts = tuple((start, stop, frame[start:stop]) for start, stop in bounds)
        return cls(parts, found.numbers[0], 8 + _read(frame, "<i", 4), found.compressed)

    def fits(self, frame: bytes) -> bool:
        """Whether a frame is of this form, and its size what its head says."""
        for start, stop, part in self.parts:
            if frame[start:stop] != part:
                return False
        body = int.from_bytes(frame[self.body : self.body + 8], "little") if self.body else 0
        return self.before_body + body == len(frame)


def head(data: Bytes) -> Head | None:
    """Read the head of a message; None when the bytes do not hold one. Safe with any bytes."""
    try:
        prefix, head_size, root = struct.unpack_from("<4siI", data)
        kind, header, body = (_field(data, 8 + root, number) for number in (1, 2, 3))
        if prefix != _PREFIX or not kind or not header:
            return None
        size = 8 + head_size + (_read(data, "<q", body) if body else 0)
        if data[kind] != _BATCH:
            return Head(data[kind], size)
        batch = header + _read(data, "<I", header)
        vectors = tuple(_vector(data, batch, number) for number in (1, 2))
        layout = tuple(_read(data, "<I", at) if at else 0 for at in vectors)
        compressed = _field(data, batch, 3) != 0
        numbers = (body, _field(data, batch, 0))
        return Head(_BATCH, size, (layout[0], layout[1]), compressed, numbers, vectors, 8 + head_size)
    except (struct.error, IndexError):
        return None


def is_whole(data: Bytes, size: int) -> bool:
    """Whether `size` bytes that begin with `data` are exactly one message."""
    found = head(data)
    return found is not None and found.size == size


def begins_stream(data: bytes) -> bool:
    """Whether bytes begin with the whole schema message of a stream of a run."""
    found = head(data)
    said = data[: found.size] if found and found.type == _SCHEMA else b""
    return found is not None and len(said) == found.size and any(name in said for name in _FIRST_COLUMNS)


def _read(data: Bytes, form: str, at: int) -> int:
    if at < 0:
        raise IndexError(at)
    return int(struct.unpack_from(form, data, at)[0])


def _field(data: Bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer table lies; 0 when it is absent."""
    vtable = table - _read(data, "<i", table)
    slot = 4 + 2 * number
    offset = _read(data, "<H", vtable + slot) if slot + 2 <= _read(data, "<H", vtable) else 0
    return table + offset if offset else 0


def _vector(data: Bytes, table: int, number: int) -> int:
    """Where a vector of a table lies, its length first; 0 when it is absent."""
    at = _field(data, table, number)
    return at + _read(data, "<I", at) if at else 0
