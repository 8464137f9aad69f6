"""Statistics of values that come in pieces: deviations, correlations and quantiles, exact and reproducible.

What is added is added in the order in which it comes, by numpy's pairwise sums within a piece: the same
pieces give the same bits. Deviations are merged by Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances" (1979), about a mean that is exact for a constant, so that a
constant deviates by exactly nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from eventlog import errors, histogram, moments

from ..naming import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Stream = Callable[[], Iterable[NDArray[Any]]]

SUMMARIES: Final[Mapping[str, Callable[[Ints], NDArray[Any]]]] = {
    "avg": moments.means,
    "sum": moments.totals,
    "min": moments.leasts,
    "max": moments.greatests,
    "count": lambda rows: rows[:, moments.COUNT],
    "nonfinite": lambda rows: rows[:, moments.NAN : moments.INT_SUM].sum(axis=1),
}
DEVIATIONS: Final = {"std": (1, True), "var": (1, False), "std_pop": (0, True), "var_pop": (0, False)}
ALWAYS: Final = ("sum", "count", "nonfinite")  # said of nothing too
EXTREMES: Final = frozenset({"min", "max"})

_SIGN: Final = np.uint64(1 << 63)
_DIGIT: Final = 16  # bits that one pass over a stream decides
_LAST: Final = np.uint64((1 << _DIGIT) - 1)


# -- what can be asked ---------------------------------------------------------------------------------


def quantile_of(name: str | float) -> float | None:
    """Return the quantile that a statistic names (0.99, "p99", "p99.9", "median"); None: it names none."""
    if isinstance(name, int | float) and not isinstance(name, bool):
        return float(name)
    if name == "median":
        return 0.5
    try:  # by Decimal: 99.9 / 100 is not 0.999
        return float(Decimal(str(name)[1:]) / 100) if str(name).startswith("p") else None
    except InvalidOperation:
        return None


def checked_quantiles(asked: float | Sequence[float]) -> list[float]:
    """Return quantiles as a list; QueryError unless they are numbers from 0 to 1."""
    listed: list[Any] = list(asked) if isinstance(asked, list | tuple | np.ndarray) else [asked]
    for one in listed:
        if isinstance(one, bool) or not isinstance(one, int | float | np.number) or not 0 <= one <= 1:
            raise errors.QueryError(f"expected percentiles from 0 to 1, got {one!r}")
    if not listed:
        raise errors.QueryError("expected at least one percentile, got none")
    return [float(one) + 0.0 for one in listed]  # -0.0 is 0.0


def checked_stats(stats: str | float | Sequence[str | float]) -> dict[str, float | None]:
    """Return statistic → its quantile, if it is one; QueryError for what is none."""
    given: Any = stats
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not listed:
        raise errors.QueryError("expected at least one statistic, got none")
    found: dict[str, float | None] = {}
    for name in listed:
        q = quantile_of(name)
        if q is None and not (isinstance(name, str) and name in {**SUMMARIES, **DEVIATIONS}):
            known = ", ".join((*SUMMARIES, *DEVIATIONS, "median"))
            raise errors.QueryError(f"expected statistics of {known}, p99 or 0.99, got {name!r}")
        if q is not None:
            q = checked_quantiles(q)[0]
        found[percentile(q) if isinstance(name, int | float) and q is not None else str(name)] = q
    return found


# -- deviations ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """What values, and others beside them, add to the deviations of a group."""

    count: int
    odd: bool  # one is NaN or infinite, and the rest says nothing
    means: tuple[float, float] = (0.0, 0.0)
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # about the means: of x, of y, of both


def summary(values: NDArray[Any], others: NDArray[Any] | None = None) -> Summary:
    """Return the summary of values, at least one."""
    x = values.astype(np.float64)
    y = x if others is None else others.astype(np.float64)
    if not (np.isfinite(x).all() and (y is x or np.isfinite(y).all())):
        return Summary(len(x), odd=True)
    with np.errstate(over="ignore", invalid="ignore"):
        mean_x, x = _centred(x)
        mean_y, y = (mean_x, x) if others is None else _centred(y)
        square = _product(x, x)
        squares = (square, square, square) if others is None else (square, _product(y, y), _product(x, y))
    return Summary(len(x), odd=False, means=(mean_x, mean_y), squares=squares)


class Deviations:
    """Counts, means, variances and the covariance of two columns of values, in each of n groups."""

    def __init__(self, n: int) -> None:
        self.count = [0] * n
        self._means = [(0.0, 0.0)] * n
        self._squares = [(0.0, 0.0, 0.0)] * n  # about the means: of x, of y, of both
        self._odd = [False] * n  # a value is NaN or infinite

    def add(self, group: int, values: NDArray[Any], others: NDArray[Any] | None = None) -> None:
        """Take the next values of a group, and the others beside them."""
        if len(values):
            self.take(group, summary(values, others))

    def take(self, group: int, those: Summary) -> None:
        """Take the next values of a group as their summary."""
        own, odd, means, squares = those.count, those.odd, those.means, those.squares
        if odd:
            self._odd[group] = True
            self.count[group] += own
            return
        m = self.count[group]
        if not m:
            self.count[group], self._means[group], self._squares[group] = own, means, squares
            return
        total = m + own
        dx, dy = (b - a for a, b in zip(self._means[group], means, strict=True))
        weight = m * own / total
        self._squares[group] = tuple(  # type: ignore[assignment]
            a + b + weight * d
            for a, b, d in zip(self._squares[group], squares, (dx * dx, dy * dy, dx * dy), strict=True)
        )
        (a, b), part = self._means[group], own / total
        self._means[group] = (a + dx * part, b + dy * part)
        self.count[group] = total

    def all(self, name: str) -> list[float | None]:
        """Return one of DEVIATIONS of every group."""
        ddof, root = DEVIATIONS[name]
        found = [self.variance(group, ddof) for group in range(len(self.count))]
        return [math.sqrt(v) if root and v is not None else v for v in found]

    def variance(self, group: int, ddof: int) -> float | None:
        """Return the variance of a group's values; None of too few, NaN where one is not finite.

        Infinite where a square is beyond float64, as numpy says.
        """
        if self.count[group] <= ddof:
            return None
        if self._odd[group]:
            return math.nan
        square = self._squares[group][0]
        return math.inf if math.isnan(square) else square / (self.count[group] - ddof)

    def correlation(self, group: int) -> float | None:
        """Return Pearson's correlation of a group; None of fewer than two pairs or of a constant."""
        if self.count[group] < 2:
            return None
        if self._odd[group]:
            return math.nan
        x, y, both = self._squares[group]
        if not all(map(math.isfinite, (x, y, both))):
            return math.nan  # squares beyond float64
        if x == 0 or y == 0:
            return None
        return max(-1.0, min(1.0, both / (math.sqrt(x) * math.sqrt(y))))


