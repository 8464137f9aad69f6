"""Notes of losses on the disk: as soon as it takes any; when it is full, in space kept back for them."""

from __future__ import annotations

import errno
import os
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from .extent import NONE_LEFT, NoRoomError, room
from .reserve import RESERVE_BYTES, Reserve

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from .losses import Losses
    from .segment import Loss
    from .segments import Segments

_AGAIN_SECONDS: Final = 5.0  # after which a disk that took no note is tried once more


class Notes:
    """Used by the writer's thread alone; `lock` is of those who share the losses."""

    def __init__(
        self, segments: Segments, folder: Path, losses: Losses, lock: AbstractContextManager[Any]
    ) -> None:
        """Space is kept back where a folder lies, from `begin` on."""
        self._segments = segments
        self._reserve = Reserve(folder / f".{uuid.uuid4().hex}.reserve")
        self._folder = folder
        self._losses = losses
        self._lock = lock
        self._again_at = 0.0
        self._full = False  # the disk had no room for a frame

    def begin(self) -> None:
        """Keep space back, also again what of it was given up, if the disk has it."""
        if not self._full:
            self._reserve.take()

    def forget(self) -> None:
        """Give the space back, with or without notes in it."""
        self._reserve.release()

    def failed(self, error: OSError) -> None:
        """Take note of why a frame could not be written."""
        self._full = error.errno in NONE_LEFT

    def keep_out(self, size: int) -> None:
        """NoRoomError for a frame that is not tried: a full disk has room for notes alone."""
        self._full = self._full and room(self._folder) < size + RESERVE_BYTES
        if self._full:
            raise NoRoomError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, *, every: bool = True) -> None:
        """Note losses; those of a stream that takes none, later.

        Not `every` one: on a full disk without those whose step a commit is still to say, which may be lost
        as well.
        """
        if not every and time.monotonic() < self._again_at:
            return
        known = self._full and not every
        while left := self._segments.note(iter(lambda: self._pay(known=known), None)):
            with self._lock:
                for loss in left:
                    self._losses.owe(loss)
            if not self._reserve.give():
                self._again_at = time.monotonic() + _AGAIN_SECONDS
                break

    def _pay(self, *, known: bool) -> Loss | None:
        with self._lock:
            return self._losses.pay(known=known)

    def finish(self) -> None:
        """Note all that there is: if need be in all the space that there is."""
        self.write()
        self._reserve.release()
        self.write()
