"""Statistics and histograms of the recorded values, told beside what was committed.

They are computed step by step from the payload. A histogram's bins are those of `eventlog.histogram`, joined
where they are many: a step's is the same however long the run gets.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute

from aggregator import fits
from eventlog import errors

from .steps import Histogram

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Literal

    from .backends.base import Selection
    from .story import Identity

pc: Any = pyarrow.compute  # its functions are made at import: no type checker sees them

HISTOGRAM: Final = "histogram"
MOST_BINS: Final = 64
_LARGEST: Final = sys.float_info.max  # an open bin ends here: no tracker draws one up to infinity
_KINDS: Final = ("stat", "scalar")  # what has a distribution
_BY: Final = ("step", "attempt")


Place = tuple[int, int]  # a step and an attempt, -1: none


@dataclass(frozen=True, slots=True)
class Extra:
    """What was computed: rows as of metrics; histograms by commit and name; how many are partial."""

    rows: pa.Table
    histograms: dict[Identity, dict[str, Histogram]] = field(default_factory=dict)
    partial: int = 0


@dataclass(slots=True)
class Recorded:
    """Statistics of recorded values, step by step; `partial` counts those of values that are not all kept.

    `keys` are those that were found to be recorded, and selected.
    """

    keys: list[str]
    numbers: dict[Place, dict[str, float]] = field(default_factory=dict)
    histograms: dict[Place, dict[str, Histogram]] = field(default_factory=dict)
    partial: Counter[Place] = field(default_factory=Counter)


def compute(
    path: Path,
    metrics: pa.Table,
    stats: Iterable[str],
    selection: Selection,
    attempts: Literal["latest", "all"],
) -> Extra:
    """Return statistics of every recorded key that is selected, at every step that was committed.

    `stats` are those of `Session.reduce`, and "histogram", under `KEY/STATISTIC`, since a recorded key may be
    the name of a committed number, too. A name that was committed keeps its value. The
    rows belong to the last commit of their step. QueryError for a statistic that is none, and where no values
    were kept.
    """
    committed = set(metrics["key"].unique().to_pylist())
    commits = _Commits(metrics, superseded=attempts == "all")
    found = recorded(path, stats, selection, committed, attempts)
    if not found.keys:
        raise nothing_recorded()
    rows: list[dict[str, Any]] = []
    for place, numbers in found.numbers.items():
        if (commit := commits.of(place)) is not None:
            rows += [_row(commit, name, value) for name, value in numbers.items()]
    histograms: dict[Identity, dict[str, Histogram]] = {}
    for place, drawn in found.histograms.items():
        if (commit := commits.of(place)) is not None:
            histograms.setdefault(commit, {}).update(drawn)
    partial = sum(count for place, count in found.partial.items() if commits.of(place) is not None)
    return Extra(pa.Table.from_pylist(rows, metrics.schema), histograms, partial)


def recorded(
    path: Path,
    stats: Iterable[str],
    selection: Selection,
    committed: Collection[str],
    attempts: Literal["latest", "all"],
) -> Recorded:
    """Return statistics of every recorded key that is selected; none under a name that was committed.

    QueryError for a statistic that is none, and where of all values none was kept.
    """
    from aggregator import open_run

    wanted = list(dict.fromkeys(stats))
    plain = [name for name in wanted if name != HISTOGRAM]
    bounds: dict[str, Any] = {"since": selection.since, "until": selection.until}
    with open_run(path, attempts=attempts) as session:
        keys = _selected(session.keys(), selection.keys, committed)
        found = Recorded(keys)
        if keys and plain:
            reduced = session.reduce(keys, plain, by=_BY, **bounds)
            _take(found, reduced.to_pylist(), plain, keys[0], committed)
        if keys and HISTOGRAM in wanted:
            _draw(found, session.histogram(keys, "log", by=_BY, **bounds), keys[0], committed)
    return found


def nothing_recorded() -> errors.UnansweredError:
    """Return the error that is raised where there are no values to make statistics of."""
    return errors.UnansweredError(
        "expected recorded values for the statistics, got none among what is selected"
    )


def check_stats(stats: Iterable[str]) -> list[str]:
    """Return the names of statistics; QueryError for what is none."""
    from aggregator import checked_stats

    wanted = [stats] if isinstance(stats, str) else list(stats)
    if plain := [name for name in wanted if name != HISTOGRAM]:
        checked_stats(plain)
    return wanted


def _selected(found: pa.Table, globs: Sequence[str] | None, committed: Collection[str]) -> list[str]:
    """Return the recorded keys that a selection means: by their own names, or by those of their metrics."""
    rows = zip(found["key"].to_pylist(), found["kind"].to_pylist(), strict=True)
    keys = sorted({key for key, kind in rows if kind in _KINDS})
    if globs is not None:
        bases = {name.rpartition("/")[0] for name in committed}.union(committed)
        keys = [key for key in keys if key in bases or fits(key, globs)]
    return keys


def _take(
    found: Recorded, rows: list[dict[str, Any]], stats: Sequence[str], only: str, committed: Collection[str]
) -> None:
    """Take the statistics, a column each; a table without a column `key` is about `only`."""
    for row in rows:
        if (place := _place(row)) is None:
            continue
        found.partial[place] += row.get("missing", 0) != 0  # null: nobody knows how many
        numbers = found.numbers.setdefault(place, {})
        for stat in stats:
            name = f"{row.get('key', only)}/{stat}"
            if row[stat] is not None and name not in committed:
                numbers[name] = row[stat]


def _draw(found: Recorded, counted: pa.Table, only: str, committed: Collection[str]) -> None:
    """Take the histograms, a row each bin."""
    for rows in _grouped(counted, only):
        if (place := _place(rows[0])) is None:
            continue
        found.partial[place] += rows[0].get("missing", 0) != 0
        bins = [(row["left"], row["right"], row["count"]) for row in rows]
        name = f"{rows[0].get('key', only)}/{HISTOGRAM}"
        if name not in committed:
            found.histograms.setdefault(place, {})[name] = joined(bins)


def _place(row: dict[str, Any]) -> Place | None:
    if row["step"] is None:
        return None
    return row["step"], -1 if row["attempt"] is None else row["attempt"]


class _Commits:
    """The last commit of every step and attempt."""

    def __init__(self, metrics: pa.Table, *, superseded: bool) -> None:
        if not superseded and "superseded" in metrics.column_names:
            metrics = metrics.filter(pc.invert(metrics["superseded"]))
        columns = [
            metrics["step"].to_pylist(),
            pc.fill_null(metrics["attempt"], -1).to_pylist(),
            metrics["time"].cast(pa.int64()).to_pylist(),
            pc.fill_null(metrics["sub_index"], 0).to_pylist(),
        ]
        self._last: dict[Place, Identity] = {}
        self._newest: dict[int, int] = {}
        for identity in zip(*columns, strict=True):
            step, attempt = place = identity[:2]
            self._last[place] = max(identity, self._last.get(place, identity))
            self._newest[step] = max(attempt, self._newest.get(step, attempt))

    def of(self, place: Place) -> Identity | None:
        """Return the commit that a step's statistics belong to; of several attempts the newest counts."""
        step, attempt = place
        newest = self._newest.get(step)
        return None if newest is None or newest > attempt else self._last[step, newest]


