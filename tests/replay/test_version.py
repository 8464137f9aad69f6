"""Which code ran."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from replay import version_info

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give git the time that it takes on a busy machine."""
    monkeypatch.setattr("replay.version._SECONDS", 60.0)


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, as nobody in particular."""
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_repository_around_the_code_is_named(tmp_path: Path) -> None:
    """Commit, branch and whether anything tracked was changed."""
    git(tmp_path, "init", "--initial-branch", "trunk")
    (tmp_path / "train.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "one")
    clean = version_info(tmp_path)
    assert (git(tmp_path, "rev-parse", "HEAD"), "trunk", False) == (
        clean.commit_id,
        clean.branch,
        clean.is_dirty,
    )
    (tmp_path / "notes.txt").write_text("untracked\n")
    assert False is version_info(tmp_path).is_dirty
    (tmp_path / "train.py").write_text("a = 2\n")
    assert True is version_info(tmp_path).is_dirty


def test_without_a_repository_nothing_is_claimed(tmp_path: Path, monkeypatch) -> None:
    """No repository, or no git: empty answers, no error."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert ("", "", None) == tuple(version_info(tmp_path).as_dict().values())[:3]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ("", "", None) == tuple(version_info(tmp_path).as_dict().values())[:3]
