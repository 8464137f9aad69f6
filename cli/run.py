"""Running a training that was written for AReaL, recorded."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from . import render
from .options import example

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()

_SHIM: Final = Path(__file__).parent / "shim"
_NOT_EXECUTABLE: Final = 126  # as shells have it
_NOT_FOUND: Final = 127


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog=example(
        "run --log-dir runs/a -- python train.py --config math.yaml",
        "run --log-dir runs/a --role actor -- torchrun --nproc-per-node 8 train.py",
    ),
)
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="What to run, with its arguments.")
    ],
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Record into this run, from the first record of every process on; without it where "
            "AREAL_METRICS_DIR says, or the training's StatsLogger: what has one, and what that starts.",
            show_default=False,
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Role of the processes in the run.", show_default=False),
    ] = None,
) -> None:
    """Run a command so that AReaL's metrics modules are ours, in every Python process it starts.

    The code that imports `areal.utils.stats_tracker`, `areal.utils.stats_logger`, `areal.utils.evaluator` and
    `areal.infra.workflow_context` stays as it is. Without --log-dir a process that exports and has no log
    warns of it. The exit code is the command's. Pythons that ignore PYTHONPATH (-E, -I) or site (-S) are left
    alone.
    """
    environment = _environment(log_dir, role)
    _as_started()
    try:
        # signals and the exit code are the command's own: it takes the place of this process
        os.execvpe(command[0], command, environment)  # noqa: S606
    except FileNotFoundError:
        render.complain(f"expected a command, got {command[0]!r}, which is not found")
        raise typer.Exit(_NOT_FOUND) from None
    except OSError as error:
        render.complain(f"expected a command, got {command[0]!r}: {error.strerror}")
        raise typer.Exit(_NOT_EXECUTABLE) from None


def _environment(log_dir: Path | None, role: str | None) -> dict[str, str]:
    """Return the environment of the command; raises for what cannot be used."""
    environment = dict(os.environ)
    before = environment.get("PYTHONPATH")
    if not before:
        environment["PYTHONPATH"] = str(_SHIM)
    elif str(_SHIM) not in before.split(os.pathsep):
        environment["PYTHONPATH"] = f"{_SHIM}{os.pathsep}{before}"
    if role is not None:
        environment["AREAL_METRICS_ROLE"] = _checked(role)
    if log_dir is not None:
        from eventlog import RunDir

        made = RunDir.create(log_dir.absolute())
        environment["AREAL_METRICS_DIR"] = str(made.path)
    if not environment.get("AREAL_METRICS_DIR"):  # the log that a StatsLogger starts is for its children, too
        environment["AREAL_METRICS_UNDER_RUN"] = "1"
    return environment


def _checked(role: str) -> str:
    from eventlog import ArealMetricsError, check_role

    try:
        return check_role(role)
    except ArealMetricsError as error:
        raise typer.BadParameter(str(error), param_hint="--role") from None


def _as_started() -> None:
    """Undo what Python's start has changed for this process and the command would inherit."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