def _centred(values: Floats) -> tuple[float, Floats]:
    """Return the mean and what values lie from it; of a constant exactly itself, and nothing."""
    apart = values - values[0]
    mean = float(np.add.reduce(apart)) / len(apart)
    return float(values[0]) + mean, apart - mean


def _product(one: Floats, other: Floats) -> float:
    """Return the sum of products of values about their means, less what the means are off by rounding."""
    off = float(np.add.reduce(one)) * float(np.add.reduce(other)) / len(one)
    found = float(np.add.reduce(one * other)) - off
    return found if one is not other or math.isnan(found) else max(0.0, found)


# -- quantiles -----------------------------------------------------------------------------------------


def quantiles(values: NDArray[Any], asked: Sequence[float]) -> list[float | None]:
    """Return quantiles by linear interpolation (numpy's default): None of nothing, NaN where any is NaN."""
    if not len(values):
        return [None] * len(asked)
    places = _places(len(values), asked)
    ordered = np.sort(values)  # NaN comes last; numpy sorts faster than it selects several places
    if np.isnan(ordered[-1]):
        return [math.nan] * len(asked)
    return _interpolated(len(values), asked, {place: float(ordered[place]) for place in places})


def quantiles_of_stream(stream: Stream, n: int, asked: Sequence[float], most: int) -> list[float | None]:
    """Return the same of n values that do not fit into memory, but as pieces that `stream` yields anew.

    Every pass counts the values by the next bits of those that may be wanted, until the rest (`most` values)
    can be sorted. No value may be NaN.
    """
    return _interpolated(n, asked, _selected(stream, n, _places(n, asked), most))


