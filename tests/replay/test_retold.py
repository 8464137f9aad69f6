"""A run that crashed and was resumed, told to every tracker: each reader finds what the log's metrics say."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aggregator import open_run
from replay import open_backend, play
from tests.replay.backend_contract import run_info
from tests.replay.committed import build, logger
from tests.replay.readers import Rows, swanlab_rows, tensorboard_rows, trackio_rows, wandb_rows
from tests.replay.servers import SwanlabServer, WandbServer

Target = tuple[Callable[[], Any], Callable[[], Rows]]
SERVICES = ("wandb-online", "swanlab-cloud")
TARGETS = [
    "tensorboard",
    "wandb",
    "swanlab",
    "trackio",
    *(pytest.param(s, marks=pytest.mark.long) for s in SERVICES),
]


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """Return how to make the backend of a name, and how to read what it was told."""
    name: str = request.param
    with ExitStack() as stack:
        if name == "wandb-online":
            server = stack.enter_context(WandbServer())
            options: dict[str, Any] = {
                "base_url": server.url,
                "api_key": "x" * 40,
                "id": "rid",
                "path": tmp_path / "w",
            }
            yield (
                (lambda: open_backend("wandb", mode="online", **options)),
                (lambda: server.rows("rid")),
            )
        elif name == "swanlab-cloud":
            cloud = stack.enter_context(SwanlabServer())
            options = {"host": cloud.url, "api_key": "key", "id": "rid"}
            yield (lambda: open_backend("swanlab", **options)), (lambda: cloud.rows("rid"))
        else:
            place = tmp_path / "told"
            options = {"path": place} | ({"mode": "offline"} if name in ("wandb", "swanlab") else {})
            readers: dict[str, Callable[[], Rows]] = {
                "tensorboard": lambda: tensorboard_rows(place),
                "wandb": lambda: wandb_rows(place),
                "swanlab": lambda: swanlab_rows(place),
                "trackio": lambda: trackio_rows(place / "exp.db"),
            }
            yield (lambda: open_backend(name, **options)), readers[name]


def logged(run: Path, *, single: bool) -> Rows:
    """Return the metrics of a run's log as rows; `single`: as float32, which TensorBoard keeps."""
    with open_run(run) as session:
        table = session.metrics().to_pylist()
    found: dict[int, tuple[dict[str, float], float]] = {}
    for row in table:
        value = struct.unpack("f", struct.pack("f", row["value"]))[0] if single else row["value"]
        found.setdefault(row["step"], ({}, row["time"].timestamp()))[0][row["key"]] = value
    return [(step, *found[step]) for step in sorted(found)]


@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_a_resumed_run_is_retold_as_it_is(
    target: Target, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Names, values and times at every step equal the log's, the superseded left out (reports a1, a4, f9)."""
    make, read = target
    run = build(
        tmp_path / "run",
        (range(16), lambda step: {"loss": step / 7, "ppo_actor/n": float(step)}),
        (range(10, 21), lambda step: {"loss": -step / 7, "ppo_actor/n": float(step), "ppo_actor/new": 1.0}),
    )
    (report,) = play(run, [make()])
    assert (21, 6, True) == (report.sent, report.superseded, report.complete)
    assert logged(run, single="tensorboard" in request.node.name) == read()
    (report,) = play(run, [make()])
    assert (0, 21) == (report.sent, report.skipped)
    assert 21 == len(read())


@pytest.mark.parametrize("target", ["tensorboard", "trackio"], indirect=True)
def test_a_resumed_run_is_right_live(target: Target, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Targets that can go back show the newer of two attempts at every step (reports a1, a4, a6)."""
    make, read = target
    for steps in (range(16), range(10, 21)):
        with logger(tmp_path, backends=[make()]) as live:
            live.load_state_dict({"last_commit_step": steps.start - 1})
            for step in steps:
                live.commit(0, step, step, {"loss": step / 7 + steps.start})
        assert 0 == live.status()[0].withheld
    (run,) = (path.parent for path in tmp_path.rglob("run.json"))
    assert logged(run, single="tensorboard" in request.node.name) == read()


@pytest.mark.long
@pytest.mark.parametrize("target", SERVICES, indirect=True)
def test_what_a_service_cannot_take_back_is_counted(target: Target, tmp_path: Path) -> None:
    """Steps told before the crash keep their values there; how many is said, the log has all (report a5)."""
    make, read = target
    for steps, sent, withheld in ((range(16), 16, 0), (range(10, 21), 5, 6)):
        with logger(tmp_path, backends=[make()]) as live:
            live.load_state_dict({"last_commit_step": steps.start - 1})
            for step in steps:
                live.commit(0, step, step, {"loss": step / 7 + steps.start})
        (status,) = live.status()
        assert (sent, withheld, 0, None) == (status.sent, status.withheld, status.failures, status.error)
    assert [(s, {"loss": s / 7 + (0 if s < 16 else 10)}) for s in range(21)] == [row[:2] for row in read()]


def test_streams_do_not_move_each_others_step(tmp_path: Path) -> None:
    """A monitor's thousand points, told to a run of its own, leave the training's steps (report a11)."""
    train, monitor = (
        open_backend("wandb", mode="offline", path=tmp_path / name, id=name) for name in ("train", "gpu")
    )
    for backend in (train, monitor):
        backend.open(run_info(tmp_path))
    for point in range(1000):
        monitor.log(point, {"gpu": float(point)}, 1000.0 + point)
        if point % 100 == 0:
            train.log(point // 100, {"loss": 1.0}, 1000.0 + point)
    monitor.close()
    train.close()
    assert list(range(10)) == [step for step, _, _ in wandb_rows(tmp_path / "train")]
    assert list(range(1000)) == [step for step, _, _ in wandb_rows(tmp_path / "gpu")]
