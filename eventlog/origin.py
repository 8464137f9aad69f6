"""What run a directory is of: what run.json says, and what the segments say that they are of.

A process writes the id of its run into the schema message of every segment. Files that were copied into
another run's folders show by it, and a run whose run.json is gone keeps its name.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from .clock import LATEST_US
from .errors import FormatVersionError, ManifestError
from .files import is_there, open_file
from .manifest import create_json, read_json
from .schema import ENTRY_SIZE, FORMAT_MAJOR, IndexHeader, IndexRecord, crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def manifest(path: Path) -> dict[str, Any]:
    """Return what a run.json says; ManifestError, FormatVersionError."""
    said = read_json(path)
    version, name, created = (said.get(key) for key in ("format", "id", "created_us"))
    if not isinstance(version, list) or not version or any(type(n) is not int for n in version):
        raise ManifestError(f"expected a format version such as [1, 0], got {version!r:.100}: {path}")
    if version[0] < 1 or min(version) < 0:
        raise ManifestError(f"expected a format version of 1.0 or above, got {version!r:.100}: {path}")
    if version[0] > FORMAT_MAJOR:
        got = ".".join(map(str, version))
        raise FormatVersionError(f"expected format {FORMAT_MAJOR}.x, got {got} of a newer release: {path}")
    if not isinstance(name, str) or not name:
        raise ManifestError(f"expected the id of a run, got {name!r:.100}: {path}")
    if created is not None and (type(created) is not int or not 0 <= created <= LATEST_US):
        raise ManifestError(f"expected created_us in microseconds, got {created!r:.100}: {path}")
    return said


def settled_manifest(path: Path) -> dict[str, Any]:
    """Return the same of a file that may just be made."""
    # Where links do not exist, the process that creates the file may still be writing it.
    for _ in range(20):
        try:
            return manifest(path)
        except ManifestError:
            time.sleep(0.05)
    return manifest(path)


def said_again(path: Path, said: dict[str, Any]) -> None:
    """Let a run.json that somebody removed say the same again; OSError where it is another run's by now."""
    if not is_there(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        create_json(path, said)
    with suppress(ManifestError, FormatVersionError):  # what cannot be read says nothing
        if manifest(path)["id"] != said["id"]:
            raise OSError(errno.ESTALE, "another run lies there")


def runs_in(path: Path) -> set[str]:
    """Return the ids that the first segments of all processes below a directory say, without them any."""
    return _said_by(path, "*/*.0000.idx") or _said_by(path, "*/*.idx")


def _said_by(path: Path, names: str) -> set[str]:
    return {name for index in _indexes(path, names) if (name := run_of(index))}


def _indexes(path: Path, names: str) -> Iterator[Path]:
    for root in ("events", "commits"):
        with suppress(OSError):  # a folder that cannot be listed
            yield from (path / root).glob(names)


def run_of(index: Path) -> str:
    """Return the id that a segment says, by its index; "" where it says none that a checksum vouches for."""
    try:
        begun = _read(index, 0, 2 * ENTRY_SIZE)
        header = IndexHeader.unpack(begun[:ENTRY_SIZE])
        record = IndexRecord.unpack(begun[ENTRY_SIZE:], header.segment_uid) if header else None
        if record is None:
            return ""
        message = _read(index.with_suffix(".arrows"), record.offset, record.length)
        if len(message) != record.length or crc32c(message) != record.crc:
            return ""
        said = pa.ipc.read_schema(pa.py_buffer(message)).metadata or {}
    except (OSError, pa.ArrowException):
        return ""
    return said.get(b"run", b"").decode(errors="replace")


def _read(path: Path, place: int, size: int) -> bytes:
    fd = open_file(path)
    try:
        return os.pread(fd, min(size, max(0, os.fstat(fd).st_size - place)), place)
    finally:
        os.close(fd)
