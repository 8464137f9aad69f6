"""Samples and their ids: which rank evaluates which, so that each is evaluated once.

A sample is anything; its id is `sample["id"]` or `sample.id`, or what a function says. Nothing is ever
grouped by a sample's content: the same text may come with another image.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eventlog import errors

__all__ = ["Field", "deal", "id_of", "ids_of", "tags_of"]

Field = str | Callable[[Any], Any]
"""Where something of a sample is found: the name of an item or attribute, or a function of the sample."""

_MISSING = object()


def id_of(sample: Any, field: Field = "id") -> str:
    """Return a sample's id as text; an EvaluationError where there is none (a text or an integer)."""
    found = _get(sample, field)
    if isinstance(found, int) and not isinstance(found, bool):
        return str(found)
    if isinstance(found, str) and found:
        return found
    got = "none" if found is _MISSING else repr(found)
    where = repr(field) if isinstance(field, str) else "the given function"
    raise errors.EvaluationError(
        f"expected an id (a text or an integer) by {where} for every sample, got {got} for {sample!r:.80}"
    )


def ids_of(samples: Iterable[Any], field: Field = "id") -> dict[str, Any]:
    """Return samples by id, in their order; of repeated ones the first."""
    found: dict[str, Any] = {}
    for sample in samples:
        found.setdefault(id_of(sample, field), sample)
    return found


def tags_of(sample: Any, field: Field = "tags") -> dict[str, Any]:
    """Return what else is known of a sample, by name; {} where it says nothing."""
    found = _get(sample, field)
    if found is _MISSING or found is None:
        return {}
    try:
        tags = dict(found)
        json.dumps(tags, sort_keys=True)
    except (TypeError, ValueError):
        raise errors.EvaluationError(
            f"expected tags by name, as JSON takes them, got {found!r:.80} for {sample!r:.80}"
        ) from None
    return tags


def _get(sample: Any, field: Field) -> Any:
    if not isinstance(field, str):
        return field(sample)
    if isinstance(sample, Mapping):
        return sample.get(field, _MISSING)
    return getattr(sample, field, _MISSING)


def deal(held: Sequence[Sequence[str]]) -> list[list[str]]:
    """Deal ids out to ranks: each to one rank that holds it, the one with the least so far; pure.

    `held` are the ids each rank holds, in any order, with or without overlap; all of them by all ranks comes
    to every n-th of the sorted ids. Every rank that knows `held` knows who evaluates what.
    """
    holders: dict[str, list[int]] = {}
    for rank, ids in enumerate(held):
        for each in dict.fromkeys(ids):
            holders.setdefault(each, []).append(rank)
    dealt: list[list[str]] = [[] for _ in held]
    order = sorted(holders, key=lambda each: (len(holders[each]), each))  # those with the least choice first
    free = [each for each in order if len(holders[each]) == len(held)]
    for each in order[: len(order) - len(free)]:
        dealt[min(holders[each], key=lambda rank: (len(dealt[rank]), rank))].append(each)
    loads = [(len(own), rank) for rank, own in enumerate(dealt)]
    heapq.heapify(loads)
    for each in free:
        load, rank = loads[0]
        dealt[rank].append(each)
        heapq.heapreplace(loads, (load + 1, rank))
    return dealt
