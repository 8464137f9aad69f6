"""A progress bar on standard error, where that is a terminal; the only one of the product."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(
    name: str, total: int | None = None, *, shown: bool = True
) -> Generator[Callable[..., object]]:
    """Show how much of `total` is done; yields what takes how much that is, and the total once it is known.

    `more=` takes how much was done since instead. Names are never read as markup.
    """
    if not (shown and sys.stderr is not None and sys.stderr.isatty()):  # a process may have no stderr
        yield lambda *_, **__: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)

        def tell(done: int | None = None, total: int | None = None, *, more: int | None = None) -> None:
            bar.update(task, completed=done, total=total, advance=more)

        yield tell
