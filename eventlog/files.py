"""Opening the files of a run to read: what others put there under their names is never waited for."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def open_file(path: Path) -> int:
    """Return a descriptor to read from; OSError, at once, also for a pipe, a device or a folder."""
    fd = os.open(path, _FLAGS)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))


def read_file(path: Path) -> bytes:
    """Return what is in a file; OSError as `open_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()
