"""Values as strict JSON (RFC 8259) has them."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

_FARTHEST: Final = ((1 << 63) - 1, (1 << 31) - 1)  # DuckDB's infinity, of times and of dates


def strict_json(value: Any, *, ascii_only: bool = False, indent: int | None = None) -> str:
    """Return a value as JSON.

    What JSON has no form for is a string: "NaN", "Infinity" and "-Infinity" (null is left to mean *absent*),
    times as ISO 8601 in UTC, intervals as its durations, bytes in base64, anything else as `str` gives it.
    """
    return json.dumps(_strict(value), ensure_ascii=ascii_only, allow_nan=False, indent=indent)


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as Python's values; a time that Python has none for is a string."""
    columns = {
        name: values_of(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def values_of(column: pa.Array) -> list[Any]:
    """Return a column as Python's values; an interval, and a time that Python has none for, is a string."""
    if pa.types.is_interval(column.type):
        return [None if value is None else _duration(value) for value in column.to_pylist()]
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # pyarrow's own errors are ValueErrors
        return list(map(_value_of, column))


def _value_of(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        pass
    if isinstance(scalar, pa.StructScalar):
        return {name: _value_of(item) for name, item in scalar.items()}
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar | pa.MapScalar):
        return list(map(_value_of, scalar.values))
    number = getattr(scalar, "value", None)
    if isinstance(number, int) and abs(number) in _FARTHEST:
        return "Infinity" if number > 0 else "-Infinity"
    unit: Any = "D" if isinstance(scalar, pa.Date32Scalar) else getattr(scalar.type, "unit", "us")
    return str(scalar if number is None else np.datetime64(number, unit))


def _strict(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else _not_finite(value)
        case dict():
            return {str(key): _strict(item) for key, item in value.items()}
        case pa.MonthDayNano():
            return _duration(value)
        case list() | tuple():
            return [_strict(item) for item in value]
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            utc = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
            return utc.isoformat(timespec="microseconds")
        case _:
            return str(value)


def _duration(value: pa.MonthDayNano) -> str:
    """Return an interval as ISO 8601 has durations: P1M2DT0.5S."""
    seconds, nanos = divmod(abs(value.nanoseconds), 10**9)
    fraction = f".{nanos:09}".rstrip("0") if nanos else ""
    sign = "-" if value.nanoseconds < 0 else ""
    return f"P{value.months}M{value.days}DT{sign}{seconds}{fraction}S"


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
