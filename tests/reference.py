"""The contract in slow, plain numpy: what every rank's export must say. Written to be read, not to be fast.

A *program* is what ranks record, step by step, and what they then export and commit. The oracle keeps the
values that were selected, rank by rank, and answers an export by putting them together:

    n_tokens = Key("n_tokens", Kind.DENOMINATOR)
    loss = Key("loss", Kind.STAT, reduce_type=ReduceType.AVG, denominator="n_tokens")
    oracle = Oracle(ranks=(0, 1))
    oracle.record(0, Call(n_tokens, np.array([True, False])))
    oracle.record(0, Call(loss, np.array([2.0, np.nan])))
    oracle.export(Export(reduce_groups=((0, 1),)))      # {0: {"n_tokens": 1, "loss": 2.0}, 1: {the same}}

It shares the words for kinds, reduce types and spreads with the product, and no code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import numpy as np

from eventlog import Kind, ReduceType, Spread

Ranks = tuple[int, ...]
Numbers = dict[str, float]
Answers = dict[int, Numbers | None]  # what an export returns on each rank; None: it raises an AgreementError

EXACT = (Kind.COUNTER, Kind.DENOMINATOR)  # integers, and summed as integers


# -- what ranks do -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """What a key is; all ranks that hold it say the same."""

    name: str  # in full: tracker, scopes and key, "rollout/ppo_actor/loss"
    kind: Kind
    tracker: str = ""
    reduce_type: ReduceType = ReduceType.AVG_MIN_MAX  # of a stat
    denominator: str = ""  # of a stat: the full name of its mask
    spread: Spread = Spread.SHARDS
    groups: tuple[Ranks, ...] = ()  # reduce_groups of its own, side by side; (): it follows the export's
    quantiles: tuple[float, ...] = ()  # of a stat: which are asked


@dataclass(frozen=True, eq=False)
class Call:
    """One record: a mask, the values of a stat, or a number."""

    key: Key
    value: Any
    dtype: str = "float32"  # of a stat: what it is handed over as
    form: str = "plain"  # … and how it lies in memory


@dataclass(frozen=True)
class Export:
    """One export, which all ranks call; each of them passes the groups that it is in."""

    tracker: str | None = None  # whose; None: export_all
    key: str | None = None  # the full name of the only key that is exported
    reduce_groups: tuple[Ranks, ...] = ()  # (): without
    sync_groups: tuple[Ranks, ...] = ()  # as key_sync_group; (): without
    reset: bool = True
    step_given_by: Ranks = ()  # who passes step=

    def covers(self, key: Key) -> bool:
        """Whether it exports what was recorded under the key."""
        return self.tracker in (None, key.tracker) and self.key in (None, key.name)


@dataclass(frozen=True, eq=False)
class Step:
    """What each rank records, and the exports that follow; the leader commits all that they return."""

    calls: dict[int, list[Call]]
    exports: list[Export]


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A run of a few ranks, the first of which leads."""

    ranks: Ranks
    keys: tuple[Key, ...]
    steps: list[Step]
    summed: bool = False  # reduced as in large worlds: by two all-reduces and not by one gather

    def __repr__(self) -> str:
        """Return the program as people read it."""
        lines = [f"ranks {self.ranks}{', summed' * self.summed}", *map(_said, self.keys)]
        for number, step in enumerate(self.steps):
            lines += [f"step {number}"]
            lines += [f"  rank {rank}: {_said(call)}" for rank, calls in step.calls.items() for call in calls]
            lines += [f"  {_said(export)}" for export in step.exports]
        return "\n".join(["", *lines])


def _said(what: Any) -> str:
    """Return a dataclass without the fields that are as they mostly are."""
    texts = []
    for found in fields(what):
        value = getattr(what, found.name)
        if isinstance(value, Key):
            texts.append(value.name)
        elif found.name in ("value", "name", "kind") or value != found.default:
            texts.append(f"{found.name}={_shown(value)}")
    return f"{type(what).__name__}({', '.join(texts)})"


def _shown(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, np.ndarray):
        return value.tolist() if value.size < 20 else f"{value.shape} of {value.reshape(-1)[:6].tolist()} …"
    return value


