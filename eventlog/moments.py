"""Moments: what is kept of the values of a record, and the only mean in the product.

The moments of n records are one int64 array of shape (n, WORDS). The same array is what `of` returns,
what travels in a collective, and what the columns of the log hold, so that live and offline cannot differ.

    word      type     meaning                                     identity
    PRESENT   int64    1 when the key was recorded at all          0
    COUNT     int64    selected values, non-finite ones included   0
    NAN       int64    NaNs among them                             0
    POS_INF   int64    +Infs among them                            0
    NEG_INF   int64    -Infs among them                            0
    INT_SUM   int64    exact sum, counters and denominators        0
    SUM       float64  sum over the finite values                  0.0
    MIN       float64  least finite value                          +inf
    MAX       float64  greatest finite value                       -inf

`merge` is associative and commutative up to float rounding of SUM, and `empty` is its identity.
Non-finite values are counted, never added: a MAX reduction keeps or drops a NaN by its position, so the
decision falls once, in `totals`, `means`, `leasts` and `greatests`; `mean` and its like ask them for one row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

PRESENT, COUNT, NAN, POS_INF, NEG_INF, INT_SUM, SUM, MIN, MAX = range(9)
WORDS = 9
INTS = slice(PRESENT, SUM)  # words that add as int64
_IDENTITY = np.zeros(WORDS, np.int64)
_IDENTITY.view(np.float64)[MIN] = math.inf
_IDENTITY.view(np.float64)[MAX] = -math.inf


def empty(n: int) -> Rows:
    """Return the moments of n keys nobody recorded: the identity of `merge`, shape (n, WORDS)."""
    rows = np.empty((n, WORDS), np.int64)
    rows[...] = _IDENTITY
    return rows


def floats(rows: Rows) -> NDArray[np.float64]:
    """View the same memory as float64; meaningful in the columns SUM, MIN and MAX."""
    return rows.view(np.float64)


def of(values: Any) -> Rows:
    """Return the moments of one record's selected values (any shape, floating), shape (WORDS,)."""
    return of_matrix(np.asarray(values).reshape(1, -1))[0]


def of_matrix(matrix: NDArray[Any]) -> Rows:
    """Return the moments of each row of a (n, selected) floating matrix, shape (n, WORDS).

    Half types must be widened before (`arrays`); sums are accumulated in float64.
    """
    n, width = matrix.shape
    rows = empty(n)
    rows[:, PRESENT] = 1
    rows[:, COUNT] = width
    if width == 0:
        return rows
    f = rows.view(np.float64)
    with np.errstate(all="ignore"):
        np.add.reduce(matrix, axis=1, dtype=np.float64, out=f[:, SUM])
        starts = np.arange(0, n * width, width)  # a position is found in a quarter of the time of a minimum
        f[:, MIN] = matrix.take(starts + matrix.argmin(axis=1))
        f[:, MAX] = matrix.take(starts + matrix.argmax(axis=1))
        # Both find the first NaN, and reach ±Inf, so they alone tell which rows need the slow path; a finite
        # row whose float64 sum overflows keeps the infinite sum IEEE gives it.
        unclean = ~(np.isfinite(f[:, MIN]) & np.isfinite(f[:, MAX]))
        for i in np.flatnonzero(unclean):
            _separate(matrix[i], rows[i], f[i])
    return rows


def _separate(values: NDArray[Any], row: Rows, f: NDArray[np.float64]) -> None:
    finite = values[np.isfinite(values)]
    row[NAN] = np.count_nonzero(np.isnan(values))
    row[POS_INF] = np.count_nonzero(values == np.inf)
    row[NEG_INF] = np.count_nonzero(values == -np.inf)
    f[SUM] = np.add.reduce(finite, dtype=np.float64)
    f[MIN] = finite.min(initial=np.inf)
    f[MAX] = finite.max(initial=-np.inf)


def of_integers(counts: Any, sums: Any) -> Rows:
    """Return the moments of n exact integer records: `counts` of what was summed, and the `sums`.

    Denominators count and sum their true elements; counters count their calls. They have no extremes.
    """
    rows = empty(len(sums))
    rows[:, PRESENT] = 1
    rows[:, COUNT] = counts
    rows[:, INT_SUM] = sums
    rows.view(np.float64)[:, SUM] = rows[:, INT_SUM]
    return rows


def merge(stack: Rows) -> Rows:
    """Reduce a stack of moments, shape (k, n, WORDS), over its first axis; floats add in stack order."""
    out = np.empty(stack.shape[1:], np.int64)
    np.add.reduce(stack[..., INTS], axis=0, out=out[..., INTS])
    out[..., PRESENT] = stack[..., PRESENT].any(axis=0)
    f, g = stack.view(np.float64), out.view(np.float64)
    g[..., SUM] = 0.0
    with np.errstate(all="ignore"):
        for part in f:  # in order: every rank, and the offline reader, adds in the same one
            g[..., SUM] += part[..., SUM]
    np.minimum.reduce(f[..., MIN], axis=0, out=g[..., MIN])
    np.maximum.reduce(f[..., MAX], axis=0, out=g[..., MAX])
    return out


def across(
    stack: Rows, shares: NDArray[np.intp], replicated: NDArray[np.intp]
) -> tuple[Rows, NDArray[np.intp]]:
    """Reduce what producers hold, shape (producers, n, WORDS), in stack order: one row per key and producer.

    Rows are shards and pooled, except the positions `shares` (parts of one number: the sum is that of all
    parts, the count that of one) and `replicated` (copies, counted once). Returns the rows, and the positions
    of replicated keys whose producers are not equal.
    """
    rows = merge(stack)
    if len(shares):
        rows[shares, COUNT] = stack[:, shares, COUNT].max(axis=0)
    if not len(replicated):
        return rows, replicated
    copies = stack[:, replicated]
    floats(copies)[..., SUM:] += 0.0  # -0.0 is the same value as 0.0, and must have the same bits
    held = copies[..., PRESENT] > 0
    rows[replicated] = first = copies[held.argmax(axis=0), np.arange(len(replicated))]
    same = (copies == first).all(axis=-1) | ~held
    return rows, replicated[~same.all(axis=0)]


