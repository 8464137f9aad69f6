"""Random programs for `tests/reference.py`, each from a seed; and how a failing one is made smaller.

Only what the contract allows is made: ranks agree on what a key is (but for copies that are none), and every
key's own groups fit into the groups of an export.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from eventlog import Kind, ReduceType, Spread
from tests.reference import Call, Export, Key, Oracle, Program, Ranks, Step, carried_by

RANKS = [(0, 1), (0, 1), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2), (1, 3), (2,)]
TRACKERS = ["", "", "rollout", "eval-rollout"]
SCOPES = ["", "", "a/", "a/b/"]
FAMILIES = [Kind.DENOMINATOR] * 4 + [Kind.SCALAR, Kind.COUNTER, Kind.TIMING]
OF_SHARES = [ReduceType.AVG_MIN_MAX, ReduceType.AVG, ReduceType.SUM]
OF_TENSORS = [*OF_SHARES, ReduceType.MIN, ReduceType.MAX]
QUANTILES = [(), (), (0.5,), (0.0, 0.25, 0.999)]
SHAPES = [(1,), (3,), (2, 3), (2, 2, 2), (), (1, 300)]
FORMS = ["plain", "plain", "strided", "transposed", "grad", "numpy"]
SPECIAL = [math.nan, math.inf, -math.inf, -0.0]
EXACT_COUNTS = [16_777_217, 2**53 + 1, -(2**59)]  # what float32 and float64 cannot add
NUMBERS: dict[str, Callable[[Random], float]] = {
    "float64": lambda rng: rng.uniform(-1e6, 1e6),
    "float32": lambda rng: float(np.float32(rng.uniform(-1e6, 1e6))),
    "float16": lambda rng: float(np.float16(rng.uniform(-1000, 1000))),
    "bfloat16": lambda rng: float(rng.randint(-128, 128)),  # these it holds exactly
}


def program(seed: int) -> Program:
    """Make a program: ranks, what their keys are, and what each of them records between the exports."""
    rng = Random(seed)
    ranks = rng.choice(RANKS)
    keys = _keys(rng, ranks)
    copied = [key for key in keys if key.spread is Spread.REPLICATED]
    others = [key for key in keys if key.spread is not Spread.REPLICATED]
    holders = rng.sample(ranks, rng.choice([len(ranks), len(ranks), rng.randint(1, len(ranks))]))
    oracle = Oracle(ranks)
    steps: list[Step] = []
    for _ in range(rng.randint(1, 3)):
        copies = _calls(rng, copied, oracle, holders[0])
        calls = {rank: [*copies] if rank in holders else [] for rank in ranks}
        if copies and rng.random() < 0.3:
            calls[holders[-1]][-1] = _spoiled(copies[-1])
        for rank in ranks:
            calls[rank] += _calls(rng, others, oracle, rank)
        steps.append(Step(calls, [_export(rng, ranks, keys) for _ in range(rng.choice([1, 1, 2]))]))
        for export in steps[-1].exports:
            oracle.export(export)
    return Program(ranks, keys, steps, summed=rng.random() < 0.25)


def _partition(rng: Random, ranks: Ranks) -> tuple[Ranks, ...]:
    """Make groups that lie side by side and hold all the ranks."""
    places = {rank: rng.randrange(len(ranks)) for rank in ranks}
    return tuple({place: tuple(r for r in ranks if places[r] == place) for place in places.values()}.values())


def _keys(rng: Random, ranks: Ranks) -> tuple[Key, ...]:
    """Make masks and the stats over them, scalars, counters, timings."""
    own = _partition(rng, ranks) if rng.random() < 0.4 else ()
    keys: list[Key] = []

    def add(prefix: str, kind: Kind, tracker: str, spread: Spread, **what: Any) -> Key:
        groups = rng.choice([(), own])
        keys.append(Key(f"{prefix}k{len(keys)}", kind, tracker, spread=spread, groups=groups, **what))
        return keys[-1]

    for _ in range(rng.randint(1, 4)):
        tracker, kind = rng.choice(TRACKERS), rng.choice(FAMILIES)
        prefix = f"{tracker}/{rng.choice(SCOPES)}".lstrip("/")
        spread = rng.choice([Spread.SHARDS] * 3 + [Spread.SHARES, Spread.REPLICATED])
        if kind is Kind.TIMING:
            keys.append(Key(f"timeperf/k{rng.randint(0, 1)}", kind, tracker))
            continue
        first = add(prefix, kind, tracker, spread)
        for _ in range(rng.randint(1, 3) if kind is Kind.DENOMINATOR else 0):
            shares = spread is Spread.SHARES
            reduce_type, asked = rng.choice(OF_SHARES if shares else OF_TENSORS), rng.choice(QUANTILES)
            what = {"reduce_type": reduce_type, "quantiles": () if shares else asked}
            add(prefix, Kind.STAT, tracker, spread, denominator=first.name, **what)
    return tuple(dict.fromkeys(keys))


def _calls(rng: Random, keys: Sequence[Key], oracle: Oracle, rank: int) -> list[Call]:
    """Make what a rank records in a step: some keys, some of them several times, or nothing."""
    made: list[Call] = []

    def make(key: Key) -> None:
        _, mask = oracle.masks[rank].get(key.denominator, (key, None))
        made.append(_call(rng, key, mask))
        oracle.record(rank, made[-1])

    by_name = {key.name: key for key in keys}
    for key in rng.choices(keys, k=rng.choice([0, 1, 3, 5, 7])) if keys else ():
        if key.kind is Kind.STAT and (key.denominator not in oracle.masks[rank] or rng.random() < 0.2):
            make(by_name[key.denominator])
        make(key)
    return made


def _call(rng: Random, key: Key, mask: Any) -> Call:
    """Make a recording call; `mask` is the one that a stat is bound to."""
    odd = rng.random() < 0.15
    if key.kind is Kind.DENOMINATOR:
        bits = [rng.random() < 0.6 for _ in range(rng.randint(1, 6))]
        return Call(key, np.resize(np.array(bits), rng.choice(SHAPES)))
    if key.kind is Kind.COUNTER:
        return Call(key, rng.choice(EXACT_COUNTS) if odd else rng.randint(-3, 3))
    if key.kind is Kind.TIMING:
        return Call(key, rng.randint(0, 4096) / 1024)
    if key.kind is Kind.SCALAR:
        return Call(key, rng.choice(SPECIAL) if odd else rng.choice([30_565_379.0, rng.uniform(-1e6, 1e6)]))
    dtype = rng.choice(list(NUMBERS))
    drawn = [NUMBERS[dtype](rng) for _ in range(rng.randint(1, 6))]
    if odd:
        drawn[0] = rng.choice(SPECIAL)
    numbers = np.resize(np.array(drawn, np.float64), mask.shape)
    if rng.random() < 0.5:
        numbers = np.where(mask, numbers, np.nan)  # padding holds anything
    form = rng.choice(FORMS)
    return Call(key, numbers, dtype, "plain" if dtype == "bfloat16" and form == "numpy" else form)


def _spoiled(copy: Call) -> Call:
    """Return a copy that is no copy: of a stat the double, which every dtype can hold."""
    if copy.key.kind is Kind.DENOMINATOR:
        return replace(copy, value=~copy.value)
    if copy.key.kind is Kind.STAT:
        return replace(copy, value=np.where(copy.value == 0, 1.0, copy.value * 2))
    return replace(copy, value=copy.value + 1)


def _export(rng: Random, ranks: Ranks, keys: tuple[Key, ...]) -> Export:
    """Make an export whose groups can take the keys' own groups."""
    groups = [(ranks,), (ranks,), _partition(rng, ranks), _partition(rng, ranks), ()]
    export = Export(reduce_groups=rng.choice(groups), sync_groups=rng.choice(groups))
    if any(len(g) > 1 and not carried_by(key, g, export) for key in keys for g in key.groups):
        export = replace(export, sync_groups=(ranks,))
    only, what = rng.choice(keys), rng.random()
    if what < 0.15 and only.kind is not Kind.TIMING:
        export = replace(export, tracker=only.tracker, key=only.name)
    elif what < 0.3:
        export = replace(export, tracker=only.tracker)
    given_by = tuple(rank for rank in ranks if rng.random() < 0.15)
    return replace(export, reset=rng.random() < 0.75, step_given_by=given_by)


