"""Commands asked of a run in which a pipe lies where a file belongs: none waits for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Ask
from tests.runs import RunBuilder
from tests.strange import put

COMMANDS = (
    "verify RUN",
    "info RUN",
    "ls RUN",
    "keys RUN",
    "metrics RUN",
    "watch RUN --once",
    "export RUN OUT/out.csv",
    "replay RUN --to tensorboard -o tensorboard.path=OUT/tb",
    "recover RUN OUT/saved",
    "compact RUN",
    "merge OUT/merged RUN OTHER",
)
PLACES = (
    "run.json",
    "attempts/0000.json",
    "cursors",
    "events/actor-0/*.records.0000.idx",
    "events/actor-0/*.payload.0000.arrows",
    "commits/actor-0/*.arrows",
    "tables",
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of another process."""
    with RunBuilder(tmp_path_factory.mktemp("other") / "run") as run:
        critic = run.producer("critic", attempt=0)
        critic.tracker().scalar({"loss": 1.0})
        critic.commit(0, run.export(critic, time=0), time=5, leader=True)
    return run.path


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_waits_for_a_pipe(ask: Ask, root: Path, other: Path, tmp_path: Path, command: str) -> None:
    """Each ends with one of its own exit codes, and names the pipe when it is in the way (report b10)."""
    for number, pattern in enumerate(PLACES):
        run, out = tmp_path / str(number), tmp_path / f"out{number}"
        shutil.copytree(root / "sub" / "b", run)
        out.mkdir()
        place = next(iter(run.glob(pattern)), run / pattern)
        put(place, "pipe")
        names = {"RUN": str(run), "OUT": str(out), "OTHER": str(other)}
        words = [word.replace("OUT/", f"{out}/") if "OUT/" in word else word for word in command.split()]
        answer = ask(*(names.get(word, word) for word in words))
        assert answer.code in (0, 1, 3), (pattern, answer.err)
        if answer.code == 1:
            assert place.name in answer.err