def pool(rows: Rows, groups: NDArray[np.intp], n: int) -> Rows:
    """Merge rows that belong to the same of n groups, shape (n, WORDS); floats add in row order."""
    f, there = rows.view(np.float64), np.bincount(groups, minlength=n) > 0
    out = np.empty_like(rows, shape=(n, WORDS))  # laid out as they are: of many, mostly word by word
    g = out.view(np.float64)
    if n == len(groups) == np.count_nonzero(there):  # each row is a group
        for word in range(WORDS):
            out[groups, word] = rows[:, word]
        g[:, SUM] += 0.0  # as a sum has it: -0.0 is 0.0
        return out
    out[...] = _IDENTITY
    first = np.flatnonzero(np.diff(groups, prepend=-1)) if (groups[1:] >= groups[:-1]).all() else None
    for word in range(COUNT, SUM):
        if rows[:, word].any():
            _gather(np.add, out[:, word], rows[:, word], groups, first)
    out[:, PRESENT] = 0
    _gather(np.maximum, out[:, PRESENT], rows[:, PRESENT], groups, first)
    g[:, SUM] = np.bincount(
        groups, f[:, SUM], n
    )  # one after the other, as no other way of numpy's is sure to
    _gather(np.minimum, g[:, MIN], f[:, MIN], groups, first)
    _gather(np.maximum, g[:, MAX], f[:, MAX], groups, first)
    return out


def _gather(
    function: np.ufunc,
    out: NDArray[Any],
    values: NDArray[Any],
    groups: NDArray[np.intp],
    first: NDArray[np.intp] | None,
) -> None:
    """Reduce values by group into `out`; `first`: where the groups begin, if they are in order."""
    if first is None:
        function.at(out, groups, values)
    elif len(first):
        out[groups[first]] = function.reduceat(values, first)


def totals(rows: Rows) -> NDArray[np.float64]:
    """Return the sums as IEEE gives them, shape (n,); meaningful where a row is PRESENT."""
    out = floats(rows)[:, SUM].copy()
    if (odd := _odd(rows)) is not None:
        nan, pos, neg = odd
        out[pos] = math.inf
        out[neg] = -math.inf
        out[nan | (pos & neg)] = math.nan
    return out


def means(rows: Rows) -> NDArray[np.float64]:
    """Return the means of the selected values, shape (n,); NaN where any is NaN, or where COUNT is 0."""
    with np.errstate(all="ignore"):
        out = totals(rows) / rows[:, COUNT]
    out[rows[:, COUNT] == 0] = math.nan
    return out


def leasts(rows: Rows) -> NDArray[np.float64]:
    """Return the least selected values, shape (n,); NaN where any is NaN; meaningless where COUNT is 0."""
    out = floats(rows)[:, MIN].copy()  # +inf already where +Inf was all there was
    if (odd := _odd(rows)) is not None:
        nan, _, neg = odd
        out[neg] = -math.inf
        out[nan] = math.nan
    return out


def greatests(rows: Rows) -> NDArray[np.float64]:
    """Return the greatest selected values, shape (n,); as `leasts`."""
    out = floats(rows)[:, MAX].copy()
    if (odd := _odd(rows)) is not None:
        nan, pos, _ = odd
        out[pos] = math.inf
        out[nan] = math.nan
    return out


def _odd(rows: Rows) -> NDArray[np.bool_] | None:
    """Return where a NaN, a +Inf, a -Inf was selected; None (mostly) when none was."""
    counts = rows[:, NAN:INT_SUM]
    return (counts != 0).T if counts.any() else None


def mean(row: Rows) -> float | None:
    """Return the mean of the selected values; None when there were none, NaN when any is NaN."""
    return float(means(row[np.newaxis])[0]) if row[COUNT] else None


def total_of(row: Rows) -> float | None:
    """Return the sum of the selected values as IEEE gives it; None when nothing was recorded."""
    return float(totals(row[np.newaxis])[0]) if row[PRESENT] else None


def least(row: Rows) -> float | None:
    """Return the least selected value; None when there were none, NaN when any is NaN."""
    return float(leasts(row[np.newaxis])[0]) if row[COUNT] else None


def greatest(row: Rows) -> float | None:
    """Return the greatest selected value; None when there were none, NaN when any is NaN."""
    return float(greatests(row[np.newaxis])[0]) if row[COUNT] else None


def exact(row: Rows) -> float | None:
    """Return the exact integer sum of a counter or denominator; None when nothing was recorded.

    A sum that int64 cannot hold, which only many ranks together reach, is the float64 nearest to it.
    """
    return exacts(row[np.newaxis])[0] if row[PRESENT] else None


def exacts(rows: Rows) -> list[float]:
    """Return the exact integer sums, as `exact` does."""
    sums: list[float] = rows[:, INT_SUM].tolist()
    for i in wrapped(rows):
        sums[i] = float(floats(rows)[i, SUM])
    return sums


def wrapped(rows: Rows) -> NDArray[np.intp]:
    """Return the rows whose exact integer sum int64 could not hold."""
    # It wraps around by 2**64, far more than the float sum is off: at its very edge it still tells.
    return np.flatnonzero(np.abs(floats(rows)[:, SUM] - rows[:, INT_SUM]) >= 2.0**63)
