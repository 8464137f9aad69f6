"""Every tracker as a place to tell runs to and to read; services are stand-ins on the loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from replay import open_backend
from replay.backends.trackio_server import WALL_TIME
from tests.replay.readers import (
    Rows,
    swanlab_files,
    swanlab_rows,
    tensorboard_rows,
    trackio_rows,
    trackio_runs,
    wandb_files,
    wandb_rows,
)
from tests.replay.servers import Server, SwanlabServer, WandbServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SERVICES = ("wandb-online", "swanlab-cloud", "trackio-server")
FILES = ("tensorboard", "wandb", "swanlab", "trackio")
TARGETS = [*FILES, *(pytest.param(service, marks=pytest.mark.long) for service in SERVICES)]

# Seconds a service may take, where a test waits for that to pass: time enough to begin on a busy machine.
PATIENCE = 8.0

# Services whose server we can trouble, and what of its requests carries rows.
STAND_INS = {"wandb-online": "file_stream", "swanlab-cloud": "POST /api/house/metrics"}


@dataclass(frozen=True)
class Target:
    """A tracker: `make` returns a backend for always the same run there, `runs` what each of its runs holds.

    `options` are those of `open_backend`; `server` stands in for a service, None for files.
    """

    name: str
    backend: str
    options: dict[str, Any]
    path: Path
    runs: Callable[[], list[Rows]]
    server: Server | None = None

    def make(self, **options: Any) -> Any:
        return open_backend(self.backend, **self.options | options)

    def another(self, number: int) -> dict[str, Any]:
        """Return the options of another run there; `runs` lists them by their numbers."""
        if self.server is not None:
            return self.options | {"id": f"run{number:02}"}
        if "server_url" in self.options:
            return self.options | {"project": f"project{number:02}"}
        return self.options | {"path": self.path / f"told{number:02}"}

    def rows(self) -> Rows:
        """Return what its only run holds; nothing where there is none."""
        runs = self.runs()
        assert len(runs) <= 1, f"{len(runs)} runs"
        return runs[0] if runs else []

    def delete(self) -> None:
        """Delete its runs at a service, as a person does."""
        if isinstance(self.server, WandbServer):
            for name in list(self.server.runs):
                self.server.delete(name)
        elif isinstance(self.server, SwanlabServer):
            self.server.experiments.clear()


@contextmanager
def opened(name: str, path: Path) -> Iterator[Target]:
    """Yield the tracker of a name, which keeps what it keeps below `path`."""
    place = path / "told"
    with ExitStack() as stack:
        if name == "wandb-online":
            wandb = stack.enter_context(WandbServer())
            options = {"mode": "online", "base_url": wandb.url, "api_key": "x" * 40, "path": path / "w"}
            yield Target(
                name, "wandb", options, path, lambda: [wandb.rows(run) for run in list(wandb.runs)], wandb
            )
        elif name == "swanlab-cloud":
            cloud = stack.enter_context(SwanlabServer())
            options = {"host": cloud.url, "api_key": "key"}
            yield Target(
                name,
                "swanlab",
                options,
                path,
                lambda: [cloud.rows(run) for run in list(cloud.experiments)],
                cloud,
            )
        elif name == "trackio-server":
            url = stack.enter_context(trackio_server(place))
            options = {"server_url": f"{url}/?write_token=token"}
            yield Target(name, "trackio", options, path, lambda: [timed(rows) for rows in _trackio(place)])
        else:
            read = _READ[name]
            offline = {"mode": "offline"} if name in ("wandb", "swanlab") else {}
            options = {"path": place} | offline
            yield Target(
                name,
                name,
                options,
                path,
                lambda: [run for folder in sorted(path.glob("told*")) for run in read(folder)],
            )


def _tensorboard(folder: Path) -> list[Rows]:
    return [tensorboard_rows(folder)]


def _wandb(folder: Path) -> list[Rows]:
    return [wandb_rows(file) for file in wandb_files(folder)]


def _swanlab(folder: Path) -> list[Rows]:
    return [swanlab_rows(file) for file in swanlab_files(folder)]


def _trackio(folder: Path) -> list[Rows]:
    return [trackio_rows(file, run) for file in sorted(folder.glob("*.db")) for run in trackio_runs(file)]


_READ = {"tensorboard": _tensorboard, "wandb": _wandb, "swanlab": _swanlab, "trackio": _trackio}


def timed(rows: Rows) -> Rows:
    """Return rows of a Trackio server with their true times, which go along as a metric."""
    return [
        (step, {key: value for key, value in row.items() if key != WALL_TIME}, row[WALL_TIME])
        for step, row, _ in rows
    ]


_SERVER = """
import sys, trackio
_, url, *_ = trackio.show(open_browser=False, block_thread=False, host="127.0.0.1")
print("URL", url, flush=True)
sys.stdin.read()
"""


@contextmanager
def trackio_server(folder: Path) -> Iterator[str]:
    """Yield the address of a server of Trackio's own that writes to a folder; its write token is "token"."""
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(folder),
        "TRACKIO_WRITE_TOKEN": "token",
        "HF_HUB_OFFLINE": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield next(line.split()[1] for line in process.stdout if line.startswith("URL")).rstrip("/")
        process.kill()
