"""The recording verbs of one tracker.

Recording never communicates and never waits for a device. A call is checked as a whole before anything of it
is recorded: a refused call records nothing. A recorder may be used from any thread and task; each binds to
masks of its own, see `binding`.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from . import arrays, batch, binding, device, histogram, scope
from .clock import now_us
from .collection import again
from .errors import RecordingError
from .frame import FIRST_ROWS, Masked, Series, Spec
from .overflow import NUMBER_BYTES, Spilled, valve, window
from .reduction import Kind, ReduceType, Spread
from .specs import Specs
from .tags import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager


TIMING_PREFIX = "timeperf/"
NO_TAGS = "{}"
_SERIES_TYPES = {Kind.SCALAR: ReduceType.SCALAR, Kind.TIMING: ReduceType.SCALAR, Kind.COUNTER: None}

_process_step: int | None = None
_recorders: WeakSet[Recorder] = WeakSet()


class Recorder:
    """What one tracker recorded since the last export; `name` "" is the default tracker."""

    def __init__(self, name: str = "") -> None:
        self.name = name = arrays.as_tracker(name)
        self.lock = threading.RLock()
        _recorders.add(self)
        self._root = f"{name}/" if name else ""
        self._step: int | None = None
        self.specs = Specs(name)
        self._expected: dict[Spec, int] = {}
        self._latest: dict[str, Masked] = {}  # of any context, for those that registered none
        self._known = binding.NOWHERE
        self.masks: list[Masked] = []
        self.series: dict[tuple[Spec, int | None, str | None], Series] = {}
        self.kept_since: int | None = None  # the first window with records that a later export covers too
        self.room = valve.room  # bytes that it may still hold
        self.spilled = Spilled()
        self.own_steps: dict[str, int] = {}  # of keys whose numbers were measured at a step of their own
        self.since_id = 0  # record ids below are of another log, or of none

    # -- names -------------------------------------------------------------------------------------

    def full_key(self, key: str) -> str:
        """Return the key as it is recorded now: tracker, scope, key."""
        return self._root + scope.prefix(self) + arrays.as_key(key)

    def exported_key(self, key: str) -> str:
        """Return the key under which an export finds it: timings have no tracker and no scope."""
        name = arrays.as_key(key)
        return name if name.startswith(TIMING_PREFIX) else self.full_key(name)

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Record under `name/` inside the block."""
        return scope.scope(self, name)

    def no_scope(self) -> AbstractContextManager[None]:
        """Record without any scope inside the block."""
        return scope.no_scope(self)

    def declare(self, keys: Iterable[str], spread: Spread) -> None:
        """State how the values of keys lie on the ranks, from now on; see `Specs.declare`."""
        names = [self.full_key(key) for key in keys]
        with self.lock:
            self.specs.declare(names, spread)
            self._known = binding.NOWHERE

    def set_step(self, step: Any) -> None:
        """Give what this tracker records from now on a step; None: that of the process, else the commit's."""
        self._step = None if step is None else arrays.as_step(step)

    def _now(self, step: Any = None) -> tuple[int, int | None]:
        """Return the time of a call (UTC µs) and its step, unless that is given."""
        own = _process_step if self._step is None else self._step
        return now_us(), own if step is None else arrays.as_step(step)

    # -- verbs -------------------------------------------------------------------------------------

    def denominator(
        self, masks: Mapping[str, Any], label: str | None = None, about: Mapping[str, Any] | None = None
    ) -> None:
        """Register masks (non-empty bool tensors); stats recorded later bind to them by name.

        `about` is what is said of their sequences, see `batch.Batch.read`.
        """
        said = batch.Batch.read(**about) if about else batch.PLAIN
        checked = [(full := self.full_key(key), arrays.as_mask(mask, full)) for key, mask in masks.items()]
        now, step = self._now()
        fresh = [
            (key, mask, self.specs.of(key, Kind.DENOMINATOR, ReduceType.SUM, None, label), said.of(mask, key))
            for key, mask in checked
        ]
        with self.lock:
            added = [
                (key, Masked(spec, mask, now, step, own, self._expected.get(spec, FIRST_ROWS)))
                for key, mask, spec, own in fresh
            ]
            self.specs.claim([masked.spec for _, masked in added])
            self.masks += [masked for _, masked in added]
            self._latest.update(added)
            for _, masked in added:
                self.room -= masked.own_bytes
        binding.bind(self, added)
        if self.room < 0:
            self.room = valve.release(self)

    def unregister(self, key: str) -> str:
        """Let no stat bind to a mask any more, for the next one was refused; returns its full key."""
        full = self.full_key(key)
        with self.lock:
            self._latest.pop(full, None)
        binding.bind(self, [(full, None)])
        return full

    def stat(
        self,
        denominator: str,
        tensors: Mapping[str, Any],
        reduce_type: ReduceType | None = None,
        label: str | None = None,
        quantiles: Any = None,
    ) -> None:
        """Record floating tensors of the denominator's shape under its mask; None: AVG_MIN_MAX.

        That is the one this context (task or thread) registered last since it exported, whoever else did;
        where it registered none, the last one that anybody registered since anybody exported.
        """
        now, step = self._now()
        with self.lock:
            place = self._known
            if quantiles is not None or not place.is_of(denominator, reduce_type, label):
                place = self._find(denominator, reduce_type, label, quantiles)
            under, masked = place.under, place.masked
            specs: list[Spec] = []
            checked: list[tuple[Spec, Any, str]] = []
            for key, value in tensors.items():
                spec = under[key]
                specs.append(spec)
                checked.append((spec, *arrays.as_values(value, spec.key, masked.shape)))
            self.specs.claim(specs)
            if masked.drained:
                self.masks.append(again(masked, self.since_id))
            for spec, values, dtype in checked:
                masked.add(spec, values, now, step, dtype)
            self.room -= masked.row_bytes * len(checked)
        if self.room < 0:
            self.room = valve.release(self)

    def _find(self, denominator: str, reduce_type: Any, label: str | None, quantiles: Any) -> binding.Place:
        """Return where stats go, and remember it for the next ones."""
        asked = () if quantiles is None else histogram.as_quantiles(quantiles)
        kind = ReduceType.AVG_MIN_MAX if reduce_type is None else arrays.as_reduce_type(reduce_type)
        if kind is ReduceType.SCALAR:
            hint = "use scalar() for single numbers"
            raise RecordingError(f"expected a reduce type for tensors, got SCALAR; {hint}")
        under = self.specs.under(self._root + scope.prefix(self), denominator, kind, label, asked)
        masked = binding.bound(self, under.denominator, self._latest.get(under.denominator))
        if masked is None:
            raise self._unbound(under.denominator)
        place = binding.Place(denominator, reduce_type, label, under, masked)
        if quantiles is None and masked is binding.bound(self, under.denominator, None):  # not another's
            self._known = place
        return place

    def _unbound(self, denominator: str) -> RecordingError:
        known = ", ".join(map(repr, sorted(binding.names(self) | set(self._latest)))) or "none"
        return RecordingError(
            f"expected a registered denominator, got {denominator!r}; registered now: {known}"
        )

    def scalar(self, values: Mapping[str, Any], label: str | None = None) -> None:
        """Append numbers; exported as their mean and count. Those on a device are read when drained."""
        self._append(Kind.SCALAR, self._read(values, device.as_scalar), label)

    def samples(
        self,
        key: str,
        values: Mapping[str, Any],
        *,
        tags: Mapping[str, Any] | None = None,
        step: Any = None,
        since: int | None = None,
    ) -> None:
        """Append numbers measured on samples, by sample id; exported as those of `scalar` are.

        `tags` is what else is known of all of them, as JSON takes it; `step` the step of the model that was
        measured: it is that of these numbers alone. Without values the key is known all the same, as it is on
        ranks that have some. An equal number that `scalar` appended `since` then (UTC µs) is the same one.
        """
        full = self.full_key(key)
        checked = {arrays.as_id(each): arrays.as_scalar(value, full) for each, value in values.items()}
        own = None if step is None else arrays.as_step(step)
        now, step = self._now(own)
        about = as_json(tags or {})
        with self.lock:
            spec = self.specs.of(full, Kind.SCALAR, ReduceType.SCALAR)
            self.specs.claim([spec])
            if own is not None:
                self.own_steps[full] = own
            if since is not None:
                self._take_back(spec, checked.values(), since)
            series = self.series.setdefault((spec, step, about), Series(spec, step, about))
            for each, value in checked.items():
                series.append(value, now)
                series.samples.append(each)
            self.room -= 2 * NUMBER_BYTES * len(checked)
        if self.room < 0:
            self.room = valve.release(self)

    def _take_back(self, spec: Spec, values: Iterable[float], since: int) -> None:
        """Drop, once each, numbers that are recorded by sample now; what is in the log already stays."""
        wanted = Counter(values)
        for identity, series in [*self.series.items()]:
            if series.spec is not spec or series.about is not None or series.late:
                continue
            for at in range(len(series.values) - 1, series.logged - 1, -1):
                if series.times[at] >= since and wanted[series.values[at]] > 0:
                    wanted[series.values[at]] -= 1
                    del series.values[at], series.times[at]
                    self.room += NUMBER_BYTES
            if not series.values:
                del self.series[identity]

    def measured(self, values: Mapping[str, Any], step: Any) -> None:
        """Append numbers of a whole evaluation of the model as of a step, which is that of these alone."""
        at, (now, _) = arrays.as_step(step), self._now()
        read = list(self._read(values, arrays.as_scalar))
        with self.lock:
            specs = [self.specs.of(full, Kind.SCALAR, ReduceType.SCALAR) for full, _ in read]
            self.specs.claim(specs)
            for spec, (full, value) in zip(specs, read, strict=True):
                self.own_steps[full] = at
                self.series.setdefault((spec, at, NO_TAGS), Series(spec, at, NO_TAGS)).append(value, now)

    def sampled(self, key: str) -> bool:
        """Whether the window has the key by sample."""
        full = self.full_key(key)
        with self.lock:
            held = (s.spec.key == full and _of_samples(s) for s in self.series.values())
            return full in self.spilled.sampled or any(held)

    def held(self, key: str) -> Spec | None:
        """Return what the window has the key as; None where it has not."""
        with self.lock:
            return self.specs.held(self.full_key(key))

    def own_step(self, key: str) -> int | None:
        """Return the step of which the window has the key, where that was given for the key itself."""
        with self.lock:
            return self.own_steps.get(self.full_key(key))

    def timing(self, key: str, seconds: float | device.Lap) -> None:
        """Append a duration in seconds under "timeperf/", whatever the scope and tracker."""
        self._append(Kind.TIMING, [(TIMING_PREFIX + arrays.as_key(key), seconds)], None)

    def counter(self, values: Mapping[str, Any], label: str | None = None) -> None:
        """Add integers; exported as their exact sum over calls and ranks."""
        sums: dict[str, int] = {}
        for full, value in self._read(values, arrays.as_increment):
            sums[full] = sums.get(full, 0) + value
        self._append(Kind.COUNTER, sums.items(), label)

    def _read(self, values: Mapping[str, Any], read: Callable[[Any, str], Any]) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            full = self.full_key(key)
            yield full, read(value, full)

    def _append(self, kind: Kind, values: Iterable[tuple[str, Any]], label: str | None) -> None:
        now, step = self._now()
        with self.lock:
            ready: list[tuple[Series, Any]] = []
            found: dict[Spec, Series] = {}  # names that differ by slashes around them are one key
            for key, value in values:
                spec = self.specs.of(key, kind, _SERIES_TYPES[kind], None, label)
                series = found.get(spec) or self.series.get((spec, step, None))
                found[spec] = series = series or Series(spec, step, total=self.spilled.total(spec))
                series.check(value)
                ready.append((series, value))
            self.specs.claim(found)
            self.series |= {(spec, step, None): series for spec, series in found.items()}
            for series, value in ready:
                series.append(value, now)
            self.room -= NUMBER_BYTES * len(ready)
        if self.room < 0:
            self.room = valve.release(self)

    def begin_anew(self) -> None:
        """In a forked child: what was recorded is the parent's to export, and so may be the lock."""
        self.lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self.masks, self.series, self._latest, self.kept_since = [], {}, {}, None
        self.own_steps = {}
        self.spilled, self.room, self._known = Spilled(), valve.room, binding.NOWHERE
        self.specs.forget()

    # -- drain -------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop everything recorded; remember how many rows each mask had, to size the next window."""
        if self.specs.trim():
            self._expected = {}
        for masked in self.masks:
            self._expected[masked.spec] = max((len(b.calls) for b in masked.blocks.values()), default=1)
            masked.drain()
        self._clear()
        binding.release(self)

    def forget_key(self, key: str) -> None:
        """Drop one key; a denominator stays usable by the stats of other keys."""
        for masked in self.masks:
            masked.counted = masked.counted or masked.spec.key == key
            for block in masked.blocks.values():
                if block.of_key(key):
                    block.drop_key(key)
        self.series = {identity: s for identity, s in self.series.items() if s.spec.key != key}
        self.spilled.forget_key(key)
        self.specs.forget_key(key)
        self.own_steps.pop(key, None)

    def let_go(self, masks: Iterable[Masked], series: Iterable[tuple[Spec, int | None, str | None]]) -> None:
        """Drop what was spilled; its masks stay usable."""
        for masked in masks:
            masked.drain()
        self.masks = [masked for masked in self.masks if not masked.drained]
        for identity in series:
            gone = self.series.pop(identity)
            if _of_samples(gone):
                self.spilled.sampled.add(gone.spec.key)


def _of_samples(series: Series) -> bool:
    return series.about is not None and len(series.samples) == len(series.values)


def set_step(step: Any) -> None:
    """Give what all trackers of the process record from now on a step; None: leave it to the commit."""
    global _process_step
    _process_step = None if step is None else arrays.as_step(step)


def recorders() -> list[Recorder]:
    """Return the recorders of this process."""
    while True:
        with suppress(RuntimeError):  # another thread made one meanwhile
            return list(_recorders)


def _begin_anew_in_child() -> None:
    window.begin_anew()
    binding.begin_anew()
    for recorder in _recorders:
        recorder.begin_anew()


os.register_at_fork(after_in_child=_begin_anew_in_child)
