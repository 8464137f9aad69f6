"""Columns of another minor version as those of this one: what it lacks is null, what is new is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from .schema import SCHEMAS

if TYPE_CHECKING:
    from .schema import Stream


def misfit_of(written: pa.Schema, stream: Stream) -> str:
    """Say which column of another minor version has a type that this one cannot take; "" when none has."""
    for field in SCHEMAS[stream]:
        at = written.get_field_index(field.name)
        if at >= 0 and (got := written.field(at).type) != field.type:
            return f"expected column {field.name} as {field.type}, got {got}"
    return ""


def conformed(batch: pa.RecordBatch, stream: Stream, columns: tuple[str, ...] | None) -> pa.RecordBatch:
    """Return a batch with all or some of the columns of this version."""
    fields = [field for field in SCHEMAS[stream] if columns is None or field.name in columns]
    names = set(batch.schema.names)
    found = [batch[f.name] if f.name in names else pa.nulls(batch.num_rows, f.type) for f in fields]
    return pa.RecordBatch.from_arrays(found, schema=pa.schema(fields))


def as_written(batch: pa.RecordBatch, written: pa.Schema) -> tuple[pa.RecordBatch, list[str]]:
    """Return rows of this version with the columns of another one, and which of those are null for want."""
    names = set(batch.schema.names)
    found = [batch[f.name] if f.name in names else pa.nulls(batch.num_rows, f.type) for f in written]
    lacking = [field.name for field in written if field.name not in names]
    return pa.RecordBatch.from_arrays(found, schema=written.remove_metadata()), lacking
