"""Who else alive writes as the same role and rank: by mistake, or where one should have ended."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from .rundir import Producer, RunDir, SegmentFile, now_us
from .schema import Stream
from .sealed import SILENT_SECONDS, read_end

_CLOCK_STEP: Final = 60.0  # seconds by which a clock may have been set since


def rivals(run: RunDir, producer: Producer) -> list[str]:
    """Return one line for every other live session of the producer's role and rank."""
    files = [f for f in run.segments_of(producer.role, producer.rank) if f.stream is Stream.RECORDS]
    newest = {file.session: file for file in files if file.session != producer.session}
    return [line for file in newest.values() if (line := _sign_of_life(file, producer))]


def _sign_of_life(file: SegmentFile, mine: Producer) -> str | None:
    segment = read_end(file)
    if segment.header is None or segment.ended:
        return None
    who = segment.producer
    silent = abs(now_us() - segment.seen_us) / 1e6
    if who and who.host == mine.host:
        alive = who.pid != mine.pid and _runs(who.pid, who.started_us)
    else:
        alive = silent < SILENT_SECONDS
    where = f"on {who.host}, pid {who.pid}, " if who else ""
    return f"session {file.session} {where}last seen {silent:.0f} s ago" if alive else None


def _runs(pid: int, since_us: int) -> bool:
    """Whether the process that had this id at that time still runs."""
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
