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


class Reserve:
    """Space kept back where the files of a producer lie."""

    def __init__(self, path: Path) -> None:
        """Say under which name it is made; it has none afterwards."""
        self._path = path
        self._fd: int | None = None

    def take(self, nbytes: int = RESERVE_BYTES) -> None:
        """Keep the space back; where the disk has none, nothing is kept."""
        with suppress(OSError):
            self._fd = fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._path.unlink()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, nbytes)
            else:
                os.write(fd, os.urandom(nbytes))

    def release(self) -> bool:
        """Give the space back; return whether there was any."""
        fd, self._fd = self._fd, None
        if fd is None:
            return False
        with suppress(OSError):
            os.close(fd)
        return True
