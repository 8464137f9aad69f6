"""Space for a frame: asked for before it is written, and taken from the file system at once.

Otherwise that takes it page by page while the frame is written, which is a quarter of the time of a large one
(ext4), and may find in the midst of it that there is none left: what was written by then can never be used.
The file's size stays what was written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

_WORTH_IT: Final = 1 << 20  # bytes; below, the call costs more than it saves
_KEEP_SIZE: Final = 1
NONE_LEFT: Final = (errno.ENOSPC, errno.EDQUOT)
# What values leave free is for records and commits, thousands of steps of which fit into it …
_LEFT_FREE: Final = 64 << 20
_SHARE: Final = 16  # … or this part of a small file system.
_UNASKED: Final = 8  # small frames may take this part of what was free, together, before it is asked again


class NoRoomError(OSError):
    """The file system has no space for a frame, of which nothing was written: the file is as it was."""


def _found() -> Any:
    """Return Linux' fallocate; POSIX' own changes the file's size, and writes zeros where there is none."""
    if sys.platform != "linux" or sys.maxsize <= 2**32:
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


_fallocate: Final = _found()


def take(fd: int, place: int, size: int) -> int:
    """Take the space for `size` bytes at a place of a file; what stands against it, the write will say.

    Returns 0, or ENOSPC or EDQUOT where there is none: then nothing of it is held.
    """
    if size < _WORTH_IT or _fallocate is None or not _fallocate(fd, _KEEP_SIZE, place, size):
        return 0
    code = ctypes.get_errno()
    if code not in NONE_LEFT:
        return 0
    with suppress(OSError):  # ext4 keeps what it found behind the end; where the file ends is no cut
        if os.fstat(fd).st_size == place:
            os.ftruncate(fd, place)
    return code


class Room:
    """The space that a file of values may take: records and commits go on when there is no more of it."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._unasked = 0  # bytes that may be taken before the file system is asked again

    def take(self, fd: int, place: int, size: int) -> None:
        """Take the space for a frame at a place of a file; NoRoomError where there is none."""
        if size > self._unasked or size >= _WORTH_IT:
            spare = room(fd, spare=True)
            if size > spare:
                raise NoRoomError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for values of {size} bytes")
            self._unasked = min(spare, _LEFT_FREE) // _UNASKED
        self._unasked -= min(size, self._unasked)
        if code := take(fd, place, size):
            raise NoRoomError(code, f"{os.strerror(code)} for values of {size} bytes")


def room(place: int | Path, *, spare: bool = False) -> int:
    """Return how many bytes the file system of a file or folder takes; a great number where it does not say.

    `spare`: how many of them values may take.
    """
    try:
        found = os.statvfs(place)
    except (AttributeError, OSError):
        return sys.maxsize
    if not found.f_blocks:
        return sys.maxsize
    left = min(_LEFT_FREE, found.f_blocks * found.f_frsize // _SHARE) if spare else 0
    return found.f_bavail * found.f_frsize - left
