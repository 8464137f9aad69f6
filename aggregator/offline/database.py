"""The SQL side of a session: an in-memory database whose views read the runs, and nothing else.

There is no database file, so there is no lock: a run can be read while it is written, by as many as like.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from importlib import resources
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

import duckdb
import pyarrow as pa
from duckdb.func import FunctionNullHandling, PythonUDFType

from eventlog import errors

from . import unpacking
from .names import unknown
from .query import reading, words

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from .memory import Memory

VIEWS: Final = (
    "records", "exports", "windows", "commits", "attempts", "producers", "metrics", "keys", "evaluations",
    "payload", "tensors", "masks", "scalars", "samples",
)  # fmt: skip
# Table macros: what a query calls, what stands behind it, its parameters, and the view that documents it.
MACROS: Final = {
    "percentile": ("percentile", "wanted, q", "percentile('key', 0.99)"),
    "histogram": ("_histogram", "wanted, bins := 50", "histogram('key', 50)"),
    "by_rank": ("by_rank", "wanted", "by_rank('key')"),
    "by_sequence": ("by_sequence", "wanted", "by_sequence('key')"),
}
# What reads tables that are made when a query first names one of them.
_LATER: Final = {
    "_metrics": frozenset({"metrics", "keys", "evaluations"}),
    "_payload": frozenset(
        {"payload", "tensors", "masks", "scalars", "samples", "percentile", "histogram", "by_sequence"}
    ),
    "_pooled": frozenset({"percentile", "histogram", "by_sequence"}),
}
_THREAD: Final = 128 << 20  # bytes that one needs at least: fewer work where the limit is small
_ROWS: Final = 2048  # of a batch that is answered
# What DuckDB puts before messages of functions of ours.
_OURS: Final = re.compile(
    r"^Invalid Input Error: "
    r"(Python exception occurred while executing the UDF: (Query|Unanswered)Error: |(?=expected ))"
)
_WRONG: Final = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.NotImplementedException,
    duckdb.ParserException,
    duckdb.PermissionException,
)
_UNKNOWN: Final = re.compile(r"expected a recorded key, got '(.*)'")
_EXTENSION: Final = re.compile(r"required extension '(\w+)|exists in the (\w+) extension")
_MEANT: Final = re.compile(r'Did you mean "(\w+)"')
_LOCK: Final = """
set TimeZone = 'UTC';
set python_enable_replacements = false;
set enable_external_access = false;
set lock_configuration = true;
"""
_OUTDATED: Final = """
select table_name from duckdb_columns() where schema_name = 'log' and column_name = 'superseded'
"""
_SCHEMA: Final = """
with documented as (
    select table_name, column_name, comment from duckdb_columns() where schema_name = 'log'
), anywhere as (
    select column_name, arg_max(comment, (table_name = 'records')::int) as comment from documented
    where comment is not null group by all
)
select
    shown.table_name as view, shown.column_name as column, shown.data_type as type,
    coalesce(documented.comment, anywhere.comment) as comment
from duckdb_columns() as shown
left join documented using (table_name, column_name)
left join anywhere using (column_name)
where shown.schema_name = 'main' and shown.table_name in (select unnest(?))
order by contains(view, '('), view, shown.column_index
"""


class Anew:
    """Rows that are made anew for every scan: more than memory should hold at a time."""

    def __init__(self, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self._schema = schema
        self._batches = batches

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Begin a scan, by the Arrow PyCapsule interface."""
        reader = pa.RecordBatchReader.from_batches(self._schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)


