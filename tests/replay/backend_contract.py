"""The public contract, under the short names that tests use."""

from __future__ import annotations

from replay.backends.contract import ODD_NAMES, BackendContract, RewriterContract, snapshot
from replay.backends.contract import example_rows as rows
from replay.backends.contract import example_run as run_info

__all__ = ["ODD_NAMES", "BackendContract", "RewriterContract", "rows", "run_info", "snapshot"]
