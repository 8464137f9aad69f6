"""Random exports over overlapping groups: every one ends on every rank, with the right numbers or an error.

Each round draws, alike on all ranks, what every rank records and what goes wrong; so each rank knows what it
must get. The reference below is plain Python over all ranks' values, and shares no code with the product.
"""

import math
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from aggregator import collective, wire
from aggregator.merge import Export
from eventlog import Kind, ReduceType, Spread, moments
from tests.gloo import Ranks
from tests.runs import Spec

GATHERED, SUMMED = wire.GATHER_BYTES, 0
KEYS = [f"k{i}" for i in range(12)]
ODD = [0.0, -0.0, 1.5, 2.0**53, math.nan, math.inf, -math.inf]


def spec_of(key, kind=Kind.STAT, reduce_type=ReduceType.AVG_MIN_MAX, **about):
    return Spec(key, kind, reduce_type, **about)


KINDS = [
    {},
    {"reduce_type": ReduceType.SUM},
    {"kind": Kind.SCALAR, "reduce_type": ReduceType.SCALAR},
    {"kind": Kind.COUNTER, "reduce_type": None},
]
USUAL = {key: spec_of(key, **KINDS[i % len(KINDS)]) for i, key in enumerate(KEYS)}


@dataclass
class Round:
    """What happens in one export, the same on all ranks."""

    mode: str
    held: dict[int, dict[Spec, list[float]]]  # rank -> what it records
    own: dict[int, tuple[int, ...]]  # rank -> the ranks of its reduce_group; empty: none
    wide: tuple[int, ...]  # the ranks of key_sync_group; empty: none
    failing: set[int] = field(default_factory=set)
    options: dict = field(default_factory=dict)


# -- drawing ---------------------------------------------------------------------------------------


def draw(rng, number, ranks):
    """Draw a round for the ranks 0 … n-1 of the world."""
    mode = rng.choice(
        [
            "plain",
            "plain",
            "label",
            "label",
            "failure",
            "conflict",
            "regroup",
            "pair",
            "one key",
            "bad label",
            "copies",
        ]
    )
    split = ((0, 1), (0, 1), (2,)) if ranks == 3 else ((0, 1), (0, 1))
    everyone = tuple(range(ranks))
    over = "both" if mode in ("label", "bad label") else rng.choice(["own", "wide", "both"])
    own = {rank: everyone if over == "wide" else split[rank] for rank in everyone}
    made = Round(mode, {}, own, everyone if over == "both" else ())
    made.held = {rank: draw_records(rng, number, rank, made) for rank in everyone}
    made.options = {
        "operation": f"export{number % 5}",
        "reset": rng.random() < 0.7,
        "full": mode != "one key",
    }
    spoil(rng, number, made)
    return made


def draw_records(rng, number, rank, made):
    keys = rng.sample(KEYS, rng.choice([0, 0, 2, 6, 12]))
    held = {USUAL[key]: draw_values(rng, USUAL[key]) for key in keys}
    if rng.random() < 0.05:
        held[spec_of(f"made up/{number}", **KINDS[2])] = draw_values(rng)
    if rng.random() < 0.5:
        held[spec_of("share", **KINDS[2], spread=Spread.SHARES)] = [0.25, float(rank)]
    if made.mode == "label":
        everyone = ",".join(map(str, made.wide))
        for key, group in (("all", everyone), ("tensor", "0,1" if rank < 2 else "2")):
            if rng.random() < 0.7:
                held[spec_of(key, label=group)] = draw_values(rng)
    return held


def draw_values(rng, spec=None):
    n = rng.choice([0, 1, 1, 2, 3, 8])
    if spec is not None and spec.kind is Kind.COUNTER:
        return [rng.randrange(2**40) for _ in range(n)]
    return [rng.choice(ODD) if rng.random() < 0.15 else rng.uniform(-5, 5) for _ in range(n)]


