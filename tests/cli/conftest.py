"""Two recorded runs, and a way to ask the command line as a shell would."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cli.app import main
from tests.runs import RunBuilder

# Run `a` was killed after step 5 and resumed at step 4; run `b` was never interrupted.
RESUMED_AT = 4
STEPS = 10


class Answer(NamedTuple):
    """What a command left behind: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Ask = Callable[..., Answer]


def write_run(path: Path, lives: list[range], gain: float) -> Path:
    """Record a run of two ranks: rank r's loss at step s is `gain * s + r`, and each step is committed."""
    with RunBuilder(path) as run:
        for attempt, steps in enumerate(lives):
            start = 1000.0 * attempt
            actors = [
                run.producer("actor", rank, world=f"w{attempt}", world_size=2, attempt=attempt, started=start)
                for rank in range(2)
            ]
            finished = "finished" if attempt == len(lives) - 1 else None
            resumed = steps[0] if attempt else None
            run.attempt(attempt, leader=actors[0], started=start, resume_step=resumed, outcome=finished)
            for step in steps:
                for actor in actors:
                    actor.tracker().scalar({"ppo_actor/loss": gain * step + actor.rank, "lr": 0.5**attempt})
                metrics = run.export(actors, time=start + 10 * step)
                actors[0].commit(step, metrics, time=start + 10 * step + 5, leader=True)
                actors[1].commit(step, time=start + 10 * step + 5)
    return path


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with run `a` and, deeper, run `b`; tests only read it."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "a", [range(6), range(RESUMED_AT, STEPS)], gain=1.0)
    write_run(root / "sub" / "b", [range(STEPS)], gain=2.0)
    return root


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that runs a command in this process, exit code and all."""

    def run(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["areal-metrics", *map(str, words)])
        with pytest.raises(SystemExit) as exit_:
            main()
        code = exit_.value.code
        out, err = capsys.readouterr()
        return Answer(code if isinstance(code, int) else 0, out, err)

    return run
