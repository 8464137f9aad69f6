"""Collectives: reducing over process groups, agreeing in them; the only file that knows torch.distributed.

An export enters exactly `reduce_group`, then `key_sync_group`, whatever it holds, also after a failure, which
it sends along: so no rank is left waiting. In the steady state that is one collective a group (two for large
worlds, see `wire`). What cannot be had: a rank that never calls export makes the others wait for the group's
own time-out.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from eventlog import errors, moments

from . import plan, wire
from .channel import Channel, Outcome, Request
from .naming import Columns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = [
    "Reduced",
    "agree",
    "broadcast",
    "broadcast_object",
    "count",
    "greatest",
    "joined",
    "label",
    "miss",
    "reduce",
    "tell",
]

_ROUTES_KEPT: Final = 16


@dataclass(frozen=True, slots=True)
class Reduced:
    """What an export came to on this rank.

    `parts`: the numbers, as names with reduced moments; empty after an error. `exports`: (export id, global
    ranks) of each group that was entered, also after an error. `attempt`: the newest that any rank knew of.
    `error`: what to raise once the outcome is noted; then every rank has one. `key`: what then was exported,
    where it was one key and any rank knew which.
    """

    parts: tuple[Columns, ...]
    exports: tuple[tuple[str, tuple[int, ...]], ...]
    attempt: int | None
    error: BaseException | None = None
    key: str | None = None

    @property
    def outcome(self) -> str:
        """Return "ok" or the class of the error."""
        return "ok" if self.error is None else type(self.error).__name__


def reduce(
    specs: Sequence[plan.Spec],
    rows: Ints,
    reduce_group: ProcessGroup | None = None,
    key_sync_group: ProcessGroup | None = None,
    *,
    operation: str | None,
    key: str | None = None,
    session: str,
    reset: bool = True,
    step: int | None = None,
    attempt: int | None = None,
    error: BaseException | None = None,
    full: bool = True,
    counts: Ints | None = None,
) -> Reduced:
    """Reduce the moments `rows`, shape (len(specs), WORDS), over the groups; all their ranks must call it.

    Ranks may hold different keys, in any order, each key once. Keys without a label go to `reduce_group` (or
    stay local without one), labelled ones to the first of the two groups that contains their ranks.
    `operation` names the call, alike on all ranks (None: this one failed too early to say), `key` what it
    exports alone, `session` this process; `step` and `attempt` are given where known; `error` says that this
    rank has failed already and brings nothing; `full` that the export covers all keys; `counts` are the
    histograms of the specs with quantiles, in their order. The same specs again, in the same order,
    are the fast path.

    Never raises what ranks can tell each other, see `Reduced.error`: an AgreementError, PeerError or
    DesyncError, or `error` itself. An interrupt inside a collective passes through, and closes the channel.
    """
    channels, problem = _channels(reduce_group, key_sync_group)
    if problem is not None:
        _miss_others(channels)
    error = error or problem
    route = _NOWHERE
    if error is None:
        try:
            route = _route(tuple(specs), channels, reduced=reduce_group is not None)
            _check_shape(rows, specs)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the peers must hear of it
            error, route = exc, _NOWHERE
    known = _or_unset(attempt)
    outcomes: list[Outcome] = []
    for channel, load in zip(channels, route.loads or [_NOTHING] * len(channels), strict=True):
        request = Request(operation, key, session, reset, _or_unset(step), known, full, error)
        try:
            outcomes.append(channel.export(request, load, rows, counts))
        except BaseException:  # an interrupt
            for other in channels[len(outcomes) + 1 :]:
                other.miss()
            raise
        known = max(known, outcomes[-1].attempt)
        error = error or outcomes[-1].error
    exports = tuple((o.export_id, o.members) for o in outcomes if o.export_id is not None)
    local = route.local
    columns = [Columns(local.names, local.of(rows).copy(), local.counts_of(counts))] if local.chosen else []
    columns += [o.columns for o in outcomes if o.columns is not None]
    told = next((o.key for o in outcomes if o.key is not None), None)
    newest = None if known == wire.UNSET else known
    return Reduced(() if error else tuple(columns), exports, newest, error, told)


def miss(*groups: ProcessGroup | None) -> None:
    """Count an export that ended before it entered its groups: the peers, who did, see it at the next one."""
    channels, problem = _channels(*groups)
    for channel in channels:
        channel.miss()
    if problem is not None:
        _miss_others(channels)


def agree(flag: bool, group: ProcessGroup | None) -> bool:
    """Return whether the flag is set on any rank of the group; all of them must call it."""
    if group is None or len(_members(group)) == 1:
        return flag
    return bool(_GroupLink(group).greatest(np.array([flag], np.int64))[0])


def joined(group: ProcessGroup | None = None) -> tuple[ProcessGroup | None, tuple[int, ...], int]:
    """Return the group that acts together, its global ranks, and this process's place among them.

    None stands for the default group, as in torch.distributed; where that does not run, this process acts
    alone: (None, (0,), 0).
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None, (0,), 0
    acting = dist.group.WORLD if group is None else group
    members = _members(acting)
    return acting, members, members.index(dist.get_rank())


