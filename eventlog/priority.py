"""What place the writer's thread takes beside the others: its share of the cores is theirs, its haste not."""

from __future__ import annotations

import os
from contextlib import suppress


def step_back() -> None:
    """Let this thread no longer take a core from one that runs when it is woken (Linux; else nothing).

    A batch thread has the same share of the time, but waits for it. Else the first thing it does when an
    export wakes it is to interrupt that export, or the one of another rank, on the core it was put on.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # where a sandbox, or the C library, does not let a thread ask
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