# -- what an export says -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pooled:
    """What a key comes to over the ranks of `group`, of which `holders` recorded it."""

    key: Key
    group: Ranks
    holders: Ranks
    carrier: Ranks  # the group whose collective it took; (): none, it stayed with its rank
    numbers: Numbers
    agreed: bool  # False: copies that should be alike are not


class Oracle:
    """What the ranks hold, and what exports say of it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.masks: dict[int, dict[str, tuple[Key, Any]]] = {rank: {} for rank in ranks}
        self.records: dict[int, list[tuple[Key, Any]]] = {rank: [] for rank in ranks}  # key, selected values
        self.logged: dict[int, list[tuple[Key, Any]]] = {rank: [] for rank in ranks}  # … exported so far

    def record(self, rank: int, call: Call) -> None:
        """Keep what is selected: by the mask that was registered last. The rest is never looked at."""
        key, value = call.key, call.value
        if key.kind is Kind.DENOMINATOR:
            self.masks[rank][key.name] = key, value
            selected = np.array([value.sum()], np.int64)  # what it exports: how many are true
        elif key.kind is Kind.STAT:
            _, mask = self.masks[rank][key.denominator]
            assert value.shape == mask.shape
            selected = value[mask].astype(np.float64)
        else:
            selected = np.array([value], np.int64 if key.kind in EXACT else np.float64)
        self.records[rank].append((key, selected))

    def export(self, export: Export) -> Answers:
        """Return what the export says on each rank, and forget what it resets."""
        return answers(self.pool(export), export, self.ranks)

    def pool(self, export: Export) -> list[Pooled]:
        """Put together what the export covers, key by key, and forget what it resets."""
        taken = {rank: self._take(rank, export) for rank in self.ranks}
        keys = {key.name: key for those in taken.values() for key, _ in those}
        found: list[Pooled] = []
        for name, key in keys.items():
            for group in pooled_over(key, export, self.ranks):
                held = {r: [v for k, v in taken[r] if k.name == name] for r in group}
                parts = {rank: np.concatenate(values) for rank, values in held.items() if values}
                if not parts:
                    continue  # nobody here recorded it: no number at all, not even a zero
                said, agreed = numbers(key, list(parts.values())), _agreed(key, list(parts.values()))
                found.append(Pooled(key, group, tuple(parts), carried_by(key, group, export), said, agreed))
        return found

    def _take(self, rank: int, export: Export) -> list[tuple[Key, Any]]:
        taken = [record for record in self.records[rank] if export.covers(record[0])]
        known = {id(record) for record in self.logged[rank]}
        self.logged[rank] += [record for record in taken if id(record) not in known]
        if export.reset:
            self.records[rank] = [record for record in self.records[rank] if not export.covers(record[0])]
        if export.reset and export.key is None:  # one key alone leaves the masks to the others
            self.masks[rank] = {n: (k, m) for n, (k, m) in self.masks[rank].items() if not export.covers(k)}
        return taken


def pooled_over(key: Key, export: Export, ranks: Ranks) -> Iterable[Ranks]:
    """Return the sets of ranks whose values are put together; a rank reads the numbers of the one it is in.

    A key's own groups stand before the export's; with neither, a key stays with its rank.
    """
    return key.groups or export.reduce_groups or [(rank,) for rank in ranks]


def carried_by(key: Key, group: Ranks, export: Export) -> Ranks:
    """Return the group whose collective brings these ranks together; (): the key stays with its rank.

    That is the reduce_group; for a key with groups of its own, the first of reduce_group and key_sync_group
    that contains these ranks.
    """
    wider = (*export.reduce_groups, *export.sync_groups) if key.groups else export.reduce_groups
    return next((ranks for ranks in wider if {*group} <= {*ranks}), ())


def numbers(key: Key, parts: Sequence[Any]) -> Numbers:
    """Return what a key exports, given the selected values of each rank that recorded it, in rank order."""
    values = parts[0] if key.spread is Spread.REPLICATED else np.concatenate(parts)  # copies count once
    count = max(map(len, parts)) if key.spread is Spread.SHARES else len(values)  # parts of one are one
    if key.kind in EXACT:
        return {key.name: int(values.sum())}
    with np.errstate(all="ignore"):
        total = float(values.sum())  # IEEE: any NaN makes it NaN, infinities stay
    if key.kind in (Kind.SCALAR, Kind.TIMING):
        return {key.name: total / count, f"{key.name}__count": count}
    asked = {f"{key.name}/p{100 * q:g}": quantile(values, q) for q in key.quantiles} if count else {}
    if key.reduce_type is ReduceType.SUM:
        return {key.name: total} | asked  # of nothing: zero
    if count == 0:
        return {}  # means, extremes and quantiles of nothing are absent: not zero, not NaN, not infinite
    of_type = {"avg": total / count, "min": float(values.min()), "max": float(values.max())}
    if key.spread is Spread.SHARES:
        of_type = {"avg": of_type["avg"]}  # no rank ever saw the whole number
    if key.reduce_type is ReduceType.AVG_MIN_MAX:
        return {f"{key.name}/{what}": number for what, number in of_type.items()} | asked
    what = key.reduce_type.value
    return ({key.name: of_type[what]} if what in of_type else {}) | asked


def quantile(values: Any, q: float) -> float:
    """Return a quantile as numpy does, but of values known to the percent, save the least and greatest."""
    if np.isnan(values).any():
        return math.nan
    finite = np.sort(values[np.isfinite(values)])
    if len(finite):
        shown = np.clip([_shown_by_bucket(value) for value in finite], finite[0], finite[-1])
        finite = np.concatenate([finite[:1], shown[1:-1], finite[-1:]])[: len(finite)]
    ordered = np.concatenate([values[values == -math.inf], finite, values[values == math.inf]])
    low, part = int(q * (len(ordered) - 1)), q * (len(ordered) - 1) % 1
    if part == 0 or ordered[low] == ordered[low + 1]:
        return float(ordered[low])
    with np.errstate(invalid="ignore"):  # between -inf and inf lies no number
        return float((1 - part) * ordered[low] + part * ordered[low + 1])


def _shown_by_bucket(value: float) -> float:
    """Return the middle of the bucket a value is in: buckets begin at 1e-9 and grow by 1.01 / 0.99."""
    if abs(value) < 1e-9:
        return 0.0
    growth = 1.01 / 0.99
    low = 1e-9 * growth ** math.floor(math.log(abs(value) / 1e-9, growth))
    return math.copysign(2 * low * growth / (1 + growth), value)


def _agreed(key: Key, parts: Sequence[Any]) -> bool:
    """Whether copies are alike: the same values, and of masks as many true ones."""
    if key.spread is not Spread.REPLICATED:
        return True
    if key.kind is Kind.DENOMINATOR:
        return len({part.sum() for part in parts}) == 1
    return all(np.array_equal(parts[0], part, equal_nan=part.dtype.kind == "f") for part in parts)


def answers(pools: Iterable[Pooled], export: Export, ranks: Ranks) -> Answers:
    """Return what each rank reads: all keys of the sets it is in; or an error, where it hears of one."""
    said: Answers = {rank: {} for rank in ranks}
    for pooled in pools:
        for rank in pooled.group:
            said[rank] = {**(said[rank] or {}), **pooled.numbers}
    for pooled in pools:
        if not pooled.agreed:
            said |= dict.fromkeys(_who_hears(pooled.carrier, export))
    return said


def _who_hears(carrier: Ranks, export: Export) -> set[int]:
    """Return who learns of a disagreement: who shares the collective, then who meets those in key_sync_group.

    That group is entered second: there is no way back from it to the reduce_groups.
    """
    later = [group for group in export.sync_groups if not {*carrier}.isdisjoint(group)]
    return {*carrier}.union(*later if carrier not in export.sync_groups else ())


# -- what a step says ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What the ranks must read from the exports of a step, and what the log must say afterwards."""

    answers: list[Answers]
    merged: list[Numbers | None]  # what a controller makes of them, of an export of each of the groups
    committed: Numbers  # what the leader read
    elsewhere: dict[str, list[Numbers]]  # keys it did not: what the groups that hold one read
    logged: dict[tuple[int, str], Any]  # the selected values by rank and key, of everything up to here