def greatest(numbers: Sequence[int], group: ProcessGroup | None) -> list[int]:
    """Return the elementwise maximum over the ranks of the group; all of them must call it."""
    if group is None or len(_members(group)) == 1:
        return list(numbers)
    return _GroupLink(group).greatest(np.array(numbers, np.int64)).tolist()


def tell(what: Any, group: ProcessGroup | None) -> list[Any]:
    """Return what each rank passed, in group order (anything that pickles); all of them must call it."""
    if group is None or len(_members(group)) == 1:
        return [what]
    return _GroupLink(group).tell(what)


def broadcast(data: torch.Tensor | None, size: int, source: int, group: ProcessGroup) -> torch.Tensor:
    """Return the `size` bytes (a flat uint8 tensor) of global rank `source`, on a device the group takes.

    The other ranks pass None. All of them must call it.
    """
    import torch
    import torch.distributed as dist

    link = _GroupLink(group)
    sent = torch.empty(size, dtype=torch.uint8, device=link.device) if data is None else data.to(link.device)
    link.issue(dist.broadcast, sent, src=source)
    return sent


def broadcast_object(what: Any, source: int, group: ProcessGroup) -> Any:
    """Return what global rank `source` passed (anything that pickles)."""
    import torch.distributed as dist

    told = [what]
    _GroupLink(group).issue(dist.broadcast_object_list, told, src=source)
    return told[0]


def label(group: ProcessGroup | None) -> str | None:
    """Return the global ranks of a group as "0,1,5", under which keys are reduced over it; None for None."""
    if group is None:
        return None
    try:
        return ",".join(map(str, _members(group)))
    except errors.AgreementError as exc:
        raise errors.RecordingError(str(exc)) from exc


def count() -> int:
    """Return how many collectives this process has issued here so far (a gather of names counts as one)."""
    return _issued


# -- the link: torch.distributed -------------------------------------------------------------------


