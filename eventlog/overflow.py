"""Windows that are not exported for long: counted while they grow, and what stays of what was spilled.

The window that is open has its number already. What is spilled of it goes to the log under that number, as
frames that are not its last; the next drain, whichever it is, takes the number and completes the window. So a
process that dies before leaves a window that is readable and incomplete.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .frame import Spec
    from .histogram import Counts
    from .moments import Rows

ROOM: Final = 64 << 20  # bytes that a recorder holds before it is spilled, where nobody said otherwise
SECONDS: Final = 60.0  # how old what it holds gets before it is
NUMBER_BYTES: Final = 64  # what a number of a series weighs, with its time
ENDLESS: Final = 1 << 62


class Numbering:
    """The number of the open window. `lock` is held while something is handed over under it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.open = 0

    def close(self) -> int:
        """Return the number of the window that was open, and open the next one."""
        with self.lock:
            number, self.open = self.open, self.open + 1
        return number

    def begin_anew(self) -> None:
        """In a forked child: the parent may have held the lock."""
        self.lock = threading.RLock()


class Spilled:
    """The moments, and histograms, of records that were spilled and not exported yet: a row a key."""

    def __init__(self) -> None:
        self.rows: dict[Spec, Rows] = {}  # as they merge in the order in which they were recorded
        self.counts: dict[Spec, Counts] = {}  # where quantiles are asked
        self.sampled: set[str] = set()  # keys recorded by sample

    def add(self, specs: Sequence[Spec], rows: Rows, counts: Mapping[Spec, Counts]) -> None:
        """Take what was spilled; it comes behind what was before."""
        if not specs:
            return
        keys = list(dict.fromkeys(specs))
        place = {spec: i for i, spec in enumerate(keys)}
        before = [spec for spec in keys if spec in self.rows]
        groups = np.array([place[spec] for spec in (*before, *specs)], np.intp)
        merged = moments.pool(np.stack([*(self.rows[spec] for spec in before), *rows]), groups, len(keys))
        self.rows.update(zip(keys, merged, strict=True))
        for spec, those in counts.items():
            self.counts[spec] = self.counts[spec] + those if spec in self.counts else those

    def give(self, key: str | None, specs: list[Spec], rows: list[Rows]) -> None:
        """Append what there is of one key, or of all keys."""
        for spec, row in self.rows.items():
            if key in (None, spec.key):
                specs.append(spec)
                rows.append(row[np.newaxis])

    def counts_of(self, key: str | None) -> Iterable[tuple[Spec, Counts]]:
        """Return the histograms of one key, or of all keys."""
        return [(spec, counts) for spec, counts in self.counts.items() if key in (None, spec.key)]

    def total(self, spec: Spec) -> int:
        """Return the exact sum of what was spilled of a counter."""
        row = self.rows.get(spec)
        return 0 if row is None else int(row[moments.INT_SUM])

    def forget_key(self, key: str) -> None:
        """Drop one key."""
        for kept in (self.rows, self.counts):
            for spec in [spec for spec in kept if spec.key == key]:
                del kept[spec]
        self.sampled.discard(key)


class Valve:
    """Where what is too much goes: `spill` takes a recorder; without a log it is None, and all stays."""

    def __init__(self) -> None:
        self.room = ROOM
        self.spill: Callable[[Any], None] | None = None

    def release(self, recorder: Any) -> int:
        """Spill what a recorder holds; return how much room it has from now on."""
        if self.spill is not None:
            self.spill(recorder)
        return self.room


window = Numbering()
valve = Valve()
