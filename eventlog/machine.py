"""Which machine this is: where process ids mean the same; and whether a process of it still runs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from .clock import now_us

_CLOCK_STEP: Final = 60.0  # seconds by which a clock may have been set since


def here() -> str:
    """Name this machine since it was booted, and the container where it has ids of its own; "": unknown."""
    with suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{booted}:{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def runs(pid: int, since_us: int) -> bool:
    """Whether the process that had this id here at that time still runs."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (ProcessLookupError, OverflowError):
        return False
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        born = int(numbers[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return True  # no /proc here
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - born
    session_age = (now_us() - since_us) / 1e6
    return state != "Z" and age > session_age - _CLOCK_STEP
