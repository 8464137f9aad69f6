"""What a target has acknowledged: one small file per backend and target, replaced atomically.

A cursor is a hint: where a target can say what it holds, its own answer wins. It tells a row that was told
before (skipped) from one that the target refused, and from one that came too late for it (withheld). Beside
the cursors it is kept with which run of a tracker to go on, where one was begun anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import eventlog
from eventlog import errors, ranges

from .acknowledged import ANY_ATTEMPT, PLAIN, Acknowledged, Span, Telling
from .steps import numbered

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .steps import Row

_log = logging.getLogger("areal_metrics.replay")

_FORMAT = 2


@dataclass(slots=True)
class Cursor:
    """What one target of one backend has acknowledged.

    `told` says which commits those are; `refused` are the steps that it would not take; `trying` are commits
    that were being told when this was written, so that the target may have them or a part; `run_id` is the
    target's own name for the run. `begun` says whether an earlier session told the target something, `again`
    is the step on which it ends if that may have been told in part.
    """

    backend: str
    target: str
    last_step: int | None = None
    told: Acknowledged = field(default_factory=Acknowledged)
    refused: set[int] = field(default_factory=set[int])
    trying: list[Span] = field(default_factory=list[Span])
    run_id: str | None = None
    begun: bool = field(default=False, compare=False, repr=False)
    again: int | None = field(default=None, compare=False, repr=False)

    def took(self, row: Row) -> None:
        """Note that the target acknowledged a row."""
        self.last_step = row.step if self.last_step is None else max(self.last_step, row.step)
        self._tried(row)
        self.told.take(row)
        self.refused.discard(row.step)

    def refuse(self, row: Row) -> None:
        """Note a row that the target would not take."""
        self.refused.add(row.step)
        self._tried(row)

    def fail(self, row: Row, *, reads_back: bool) -> None:
        """Note a row whose telling failed: one that cannot say whether it got through is told it again."""
        if not reads_back:
            self._tried(row)

    def tries(self, row: Row) -> bool:
        """Note a row that is about to be told; whether the target's last step will not tell of it."""
        self.trying += self.told.spans_of(row)
        return self.last_step is not None and row.step <= self.last_step

    def copy(self) -> Cursor:
        """Return a cursor that goes its own way."""
        return replace(self, told=self.told.copy(), refused=set(self.refused), trying=list(self.trying))

    def continued(self, target: str) -> Cursor:
        """Return the cursor of a run that goes on for this one: what this one took is not told there."""
        fresh = Cursor(self.backend, target, told=self.told.elsewhere(), refused=set(self.refused))
        return replace(fresh, begun=self.begun)

    @property
    def reach(self) -> int | None:
        """The highest step that the target may hold, as far as is known here."""
        steps = [span.last for span in self.trying] + ([] if self.last_step is None else [self.last_step])
        return max(steps, default=None)

    def settle(self, last: int, *, completes: bool, says: bool = True) -> None:
        """Believe a target that holds nothing above `last`; `says`: it says itself that it holds that step.

        Where a row of this step was on its way when the session ended, the target took it. One that
        `completes` may have a part of it only: the same commits are then told again, and no others.
        """
        known, self.again = self.last_step, None
        closed = known == last and all(span.last < last for span in self.trying)
        self.trying = [span for span in self.trying if span.first <= last]
        above = [span for span in self.trying if span.first == last] if known is None or last > known else []
        self.told.cut(last)
        if known is not None:
            self.last_step = min(known, last)
        if completes and not closed:
            self.again = last
            self.trying += self.told.cut(last - 1)
        elif says and above:
            self.last_step = last
            self.trying = [span for span in self.trying if span not in above]
            self.told.spans += above

    def bars(self, row: Row, *, completes: bool) -> bool:
        """Whether a row must not be told: it may be there, or in part another commit of its step is."""
        if not self.trying and self.again is None:
            return False
        tried = self.told.among(self.trying, row)
        return not all(tried) if row.step == self.again else any(tried) and not completes

    def passes(self, row: Row) -> bool:
        """Whether the target has a row, which then lies beside the next that it is told."""
        return self.told.passes(row)

    def knows(self, row: Row) -> bool:
        """Whether the target has every commit and name of the row, as far as is known."""
        return self.told.knows(row)

    def holds(self, row: Row) -> bool:
        """Whether the target shows some of a row, or may do so."""
        return self.told.holds(row, unsure=self.trying)

    def _tried(self, row: Row) -> None:
        spans = self.told.spans_of(row)
        self.trying = [span for span in self.trying if span not in spans]


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
        "trying": [span.as_list() for span in cursor.trying],
        "refused": ranges(cursor.refused),
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
            _unsure(data, told),
            data.get("run_id"),
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise errors.ManifestError(f"expected a cursor, got {error}: {path}") from error


def _parsed(data: dict[str, Any]) -> Acknowledged:
    tellings = [Telling.of(given) for given in data["tellings"]]
    return Acknowledged(tellings, _spans(data["told"], tellings))


def _spans(given: Sequence[Sequence[Any]], tellings: Sequence[Telling]) -> list[Span]:
    spans = [Span.of(some) for some in given]
    for span in spans:
        tellings[span.telling]  # IndexError: none
    return spans


def _unsure(data: dict[str, Any], told: Acknowledged) -> list[Span]:
    """Return what was being told; of an older cursor only its steps are known."""
    steps = numbered(data.get("unsure", ""))
    older = [
        Span(telling, ANY_ATTEMPT, step, step, 0.0, sys.float_info.max)
        for step in sorted(steps)
        for telling in range(len(told.tellings))
    ]
    return older + _spans(data.get("trying", ()), told.tellings)


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
