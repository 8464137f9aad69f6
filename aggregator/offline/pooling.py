"""Statistics of the values of keys, pooled by step, rank and whatever else they are asked by.

Sums, means and extremes come from the moments alone; percentiles, deviations, histograms, and everything that
is asked under a condition, read the values. NaN and Inf mean what they mean live. Everything is added in a
fixed order: answers repeat bit for bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from eventlog import Kind, errors, moments
from eventlog import histogram as fixed

from ..naming import percentile
from . import bins
from .drawing import gather
from .grouping import merge, pool
from .pairing import among
from .payload import cuts
from .placing import first_rows
from .scaleout import Question, alone, binned
from .statistics import (
    ALWAYS,
    DEVIATIONS,
    EXTREMES,
    SUMMARIES,
    Deviations,
    Summary,
    checked_quantiles,
    checked_stats,
    quantiles,
    quantiles_of_stream,
)
from .tally import Tally

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from .drawing import Wanted
    from .grouping import Asked, Pool
    from .history import History
    from .reading import Ints

    Places = NDArray[np.intp]
    Floats = NDArray[np.float64]

_FAR: Final = 400  # twice as much, and float64 ends
_OF_SHARES: Final = ("avg", "sum", "count", "nonfinite")

# -- answers -------------------------------------------------------------------------------------------


def reduce(
    histories: Sequence[History], asked: Asked, stats: str | float | Sequence[str | float], wanted: Wanted
) -> pa.Table:
    """Return a column per statistic; see `Session.reduce`."""
    names = checked_stats(stats)
    made = pool(histories, asked)
    _check_shares(made, asked, [name for name in names if name not in _OF_SHARES])
    columns = dict(made.columns)
    seen = Tally(histories, made, asked, wanted)
    summaries, deviations = SUMMARIES.keys() & names.keys(), DEVIATIONS.keys() & names.keys()
    kept = wanted.alone and not (EXTREMES & summaries and _integers(histories, made))
    rows, spread = made.rows, Deviations(0)
    if deviations or (summaries and not kept):
        measured, spread = _measured(seen)
        rows = made.rows if kept else measured
    asked_q = sorted({q for q in names.values() if q is not None})
    at = {q: i for i, q in enumerate(asked_q)}
    found = _quantiles(seen, asked_q) if asked_q else []
    for name, q in names.items():
        if q is not None:
            columns[name] = _where(~made.shares, [those[at[q]] for those in found])
        elif name in SUMMARIES:
            empty = (rows[:, moments.COUNT] == 0) & (name not in ALWAYS)
            empty |= made.shares & (name not in _OF_SHARES)
            columns[name] = pa.array(SUMMARIES[name](rows), mask=empty)
        else:
            columns[name] = _where(~made.shares, spread.all(name))
    return pa.table({**columns, **seen.columns()})


def percentiles(
    histories: Sequence[History], asked: Asked, q: float | Sequence[float], wanted: Wanted
) -> pa.Table:
    """Return a column per percentile; see `Session.percentiles`."""
    asked_q = checked_quantiles(q)
    made = pool(histories, asked)
    _check_shares(made, asked, map(percentile, asked_q))
    seen = Tally(histories, made, asked, wanted)
    found = _quantiles(seen, asked_q)
    columns = dict(made.columns)
    for i, one in enumerate(asked_q):
        columns[percentile(one)] = _where(~made.shares, [those[i] for those in found])
    columns["count"] = pa.array(seen.count)
    return pa.table({**columns, **seen.columns()})


def histogram(histories: Sequence[History], asked: Asked, number: int | str, wanted: Wanted) -> pa.Table:
    """Return a row per group and bin; see `Session.histogram`."""
    if number == "log":
        return _fixed_histogram(histories, asked, wanted)
    n = bins.checked(number)
    made = pool(histories, asked)
    _check_shares(made, asked, ["a histogram"], some=True)
    rows = made.rows
    if not wanted.alone or _integers(histories, made):
        rows, _ = _measured(Tally(histories, made, asked, wanted))
    extremes = moments.floats(rows)[:, [moments.MIN, moments.MAX]]
    low, high = extremes[:, 0].min(initial=math.inf), extremes[:, 1].max(initial=-math.inf)
    between = bins.ends(float(low), float(high), n)
    edges = bins.edges(*between, n)
    counts = np.zeros((len(made), n), np.int64)
    nonfinite = np.zeros(len(made), np.int64)
    seen = Tally(histories, made, asked, wanted)
    for those, counted, odd in _binned(seen, (*between, n)):
        counts[those] += counted
        nonfinite[those] += odd
    group = np.repeat(np.arange(len(made)), n)
    columns = {name: column.take(group) for name, column in made.columns.items()}
    columns["left"] = pa.array(np.tile(edges[:-1], len(made)))
    columns["right"] = pa.array(np.tile(edges[1:], len(made)))
    columns["count"] = pa.array(counts.reshape(-1))
    columns["nonfinite"] = pa.array(np.repeat(nonfinite, n))
    return pa.table({**columns, **{name: column.take(group) for name, column in seen.columns().items()}})


def _fixed_histogram(histories: Sequence[History], asked: Asked, wanted: Wanted) -> pa.Table:
    """Return a row per group and bin of `eventlog.histogram` that holds something."""
    made = pool(histories, asked)
    _check_shares(made, asked, ["a histogram"], some=True)
    seen = Tally(histories, made, asked, wanted)
    nonfinite = np.zeros(len(made), np.int64)
    places, contents = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for groups, counted, odd in _binned(seen, None):
        nonfinite[groups] += odd
        at, filled = np.nonzero(counted)
        places.append(groups[at] * fixed.BUCKETS + filled)
        contents.append(counted[at, filled])
    distinct, at = np.unique(np.concatenate(places), return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, at, np.concatenate(contents))
    group, buckets = np.divmod(distinct, fixed.BUCKETS)
    left, right = fixed.bounds(buckets)
    columns = {name: column.take(group) for name, column in made.columns.items()}
    columns |= {"left": pa.array(left), "right": pa.array(right), "count": pa.array(totals)}
    columns["nonfinite"] = pa.array(nonfinite[group])
    return pa.table({**columns, **{name: column.take(group) for name, column in seen.columns().items()}})


def correlation(histories: Sequence[History], asked: Asked, wanted: Wanted) -> pa.Table:
    """Return Pearson's correlation of the values of a key and of `wanted.other`."""
    made = pool(histories, asked)
    _check_shares(made, asked, ["a correlation"])
    seen = Tally(histories, made, asked, wanted)
    spread = Deviations(len(made))
    scales = [_scale(histories, keys) for keys in (asked.keys, (wanted.other or "",))]
    for group, drawn in seen.draw():
        others = drawn.values if drawn.others is None else drawn.others
        spread.add(group, *(_scaled(*those) for those in zip((drawn.values, others), scales, strict=True)))
    found = [spread.correlation(group) for group in range(len(made))]
    own = {"correlation": pa.array(found, pa.float64()), "count": pa.array(spread.count, pa.int64())}
    return pa.table({**made.columns, **own, **seen.columns()})


