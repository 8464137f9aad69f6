"""Values as strict JSON (RFC 8259) has them."""

from __future__ import annotations

import base64
import json
import math
from datetime import UTC, datetime
from typing import Any


def strict_json(value: Any, *, ascii_only: bool = False, indent: int | None = None) -> str:
    """Return a value as JSON.

    What JSON has no form for is a string: "NaN", "Infinity" and "-Infinity" (null is left to mean *absent*),
    times as ISO 8601 in UTC, bytes in base64, anything else as `str` gives it.
    """
    return json.dumps(_strict(value), ensure_ascii=ascii_only, allow_nan=False, indent=indent)


def _strict(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else _not_finite(value)
        case dict():
            return {str(key): _strict(item) for key, item in value.items()}
        case list() | tuple():
            return [_strict(item) for item in value]
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            utc = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
            return utc.isoformat(timespec="microseconds")
        case _:
            return str(value)


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
