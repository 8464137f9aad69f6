"""The SQL side of a session: an in-memory database whose views read the runs, and nothing else.

There is no database file, so there is no lock: a run can be read while it is written, by as many as like.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import duckdb
from duckdb import StatementType
from duckdb.func import FunctionNullHandling, PythonUDFType

from eventlog import errors

from . import unpacking

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

VIEWS: Final = (
    "records", "exports", "windows", "commits", "attempts", "producers", "metrics", "keys", "evaluations",
    "payload", "tensors", "masks", "scalars", "samples",
)  # fmt: skip
# The views over tables that are loaded when a query first names one of them.
_LATER: Final = {
    "_metrics": frozenset({"metrics", "keys", "evaluations"}),
    "_payload": frozenset({"payload", "tensors", "masks", "scalars", "samples"}),
}
_READING: Final = (StatementType.SELECT, StatementType.MULTI)  # MULTI: a PIVOT that finds its own columns
_WORD: Final = re.compile(r"\w+")
_TEXT: Final = re.compile(r"'(?:[^']|'')*'")
_EXPLAIN: Final = re.compile(r"\s*explain\s+(analyze\s+|\([^)]*\)\s*)*", re.IGNORECASE)
_MEANT: Final = re.compile(r'Did you mean "(\w+)"')
_LOCK: Final = """
set TimeZone = 'UTC';
set temp_directory = '';
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
order by view, shown.column_index
"""


class Database:
    """Views over registered tables. A table that is given as a function is made when a query needs it."""

    def __init__(
        self,
        tables: Mapping[str, pa.Table],
        later: Mapping[str, tuple[pa.Schema, Callable[[], pa.Table]]],
        *,
        several: bool,
        superseded: bool,
    ) -> None:
        """Stand the views: with the column `run` for several runs, with superseded rows if wanted."""
        self._con = duckdb.connect(":memory:")
        self._later = {name: make for name, (_, make) in later.items()}
        for name, table in tables.items():
            self._con.register(name, table)
        for name, (schema, _) in later.items():
            self._con.register(name, schema.empty_table())
        self._stand(several=several, superseded=superseded)

    def _stand(self, *, several: bool, superseded: bool) -> None:
        self._create("_bits", unpacking.bits, ["BLOB", "BIGINT"], "BOOLEAN[]")
        self._create("_dense", unpacking.dense, ["DOUBLE[]", "BLOB", "BIGINT"], "DOUBLE[]")
        self._con.execute(resources.files(__package__ or "").joinpath("views.sql").read_text("utf-8"))
        outdated = {view for (view,) in self._con.execute(_OUTDATED).fetchall()}
        for view in VIEWS:
            columns = "*" if several else "* exclude (run)"
            rows = "" if superseded or view not in outdated else " where not superseded"
            self._con.execute(f"create view main.{view} as select {columns} from log.{view}{rows}")  # noqa: S608
        self._con.execute(_LOCK)

    def _create(self, name: str, function: Callable[..., pa.Array], takes: list[Any], gives: str) -> None:
        vectors, nulls = PythonUDFType.ARROW, FunctionNullHandling.SPECIAL
        self._con.create_function(name, function, takes, gives, type=vectors, null_handling=nulls)

    def close(self) -> None:
        """Let go of the tables."""
        self._con.close()

    def sql(self, query: str) -> pa.Table:
        """Answer a query that only reads; QueryError for any other, and for what DuckDB refuses."""
        self._check(query)
        self._provide(query)
        try:
            return self._con.sql(query).to_arrow_table()
        except duckdb.Error as error:
            raise errors.QueryError(_explained(error)) from error

    def schema(self) -> pa.Table:
        """Return view, column, type and comment of every column."""
        return self._con.sql(_SCHEMA, params=[list(VIEWS)]).to_arrow_table()

    def _check(self, query: str) -> None:
        try:
            statements = self._con.extract_statements(query)
        except duckdb.Error as error:
            raise errors.QueryError(_explained(error)) from error
        if len(statements) != 1:
            raise errors.QueryError(f"expected one statement, got {len(statements)}")
        kind = statements[0].type
        if kind == StatementType.EXPLAIN:
            explained = _EXPLAIN.sub("", query, count=1)
            if explained == query:
                raise errors.QueryError(
                    "expected EXPLAIN at the beginning of the query, got something before it"
                )
            self._check(explained)
        elif kind not in _READING:
            raise errors.QueryError(
                "expected a SELECT, WITH, DESCRIBE, SUMMARIZE, PIVOT or EXPLAIN statement, "
                f"got {kind.name}: a session only reads"
            )

    def _provide(self, query: str) -> None:
        """Make the tables of the views that a query names; that a word is no view's name costs only time."""
        words = set(_WORD.findall(_TEXT.sub("", query.lower())))
        for name in [name for name in self._later if words & _LATER[name]]:
            self._con.register(name, self._later[name]())
            del self._later[name]


def _explained(error: duckdb.Error) -> str:
    """Return DuckDB's message on one line; with the views, where it does not know one."""
    text = " ".join(str(error).split("\n\nLINE ")[0].split())
    if isinstance(error, duckdb.CatalogException) and text.startswith("Catalog Error: Table with name"):
        meant = [name for name in _MEANT.findall(text) if name in VIEWS]
        near = f"; near: {meant[0]}" if meant else ""
        return f"{text.split('!')[0]}{near}; there are {', '.join(VIEWS)}"
    return text
