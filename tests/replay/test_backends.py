"""Every adapter passes the public contract; what is particular to one stands in its own file."""

from __future__ import annotations

import os
import pty
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eventlog.errors import ConfigError
from replay import MemoryBackend, open_backend
from replay.backends import AVAILABLE, swanlab, trackio_run, wandb
from tests.replay.backend_contract import BackendContract, RewriterContract, run_info
from tests.replay.readers import Rows, swanlab_rows, tensorboard_rows, trackio_rows, wandb_rows

if TYPE_CHECKING:
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
        return wandb.names().to(name)


class TestSwanlabLocal(RewriterContract):
    """Local run files, read by the reader that SwanLab ships."""

    resumes = False  # every lifetime has a directory of its own
    largest_step = 2**48

    def make(self, path: Path) -> Backend:
        return open_backend("swanlab", mode="local", path=path / "swanlab")

    def read(self, path: Path) -> Rows:
        return swanlab_rows(path / "swanlab")

    def renamed(self, name: str) -> str:
        return swanlab.names().to(name)


class TestTrackioLocal(RewriterContract):
    """A project's SQLite file, read as it is."""

    shares = True

    def make(self, path: Path) -> Backend:
        return open_backend("trackio", path=path / "trackio")

    def read(self, path: Path) -> Rows:
        return trackio_rows(path / "trackio" / "exp.db")

    def renamed(self, name: str) -> str:
        return trackio_run.names().to(name)

    def state(self, path: Path) -> Any:
        return self.read(path)  # SQLite touches its file to read it


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mlflow", {}, "expected a backend among memory, swanlab, tensorboard, trackio, wandb, got 'mlflow'"),
        ("tensorboard", {"pth": "x"}, "expected options of tensorboard among path, double, got pth"),
        (
            "wandb",
            {"mode": "offlin"},
            "expected a wandb mode of online, offline, disabled, shared, got 'offlin'",
        ),
        (
            "swanlab",
            {"mode": "on"},
            "expected a swanlab mode of cloud, online, local, offline, disabled, got 'on'",
        ),
        ("trackio", {"mode": "on"}, "expected a trackio mode of online, local, disabled, got 'on'"),
        ("trackio", {"mode": "online"}, "expected trackio.space_id or trackio.server_url for mode online"),
    ],
)
def test_wrong_names_and_options_are_refused(name: str, options: dict[str, str], said: str) -> None:
    """A name, option or mode that does not exist is refused, with those that do."""
    with pytest.raises(ConfigError, match=said):
        open_backend(name, **options)


@pytest.mark.parametrize("name", ["swanlab", "trackio", "wandb"])
def test_a_disabled_backend_keeps_nothing(tmp_path: Path, name: str) -> None:
    """Mode disabled takes everything, writes nothing, loads nothing."""
    backend = open_backend(name, mode="disabled", path=tmp_path / name)
    backend.open(run_info(tmp_path))
    backend.log(0, {"a": 1.0}, 0.0)
    backend.close()
    assert None is backend.last_step()
    assert [] == list(tmp_path.iterdir())


LACKING = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == sys.argv[1] else found(name, *more)
from eventlog.errors import BackendMissingError
from replay import open_backend
try:
    open_backend(sys.argv[1], **({"mode": "offline"} if sys.argv[1] in ("wandb", "swanlab") else {}))
except BackendMissingError as error:
    print(error)
open_backend(sys.argv[1], mode="disabled") if sys.argv[1] != "tensorboard" else None
print(sorted(name for name in ("wandb", "swanlab", "trackio", "tensorboard") if name in sys.modules))
"""


@pytest.mark.parametrize("name", sorted(set(AVAILABLE) - {"memory"}))
def test_a_missing_package_is_said_with_its_extra(name: str) -> None:
    """Only a backend that is used needs its package; the message says how to install it (report s12)."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LACKING, name],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    said = f"expected the package {name}, got none: pip install 'areal-metrics[{name}]'"
    assert [said, "[]"] == done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wandb", "expected WANDB_API_KEY or `wandb login` for wandb mode online, got neither"),
        ("swanlab", "expected SWANLAB_API_KEY or swanlab.api_key for swanlab mode cloud, got neither"),
    ],
)
def test_without_a_key_nothing_is_asked(tmp_path: Path, name: str, said: str) -> None:
    """On a terminal, without a key, opening fails at once instead of asking."""
    code = (
        "from pathlib import Path; from replay import open_backend; "
        "from tests.replay.backend_contract import run_info\n"
        f"open_backend({name!r}).open(run_info(Path({str(tmp_path)!r})))"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
        text=True,
    )
    os.close(slave)
    os.close(master)
    assert said in done.stderr
