"""Tags: what else is known of numbers, by name, as JSON holds it, without secrets.

Read when given: nothing fails later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from .errors import RecordingTypeError
from .redaction import redact_sensitive_config


def as_json(given: Any) -> str:
    """Return tags as a JSON object, secrets replaced as those of a config; a RecordingTypeError for no JSON.

    One number of numpy or torch is that number. One that is not finite is a text ("nan", "inf", "-inf").
    """
    return _without_secrets(_dumped(given))


def plain_tags(given: Any) -> dict[str, Any]:
    """Return a copy of tags, as `as_json` reads them, with what may be a secret."""
    return json.loads(_dumped(given))


@lru_cache(maxsize=256)  # most are said again with every step
def _without_secrets(tags: str) -> str:
    return json.dumps(redact_sensitive_config(json.loads(tags)), sort_keys=True)


def _dumped(given: Any) -> str:
    if not isinstance(given, Mapping):
        raise RecordingTypeError(f"expected tags as a dict, got {type(given).__name__}")
    try:
        return json.dumps(_plain(given), sort_keys=True)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a value may raise anything when it is read
        raise RecordingTypeError(f"expected tags that JSON can hold, got {_shown(given)} ({error})") from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.encode(value).decode()  # a lone surrogate would fail every reader of the JSON
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, Mapping):
        return {_name(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) == 1 and not hasattr(value, "filled"):  # as masked ones have
        return _plain(value.item())
    raise TypeError(f"{type(value).__name__} is not JSON")


def _name(key: Any) -> str:
    plain = _plain(key)
    if isinstance(plain, (dict, list)):
        raise TypeError(f"a name of type {type(key).__name__} is not JSON")
    return plain if isinstance(plain, str) else json.dumps(plain)


def _shown(given: Any) -> str:
    try:
        return f"{given!r:.80}"
    except Exception:  # noqa: BLE001 - the mistake is told all the same
        return f"a {type(given).__name__}"
