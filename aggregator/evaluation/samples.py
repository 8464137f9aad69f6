"""Samples and their ids: which rank evaluates which, so that each is evaluated once.

A sample is anything; its id is `sample["id"]` or `sample.id`, or what a function says. Nothing is ever
grouped by a sample's content: the same text may come with another image. An integer (of numpy or torch too)
is its digits as text; the integer 1 and the text "1" in one evaluation are refused: nobody could tell them
apart afterwards.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from eventlog import as_key, errors, plain_tags

__all__ = ["Field", "check_unambiguous", "deal", "id_of", "ids_of", "is_integer", "tags_of"]

Field = str | Callable[[Any], Any]
"""Where something of a sample is found: the name of an item or attribute, or a function of the sample."""

_MISSING = object()


def id_of(sample: Any, field: Field = "id") -> str:
    """Return a sample's id as text; an EvaluationError where there is none (a text or an integer)."""
    return str(_key_of(sample, field))


def ids_of(samples: Iterable[Any], field: Field = "id") -> dict[str, Any]:
    """Return samples by id, in their order; of repeated ones the first. 1 and "1" are an EvaluationError."""
    found: dict[str, Any] = {}
    integers: set[str] = set()
    texts: set[str] = set()
    for sample in samples:
        key = _key_of(sample, field)
        found.setdefault(str(key), sample)
        (integers if isinstance(key, int) else texts).add(str(key))
    check_unambiguous(integers, texts)
    return found


def check_unambiguous(integers: AbstractSet[str], texts: AbstractSet[str]) -> None:
    """Raise an EvaluationError for an id that is an integer here and a text there."""
    if both := sorted(integers & texts):
        raise errors.EvaluationError(
            f"expected ids that differ as texts, got the integer {both[0]} and the text {both[0]!r}"
        )


def is_integer(sample: Any, field: Field = "id") -> bool:
    """Whether a sample's id is an integer, not a text."""
    return isinstance(_key_of(sample, field), int)


def _key_of(sample: Any, field: Field) -> str | int:
    found = _get(sample, field)
    if isinstance(found, str) and found:
        as_key(found, "sample id")  # refuses what the log cannot hold
        return str.__str__(found)  # plain: it is told to the other ranks
    if (number := _integer(found)) is not None:
        return number
    got = "none" if found is _MISSING else repr(found)
    where = repr(field) if isinstance(field, str) else "the given function"
    raise errors.EvaluationError(
        f"expected an id (a text or an integer) by {where} for every sample, got {got} for {sample!r:.80}"
    )


def _integer(found: Any) -> int | None:
    """Return an integer of Python, numpy or torch (one number, of no dimension); None of anything else."""
    if "bool" in str(getattr(found, "dtype", type(found).__name__)) or getattr(found, "ndim", 0):
        return None
    try:
        return operator.index(found)
    except TypeError:
        return None


def tags_of(sample: Any, field: Field = "tags") -> dict[str, Any]:
    """Return what else is known of a sample, by name; {} where it says nothing."""
    found = _get(sample, field)
    if found is _MISSING or found is None:
        return {}
    try:
        return plain_tags(found)  # it is told to the other ranks
    except errors.RecordingError:
        raise errors.EvaluationError(
            f"expected tags by name, as JSON takes them, got {found!r:.80} for {sample!r:.80}"
        ) from None


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
