"""Paths given to a logger, a backend or a replay mean the same after the process changed its directory."""

import os
from types import SimpleNamespace

import pytest

import eventlog
from replay import StatsLogger, open_backend, play
from replay.backends.tensorboard import TensorBoardBackend


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return the directory that the process is in, which has one named job; no log is left started."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    eventlog.stop()


def config(**sections):
    """Return a logger's configuration whose paths are relative."""
    off = {name: SimpleNamespace(mode="disabled") for name in ("wandb", "swanlab", "trackio")}
    own = {"experiment_name": "e", "trial_name": "t", "fileroot": "logs", **off, **sections}
    return SimpleNamespace(stats_logger=SimpleNamespace(**own))


def test_a_logger_and_its_backends_stay_where_they_began(here):
    """Below a relative fileroot, and in a relative TensorBoard path, everything lies together."""
    steps = SimpleNamespace(total_train_epochs=1, steps_per_epoch=3, total_train_steps=3)
    logger = StatsLogger(config(tensorboard=SimpleNamespace(path="tb")), steps)
    os.chdir("job")
    for step in range(3):
        assert logger.commit(0, step, step, {"x": float(step)})
    logger.close()
    eventlog.stop()
    assert [] == list((here / "job").iterdir())
    (run,) = (here / "logs").rglob("run.json")
    assert (3, 2) == (
        sum(len(batch) for *_, batch in eventlog.RunReader(run.parent).commits()) // 2,
        TensorBoardBackend(here / "tb").last_step(),
    )


def test_a_replay_writes_where_it_was_told_to(here):
    """A target that was named by a relative path is where that meant it to be."""
    log = eventlog.start("run")
    log.claim_attempt()
    assert log.commit(0, 0, 0, [{"x": 1.0}])
    eventlog.stop()
    backend = open_backend("tensorboard", path="tb")
    os.chdir("job")
    (report,) = play(here / "run", [backend], cursors=here / "cursors")
    assert (1, str(here / "tb")) == (report.sent, backend.target)
    assert [] == list((here / "job").iterdir())
