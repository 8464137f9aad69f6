"""Which step a number of a commit stands at: that of the commit, or one that it was measured at itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .arrays import as_key, as_metric
from .errors import RecordingError, RecordingTypeError
from .tags import as_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESERVED = ("evaluation", "alert")  # the tags of evaluators and monitors are these, or begin so with a "/"
COUNT = "__count"  # ends the second name under which such a key is exported

Parts = list[dict[str, float]]


class Placement:
    """The keys drained since the last commit that were measured at a step of their own, as late ones are."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def add(self, steps: Mapping[str, int]) -> None:
        """Take over what a window says, by key."""
        self._steps |= steps

    def clear(self) -> None:
        """A commit has taken all."""
        self._steps = {}

    def of(self, step: int, parts: Sequence[Mapping[str, float]]) -> dict[int, Parts]:
        """Return the parts of a commit by step, its own first; there is a part for each at every step."""
        if not self._steps:
            return {step: [dict(part) for part in parts]}
        found: dict[int, Parts] = {step: [{} for _ in parts]}
        for i, part in enumerate(parts):
            for name, value in part.items():
                at = self._steps.get(name, self._steps.get(name.removesuffix(COUNT), step))
                if at not in found:
                    found[at] = [{} for _ in parts]
                found[at][i][name] = value
        return found


def checked(metrics: Any) -> tuple[dict[str, float], ...]:
    """Return the parts of a commit: names that can be written, numbers as `as_metric` keeps them."""
    expected = "expected metrics as a list of dicts, got"
    if not isinstance(metrics, (list, tuple)):
        raise RecordingTypeError(f"{expected} {type(metrics).__name__}")
    parts: list[dict[str, float]] = []
    for part in metrics:
        if not isinstance(part, dict):
            raise RecordingTypeError(f"{expected} one of {type(part).__name__}")
        for key in part:
            as_key(key, "metric name")
        parts.append({key: as_metric(value, key) for key, value in part.items()})
    return tuple(parts)


def as_tags(tags: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a caller's tags of a commit, as they are written; a RecordingError for those of evaluators."""
    plain: dict[str, Any] = {} if tags is None else json.loads(as_json(tags))
    for name in plain:
        if name.partition("/")[0] in RESERVED:
            raise RecordingError(f"expected no tags under {' or '.join(RESERVED)}, got {name!r}")
    return plain
