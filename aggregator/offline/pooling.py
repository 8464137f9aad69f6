"""Statistics of the values of one key, pooled by step, rank and whatever else they are asked by.

Sums, means and extremes come from the moments alone; percentiles, deviations and histograms read the values.
NaN and Inf mean what they mean live. Everything is added in a fixed order: answers repeat bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from eventlog import errors, moments

from . import payload
from .choice import speaking
from .placing import groups
from .reading import NONE, codes, ints, nullable
from .recompute import moments_of, segments

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

    from .history import History
    from .reading import Ints

    Places = NDArray[np.intp]
    Floats = NDArray[np.float64]

BY: Final = ("step", "epoch", "attempt", "role", "rank", "session", "tracker")
_OF_PROCESS: Final = frozenset({"role", "rank", "session"})
_SUMMARIES: Final = {
    "avg": moments.means,
    "sum": moments.totals,
    "min": moments.leasts,
    "max": moments.greatests,
    "count": lambda rows: rows[:, moments.COUNT],
    "nonfinite": lambda rows: rows[:, moments.NAN : moments.INT_SUM].sum(axis=1),
}
_ALWAYS: Final = ("sum", "count", "nonfinite")  # said of nothing too


@dataclass(frozen=True, slots=True)
class Pool:
    """Groups of records: `columns` say what each group is, `rows` are its moments.

    `records[i]` are the records of the i-th history that are pooled, `of[i]` the group of each.
    """

    columns: dict[str, pa.Array]
    rows: Ints
    records: Sequence[Places]
    of: Sequence[Places]

    def __len__(self) -> int:
        return len(self.rows)


def pool(histories: Sequence[History], key: str, by: str | Sequence[str], *, every: bool) -> Pool:
    """Group the records of a key that count; `every`: those of superseded attempts too."""
    names = [by] if isinstance(by, str) else list(by)
    if unknown := [name for name in names if name not in BY]:
        raise errors.QueryError(f"expected to group by any of {', '.join(BY)}, got {unknown[0]!r}")
    found = [_counted(history, key, names, every=every) for history in histories]
    if not sum(len(records) for records, _ in found):
        raise errors.QueryError(
            f"expected values of {key!r} at some step, got none: "
            "its windows are unbound, incomplete or superseded"
        )
    columns = {"run": np.repeat(np.arange(len(histories)), [len(records) for records, _ in found])}
    columns |= {
        name: np.concatenate([_column(h, *f, name) for h, f in zip(histories, found, strict=True)])
        for name in names
    }
    numbers, n = groups(*columns.values())
    of = np.split(numbers, np.cumsum([len(records) for records, _ in found])[:-1])
    first = np.zeros(n, np.int64)
    first[numbers] = np.arange(len(numbers))
    said = {name: _told(values[first], name, histories) for name, values in columns.items()}
    rows = _moments(histories, [records for records, _ in found], of, n)
    return Pool(said, rows, [records for records, _ in found], of)


def _counted(history: History, key: str, by: Sequence[str], *, every: bool) -> tuple[Places, Ints]:
    """Return (records, their steps): all, where processes are asked about, else those that count once."""
    if not _OF_PROCESS.isdisjoint(by):
        placed = history.records
        words = placed.table["key"].combine_chunks().dictionary.to_pylist()
        chosen = codes(placed.table["key"]) == (words.index(key) if key in words else len(words))
        chosen &= placed.table["complete"].to_numpy() & (placed.steps != NONE)
        records = np.flatnonzero(chosen if every else chosen & ~placed.superseded)
        return records, placed.steps[records]
    found = segments(history, {key})
    counted = np.isin(found.of_records, speaking(history, found, superseded=every))
    records = found.records[counted]
    steps = np.array([c.step for c in found.candidates], np.int64)[found.candidate[found.of_records[counted]]]
    # An export without reset covers records again: once a step, or once in all.
    again = steps if not {"step", "epoch"}.isdisjoint(by) else np.zeros(len(steps), np.int64)
    _, first = np.unique(np.stack([records, again], axis=1), axis=0, return_index=True)
    return records[np.sort(first)], steps[np.sort(first)]


def _column(history: History, records: Places, steps: Ints, name: str) -> NDArray[Any]:
    if name == "step":
        return steps
    if name == "attempt":
        return history.records.attempts[records]
    column = history.records.table[name]
    if pa.types.is_dictionary(column.type):
        return np.array(column.combine_chunks().dictionary.to_pylist(), np.object_)[codes(column)[records]]
    return ints(column)[records]


def _told(values: NDArray[Any], name: str, histories: Sequence[History]) -> pa.Array:
    if name == "run":
        return pa.array([histories[i].reading.label for i in values.tolist()], pa.string())
    return pa.array(values.tolist(), pa.string()) if values.dtype == np.object_ else nullable(values)


def _moments(histories: Sequence[History], records: Sequence[Places], of: Sequence[Places], n: int) -> Ints:
    """Merge on each rank first, then over the ranks: as an export does."""
    by_rank: list[Ints] = []
    group: list[Places] = []
    for history, places, numbers in zip(histories, records, of, strict=True):
        ranks, m = groups(numbers, history.records.sids[places])
        by_rank.append(moments.pool(moments_of(history.records.table, places), ranks, m))
        group.append(np.zeros(m, np.int64))
        group[-1][ranks] = numbers
    return moments.pool(np.concatenate(by_rank), np.concatenate(group), n)


# -- answers -------------------------------------------------------------------------------------------


def reduce(
    histories: Sequence[History],
    key: str,
    stats: str | Sequence[str],
    by: str | Sequence[str],
    *,
    every: bool,
) -> pa.Table:
    """Return a column per statistic; see `Session.reduce`."""
    names = [stats] if isinstance(stats, str) else list(stats)
    known = (*_SUMMARIES, *_DEVIATIONS, "median")
    if unknown := [name for name in names if name not in known]:
        raise errors.QueryError(f"expected statistics of {', '.join(known)}, got {unknown[0]!r}")
    made = pool(histories, key, by, every=every)
    columns = dict(made.columns)
    values = None if _SUMMARIES.keys() >= set(names) else _values(histories, made, key)
    for name in names:
        if name in _SUMMARIES:
            found = _SUMMARIES[name](made.rows)
            empty = (made.rows[:, moments.COUNT] == 0) & (name not in _ALWAYS)
            columns[name] = pa.array(found, mask=empty)
        else:
            one = _DEVIATIONS.get(name, _median)
            columns[name] = pa.array([one(v) for v in values or ()], pa.float64())
    return pa.table(columns)


def percentiles(
    histories: Sequence[History],
    key: str,
    q: float | Sequence[float],
    by: str | Sequence[str],
    *,
    every: bool,
) -> pa.Table:
    """Return a column per percentile; see `Session.percentiles`."""
    asked = [q] if isinstance(q, int | float) else list(q)
    if wrong := [one for one in asked if not 0 <= one <= 1]:
        raise errors.QueryError(f"expected percentiles from 0 to 1, got {wrong[0]!r}")
    made = pool(histories, key, by, every=every)
    values = _values(histories, made, key)
    found = [quantiles(those, asked) for those in values]
    columns = dict(made.columns)
    for i, one in enumerate(asked):
        columns[f"p{one * 100:g}"] = pa.array([those[i] for those in found], pa.float64())
    there = np.array([len(v) for v in values], np.int64)
    columns["count"] = pa.array(there)
    columns["missing"] = pa.array(made.rows[:, moments.COUNT] - there)
    return pa.table(columns)


def histogram(
    histories: Sequence[History], key: str, bins: int, by: str | Sequence[str], *, every: bool
) -> pa.Table:
    """Return a row per group and bin; see `Session.histogram`."""
    if bins < 1:
        raise errors.QueryError(f"expected at least one bin, got {bins}")
    made = pool(histories, key, by, every=every)
    values = _values(histories, made, key)
    finite = [v[np.isfinite(v)] for v in values]
    everything = np.concatenate(finite)
    edges = np.histogram_bin_edges(everything, bins)
    group = np.repeat(np.arange(len(made)), bins)
    columns = {name: column.take(group) for name, column in made.columns.items()}
    columns["left"] = pa.array(np.tile(edges[:-1], len(made)))
    columns["right"] = pa.array(np.tile(edges[1:], len(made)))
    columns["count"] = pa.array(np.concatenate([np.histogram(v, edges)[0] for v in finite]).astype(np.int64))
    columns["nonfinite"] = pa.array(
        np.repeat([len(v) - len(f) for v, f in zip(values, finite, strict=True)], bins)
    )
    return pa.table(columns)


def _values(histories: Sequence[History], made: Pool, key: str) -> list[Floats]:
    """Return the values of each group, as float64, in the order of their records."""
    found: list[list[tuple[int, int, NDArray[Any]]]] = [[] for _ in range(len(made))]
    for i, history in enumerate(histories):
        places, of = made.records[i], made.of[i]
        order = np.argsort(places, kind="stable")
        places, of = places[order], of[order]
        for place, values in payload.values(history, places):
            for at in range(*np.searchsorted(places, [place, place + 1]).tolist()):
                found[of[at]].append((i, place, values))
    if not any(found) and made.rows[:, moments.COUNT].any():
        raise errors.QueryError(
            f"expected the values of {key!r}, got none: the payload was off or pruned; "
            f"{', '.join(_SUMMARIES)} can still be asked"
        )
    return [
        np.concatenate([v for *_, v in sorted(those, key=lambda one: one[:2])] or [_EMPTY]).astype(np.float64)
        for those in found
    ]


_EMPTY: Final = np.empty(0)


def quantiles(values: Floats, asked: Sequence[float]) -> list[float | None]:
    """Return quantiles by linear interpolation: None of nothing, NaN where any value is NaN."""
    if not len(values):
        return [None] * len(asked)
    if np.isnan(values).any():
        return [math.nan] * len(asked)
    ordered = np.sort(values)
    return [_interpolated(ordered, q * (len(ordered) - 1)) for q in asked]


def _interpolated(ordered: Floats, place: float) -> float:
    low = math.floor(place)
    below, part = float(ordered[low]), place - low
    if part == 0 or below == (above := float(ordered[low + 1])):
        return below
    if math.isinf(below) or math.isinf(above):  # a difference would be no number
        return (1 - part) * below + part * above
    return below + (above - below) * part


def _median(values: Floats) -> float | None:
    return quantiles(values, [0.5])[0]


def _variance(values: Floats, ddof: int) -> float | None:
    if len(values) <= ddof:
        return None
    if not np.isfinite(values).all():
        return math.nan
    # About a mean that is exact for a constant, so that a constant deviates by exactly nothing.
    apart = values - values[0]
    apart = apart - apart.mean()
    return max(0.0, float((apart @ apart - apart.sum() ** 2 / len(apart)) / (len(apart) - ddof)))


def _root(variance: float | None) -> float | None:
    return None if variance is None else math.sqrt(variance)


_DEVIATIONS: Final = {
    "std": lambda values: _root(_variance(values, 1)),
    "var": lambda values: _variance(values, 1),
    "std_pop": lambda values: _root(_variance(values, 0)),
    "var_pop": lambda values: _variance(values, 0),
}
