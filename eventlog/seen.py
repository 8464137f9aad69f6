"""Which frames of a run were read, which of them were bad, and which need not be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from .entries import Entries
    from .windows import WindowSet


class Seen:
    """Frames by their stream and their place in its index."""

    def __init__(self) -> None:
        self.left: Mapping[Path, WindowSet] = {}  # out, by place
        self._read: dict[Path, bytearray] = {}  # by place
        self._bad: set[tuple[Path, int]] = set()

    def note(self, path: Path, slots: NDArray[np.intp], good: NDArray[np.bool_], *, keep: bool) -> None:
        """Note that frames were read; that of a bad one is always kept."""
        if keep:
            read = self._read.setdefault(path, bytearray())
            read.extend(bytes(max(0, int(slots.max()) + 1 - len(read))))
            np.frombuffer(read, np.bool_)[slots] = True
        if self._bad:
            self._bad.difference_update((path, slot) for slot in slots[good].tolist())
        self._bad.update((path, slot) for slot in slots[~good].tolist())

    def is_left(self, path: Path, slot: int) -> bool:
        """Whether a frame is left out."""
        return slot in self.left.get(path, ())

    def ranges_left(self, path: Path) -> list[tuple[int, int]]:
        """Return the ranges (first, stop) of places that are left out, in order."""
        return self.left[path].runs() if path in self.left else []

    def is_read(self, path: Path, slot: int) -> bool:
        """Whether a frame was read."""
        return any(self._read.get(path, b"")[slot : slot + 1])

    def is_bad(self, path: Path, slot: int) -> bool:
        """Whether a frame was bad when it was last read."""
        return (path, slot) in self._bad

    def all_right(self, path: Path, run: Entries, *, unread: bool) -> bool:
        """Whether it is known that no frame of a run of entries is bad; `unread`: also of those not read."""
        if self._bad:
            return False
        known = ~run.frames | unread
        read = np.frombuffer(self._read.get(path, b""), np.bool_)[run.first :]
        known[: len(read)] |= read[: len(known)]
        for first, stop in self.ranges_left(path):
            known[max(0, first - run.first) : max(0, stop - run.first)] = True
        return bool(known.all())
