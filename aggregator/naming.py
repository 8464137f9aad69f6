"""From moments to the numbers a user sees: what a key is decides what its numbers are called.

    kind                        exports
    scalar, timing              `k` (mean), `k__count`
    counter, denominator        `k` (exact integer)
    stat AVG_MIN_MAX            `k/avg`, `k/min`, `k/max`
    stat AVG, SUM, MIN, MAX     `k`
    … with quantiles asked      also `k/p50`, `k/p99.9` …

What was not recorded, and means and extremes of nothing, are absent. Shares of one number have no extremes:
no rank ever saw the whole number, so only their mean, sum and count are exported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import compress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from eventlog import Kind, ReduceType, Spread, histogram, moments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["Columns", "Meta", "Names", "names", "percentile", "suffixes"]


class Meta(NamedTuple):
    """What a key is. All ranks that hold the key must say the same."""

    kind: Kind
    reduce_type: ReduceType | None = None
    denominator: str | None = None
    spread: Spread = Spread.SHARDS
    quantiles: tuple[float, ...] = ()  # asked of its values

    def __str__(self) -> str:
        """Name it for people: "stat avg_min_max over 'n_tokens', replicated"."""
        words = [self.kind.value]
        if self.reduce_type not in (None, ReduceType.SCALAR) and self.kind is not Kind.DENOMINATOR:
            words.append(self.reduce_type.value)
        if self.denominator is not None:
            words.append(f"over {self.denominator!r}")
        if self.quantiles:
            words.append(f"with {' '.join(map(percentile, self.quantiles))}")
        text = " ".join(words)
        return text if self.spread is Spread.SHARDS else f"{text}, {self.spread.value}"


# Where a number comes from: one of the finalizers of moments, an integer word as it stands, or the histogram.
_MEAN, _LEAST, _GREATEST, _TOTAL, _COUNT, _EXACT, _QUANTILE = range(7)
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
    return (*found, *((f"/{percentile(q)}", _QUANTILE) for q in meta.quantiles))


@cache
def percentile(q: float) -> str:
    """Return what a quantile is called: "p50", "p99.9"; no two are called the same."""
    return f"p{(Decimal(repr(q)) * 100).normalize():f}"


def suffixes(meta: Meta) -> tuple[str, ...]:
    """Return what is appended to a key of this kind to name its numbers."""
    return tuple(suffix for suffix, _ in _numbers(meta))


class Names:
    """The names of a fixed list of keys: made once, then turns moments into numbers without a loop.

    Attributes: `keys` and `metas`; `names`, all that the keys can export; `row_of`, the key each belongs to;
    `distinct`, the names as a set; `ambiguous`, whether two keys share a name; `asked`, the places of the
    keys of which quantiles are asked.
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
        self.asked = np.flatnonzero([bool(meta.quantiles) for meta in self.metas])
        self._exact = self.row_of[sources == _EXACT]
        self._of_counts = sources == _QUANTILE
        self._needs_values = (sources < _TOTAL) | self._of_counts  # means, extremes of nothing are absent
        self._sources = [
            (source, self.row_of[sources == source], np.flatnonzero(sources == source))
            for source in sorted(set(sources.tolist()))
        ]

    def too_large(self, rows: NDArray[np.int64]) -> list[int]:
        """Return the places of exact sums that int64 cannot hold, as only many producers reach them."""
        return self._exact[moments.wrapped(rows[self._exact])].tolist()

    def of(self, rows: NDArray[np.int64], counts: NDArray[np.int64] | None = None) -> dict[str, float]:
        """Return name -> number for moments of shape (keys, WORDS); counts are exact ints.

        `counts` are the histograms of the keys `asked`, in their order; without them quantiles are absent.
        """
        floats = np.empty(len(self.names))
        integers: list[tuple[int, float]] = []
        for source, chosen, at in self._sources:
            if source == _EXACT:
                integers += zip(at.tolist(), moments.exacts(rows[chosen]), strict=True)
            elif source == _COUNT:
                integers += zip(at.tolist(), rows[chosen, moments.COUNT].tolist(), strict=True)
            elif source == _QUANTILE:
                floats[at] = self._quantiles(rows, counts)
            else:
                floats[at] = _FINALIZERS[source](rows)[chosen]
        values: list[float] = floats.tolist()
        for at, value in integers:
            values[at] = value
        pairs = zip(self.names, values, strict=True)
        counted = counts is not None or not len(self.asked)
        if counted and rows[:, [moments.PRESENT, moments.COUNT]].all():
            return dict(pairs)
        there = (rows[:, moments.PRESENT] > 0)[self.row_of]
        there &= (rows[:, moments.COUNT] > 0)[self.row_of] | ~self._needs_values
        if counts is None:
            there &= ~self._of_counts
        return dict(compress(pairs, there.tolist()))

    def _quantiles(self, rows: NDArray[np.int64], counts: NDArray[np.int64] | None) -> list[float]:
        """Return all quantiles in the order of their names; anything for those that are absent."""
        found: list[float] = []
        for place, i in enumerate(self.asked.tolist()):
            asked = self.metas[i].quantiles
            if counts is not None:
                found += histogram.quantiles(counts[place], rows[i], asked)
            else:
                found += [math.nan] * len(asked)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Moments with the names of their keys: `rows[i]` belongs to `names.keys[i]`.

    `counts` are the histograms of the keys `names.asked`; None: there are none.
    """

    names: Names
    rows: NDArray[np.int64]
    counts: NDArray[np.int64] | None = None


def names(
    key: str,
    kind: Kind,
    reduce_type: ReduceType | None,
    row: NDArray[np.int64],
    spread: Spread = Spread.SHARDS,
) -> dict[str, float]:
    """Return what one key exports, given its moments of shape (WORDS,)."""
    return Names((key,), (Meta(kind, reduce_type, None, spread),)).of(row[np.newaxis])