def spoil(rng, number, made):
    """Let go wrong what the mode says."""
    everyone, key = sorted(made.held), rng.choice(KEYS)
    chosen = rng.choice(everyone)
    if made.mode == "failure":
        made.failing = set(rng.sample(everyone, rng.choice([1, 1, 2])))
    elif made.mode == "conflict":
        made.held[chosen].pop(USUAL[key], None)
        made.held[chosen][USUAL[key]._replace(denominator="another")] = [1.0]
    elif made.mode == "regroup":  # all ranks change what the key is
        for rank in everyone:
            made.held[rank].pop(USUAL[key], None)
            made.held[rank][spec_of(key, denominator=f"mask{number}")] = [float(rank)]
    elif made.mode == "bad label":
        made.held[chosen][spec_of("bad", label="0,7")] = [1.0]
    elif made.mode == "copies":
        spec = spec_of("copy", **KINDS[2], spread=Spread.REPLICATED)
        unequal = rng.random() < 0.3
        for rank in everyone:
            if rng.random() < 0.8:
                made.held[rank][spec] = [0.1 + (unequal and rank == chosen)]
    elif made.mode == "one key":
        made.held = {
            rank: {s: v for s, v in held.items() if s.key == key} for rank, held in made.held.items()
        }
    elif (
        made.mode == "pair" and len(everyone) == 3
    ):  # only two of three ranks export, over a group of their own
        made.held.pop(0)
        made.own, made.wide = {1: (1, 2), 2: (1, 2)}, ()


# -- the reference ---------------------------------------------------------------------------------


def expected(made, rank):
    """Return what a rank must get: its numbers, or None where it must raise."""
    failed = {r for r in made.held if fails(made, r)}
    if made.wide and (failed or disagree(made, made.wide)):
        return None
    if rank in failed:
        return None
    numbers = {}
    for key in {spec.key for held in made.held.values() for spec in held}:
        for spec, ranks in slots(made, key):
            if rank in ranks:
                parts = [made.held[r][spec] for r in ranks if spec in made.held.get(r, ())]
                numbers |= reference(spec, parts)
    return numbers


def fails(made, rank):
    """Whether the rank, or one it shares its reduce_group with, cannot finish there."""
    group = made.own[rank]
    bad = any(spec.key == "bad" for r in group for spec in made.held[r])
    copies = {repr(v) for r in group for spec, v in made.held[r].items() if spec.spread is Spread.REPLICATED}
    return bool(made.failing & set(group)) or bad or len(copies) > 1 or disagree(made, group)


def disagree(made, group):
    """Whether ranks of a group say different things of one key."""
    said = {}
    for rank in group:
        for spec in made.held[rank]:
            said.setdefault(spec.key, set()).add(spec._replace(label=None))
    return any(len(views) > 1 for views in said.values())


def slots(made, key):
    """Return each (spec, ranks) over which a key is reduced."""
    found = set()
    for rank, held in made.held.items():
        for spec in held:
            if spec.key == key:
                found.add((spec, tuple(map(int, spec.label.split(","))) if spec.label else made.own[rank]))
    return found


def reference(spec, parts):
    """Return what a key exports, given the values of each rank that holds it."""
    values = [value for part in parts for value in part]
    count = len(values)
    if spec.spread is Spread.REPLICATED:
        values = parts[0]
        count = len(values)
    elif spec.spread is Spread.SHARES:
        count = max(map(len, parts))
    if spec.kind is Kind.COUNTER:
        return {spec.key: sum(values)}
    total = exact_sum(values)
    if spec.reduce_type is ReduceType.SUM:
        return {spec.key: total}
    if spec.reduce_type is ReduceType.SCALAR:
        return ({spec.key: total / count} if count else {}) | {f"{spec.key}__count": count}
    if not count:
        return {}
    nan = any(map(math.isnan, values))
    low, high = (math.nan, math.nan) if nan else (min(values), max(values))
    return {f"{spec.key}/avg": total / count, f"{spec.key}/min": low, f"{spec.key}/max": high}


def exact_sum(values):
    if any(map(math.isnan, values)) or {math.inf, -math.inf} <= set(values):
        return math.nan
    return sum(values) if math.inf in values or -math.inf in values else math.fsum(values)


