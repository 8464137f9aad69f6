"""A session over one or several runs: tables, and SQL that can read them and nothing else."""

from __future__ import annotations

import re
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from eventlog import errors

from . import payload, pooling, tables, unpacking
from .history import load

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from .history import History

    Attempts = Literal["latest", "all"]
    Source = Literal["committed", "recomputed"]

VIEWS: Final = (
    "records", "exports", "windows", "commits", "attempts", "producers", "metrics", "keys", "evaluations", "payload",
    "tensors", "masks", "scalars", "samples",
)  # fmt: skip
_OF_PAYLOAD: Final = frozenset({"payload", "tensors", "masks", "scalars", "samples"})
_OF_METRICS: Final = frozenset({"metrics", "keys", "evaluations"})
_EXPLAIN: Final = re.compile(r"\s*explain\s+(analyze\s+)?", re.IGNORECASE)


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
    """Runs as they were when they were opened. A context manager; not for several threads at once."""

    def __init__(self, histories: Sequence[History], attempts: Attempts) -> None:
        self._histories = histories
        self._all = attempts == "all"
        self._several = len(histories) > 1
        self._con = _connect()
        self._loaded: set[str] = set()
        self._metrics: pa.Table | None = None
        self._stand_views()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the runs."""
        self._con.close()

    # -- tables --------------------------------------------------------------------------------------------

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
        chosen = None if keys is None else match(keys, self._names(source), f"{source} metric")
        if source == "committed":
            rows = self._committed().drop_columns(["epoch"])
            if chosen is not None:
                rows = rows.filter(pc.is_in(rows["key"], pa.array(chosen, pa.string())))
        else:
            names = None if chosen is None else set(chosen)
            made = [tables.recomputed(history, names, superseded=self._all) for history in self._histories]
            rows = pa.concat_tables(made)
            if names is not None:
                rows = rows.filter(pc.is_in(rows["key"], pa.array(chosen, pa.string())))
        rows = rows.filter(_between(rows["step"], since, until))
        if not self._all:
            rows = rows.filter(pc.invert(rows["superseded"])).drop_columns(["superseded"])
        return self._shown(tables.wide(rows, by_attempt=self._all) if wide else rows)

    def keys(self) -> pa.Table:
        """Return what was recorded and what was committed (kind "metric"): kind, count, first and last step."""
        return self.sql("select * from keys")

    def percentiles(
        self, key: str, q: float | Sequence[float], by: str | Sequence[str] = ("step",)
    ) -> pa.Table:
        """Return exact percentiles (0 to 1) of the values of a recorded key, a column `p50` and so on for each.

        See `reduce` for `by`, and for what is pooled. NaN where any value is NaN. `count` is how many values
        there are, `missing` how many of those that were selected are not kept in the payload.
        """
        return self._shown(pooling.percentiles(self._histories, self._recorded(key), q, by, every=self._all))

    def reduce(
        self, key: str, stats: str | Sequence[str] = ("avg",), by: str | Sequence[str] = ("step",)
    ) -> pa.Table:
        """Return statistics of the values of a recorded key: avg, sum, min, max, count, nonfinite, std, var, median.

        `by`: any of step, epoch, attempt, role, rank, session, tracker. By none of role, rank and session the
        ranks that count are pooled, as the metrics are; else every process that recorded the key stands for
        itself. `std` and `var` are of the sample, `std_pop` and `var_pop` of the population. Only the last four
        and the median read the values; null where there is nothing to say.
        """
        return self._shown(pooling.reduce(self._histories, self._recorded(key), stats, by, every=self._all))

    def histogram(self, key: str, bins: int = 50, by: str | Sequence[str] = ()) -> pa.Table:
        """Return how many values of a recorded key lie in each of `bins` equal bins, the last one closed.

        All groups share the bins, from the least to the greatest finite value. `nonfinite` counts the others.
        """
        return self._shown(pooling.histogram(self._histories, self._recorded(key), bins, by, every=self._all))

    def info(self) -> dict[str, Any]:
        """Return what there is to know of the run at a glance; of several, a list of it under `runs`."""
        told = [tables.info(history) for history in self._histories]
        return {"runs": told} if self._several else told[0]

    @property
    def problems(self) -> list[str]:
        """What could not be read, a line each."""
        return [str(problem) for history in self._histories for problem in history.reading.reader.problems]

    # -- SQL -----------------------------------------------------------------------------------------------

    def sql(self, query: str) -> pa.Table:
        """Answer a SELECT (or WITH, DESCRIBE, SUMMARIZE, EXPLAIN) over the views; see `schema`.

        QueryError for anything else and for what DuckDB refuses: the session can read the runs and nothing
        besides, and cannot be changed.
        """
        self._check(query)
        try:
            names = {name.lower() for name in self._con.get_table_names(query)}
            self._provide(names)
            return self._con.execute(query).to_arrow_table()
        except duckdb.Error as error:
            raise errors.QueryError(_explained(error)) from error

    def schema(self) -> pa.Table:
        """Return every column of every view: view, column, type, comment."""
        return self._con.execute(_SCHEMA).to_arrow_table()

    def _check(self, query: str) -> None:
        try:
            statements = self._con.extract_statements(query)
        except duckdb.Error as error:
            raise errors.QueryError(_explained(error)) from error
        if len(statements) != 1:
            raise errors.QueryError(f"expected one statement, got {len(statements)}")
        kind = statements[0].type
        if kind == duckdb.StatementType.EXPLAIN:
            self._check(_EXPLAIN.sub("", query, count=1))
        elif kind != duckdb.StatementType.SELECT:
            raise errors.QueryError(
                f"expected a SELECT, WITH, DESCRIBE, SUMMARIZE or EXPLAIN statement, got {kind.name}: "
                "a session only reads"
            )

    def _stand_views(self) -> None:
        for name, column in (("_records", "records"), ("_exports", "exports"), ("_windows", "windows")):
            self._register(name, [getattr(history, column).table for history in self._histories])
        self._register("_commits", [history.commits.table for history in self._histories])
        self._register("_attempts", [tables.attempts(history) for history in self._histories])
        self._register("_producers", [tables.producers(history) for history in self._histories])
        self._con.register("_metrics", tables.METRICS.empty_table())
        self._con.register("_payload", payload.TABLE.empty_table())
        self._con.create_function(
            "_bits", unpacking.bits, ["BLOB", "BIGINT"], "BOOLEAN[]", type="arrow", null_handling="special"
        )
        self._con.create_function(
            "_dense", unpacking.dense, ["DOUBLE[]", "BLOB", "BIGINT"], "DOUBLE[]", type="arrow", null_handling="special"
        )
        self._con.execute(resources.files(__package__).joinpath("views.sql").read_text("utf-8"))
        run = "" if self._several else "exclude (run)"
        superseded = dict(self._con.execute(_WITH_SUPERSEDED).fetchall())
        for view in VIEWS:
            hidden = "where not superseded" if view in superseded and not self._all else ""
            self._con.execute(f"create view main.{view} as select * {run} from log.{view} {hidden}")
        self._con.execute(_LOCK)

    def _register(self, name: str, parts: Sequence[pa.Table]) -> None:
        self._con.register(name, pa.concat_tables(parts).unify_dictionaries())

    def _provide(self, names: set[str]) -> None:
        """Load what only some views show, when a query names one of them."""
        if names & _OF_METRICS and "_metrics" not in self._loaded:
            self._con.register("_metrics", self._committed())
            self._loaded.add("_metrics")
        if names & _OF_PAYLOAD and "_payload" not in self._loaded:
            self._register("_payload", [payload.table(history) for history in self._histories])
            self._loaded.add("_payload")
