"""How a run is called in Trackio: its project, name and id, its metrics, and the ids of its rows."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from .base import described, section
from .names import Names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import RunInfo

_RESERVED: Final = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})


def names() -> Names:
    """Return Trackio's names: what it keeps to itself is set apart, as nothing else would tell the two."""
    return Names("trackio", reserved=lambda name: name in _RESERVED or name.startswith("__"))


class TrackioRun:
    """What a file and a server have in common.

    Project and name are as given, else as the run's config says, else experiment and trial. The id is that of
    the run directory, so that runs of one name never mix.
    """

    name = "trackio"

    def __init__(self, *, project: str | None, name: str | None) -> None:
        self.names = names()
        self.given = {"project": project, "name": name}
        self.project = self.run = self.run_id = ""

    @property
    def renamed(self) -> Mapping[str, str]:
        """The keys that have another name there, and those names."""
        return self.names.renamed

    def place(self, run: RunInfo) -> None:
        """Find project, name and id of a run."""
        own = section(run.config, "trackio")
        chosen = {key: value or own.get(key) for key, value in self.given.items()}
        self.project = chosen["project"] or run.experiment
        self.run = chosen["name"] or run.trial
        self.run_id = run.id

    def row_id(self, step: int, row: Mapping[str, Any], time: float) -> str:
        """Return the id that a row of this content always has."""
        content = json.dumps([step, time, *row.items()]).encode()
        return f"{self.run_id}:{step}:{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def config_of(run: RunInfo) -> dict[str, Any]:
    """Return a run's config with the entries that Trackio itself would add."""
    group = f"{run.experiment}_{run.trial}"
    return {**described(run), "_Group": group, "_Created": as_text(run.started)}


def as_text(seconds: float) -> str:
    """Return a time as Trackio's readers sort it: as text, so always of one form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
