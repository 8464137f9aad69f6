"""What every test of this folder starts from: no started log, no tracker settings, nothing of other tests."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import eventlog
from replay.delivery import Delivery
from tests.replay.targets import Target, opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

FOREIGN = ("WANDB_", "AREAL_METRICS_", "SWANLAB_", "TRACKIO_", "RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without settings from outside and end without a started log; wandb remembers nothing."""
    for name in list(os.environ):
        if name.startswith(FOREIGN):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # wandb's takes its place
    monkeypatch.setitem(Delivery.__init__.__kwdefaults__, "wait", 60.0)  # for more of a step, however slow
    before = set(os.environ)
    forget_wandb()
    yield
    eventlog.stop()
    forget_wandb()
    for name in set(os.environ) - before:  # what backends set for their SDKs' own tools
        if name.startswith(FOREIGN):
            del os.environ[name]


def forget_wandb() -> None:
    """End wandb's service, which keeps server and key of the first run, and runs that nobody closed."""
    if "wandb" in sys.modules:
        import wandb

        from replay.backends.wandb import WandbBackend

        WandbBackend._running.clear()
        wandb.teardown()


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """A tracker by its name, as parametrized indirectly."""
    with opened(request.param, tmp_path) as found:
        yield found
