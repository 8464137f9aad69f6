"""Hypothesis strategies for the programs of `tests/reference.py`: whatever ranks may record and export.

Only what the contract allows is drawn: ranks agree on what a key is (but for copies that are none), and every
key's own groups fit into the groups of an export.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from eventlog import Kind, ReduceType, Spread
from tests.reference import Call, Export, Key, Oracle, Program, Step, carried_by

TRACKERS = ["", "", "rollout", "eval-rollout"]
SCOPES = ["", "", "a/", "a/b/"]
SHAPES = [(1,), (3,), (2, 3), (2, 2, 2), (), (1, 300)]
FAMILIES = [Kind.DENOMINATOR, Kind.DENOMINATOR, Kind.DENOMINATOR, Kind.SCALAR, Kind.COUNTER, Kind.TIMING]
OF_TENSORS = [each for each in ReduceType if each is not ReduceType.SCALAR]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0]
NUMBERS = st.integers(-128, 128).map(float)  # what bfloat16 holds exactly
FLOATS = {
    "float32": NUMBERS | st.floats(-1e6, 1e6, width=32),
    "float64": NUMBERS | st.floats(-1e6, 1e6),
    "float16": NUMBERS | st.floats(-1000, 1000, width=16),
    "bfloat16": NUMBERS,
}
FORMS = ["plain", "plain", "strided", "transposed", "grad"]
COUNTS = st.integers(-3, 3) | st.sampled_from([16_777_217, 2**53 + 1, -(2**59)])
SCALARS = NUMBERS | st.floats(-1e6, 1e6) | st.sampled_from([30_565_379.0, *SPECIAL])
TIMES = st.integers(0, 4096).map(lambda ticks: ticks / 1024)


def mostly(value: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Draw a value more often than the others; shrink to it."""
    return st.sampled_from([value, value, value, *others])


