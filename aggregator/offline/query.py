"""A query as a session executes it: one statement that reads, in parentheses, where nothing else may stand.

What is executed is what was checked, and DuckDB itself refuses the rest: in parentheses stands no statement
that changes anything, and no COPY or INSERT in a WITH clause either. Of the functions that stand for a table,
some read files, change settings, or execute what a text says: those that do neither are listed here.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import duckdb

from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WORD: Final = re.compile(r"[^\W_]\w*")
_TEXT: Final = re.compile(r"'\w*'\s*")  # one that may name a view: DuckDB reads from 'metrics'
# A PIVOT that finds its values runs its WITH clauses beforehand, outside of any parentheses.
_COPY: Final = re.compile(r"\bcopy\b", re.IGNORECASE | re.ASCII)
# Of DuckDB's functions that stand for a table those that a query may call; `histogram` is the session's own.
_CALLED: Final = frozenset(
    {
        "duckdb_columns", "duckdb_databases", "duckdb_functions", "duckdb_keywords", "duckdb_memory",
        "duckdb_schemas", "duckdb_settings", "duckdb_tables", "duckdb_temporary_files", "duckdb_types",
        "duckdb_views", "generate_series", "histogram", "icu_calendar_names", "json_each", "json_tree",
        "pg_timezone_names", "pragma_table_info", "pragma_version", "range", "repeat", "repeat_row",
        "summary", "unnest",
    }
)  # fmt: skip
_NAME: Final = re.compile(r'"((?:[^"]|"")+)"|(\w+)')
_VISIBLE: Final = re.compile(r"[!-~]|\w")  # DuckDB has tokens of spaces, of those that are not ASCII
_TABLES: Final = """
select function_name from duckdb_functions() where function_type in ('table', 'table_macro')
"""
_OPTION: Final = re.compile(r"\w+|[(,)]")
_OPTIONS: Final = frozenset({"analyze", "format", "verbose"})


class _Token(NamedTuple):
    start: int  # in bytes, as DuckDB counts
    stop: int
    text: str
    kind: Any


def words(query: str) -> set[str]:
    """Return the words of a query that may name a view or function, in lower case."""
    found = set[str]()
    for _, _, text, kind in _tokens(query):
        if kind != duckdb.token_type.string_const or _TEXT.fullmatch(text):
            found.update(_WORD.findall(text.lower()))
    return found


def reading(con: duckdb.DuckDBPyConnection, query: str) -> str:
    """Return what to execute for a query; QueryError unless it is one statement, and only reads.

    duckdb.ParserException for what is none at all.
    """
    if not _is_text(query):
        raise errors.QueryError(f"expected a query as a text, got {query!r}")
    kind = _one(con, query)
    if kind == duckdb.StatementType.MULTI and _COPY.search(query):
        raise errors.QueryError(
            "expected a PIVOT without the word COPY, which could write a file, got one: list its values, "
            "as in ON key IN ('a', 'b')"
        )
    tokens = [token for token in _tokens(query) if token.kind != duckdb.token_type.comment]
    options = _explain(tokens)
    inner = tokens[len(options) :]
    while inner and not inner[-1].text.strip(" \t\r\n;"):
        inner.pop()
    asked = query.encode()[inner[0].start : inner[-1].stop].decode(errors="replace") if inner else ""
    _one(con, asked)
    executed = f"{' '.join(token.text.strip() for token in options)} from (\n{asked}\n)"
    try:
        _one(con, executed)
    except duckdb.ParserException:
        raise errors.QueryError(
            "expected a SELECT, WITH, DESCRIBE, SUMMARIZE, PIVOT or EXPLAIN statement, "
            f"got {inner[0].text.strip().upper()}: a session only reads"
        ) from None
    if refused := sorted(_called(tokens) & _refused()):
        raise errors.QueryError(
            f"expected a query of the views, got a call of {refused[0]}: "
            "a session reads its runs and nothing besides"
        )
    return executed


def _is_text(query: Any) -> bool:
    try:
        query.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return isinstance(query, str)


def _one(con: duckdb.DuckDBPyConnection, query: str) -> duckdb.StatementType:
    found = con.extract_statements(query)
    if len(found) != 1:
        raise errors.QueryError(f"expected one statement, got {len(found)}")
    return found[0].type


def _called(tokens: Sequence[_Token]) -> set[str]:
    """Return the names before opening parentheses, in lower case: functions are among them."""
    found = set[str]()
    for name, opening in pairwise(token.text for token in tokens if _VISIBLE.search(token.text)):
        if opening.startswith("(") and (said := _NAME.findall(name)):
            quoted, plain = said[-1]  # of a token that DuckDB splits at spaces which are not ASCII, the last
            found.add((quoted.replace('""', '"') or plain).lower())
    return found


@cache
def _refused() -> frozenset[str]:
    """Return the names of DuckDB's functions that stand for a table and may not be called."""
    with duckdb.connect(":memory:") as con:
        return frozenset(name.lower() for (name,) in con.execute(_TABLES).fetchall()) - _CALLED


def _explain(tokens: Sequence[_Token]) -> Sequence[_Token]:
    """Return the tokens of EXPLAIN and its options, before what is explained; nothing, if it is none."""
    said = [token.text.strip().lower() for token in tokens]
    if said[:1] != ["explain"]:
        return []
    end = 2 if said[1:2] == ["analyze"] else 1
    if said[end : end + 1] == ["("] and said[end + 1 : end + 2] and said[end + 1] in _OPTIONS and ")" in said:
        end = said.index(")") + 1
    return tokens[:end] if all(_OPTION.fullmatch(word) for word in said[:end]) else []


def _tokens(query: str) -> Iterator[_Token]:
    data = query.encode()
    for (start, kind), (stop, _) in pairwise([*duckdb.tokenize(query), (len(data), None)]):
        yield _Token(start, stop, data[start:stop].decode(errors="replace"), kind)
