"""The files of a damaged segment as bytes: what a checksum vouches for, and what may begin a frame."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from .files import open_file, read_file
from .message import begins_stream, head
from .schema import ENTRY_SIZE, IndexHeader, IndexRecord, crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Self

    from .message import Decoder
    from .rundir import SegmentFile

T = TypeVar("T")
HEAD_BYTES: Final = 1 << 16  # enough of a message to judge it by
_PREFIX: Final = b"\xff\xff\xff\xff"
_SEARCH_BYTES: Final = 1 << 20


class Source:
    """The files of a segment as bytes; a context manager.

    `uid` is what the index's records are sealed with; None when that is lost.
    """

    def __init__(self, file: SegmentFile) -> None:
        self.file = file
        self.index = _bytes(file.index)
        self.header, self.uid = _header(self.index)
        first = next(_records(self.index, self.uid), None)
        self._first = first if first and not first.offset else None  # the schema's
        self.size = 0
        self._data: int | None = None
        with suppress(OSError):
            self._data = open_file(file.data)
            self.size = os.fstat(self._data).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._data is not None:
            os.close(self._data)

    @property
    def has_data(self) -> bool:
        """Whether there is a stream."""
        return self._data is not None

    def read(self, place: int, size: int) -> bytes:
        """Return the bytes at a place of the stream, as many as can be read."""
        data = b""
        with suppress(OSError):
            while self._data is not None and len(data) < size:
                if not (more := os.pread(self._data, size - len(data), place + len(data))):
                    break
                data += more
        return data

    def frame(self, record: IndexRecord) -> bytes | None:
        """Return the bytes an index record speaks of, when they are what it says."""
        data = self.read(record.offset, min(record.length, max(0, self.size - record.offset)))
        return data if len(data) == record.length and crc32c(data) == record.crc else None

    def schema(self) -> bytes | None:
        """Return the schema message when its checksum is right."""
        return self.frame(self._first) if self._first else None

    @property
    def begin(self) -> int:
        """Where the frames begin: behind the schema message."""
        if self._first:
            return min(self._first.length, self.size)
        found = head(self.read(0, HEAD_BYTES))
        return found.size if found and found.type == 1 and found.size <= self.size else 0

    def records(self) -> Iterator[tuple[int, IndexRecord]]:
        """Yield the records of the index that are right, the schema's aside, each with its place."""
        for slot, record in enumerate(_records(self.index, self.uid)):
            if slot and record:
                yield slot, record

    @property
    def torn(self) -> int:
        """How many records of the index are not right, the schema's aside."""
        return sum(record is None for record in islice(_records(self.index, self.uid), 1, None))

    def walk(self, start: int, stop: int, decoder: Decoder) -> Iterator[tuple[int, int]]:
        """Yield place and size of what begins like a whole frame between two places of the stream.

        Where another stream begins, at its schema message, is the end of it: that has the size 0.
        """
        place = start
        while place + 8 <= stop:
            begun = self.read(place, min(HEAD_BYTES, stop - place))
            size = decoder.size_of(begun)
            if size and place + size <= stop:
                yield place, size
                place += size
            elif begins_stream(begun):
                yield place, 0
                return
            else:
                place = self._next_prefix(place + 8, stop)

    def _next_prefix(self, place: int, stop: int) -> int:
        """Return where a message may begin next: they lie at multiples of eight."""
        place -= place % 8
        while place < stop and (data := self.read(place, min(_SEARCH_BYTES, stop - place))):
            at = data.find(_PREFIX)
            while at % 8 and at >= 0:
                at = data.find(_PREFIX, at + 1)
            if at >= 0:
                return place + at
            place += len(data) + 7 & ~7
        return stop


def _bytes(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError:
        return b""


def _header(index: bytes) -> tuple[IndexHeader | None, bytes | None]:
    """Return an index's header when it is intact, and the uid of its records.

    A damaged header may still hold the uid: a record that is right by it proves that. So does the header's
    own checksum, when one bit is the other way round.
    """
    header = IndexHeader.unpack(index[:ENTRY_SIZE])
    if header is not None:
        return header, header.segment_uid
    uid = mended.segment_uid if (mended := _mended(index[:ENTRY_SIZE], IndexHeader.unpack)) else index[16:32]
    entries = (index[at : at + ENTRY_SIZE] for at in range(ENTRY_SIZE, len(index), ENTRY_SIZE))
    return None, uid if any(IndexRecord.unpack(entry, uid) for entry in entries) else None


def _records(index: bytes, uid: bytes | None) -> Iterator[IndexRecord | None]:
    """Yield the records of an index, the schema's first; None for one that is not right."""
    unpack = partial(IndexRecord.unpack, segment_uid=uid or b"")
    for at in range(ENTRY_SIZE, len(index) - ENTRY_SIZE + 1, ENTRY_SIZE):
        entry = index[at : at + ENTRY_SIZE]
        yield (unpack(entry) or _mended(entry, unpack)) if uid else None


def _mended(data: bytes, unpack: Callable[[bytes], T | None]) -> T | None:
    """Return what one bit keeps from being right: a checksum of 32 bits tells which, of so few bytes."""
    bits = int.from_bytes(data, "little")
    tried = ((bits ^ 1 << bit).to_bytes(ENTRY_SIZE, "little") for bit in range(8 * ENTRY_SIZE) if bits)
    return next((found for one in tried if (found := unpack(one))), None)


def records_of(file: SegmentFile) -> Iterator[tuple[int, IndexRecord]]:
    """Yield the records of an index that are right, whatever became of its header, each with its place."""
    with Source(file) as source:
        yield from source.records()
