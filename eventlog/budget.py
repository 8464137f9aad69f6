"""How much payload a producer keeps: whole segments, the oldest go first. Records are never touched."""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from .arrays import is_whole
from .errors import LogError
from .segment import Pruned

if TYPE_CHECKING:
    from .rundir import SegmentFile
    from .segment import SegmentWriter

_SHARES: Final = 8  # of a budget is one segment: what is removed at a time
_EARLY: Final = 0.8  # of a budget in use: time to say so
_UNITS: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_AMOUNT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def as_bytes(given: int | str, what: str = "a payload budget", *, least: Literal[0, 1] = 1) -> int:
    """Return an amount in bytes: an integer of `least` or more, or a text such as "2.5 GiB"; LogError."""
    if is_whole(given) and given >= least:
        return int(given)
    match = _AMOUNT.fullmatch(given) if isinstance(given, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    amount = float(match[1]) * unit if match and unit else -1
    if amount < 1 and amount != least:
        expected = f"{what} in bytes of {least} or more, or with a unit such as '2GB'"
        raise LogError(f"expected {expected}, got {given!r}")
    return int(amount)


def shown(amount: int) -> str:
    """Return an amount of bytes to be read: "2.5 GB"."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount} bytes"


class _Kept(NamedTuple):
    file: SegmentFile
    told: Pruned


class Budget:
    """The payload segments of one process; without a limit nothing is ever removed."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.pruned: list[Pruned] = []
        self._kept: deque[_Kept] = deque()
        self._bytes = 0  # of those
        self._noted: set[int] = set()
        self._said: set[str] = set()

    def segment_bytes(self, usual: int) -> int:
        """Return how large a segment may grow."""
        return usual if self.limit is None else min(usual, self.limit // _SHARES)

    def keep(self, segment: SegmentWriter) -> None:
        """Take a segment that grows no more."""
        size = segment.size
        with suppress(OSError):  # a frame that was cut short is on the disk too
            size = segment.file.data.stat().st_size
        self._kept.append(
            _Kept(segment.file, Pruned(segment.file.number, segment.windows, segment.rows, size))
        )
        self._bytes += size

    def make_room(self, open_segment: SegmentWriter, size: int, *, sync: bool) -> bool:
        """Remove the oldest segments until `size` bytes more keep the budget, each noted before it goes.

        Whether there is room now; a frame larger than the budget has it once nothing else is left. OSError
        when a note cannot be written.
        """
        if self.limit is None:
            return True
        wanted = open_segment.size + size
        while self._kept and self._bytes + wanted > self.limit:
            oldest = self._kept[0]
            if oldest.told.number not in self._noted:  # it could not be removed the last time
                open_segment.pruned(oldest.told)
                self._noted.add(oldest.told.number)
            if sync:  # else a dead node may have the removal and not the note
                open_segment.sync()
            try:
                oldest.file.data.unlink(missing_ok=True)
            except OSError:
                return False
            self.pruned.append(oldest.told)
            self._bytes -= self._kept.popleft().told.bytes
        return self._bytes + wanted <= self.limit or not open_segment.frames

    def news(self, open_size: int) -> str | None:
        """Return what the user is to be told now, each thing once."""
        if self.limit is None:
            return None
        used = self._bytes + open_size
        of = f"{shown(used)} of {shown(self.limit)}"
        if self.pruned and "pruned" not in self._said:
            self._said |= {"pruned", "early"}
            return f"the payload budget is used up ({of}): the oldest values are being removed, records stay"
        if used > _EARLY * self.limit and "early" not in self._said:
            self._said.add("early")
            return (
                f"{of} of the payload budget are used: soon the oldest values are removed, records stay; "
                "payload='sample', or a larger payload_budget, keeps more steps"
            )
        return None
