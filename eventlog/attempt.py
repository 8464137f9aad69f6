"""One lifetime of a run: what its claim says, and the name of the file it stands in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from .clock import LATEST_US
from .errors import LogError, ManifestError
from .manifest import read_json

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_NUMBER: Final = 999_999_999  # of attempts and ranks: they are parts of names
# The outcome that a claim says which stands for a lost one.
LOST: Final = "unknown: its claim was lost, where it resumed is known by its commits alone"
_FILE: Final = re.compile(r"([0-9]{4}|[1-9][0-9]{4,8})\.json")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One lifetime of a run: who claimed it, where it resumed, how it ended."""

    number: int
    started_us: int = 0
    host: str = ""
    pid: int = 0
    role: str = ""
    rank: int = 0
    session: str = ""
    resume_step: int | None = None
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    version_info: dict[str, Any] = field(default_factory=dict[str, Any])
    outcome: str | None = None  # "finished", "exception: …", "signal: …", LOST; None: running, or killed
    ended_us: int | None = None


_RANGES: Final = {
    "started_us": LATEST_US,
    "ended_us": LATEST_US,
    "pid": 2**31 - 1,
    "rank": LARGEST_NUMBER,
    "resume_step": 2**63 - 1,
}
_FIELDS: Final[dict[str, type]] = {
    **dict.fromkeys(_RANGES, int),
    **dict.fromkeys(("host", "role", "session", "outcome"), str),
    **dict.fromkeys(("config", "version_info"), dict),
}


def check_number(number: int, what: str) -> int:
    """Return a rank or an attempt; LogError when it cannot be part of a file name."""
    if not 0 <= number <= LARGEST_NUMBER:
        raise LogError(f"expected {what} of 0 to {LARGEST_NUMBER}, got {number}")
    return number


def attempt_of(path: Path, claim: dict[str, Any]) -> Attempt:
    """Return what the file of an attempt says; ManifestError where that cannot be."""
    if (number := number_of(path.name)) is None:
        raise ManifestError(f"is not named like an attempt: not read: {path}")
    if claim.get("number", number) != number:
        raise ManifestError(f"is a copy of the claim of attempt {claim['number']!r:.100}: not read: {path}")
    said: dict[str, Any] = {}
    for name, kind in _FIELDS.items():
        if (value := claim.get(name)) is None:
            continue
        if type(value) is not kind or (kind is int and not 0 <= value <= _RANGES[name]):
            most = f" of 0 to {_RANGES[name]}" if kind is int else ""
            raise ManifestError(f"expected {name} to be {kind.__name__}{most}, got {value!r:.100}: {path}")
        if kind is str and re.search(r"[\ud800-\udfff]", value):
            raise ManifestError(f"expected {name} to be text, got {value!r:.100}: {path}")
        said[name] = value
    return Attempt(number, **said)


def is_own(path: Path) -> bool:
    """Whether the file of an attempt is no copy of another's; a damaged one is of the attempt it names."""
    number = number_of(path.name)
    try:
        return read_json(path).get("number", number) == number
    except ManifestError:
        return True


def number_of(name: str) -> int | None:
    """Return the number of the attempt whose file has this name; None when it is no attempt's."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None
