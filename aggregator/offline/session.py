"""A session over one or several runs: tables, statistics, and SQL that can read them and nothing else."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from eventlog import errors, fixed, is_whole

from . import export, payload, pooling, tables
from .choice import names_of
from .condition import parse, tests
from .database import Anew, Database
from .drawing import Wanted
from .grouping import POOLED, SEQUENCE, Asked, checked_bound, checked_by, counting, pooled
from .history import load
from .losses import losses
from .memory import Memory
from .names import labels, match
from .payload import Payload
from .recompute import specs_of
from .scaleout import Elsewhere, Run
from .sequences import by_sequence
from .tally import why_missing

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence
    from typing import Self

    from eventlog import Loss, Producer

    from .engine import Name
    from .history import History

    Attempts = Literal["latest", "all"]
    Source = Literal["committed", "recomputed"]


def open_run(
    *paths: str | os.PathLike[str],
    attempts: Attempts = "latest",
    offsets: Sequence[int] | None = None,
    memory_limit: int | str | None = None,
    spill: str | os.PathLike[str] | None = None,
    engine: Name | None = None,
    workers: int | None = None,
) -> Session:
    """Open one or several run directories, finished or live, as they are now.

    `attempts` "all" shows also what later attempts superseded. `offsets`: what to add to the steps of each
    run, in order. `memory_limit` (bytes, or "256MB"; AREAL_METRICS_MEMORY_LIMIT) bounds what is held of the
    values at a time, and DuckDB; `spill` (AREAL_METRICS_SPILL) is a directory that SQL may use beyond it.
    `engine` reads the values for `reduce`, `percentiles` by step, and `histogram`: "local" in `workers`
    processes, "ray" on a cluster (see `engine.Engine`), with the same answers to the bit; what is finished
    lies in RUN/tables/answers until the question is answered.
    NotARunError, FormatVersionError; damage does not raise: `Session.info` lists it. Nothing else is written.
    """
    if attempts not in ("latest", "all"):
        raise errors.QueryError(f"expected attempts to be latest or all, got {attempts!r}")
    if not paths:
        raise errors.QueryError("expected at least one run directory, got none")
    places = [fixed(path) for path in paths]
    given: Any = offsets
    steps = list(given) if isinstance(given, list | tuple) else [0] * len(places) if given is None else []
    if len(steps) != len(places) or not all(map(is_whole, steps)):
        raise errors.QueryError(
            f"expected a whole number of steps for each of {len(places)} runs, got {offsets!r}"
        )
    memory = Memory.of(memory_limit, spill)
    runs = [Run(*those) for those in zip(map(str, places), labels(places), map(int, steps), strict=True)]
    elsewhere = Elsewhere.of(runs, engine, workers)
    return Session([load(*run) for run in runs], attempts, memory, elsewhere)


class Session:
    """Runs as they were when they were opened. A context manager; for one thread at a time."""

    def __init__(
        self,
        histories: Sequence[History],
        attempts: Attempts,
        memory: Memory,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._histories = histories
        self._memory = memory
        self._elsewhere = elsewhere
        self._every = attempts == "all"
        self._several = len(histories) > 1
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the runs."""
        self._closed = True
        if (database := self.__dict__.pop("_database", None)) is not None:
            database.close()
        if self._elsewhere is not None:
            self._elsewhere.close()

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
        attempts also superseded. Of a committed number that the log cannot say any more (a quantile whose
        values were not kept, a step whose export row was lost) the recomputed value is null, and incomplete
        true. `wide`: a column per key, `~step` for a key `step` (or run, attempt, sub_index, time), which
        is the row's own. `keys` may hold globs; QueryError for a key that is not there. `since` and `until`
        are steps, both included.
        """
        if source not in ("committed", "recomputed"):
            raise errors.QueryError(f"expected source to be committed or recomputed, got {source!r}")
        since, until = checked_bound("since", since), checked_bound("until", until)
        if keys is not None and source == "committed" and not self._committed.num_rows:
            raise errors.UnansweredError(
                "expected committed metrics, got none: a StatsLogger commits them; see source='recomputed'"
            )
        names = None if keys is None else set(match(keys, self._named(source), f"{source} metric"))
        if source == "committed":
            rows = self._committed.drop_columns(["epoch"])
        else:
            found = [tables.recomputed(history, names, superseded=self._every) for history in self._histories]
            rows = pa.concat_tables(found)
        rows = tables.select(rows, names, since, until, superseded=self._every)
        return self._shown(tables.wide(rows, by_attempt=self._every) if wide else rows)

    def keys(self, keys: str | Iterable[str] | None = None) -> pa.Table:
        """Return what was recorded and, of kind "metric", committed: kind, count, first and last step.

        `keys` may hold globs; QueryError for a key that is not there.
        """
        rows = self.sql("select * from keys")
        if keys is None:
            return rows
        listed = rows["key"].to_pylist()
        names = set(match(keys, listed, "key"))
        return rows.filter(pa.array([name in names for name in listed], pa.bool_()))

    def reduce(
        self,
        keys: str | Iterable[str],
        stats: str | float | Sequence[str | float] = ("avg",),
        by: str | Sequence[str] = ("step",),
        *,
        where: str | None = None,
        distinct: bool = False,
        since: int | None = None,
        until: int | None = None,
    ) -> pa.Table:
        """Return statistics of the values of a recorded key, a column for each.

        avg, sum, min, max, count and nonfinite come from the moments; median, any quantile ("p99" or 0.99),
        std and var (of the sample), std_pop and var_pop read the values. Null where there is nothing to say,
        NaN where any value is NaN. Several keys, and globs, are answered in one pass, with a column `key`.

        `by`: any of step, epoch, attempt, role, rank, session, tracker, sequence, and tags such as
        "tags.modality", also those of the mask (`denominator(tags=)`). By none of role, rank and session the
        ranks that count are pooled, as the metrics are; else every process that recorded the key stands for
        itself. By sequence there is a row for each sequence of each call: of the leading dimension of the
        mask or of its `cu_seqlens`, named by step, role, rank, window, call and sequence; and one, of
        sequence null, for each call whose values are not kept: `missing` says how many.

        `where`: only values that meet a condition on other keys of the same batch, such as
        "ppo_actor/final_reward > 0"; see `condition` for what it may say and `pairing` for what belongs
        together. Where values were read, `missing` counts those that are not kept in the payload, and
        `unmatched` those beside which the condition's keys were not recorded. QueryError where it is not
        known which values belong together. `since` and `until` are steps, both included. `distinct`: of each
        sample id (`denominator(sample_ids=)`), step and group only the first: of the lowest rank.
        """
        asked = self._asked(keys, by, since, until)
        answer = by_sequence if SEQUENCE in asked.by else pooling.reduce
        wanted = self._wanted(where, parts=SEQUENCE in asked.by)
        return self._shown(answer(self._histories, asked, stats, wanted.once() if distinct else wanted))

    def percentiles(
        self,
        keys: str | Iterable[str],
        q: float | Sequence[float],
        by: str | Sequence[str] = ("step",),
        *,
        where: str | None = None,
        since: int | None = None,
        until: int | None = None,
    ) -> pa.Table:
        """Return exact percentiles (0 to 1) of the values of a recorded key: a column `p50` and so on each.

        Interpolated linearly, as numpy does. See `reduce` for the rest. `count` is how many values there are,
        `missing` how many of those that were selected are not kept; null: a rank's part is not in the log.
        """
        asked = self._asked(keys, by, since, until)
        if SEQUENCE in asked.by:
            stats = ["count", *pooling.checked_quantiles(q)]
            return self._shown(by_sequence(self._histories, asked, stats, self._wanted(where, parts=True)))
        return self._shown(pooling.percentiles(self._histories, asked, q, self._wanted(where)))

    def histogram(
        self,
        keys: str | Iterable[str],
        bins: int | Literal["log"] = 50,
        by: str | Sequence[str] = (),
        *,
        where: str | None = None,
        since: int | None = None,
        until: int | None = None,
    ) -> pa.Table:
        """Return how many values of a recorded key lie in each of `bins` equal bins, the last one closed.

        All groups share the bins, from the least to the greatest finite value. `nonfinite` counts the others.
        `bins="log"` counts in the fixed bins that live quantiles are read from (`eventlog.histogram`; the
        edge closer to 0 is closed), and returns those that hold something: such histograms add up. See
        `reduce` for the rest.
        """
        asked = self._asked(keys, by, since, until, sequences=False)
        return self._shown(pooling.histogram(self._histories, asked, bins, self._wanted(where)))

    def correlation(
        self,
        key: str,
        other: str,
        by: str | Sequence[str] = (),
        *,
        where: str | None = None,
        since: int | None = None,
        until: int | None = None,
    ) -> pa.Table:
        """Return Pearson's correlation of two recorded keys, over the values that were recorded side by side.

        Null of fewer than two pairs and of a constant, NaN where any value is NaN or infinite. `count` is the
        number of pairs. A value per sequence stands for each element of its sequence. See `reduce` for the
        rest, and `pairing` for what belongs together.
        """
        asked = self._asked(key, by, since, until, sequences=False)
        other = match(other, self._recorded(), "recorded key")[0]
        return self._shown(pooling.correlation(self._histories, asked, self._wanted(where, other=other)))

    def sql(self, query: str) -> pa.Table:
        """Answer a SELECT (or WITH, DESCRIBE, SUMMARIZE, PIVOT, EXPLAIN) over the views; see `schema`.

        QueryError for anything else and for what DuckDB refuses: the session can read the runs and nothing
        besides.
        """
        return self._database.sql(query)

    def schema(self) -> pa.Table:
        """Return every column of every view: view, column, type, comment."""
        return self._database.schema()

    def export(
        self,
        path: str | os.PathLike[str],
        keys: str | Iterable[str] | None = None,
        *,
        view: str = "metrics",
        format: str | None = None,  # noqa: A002
        wide: bool = False,
        source: Source = "committed",
        since: int | None = None,
        until: int | None = None,
    ) -> int:
        """Write a view to a Parquet, Arrow, CSV or JSON Lines file, by its ending; return the number of rows.

        `format`: parquet, arrow, csv or jsonl, whatever the ending. `keys` may hold globs. `wide` and
        `source` are as for `metrics`, and for that view only. Views larger than memory are written a part at
        a time. QueryError for an unknown view, key or format; nothing is left of a file that fails.
        """
        place = Path(path)
        form = export.format_of(place, format)
        if view == "metrics":
            metrics = self.metrics(keys, wide=wide, source=source, since=since, until=until)
            return export.write(metrics.to_reader(), place, form)
        if wide or source != "committed":
            raise errors.QueryError(f"expected wide and source for the view metrics only, got {view!r}")
        rows = export.part(self._database, view, keys, since, until)
        return export.write(rows, place, form)

    def info(self) -> dict[str, Any]:
        """Return what there is to know of the run at a glance; of several, a list of it under `runs`."""
        told = [tables.info(history) for history in self._histories]
        return {"runs": told} if self._several else told[0]

    @property
    def problems(self) -> list[str]:
        """What could not be read, and which ranks of an export left nothing of it; a line each, path last."""
        return [str(problem) for history in self._histories for problem in tables.problems(history)]

    @property
    def losses(self) -> list[tuple[Producer, Loss]]:
        """What never reached the log, of steps that count, and of whom; in words: `eventlog.losses.lines`."""
        return [lost for history in self._histories for lost in losses(history)]

    # -- what is asked for -----------------------------------------------------------------------------

    @cached_property
    def _database(self) -> Database:
        """The views for SQL: most of what opening a small run would cost, so only for who asks."""
        if self._closed:
            raise errors.QueryError("expected an open session, got one that was closed")
        placed = ("exports", "windows", "commits")
        now = {f"_{name}": [getattr(history, name).table for history in self._histories] for name in placed}
        now["_records"] = [payload.with_tags(history) for history in self._histories]
        now["_attempts"] = [tables.attempts(history) for history in self._histories]
        now["_producers"] = [tables.producers(history) for history in self._histories]
        later = {
            "_metrics": (tables.METRICS, lambda: self._committed),
            "_payload": (payload.TABLE, self._payload),
            "_pooled": (POOLED, self._pooled),
        }
        joined = {name: _joined(parts) for name, parts in now.items()}
        return Database(joined, later, several=self._several, superseded=self._every, memory=self._memory)

    @cached_property
    def _committed(self) -> pa.Table:
        return pa.concat_tables([tables.committed(history) for history in self._histories])

    def _payload(self) -> pa.Table | Anew:
        """Return the payload's rows: held, if memory may hold them, else read anew by every scan."""
        whole = [(history, counting(history, every=self._every)) for history in self._histories]
        size = sum(int(payload.sizes(history).sum()) for history in self._histories)
        if size > self._memory.held:
            self._check_kept(any(rows.num_rows for rows in payload.batches(whole, self._memory.piece)))
            return Anew(payload.TABLE, lambda: payload.batches(whole, self._memory.piece))
        tables = [table for history, of in whole for table in Payload(history).tables(of, size + 1)]
        rows = _joined(tables)
        self._check_kept(rows.num_rows > 0)
        return pa.Table.from_batches(payload.sliced(rows), rows.schema)

    def _check_kept(self, kept: bool) -> None:
        if not kept and any(history.records.table.num_rows for history in self._histories):
            raise errors.UnansweredError(
                f"expected the values that were recorded, got none: {why_missing(self._histories)}; "
                "records and metrics can still be asked"
            )

    def _pooled(self) -> pa.Table:
        return _joined([pooled(history, every=self._every) for history in self._histories])

    def _named(self, source: Source) -> Iterable[str]:
        if source == "committed":
            return self._committed["key"].unique().to_pylist()
        return [name for history in self._histories for spec in specs_of(history) for name in names_of(spec)]

    def _recorded(self) -> set[str]:
        return {spec.key for history in self._histories for spec in specs_of(history)}

    def _asked(
        self,
        keys: str | Iterable[str],
        by: str | Sequence[str],
        since: int | None,
        until: int | None,
        *,
        sequences: bool = True,
    ) -> Asked:
        found = tuple(match(keys, self._recorded(), "recorded key"))
        if not found:
            raise errors.QueryError("expected at least one recorded key, got none")
        asked = Asked(
            keys=found,
            by=checked_by(by),
            named=[keys] != list(found),
            every=self._every,
            since=checked_bound("since", since),
            until=checked_bound("until", until),
        )
        if SEQUENCE in asked.by and not sequences:
            raise errors.QueryError(
                "expected to group by anything but sequence, which only statistics can be"
            )
        return asked

    def _wanted(self, where: str | None, *, other: str | None = None, parts: bool = False) -> Wanted:
        condition = None if where is None else parse(where)
        for test in tests(condition) if condition is not None else ():
            match([test.key], self._recorded(), "recorded key in the condition")
        return Wanted(condition, other, parts, self._memory.piece, self._elsewhere)

    def _shown(self, rows: pa.Table) -> pa.Table:
        return (rows if self._several else rows.drop_columns(["run"])).combine_chunks()


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(parts, promote_options="permissive").unify_dictionaries()
