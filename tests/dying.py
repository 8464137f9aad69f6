"""Tasks that die once, or take their time: what a worker does to those that rely on it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def once(task: tuple[str, int]) -> int:
    """Return a number; of number 1 the process is killed the first time."""
    folder, number = task
    if number == 1:
        try:
            (Path(folder) / "died").touch(exist_ok=False)
        except FileExistsError:
            return number
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def always(task: int) -> int:
    """Never return."""
    os.kill(os.getpid(), signal.SIGKILL)
    return task


def refuse(task: int) -> int:
    """Raise what a task raises that cannot be done."""
    from eventlog import errors

    raise errors.QueryError(f"expected another task, got {task}")


def slowly(task: float) -> str:
    """Say on which node it ran, after some seconds."""
    import ray

    time.sleep(task)
    return ray.get_runtime_context().get_node_id()
