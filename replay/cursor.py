"""What a target has acknowledged: one small file per backend and target, replaced atomically.

A cursor is a hint: where a target can say what it holds, its own answer wins. It tells a row that was told
before (skipped) from one that the target refused, and from one that came too late for it (withheld). Beside
the cursors it is kept with which run of a tracker to go on, where one was begun anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import eventlog
from eventlog import errors, ranges

from .acknowledged import PLAIN, Acknowledged, Span, Telling
from .steps import numbered

if TYPE_CHECKING:
    from pathlib import Path

    from .steps import Row

_log = logging.getLogger("areal_metrics.replay")

_FORMAT = 2


@dataclass(slots=True)
class Cursor:
    """What one target of one backend has acknowledged.

    `told` says which commits those are; `refused` are the steps that it would not take; `unsure` those below
    the last step that were being told when this was written; `run_id` is the target's own name for the run;
    `begun` says whether an earlier session told the target something.
    """

    backend: str
    target: str
    last_step: int | None = None
    told: Acknowledged = field(default_factory=Acknowledged)
    refused: set[int] = field(default_factory=set[int])
    unsure: set[int] = field(default_factory=set[int])
    run_id: str | None = None
    begun: bool = field(default=False, compare=False, repr=False)

    def took(self, row: Row) -> None:
        """Note that the target acknowledged a row."""
        self.last_step = row.step if self.last_step is None else max(self.last_step, row.step)
        self.told.take(row)
        self.refused.discard(row.step)
        self.unsure.discard(row.step)

    def refuse(self, step: int) -> None:
        """Note a step that the target would not take."""
        self.refused.add(step)
        self.unsure.discard(step)

    def tries(self, row: Row) -> bool:
        """Note a row that the target's last step will not tell of; whether it is one, and must be kept."""
        if self.last_step is None or row.step > self.last_step:
            return False
        self.unsure.add(row.step)
        return True

    def copy(self) -> Cursor:
        """Return a cursor that goes its own way."""
        return replace(self, told=self.told.copy(), refused=set(self.refused), unsure=set(self.unsure))

    def continued(self, target: str) -> Cursor:
        """Return the cursor of a run that goes on for this one: what this one took is not told there."""
        return replace(self.copy(), target=target, last_step=None, run_id=None)

    def cut(self, last: int, *, believed: bool = True) -> None:
        """Believe a target that holds nothing above `last`, and all up to it where nothing else is known."""
        if believed and not self.told.spans and last >= 0:
            self.told.believe(last, time.time())
        self.told.cut(last)
        if self.last_step is not None:
            self.last_step = min(self.last_step, last)

    def passes(self, row: Row, last: int | None) -> bool:
        """Whether the target has a row, which then lies beside the next that it is told."""
        if self._came_before_a_kill(row, last):
            self.took(row)
        return self.told.passes(row)

    def knows(self, row: Row, last: int | None = None) -> bool:
        """Whether the target has every commit and name of the row, as far as is known.

        `last` is the highest step that the target says it holds: where that is above what was acknowledged,
        it took that step, and a kill came between.
        """
        return self._came_before_a_kill(row, last) or self.told.knows(row)

    def _came_before_a_kill(self, row: Row, last: int | None) -> bool:
        return self.last_step is not None and self.last_step < row.step == last and self.told.goes_on


class CursorStore(Protocol):
    """Where one cursor is kept."""

    def load(self, *, required: bool = False) -> Cursor:
        """Return the kept cursor, or a new one."""
        ...

    def save(self, cursor: Cursor) -> None:
        """Keep it."""
        ...


