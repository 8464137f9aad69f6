"""Where what is made of runs may be written: never into a run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .errors import QueryError

_FRAMES: Final = ("events/*/*.arrows", "commits/*/*.arrows")


def as_output(path: str | Path) -> Path:
    """Return the path of a file to write.

    QueryError where its directory does not exist, where it is a directory itself, and within a run, whose
    files are the recorder's alone.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise QueryError(f"expected a file in a directory that exists, got {path}")
    if path.is_dir():
        raise QueryError(f"expected a file, got a directory: {path}")
    place = path.parent.resolve()
    for folder in (place, *place.parents):
        if (folder / "run.json").exists() or any(any(folder.glob(frames)) for frames in _FRAMES):
            raise QueryError(f"expected a file outside of runs, got one in the run {folder}: {path}")
    return path
