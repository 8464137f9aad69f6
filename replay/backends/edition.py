"""Editions: a tracker's own run directory, which replay writes aside, as a whole, and puts in place.

A marker beside it says which edition the folder holds. One that holds the same already is left untouched; a
replay that is killed leaves the old one in place, and the next ends as if it had been the only one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any, Final, Protocol

from eventlog import ranges

from . import directory
from .base import Written
from .keeping import is_unknown, with_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from ..steps import Row
    from .base import RunInfo, Selection
    from .names import Names


_OLD: Final = ".areal-old-"


class Edition(Protocol):
    """What is to be written: how the directory is called, and its files."""

    contents: Contents

    def name(self, generation: int) -> str:
        """Return the directory's name; each generation is a run of its own to the tracker."""
        ...

    def write(self, building: Path, final: Path, generation: int) -> None:
        """Write the files into `building`, which will be called `final`."""
        ...

    def held(self, folder: Path) -> Iterable[Row]:
        """Yield the rows of a directory that `write` has made, under the tracker's names."""
        ...


class Contents:
    """What a replayed run says, and a digest of it that does not depend on the tracker's version.

    Rows that `refuses` (it returns whether the tracker would never take them) are counted, not told. `draws`:
    histograms are told.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        config: Mapping[str, Any],
        started: float,
        rows: Iterable[Row],
        names: Names,
        refuses: Callable[[Row], bool] = lambda _: False,
        *,
        draws: bool = False,
    ) -> None:
        self.about = about
        self.config = config
        self.refused: set[int] = set()
        self.steps = 0
        self._rows = rows
        self.names = names
        self._refuses = refuses
        self._draws = draws
        self._kept: dict[int, Row] = {}
        self.started = started or next((row.time for row in rows), 0.0)
        self.digest = self._digest()

    def keep(self, held: Iterable[Row]) -> None:
        """Take over what the log does not have any more of the rows that a target holds."""
        self._kept = {row.step: row for row in held if is_unknown(self._rows, row.step, row.time)}
        if self._kept:
            self.digest = self._digest()

    def rows(self) -> Iterator[tuple[Row, dict[str, float]]]:
        """Yield each row with its metrics under the tracker's names."""
        for row in with_kept(self._rows, self._kept):
            if self._kept.get(row.step) is row:  # as it lies at the target
                yield row, dict(row.metrics)
            elif not self._refuses(row):
                yield row, self.names.row(row.metrics)
            else:
                self.refused.add(row.step)

    def written(self, *, new: bool) -> Written:
        """Return the account of a rewrite, or of one that was not needed."""
        told = self.steps - len(self._kept)
        refused, kept = self.refused, self._kept
        return Written(
            told if new else 0,
            0 if new else told,
            len(self.names.renamed),
            len(refused),
            ranges(refused),
            len(kept),
            ranges(kept),
        )

    def _digest(self) -> str:
        digest = hashlib.blake2b(_json([dict(self.about), dict(self.config), self.started]), digest_size=16)
        self.steps = 0
        for row, metrics in self.rows():
            self.steps += 1
            digest.update(_json([row.step, row.time, *metrics.items()]))
            if row.histograms and self._draws:
                digest.update(_json(dict(row.histograms)))
        return digest.hexdigest()


def publish(
    edition: Edition,
    folder: Path,
    run: RunInfo,
    selection: Selection,
    *,
    dry_run: bool = False,
    taken: Callable[[Path], bool] = lambda _: False,
) -> Written:
    """Make the folder hold this edition, unless it does already.

    A directory that is `taken` (uploaded, say), or that a fresh run is to stand beside, stays where it is,
    and the edition becomes a run of the next generation.
    """
    if not edition.contents.steps and not folder.exists():
        return edition.contents.written(new=False)
    with directory.alone(folder, dry_run=dry_run):
        return _publish(edition, folder, run, selection, dry_run=dry_run, taken=taken)


def _publish(
    edition: Edition,
    folder: Path,
    run: RunInfo,
    selection: Selection,
    *,
    dry_run: bool,
    taken: Callable[[Path], bool],
) -> Written:
    marker = directory.claim(folder, run.id, "replay")
    contents = edition.contents
    held = str(marker.get("directory") or "")
    place = _found(folder, held, dry_run=dry_run)
    complete = bool(held) and place.is_dir()
    if complete and not run.fresh and marker.get("digest") != contents.digest:
        contents.keep(edition.held(place))
    if not contents.steps:
        return contents.written(new=False)
    if complete and not run.fresh:
        directory.check_selection(marker, selection, folder)
        if marker.get("digest") == contents.digest:
            if not dry_run:
                remove(folder.glob(".areal-*"))  # of a replay that was killed while tidying up
            return contents.written(new=False)
    if not dry_run:
        another = complete and (run.fresh or taken(place))
        marker["generation"] = marker.get("generation", 0) + another
        marker["digest"] = contents.digest
        marker = directory.with_selection(marker, selection)
        _put(edition, folder, marker, replaces="" if another else held)
    return contents.written(new=True)


def _put(edition: Edition, folder: Path, marker: dict[str, Any], *, replaces: str) -> None:
    """Build the directory aside and put it in place; the marker, written last, makes it count."""
    generation = marker["generation"]
    name = edition.name(generation)
    folder.mkdir(parents=True, exist_ok=True)
    remove(folder.glob(".areal-*"))
    building = folder / ".areal-building"
    building.mkdir()
    try:
        edition.write(building, folder / name, generation)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    for entry in sorted({name, replaces or name}):
        if (folder / entry).is_dir():
            (folder / entry).rename(folder / f"{_OLD}{entry}")
    building.rename(folder / name)
    directory.write_marker(folder, {**marker, "directory": name})
    remove(folder.glob(f"{_OLD}*"))


def _found(folder: Path, name: str, *, dry_run: bool) -> Path:
    """Return where a directory lies; one that a replay had moved aside when it was killed is put back."""
    place, aside = folder / name, folder / f"{_OLD}{name}"
    if not name or place.is_dir() or not aside.is_dir():
        return place
    return aside if dry_run else aside.rename(place)


def remove(folders: Iterable[Path]) -> None:
    """Remove whole directories."""
    for folder in list(folders):
        shutil.rmtree(folder)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
