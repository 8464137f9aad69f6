"""Alerts on their way to the backends that have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import eventlog
from aggregator.evaluation import Monitor
from eventlog import errors
from replay import MemoryBackend, StatsLogger, StatsLoggerConfig, open_backend


@pytest.fixture(autouse=True)
def no_log_left():
    """Every test ends without a started log."""
    yield
    eventlog.stop()


class Plain:
    """A backend without alerts."""

    name, target = "plain", "plain"

    def open(self, run):
        del run

    def log(self, step, metrics, time):
        del step, metrics, time

    def last_step(self):
        return None

    def close(self):
        pass


class Broken(MemoryBackend):
    """A backend whose alerts fail."""

    def alert(self, *_):
        raise OSError("no way")


def logger(path: Path, *backends) -> StatsLogger:
    config = StatsLoggerConfig(experiment_name="e", trial_name="t", fileroot=str(path))
    return StatsLogger(
        config,
        SimpleNamespace(total_train_epochs=1, steps_per_epoch=9, total_train_steps=9),
        backends=backends,
    )


def test_a_monitors_alerts_reach_the_backends_that_have_them(tmp_path):
    """Each is told once, with its step; where there are no alerts, or they fail, the rows go on."""
    heard, broken = MemoryBackend(), Broken()
    with logger(tmp_path, heard, Plain(), broken) as opened:
        monitor = Monitor(callback=lambda a: opened.alert(a.title, a.text, a.level, a.step))
        for step, loss in enumerate((1.0, float("nan"), float("nan"))):
            monitor.check(step, {"loss": loss})
            opened.commit(0, step, step, {"loss": loss})
    assert [("not_finite: loss at step 1", "loss is nan at step 1", "error", 1)] == heard.alerts
    assert [0, 1, 2] == [step for step, *_ in heard.rows] == [step for step, *_ in broken.rows]
    assert ["OSError: no way"] == [each.error for each in opened.status() if each.error]


def test_a_level_is_one_of_three(tmp_path):
    """Another word is refused at the call."""
    with (
        logger(tmp_path) as opened,
        pytest.raises(errors.ConfigError, match="info, warn or error, got 'bad'"),
    ):
        opened.alert("title", level="bad")


def test_trackio_keeps_them_with_the_run(tmp_path):
    """An alert stands in Trackio's own file, read back with its own reader."""
    storage = pytest.importorskip("trackio.sqlite_storage")
    backend = open_backend("trackio", mode="local", path=str(tmp_path / "trackio"), project="p", name="n")
    with logger(tmp_path, backend) as opened:
        opened.alert("title", "text", "warn", 3)
        opened.commit(0, 0, 0, {"loss": 1.0})
    own, storage.TRACKIO_DIR = storage.TRACKIO_DIR, tmp_path / "trackio"
    try:
        (alert,) = storage.SQLiteStorage.get_alerts("p")
    finally:
        storage.TRACKIO_DIR = own
    assert ("title", "text", "warn", 3) == tuple(alert[name] for name in ("title", "text", "level", "step"))
