"""A histogram with fixed edges: what of a distribution adds up over calls, ranks and workers.

The counts of a set of values are one int64 array of BUCKETS words, in ascending order of the values; NaN and
the infinities are not in it, the moments count them.

    0 … SIDE-1             negative values, the mirror image of the positive ones
    SIDE                   0, and all that is smaller than LEAST = 1e-9
    SIDE+1 … BUCKETS-1     bucket SIDE+1+i: EDGES[i] ≤ x < EDGES[i+1], where EDGES[i] = LEAST * gamma**i

With gamma = (1 + ERROR) / (1 - ERROR) the number 2ab / (a + b) lies within ERROR = 1 % of every value between
the edges a and b (DDSketch: Masson, Rim, Lee, PVLDB 12(12), 2019). The outermost buckets, from 1e9 on, are
open. The edges are the same everywhere, so `merge` is a sum: exact, in any order, the same live and later.

A quantile is what numpy's default, "linear", calls so: it lies at (1 - t)x + ty between the two order
statistics x and y around rank q(n - 1) of all n values. Both are read off their buckets, each within 1 %: the
result is off by at most 1 % of (1 - t)|x| + t|y|, which is 1 % of the exact quantile unless x < 0 < y. The
least and the greatest value are exact. What is smaller than LEAST counts as 0; of what lies in an open bucket
no more is known than that it is between 1e9 and the extreme.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import moments
from .errors import RecordingError, RecordingTypeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Counts = NDArray[np.int64]
    Floats = NDArray[np.float64]

ERROR: Final = 0.01
LEAST: Final = 1e-9
SIDE: Final = 2073  # as many buckets as lead from LEAST to 1e9
BUCKETS: Final = 2 * SIDE + 1

_GAMMA: Final = (1 + ERROR) / (1 - ERROR)
# Multiplied one by one, as IEEE does it everywhere: powers differ from machine to machine.
EDGES: Final = np.multiply.accumulate(np.concatenate([[LEAST], np.full(SIDE, _GAMMA)]))
_MIDDLES: Final = 2 * EDGES[:-1] * EDGES[1:] / (EDGES[:-1] + EDGES[1:])
_ALL_MIDDLES: Final = np.concatenate([-_MIDDLES[::-1], [0.0], _MIDDLES])
_PER_LOG: Final = 1 / math.log(_GAMMA)
_AT_A_TIME: Final = 1 << 15  # values whose intermediate results fit a cache


def as_quantiles(asked: Any) -> tuple[float, ...]:
    """Return quantiles (a number from 0 to 1, or several) in ascending order, each once."""
    if isinstance(asked, Real):
        asked = (asked,)
    if isinstance(asked, str | bytes) or not isinstance(asked, Sequence | AbstractSet):
        raise RecordingTypeError(
            f"expected quantiles (numbers from 0 to 1), got {type(asked).__name__} {asked!r:.80}"
        )
    return tuple(sorted({_as_quantile(q) for q in asked}))


def _as_quantile(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, Real):
        raise RecordingTypeError(
            f"expected quantiles (numbers from 0 to 1), got {type(given).__name__} {given!r:.80}"
        )
    if not 0 <= (q := float(given)) <= 1:  # also refuses NaN
        raise RecordingError(f"expected quantiles from 0 to 1, got {given!r}")
    return q + 0.0  # -0.0 is 0


def empty(n: int) -> Counts:
    """Return the counts of n keys nobody recorded: the identity of `merge`, shape (n, BUCKETS)."""
    return np.zeros((n, BUCKETS), np.int64)


def of(values: Any) -> Counts:
    """Return the counts of floating values (any shape), shape (BUCKETS,); NaN and infinities are in none."""
    flat = np.asarray(values).reshape(-1)
    counts = np.zeros(BUCKETS, np.int64)
    with np.errstate(all="ignore"):
        for start in range(0, len(flat), _AT_A_TIME):
            part = flat[start : start + _AT_A_TIME].astype(np.float64)
            finite = np.isfinite(part)
            counts += np.bincount(_buckets(part if finite.all() else part[finite]), minlength=BUCKETS)
    return counts


def _buckets(values: Floats) -> NDArray[np.intp]:
    size = np.abs(values)
    within = np.clip(size, LEAST, EDGES[-2])
    # The logarithm guesses, to the bucket beside at worst; the edges decide, the same on every machine.
    found = ((np.log(within) - math.log(LEAST)) * _PER_LOG).astype(np.intp)
    np.clip(found, 0, SIDE - 1, out=found)
    found -= within < EDGES[found]
    found += within >= EDGES[found + 1]
    found += 1
    found[size < LEAST] = 0
    np.negative(found, out=found, where=values < 0)
    found += SIDE
    return found


def merge(stack: Counts) -> Counts:
    """Add up counts of shape (k, …, BUCKETS) over the first axis."""
    return np.add.reduce(stack, axis=0)


def once(counts: Counts, holders: Counts, replicated: NDArray[np.intp]) -> Counts:
    """Leave one of the copies that were added up in place: `counts` of n keys, shape (n, BUCKETS).

    `holders` says how many producers recorded each of the n, `replicated` which of them are copies.
    """
    if len(replicated):
        counts[replicated] //= np.maximum(holders[replicated], 1)[:, np.newaxis]
    return counts


def bounds(buckets: NDArray[np.intp]) -> tuple[Floats, Floats]:
    """Return between which values buckets lie, (left, right); ±inf where they are open."""
    edges = EDGES.copy()
    edges[-1] = math.inf
    edges = np.concatenate([-edges[::-1], edges])
    return edges[buckets], edges[buckets + 1]


def quantiles(counts: Counts, row: NDArray[np.int64], asked: Sequence[float]) -> list[float]:
    """Return quantiles of the values that `counts` and the moments `row` (shape (WORDS,)) were made of.

    NaN where any value was NaN (and where there were none); infinities count in their order.
    """
    n = int(row[moments.COUNT])
    if n == 0 or row[moments.NAN]:
        return [math.nan] * len(asked)
    ordered = _Ordered(counts, row)
    return [_interpolated(ordered, n, q) for q in asked]


def _interpolated(ordered: _Ordered, n: int, q: float) -> float:
    place = q * (n - 1)
    low = math.floor(place)
    if low == place:
        return ordered.value(low)
    return between(ordered.value(low), ordered.value(low + 1), place - low)


def between(below: float, above: float, part: float) -> float:
    """Return what lies at `part` (0 to 1) of the way between two values; infinite if one has a say and is.

    It is reckoned from the nearer of them, as numpy does.
    """
    if part == 0 or below == above:
        return below
    if math.isinf(above - below):  # also of numbers too far apart for their difference
        return (1 - part) * below + part * above
    if part < 0.5:
        return below + (above - below) * part
    return above - (above - below) * (1 - part)


class _Ordered:
    """The values behind counts and moments, by their rank among all n: the least has rank 0."""

    def __init__(self, counts: Counts, row: NDArray[np.int64]) -> None:
        floats = moments.floats(row)
        self._least, self._greatest = float(floats[moments.MIN]), float(floats[moments.MAX])
        self._first = int(row[moments.NEG_INF])
        self._stop = int(row[moments.COUNT] - row[moments.POS_INF])
        self._ends = np.cumsum(counts)

    def value(self, rank: int) -> float:
        if not self._first <= rank < self._stop:
            return -math.inf if rank < self._first else math.inf
        if rank == self._first:
            return self._least
        if rank == self._stop - 1:
            return self._greatest
        bucket = int(np.searchsorted(self._ends, rank - self._first, side="right"))
        middle = float(_ALL_MIDDLES[min(bucket, BUCKETS - 1)])
        return min(max(middle, self._least), self._greatest)


# -- as it is written down -------------------------------------------------------------------------


def sparse(counts: Counts) -> tuple[list[int], list[int]]:
    """Return the buckets that are not empty and what is in them, as plain integers."""
    buckets = np.flatnonzero(counts)
    return buckets.tolist(), counts[buckets].tolist()


def dense(buckets: Iterable[int], contents: Iterable[int]) -> Counts:
    """Return the counts that `sparse` told; a LookupError for buckets that are none."""
    counts = np.zeros(BUCKETS, np.int64)
    counts[np.array(list(buckets), np.intp)] = list(contents)
    return counts


def tags(asked: Sequence[float]) -> str:
    """Return the tags of a stat's record of which quantiles were asked; `asked_in` reads them."""
    return json.dumps({"quantiles": list(asked)})


def asked_in(tags: str | None) -> tuple[float, ...]:
    """Return the quantiles that a stat's tags say were asked; none where they say nothing of it."""
    try:
        return as_quantiles(json.loads(tags or "{}").get("quantiles", ()))
    except (AttributeError, RecordingError, RecordingTypeError, ValueError):
        return ()
