"""Runs as they are found on disk: committed through real loggers, or built with times of one's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from replay import StatsLogger, StatsLoggerConfig
from tests.runs import RunBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

SPEC = SimpleNamespace(total_train_epochs=2, steps_per_epoch=10, total_train_steps=20)


def logger(
    path: Path, *, trial: str = "t0", run: Any = None, backends: Any = (), **parts: Any
) -> StatsLogger:
    """Return a logger of a trial below `path`."""
    return StatsLogger(StatsLoggerConfig("exp", trial, str(path), **parts), SPEC, backends=backends, run=run)


FAST: dict[str, Any] = {"poll": 0.02, "wait": 0.05, "give_up": 60.0}  # of `follow`


def value(step: int) -> dict[str, float]:
    """Return what a first attempt commits at a step."""
    return {"v": float(step)}


def later(step: int) -> dict[str, float]:
    """Return what a later attempt commits there."""
    return {"v": 100.0 + step}


def build(path: Path, *attempts: tuple[Iterable[int], Callable[[int], dict[str, float]]]) -> Path:
    """Build a run of several attempts, each (steps, metrics of a step), with a commit every ten seconds."""
    clock = 0
    with RunBuilder(path) as run:
        for number, (given, metrics) in enumerate(attempts):
            steps = list(given)
            leader = run.producer(started=clock, attempt=number)
            run.attempt(
                number,
                leader=leader,
                started=clock,
                resume_step=steps[0] if number else None,
                config={"stats_logger": {"experiment_name": "exp", "trial_name": "t0"}, "lr": 0.5},
                version_info={"commit_id": "abc"},
            )
            for step in steps:
                clock += 10
                leader.tracker().scalar({"window": step})
                run.export(leader, time=clock - 1)
                leader.commit(step, metrics(step), time=clock, leader=True)
    return path
