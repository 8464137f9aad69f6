"""replay retells: one story to any tracker, live and after the fact, never twice, never silently less."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .account import Report
    from .backends import backend_options, configured, open_backend
    from .backends.base import Backend, Capabilities, RunInfo
    from .backends.contract import BackendContract, RewriterContract
    from .backends.memory import MemoryBackend
    from .config import (
        StatsLoggerConfig,
        SwanlabConfig,
        TensorBoardConfig,
        TrackioConfig,
        WandBConfig,
        load_config,
        redact_sensitive_config,
    )
    from .console import print_stats, tabulate_stats
    from .imports import Imported, import_history
    from .logger import StatsLogger
    from .player import check_apart, play
    from .statistics import check_stats
    from .status import Status
    from .steps import Order
    from .tail import follow
    from .version import VersionInfo, version_info

_HOMES = {
    "Backend": "backends.base",
    "BackendContract": "backends.contract",
    "Capabilities": "backends.base",
    "Imported": "imports",
    "MemoryBackend": "backends.memory",
    "Order": "steps",
    "Report": "account",
    "RewriterContract": "backends.contract",
    "RunInfo": "backends.base",
    "StatsLogger": "logger",
    "StatsLoggerConfig": "config",
    "Status": "status",
    "SwanlabConfig": "config",
    "TensorBoardConfig": "config",
    "TrackioConfig": "config",
    "VersionInfo": "version",
    "WandBConfig": "config",
    "backend_options": "backends",
    "check_apart": "player",
    "check_stats": "statistics",
    "configured": "backends",
    "follow": "tail",
    "import_history": "imports",
    "load_config": "config",
    "open_backend": "backends",
    "play": "player",
    "print_stats": "console",
    "redact_sensitive_config": "config",
    "tabulate_stats": "console",
    "version_info": "version",
}

__all__ = [
    "Backend",
    "BackendContract",
    "Capabilities",
    "Imported",
    "MemoryBackend",
    "Order",
    "Report",
    "RewriterContract",
    "RunInfo",
    "StatsLogger",
    "StatsLoggerConfig",
    "Status",
    "SwanlabConfig",
    "TensorBoardConfig",
    "TrackioConfig",
    "VersionInfo",
    "WandBConfig",
    "backend_options",
    "check_apart",
    "check_stats",
    "configured",
    "follow",
    "import_history",
    "load_config",
    "open_backend",
    "play",
    "print_stats",
    "redact_sensitive_config",
    "tabulate_stats",
    "version_info",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
