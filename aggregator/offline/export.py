"""Tables as files: Parquet, Arrow, CSV and JSON Lines.

A file is written beside its place and moved there when it is whole. Null is not NaN in any of them: CSV
leaves a null empty and writes `nan`, JSON Lines says null and "NaN".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa
from pyarrow import csv, ipc, parquet

from eventlog import as_output, errors, replacing

from .database import VIEWS
from .grouping import checked_bound
from .names import match, unknown
from .strict import rows_of, strict_json, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import IO

    from .database import Database

FORMATS: Final = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "csv": (".csv",),
    "jsonl": (".jsonl", ".ndjson"),
}
_AT_A_TIME: Final = 1000  # rows that become text at a time


class _Sink(Protocol):
    """What a file's format writes batches with."""

    def write_batch(self, batch: pa.RecordBatch) -> Any: ...
    def close(self) -> None: ...


def format_of(path: Path, name: str | None = None) -> str:
    """Return the format that a name or else the file's ending says; QueryError, naming all, for no such."""
    if name is not None:
        if name not in FORMATS:
            raise errors.QueryError(f"expected a format of {', '.join(FORMATS)}, got {name!r}")
        return name
    for known, endings in FORMATS.items():
        if path.suffix.lower() in endings:
            return known
    endings = ", ".join(ending for those in FORMATS.values() for ending in those)
    raise errors.QueryError(f"expected a file ending in {endings}, or a format, got {path}")


def part(
    database: Database, view: str, keys: str | Iterable[str] | None, since: int | None, until: int | None
) -> pa.RecordBatchReader:
    """Return some keys and steps (both included) of a view; QueryError where there is no such thing."""
    if view not in VIEWS:
        raise errors.QueryError(unknown(view, VIEWS, "view"))
    since, until = checked_bound("since", since), checked_bound("until", until)
    step = "global_step" if view == "commits" else "step"
    columns = database.sql(f"describe {view}")["column_name"].to_pylist()
    for name, value in (("key", keys), (step, since), (step, until)):
        if value is not None and name not in columns:
            raise errors.QueryError(f"expected a view with a column {name}, got {view!r}, which has none")
    tests = ["true"]
    if keys is not None:
        known = database.sql(f"select distinct key from {view} where key is not null")["key"].to_pylist()  # noqa: S608
        chosen = (key.replace("'", "''") for key in match(keys, known, f"key in {view}"))
        tests.append("key in ({})".format(", ".join(f"'{key}'" for key in chosen)))
    tests += [
        f"{step} {sign} {int(bound)}" for bound, sign in ((since, ">="), (until, "<=")) if bound is not None
    ]
    return database.batches(f"select * from {view} where {' and '.join(tests)}")  # noqa: S608


def write(reader: pa.RecordBatchReader, path: Path, form: str) -> int:
    """Write rows as they come; return how many. Nothing is left behind, and nothing replaced, on an error."""
    make: Callable[[IO[bytes], pa.Schema], _Sink] = {
        "parquet": _parquet,
        "arrow": ipc.new_file,
        "csv": _Csv,
        "jsonl": _JsonLines,
    }[form]
    rows = 0
    with replacing(as_output(path)) as unfinished, unfinished.open("wb") as file:
        sink = make(file, reader.schema)
        for batch in reader:
            sink.write_batch(batch)
            rows += batch.num_rows
        sink.close()
    return rows


def _parquet(file: IO[bytes], schema: pa.Schema) -> _Sink:
    return parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True)


class _Csv:
    """CSV; what has no place in a cell (lists, bytes) is JSON in it."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._nested = [i for i, field in enumerate(schema) if _is_nested(field.type)]
        for i in self._nested:
            schema = schema.set(i, pa.field(schema.field(i).name, pa.string()))
        self._schema = schema
        self._writer = csv.CSVWriter(file, schema)

    def write_batch(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, _AT_A_TIME if self._nested else max(1, batch.num_rows)):
            part = batch.slice(start, _AT_A_TIME) if self._nested else batch
            columns = list(part.columns)
            for i in self._nested:
                texts = [None if value is None else strict_json(value) for value in values_of(columns[i])]
                columns[i] = pa.array(texts, pa.string())
            self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _is_nested(kind: pa.DataType) -> bool:
    return pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


class _JsonLines:
    """One object a line."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        del schema
        self._file = file

    def write_batch(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, _AT_A_TIME):
            rows = rows_of(batch.slice(start, _AT_A_TIME))
            self._file.write("".join(f"{strict_json(row)}\n" for row in rows).encode())

    def close(self) -> None:
        """Nothing waits."""