def equal(found, wanted):
    """Whether two exports agree; means and sums up to rounding next to 2**53."""
    return found.keys() == wanted.keys() and all(
        found[name] == value
        or (math.isnan(found[name]) and math.isnan(value))
        or (isinstance(value, float) and math.isclose(found[name], value, rel_tol=1e-12, abs_tol=16))
        for name, value in wanted.items()
    )


# -- on the ranks ----------------------------------------------------------------------------------


def fuzz(rank, seed, rounds, worlds):
    """Run the rounds in one world (store, ranks, form) after the other; return what happened how often."""
    rng, happened, groups = random.Random(seed), Counter(), {}
    for store, size, wire.GATHER_BYTES in worlds:
        dist.destroy_process_group() if dist.is_initialized() else None
        if rank < size:
            groups = join(store, rank, size)
        for number in range(rounds):
            made = draw(rng, number, size)
            if rank in made.held and rank < size:
                happened[play(made, rank, groups)] += 1
    happened["steady"] = steady(rank, groups)
    return happened


def join(store, rank, size):
    """Join a new world; return its groups by their ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2), (2,)) if ranks[-1] < size}
    return groups | {tuple(range(size)): dist.group.WORLD}


def play(made, rank, groups):
    """Take part in a round; return whether it ended in numbers or raised, as it must."""
    error = RuntimeError("drawn") if rank in made.failing else None
    held = {} if error else made.held[rank]
    table = moments.empty(len(held))
    for row, (spec, values) in zip(table, held.items(), strict=True):
        if spec.kind is Kind.COUNTER:
            row[:] = moments.of_integers([len(values)], [sum(values)])
        else:
            row[:] = moments.of(np.array(values, np.float64))
    step = 5 if rank else None
    reduced = collective.reduce(
        tuple(held),
        table,
        groups[made.own[rank]],
        groups.get(made.wide),
        session=f"session{rank}",
        error=error,
        step=step,
        **made.options,
    )
    wanted = expected(made, rank)
    if wanted is None:
        assert reduced.error is not None, f"expected an error in {made}"
        assert reduced.parts == ()
        return "raised"
    assert reduced.error is None, f"{reduced.error!r} in {made}"
    found = dict(Export.of(reduced.parts))
    assert equal(found, wanted), f"{found} is not {wanted} in {made}"
    return "numbers"


def steady(rank, groups):
    """Return the collectives of one export over two groups, once the layout fits."""
    own, everyone = groups[(0, 1) if rank < 2 else (2,)], dist.group.WORLD
    specs = (
        *USUAL.values(),
        spec_of("tensor", label="0,1" if rank < 2 else "2"),
        spec_of("all", label="0,1,2"),
    )
    options = {"operation": "steady", "session": f"session{rank}"}
    for i in range(3):
        before = collective.count()
        reduced = collective.reduce(
            specs, np.tile(moments.of([1.0]), (len(specs), 1)), own, everyone, **options
        )
        assert reduced.error is None, (i, reduced.error)
    return collective.count() - before


def campaign(seed, rounds, *worlds):
    """Fuzz with three processes; each must see both ends, and a steady export cost what it should."""
    with Ranks(3, timeout=110 + rounds) as ranks, tempfile.TemporaryDirectory() as folder:
        named = [(str(Path(folder) / f"store{i}"), *world) for i, world in enumerate(worlds)]
        results = ranks.run(fuzz, seed, rounds, named)
    each = 1 if worlds[-1] == (3, GATHERED) else 2
    for happened, groups in zip(results, (2, 2, 1), strict=True):  # rank 2 is alone in one of its two
        assert happened["numbers"] > rounds, happened
        assert happened["raised"] > rounds // 4, happened
        assert groups * each == happened["steady"]


def test_random_exports_end_right_on_every_rank():
    """Missing, new and labelled keys, failures, conflicts, other worlds: no hang, no wrong number."""
    campaign(1, 30, (3, GATHERED), (2, SUMMED), (3, SUMMED))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_random_exports_end_right_on_every_rank(seed):
    """The same for longer, in more worlds."""
    campaign(seed, 120, (3, SUMMED), (2, GATHERED), (3, GATHERED), (2, SUMMED), (3, GATHERED))
