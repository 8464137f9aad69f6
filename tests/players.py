"""Plays the programs of `tests/reference.py` on real ranks, with the real tracker and a real log.

with Ranks(4) as ranks:
    ranks.run(meet)
    played = ranks.run(play, program, run_dir)      # per rank, step and export: a dict, or the error's text
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from itertools import combinations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import aggregator
import eventlog
from aggregator import collective, stats_tracker, wire
from aggregator.stats_tracker import DistributedStatsTracker
from eventlog import Kind, errors
from tests.reference import Call, Export, Key, Program

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Answer = aggregator.Export | str  # the numbers, or the error as text
_groups: dict[tuple[int, ...], ProcessGroup] = {}
_GATHER_BYTES = wire.GATHER_BYTES


def meet(rank: int) -> None:
    """Form every group that the ranks of this world can form; all ranks call it once."""
    world = range(dist.get_world_size())
    for size in range(1, len(world) + 1):
        for ranks in combinations(world, size):
            group = dist.new_group(ranks, timeout=timedelta(seconds=30))
            if rank in ranks:
                _groups[ranks] = group


def group_of(rank: int, groups: tuple[tuple[int, ...], ...]) -> ProcessGroup | None:
    """Return the one of some groups that a rank is in."""
    return next((_groups[ranks] for ranks in groups if rank in ranks), None)


def play(rank: int, programs: list[Program], folder: str) -> list[list[list[Answer]]]:
    """Play programs one after the other, each into a run directory `folder/number`.

    What groups agreed on stays from program to program; the first one meets new groups. Returns what this
    rank's exports said, by program, step and export.
    """
    collective._registry.clear()
    return [
        _play(rank, program, f"{folder}/{number}") if rank in program.ranks else []
        for number, program in enumerate(programs)
    ]


def _play(rank: int, program: Program, folder: str) -> list[list[Answer]]:
    wire.GATHER_BYTES = 0 if program.summed else _GATHER_BYTES
    stats_tracker.TRACKERS.clear()
    stats_tracker.TRACKERS[""] = DistributedStatsTracker()
    log = eventlog.start(folder, role="actor", rank=rank, world_size=max(program.ranks) + 1)
    leads = rank == program.ranks[0]
    if leads:
        log.claim_attempt()
    try:
        for key in program.keys:
            tracker, path = _place(key)
            tracker.declare("/".join(path), spread=key.spread.value)
        told: list[list[Answer]] = []
        for number, step in enumerate(program.steps):
            issued = collective.count()
            for call in step.calls[rank]:
                record(rank, call)
            assert issued == collective.count()  # recording never communicates
            told.append([export(rank, each, number) for each in step.exports])
            stats = aggregator.Export()
            for said in told[-1]:
                stats.update({} if isinstance(said, str) else said)
            assert log.commit(0, number, number, [stats] if leads else ())
    finally:
        eventlog.stop()
    return told


def export(rank: int, asked: Export, step: int) -> Answer:
    """Make one export on this rank."""
    groups = group_of(rank, asked.reduce_groups), group_of(rank, asked.sync_groups)
    given = step if rank in asked.step_given_by else None
    try:
        if asked.tracker is None:
            return stats_tracker.export_all(*groups, reset=asked.reset, step=given)
        tracker = stats_tracker.get(asked.tracker)
        key = asked.key and asked.key.removeprefix(f"{asked.tracker}/")
        return tracker.export(key, *groups, reset=asked.reset, step=given)
    except errors.ReductionError as error:
        return f"{type(error).__name__}: {error}"


def record(rank: int, call: Call) -> None:
    """Make one recording call, under the scopes of its key; afterwards overwrite what was handed over."""
    key = call.key
    tracker, (*scopes, name) = _place(key)
    group = group_of(rank, key.groups)
    with ExitStack() as scoped:
        for scope in scopes:
            scoped.enter_context(tracker.scope(scope))
        if not scopes:
            scoped.enter_context(tracker.scope("elsewhere"))
            scoped.enter_context(tracker.disable_scope())
        if key.kind is Kind.DENOMINATOR:
            mask = torch.from_numpy(np.array(call.value))
            tracker.denominator(reduce_group=group, **{name: mask})
            mask.logical_not_()
        elif key.kind is Kind.STAT:
            values = _tensor(call)
            denominator = key.denominator.rpartition("/")[2]
            asked = key.quantiles or None
            tracker.stat(denominator, key.reduce_type, reduce_group=group, quantiles=asked, **{name: values})
            (values if isinstance(values, np.ndarray) else values.detach())[...] = -777.0
        elif key.kind is Kind.TIMING:
            _time(tracker, name, call.value)
        elif key.kind is Kind.COUNTER:
            tracker.counter(reduce_group=group, **{name: call.value})
        else:
            tracker.scalar(reduce_group=group, **{name: call.value})


def _place(key: Key) -> tuple[DistributedStatsTracker, list[str]]:
    """Return a key's tracker, and the scopes and the name under which that records it."""
    return stats_tracker.get(key.tracker), key.name.removeprefix(f"{key.tracker}/").split("/")


def _tensor(call: Call) -> Any:
    """Return the values as they are handed over: of their dtype, lying in memory as the call says."""
    values = np.array(call.value, np.float64)
    if call.form == "numpy":
        return values.astype(call.dtype)
    tensor = torch.from_numpy(values).to(getattr(torch, call.dtype))
    if call.form == "strided":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=-1)[..., 0]
    if call.form == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if call.form == "grad":
        return tensor.requires_grad_() * 1.0
    return tensor


def _time(tracker: DistributedStatsTracker, name: str, seconds: float) -> None:
    """Time a block that takes so many seconds by the tracker's clock."""
    real, clock = stats_tracker.time, iter([0.0, seconds])
    stats_tracker.time = SimpleNamespace(perf_counter=lambda: next(clock))
    try:
        with tracker.record_timing(name):
            pass
    finally:
        stats_tracker.time = real
