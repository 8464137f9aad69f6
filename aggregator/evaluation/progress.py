"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(name: str, total: int, *, shown: bool) -> Generator[Callable[[int], None]]:
    """Show how much of `total` is done; yields what takes how many more are."""
    if not (shown and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda more: bar.advance(task, more)
