"""Which code ran: the git state of the working directory and the version of this distribution."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_SECONDS = 5.0  # a repository on a slow network file system must not hold up a training


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """What is told to every backend; empty strings and None where there is no git or no repository."""

    commit_id: str = ""
    branch: str = ""
    is_dirty: bool | None = None
    version: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def version_info(folder: str | os.PathLike[str] = ".") -> VersionInfo:
    """Return the git state of the repository around `folder` (untracked files do not count as dirty)."""
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return VersionInfo(
        commit_id=_git(folder, "rev-parse", "HEAD") or "",
        branch=_git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "",
        is_dirty=None if changes is None else bool(changes),
        version=_own_version(),
    )


def _own_version() -> str:
    try:
        return version("areal-metrics")
    except PackageNotFoundError:
        return ""


def _git(folder: str | os.PathLike[str], *arguments: str) -> str | None:
    """Return what git says, None when it cannot say; it takes no locks in the user's repository."""
    try:
        done = subprocess.run(  # noqa: S603  (fixed arguments)
            ["git", "-C", os.fspath(folder), *arguments],  # noqa: S607  (the user's git)
            capture_output=True,
            check=True,
            text=True,
            timeout=_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip()