# -- smaller ones --------------------------------------------------------------------------------------


def smallest(batch: list[Program], fails: Callable[[list[Program]], bool]) -> list[Program]:
    """Take away from programs, piece by piece, what they can fail without."""
    batch = next(([alone] for alone in batch if len(batch) > 1 and fails([alone])), batch)
    found: list[Program] | None = batch
    while found is not None:
        batch = found
        found = next((less for less in _smaller(batch) if _is_legal(less) and fails(less)), None)
    return batch


def _smaller(batch: list[Program]) -> Iterator[list[Program]]:
    yield from (less for less in _without_one(batch) if less)
    for i, whole in enumerate(batch):
        yield from ([*batch[:i], less, *batch[i + 1 :]] for less in _with_less(whole))


def _without_one(items: list[Any]) -> Iterator[list[Any]]:
    yield from ([*items[:i], *items[i + 1 :]] for i in range(len(items)))


def _with_less(whole: Program) -> Iterator[Program]:
    yield from (replace(whole, steps=steps) for steps in _without_one(whole.steps) if steps)
    for i, step in enumerate(whole.steps):
        for less in _step_with_less(step):
            yield replace(whole, steps=[*whole.steps[:i], less, *whole.steps[i + 1 :]])


def _step_with_less(step: Step) -> Iterator[Step]:
    yield from (replace(step, exports=exports) for exports in _without_one(step.exports) if exports)
    for rank, calls in step.calls.items():
        half = len(calls) // 2
        for less in ([], calls[:half], calls[half:], *_without_one(calls)):
            if len(less) < len(calls):
                yield replace(step, calls=step.calls | {rank: less})


def _is_legal(batch: list[Program]) -> bool:
    try:
        for each in batch:
            oracle = Oracle(each.ranks)
            for step in each.steps:
                for rank, calls in step.calls.items():
                    for call in calls:
                        oracle.record(rank, call)
                for export in step.exports:
                    oracle.export(export)
    except (KeyError, AssertionError):  # a stat without its mask, or under another one
        return False
    return True