@st.composite
def partitions(draw: Callable[..., Any], ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Draw groups that lie side by side and hold all the ranks."""
    places = [draw(st.integers(0, len(ranks) - 1)) for _ in ranks]
    groups = [tuple(rank for rank, at in zip(ranks, places, strict=True) if at == place) for place in places]
    return tuple(dict.fromkeys(groups))


@st.composite
def vocabularies(draw: Callable[..., Any], ranks: tuple[int, ...]) -> tuple[Key, ...]:
    """Draw the keys of a program: masks and the stats over them, scalars, counters, timings."""
    own = draw(partitions(ranks))
    keys: list[Key] = []

    def new(prefix: str, kind: Kind, tracker: str, spread: Spread, **what: Any) -> Key:
        groups = draw(mostly((), own))
        keys.append(Key(f"{prefix}k{len(keys)}", kind, tracker, spread=spread, groups=groups, **what))
        return keys[-1]

    for _ in range(draw(st.integers(1, 4))):
        tracker = draw(st.sampled_from(TRACKERS))
        prefix = f"{tracker}/{draw(st.sampled_from(SCOPES))}".lstrip("/")
        spread = draw(mostly(Spread.SHARDS, Spread.SHARES, Spread.REPLICATED))
        kind = draw(st.sampled_from(FAMILIES))
        if kind is Kind.TIMING:
            keys.append(Key(f"timeperf/k{draw(st.integers(0, 1))}", kind, tracker))
            continue
        first = new(prefix, kind, tracker, spread)
        for _ in range(draw(st.integers(1, 3)) if kind is Kind.DENOMINATOR else 0):
            reduce_type = draw(st.sampled_from(OF_TENSORS))
            new(prefix, Kind.STAT, tracker, spread, reduce_type=reduce_type, denominator=first.name)
    return tuple(dict.fromkeys(keys))


@st.composite
def values(draw: Callable[..., Any], key: Key, mask: Any) -> Call:
    """Draw a recording call; `mask` is the one that a stat is bound to."""
    if key.kind is Kind.DENOMINATOR:
        bits = draw(st.lists(st.booleans(), min_size=1, max_size=6))
        return Call(key, np.resize(np.array(bits), draw(st.sampled_from(SHAPES))))
    if key.kind is not Kind.STAT:
        return Call(key, draw({Kind.SCALAR: SCALARS, Kind.COUNTER: COUNTS, Kind.TIMING: TIMES}[key.kind]))
    dtype = draw(st.sampled_from(list(FLOATS)))
    floats = draw(mostly(FLOATS[dtype], FLOATS[dtype] | st.sampled_from(SPECIAL)))
    numbers = np.resize(np.array(draw(st.lists(floats, min_size=1, max_size=6)), np.float64), mask.shape)
    if draw(st.booleans()):
        numbers = np.where(mask, numbers, np.nan)  # padding holds anything
    forms = FORMS if dtype == "bfloat16" else [*FORMS, "numpy"]
    return Call(key, numbers, dtype, draw(st.sampled_from(forms)))


@st.composite
def calls(draw: Callable[..., Any], keys: list[Key], oracle: Oracle, rank: int) -> list[Call]:
    """Draw what a rank records in a step: some of the keys, some of them several times, or nothing."""
    made: list[Call] = []

    def make(key: Key) -> None:
        _, mask = oracle.masks[rank].get(key.denominator, (key, None))
        made.append(draw(values(key, mask)))
        oracle.record(rank, made[-1])

    by_name = {key.name: key for key in keys}
    for key in draw(st.lists(st.sampled_from(keys), max_size=8)) if keys else ():
        if key.kind is Kind.STAT and (key.denominator not in oracle.masks[rank] or draw(mostly(False, True))):
            make(by_name[key.denominator])
        make(key)
    return made


@st.composite
def exports(draw: Callable[..., Any], ranks: tuple[int, ...], keys: tuple[Key, ...]) -> Export:
    """Draw an export whose groups can take the keys' own groups."""
    side_by_side = st.sampled_from([(ranks,), draw(partitions(ranks)), ()])
    export = Export(reduce_groups=draw(side_by_side), sync_groups=draw(side_by_side))
    if any(len(g) > 1 and not carried_by(key, g, export) for key in keys for g in key.groups):
        export = replace(export, sync_groups=(ranks,))
    what = draw(st.sampled_from(["all", "all", "all", "all", "tracker", "key"]))
    only = draw(st.sampled_from(keys))
    if what == "key" and only.kind is not Kind.TIMING:
        export = replace(export, tracker=only.tracker, key=only.name)
    elif what == "tracker":
        export = replace(export, tracker=only.tracker)
    given_by = tuple(rank for rank in ranks if draw(st.booleans())) if draw(mostly(False, True)) else ()
    return replace(export, reset=draw(mostly(True, False)), step_given_by=given_by)


@st.composite
def programs(draw: Callable[..., Any]) -> Program:
    """Draw a program: ranks, what their keys are, and what each of them records between the exports."""
    ranks = draw(st.sampled_from([(0, 1), (0, 1), (0, 1, 2, 3), (0, 1, 2), (1, 3), (2,)]))
    keys = draw(vocabularies(ranks))
    copied = [key for key in keys if key.spread is Spread.REPLICATED]
    others = [key for key in keys if key.spread is not Spread.REPLICATED]
    holders = draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True))
    oracle = Oracle(ranks)
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 3))):
        copies = draw(calls(copied, oracle, holders[0]))
        of_rank: dict[int, list[Call]] = {}
        for rank in ranks:
            of_rank[rank] = list(copies) if rank in holders else []
            if of_rank[rank] and draw(mostly(False, False, False, True)):
                of_rank[rank][-1] = _spoiled(copies[-1])
            of_rank[rank] += draw(calls(others, oracle, rank))
        steps.append(Step(of_rank, draw(st.lists(exports(ranks, keys), min_size=1, max_size=2))))
        for export in steps[-1].exports:
            oracle.export(export)
    return Program(ranks, keys, steps, summed=draw(mostly(False, True)))


def _spoiled(copy: Call) -> Call:
    """Return a copy that is no copy."""
    if copy.key.kind is Kind.DENOMINATOR:
        return replace(copy, value=~copy.value)
    return replace(copy, value=copy.value + 1)
