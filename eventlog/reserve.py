"""Space on the disk that is kept back: when the disk is full to the end, what was lost is noted in it.

It is a file without a name: it goes with the process, however that ends.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

RESERVE_BYTES: Final = 128 << 10  # new segments of three streams, and a thousand notes of 64 bytes
_SLICE: Final = 16 << 10  # what is given up at a time while the process goes on …
_LAST: Final = 64 << 10  # … down to what is there for its end


class Reserve:
    """Space kept back where the files of a producer lie."""

    def __init__(self, path: Path) -> None:
        """Say under which name it is made; it has none afterwards."""
        self._path = path
        self._fd: int | None = None
        self._size = 0

    def take(self, nbytes: int = RESERVE_BYTES) -> None:
        """Keep the space back, or again what was given up of it; where the disk has none, nothing is kept."""
        with suppress(OSError):
            if self._fd is None and not self._size:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                self._path.unlink()
            if self._fd is not None and self._size < nbytes:
                _fill(self._fd, nbytes)
                self._size = nbytes

    def give(self) -> bool:
        """Give a slice of the space back; return whether there was one besides what is for the end."""
        if self._fd is None or self._size - _SLICE < _LAST:
            return False
        try:
            os.ftruncate(self._fd, self._size - _SLICE)
        except OSError:
            return False
        self._size -= _SLICE
        return True

    def release(self) -> None:
        """Give the space back, for good."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)


def _fill(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.pwrite(fd, os.urandom(nbytes), 0)
