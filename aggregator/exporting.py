"""An export: drain the window, hand it to the log, reduce it, note the outcome; only then raise.

Nothing is raised before the collectives, for the other ranks are in them already: what went wrong goes with
them, and every rank raises. Only an interrupt ends an export before that; the next one then tells the others.
"""

from __future__ import annotations

import uuid
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import eventlog
from eventlog import Loss, as_step, moments, schema

from . import collective
from .merge import Export

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

    from eventlog import Drained, Recorder, Spec
    from eventlog.moments import Rows

__all__ = ["export"]

_SESSION = uuid.uuid4().hex  # names this process where no log does
_POOLS: dict[tuple[Spec, ...], tuple[tuple[Spec, ...], NDArray[np.intp]]] = {}
_POOLS_KEPT = 16


@dataclass(slots=True)
class _Call:
    """What an export is, as far as this rank came, and the first thing that went wrong.

    `operation` is None where that was before it was known what is exported.
    """

    log: eventlog.Log | None = None
    operation: str | None = None
    key: str | None = None
    step: int | None = None
    reset: bool = True
    error: BaseException | None = None

    def __enter__(self) -> None:
        """Keep whatever is raised inside, but interrupts, for the end: the peers must hear of it."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        caught = isinstance(error, Exception)
        if caught:
            self.error = self.error or error
        return caught


def export(
    recorders: Sequence[Recorder],
    operation: str,
    key: str | None = None,
    reduce_group: ProcessGroup | None = None,
    key_sync_group: ProcessGroup | None = None,
    reset: Any = True,
    step: Any = None,
) -> Export:
    """Export what the recorders hold, or one key of the only one; `operation` names the call on all ranks."""
    with np.errstate(all="ignore"):  # whatever numpy is told to do, no window is lost to it
        made = _export(recorders, operation, key, (reduce_group, key_sync_group), reset, step)
    if made.clashes:
        warnings.warn(
            f"expected each name once, got two of {', '.join(map(repr, made.clashes[:5]))} (of two keys or "
            "trackers); the later one is exported",
            stacklevel=3,
        )
    return made


def _export(
    recorders: Sequence[Recorder],
    operation: str,
    key: str | None,
    groups: tuple[ProcessGroup | None, ProcessGroup | None],
    reset: Any,
    step: Any,
) -> Export:
    call = _Call()
    try:
        drained = _take(call, recorders, operation, key, reset, step, alone=groups == (None, None))
        specs, rows, counts = _load(call, drained)
    except BaseException:  # an interrupt
        collective.miss(*groups)
        raise
    log = call.log
    reduced = collective.reduce(
        specs,
        rows,
        *groups,
        operation=call.operation,
        key=call.key,
        session=_SESSION if log is None else log.producer.session,
        reset=call.reset,
        step=call.step,
        attempt=None if log is None else log.own_attempt,
        error=call.error,
        full=key is None,
        counts=counts,
    )
    try:
        if call.operation is None and reduced.key is not None:
            drained = _take_as_told(call, recorders, reduced.key)
        made = Export.of(reduced.parts)
    finally:
        if log is not None:  # at the end: it wakes the writer, who needs the interpreter and a core
            tracker = recorders[0].name if len(recorders) == 1 else None
            _note(log, call, drained, reduced, tracker, alone=groups[0] is None)
    if reduced.error is not None:
        raise reduced.error
    return made


def _take(
    call: _Call,
    recorders: Sequence[Recorder],
    operation: str,
    key: str | None,
    reset: Any,
    step: Any,
    *,
    alone: bool,
) -> Drained:
    """Take the window into the log; an interrupt is raised when it is there.

    Where something is wrong from the start an export alone takes nothing. In a group it takes what the others
    take: else it would be in the numbers of the next one. Which key that is, they may have to tell.
    """
    with call:
        call.log = eventlog.current(export=True)
    with call:
        call.key = None if key is None else recorders[0].exported_key(key)
        call.operation = operation if key is None else f"export {call.key!r}"
    with call:
        call.reset = bool(reset)
    with call:
        call.step = None if step is None else as_step(step)
    drained = None
    if call.operation is not None and not (alone and call.error):
        with call:
            drained = eventlog.drain(
                recorders, key=call.key, reset=call.reset, step=call.step, anyhow=not alone
            )
            call.error = call.error or drained.failed
    drained = drained or eventlog.drain([])
    with call:
        if call.log is not None:
            _hand_over(call.log, drained)
    if drained.failed is not None and not isinstance(drained.failed, Exception):
        raise drained.failed
    return drained


def _take_as_told(call: _Call, recorders: Sequence[Recorder], key: str) -> Drained:
    """Take the key that the others exported, which this rank did not know, out of the next numbers."""
    call.key = key
    drained = eventlog.drain(recorders, key=key, reset=call.reset, step=call.step, anyhow=True)
    with call:
        if call.log is not None:
            _hand_over(call.log, drained)
    return drained


def _hand_over(log: eventlog.Log, drained: Drained) -> None:
    """Hand a window to the log, and count what could not be collected of it."""
    lost, why = drained.lost, drained.failed
    try:
        log.write(drained.frame)
    except Exception as error:
        lost, why = lost + len(drained.frame), error
        raise
    finally:
        if lost:
            stream, cause = schema.Stream.RECORDS, schema.LossCause.ENCODE_FAILED
            detail = f"{type(why).__name__}: {why}"
            log.writer.lose(Loss(stream, cause, drained.frame.window, lost, detail=detail, step=drained.step))


def _load(call: _Call, drained: Drained) -> tuple[tuple[Spec, ...], Rows, Rows | None]:
    """Return what goes into the collectives: nothing where that cannot be told."""
    with call:
        specs, rows = _pooled(drained)
        return specs, rows, drained.counts(specs)
    return (), moments.empty(0), None


def _pooled(drained: Drained) -> tuple[tuple[Spec, ...], Rows]:
    """Merge the records of the same key; the layout of the steady state is looked up, not built."""
    specs = tuple(drained.specs)
    found = _POOLS.get(specs)
    if found is None:
        index = {spec: i for i, spec in enumerate(dict.fromkeys(specs))}
        found = tuple(index), np.array([index[spec] for spec in specs], np.intp)
        if len(_POOLS) >= _POOLS_KEPT:
            _POOLS.clear()
        _POOLS[specs] = found
    distinct, groups = found
    if len(distinct) == len(specs):
        return distinct, drained.rows
    return distinct, moments.pool(drained.rows, groups, len(distinct))


def _note(
    log: eventlog.Log,
    call: _Call,
    drained: Drained,
    reduced: collective.Reduced,
    tracker: str | None,
    *,
    alone: bool,
) -> None:
    """Write an export row per group; the first one says over whom the keys without a group were reduced.

    `alone`: over nobody else, whatever key_sync_group did for the others.
    """
    if reduced.attempt is not None:
        log.learn_attempt(reduced.attempt)
    window = drained.frame.window
    own = ((f"{log.producer.session}:{window}", None),) if alone or not reduced.exports else ()
    for export_id, members in (*own, *reduced.exports):
        log.write_export(
            export_id=export_id,
            members=members,
            window=window,
            window_first=drained.first_window,
            step=call.step,
            reset=call.reset,
            outcome=reduced.outcome,
            tracker=tracker,
            key=call.key,
        )
