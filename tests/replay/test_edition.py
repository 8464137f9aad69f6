"""Directories that replay writes as a whole, for wandb and SwanLab alike."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replay import open_backend
from replay.backends.base import Selection
from replay.steps import Row
from tests.replay.backend_contract import rows, run_info, snapshot
from tests.replay.readers import swanlab_files, swanlab_rows, wandb_files, wandb_rows

ROOT = Path(__file__).parents[2]
READERS = {"wandb": (wandb_files, wandb_rows), "swanlab": (swanlab_files, swanlab_rows)}


def replayed(name: str, path: Path, told: list[Row]) -> int:
    """Rewrite the run; return how many steps were sent."""
    backend: Any = open_backend(name, mode="offline", path=path / name)
    return backend.rewrite(run_info(path), told, Selection()).sent


KILLED = """
import os, signal, sys
from pathlib import Path
from replay import open_backend
from replay.backends import directory, edition
from replay.backends.base import Selection
from tests.replay.backend_contract import rows, run_info
name, path, fatal = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
class Told:
    passes = 0
    def __iter__(self):
        self.passes += 1
        for row in rows(range(30)):
            if (fatal, self.passes, row.step) in {("measuring", 1, 7), ("writing", 2, 20)}:
                die()
            yield row
if fatal == "marking":
    directory.write_marker = die
if fatal == "removing":
    remove = edition.remove
    def tidy(folders):
        found = list(folders)
        die() if any("old" in entry.name for entry in found) else remove(found)
    edition.remove = tidy
open_backend(name, mode="offline", path=path / name).rewrite(run_info(path), Told(), Selection())
"""


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
@pytest.mark.parametrize(
    ("fatal", "held"),
    [
        ("writing", 10),
        ("removing", 10),
        pytest.param("measuring", 10, marks=pytest.mark.long),
        pytest.param("writing", 0, marks=pytest.mark.long),
        pytest.param("marking", 10, marks=pytest.mark.long),
    ],
)
def test_a_killed_replay_made_again_ends_as_if_made_once(
    tmp_path: Path, name: str, fatal: str, held: int
) -> None:
    """Killed while reading, writing, recording success or tidying up, and run again: as if once (b5)."""
    files, read = READERS[name]
    if held:
        replayed(name, tmp_path, rows(range(held)))
    command = [sys.executable, "-c", KILLED, name, str(tmp_path), fatal]
    assert -signal.SIGKILL == subprocess.run(command, cwd=ROOT, check=False).returncode
    replayed(name, tmp_path, rows(range(30)))
    assert 1 == len(files(tmp_path))
    assert [(row.step, row.metrics, row.time) for row in rows(range(30))] == read(tmp_path)
    assert 2 == len(list((tmp_path / name).iterdir()))  # the run and the marker
    before = snapshot(tmp_path)
    assert 0 == replayed(name, tmp_path, rows(range(30)))
    assert before == snapshot(tmp_path)
