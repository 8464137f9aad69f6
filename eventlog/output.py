"""Where and how what is made of runs is written: never into a run, and whole or not at all."""

from __future__ import annotations

import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .errors import QueryError

if TYPE_CHECKING:
    from collections.abc import Generator

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


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Lend a name of its own beside a path: the file of that name takes the path's place after the block.

    On any error nothing is left of it, and nothing replaced; one of the file system names the path. The name
    holds nothing of the path's, by which readers of its directory may go.
    """
    unfinished = path.with_name(f".areal-{uuid.uuid4().hex}.tmp")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(unfinished)):
            error.filename = str(path)  # a full disk says none
        raise
