"""How much memory a session may take, and where it may put what does not fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from eventlog import as_bytes, errors

LIMIT: Final = "AREAL_METRICS_MEMORY_LIMIT"
SPILL: Final = "AREAL_METRICS_SPILL"
_LEAST: Final = 64 << 20  # below, DuckDB itself has no room
_HELD: Final = 1 << 30
_PIECE: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """A limit in bytes (None: DuckDB's own), and a directory for what goes beyond it ("": none)."""

    limit: int | None = None
    spill: str = ""

    @classmethod
    def of(cls, limit: int | str | None, spill: str | os.PathLike[str] | None) -> Memory:
        """Return what is given, else what the environment says; QueryError for what is no size."""
        given = limit if limit is not None else os.environ.get(LIMIT) or None
        where: Any = spill if spill is not None else os.environ.get(SPILL) or None
        if where is not None and not (isinstance(where, str | os.PathLike) and Path(where).is_dir()):
            raise errors.QueryError(f"expected a directory to spill to, got {where!r}")
        return cls(
            None if given is None else _bytes(given), "" if where is None else str(Path(where).resolve())
        )

    @property
    def held(self) -> int:
        """Bytes of values up to which a whole run is held."""
        return _HELD if self.limit is None else self.limit // 4

    @property
    def piece(self) -> int:
        """Bytes of values that are worked on at a time."""
        return _PIECE if self.limit is None else self.limit // 8


def _bytes(limit: int | str) -> int:
    try:
        found = as_bytes(limit)
    except errors.LogError:
        raise errors.QueryError(f"expected a memory limit in bytes or like 256MB, got {limit!r}") from None
    if found < _LEAST:
        raise errors.QueryError(f"expected a memory limit of {_LEAST >> 20}MiB or more, got {limit!r}")
    return found
