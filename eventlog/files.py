"""Opening the files of a run to read: what others put there under their names is never waited for.

A pipe would be waited for until somebody writes to it, a device could be read for ever.
"""

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


def is_there(path: Path) -> bool:
    """Whether anything has this name, be it a link to nothing; False also where one may not look."""
    return _mode(path) != 0


def is_link(path: Path) -> bool:
    """Whether this is the name of a link, to whatever; False also where one may not look."""
    return stat.S_ISLNK(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def is_folder(path: Path) -> bool:
    """Whether there is a folder, be it by a link; False also where one may not look."""
    try:
        return path.is_dir()
    except OSError:
        return False


def why_no_run(path: Path) -> str:
    """Say what there is where a run's directory was expected and nothing of a run is."""
    try:
        next(path.iterdir(), None)
    except FileNotFoundError:
        return "a link to nothing" if is_link(path) else "nothing"
    except NotADirectoryError:
        return "a file"
    except OSError as error:
        return error.strerror or type(error).__name__
    return "neither run.json nor events in it"


def read_file(path: Path) -> bytes:
    """Return what is in a file; OSError as `open_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()
