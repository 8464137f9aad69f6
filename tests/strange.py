"""Things that are no plain files, put where those of a run belong."""

from __future__ import annotations

import _strptime  # noqa: F401 - loaded at the first use, which somebody else may not be allowed to
import os
import shutil
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = ("pipe", "loop", "nothing", "socket", "device", "folder", "unreadable")
NOBODY = 65534


def names(path: Path) -> list[str]:
    """Return every file and folder of a run, the whole of a stream's names standing for one of each kind."""
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def put(place: Path, kind: str) -> None:
    """Put something else where a file or a folder is."""
    was_folder = place.is_dir()
    if was_folder:
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "loop":
        place.symlink_to(place.name)
    elif kind == "nothing":
        place.symlink_to("nowhere")
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "socket":
        _bind(place)
    elif kind == "unreadable":
        _ = place.mkdir() if was_folder else place.write_bytes(b"x" * 1000)
        place.chmod(0)
    elif was_folder:
        place.write_bytes(b"x")
    else:
        place.mkdir()


def _bind(place: Path) -> None:
    """Make a socket: its path must be short, so it is made from within its folder."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(place.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(place.name)
    finally:
        os.fchdir(before)
        os.close(before)


@contextmanager
def as_somebody(path: Path) -> Iterator[None]:
    """Do things as a user whom permissions bind, who owns everything below a path."""
    if os.geteuid():
        yield
        return
    for entry in [path, *path.rglob("*")]:
        os.chown(entry, NOBODY, NOBODY, follow_symlinks=False)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