def _check_shares(made: Pool, asked: Asked, wanted: Iterable[str], *, some: bool = False) -> None:
    """Refuse what shares of numbers do not have, where nothing else is asked about, or also beside others."""
    if (made.shares.any() if some else made.shares.all()) and (named := list(wanted)):
        keys = ", ".join(map(repr, asked.keys))
        raise errors.UnansweredError(
            f"expected {', '.join(_OF_SHARES)} of {keys}, whose values are shares of one number, got "
            f"{', '.join(named)}; what each process holds is asked for by='rank'"
        )


def _where(known: NDArray[np.bool_], values: Sequence[float | None]) -> pa.Array:
    return pa.array([v if k else None for v, k in zip(values, known.tolist(), strict=True)], pa.float64())


def _scale(histories: Sequence[History], keys: Collection[str]) -> int:
    """Return by which power of two values of keys are too large or small to be squared; 0: they are not."""
    most = 0.0
    for history in histories:
        own = among(history, "key", keys)
        for name in ("min", "max"):
            ends = np.abs(history.records.table[name].to_numpy()[own])
            most = max(most, ends.max(initial=0.0, where=np.isfinite(ends)))
    exponent = math.frexp(most)[1]
    return exponent if abs(exponent) > _FAR else 0


def _scaled(values: NDArray[Any], exponent: int) -> NDArray[Any]:
    return np.ldexp(values.astype(np.float64), -exponent) if exponent else values


# -- values --------------------------------------------------------------------------------------------


def _integers(histories: Sequence[History], made: Pool) -> bool:
    """Whether there are counters or masks among the records, of which the moments keep no extremes."""
    for history, records in zip(histories, made.records, strict=True):
        kinds = history.records.table["kind"].take(pa.array(records)).combine_chunks().unique()
        if not {Kind.COUNTER.value, Kind.DENOMINATOR.value}.isdisjoint(kinds.to_pylist()):
            return True
    return False


def _binned(seen: Tally, edges: tuple[float, float, int] | None) -> Iterator[tuple[Places, Ints, Ints]]:
    """Yield (groups, their counts by bin, how many are not finite): in equal bins, or else the fixed."""
    if seen.wanted.elsewhere is None:
        for group, drawn in seen.draw():
            counted = binned(drawn.values, edges)
            yield np.array([group]), counted[np.newaxis], len(drawn.values) - counted.sum(keepdims=True)
        return
    seen.begin()
    asking = Question(seen.asked, alone(seen.wanted), edges, log=edges is None)
    for i, which, known in seen.wanted.elsewhere.ask(seen, asking):
        yield np.unique(seen.made.of[i][which]), known["counts"], known["nonfinite"]
    seen.check()


