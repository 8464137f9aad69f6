"""Where an opened target stands: what its cursor says it has been told, and what it says itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventlog import errors

from .acknowledged import PLAIN
from .backends.base import capabilities_of, name_of, target_of
from .cursor import Cursor, CursorFile, CursorInMemory
from .found import believed

if TYPE_CHECKING:
    from pathlib import Path

    from .acknowledged import Telling
    from .backends.base import Backend, RunInfo
    from .cursor import CursorStore


def store_for(backend: Backend, folder: Path, *, beside: Path | None = None) -> CursorStore:
    """Return where the cursor of an opened backend is kept: in a file of `folder` if the target lasts.

    Where there is none it is looked for in `beside`.
    """
    name, target = name_of(backend), target_of(backend)
    if capabilities_of(backend).lasts:
        return CursorFile(folder, name, target, beside=beside)
    return CursorInMemory(backend, name, target)


def standing(
    backend: Backend, store: CursorStore, run: RunInfo, *, telling: Telling = PLAIN
) -> tuple[Cursor, int | None]:
    """Return the cursor of an opened backend, and the highest step its target holds: its own answer wins.

    What the cursor holds above that is untold; the session of its target begins. A step of which the target
    may have a part is not counted as held.
    """
    cursor, can, last = new_cursor(backend, telling), capabilities_of(backend), _held_by(backend)
    if run.fresh:
        check_fresh(backend)
        return cursor, None
    found = store.load(required=not can.reads_back)
    says = last is not None
    if last is None and not can.reads_back:
        last = found.reach
    begun = bool(found.told.spans)
    if last is not None:
        cursor = found
        cursor.told.begin(telling)
        _find(backend, run, cursor, last)
        cursor.settle(last, completes=can.completes, says=says)
        last = last if cursor.again is None else last - 1
    cursor.begun = begun
    return cursor, last


def check_fresh(backend: Backend) -> None:
    """BackendError for a run begun anew that holds something: it would be told everything once more."""
    if (last := _held_by(backend)) is not None:
        raise errors.BackendError(
            f"expected {name_of(backend)} to begin a new run, got one that holds steps up to {last}: "
            f"{target_of(backend)}"
        )


def _find(backend: Backend, run: RunInfo, cursor: Cursor, last: int) -> None:
    """Believe what a target holds of which the cursor knows nothing, or an older one that it is there."""
    seen = cursor.told.found
    if seen is None and (cursor.told.spans or cursor.trying or last < 0):
        return
    theirs = is_anothers(backend, run)
    last = last if seen is None else min(seen, last)
    cursor.told.believe([] if theirs else believed(run.path, last, name_of(backend), target_of(backend)))


def is_anothers(backend: Backend, run: RunInfo) -> bool:
    """Whether an opened backend's target was told another run, as far as it can say."""
    return getattr(backend, "owner", None) not in (None, run.id)


def new_cursor(backend: Backend, telling: Telling = PLAIN) -> Cursor:
    """Return the cursor of a target that holds nothing."""
    cursor = Cursor(name_of(backend), target_of(backend))
    cursor.told.begin(telling)
    return cursor


def _held_by(backend: Backend) -> int | None:
    last: Any = backend.last_step()
    if last is None or (isinstance(last, int) and not isinstance(last, bool)):
        return last
    raise errors.BackendError(
        f"expected {name_of(backend)} to say its last step as an int or None, got {last!r}: "
        f"{target_of(backend)}"
    )
