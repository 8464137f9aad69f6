"""Settling a window: what was recorded on devices becomes rows beside the others, with one wait a device.

A tensor on a device is kept as a clone until the window is drained. Then, on the device, masks are counted
and packed and the moments of every row are taken under its mask; counts, moments and single numbers come to
the host together. The selected values stay where they are until the log wants them (`device.Parcel`). Devices
without float64 (`device.reduces`) have their values brought to the host as they are.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import device, moments
from .errors import RecordingError
from .frame import UNCOUNTED, UNLOGGED, Calls, Masked, RowBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from .frame import Series, Spec
    from .histogram import Counts
    from .moments import Rows

    Entry = tuple[Spec, Any, int, int | None, str]
    Asked = tuple[Any, Callable[[NDArray[np.int64]], None]]  # a tensor, and who takes it once it is fetched

CHUNK_BYTES: Final = 32 << 20  # of rows reduced at a time: the arithmetic needs a few times that


@dataclass(slots=True)
class DeviceBlock(RowBlock):
    """Rows of one dtype under one mask on a device: their moments are known, their values still there."""

    rows: Rows = field(default_factory=lambda: moments.empty(0))
    matrix: Any = None  # (rows, elements), not selected yet
    mask: Any = None
    counts: dict[int, Counts] = field(default_factory=dict[int, "Counts"])  # of rows with quantiles

    def moments(self) -> Rows:
        """Return the moments of every row, shape (rows, WORDS)."""
        return self.rows

    def parts(self) -> list[NDArray[Any]]:
        """Return the selected values; waits for the device."""
        return [part.array() for part in self.taken(range(len(self.calls)))]

    def taken(self, rows: Sequence[int]) -> list[device.Parcel]:
        """Return the selected values of some rows, to be sent for."""
        chosen = self.matrix if len(rows) == len(self.calls) else self.matrix[list(rows)]
        size = len(rows) * self.width * self.dtype.itemsize
        return [device.Parcel(partial(device.selected, chosen, self.mask, self.width), len(rows), size)]

    def asked(self, key: str | None) -> Iterator[tuple[Spec, int, Counts]]:
        """Yield (spec, record id, histogram) of the rows of which quantiles are asked."""
        for row, counts in self.counts.items():
            spec = self.calls.specs[row]
            if key in (None, spec.key):
                yield spec, self.ids[row], counts

    def drop_key(self, key: str) -> None:
        """Forget the rows of one key."""
        chosen = [i for i, spec in enumerate(self.calls.specs) if spec.key != key]
        self.counts = {new: self.counts[old] for new, old in enumerate(chosen) if old in self.counts}
        self.matrix, self.rows = self.matrix[chosen], self.rows[chosen]
        self.calls, self.ids = self.calls.take(chosen), [self.ids[i] for i in chosen]


def settle(masks: Iterable[Masked], series: Iterable[Series]) -> None:
    """Settle what of these masks and series still lies on devices; where that fails nothing is changed."""
    waiting = [masked for masked in masks if masked.pending or masked.selected == UNCOUNTED]
    late = [each for each in series if each.late]
    if not waiting and not late:
        return
    asked = [each for masked in waiting for each in _asked(masked)]
    asked += [each for one in late for each in _numbers(one)]
    for (_, take), found in zip(asked, device.fetch([tensor for tensor, _ in asked]), strict=True):
        take(found)
    for masked in waiting:
        _select_on_host(masked)
    for each in late:
        each.settle()


def _numbers(series: Series) -> Iterator[Asked]:
    for number in (series.values[at] for at in series.late):
        if isinstance(number, device.Number) and device.reduces(number.held):
            yield number.bits(), number.take


def _asked(masked: Masked) -> Iterator[Asked]:
    """Yield what the host wants to know of a mask and of the rows under it."""
    if masked.mask is not None and not device.reduces(masked.mask):
        masked.capture(masked.mask.array())
    if masked.mask is not None and masked.selected == UNCOUNTED:
        flat = masked.mask.tensor().reshape(-1)
        masked.packed = device.Parcel(partial(device.packed, flat), 1, -(-len(flat) // 8))
        yield flat.sum(), partial(_count, masked)
    if isinstance(bounds := masked.batch.bounds, device.Held):
        yield bounds.tensor().long(), partial(_bound, masked)
    groups: dict[tuple[Any, Any], list[Entry]] = {}
    for entry in masked.pending:
        if _stays(held := entry[1]):
            groups.setdefault((held.device, held.dtype), []).append(entry)
        elif isinstance(masked.packed, device.Parcel):
            masked.packed.send()  # ahead of what is fetched, on the same stream: no wait of its own
    for (place, _), entries in groups.items():
        mask = _mask_on(masked, place)
        per_chunk = max(1, CHUNK_BYTES // (mask.numel() * entries[0][1].itemsize))
        for first in range(0, len(entries), per_chunk):
            yield from _chunk(masked, mask, entries[first : first + per_chunk])


def _stays(held: Any) -> bool:
    """Whether values are reduced where they lie, not on the host."""
    return isinstance(held, device.Held) and device.reduces(held)


def _count(masked: Masked, found: NDArray[np.int64]) -> None:
    masked.selected = int(found[0])


def _bound(masked: Masked, found: NDArray[np.int64]) -> None:
    """Take the bounds of sequences; the mask is kept without them where they are wrong."""
    try:
        masked.batch = masked.batch.settled(found.copy(), masked.elements, masked.spec.key)
    except RecordingError as error:
        masked.batch = replace(masked.batch, bounds=None, sample_ids=None)
        warnings.warn(f"{error}; the mask is kept without its sequences", stacklevel=2)


def _mask_on(masked: Masked, place: Any) -> Any:
    """Return the mask, flat, on a device."""
    if masked.mask is None:
        return device.sent(masked.bits(), place)
    return masked.mask.tensor().reshape(-1).to(place, non_blocking=True)


def _chunk(masked: Masked, mask: Any, entries: Sequence[Entry]) -> Iterator[Asked]:
    """Yield the moments of rows of one dtype on one device, who makes a block of them; and histograms."""
    matrix = device.stacked([held for _, held, *_ in entries])
    calls = Calls()
    for spec, _, time, step, dtype in entries:
        calls.add(spec, time, step, dtype)
    counts: dict[int, Counts] = {}

    def take(found: NDArray[np.int64]) -> None:
        masked.blocks[f"{mask.device} {len(masked.blocks)}"] = DeviceBlock(
            masked.selected,
            device.numpy_dtype(matrix),
            calls=calls,
            ids=[UNLOGGED] * len(calls),
            rows=found.reshape(-1, moments.WORDS).copy(),
            matrix=matrix,
            mask=mask,
            counts=counts,
        )

    yield device.moments_of(matrix, mask), take
    asked = [row for row, spec in enumerate(calls.specs) if spec.quantiles]
    if asked:
        yield (
            device.counts_of(matrix[asked], mask),
            lambda found: counts.update(zip(asked, found.reshape(len(asked), -1).copy(), strict=True)),
        )


def _select_on_host(masked: Masked) -> None:
    """Select what is not reduced on a device: values of the host under a mask from a device above all."""
    pending, masked.pending = masked.pending, []
    for spec, held, time, step, dtype in pending:
        if _stays(held):
            continue
        values = held if isinstance(held, np.ndarray) else held.array()
        values = values.reshape(-1)[masked.bits()]
        masked.block_of(values.dtype).add(spec, values, None, time, step, dtype)
