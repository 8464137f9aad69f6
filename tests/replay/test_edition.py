"""Directories that replay writes as a whole, for wandb and SwanLab alike."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replay import open_backend, play
from replay.backends.base import Selection
from replay.steps import Row
from tests.replay.backend_contract import rows, run_info, snapshot
from tests.replay.committed import build
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
if fatal == "moving":
    rename = Path.rename
    def move(place, target):
        die() if place.name == ".areal-building" else rename(place, target)
    Path.rename = move
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


@pytest.mark.parametrize("name", ["wandb", "swanlab", "tensorboard"])
def test_replays_at_once_into_one_place_wait_for_each_other(tmp_path: Path, name: str) -> None:
    """All succeed, and the place holds what one alone would have made."""
    run = build(tmp_path / "run", (range(300), lambda step: {f"k{i}": float(step) for i in range(20)}))
    command = [sys.executable, "-c", TELLS, str(run), name, str(tmp_path / name)]
    told = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [one.communicate()[1] for one in told]
    assert [0, 0, 0] == [one.returncode for one in told], said
    (report,) = play(run, [backend_of(name, tmp_path / name)])
    assert (0, 300) == (report.sent, report.skipped)
    assert not list((tmp_path / name).glob(".areal-*"))


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
@pytest.mark.parametrize("fatal", ["moving", "marking"])
def test_a_kill_between_the_old_and_the_new_loses_no_kept_step(tmp_path: Path, name: str, fatal: str) -> None:
    """Steps that only the target has are there still, when the next replay ends."""
    files, read = READERS[name]
    replayed(name, tmp_path, rows(range(10)))
    command = [sys.executable, "-c", KILLED, name, str(tmp_path), fatal]
    assert -signal.SIGKILL == subprocess.run(command, cwd=ROOT, check=False).returncode
    backend: Any = backend_of(name, tmp_path / name)
    written = backend.rewrite(run_info(tmp_path), Damaged(rows(range(5, 30))), Selection(), dry_run=True)
    assert (5, "0-4") == (written.kept, written.kept_steps)
    backend.rewrite(run_info(tmp_path), Damaged(rows(range(5, 30))), Selection())
    assert 1 == len(files(tmp_path))
    assert list(range(30)) == [step for step, *_ in read(tmp_path)]


class Damaged(list[Row]):
    """What is left of a log that has lost its first steps."""

    def knows(self, step: int, time: float) -> bool:
        del time
        return step >= 5


def backend_of(name: str, path: Path) -> Any:
    return open_backend(name, path=path, **({} if name == "tensorboard" else {"mode": "offline"}))


TELLS = """
import sys
from replay import play
from tests.replay.test_edition import backend_of
play(sys.argv[1], [backend_of(*sys.argv[2:])], cursors=sys.argv[3] + "-cursors")
"""
