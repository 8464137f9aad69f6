"""Whether more will come of a process, as far as its files and this machine say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import machine
from .clock import now_us
from .rundir import Problems
from .schema import Stream
from .sealed import SILENT_SECONDS, SealedSegment

if TYPE_CHECKING:
    from .rundir import RunDir, SegmentFile

FOLLOWED_SECONDS: Final = 10.0  # two heartbeats: more than clocks of one cluster differ
LAST_ENTRIES: Final = 4096  # of an index: more than a process writes between two signs of life


def read_end(file: SegmentFile) -> SealedSegment:
    """Return a segment after reading only the end of its index: by it one knows its last sign of life."""
    with SealedSegment(file, Problems(), newest=True) as segment:
        for _ in segment.entries(max(0, segment.slots - LAST_ENTRIES)):
            pass
    return segment


def is_dead(run: RunDir, file: SegmentFile) -> bool:
    """Whether nothing more will come of the session that wrote a file: by its end mark, or by all signs.

    It gave no sign of life for SILENT_SECONDS, or another of its role and rank, or a later attempt, began
    after it had fallen silent.
    """
    kin = run.segments_of(file.role, file.rank, Stream.RECORDS)
    own = [other for other in kin if other.session == file.session]
    if not own:
        return True
    end = read_end(own[-1])
    before = read_end(own[-2]) if len(own) > 1 and end.header is None else end  # the newest just begins
    seen_us = max(end.seen_us, before.seen_us) or own[-1].started_us
    if end.ended or abs(now_us() - seen_us) / 1e6 > SILENT_SECONDS:
        return True
    newest = run.newest_attempt()
    if end.attempt is not None and newest is not None and newest > end.attempt:
        return True
    later = [other.started_us for other in kin if other.session != file.session]
    later += [claim.started_us for claim in run.attempts()]
    return (max(later, default=0) - seen_us) / 1e6 > FOLLOWED_SECONDS


def is_over(run: RunDir, file: SegmentFile) -> bool:
    """Whether a session is dead, or ran on this machine in a process that is gone."""
    own = run.segments_of(file.role, file.rank, Stream.RECORDS, file.session)
    who = read_end(own[0]) if own else None
    if who and who.producer and who.machine and who.machine == machine.here():
        return not machine.runs(who.producer.pid, who.producer.started_us) or is_dead(run, file)
    return is_dead(run, file)
