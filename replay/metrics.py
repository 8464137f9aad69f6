"""The data of a commit: what a caller hands over, and what of it trackers are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import eventlog
from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Container, Iterator


def flatten(data: Any) -> dict[str, float]:
    """Return nested dicts of numbers as one, their names joined with "/".

    RecordingTypeError names a key that is no text or a value that is no number; RecordingError a name that
    two spellings of one path would share.
    """
    if not isinstance(data, Mapping):
        raise errors.RecordingTypeError(
            f"expected a dict of metrics, or a list of dicts, got {type(data).__name__}"
        )
    flat: dict[str, float] = {}
    for key, value in _leaves("", data):
        if key in flat:
            raise errors.RecordingError(
                f"expected one value for {key!r}, got two: a nested dict and a name with '/'"
            )
        flat[key] = eventlog.as_metric(value, key)
    return flat


def _leaves(prefix: str, data: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    what = f"metric name below {prefix.rstrip('/')!r}" if prefix else "metric name"
    for key, value in data.items():
        eventlog.as_key(key, what)
        if isinstance(value, Mapping):
            yield from _leaves(f"{prefix}{key}/", value)
        else:
            yield f"{prefix}{key}", value


def without_counts(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without the tracker's own counts: `k__count` where `k` is there too."""
    return {key: value for key, value in metrics.items() if not is_count(key, metrics)}


def is_count(key: str, names: Container[str]) -> bool:
    """Whether a key among `names` is the tracker's own count of another."""
    return key.endswith("__count") and key.removesuffix("__count") in names
