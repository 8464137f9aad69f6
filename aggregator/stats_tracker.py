"""Drop-in for `areal.utils.stats_tracker`: record where the numbers are, reduce them once per step.

    with stats_tracker.scope("ppo_actor"):
        stats_tracker.denominator(n_valid_tokens=loss_mask.bool())
        stats_tracker.stat(advantages=advantages, denominator="n_valid_tokens")
    stats = stats_tracker.export_all(reduce_group=dp_group)

An export drains the window, hands it to the log (when one is started), reduces over the group, and only then
raises whatever went wrong on any rank.
"""

from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import eventlog
from eventlog import Recorder, ReduceType, as_key, as_spread, as_tracker, errors

from . import collective, exporting

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from .merge import Export

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "DEFAULT_TRACKER",
    "TRACKERS",
    "DistributedStatsTracker",
    "ReduceType",
    "counter",
    "declare",
    "denominator",
    "disable_scope",
    "export",
    "export_all",
    "get",
    "record_timing",
    "scalar",
    "scope",
    "scope_func_wrapper",
    "set_step",
    "stat",
]


class DistributedStatsTracker:
    """Records metrics under scopes and reduces them over the ranks of a process group.

    A named tracker's keys begin with `name/`. Safe to use from several threads and tasks; a scope belongs to
    the task or thread that opened it.
    """

    def __init__(self, name: str = "") -> None:
        self.recorder = Recorder(name)
        eventlog.lenient()  # says so, if the environment does not say what to do with mistakes

    @property
    def name(self) -> str:
        """The tracker's name, "" for the default one."""
        return self.recorder.name

    # -- scopes ------------------------------------------------------------------------------------

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Record under `name/` inside the block; nested scopes join."""
        return self.recorder.scope(name)

    def disable_scope(self) -> AbstractContextManager[None]:
        """Record without any scope inside the block."""
        return self.recorder.no_scope()

    def scope_func_wrapper(self, name: str) -> Callable[[F], F]:
        """Decorate a function or generator, sync or async, so that its body records under `name/`."""
        return eventlog.scoped(functools.partial(self.scope, name))

    # -- recording ---------------------------------------------------------------------------------

    def denominator(
        self,
        *,
        reduce_group: ProcessGroup | None = None,
        cu_seqlens: Any = None,
        sample_ids: Sequence[str | int] | None = None,
        tags: Mapping[str, Any] | None = None,
        **masks: Any,
    ) -> None:
        """Register boolean masks; each exports the number of its true elements.

        The log keeps how much each sequence selects: each row of a mask, or, of a packed batch, each stretch
        between two of `cu_seqlens` (integers 0, n0, n0 + n1, … up to the number of elements; masks with one
        element a sequence may stand beside packed ones). `sample_ids` name the sequences, `tags` (as JSON
        takes them) the batch. A bool tensor under one of these names is a mask. Raises a ValueError with
        expected, got and key for anything else, and for masks that are no non-empty bool tensors.
        """
        eventlog.current()
        about = {"cu_seqlens": cu_seqlens, "sample_ids": sample_ids, "tags": tags}
        about = {name: value for name, value in about.items() if value is not None}
        if about:
            masks, about = eventlog.parted(masks, about)
        try:
            self.recorder.denominator(masks, collective.label(reduce_group), about)
        except errors.RecordingError as refused:
            again = functools.partial(self.denominator, reduce_group=reduce_group, **about)
            eventlog.forgive(refused, masks, again, self.recorder.unregister)

    def stat(
        self,
        denominator: str,
        reduce_type: ReduceType | None = None,
        *,
        reduce_group: ProcessGroup | None = None,
        quantiles: float | Sequence[float] | None = None,
        **tensors: Any,
    ) -> None:
        """Record floating tensors under the mask that this task or thread registered last as `denominator`.

        Where it registered none since its last export: under the last one that any did. The values are
        selected by the mask and copied before the call returns (on a device they are copied, and selected at
        export). `quantiles=(0.5, 0.999)` also exports `key/p50` and `key/p99.9` of all selected values,
        within 1 %: see `eventlog.histogram`; a tensor or array of that name is a stat. Raises a ValueError
        with expected, got and key for an unknown denominator and for a wrong shape or dtype.
        """
        if quantiles is not None and (hasattr(quantiles, "layout") or isinstance(quantiles, np.ndarray)):
            tensors, quantiles = {**tensors, "quantiles": quantiles}, None  # a stat of that name
        try:
            self.recorder.stat(denominator, tensors, reduce_type, collective.label(reduce_group), quantiles)
        except errors.RecordingError as refused:
            if "quantiles" in tensors and f"{self.recorder.full_key('quantiles')!r}" in str(refused):
                refused = type(refused)(f"{refused}; ask for quantiles as a tuple of floats")
            options = {"reduce_group": reduce_group, "quantiles": quantiles}
            again = functools.partial(self.stat, denominator, reduce_type, **options)
            eventlog.forgive(refused, tensors, again, self.recorder.full_key)

    def scalar(self, *, reduce_group: ProcessGroup | None = None, **values: Any) -> None:
        """Append single numbers; exported as their mean and, as `key__count`, how many there were.

        A number on a device is read at export.
        """
        self._append(self.recorder.scalar, self.scalar, reduce_group, values)

    def counter(self, *, reduce_group: ProcessGroup | None = None, **values: Any) -> None:
        """Add integers; exported as their exact sum over calls and ranks. One on a device is waited for."""
        self._append(self.recorder.counter, self.counter, reduce_group, values)

    def _append(self, record: Any, verb: Any, reduce_group: ProcessGroup | None, values: Any) -> None:
        eventlog.current()
        try:
            record(values, collective.label(reduce_group))
        except errors.RecordingError as refused:
            again = functools.partial(verb, reduce_group=reduce_group)
            eventlog.forgive(refused, values, again, self.recorder.full_key)

    @contextmanager
    def record_timing(self, key: str, device: Any = None) -> Generator[None]:
        """Record the seconds the block takes as scalar `timeperf/key`, whatever the scope.

        Host time: it does not wait for a device. `device="cuda"` also records how long the block's work took
        there, as `timeperf/key/cuda`: by events on the device's current stream, which are read at export. On
        "cpu" both are the same. Raises a ValueError where this process has no such device.
        """
        eventlog.current()
        name, lap = key, None
        try:
            name = as_key(key)
            lap = None if device is None else eventlog.Lap(device)
        except errors.RecordingError as refused:
            eventlog.forgive(refused, {f"timeperf/{key}": device}, self.recorder.timing)
            name = ""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            with suppress(errors.RecordingError):  # the block's own error is the one to be seen
                self._time(name, began, lap)
            raise
        self._time(name, began, lap)

    def _time(self, name: str, began: float, lap: eventlog.Lap | None) -> None:
        timed: dict[str, Any] = {name: time.perf_counter() - began} if name else {}
        if lap is not None:
            timed[f"{name}/{lap.name}"] = lap.stop(timed[name])
        for key, seconds in timed.items():
            try:
                self.recorder.timing(key, seconds)
            except errors.RecordingError as refused:
                eventlog.forgive(refused, {f"timeperf/{key}": seconds}, self.recorder.timing)

    def declare(self, *keys: str, spread: str) -> None:
        """State how values lie on the ranks: "replicated" (checked, not pooled) or "shares" (summed).

        What is not declared is "shards" (pooled). Raises a ValueError for any other word, and for a key that
        is recorded as something else until its export.
        """
        lies = as_spread(spread)
        try:
            self.recorder.declare(keys, lies)
        except errors.RecordingError as refused:
            again = functools.partial(self._declare_one, spread)
            eventlog.forgive(refused, dict.fromkeys(keys), again, self.recorder.full_key)

    def _declare_one(self, spread: str, /, **key: None) -> None:
        self.declare(*key, spread=spread)

    def set_step(self, step: Any) -> None:
        """Give what this tracker records from now on a step; None: leave it to the commit."""
        self.recorder.set_step(step)

    # -- export ------------------------------------------------------------------------------------

    def export(
        self,
        key: str | None = None,
        reduce_group: ProcessGroup | None = None,
        key_sync_group: ProcessGroup | None = None,
        reset: bool = True,
        *,
        step: Any = None,
    ) -> Export:
        """Reduce what was recorded since the last export (or of one key) over the group.

        Every rank of the group must call it; ranks may hold different keys. Without `reset` the records stay
        for the next export (the log holds each once). Raises on every rank when any rank fails or disagrees.
        """
        named = f"export {self.name!r}"
        return exporting.export([self.recorder], named, key, reduce_group, key_sync_group, reset, step)


TRACKERS: dict[str, DistributedStatsTracker] = {}
DEFAULT_TRACKER = TRACKERS.setdefault("", DistributedStatsTracker())
_trackers_lock = threading.Lock()


def get(name: str = "") -> DistributedStatsTracker:
    """Return the tracker of that name, made when it is asked for first; "" is the default one.

    Slashes around a name are no part of it. Raises a ValueError or TypeError for what is no name.
    """
    name = as_tracker(name)
    with _trackers_lock:
        if name not in TRACKERS:
            TRACKERS[name] = DistributedStatsTracker(name)
        return TRACKERS[name]


def export_all(
    reduce_group: ProcessGroup | None = None,
    key_sync_group: ProcessGroup | None = None,
    reset: bool = True,
    *,
    step: Any = None,
) -> Export:
    """Export every tracker of the process in one go; see `DistributedStatsTracker.export`."""
    with _trackers_lock:
        recorders = [tracker.recorder for tracker in TRACKERS.values()]
    return exporting.export(recorders, "export_all", None, reduce_group, key_sync_group, reset, step)


def set_step(step: Any) -> None:
    """Give what all trackers of this process record from now on a step; None: leave it to the commit."""
    eventlog.set_step(step)


scope = DEFAULT_TRACKER.scope
disable_scope = DEFAULT_TRACKER.disable_scope
scope_func_wrapper = DEFAULT_TRACKER.scope_func_wrapper
denominator = DEFAULT_TRACKER.denominator
stat = DEFAULT_TRACKER.stat
scalar = DEFAULT_TRACKER.scalar
counter = DEFAULT_TRACKER.counter
record_timing = DEFAULT_TRACKER.record_timing
declare = DEFAULT_TRACKER.declare
export = DEFAULT_TRACKER.export
