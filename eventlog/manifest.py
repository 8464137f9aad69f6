"""JSON files of a run: whole or not at all, with a checksum of their own.

A claim is a link that only one process can make, an update is a rename; there are no locks. Nothing is
synced to the disk: a killed process loses nothing, a dead node may.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from typing import TYPE_CHECKING, Any, Final

from .errors import ManifestError
from .files import read_file
from .output import replacing
from .schema import crc32c

if TYPE_CHECKING:
    from pathlib import Path

_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}


def _canonical(data: dict[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _sealed(data: dict[str, Any]) -> bytes:
    # Through JSON once: the checksum is over what a reader will parse.
    plain = json.loads(json.dumps(data, default=str))
    plain["crc32c"] = crc32c(_canonical({k: v for k, v in plain.items() if k != "crc32c"}))
    return json.dumps(plain, indent=1).encode() + b"\n"


def _write_new(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a JSON file in one step, adding a checksum over the rest of it; OSError as the system says."""
    with replacing(path) as temporary:
        _write_new(temporary, _sealed(data))


def create_json(path: Path, data: dict[str, Any]) -> bool:
    """Create a JSON file; False when it exists already: of several processes exactly one gets True."""
    temporary = _temporary(path)
    try:
        _write_new(temporary, _sealed(data))
        return _link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return temporary.stat().st_nlink == 2  # NFS: a repeated request fails though the first one linked
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _write_new(path, temporary.read_bytes())
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Return what `write_json` or `create_json` wrote; ManifestError when it is unreadable or damaged."""
    try:
        data = json.loads(read_file(path))
    except OSError as error:
        raise ManifestError(f"expected a readable file, got {error.strerror}: {path}") from error
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"expected a JSON object, got {error}: {path}") from error
    if not isinstance(data, dict):
        raise ManifestError(f"expected a JSON object, got {type(data).__name__}: {path}")
    stated = data.pop("crc32c", None)
    if stated != (found := crc32c(_canonical(data))):
        raise ManifestError(f"expected checksum {stated}, got {found}: {path}")
    return data
