"""What is logged, and what is reduced, of masks and series: all of it, or one key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import histogram
from .frame import UNLOGGED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .frame import Frame, Masked, Series, Spec
    from .moments import Rows


def collect(
    masks: Iterable[Masked],
    series: Iterable[Series],
    frame: Frame,
    key: str | None,
    specs: list[Spec],
    rows: list[Rows],
) -> None:
    """Log what is new of masks and series, all of it or one key; append the moments of all to `rows`."""
    for masked in masks:
        _collect_masked(masked, frame, key, specs, rows)
    for each in series:
        if key is None or each.spec.key == key:
            found = each.moments()[None]
            frame.add_series(each, found)
            specs.append(each.spec)
            rows.append(found)


def _collect_masked(
    masked: Masked, frame: Frame, key: str | None, specs: list[Spec], rows: list[Rows]
) -> None:
    blocks = [block for block in masked.blocks.values() if block.of_key(key)]
    own = (key is None or masked.spec.key == key) and not masked.counted
    counted = masked.moments()
    if (blocks or own) and masked.record_id == UNLOGGED:
        frame.add_mask(masked, counted)
    if own:
        specs.append(masked.spec)
        rows.append(counted)
    for block in blocks:
        found = block.moments()
        frame.add_rows(masked, block, found, key)
        chosen = block.of_key(key)
        specs += block.calls.specs if key is None else [block.calls.specs[i] for i in chosen]
        rows.append(found if key is None else found[chosen])


def unlog(masks: Iterable[Masked], first_id: int) -> None:
    """Take back that records from an id on are in the log."""
    for masked in masks:
        if masked.record_id >= first_id:
            masked.record_id = UNLOGGED
        for block in masked.blocks.values():
            block.ids = [UNLOGGED if record >= first_id else record for record in block.ids]


def unlogged(masks: Iterable[Masked], series: Iterable[Series], key: str | None) -> int:
    """Count the records of one key, or of all keys, that are not in the log."""
    found = sum(each.logged < len(each.values) for each in series if key in (None, each.spec.key))
    for masked in masks:
        found += masked.record_id == UNLOGGED and not masked.counted and key in (None, masked.spec.key)
        found += sum(key in (None, spec.key) for spec, *_ in masked.pending)
        found += sum(len(block.unlogged(key)) for block in masked.blocks.values())
    return found


def histograms(masks: Iterable[Masked], frame: Frame, key: str | None, found: dict[Spec, Rows]) -> None:
    """Count the values of keys of which quantiles are asked; their records are tagged with what is asked."""
    for block in (block for masked in masks for block in masked.blocks.values()):
        for spec, record, counts in block.asked(key):
            frame.tags[record] = histogram.tags(spec.quantiles)
            found[spec] = counts if spec not in found else found[spec] + counts


def again(masked: Masked, since_id: int) -> Masked:
    """Return a drained mask for more to be under it; one with an id below `since_id` is of another log."""
    masked.drained = False
    if masked.mask is None and masked.selected < masked.elements:
        masked.index = np.flatnonzero(masked.bits())
    if UNLOGGED < masked.record_id < since_id:
        masked.record_id, masked.counted = UNLOGGED, False
    return masked
