"""How a run and its metrics are called in wandb."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

from .base import section
from .names import Names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import RunInfo

_NO_ID: Final = re.compile(r"[:;,#?/'\s]")
_NO_PROJECT: Final = re.compile(r"[/\\#?%:]")
_LONGEST: Final = 128  # of a project


def names(*reserved: str) -> Names:
    """Return wandb's names: a leading underscore is its own, a dot nests, "length" breaks its pages."""
    kept = {"length", *reserved}
    return Names("wandb", forbidden=r"\.", reserved=lambda name: name.startswith("_") or name in kept)


def named_as(run: RunInfo, given: Mapping[str, Any], started: float) -> dict[str, Any]:
    """Return what names the run to wandb: as given, else as the run's own config says, else its names.

    An experiment whose name no project can have gets one that is as close as can be. ConfigError for a given
    name that wandb refuses.
    """
    pair = f"{run.experiment}_{run.trial}"
    project = _NO_PROJECT.sub("-", run.experiment)[:_LONGEST]
    about: dict[str, Any] = {"project": project, "name": run.trial, "group": pair, "id_suffix": "train"}
    own = section(run.config, "wandb")
    for source in ({key: own.get(key) for key in given}, given):
        about |= {key: value for key, value in source.items() if value}
    suffix = about.pop("id_suffix")
    if suffix == "timestamp":
        suffix = f"{datetime.fromtimestamp(started, UTC):%Y_%m_%d_%H_%M_%S}"
    elif suffix == "unique":
        suffix = run.id[:8]
    if about["project"] == project != run.experiment:  # runs of another experiment may lie there, too
        suffix = f"{hashlib.blake2b(run.experiment.encode(), digest_size=3).hexdigest()}_{suffix}"
    about = {"id": _NO_ID.sub("-", f"{pair}_{suffix}")} | about
    check_names(about["project"], about["id"])
    return about


def check_names(project: Any, run_id: Any) -> None:
    """ConfigError for what wandb refuses as the name of a project or as an id."""
    for what, name, refused in (("project", project, "/\\#?%:"), ("id", run_id, ":;,#?/'")):
        if name and set(str(name)) & set(refused):
            raise errors.ConfigError(f"expected a wandb {what} without any of {refused}, got {name!r}")
    if project and len(str(project)) > _LONGEST:
        raise errors.ConfigError(
            f"expected a wandb project of at most {_LONGEST} characters, got {len(project)}: {project!r}"
        )
