"""The time that is written down: UTC, microseconds, within what dates can say."""

from __future__ import annotations

import time
from typing import Final

LATEST_US: Final = 253_402_300_799_999_999  # the last moment of the year 9999


def now_us() -> int:
    """Return the time; of a clock that stands before 1970, or after 9999, the nearest that readers take."""
    now = time.time_ns() // 1000
    return now if 0 <= now <= LATEST_US else min(max(now, 0), LATEST_US)


def is_time(seconds: float) -> bool:
    """Whether it is a time that readers take, in Unix seconds: from 1970 to the year 9999."""
    return 0 <= seconds * 1e6 <= LATEST_US
