"""Who else alive writes as the same role and rank: by mistake, or where one should have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .clock import now_us
from .life import read_end
from .machine import runs
from .schema import Stream
from .sealed import SILENT_SECONDS

if TYPE_CHECKING:
    from .rundir import Producer, RunDir, SegmentFile


def rivals(run: RunDir, producer: Producer) -> list[str]:
    """Return one line for every other live session of the producer's role and rank."""
    files = run.segments_of(producer.role, producer.rank, Stream.RECORDS)
    newest = {file.session: file for file in files if file.session != producer.session}
    return [line for file in newest.values() if (line := _sign_of_life(file, producer))]


def _sign_of_life(file: SegmentFile, mine: Producer) -> str | None:
    segment = read_end(file)
    if segment.header is None or segment.ended:
        return None
    who = segment.producer
    silent = abs(now_us() - segment.seen_us) / 1e6
    if who and who.host == mine.host:
        alive = who.pid != mine.pid and runs(who.pid, who.started_us)
    else:
        alive = silent < SILENT_SECONDS
    where = f"on {who.host}, pid {who.pid}, " if who else ""
    return f"session {file.session} {where}last seen {silent:.0f} s ago" if alive else None