class _GroupLink:
    """The collectives of a process group, on a device it takes; the group itself is not kept alive."""

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed as dist

        self.members = _members(group)
        self.rank = dist.get_rank()
        self._group = weakref.ref(group)
        self.device = _device(group)
        # Gloo's all-gather goes round the ranks, each waits for the one before; its all-to-all sends at once.
        self._direct = "cpu:gloo" in dist.get_backend_config(group)

    def gather(self, vector: Ints) -> Ints:
        """Return the vectors of all ranks, shape (ranks, len(vector))."""
        import torch
        import torch.distributed as dist

        ranks = len(self.members)
        if self._direct:
            exchange, sent = dist.all_to_all_single, torch.from_numpy(np.tile(vector, ranks))
        else:  # torch 2.13 renamed it, and warns of the old name
            name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
            exchange, sent = getattr(dist, name), torch.from_numpy(vector).to(self.device)
        received = torch.empty(ranks * len(vector), dtype=sent.dtype, device=self.device)
        self.issue(exchange, received, sent)
        return received.cpu().numpy().reshape(ranks, -1)

    def greatest(self, vector: Ints) -> Ints:
        """Return the elementwise maximum over the ranks."""
        return self._all_reduce(vector, "MAX")

    def total(self, vector: Floats) -> Floats:
        """Return the elementwise sum over the ranks."""
        return self._all_reduce(vector, "SUM")

    def _all_reduce(self, vector: NDArray[Any], operation: str) -> NDArray[Any]:
        import torch
        import torch.distributed as dist

        tensor: torch.Tensor = torch.from_numpy(vector).to(self.device)
        self.issue(dist.all_reduce, tensor, op=getattr(dist.ReduceOp, operation))
        return tensor.cpu().numpy()

    def tell(self, what: Any) -> list[Any]:
        """Return what each rank passed."""
        import torch.distributed as dist

        told: list[Any] = [None] * len(self.members)
        self.issue(dist.all_gather_object, told, what)
        return told

    def issue(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a collective of torch.distributed on the group."""
        global _issued
        group = self._group()
        if group is None:  # None would mean the default group
            raise RuntimeError("the process group is gone")
        _issued += 1
        collective(*args, group=group, **kwargs)


_issued = 0


def _members(group: object) -> tuple[int, ...]:
    """Return the global ranks of a group; an AgreementError where this process is none of them."""
    import torch.distributed as dist

    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    raise errors.AgreementError(
        f"expected a process group that contains this rank, got {type(group).__name__} {group!r}"
    )


def _device(group: ProcessGroup) -> str:
    """Return the device the group's collectives take: "cpu" wherever it can, else the one it is bound to."""
    import torch.distributed as dist

    kinds = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    bound = getattr(group, "bound_device_id", None)  # of init_process_group; else the current device
    return "cpu" if "cpu" in kinds else kinds[0] if bound is None else str(bound)


# -- the channels of this process ------------------------------------------------------------------

_registry: weakref.WeakKeyDictionary[ProcessGroup, Channel] = weakref.WeakKeyDictionary()
_registry_lock = threading.Lock()
_routes: deque[plan.Route] = deque(maxlen=_ROUTES_KEPT)
_NOTHING: Final = plan.Load()
_NOWHERE: Final = plan.Route((), (), reduced=False, loads=(), local=_NOTHING)


def _channels(*groups: ProcessGroup | None) -> tuple[list[Channel], BaseException | None]:
    """Return the channels to enter, in order and each once; and what was wrong with a group without one."""
    found: list[Channel] = []
    problem: BaseException | None = None
    for group in groups:
        try:
            if group is not None and (channel := _channel(group)) not in found:
                found.append(channel)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the ranks of the other group must hear of it
            problem = problem or exc
    return found, problem


def _channel(group: ProcessGroup) -> Channel:
    with _registry_lock:
        _members(group)
        channel = _registry.get(group)
        if channel is None:
            channel = _registry[group] = Channel(_GroupLink(group))
        return channel


def _miss_others(entered: list[Channel]) -> None:
    """Where a group was refused the peers may be in any other one: their next export must not pass for it."""
    registry = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    groups: list[ProcessGroup] = list(getattr(registry, "pg_map", ()))  # torch's own, of this rank
    others = [channel for channel in _channels(*groups)[0] if channel not in entered]
    for channel in others:
        channel.miss()


def _route(specs: tuple[plan.Spec, ...], channels: list[Channel], *, reduced: bool) -> plan.Route:
    """Return the route of these specs; a steady export finds the one of last time."""
    groups = tuple(channel.members for channel in channels)
    for known in tuple(_routes):
        if known.specs == specs and known.groups == groups and known.reduced == reduced:
            return known
    fresh = plan.route(specs, groups, _rank(), reduced=reduced)
    _routes.append(fresh)
    return fresh


def _rank() -> int:
    """Return the global rank; 0 where no process group was made (then torch may not even be loaded)."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_rank() if dist is not None and dist.is_initialized() else 0


def _check_shape(rows: Ints, specs: Sequence[plan.Spec]) -> None:
    expected = (len(specs), moments.WORDS)
    if rows.shape != expected or rows.dtype != np.int64:
        raise errors.ReductionError(
            f"expected int64 moments of shape {expected}, got {rows.dtype} {rows.shape}"
        )


def _or_unset(number: int | None) -> int:
    return wire.UNSET if number is None else number