def expected(program: Program) -> list[Expected]:
    """Return what must come of a program, step by step."""
    oracle = Oracle(program.ranks)
    return [_expected(oracle, step) for step in program.steps]


def _expected(oracle: Oracle, step: Step) -> Expected:
    for rank, calls in step.calls.items():
        for call in calls:
            oracle.record(rank, call)
    leader = oracle.ranks[0]
    said: list[Answers] = []
    merged: list[Numbers | None] = []
    committed: Numbers = {}
    readings: dict[str, list[Numbers]] = {}
    for export in step.exports:
        merged.append(_merged(oracle.pool(replace(export, reduce_groups=(oracle.ranks,), reset=False))))
        pools = oracle.pool(export)
        said.append(answers(pools, export, oracle.ranks))
        committed |= said[-1][leader] or {}
        for pooled in pools:
            readings.setdefault(pooled.key.name, []).extend(_readings(pooled, said[-1], leader))
    elsewhere = {key: those for key, those in readings.items() if _names(those).isdisjoint(committed)}
    return Expected(said, merged, committed, elsewhere, _logged(oracle))


def _merged(pools: list[Pooled]) -> Numbers | None:
    """Return what merging says: the same as one export over all ranks, or an error."""
    agreed = all(pooled.agreed for pooled in pools)
    return {name: number for pooled in pools for name, number in pooled.numbers.items()} if agreed else None