def _places(n: int, asked: Sequence[float]) -> list[int]:
    """Return the places in sorted order of the values between which quantiles lie."""
    low = [math.floor(q * (n - 1)) for q in asked]
    return sorted({place for at in low for place in (at, min(at + 1, n - 1))})


def _interpolated(n: int, asked: Sequence[float], found: dict[int, float]) -> list[float | None]:
    places = [(math.floor(q * (n - 1)), q * (n - 1)) for q in asked]
    return [histogram.between(found[low], found[min(low + 1, n - 1)], place - low) for low, place in places]


class _Search(NamedTuple):
    """The `size` values that begin with a prefix, `bits` of them undecided; the `place`-th is wanted."""

    prefix: int
    bits: int
    size: int
    place: int


def _selected(stream: Stream, n: int, places: Sequence[int], most: int) -> dict[int, float]:
    """Return the values at places in sorted order: radix selection over bits that sort as the values do."""
    found: dict[int, float] = {}
    searches = {place: _Search(0, 64, n, place) for place in places}
    while searches:
        wide = {(s.prefix, s.bits) for s in searches.values() if s.size > most}
        narrow = {(s.prefix, s.bits) for s in searches.values()} - wide
        counts, left = _pass(stream, wide, narrow)
        for place, search in list(searches.items()):
            own = (search.prefix, search.bits)
            if own in narrow:
                found[place] = _float(int(np.partition(left[own], search.place)[search.place]))
            else:
                searches[place] = _narrowed(search, counts[own])
                if searches[place].bits == 0:  # all that is left is one value
                    found[place] = _float(searches[place].prefix)
            if place in found:
                del searches[place]
    return found


def _pass(
    stream: Stream, wide: Iterable[tuple[int, int]], narrow: Iterable[tuple[int, int]]
) -> tuple[dict[tuple[int, int], NDArray[np.int64]], dict[tuple[int, int], NDArray[np.uint64]]]:
    """Count what begins with a wide prefix by the bits that follow; return what begins with a narrow one."""
    counts = {own: np.zeros(1 << _DIGIT, np.int64) for own in wide}
    left: dict[tuple[int, int], list[NDArray[np.uint64]]] = {own: [] for own in narrow}
    for values in stream():
        keys = _keys(values)
        for prefix, bits in counts:
            digits = _within(keys, prefix, bits) >> np.uint64(bits - _DIGIT) & _LAST
            counts[prefix, bits] += np.bincount(digits.astype(np.int64), minlength=1 << _DIGIT)
        for (prefix, bits), those in left.items():
            those.append(_within(keys, prefix, bits))
    return counts, {own: np.concatenate(those) for own, those in left.items()}


def _narrowed(search: _Search, counts: NDArray[np.int64]) -> _Search:
    until = np.cumsum(counts)
    digit = int(np.searchsorted(until, search.place, "right"))
    size, bits = int(counts[digit]), search.bits - _DIGIT
    return _Search(search.prefix | digit << bits, bits, size, search.place - int(until[digit]) + size)


def _keys(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Return integers that sort as the values do; 0.0 and -0.0 are one."""
    raw = (values.astype(np.float64) + 0.0).view(np.uint64)
    return np.where(raw & _SIGN, ~raw, raw | _SIGN)


def _within(keys: NDArray[np.uint64], prefix: int, bits: int) -> NDArray[np.uint64]:
    """Return the keys that begin with a prefix, behind which come `bits` bits."""
    return keys if bits == 64 else keys[keys >> np.uint64(bits) == np.uint64(prefix >> bits)]


def _float(key: int) -> float:
    raw = key ^ int(_SIGN) if key >> 63 else key ^ ((1 << 64) - 1)
    return float(np.array(raw, np.uint64).view(np.float64))