class CursorFile:
    """The file of one cursor, `<folder>/<backend>-<hash of target>.json`; its folder is made when needed.

    Where it is not there it is looked for in `beside`, where live logging keeps it.
    """

    def __init__(self, folder: Path, backend: str, target: str, *, beside: Path | None = None) -> None:
        self.path = _file_of(folder, backend, target)
        self._beside = None if beside is None else _file_of(beside, backend, target)
        self._backend = backend
        self._target = target

    def load(self, *, required: bool = False) -> Cursor:
        """Return the stored cursor, or a new one when there is none.

        A damaged file is passed over with a warning; with `required` (the target cannot say itself what it
        holds) it raises ManifestError, since guessing might tell things twice.
        """
        path = self.path
        if not path.exists() and self._beside is not None:
            path = self._beside
        if not path.exists():
            return Cursor(self._backend, self._target)
        try:
            return _parse(eventlog.read_json(path), path)
        except errors.ManifestError:
            if required:
                raise
            _log.warning("a damaged cursor is passed over, the target is asked instead: %s", path)
            return Cursor(self._backend, self._target)

    def save(self, cursor: Cursor) -> None:
        """Replace the file; RunDirectoryError when that is not possible."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            eventlog.write_json(self.path, _written(cursor))
        except OSError as error:
            raise errors.RunDirectoryError(
                f"expected to write the cursor of {self._backend} (another folder can be given as cursors, "
                f"or with --cursors), got {error.strerror}: {self.path}"
            ) from error


def known_as(folder: Path, backend: str, run_id: str) -> Cursor | None:
    """Return the cursor of a target that calls its run so; None where none does, or it is damaged."""
    for path in sorted(folder.glob(f"{backend}-*.json")):
        with contextlib.suppress(errors.ManifestError):
            cursor = _parse(eventlog.read_json(path), path)
            if cursor.run_id == run_id:
                return cursor
    return None


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


class Lineage:
    """With which run of a tracker to go on: the newest that was begun anew in a first one's stead.

    A small file for each first run, among the cursors: `<folder>/<backend>-<hash of first>.lineage.json`.
    Where it is not there it is looked for in `beside`, where live logging keeps it. Without a folder nothing
    is remembered; without `keeps` nothing is written.
    """

    def __init__(
        self,
        folder: Path | None = None,
        backend: str = "",
        *,
        beside: Path | None = None,
        keeps: bool = True,
    ) -> None:
        self._folder = folder
        self._beside = beside
        self._backend = backend
        self._keeps = keeps

    def newest(self, first: str) -> str | None:
        """Return the name of the run to go on with instead of the first; None: with that itself.

        ManifestError for a damaged file: going on with the wrong run would tell it everything again.
        """
        for folder in (self._folder, self._beside):
            if folder is not None and (path := self._path(folder, first)).exists():
                return self._read(path)
        return None

    def _read(self, path: Path) -> str:
        data = eventlog.read_json(path)
        if not isinstance(data.get("run_id"), str):
            raise errors.ManifestError(f"expected the name of a run as run_id, got {data!r}: {path}")
        return data["run_id"]

    def begin(self, first: str, run_id: str) -> None:
        """Note that a run was begun anew; it is said where that cannot be written."""
        if self._folder is None or not self._keeps:
            return
        path = self._path(self._folder, first)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            eventlog.write_json(path, {"backend": self._backend, "first": first, "run_id": run_id})
        except OSError as error:
            _log.warning(
                "%s: a later replay goes on with the first run, not with %s (%s): %s",
                self._backend,
                run_id,
                error.strerror,
                path,
            )

    def _path(self, folder: Path, first: str) -> Path:
        return _file_of(folder, self._backend, first, ".lineage.json")


def _file_of(folder: Path, backend: str, target: str, suffix: str = ".json") -> Path:
    return folder / f"{backend}-{hashlib.blake2b(target.encode(), digest_size=8).hexdigest()}{suffix}"


def _written(cursor: Cursor) -> dict[str, Any]:
    """Return a cursor as it lies in its file."""
    return {
        "format": _FORMAT,
        "backend": cursor.backend,
        "target": cursor.target,
        "last_step": cursor.last_step,
        "tellings": [telling.as_dict() for telling in cursor.told.tellings],
        "told": [span.as_list() for span in cursor.told.spans],
        "refused": ranges(cursor.refused),
        "unsure": ranges(cursor.unsure),
        "run_id": cursor.run_id,
    }


def _parse(data: dict[str, Any], path: Path) -> Cursor:
    try:
        told = _parsed(data) if "told" in data else _converted(data)
        return Cursor(
            data["backend"],
            data["target"],
            data.get("last_step"),
            told,
            numbered(data.get("refused", "")),
            numbered(data.get("unsure", "")),
            data.get("run_id"),
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise errors.ManifestError(f"expected a cursor, got {error}: {path}") from error


def _parsed(data: dict[str, Any]) -> Acknowledged:
    tellings = [Telling.of(given) for given in data["tellings"]]
    spans = [Span.of(given) for given in data["told"]]
    for span in spans:
        tellings[span.telling]  # IndexError: none
    return Acknowledged(tellings, spans)


def _converted(data: dict[str, Any]) -> Acknowledged:
    """Return what an older cursor knew: per attempt the newest commit, and steps that were withheld."""
    keys = data.get("keys")
    holes = sorted(numbered(data.get("withheld", "")) | numbered(data.get("refused", "")))
    last = data.get("last_step")
    spans: list[Span] = []
    for attempt, newest in data["acknowledged"].items():
        first = 0
        for hole in [*holes, (-1 if last is None else last) + 1]:
            if hole > first:
                spans.append(Span(0, int(attempt), first, hole - 1, 0.0, float(newest)))
            first = hole + 1
    return Acknowledged([replace(PLAIN, chosen="before", keys=tuple(keys) if keys else None)], spans)