def _row(commit: Identity, name: str, value: float) -> dict[str, Any]:
    step, attempt, time, part = commit
    return {
        "step": step,
        "key": name,
        "value": float(value),
        "value_int": value if isinstance(value, int) else None,
        "time": time,
        "attempt": None if attempt < 0 else attempt,
        "sub_index": part,
        "superseded": False,
    }


def _grouped(counted: pa.Table, only: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the bins of each histogram, from the least."""
    order = [name for name in ("key", "step", "attempt", "left") if name in counted.column_names]
    rows = counted.sort_by([(name, "ascending") for name in order]).to_pylist()
    group: list[dict[str, Any]] = []
    for row in rows:
        same = group and all(row.get(n, only) == group[-1].get(n, only) for n in ("key", *_BY))
        if group and not same:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def joined(bins: Sequence[tuple[float, float, int]]) -> Histogram:
    """Return a histogram of at most MOST_BINS bins: bins without gaps, neighbours joined while too many."""
    edges, counts = [bins[0][0]], list[int]()
    for left, right, count in bins:
        if left > edges[-1]:
            edges.append(left)
            counts.append(0)
        edges.append(right)
        counts.append(count)
    while len(counts) > MOST_BINS:
        counts = [sum(counts[at : at + 2]) for at in range(0, len(counts), 2)]
        edges = [*edges[:-1:2], edges[-1]]
    return Histogram(tuple(max(-_LARGEST, min(edge, _LARGEST)) for edge in edges), tuple(counts))
