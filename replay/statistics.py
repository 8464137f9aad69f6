"""Statistics and histograms of the recorded values, told beside what was committed.

They are computed step by step from the payload. A histogram's bins are those of `eventlog.histogram`, joined
where they are many: a step's is the same however long the run gets.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute

from eventlog import errors

from .steps import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class Extra:
    """What was computed: rows as of metrics; histograms by commit and name; how many are partial."""

    rows: pa.Table
    histograms: dict[Identity, dict[str, Histogram]] = field(default_factory=dict)
    partial: int = 0


def compute(
    path: Path,
    metrics: pa.Table,
    stats: Iterable[str],
    selection: Selection,
    attempts: Literal["latest", "all"],
) -> Extra:
    """Return statistics of every recorded key that is selected, at every step that was committed.

    `stats` are those of `Session.reduce`, and "histogram". A name that was committed keeps its value. The
    rows belong to the last commit of their step. QueryError for a statistic that is none, and where no values
    were kept.
    """
    from aggregator import open_run

    wanted = list(dict.fromkeys(stats))
    plain = [name for name in wanted if name != HISTOGRAM]
    places = _last_commits(metrics, superseded=attempts == "all")
    committed = set(metrics["key"].unique().to_pylist())
    bounds: dict[str, Any] = {"since": selection.since, "until": selection.until}
    with open_run(path, attempts=attempts) as session:
        keys = _selected(session.keys(), selection.keys, committed)
        reduced = session.reduce(keys, plain, by=_BY, **bounds) if plain else None
        counted = session.histogram(keys, "log", by=_BY, **bounds) if HISTOGRAM in wanted else None
    found = _Found(metrics.schema, places, committed, keys)
    if reduced is not None:
        found.take(reduced, plain)
    histograms = {} if counted is None else found.histograms(counted)
    return Extra(found.table(), histograms, found.partial)


def _selected(recorded: pa.Table, globs: Sequence[str] | None, committed: set[str]) -> list[str]:
    """Return the recorded keys that a selection means: by their own names, or by those of their metrics."""
    rows = zip(recorded["key"].to_pylist(), recorded["kind"].to_pylist(), strict=True)
    keys = sorted({key for key, kind in rows if kind in _KINDS})
    if globs is not None:
        bases = {name.rpartition("/")[0] for name in committed} | committed
        keys = [key for key in keys if key in bases or any(fnmatchcase(key, glob) for glob in globs)]
    if not keys:
        raise errors.QueryError(
            "expected recorded values for the statistics, got none among what is selected"
        )
    return keys


def _last_commits(metrics: pa.Table, *, superseded: bool) -> dict[tuple[int, int], Identity]:
    """Return the last commit of every step and attempt."""
    if not superseded and "superseded" in metrics.column_names:
        metrics = metrics.filter(pc.invert(metrics["superseded"]))
    columns = [
        metrics["step"].to_pylist(),
        pc.fill_null(metrics["attempt"], -1).to_pylist(),
        metrics["time"].cast(pa.int64()).to_pylist(),
        pc.fill_null(metrics["sub_index"], 0).to_pylist(),
    ]
    last: dict[tuple[int, int], Identity] = {}
    for identity in zip(*columns, strict=True):
        place = identity[:2]
        last[place] = max(identity, last.get(place, identity))
    return last


class _Found:
    """Statistics as rows of metrics, each at the last commit of its step."""

    def __init__(
        self,
        schema: pa.Schema,
        places: dict[tuple[int, int], Identity],
        committed: set[str],
        keys: Sequence[str],
    ) -> None:
        self.partial = 0
        self._schema = schema
        self._places = places
        self._committed = committed
        self._only = keys[0]  # what a table without a column `key` is about
        self._newest: dict[int, int] = {}
        for step, attempt in places:
            self._newest[step] = max(attempt, self._newest.get(step, attempt))
        self._rows: list[dict[str, Any]] = []

    def take(self, reduced: pa.Table, stats: Sequence[str]) -> None:
        """Take the statistics, a column each."""
        for row in reduced.to_pylist():
            place = self._place(row)
            if place is None:
                continue
            self.partial += bool(row.get("missing"))
            for stat in stats:
                name = f"{row.get('key', self._only)}/{stat}"
                if row[stat] is not None and name not in self._committed:
                    self._rows.append(self._row(place, name, row[stat]))

    def histograms(self, counted: pa.Table) -> dict[Identity, dict[str, Histogram]]:
        """Return the histograms by commit and name."""
        found: dict[Identity, dict[str, Histogram]] = {}
        for rows in _grouped(counted, self._only):
            place = self._place(rows[0])
            if place is not None:
                bins = [(row["left"], row["right"], row["count"]) for row in rows]
                self.partial += bool(rows[0].get("missing"))
                found.setdefault(place, {})[rows[0].get("key", self._only)] = joined(bins)
        return found

    def table(self) -> pa.Table:
        """Return the rows."""
        return pa.Table.from_pylist(self._rows, self._schema)

    def _place(self, row: dict[str, Any]) -> Identity | None:
        """Return the commit that a step's statistics belong to; of several attempts the newest counts."""
        step, attempt = row["step"], -1 if row["attempt"] is None else row["attempt"]
        if step is None or self._newest.get(step, attempt) > attempt:
            return None
        newest = self._newest.get(step)
        return None if newest is None else self._places[step, newest]

    def _row(self, place: Identity, name: str, value: float) -> dict[str, Any]:
        step, attempt, time, part = place
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
