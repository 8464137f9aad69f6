"""Files of which every block has a checksum that is kept elsewhere: written whole or not at all, read by it.

Parquet's own page checksums leave out the pages' heads and the footer, and not every reader looks at them.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from eventlog import open_file, schema, sync_folder

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

BLOCK: Final = 1 << 20
TEMPORARY: Final = ".tmp"  # how names of unfinished files end; they begin with a dot


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file must hold: its size, and the CRC32C of each of its blocks."""

    size: int
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, told: dict[str, Any]) -> Stamp:
        """Return what `plain` made; KeyError, TypeError or ValueError for anything else."""
        found = cls(int(told["bytes"]), tuple(map(int, told["crc32c"])))
        if len(found.checksums) != -(-found.size // BLOCK):
            raise ValueError(
                f"expected a checksum a block, got {len(found.checksums)} for {found.size} bytes"
            )
        return found

    def plain(self) -> dict[str, Any]:
        """Return it as a JSON file holds it."""
        return {"bytes": self.size, "crc32c": list(self.checksums)}


class NewFile:
    """A file under a temporary name until `finish` gives it its own; else its context leaves nothing."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
        self._file = self._temporary.open("xb")
        self._size, self._crc = 0, 0
        self._checksums: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, data: bytes | pa.Buffer) -> int:
        """Write the next bytes."""
        self._file.write(data)
        done = 0
        while done < len(data):
            room = BLOCK - self._size % BLOCK
            piece = data[done : done + room]
            self._crc = schema.crc32c(piece, crc=self._crc)
            self._size += len(piece)
            done += len(piece)
            if self._size % BLOCK == 0:
                self._checksums.append(self._crc)
                self._crc = 0
        return done

    def tell(self) -> int:
        """Return how much is written."""
        return self._size

    def flush(self) -> None:
        """`finish` does."""

    def finish(self) -> Stamp:
        """Bring the file to the disk and give it its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)
        sync_folder(self._path.parent)
        rest = [self._crc] if self._size % BLOCK else []
        return Stamp(self._size, (*self._checksums, *rest))


class CheckedFile:
    """A file that gives out only bytes whose block has its checksum; OSError for all others."""

    closed = False

    def __init__(self, path: Path, stamp: Stamp) -> None:
        """Open it; OSError when it is not there, no plain file, or of another size."""
        self._path = path
        self._stamp = stamp
        self._good = bytearray(len(stamp.checksums))
        self._at = 0
        self._fd = open_file(path)
        if (size := os.fstat(self._fd).st_size) != stamp.size:
            self.close()
            raise OSError(f"expected {stamp.size} bytes, got {size}")

    def close(self) -> None:
        """Let go of the file."""
        if not self.closed:
            self.closed = True
            os.close(self._fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def seekable(self) -> bool:
        """It can be read anywhere."""
        return True

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place, as files do."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._stamp.size}[whence]
        self._at = base + place
        return self._at

    def tell(self) -> int:
        """Return where it is read next."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        at = self._at
        stop = self._stamp.size if size < 0 else min(self._stamp.size, at + size)
        if stop <= at:
            return b""
        self._at = stop
        blocks = range(at // BLOCK, -(-stop // BLOCK))
        if all(self._good[blocks.start : blocks.stop]):
            return self._pread(at, stop)
        start = blocks.start * BLOCK
        data = self._pread(start, min(self._stamp.size, blocks.stop * BLOCK))
        whole = pa.py_buffer(data)
        for i, block in enumerate(blocks):
            found = schema.crc32c(whole[i * BLOCK : (i + 1) * BLOCK])
            if found != self._stamp.checksums[block]:
                raise OSError(
                    f"expected checksum {self._stamp.checksums[block]:#010x}, got {found:#010x}, "
                    f"offset {block * BLOCK}"
                )
            self._good[block] = 1
        return data if (start, start + len(data)) == (at, stop) else data[at - start : stop - start]

    def _pread(self, start: int, stop: int) -> bytes:
        data = os.pread(self._fd, stop - start, start)
        while len(data) < stop - start:
            more = os.pread(self._fd, stop - start - len(data), start + len(data))
            if not more:
                raise OSError(f"expected {self._stamp.size} bytes, got {start + len(data)}")
            data += more
        return data
