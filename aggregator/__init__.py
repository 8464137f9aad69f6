"""aggregator reduces: in the run over the ranks, afterwards over everything the log holds.

Names load what they need when they are asked for: `stats_tracker` torch, `open_run` DuckDB.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eventlog import workflow_context

if TYPE_CHECKING:
    from . import areal, evaluation, stats_tracker
    from .globs import fits
    from .merge import Export, merge_worker_stats
    from .offline.compact import Compaction, compact
    from .offline.names import labels, match
    from .offline.restored import recover, verify
    from .offline.session import Session, open_run
    from .offline.statistics import checked_stats
    from .offline.strict import rows_of, strict_json, values_of
    from .offline.union import merge_runs
    from .progress import progress_bar

__all__ = [
    "Compaction",
    "Export",
    "Session",
    "areal",
    "checked_stats",
    "compact",
    "evaluation",
    "fits",
    "labels",
    "match",
    "merge_runs",
    "merge_worker_stats",
    "open_run",
    "progress_bar",
    "recover",
    "rows_of",
    "stats_tracker",
    "strict_json",
    "values_of",
    "verify",
    "workflow_context",
]

_HOMES = {
    "Compaction": "offline.compact",
    "Export": "merge",
    "Session": "offline.session",
    "checked_stats": "offline.statistics",
    "compact": "offline.compact",
    "fits": "globs",
    "labels": "offline.names",
    "match": "offline.names",
    "merge_runs": "offline.union",
    "merge_worker_stats": "merge",
    "open_run": "offline.session",
    "progress_bar": "progress",
    "recover": "offline.restored",
    "rows_of": "offline.strict",
    "strict_json": "offline.strict",
    "values_of": "offline.strict",
    "verify": "offline.restored",
}


def __getattr__(name: str) -> Any:
    if name in {"areal", "evaluation", "stats_tracker"}:
        return importlib.import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