def _measured(seen: Tally) -> tuple[Ints, Deviations]:
    """Return the moments and deviations of the values that are drawn."""
    made = seen.made
    rows = [moments.empty(len(records)) for records in made.records]
    spread = Deviations(len(made))
    seen.begin()
    if seen.wanted.elsewhere is not None:
        told = [np.zeros((len(records), 4)) for records in made.records]
        for i, which, known in seen.wanted.elsewhere.ask(seen, Question(seen.asked, alone(seen.wanted))):
            rows[i][which], told[i][which] = known["moments"], known["spread"]
        for i, records in enumerate(made.records):
            for at in np.lexsort((records, made.steps[i])).tolist():  # as they would be drawn here
                count, odd, mean, square = told[i][at].tolist()
                if count:
                    those = Summary(int(count), bool(odd), (mean, mean), (square, square, square))
                    spread.take(int(made.of[i][at]), those)
        seen.check()
        return merge(seen.histories, made.records, made.steps, rows, made.of, len(made)), spread
    for i, records in enumerate(made.records):
        for at, group, drawn in seen.draw_of(i, np.arange(len(records))):
            rows[i][at] = moments.of(drawn.values)
            spread.add(group, drawn.values)
    seen.check()
    return merge(seen.histories, made.records, made.steps, rows, made.of, len(made)), spread


def _quantiles(seen: Tally, asked: Sequence[float]) -> list[list[float | None]]:
    """Return the quantiles of each group: of as many groups at a time as fit into memory."""
    made, most = seen.made, max(1, seen.wanted.most // 8)
    found: dict[int, list[float | None]] = {}
    seen.begin()
    elsewhere = seen.wanted.elsewhere
    asks = elsewhere is not None and elsewhere.holds_groups(seen)
    asking = Question(seen.asked, alone(seen.wanted), quantiles=tuple(asked))
    for i, which, known in elsewhere.ask(seen, asking) if elsewhere is not None and asks else ():
        groups = np.unique(made.of[i][which])[known["known"]].tolist()
        found.update(zip(groups, known["quantiles"][known["known"]].tolist(), strict=True))
    for i, of in enumerate(made.of) if not asks else ():
        if not len(of):  # this run has nothing of what is asked
            continue
        totals = np.bincount(of, weights=seen.counts(i), minlength=len(made)).astype(np.int64)
        first = np.full(len(made), np.iinfo(np.int64).max)
        np.minimum.at(first, of, made.steps[i])
        groups = np.unique(of)
        groups = groups[np.argsort(first[groups], kind="stable")]  # neighbours lie in the same files
        for batch in np.split(groups, cuts(totals[groups], most)):
            which = np.flatnonzero(np.isin(of, batch))
            if len(batch) == 1 and totals[batch[0]] > most:
                found[batch[0]] = _large(seen, i, which, asked)
                continue
            if seen.wanted.alone and len(np.unique(made.records[i][which])) == len(which):
                found.update(_gathered(seen, i, which, asked))
                continue
            parts: dict[int, list[NDArray[Any]]] = {group: [] for group in batch.tolist()}
            for _, group, drawn in seen.draw_of(i, which):
                parts[group].append(drawn.values)
            for group in batch.tolist():
                found[group] = quantiles(np.concatenate([*parts.pop(group), _EMPTY]), asked)
    seen.check()
    return [found.get(group, [None] * len(asked)) for group in range(len(made))]


def _gathered(
    seen: Tally, i: int, which: Places, asked: Sequence[float]
) -> Iterator[tuple[int, list[float | None]]]:
    """Yield (group, its quantiles) of some records of the i-th history that lie in memory together."""
    records, of = seen.made.records[i], seen.made.of[i]
    which = which[np.lexsort((records[which], seen.made.steps[i][which], of[which]))]
    values, counts = gather(seen.histories[i], records[which])
    seen.note(i, which, counts, seen.counts(i)[which] - counts, np.zeros_like(counts))
    firsts = first_rows(of[which])
    ends = np.cumsum(counts)[np.append(firsts[1:], len(which)) - 1]
    for group, own in zip(of[which][firsts].tolist(), np.split(values, ends[:-1]), strict=True):
        yield group, quantiles(own, asked)


def _large(seen: Tally, i: int, which: Places, asked: Sequence[float]) -> list[float | None]:
    """Return the quantiles of a group whose values do not fit into memory."""
    n, nan = 0, False
    for _, _, drawn in seen.draw_of(i, which):
        n += len(drawn.values)
        nan |= bool(np.isnan(drawn.values).any())
    if nan or not n:
        return [math.nan if nan else None] * len(asked)
    most = max(1, seen.wanted.most // 8)
    return quantiles_of_stream(lambda: (drawn.values for drawn in seen.again(i, which)), n, asked, most)


_EMPTY: Final = np.empty(0, np.float32)
