"""Recording mistakes: raised, or, where training is to go on whatever is recorded, warned of and counted.

AREAL_METRICS_ON_MISTAKE=raise (the default) raises what a verb refuses: RecordingError. With =warn every
entry of a call stands for itself: what is refused is lost, the rest is recorded; each key warns once; a
started log counts the losses (cause "refused"). A mask that is refused takes its place from the one before
it, so that no stat binds to an old mask: the stats under it are refused too. A key that is recorded as two
kinds between two exports keeps the first one.

What records no values still raises: `scope("")`, `declare` with an unknown spread, `set_step(-1)`, and
exports and commits with such a step.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from . import process, warning
from .errors import RecordingError
from .options import ON_MISTAKE as VARIABLE
from .options import lenient
from .overflow import window
from .schema import LossCause, Stream
from .segment import Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WARNED_AT_MOST: Final = 1 << 12  # keys that are made up anew each step must not pile up
_warned: set[str] = set()
_lock = threading.Lock()


def forgive(
    refused: RecordingError,
    entries: Mapping[str, Any],
    again: Callable[..., None],
    lost: Callable[[str], str] = str,
) -> None:
    """Raise what a verb refused; or call it `again` with each of its entries, and lose those it refuses.

    `lost` is told the name of each lost entry, and returns its key in full.
    """
    if not lenient():
        raise refused
    if len(entries) > 1:
        for name, value in entries.items():
            again(**{name: value})
        return
    for name in entries:
        try:
            key = lost(name)
        except RecordingError:  # the name is the mistake
            key = repr(name)
        _lose(key, refused)


def _lose(key: str, refused: RecordingError) -> None:
    if (log := process.current()) is not None:
        detail = f"{key}: {refused}"  # for this process; the files hold where it was, not what
        log.writer.lose(Loss(Stream.RECORDS, LossCause.REFUSED, window.open, rows=1, detail=detail))
    with _lock:
        fresh = key not in _warned and len(_warned) < _WARNED_AT_MOST
        if fresh:
            _warned.add(key)
    if fresh:
        warning.warn(f"{refused}; lost, as is whatever else is refused of {key!r} ({VARIABLE}=warn)")
