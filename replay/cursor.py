"""What a target has acknowledged: one small file per backend and target, replaced atomically.

A cursor is a hint: where a target can say what it holds, its own answer wins. It tells a row that was told
before (skipped) from one that came too late for an append-only target (withheld).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import eventlog
from eventlog import errors

from .steps import named, newest, numbered

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .steps import Row

_log = logging.getLogger("areal_metrics.replay")


@dataclass(slots=True)
class Cursor:
    """What one target of one backend has acknowledged.

    `acknowledged` holds per attempt the commit time (Unix seconds) of the newest row the target took;
    `keys` the names it was told; `withheld` names the steps that it could no longer take ("12-15, 20");
    `run_id` is the target's own name for the run.
    """

    backend: str
    target: str
    last_step: int | None = None
    acknowledged: dict[int, float] = field(default_factory=dict[int, float])
    keys: list[str] = field(default_factory=list[str])
    withheld: str = ""
    run_id: str | None = None

    def took(self, row: Row) -> None:
        """Note that the target acknowledged a row."""
        self.last_step = row.step if self.last_step is None else max(self.last_step, row.step)
        self.acknowledged = newest(self.acknowledged, row.commits)
        if fresh := row.metrics.keys() - set(self.keys):
            self.keys = sorted(fresh.union(self.keys))

    def withhold(self, steps: Iterable[int]) -> int:
        """Note steps that the target could not take any more; return how many there are by now."""
        every = numbered(self.withheld) | set(steps)
        self.withheld = named(every)
        return len(every)

    def knows(self, row: Row) -> bool:
        """Whether every commit and key in the row is one the target has acknowledged, as far as is known."""
        if self.keys and not row.metrics.keys() <= set(self.keys):
            return False
        return all(time <= self.acknowledged.get(attempt, -1.0) for attempt, time in row.commits.items())


class CursorStore(Protocol):
    """Where one cursor is kept."""

    def load(self, *, required: bool = False) -> Cursor:
        """Return the kept cursor, or a new one."""
        ...

    def save(self, cursor: Cursor) -> None:
        """Keep it."""
        ...


class CursorFile:
    """The file of one cursor, `<folder>/<backend>-<hash of target>.json`; its folder is made when needed."""

    def __init__(self, folder: Path, backend: str, target: str) -> None:
        self.path = folder / f"{backend}-{hashlib.blake2b(target.encode(), digest_size=8).hexdigest()}.json"
        self._backend = backend
        self._target = target

    def load(self, *, required: bool = False) -> Cursor:
        """Return the stored cursor, or a new one when there is none.

        A damaged file is passed over with a warning; with `required` (the target cannot say itself what it
        holds) it raises ManifestError, since guessing might tell things twice.
        """
        if not self.path.exists():
            return Cursor(self._backend, self._target)
        try:
            data = eventlog.read_json(self.path)
            return _parse(data, self.path)
        except errors.ManifestError:
            if required:
                raise
            _log.warning("a damaged cursor is passed over, the target is asked instead: %s", self.path)
            return Cursor(self._backend, self._target)

    def save(self, cursor: Cursor) -> None:
        """Replace the file; RunDirectoryError when that is not possible."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            eventlog.write_json(self.path, asdict(cursor))
        except OSError as error:
            raise errors.RunDirectoryError(
                f"expected to write the cursor of {self._backend} (another folder can be given as cursors), "
                f"got {error.strerror}: {self.path}"
            ) from error


class CursorInMemory:
    """The cursor of a target that ends with this process; it is forgotten with its backend."""

    _kept: ClassVar[WeakKeyDictionary[Any, Cursor]] = WeakKeyDictionary()

    def __init__(self, owner: object, backend: str, target: str) -> None:
        self._owner = owner
        self._new = Cursor(backend, target)

    def load(self, *, required: bool = False) -> Cursor:
        """Return the kept cursor, or a new one."""
        del required
        try:
            return self._kept.get(self._owner, self._new)
        except TypeError:  # neither hashable nor weakly referable: its own last_step must do
            return self._new

    def save(self, cursor: Cursor) -> None:
        """Keep it."""
        with contextlib.suppress(TypeError):
            self._kept[self._owner] = cursor


def _parse(data: dict[str, Any], path: Path) -> Cursor:
    try:
        acknowledged = {int(attempt): float(time) for attempt, time in data.pop("acknowledged").items()}
        numbered(data.get("withheld", ""))
        return Cursor(acknowledged=acknowledged, **data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise errors.ManifestError(f"expected a cursor, got {error}: {path}") from error
