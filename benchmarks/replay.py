"""What telling a run costs: replay against the loop a user would write, and what a commit adds to a step.

    python benchmarks/replay.py                        # 1000 steps of 100 numbers
    python benchmarks/replay.py --steps 200 --keys 20

The rivals have the numbers in memory and call the tracker's own SDK once a step (`SummaryWriter.add_scalar`
once a number, as there is no other way); ours reads a run directory, checks it, and tells it with `play`.
Both end with everything on the disk; of `trackio.log`, which writes in the background, and of ours Trackio's
own reader counts the rows afterwards. `commit` is the median of StatsLogger.commit with all four backends
live, `added` what that is more than without backends. One JSON object a line; a tracker that is not installed
is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Rows = list[dict[str, float]]

sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).parent]  # `replay` is ours

QUIET: Final = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "OTEL_SDK_DISABLED": "true",
}
COMMITS: Final = 100
STEP_SECONDS: Final = 0.02  # what a step takes beside its commit: the backends work meanwhile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    os.environ.update(QUIET)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        os.environ["TRACKIO_DIR"] = f"{folder}/trackio"
        rows = numbers(given.steps, given.keys)
        run = record(Path(folder), rows)
        for name, module in (("tensorboard", "tensorboard"), ("trackio", "trackio"), ("wandb", "wandb")):
            if importlib.util.find_spec(module) is not None:
                report(name, run, rows, Path(folder), given.rounds)
        commit(Path(folder), rows)


def numbers(steps: int, keys: int) -> Rows:
    values = np.random.default_rng(0).standard_normal((steps, keys)).tolist()
    names = [f"ppo_actor/key{key}/avg" for key in range(keys)]
    return [dict(zip(names, row, strict=True)) for row in values]


def record(folder: Path, rows: Rows) -> Path:
    """Commit the rows to a log."""
    import eventlog

    log = eventlog.start(folder / "run", rank=0, world_size=1)
    log.claim_attempt()
    for step, row in enumerate(rows):
        log.commit(0, step, step, [row])
    eventlog.stop()
    return folder / "run"


def report(name: str, run: Path, rows: Rows, folder: Path, rounds: int) -> None:
    """Take turns, and print the medians; the first turn of both, which imports the SDK, does not count."""
    rivals = {"tensorboard": with_summary_writer, "trackio": with_trackio_log, "wandb": with_wandb_log}
    ours: list[float] = []
    rival: list[float] = []
    for turn in range(rounds + 1):
        ours.append(seconds(lambda turn=turn: replayed(name, run, folder / f"{name}-ours-{turn}")))
        rival.append(seconds(lambda turn=turn: rivals[name](rows, folder / f"{name}-rival-{turn}")))
        if name == "trackio":
            check_trackio([f"trackio-ours-{turn}", f"trackio-rival-{turn}"], len(rows))
    mine, theirs = float(np.median(ours[1:])), float(np.median(rival[1:]))
    print(json.dumps({
        "name": f"replay to {name}", "ours": round(mine, 3), "rival": round(theirs, 3), "unit": "s",
        "ratio": round(theirs / mine, 2),
        "sizes": {"steps": len(rows), "keys": len(rows[0]), "rounds": rounds},
    }), flush=True)  # fmt: skip


def seconds(work: Callable[[], None]) -> float:
    gc.collect()
    with contextlib.redirect_stdout(io.StringIO()):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


def replayed(name: str, run: Path, target: Path) -> None:
    from replay import open_backend, play

    options: dict[str, Any] = {"project": target.name} if name == "trackio" else {"path": str(target)}
    if name == "wandb":
        options["mode"] = "offline"
    (told,) = play(run, [open_backend(name, **options)], cursors=target.with_suffix(".cursors"))
    if not told.sent or told.skipped:
        raise SystemExit(f"replay to {name} told {told}: nothing was measured")


def with_summary_writer(rows: Rows, target: Path) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(str(target))
    for step, row in enumerate(rows):
        for key, value in row.items():
            writer.add_scalar(key, value, step)
    writer.close()


def with_trackio_log(rows: Rows, target: Path) -> None:
    import trackio

    trackio.init(project=target.name, name="run", embed=False)
    for step, row in enumerate(rows):
        trackio.log(row, step=step)
    trackio.finish()


def check_trackio(projects: list[str], steps: int) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    for project in projects:
        (run,) = SQLiteStorage.get_runs(project)
        if (held := len(SQLiteStorage.get_logs(project, run))) != steps:
            raise SystemExit(f"expected {steps} rows in {project}, got {held}: nothing was measured")


def with_wandb_log(rows: Rows, target: Path) -> None:
    import wandb

    target.mkdir()
    settings = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
    run = wandb.init(project="replay", dir=str(target), mode="offline", settings=settings)
    for step, row in enumerate(rows):
        run.log(row, step=step)
    run.finish()
    wandb.teardown()


def commit(folder: Path, rows: Rows) -> None:
    """Print what four live backends add to the training's thread."""
    bare = median_commit(folder / "bare", rows, live=False)
    live = median_commit(folder / "live", rows, live=True)
    print(json.dumps({
        "name": "commit with four backends", "ours": round(live * 1e3, 3), "rival": round(bare * 1e3, 3),
        "unit": "ms", "added": round((live - bare) * 1e3, 3),
        "sizes": {"commits": COMMITS, "keys": len(rows[0])},
    }), flush=True)  # fmt: skip


def median_commit(root: Path, rows: Rows, *, live: bool) -> float:
    import eventlog
    from replay import StatsLogger, StatsLoggerConfig, open_backend

    config = StatsLoggerConfig(experiment_name="bench", trial_name=root.name, fileroot=str(root))
    backends = []
    if live:
        backends = [
            open_backend("tensorboard", path=str(root / "tb")),
            open_backend("wandb", mode="offline", path=str(root / "wandb")),
            open_backend("swanlab", mode="offline", path=str(root / "swanlab")),
            open_backend("trackio", project="live"),
        ]
    took: list[float] = []
    with contextlib.redirect_stdout(io.StringIO()), StatsLogger(config, backends=backends) as logger:
        for step in range(COMMITS):
            time.sleep(STEP_SECONDS)
            began = time.perf_counter()
            logger.commit(0, step, step, rows[step % len(rows)])
            took.append(time.perf_counter() - began)
    eventlog.stop()
    return float(np.median(took))


if __name__ == "__main__":
    sys.exit(main())
