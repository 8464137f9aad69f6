"""The files of a run, whatever lies there: what others put under their names is never waited for.

A pipe would be waited for until somebody writes to it, a device could be read for ever.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .errors import RunDirectoryError

if TYPE_CHECKING:
    from collections.abc import Generator

_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def fixed(path: str | os.PathLike[str]) -> Path:
    """Return the path as it is meant now: a process may change its directory (Hydra does, for every job).

    Where that is gone the path stays as it is given: nothing will be found there.
    """
    try:
        return Path(path).absolute()
    except OSError:
        return Path(path)


def shown(path: str | os.PathLike[str]) -> str:
    """Return a path as text that tables and JSON can hold: with a backslash for what is no UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


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


def is_file(path: Path) -> bool:
    """Whether there is something that is no folder, be it by a link: it will not become one by itself."""
    return os.path.exists(path) and not is_folder(path)  # noqa: PTH110 - also where one may not look


def is_gone(path: Path, inode: int, fd: int) -> bool:
    """Whether an open file no longer lies where it was made; False where nobody can say."""
    try:
        there = path.lstat().st_ino
        # Some file systems in user space make up a file's number anew each time: by itself that says nothing.
        return there != inode and not os.fstat(fd).st_nlink
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))


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


@contextmanager
def appearing(target: Path) -> Generator[Path]:
    """Make a directory under another name beside it; once complete it gets its own, else nothing is left.

    An empty directory of that name gives way; RunDirectoryError, before anything is made, for any other file,
    and for where a file system is mounted, which cannot.
    """
    if is_there(target) and not (is_folder(target) and not any(target.iterdir())):
        raise RunDirectoryError(f"expected a new or an empty directory, got one in use: {target}")
    if target.is_mount():
        raise RunDirectoryError(f"expected a new directory, got where a file system is mounted: {target}")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.replace(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the file system knows how."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
