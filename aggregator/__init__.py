"""aggregator reduces: in the run over the ranks, afterwards over everything the log holds.

Names load what they need when they are asked for: `stats_tracker` torch, `open_run` DuckDB.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eventlog import workflow_context

if TYPE_CHECKING:
    from . import areal, evaluation, stats_tracker
    from .merge import Export, merge_worker_stats
    from .offline.session import Session, open_run

__all__ = [
    "Export",
    "Session",
    "areal",
    "evaluation",
    "merge_worker_stats",
    "open_run",
    "stats_tracker",
    "workflow_context",
]

_HOMES = {
    "Export": "merge",
    "Session": "offline.session",
    "merge_worker_stats": "merge",
    "open_run": "offline.session",
}


def __getattr__(name: str) -> Any:
    if name in {"areal", "evaluation", "stats_tracker"}:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