def _readings(pooled: Pooled, said: Answers, leader: int) -> list[Numbers]:
    """Return what the log may say of a key; {}: nothing.

    What a rank kept to itself is nobody else's business; what was raised instead of read is no number.
    """
    members = pooled.carrier or tuple(rank for rank in pooled.group if rank == leader)
    failed = [said[rank] is None for rank in members]
    return ([] if all(failed) else [pooled.numbers]) + ([{}] if any(failed) or not members else [])


def _names(readings: list[Numbers]) -> set[str]:
    return {name for numbers in readings for name in numbers}


def _logged(oracle: Oracle) -> dict[tuple[int, str], Any]:
    found: dict[tuple[int, str], list[Any]] = {}
    for rank, records in oracle.logged.items():
        for key, values in records:
            if key.kind is not Kind.DENOMINATOR:
                found.setdefault((rank, key.name), []).append(values.astype(np.float64))
    return {place: np.concatenate(parts) for place, parts in found.items()}


# -- comparing -----------------------------------------------------------------------------------------


def differences(wanted: Numbers, got: Numbers) -> dict[str, tuple[float | None, float | None]]:
    """Return the names whose numbers are not the same, as (wanted, got); None is an absent one."""
    both = {name: (wanted.get(name), got.get(name)) for name in sorted(wanted.keys() | got.keys())}
    return {name: pair for name, pair in both.items() if not _same(*pair)}


def unlike(step: Expected, got: Numbers) -> dict[str, tuple[float | None, float | None]]:
    """Return the differences of what a log says of a step: it must say what was committed.

    Of a key that the leader never read (another pipeline stage's) it must say what one of the groups that
    hold it read. Nothing is ever added up across groups.
    """
    rest, found = dict(got), {}
    for readings in step.elsewhere.values():
        said = {name: rest.pop(name) for name in _names(readings) if name in rest}
        if all(differences(reading, said) for reading in readings):
            found |= differences(readings[0], said)
    return found | differences(step.committed, rest)


def _same(wanted: float | None, got: float | None) -> bool:
    """Counts are equal to the unit; floats up to the order in which they were added."""
    if wanted is None or got is None or isinstance(wanted, int) or isinstance(got, int):
        return type(wanted) is type(got) and wanted == got
    if math.isnan(wanted) or math.isnan(got):
        return math.isnan(wanted) and math.isnan(got)
    return math.isclose(wanted, got, rel_tol=1e-9, abs_tol=1e-7)
