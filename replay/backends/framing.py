"""Files of framed records, as wandb and SwanLab keep them: LevelDB's log blocks, their CRC plain CRC-32.

A header of 7 bytes; then blocks of 32 KiB, in which a record is one chunk or several; what is left of a block
that no chunk fits into is zero. A reader stops at the first chunk that is cut off or damaged.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import TYPE_CHECKING, Final

from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

_BLOCK: Final = 32768
_CHUNK: Final = struct.Struct("<IHB")  # CRC-32 of kind and data, length, kind
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

WANDB: Final = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
SWANLAB: Final = struct.pack("<4sHB", b":SWL", 0xE1D6, 2)


class RecordWriter:
    """Appends records to a stream that is empty."""

    def __init__(self, stream: BinaryIO, header: bytes) -> None:
        self._stream = stream
        self._at = stream.write(header)

    def put(self, record: bytes) -> None:
        """Append one record, in as many chunks as the blocks need."""
        left, first = record, True
        while left or first:
            room = self._room()
            part, left = left[:room], left[room:]
            kind = (_FULL if not left else _FIRST) if first else (_LAST if not left else _MIDDLE)
            checksum = zlib.crc32(bytes([kind]) + part)
            self._at += self._stream.write(_CHUNK.pack(checksum, len(part), kind) + part)
            first = False

    def _room(self) -> int:
        """Return how much data the block still takes, moving on to the next where only padding is left."""
        free = _BLOCK - self._at % _BLOCK
        if free < _CHUNK.size:
            self._at += self._stream.write(b"\0" * free)
            free = _BLOCK
        return free - _CHUNK.size


class RecordReader:
    """Reads the records of a file; `damage` then says why it stopped before the end, None where it did not.

    BackendError for a file that does not begin with `header`.
    """

    def __init__(self, path: Path, header: bytes) -> None:
        self.damage: str | None = None
        self._path = path
        self._header = header

    def __iter__(self) -> Iterator[bytes]:
        """Yield whole records."""
        with self._path.open("rb") as stream:
            found = stream.read(len(self._header))
            if found != self._header[: len(found)]:
                raise errors.BackendError(
                    f"expected a file beginning with {self._header!r}, got {found!r}: {self._path}"
                )
            parts: list[bytes] = []
            while chunk := self._chunk(stream):
                kind, data = chunk
                parts.append(data)
                if kind in (_FULL, _LAST):
                    yield b"".join(parts)
                    parts = []
            if parts and self.damage is None:
                self.damage = f"ends within a record: {self._path}"

    def last(self) -> list[bytes]:
        """Return the whole records of the last blocks."""
        found: list[bytes] = []
        parts: list[bytes] | None = None  # None: within a record that began before
        with self._path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            block = max(0, (size - 1) // _BLOCK - 1) * _BLOCK
            stream.seek(block or len(self._header))
            while chunk := self._chunk(stream):
                kind, data = chunk
                if kind in (_FULL, _FIRST):
                    parts = []
                if parts is not None:
                    parts.append(data)
                    if kind in (_FULL, _LAST):
                        found.append(b"".join(parts))
        return found

    def _chunk(self, stream: BinaryIO) -> tuple[int, bytes] | None:
        at = stream.tell()
        if (free := _BLOCK - at % _BLOCK) < _CHUNK.size:
            stream.read(free)
        head = stream.read(_CHUNK.size)
        if not any(head) and (len(head) == _CHUNK.size or not head):
            return None  # the end, or space that was never written
        data = stream.read(_CHUNK.unpack(head)[1]) if len(head) == _CHUNK.size else b""
        if len(head) < _CHUNK.size or len(data) < _CHUNK.unpack(head)[1]:
            self.damage = f"ends within a record at byte {at}: {self._path}"
            return None
        checksum, _, kind = _CHUNK.unpack(head)
        if checksum != zlib.crc32(bytes([kind]) + data):
            self.damage = f"a wrong checksum at byte {at}: {self._path}"
            return None
        return kind, data
