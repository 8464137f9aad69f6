"""What the files of a run say of its attempts beside the claims: whose claim is gone, which number is taken.

A commit says which attempt its process was in, and whether it led it: whoever led one had claimed it.
"""

from __future__ import annotations

import re
from itertools import count, groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .attempt import LOST
from .entries import good_frames
from .files import is_there
from .life import LAST_ENTRIES
from .rundir import Problem, Problems
from .schema import RecordType, Stream
from .sealed import SealedSegment

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from .attempt import Attempt
    from .rundir import Producer, RunDir, SegmentFile

_SESSION: Final = re.compile("[0-9a-f]{32}")
_FEW: Final = 16  # entries behind a process's last frame: signs of life, its end


class _Named(NamedTuple):
    """What a frame says of the attempt that its process was in."""

    attempt: int | None
    led: bool = False


# Processes of which a claim is left


def claimants(run: RunDir, sessions: Iterable[str]) -> list[Attempt]:
    """Return the attempts that were claimed by processes of which nothing is left.

    `sessions` are those that were listed before; what came since is looked for anew.
    """
    known = set(sessions)
    found = [one for one in run.attempts() if _SESSION.fullmatch(one.session) and one.session not in known]
    later = {file.session for file in run.segments()} if found else set[str]()
    return [claim for claim in found if claim.session not in later]


# Claims of which a process is left


def leaders(run: RunDir, *, beyond: int = -1) -> dict[int, SegmentFile]:
    """Return the attempts `beyond` one that were led, as commits say, each with a segment of its leader."""
    found: dict[int, SegmentFile] = {}
    for file in sorted(run.segments(Stream.COMMITS), key=lambda file: file.started_us):
        for attempt in _led(run, file, beyond):
            found.setdefault(attempt, file)
    return {attempt: file for attempt, file in found.items() if attempt > beyond}


def _led(run: RunDir, file: SegmentFile, beyond: int) -> set[int]:
    """Return the attempts that the process of a segment led by its commits there: who leads once leads on."""
    with _opened(run, file) as segment:
        first, last = segment.attempt, _last(segment)
    if last is None or not last.led or (last.attempt is not None and last.attempt <= beyond):
        return set()
    if first is not None and first == last.attempt:
        return {first}
    with _opened(run, file) as segment:
        every = [_named(batch) for _, batch in good_frames(segment.sealed())]
    return {one.attempt for one in every if one.led and one.attempt is not None}


def lost(run: RunDir, led: Iterable[int]) -> list[int]:
    """Return the attempts that were led, and of which there is no claim.

    It is looked for only now: every claim was made before the commits that say so.
    """
    return sorted(number for number in led if not is_there(run.attempt_path(number)))


def judge_claims(run: RunDir, sessions: Iterable[str]) -> None:
    """Let claims whose processes are gone, and claims that are gone themselves, be problems of the run."""
    for claim in claimants(run, sessions):
        path = run.attempt_path(claim.number)
        reason = f"was claimed by session {claim.session} of {claim.role}-{claim.rank}: nothing of it is left"
        run.found.add(Problem(path, reason))
    free = next(number for number in count() if not is_there(run.attempt_path(number)))
    led = leaders(run, beyond=free - 1)
    for number in lost(run, led):
        run.found.add(Problem(run.attempt_path(number), why_lost(led[number])))


def why_lost(file: SegmentFile) -> str:
    """Return what is said of a claim that is gone, by a segment of the process that had claimed it."""
    who = f"session {file.session} of {file.role}-{file.rank}"
    return f"is missing: the attempt was led by {who}; where it resumed is known by its commits alone"


def stand_in(number: int, leader: Producer | None) -> dict[str, Any]:
    """Return a claim in the place of a lost one: it says so, and leaves to the commits where it resumed."""
    claim: dict[str, Any] = {"number": number, "outcome": LOST}
    if leader is not None:
        names = ("started_us", "host", "pid", "role", "rank", "session")
        claim |= {name: getattr(leader, name) for name in names}
    return claim


# Numbers


def taken(run: RunDir, who: Producer, *, given: bool) -> set[int]:
    """Return the numbers that no attempt is to get again, as commits say, whatever became of the claims.

    Of every role and rank the newest process that says one is asked; of the caller's own role and rank, whose
    attempts may have come to no commit, the records too. Where numbers are `given` processes may name one
    that nobody has claimed: only those that led it count.
    """
    files = [*run.segments(Stream.COMMITS), *run.segments_of(who.role, who.rank, Stream.RECORDS)]
    newest = [_newest(run, list(some)) for _, some in groupby(files, lambda file: (file.folder, file.stream))]
    return {one.attempt for one in newest if one.attempt is not None and (one.led or not given)}


def _newest(run: RunDir, files: list[SegmentFile]) -> _Named:
    for file in reversed(files):
        with _opened(run, file) as segment:
            named = _last(segment) or _Named(segment.attempt if segment.header else None)
        if named.attempt is not None:
            return named
    return _Named(None)


# Segments


def _opened(run: RunDir, file: SegmentFile) -> SealedSegment:
    """Open a segment to ask it this: what is wrong with it is told by those who read all of it."""
    columns = ("attempt", "leader") if file.stream is Stream.COMMITS else ("attempt",)
    return SealedSegment(file, Problems(), newest=True, owns=run.owns, columns=columns)


def _last(segment: SealedSegment) -> _Named | None:
    """Return what the last good frame of a segment says: it mostly lies among the last few entries."""
    for reach in (_FEW, LAST_ENTRIES):
        for slot, record in reversed(list(segment.entries(max(1, segment.slots - reach)))):
            if record and record.type == RecordType.FRAME and (batch := segment.batch(slot, record)):
                return _named(batch)
    return None


def _named(batch: pa.RecordBatch) -> _Named:
    last = batch.slice(batch.num_rows - 1).to_pylist()[0]
    return _Named(last["attempt"], bool(last.get("leader")))
