"""A session over one or several runs: tables, statistics, and SQL that can read them and nothing else."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

from eventlog import errors

from . import payload, pooling, tables
from .choice import names_of
from .database import Database
from .history import load
from .recompute import specs_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from typing import Self

    from .history import History

    Attempts = Literal["latest", "all"]
    Source = Literal["committed", "recomputed"]

_MOST_NAMED: Final = 5


def open_run(*paths: str | os.PathLike[str], attempts: Attempts = "latest") -> Session:
    """Open one or several run directories, finished or live, as they are now.

    `attempts` "all" shows also what later attempts superseded. NotARunError, FormatVersionError; damage does
    not raise: `Session.info` lists it. Nothing is written.
    """
    if attempts not in ("latest", "all"):
        raise errors.QueryError(f"expected attempts to be latest or all, got {attempts!r}")
    if not paths:
        raise errors.QueryError("expected at least one run directory, got none")
    places = [Path(path) for path in paths]
    labels = _labels(places)
    return Session([load(path, label) for path, label in zip(places, labels, strict=True)], attempts)


def _labels(paths: Sequence[Path]) -> list[str]:
    """Name runs by as many last parts of their paths as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise errors.QueryError(f"expected different run directories, got one twice: {paths[0]}")
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


class Session:
    """Runs as they were when they were opened. A context manager; for one thread at a time."""

    def __init__(self, histories: Sequence[History], attempts: Attempts) -> None:
        self._histories = histories
        self._every = attempts == "all"
        self._several = len(histories) > 1
        self._rows: pa.Table | None = None
        now = {
            "_records": [history.records.table for history in histories],
            "_exports": [history.exports.table for history in histories],
            "_windows": [history.windows.table for history in histories],
            "_commits": [history.commits.table for history in histories],
            "_attempts": [tables.attempts(history) for history in histories],
            "_producers": [tables.producers(history) for history in histories],
        }
        later = {
            "_metrics": (tables.METRICS, self._committed),
            "_payload": (payload.TABLE, self._payload),
        }
        joined = {name: _joined(parts) for name, parts in now.items()}
        self._database = Database(joined, later, several=self._several, superseded=self._every)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the runs."""
        self._database.close()

    def metrics(
        self,
        keys: str | Iterable[str] | None = None,
        *,
        wide: bool = False,
        source: Source = "committed",
        since: int | None = None,
        until: int | None = None,
    ) -> pa.Table:
        """Return metrics by step and key: what was committed, or what the log says it was ("recomputed").

        Columns: run (of several), step, key, value, time, attempt, sub_index, value_int (exact, where the
        number is an integer); recomputed also committed, differs, incomplete, source, export_id; of all
        attempts also superseded. `wide`: a column per key. `keys` may hold globs; QueryError for a key that
        is not there. `since` and `until` are steps, both included.
        """
        if source not in ("committed", "recomputed"):
            raise errors.QueryError(f"expected source to be committed or recomputed, got {source!r}")
        names = None if keys is None else set(match(keys, self._named(source), f"{source} metric"))
        if source == "committed":
            rows = self._committed().drop_columns(["epoch"])
        else:
            found = [tables.recomputed(history, names, superseded=self._every) for history in self._histories]
            rows = pa.concat_tables(found)
        rows = tables.select(rows, names, since, until, superseded=self._every)
        return self._shown(tables.wide(rows, by_attempt=self._every) if wide else rows)

    def keys(self) -> pa.Table:
        """Return what was recorded and, of kind "metric", committed: kind, count, first and last step."""
        return self.sql("select * from keys")

    def percentiles(
        self, key: str, q: float | Sequence[float], by: str | Sequence[str] = ("step",)
    ) -> pa.Table:
        """Return exact percentiles (0 to 1) of the values of a recorded key: a column `p50` and so on each.

        See `reduce` for `by`, and for what is pooled. NaN where any value is NaN. `count` is how many values
        there are, `missing` how many of those that were selected are not kept in the payload.
        """
        return self._shown(
            pooling.percentiles(self._histories, self._recorded(key), q, by, every=self._every)
        )

    def reduce(
        self, key: str, stats: str | Sequence[str] = ("avg",), by: str | Sequence[str] = ("step",)
    ) -> pa.Table:
        """Return statistics of the values of a recorded key, a column for each.

        avg, sum, min, max, count and nonfinite come from the moments; median, std and var (of the sample),
        std_pop and var_pop read the values. Null where there is nothing to say.
        `by`: any of step, epoch, attempt, role, rank, session, tracker. By none of role, rank and session the
        ranks that count are pooled, as the metrics are; else every process that recorded the key stands for
        itself.
        """
        return self._shown(pooling.reduce(self._histories, self._recorded(key), stats, by, every=self._every))

    def histogram(self, key: str, bins: int = 50, by: str | Sequence[str] = ()) -> pa.Table:
        """Return how many values of a recorded key lie in each of `bins` equal bins, the last one closed.

        All groups share the bins, from the least to the greatest finite value. `nonfinite` counts the others.
        """
        return self._shown(
            pooling.histogram(self._histories, self._recorded(key), bins, by, every=self._every)
        )

    def sql(self, query: str) -> pa.Table:
        """Answer a SELECT (or WITH, DESCRIBE, SUMMARIZE, PIVOT, EXPLAIN) over the views; see `schema`.

        QueryError for anything else and for what DuckDB refuses: the session can read the runs and nothing
        besides.
        """
        return self._database.sql(query)

    def schema(self) -> pa.Table:
        """Return every column of every view: view, column, type, comment."""
        return self._database.schema()

    def info(self) -> dict[str, Any]:
        """Return what there is to know of the run at a glance; of several, a list of it under `runs`."""
        told = [tables.info(history) for history in self._histories]
        return {"runs": told} if self._several else told[0]

    @property
    def problems(self) -> list[str]:
        """What could not be read, a line each, path last."""
        return [str(problem) for history in self._histories for problem in history.reading.reader.problems]

    # -- what is asked for -----------------------------------------------------------------------------

    def _committed(self) -> pa.Table:
        if self._rows is None:
            self._rows = pa.concat_tables([tables.committed(history) for history in self._histories])
        return self._rows

    def _payload(self) -> pa.Table:
        rows = _joined([payload.table(history) for history in self._histories])
        if not rows.num_rows and any(history.records.table.num_rows for history in self._histories):
            raise errors.QueryError(
                "expected the values that were recorded, got none: the payload was off or pruned; "
                "records and metrics can still be asked"
            )
        return rows

    def _named(self, source: Source) -> Iterable[str]:
        if source == "committed":
            return self._committed()["key"].unique().to_pylist()
        return [name for history in self._histories for spec in specs_of(history) for name in names_of(spec)]

    def _recorded(self, key: str) -> str:
        known = {spec.key for history in self._histories for spec in specs_of(history)}
        if key not in known:
            raise errors.QueryError(_unknown(key, known, "recorded key"))
        return key

    def _shown(self, rows: pa.Table) -> pa.Table:
        rows = rows.combine_chunks()
        return rows if self._several else rows.drop_columns(["run"])


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(parts, promote_options="permissive").unify_dictionaries()


def match(keys: str | Iterable[str], known: Iterable[str], what: str) -> list[str]:
    """Return the known names that keys name, by themselves or as globs (`*`, `?`).

    QueryError, naming what is near, for a key that names none.
    """
    names = dict.fromkeys(known)
    found: dict[str, None] = {}
    for key in [keys] if isinstance(keys, str) else keys:
        glob = "*" in key or "?" in key
        fitting = [key] if key in names else [name for name in names if glob and fnmatchcase(name, key)]
        if not fitting:
            raise errors.QueryError(_unknown(key, names, what))
        found.update(dict.fromkeys(fitting))
    return list(found)


def _unknown(key: str, known: Iterable[str], what: str) -> str:
    """Say what there is instead: names that begin with the key, else names like it."""
    names = sorted(set(known))
    near = [name for name in names if name.startswith((f"{key}/", f"{key}__"))][:_MOST_NAMED]
    near = near or get_close_matches(key, names, _MOST_NAMED, 0.5) or names[:_MOST_NAMED]
    listed = f"near: {', '.join(map(repr, near))}" if near else "there is none"
    return f"expected a {what}, got {key!r}; {listed}"
