"""The public contract, under the short names that tests use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay.backends.contract import ODD_NAMES, BackendContract, RewriterContract, snapshot
from replay.backends.contract import example_rows as rows
from replay.backends.contract import example_run as run_info

if TYPE_CHECKING:
    from pathlib import Path

    from replay.steps import Row

__all__ = ["ODD_NAMES", "BackendContract", "RewriterContract", "rows", "run_info", "snapshot", "tell"]


def tell(backend: Any, path: Path, told: list[Row], *, close: bool = True, **info: Any) -> None:
    """Tell rows live, in one lifetime; `info` are fields of RunInfo."""
    backend.open(run_info(path, **info))
    for row in told:
        backend.log(row.step, row.metrics, row.time)
    if close:
        backend.close()
