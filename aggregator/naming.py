"""From moments to the numbers a user sees: what a key is decides what its numbers are called.

    kind                        exports
    scalar, timing              `k` (mean), `k__count`
    counter, denominator        `k` (exact integer)
    stat AVG_MIN_MAX            `k/avg`, `k/min`, `k/max`
    stat AVG, SUM, MIN, MAX     `k`

What was not recorded, and means and extremes of nothing, are absent. Shares of one number have no extremes:
no rank ever saw the whole number, so only their mean, sum and count are exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from eventlog import Kind, ReduceType, Spread, moments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["Columns", "Meta", "Names", "names", "suffixes"]


class Meta(NamedTuple):
    """What a key is. All ranks that hold the key must say the same."""

    kind: Kind
    reduce_type: ReduceType | None = None
    denominator: str | None = None
    spread: Spread = Spread.SHARDS

    def __str__(self) -> str:
        """Name it for people: "stat avg_min_max over 'n_tokens', replicated"."""
        words = [self.kind.value]
        if self.reduce_type not in (None, ReduceType.SCALAR) and self.kind is not Kind.DENOMINATOR:
            words.append(self.reduce_type.value)
        if self.denominator is not None:
            words.append(f"over {self.denominator!r}")
        text = " ".join(words)
        return text if self.spread is Spread.SHARDS else f"{text}, {self.spread.value}"


# Where a number comes from: one of the finalizers of moments, or an integer word as it stands.
_MEAN, _LEAST, _GREATEST, _TOTAL, _COUNT, _EXACT = range(6)
_FINALIZERS: Final = (moments.means, moments.leasts, moments.greatests, moments.totals)
_OF_TYPE: Final = {
    ReduceType.AVG_MIN_MAX: (("/avg", _MEAN), ("/min", _LEAST), ("/max", _GREATEST)),
    ReduceType.AVG: (("", _MEAN),),
    ReduceType.SUM: (("", _TOTAL),),
    ReduceType.MIN: (("", _LEAST),),
    ReduceType.MAX: (("", _GREATEST),),
}


def _numbers(meta: Meta) -> Sequence[tuple[str, int]]:
    """Return (suffix of the name, source) of every number a key exports."""
    if meta.kind in (Kind.SCALAR, Kind.TIMING):
        return (("", _MEAN), ("__count", _COUNT))
    if meta.kind in (Kind.COUNTER, Kind.DENOMINATOR):
        return (("", _EXACT),)
    found = _OF_TYPE[meta.reduce_type or ReduceType.AVG_MIN_MAX]
    if meta.spread is Spread.SHARES:
        return tuple(number for number in found if number[1] not in (_LEAST, _GREATEST))
    return found


def suffixes(meta: Meta) -> tuple[str, ...]:
    """Return what is appended to a key of this kind to name its numbers."""
    return tuple(suffix for suffix, _ in _numbers(meta))


class Names:
    """The names of a fixed list of keys: made once, then turns moments into numbers without a loop.

    Attributes: `keys` and `metas`; `names`, all that the keys can export; `row_of`, the key each belongs to;
    `distinct`, the names as a set; `ambiguous`, whether two keys share a name.
    """

    def __init__(self, keys: Iterable[str], metas: Iterable[Meta]) -> None:
        self.keys = tuple(keys)
        self.metas = tuple(metas)
        numbers = [
            (i, key + suffix, source)
            for i, (key, meta) in enumerate(zip(self.keys, self.metas, strict=True))
            for suffix, source in _numbers(meta)
        ]
        self.names = [name for _, name, _ in numbers]
        self.distinct = frozenset(self.names)
        self.ambiguous = len(self.distinct) < len(self.names)
        self.row_of = np.array([i for i, _, _ in numbers], np.intp)
        sources = np.array([source for _, _, source in numbers], np.intp)
        self._needs_values = sources < _TOTAL  # means and extremes of nothing are absent
        self._sources = [
            (source, self.row_of[sources == source], np.flatnonzero(sources == source))
            for source in sorted(set(sources.tolist()))
        ]

    def of(self, rows: NDArray[np.int64]) -> dict[str, float]:
        """Return name -> number for moments of shape (keys, WORDS); counts are exact ints."""
        floats = np.empty(len(self.names))
        integers: list[tuple[int, float]] = []
        for source, chosen, at in self._sources:
            if source == _EXACT:
                integers += zip(at.tolist(), moments.exacts(rows[chosen]), strict=True)
            elif source == _COUNT:
                integers += zip(at.tolist(), rows[chosen, moments.COUNT].tolist(), strict=True)
            else:
                floats[at] = _FINALIZERS[source](rows)[chosen]
        values: list[float] = floats.tolist()
        for at, value in integers:
            values[at] = value
        pairs = zip(self.names, values, strict=True)
        if rows[:, [moments.PRESENT, moments.COUNT]].all():
            return dict(pairs)
        there = (rows[:, moments.PRESENT] > 0)[self.row_of]
        there &= (rows[:, moments.COUNT] > 0)[self.row_of] | ~self._needs_values
        return dict(compress(pairs, there.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Moments with the names of their keys: `rows[i]` belongs to `names.keys[i]`."""

    names: Names
    rows: NDArray[np.int64]


def names(
    key: str,
    kind: Kind,
    reduce_type: ReduceType | None,
    row: NDArray[np.int64],
    spread: Spread = Spread.SHARDS,
) -> dict[str, float]:
    """Return what one key exports, given its moments of shape (WORDS,)."""
    return Names((key,), (Meta(kind, reduce_type, None, spread),)).of(row[np.newaxis])
