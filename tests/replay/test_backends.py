"""Every adapter passes the shared body; what is particular to one stands in its own file."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from eventlog.errors import BackendMissingError, ConfigError, RewindError
from replay import MemoryBackend, open_backend
from replay.backends.wandb import to_wandb
from tests.replay.backend_contract import BackendContract, RewriterContract, run_info
from tests.replay.readers import Rows, tensorboard_rows, wandb_rows

if TYPE_CHECKING:
    from pathlib import Path

    from replay import Backend


class TestMemory(BackendContract):
    """The target in memory, taking any order."""

    strict = False
    kept: MemoryBackend | None = None

    def make(self, path: Path) -> Backend:  # noqa: ARG002
        self.kept = self.kept or MemoryBackend(strict=self.strict)
        return self.kept

    def read(self, path: Path) -> Rows:  # noqa: ARG002
        assert self.kept is not None
        return self.kept.rows


class TestStrictMemory(TestMemory):
    """The target in memory that behaves as most trackers do."""

    strict = True


class TestTensorBoard(RewriterContract):
    """Event files, read by TensorBoard's own loader."""

    def make(self, path: Path) -> Backend:
        return open_backend("tensorboard", path=path / "tb")

    def read(self, path: Path) -> Rows:
        return tensorboard_rows(path / "tb")

    def stored(self, value: float) -> float:
        return struct.unpack("f", struct.pack("f", value))[0]


class TestWandbOffline(RewriterContract):
    """Offline run files, read by their framing and wandb's own protocol buffers."""

    resumes = False  # every lifetime has a directory of its own

    def make(self, path: Path) -> Backend:
        return open_backend("wandb", mode="offline", path=path / "wandb")

    def read(self, path: Path) -> Rows:
        return wandb_rows(path / "wandb")

    def renamed(self, name: str) -> str:
        return to_wandb(name)


def test_strict_memory_refuses_what_a_tracker_would_drop(tmp_path: Path) -> None:
    """With the strict switch a step that is not above the last raises instead of vanishing (report a2)."""
    backend = open_backend("memory", strict=True)
    backend.open(run_info(tmp_path))
    backend.log(5, {"a": 1.0}, 0.0)
    with pytest.raises(RewindError, match="expected a step above 5, got 5"):
        backend.log(5, {"b": 1.0}, 0.0)


@pytest.mark.parametrize("name", ["swanlab", "trackio"])
def test_backends_to_come_say_so(name: str) -> None:
    """A backend that this version does not have yet says so and names those that work (report s12)."""
    with pytest.raises(
        BackendMissingError, match=f"memory, tensorboard, wandb, got '{name}', which this version"
    ):
        open_backend(name)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mlflow", {}, "expected a backend among memory, tensorboard, wandb, swanlab, trackio, got 'mlflow'"),
        ("tensorboard", {"pth": "x"}, "expected options of tensorboard among path, got pth"),
        (
            "wandb",
            {"mode": "offlin"},
            "expected a wandb mode of online, offline, disabled, shared, got 'offlin'",
        ),
        ("wandb", {"mode": "online"}, "expected wandb mode offline or disabled, .*got 'online'"),
        ("wandb", {"mode": "shared"}, "expected wandb mode offline or disabled, .*got 'shared'"),
        ("wandb", {}, "got 'online'"),
    ],
)
def test_wrong_names_and_options_are_refused(name: str, options: dict[str, str], said: str) -> None:
    """A name, option or mode that does not exist is refused, with those that do."""
    with pytest.raises(ConfigError, match=said):
        open_backend(name, **options)


def test_a_disabled_backend_keeps_nothing(tmp_path: Path) -> None:
    """Mode disabled takes everything, writes nothing, loads nothing."""
    backend = open_backend("wandb", mode="disabled", path=tmp_path / "wandb")
    backend.open(run_info(tmp_path))
    backend.log(0, {"a": 1.0}, 0.0)
    backend.close()
    assert None is backend.last_step()
    assert [] == list(tmp_path.iterdir())
