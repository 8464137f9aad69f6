"""What is logged, and what is reduced, of masks and series: all of it, or one key."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def histograms(masks: Iterable[Masked], frame: Frame, key: str | None, found: dict[Spec, Rows]) -> None:
    """Count the values of keys of which quantiles are asked; their records are tagged with what is asked."""
    for block in (block for masked in masks for block in masked.blocks.values()):
        for spec, record, counts in block.asked(key):
            frame.tags[record] = histogram.tags(spec.quantiles)
            found[spec] = counts if spec not in found else found[spec] + counts


def again(masked: Masked, since_id: int) -> Masked:
    """Return a drained mask for more to be under it; one with an id below `since_id` is of another log."""
    masked.drained = False
    if UNLOGGED < masked.record_id < since_id:
        masked.record_id, masked.counted = UNLOGGED, False
    return masked
