"""The arguments and options that commands share: the same word means the same everywhere."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Attempts",
    "AttemptsOption",
    "EngineName",
    "EngineOption",
    "Json",
    "Keys",
    "KeysOption",
    "MemoryLimit",
    "More",
    "RunDir",
    "Since",
    "Source",
    "SourceOption",
    "Spill",
    "Until",
    "Workers",
    "asked_wrongly",
    "check_bounds",
    "check_output",
    "example",
]


class Attempts(Enum):
    """Which rows of a restarted run are taken."""

    LATEST = "latest"
    ALL = "all"


class Source(Enum):
    """Which metrics are taken: what was committed live, or what the log of all ranks says."""

    COMMITTED = "committed"
    RECOMPUTED = "recomputed"


class EngineName(Enum):
    """Where the values are read."""

    LOCAL = "local"
    RAY = "ray"


RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of the run.", show_default=False)]
Keys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY", help="Keys to take, globs too ('ppo_actor/*'); all if none.", show_default=False
    ),
]
KeysOption = Annotated[
    list[str] | None,
    typer.Option("--keys", metavar="KEY", help="Keys to take, globs too; repeatable.", show_default=False),
]
More = Annotated[
    list[Path] | None,
    typer.Option(
        "--with",
        metavar="RUN_DIR",
        help="Another run to ask together with it; repeatable.",
        show_default=False,
    ),
]
Since = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="First step to take.", show_default=False)
]
Until = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="Last step to take.", show_default=False)
]
AttemptsOption = Annotated[
    Attempts, typer.Option("--attempts", help="With 'all', rows of steps that a later attempt redid too.")
]
SourceOption = Annotated[
    Source, typer.Option("--source", help="What was committed live, or what the log of all ranks says.")
]
EngineOption = Annotated[
    EngineName, typer.Option("--engine", help="Processes of this machine, or a Ray cluster.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="How many at a time; as many as processors if not given.", show_default=False
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="What may be in memory: 256MB. Else AREAL_METRICS_MEMORY_LIMIT.",
        show_default=False,
    ),
]
Spill = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where SQL may put what does not fit. Else AREAL_METRICS_SPILL.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def asked_wrongly(error: Exception) -> bool:
    """Whether a command failed over what it was told, whatever the run holds: exit code 2, else 1."""
    from eventlog import errors

    wrong = isinstance(error, errors.ConfigError | errors.QueryError | errors.StepError)
    return wrong and not isinstance(error, errors.UnansweredError)


def check_bounds(since: int | None, until: int | None) -> None:
    """Refuse bounds that no step lies between."""
    if since is not None and until is not None and since > until:
        raise typer.BadParameter(f"expected --since at or below --until, got {since} and {until}")


def check_output(path: Path) -> None:
    """Refuse a file whose directory does not exist, or lies within a run."""
    import eventlog

    eventlog.as_output(path)


def example(*commands: str) -> str:
    r"""Return the end of a command's help; `\b` keeps its lines as they are."""
    return "\n".join(["\b", "Example:", *(f"  areal-metrics {command}" for command in commands)])