class Database:
    """Views over registered tables. A table that is given as a function is made when a query needs it."""

    def __init__(
        self,
        tables: Mapping[str, pa.Table],
        later: Mapping[str, tuple[pa.Schema, Callable[[], pa.Table | Anew]]],
        *,
        several: bool,
        superseded: bool,
        memory: Memory,
    ) -> None:
        """Stand the views: with the column `run` for several runs, with superseded rows if wanted."""
        self._con = duckdb.connect(":memory:")
        # DuckDB lets queries read its own directory, so there is nothing else in it. Without one, what does
        # not fit into memory is an error, not a file somewhere.
        self._spill = mkdtemp(prefix="areal-metrics-", dir=memory.spill) if memory.spill else ""
        self._clear = finalize(self, rmtree, self._spill, ignore_errors=True) if self._spill else None
        self._con.execute("set temp_directory = ?", [self._spill])
        if memory.limit is not None:
            self._con.execute("set memory_limit = ?", [f"{memory.limit}B"])
            (threads,) = self._con.execute("select current_setting('threads')").fetchall()[0]
            # Of one thread alone, hash tables are in one piece, which does not spill.
            self._con.execute("set threads = ?", [max(2, min(threads, memory.limit // _THREAD))])
        self._later = {name: make for name, (_, make) in later.items()}
        for name, table in tables.items():
            self._con.register(name, table)
        for name, (schema, _) in later.items():
            self._con.register(name, schema.empty_table())
        self._stand(several=several, superseded=superseded)

    def _stand(self, *, several: bool, superseded: bool) -> None:
        self._create("_bits", unpacking.bits, ["BLOB", "BIGINT"], "BOOLEAN[]")
        self._create("_dense", unpacking.dense, ["DOUBLE[]", "BLOB", "BIGINT"], "DOUBLE[]")
        self._create("_quantile", unpacking.quantile, ["DOUBLE[]", "DOUBLE"], "DOUBLE")
        self._create("_counts", unpacking.counts, ["DOUBLE[]", "DOUBLE", "DOUBLE", "BIGINT"], "BIGINT[]")
        self._create("_edges", unpacking.edges, ["DOUBLE", "DOUBLE", "BIGINT"], "DOUBLE[]")
        of_sequence = (
            "STRUCT(sequence BIGINT, count BIGINT, avg DOUBLE, sum DOUBLE, min DOUBLE, max DOUBLE)[]"
        )
        takes = ["DOUBLE[]", "BIGINT[]", "BLOB", "BIGINT"]
        self._create("_sequences", unpacking.sequences, takes, of_sequence)
        self._con.execute(resources.files(__package__ or "").joinpath("views.sql").read_text("utf-8"))
        outdated = {view for (view,) in self._con.execute(_OUTDATED).fetchall()}
        columns = "*" if several else "* exclude (run)"
        for view in VIEWS:
            rows = "" if superseded or view not in outdated else " where not superseded"
            self._con.execute(f"create view main.{view} as select {columns} from log.{view}{rows}")  # noqa: S608
        for name, (behind, takes, view) in MACROS.items():
            rows = "" if superseded or view not in outdated else " where not superseded"
            given = takes.replace(" := 50", "")
            call = f"select {columns} from log.{behind}({given}){rows}"  # noqa: S608
            self._con.execute(f"create macro main.{name}({takes}) as table {call}")
            self._con.execute(f'create view main."{view}" as from {view.replace("key", "")}')
        self._con.execute(_LOCK)

    def _create(self, name: str, function: Callable[..., pa.Array], takes: list[Any], gives: str) -> None:
        vectors, nulls = PythonUDFType.ARROW, FunctionNullHandling.SPECIAL
        self._con.create_function(name, function, takes, gives, type=vectors, null_handling=nulls)

    def close(self) -> None:
        """Let go of the tables, and of what was spilled."""
        self._con.close()
        if self._clear is not None:
            self._clear()

    def sql(self, query: str) -> pa.Table:
        """Answer a query that only reads; QueryError for any other, and for what DuckDB refuses."""
        try:
            executed = reading(self._con, query)
            self._provide(query)
            with self._unchanged():
                return self._con.sql(executed).to_arrow_table()
        except duckdb.Error as error:
            raise _refusal(error, self._near(_explained(error))) from error

    def batches(self, query: str) -> pa.RecordBatchReader:
        """Answer a query of ours a batch at a time; QueryError as `sql`."""
        self._provide(query)
        try:
            reader = self._con.sql(query).to_arrow_reader(_ROWS)
            return pa.RecordBatchReader.from_batches(reader.schema, _explaining(reader))
        except duckdb.Error as error:
            raise _refusal(error, _explained(error)) from error

    def schema(self) -> pa.Table:
        """Return view, column, type and comment of every column."""
        views = [*VIEWS, *(view for *_, view in MACROS.values())]
        return self._con.sql(_SCHEMA, params=[views]).to_arrow_table()

    def _near(self, said: str) -> str:
        """Return a message; of a key that is not known with what is near it."""
        if (found := _UNKNOWN.fullmatch(said)) is None:
            return said
        known = self._con.sql("select distinct key::varchar as key from _records").fetchall()
        return unknown(found[1], (key for (key,) in known), "recorded key")

    @contextmanager
    def _unchanged(self) -> Generator[None]:
        """Let nothing that is executed meanwhile change the database, by DuckDB's own refusal."""
        self._con.execute("begin transaction read only")
        try:
            yield
        finally:
            self._con.execute("rollback")

    def _provide(self, query: str) -> None:
        """Make the tables of the views that a query names; that a word is no view's name costs only time."""
        named = words(query)
        for name in [name for name in self._later if named & _LATER[name]]:
            self._con.register(name, self._later[name]())
            del self._later[name]


def _explaining(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise _refusal(error, _explained(error)) from error


def _refusal(error: Exception, said: str) -> errors.QueryError:
    """Return what DuckDB's error is told as: a wrong query, or a proper one that this run does not answer."""
    text = str(error)
    wrong = isinstance(error, _WRONG) or "the UDF: QueryError: " in text or _EXTENSION.search(text)
    # A value that stands in no column is one that the query says, or makes of what it says.
    wrong = wrong or (isinstance(error, duckdb.ConversionException) and "source column" not in text)
    return errors.QueryError(said) if wrong else errors.UnansweredError(said)


def _explained(error: Exception) -> str:
    """Return DuckDB's message on one line; with the views, where it does not know one."""
    text = " ".join(str(error).split("\n\nLINE ")[0].split())
    text = _OURS.sub("", text)
    if found := _EXTENSION.search(text):
        missing = found[1] or found[2]
        return f"expected what DuckDB itself has, got a part of its extension {missing}: a session loads none"
    if isinstance(error, duckdb.OutOfMemoryException):
        said = text.split(" Possible solutions")[0]
        return (
            f"expected a query that fits into the memory limit, got {said}; reduce, percentiles and "
            "histogram read a part at a time, and SQL may spill to a directory that the session is given"
        )
    if isinstance(error, duckdb.CatalogException) and text.startswith("Catalog Error: Table with name"):
        meant = [name for name in _MEANT.findall(text) if name in VIEWS]
        near = f"; near: {meant[0]}" if meant else ""
        return f"{text.split('!')[0]}{near}; there are {', '.join(VIEWS)}"
    return text
