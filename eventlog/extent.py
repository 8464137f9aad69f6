"""Space for a frame, taken from the file system at once.

Otherwise that takes it page by page while the frame is written, which is a quarter of the time of a large one
(ext4), and may find in the midst of it that there is none left. The file's size stays what was written.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

_WORTH_IT: Final = 1 << 20  # bytes; below, the call costs more than it saves
_KEEP_SIZE: Final = 1


def _found() -> Any:
    """Return Linux' fallocate; POSIX' own changes the file's size, and writes zeros where there is none."""
    if sys.platform != "linux" or sys.maxsize <= 2**32:
        return None
    call = getattr(ctypes.CDLL(None), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


_fallocate: Final = _found()


def take(fd: int, place: int, size: int) -> None:
    """Take the space for `size` bytes at a place of a file; what stands against it, the write will say."""
    if size >= _WORTH_IT and _fallocate is not None:
        _fallocate(fd, _KEEP_SIZE, place, size)
