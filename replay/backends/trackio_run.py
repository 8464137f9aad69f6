"""How a run is called in Trackio: its project, name and id, its metrics, and the ids of its rows."""

from __future__ import annotations

import hashlib
import math
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from .base import described, section
from .names import Names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
        self.project = self.run = self.run_id = self._called = ""

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
        self._called = self.run

    def number(self, run: RunInfo, number: int) -> None:
        """Be the run of a number: id and name with the number behind them."""
        self.resume(run, f"{run.id}-{number}")

    def resume(self, run: RunInfo, run_id: str | None) -> None:
        """Be the run of an id that `number` has given; without one the first."""
        if run_id is not None:
            self.run_id, self.run = run_id, self._called + run_id.removeprefix(run.id)

    def settle(self, run: RunInfo, first: str, holds: Callable[[], bool]) -> None:
        """Be the run to go on with after the `first`; a fresh one is the next number that holds nothing."""
        numbers = count(2)
        if not run.fresh:
            self.resume(run, run.lineage.newest(first))
            return
        while holds():
            self.number(run, next(numbers))
        run.lineage.begin(first, self.run_id)

    def row_id(self, step: int, content: bytes, time: float) -> str:
        """Return the id that a row of this content always has."""
        digest = hashlib.blake2b(f"{step} {float(time)!r} ".encode() + content, digest_size=8)
        return f"{self.run_id}:{step}:{digest.hexdigest()}"


def content_of(row: Mapping[str, Any]) -> bytes:
    """Return a row as Trackio keeps it; the same for every order of its keys."""
    from orjson import OPT_SERIALIZE_NUMPY, OPT_SORT_KEYS, dumps

    return dumps(row if _is_plain(row) else worded(row), option=OPT_SORT_KEYS | OPT_SERIALIZE_NUMPY)


def worded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in which words stand for what JSON has no number for."""
    from trackio.utils import serialize_values

    words: Any = serialize_values(row)
    return words


def _is_plain(row: Mapping[str, Any]) -> bool:
    """Whether a row is known to be nothing but finite numbers, at a glance."""
    try:
        return math.isfinite(sum(row.values()))
    except TypeError:  # a histogram
        return False


def config_of(run: RunInfo) -> dict[str, Any]:
    """Return a run's config with the entries that Trackio itself would add."""
    group = f"{run.experiment}_{run.trial}"
    return {**described(run), "_Group": group, "_Created": as_text(run.started)}


def as_text(seconds: float) -> str:
    """Return a time as Trackio's readers sort it: as text, so always of one form."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")
