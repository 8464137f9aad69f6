"""Targets that are directories: each belongs to one run and one way of writing, and says so in a small file.

Two writers in one directory would hide or delete each other's points; a marker beside the files names the
owner, and for a replay what it holds.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import eventlog
from eventlog import errors

from .base import Selection

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import ExitStack

    from .base import RunInfo

    Writer = Literal["live", "replay"]

_log = logging.getLogger("areal_metrics.replay")

MARKER = "areal-metrics.json"


def read_marker(folder: Path) -> dict[str, Any] | None:
    """Return what the folder's marker says, None when there is none; ManifestError when it is damaged."""
    path = folder / MARKER
    return eventlog.read_json(path) if path.exists() else None


def claim(folder: Path, run_id: str, writer: Writer) -> dict[str, Any]:
    """Return the marker of a folder that is, or may become, this run's; nothing is written.

    BackendError when the folder belongs to another run, or to the other of live logging and replay.
    """
    if folder.exists() and not folder.is_dir():
        raise errors.BackendError(f"expected a directory, got a file: {folder}")
    marker = read_marker(folder)
    if marker is None:
        return {"run": run_id, "writer": writer}
    if marker.get("run") != run_id:
        raise errors.BackendError(
            f"expected a directory of run {run_id}, got one of run {marker.get('run')}; "
            f"give it another path: {folder}"
        )
    if marker.get("writer") != writer:
        raise errors.BackendError(
            f"expected a directory written by {writer}, got one written by {marker.get('writer')}; "
            f"two writers would hide each other's points: give it another path: {folder}"
        )
    return marker


@contextmanager
def alone(folder: Path, *, dry_run: bool = False) -> Generator[None]:
    """Have a folder, which is made, to oneself: wait until no other replay writes there.

    A dry run writes nothing and waits for nobody, and a file system without locks lets everybody in.
    """
    if dry_run or (folder.exists() and not folder.is_dir()):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _wait_for(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, folder: Path) -> None:
    said = False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said:
                _log.warning("another replay is writing here, waiting for its end: %s", folder)
            said = True
            time.sleep(0.1)
        except OSError:
            return None


def of_run(folder: Path, run: RunInfo) -> Path:
    """Return where a run that began in `folder` goes on; a fresh one in the first vacant one beside it."""
    place = str(folder.resolve())
    if run.fresh:
        chosen = _vacant(folder)
        run.lineage.begin(place, chosen.name)
        return chosen
    name = run.lineage.newest(place)
    return folder if name is None else folder.resolve().with_name(name)


def _vacant(folder: Path) -> Path:
    """Return the first of FOLDER, FOLDER-2, FOLDER-3, … that is not there or empty."""
    whole = folder.resolve()  # "." has no name
    beside = (whole.with_name(f"{whole.name}-{number}") for number in count(2))
    return next(path for path in chain([folder], beside) if not path.exists() or _is_empty(path))


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def usable(folder: Path, option: str, passing: ExitStack | None) -> Path:
    """Return a folder that can be written to: the one asked for, else a new one that ends with `passing`.

    Without that a BackendError, which says that another folder can be given as an option.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        problem = os.strerror(errno.EACCES)
    except OSError as error:
        problem = error.strerror or str(error)
    if passing is None:
        raise errors.BackendError(
            f"expected a directory to write to (another can be given as {option}), got {problem}: {folder}"
        )
    made = TemporaryDirectory(prefix="areal-metrics-", ignore_cleanup_errors=True)
    return Path(passing.enter_context(made))


def write_marker(folder: Path, marker: dict[str, Any]) -> None:
    """Create or replace the folder's marker; BackendError when the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        eventlog.write_json(folder / MARKER, marker)
    except OSError as error:
        raise errors.BackendError(
            f"expected a directory to write to (another can be given as the backend's path), "
            f"got {error.strerror}: {folder}"
        ) from error


def check_selection(marker: dict[str, Any], selection: Selection, folder: Path) -> None:
    """BackendError when a rewrite with `selection` would take away from what a folder was told to hold."""
    held = marker.get("selection")
    if held is None:
        return
    keys = held["keys"]
    before = Selection(held["since"], held["until"], None if keys is None else tuple(keys))
    if not selection.covers(before):
        raise errors.BackendError(
            f"expected a selection that includes what the target holds, {before}, got {selection}; "
            f"widen it, replay to another path, or ask for a new run: {folder}"
        )


def with_selection(marker: dict[str, Any], selection: Selection) -> dict[str, Any]:
    """Return the marker with what the folder holds."""
    keys = None if selection.keys is None else list(selection.keys)
    return {**marker, "selection": {"since": selection.since, "until": selection.until, "keys": keys}}
