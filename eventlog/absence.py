"""Files of a process that are gone: by its own word, and by what every process begins and ends with.

A process creates its records first. With every sign of life it says how many segments of payload and commits
it has begun; when it ends in order, each of its streams ends with a record that says so. Older processes did
not say how many: of them less can be concluded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .files import is_there
from .rundir import Problem
from .schema import LossCause, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .rundir import RunDir, SegmentFile
    from .state import SessionState

_COMMITS: Final = "commits"
_LAST: Final = 1 << 62  # behind every number


def absent(run: RunDir, files: Iterable[SegmentFile], state: SessionState) -> list[SegmentFile]:
    """Return the last segment of each stream of a process that must be there and is not.

    `files` are those of it that were listed before its signs of life were read: what came since is looked
    for anew.
    """
    found = _missing(files, state)
    if not found or not run.owns(state.producer.run):
        return []
    session = state.producer.session
    later = _missing((file for file in run.segments() if file.session == session), state)
    return [
        run.segment(stream, state.producer, number) for stream, number in found.items() if stream in later
    ]


def _missing(files: Iterable[SegmentFile], state: SessionState) -> dict[Stream, int]:
    """Return the number of the last segment of the streams of which some at the end are not there."""
    there = dict.fromkeys(Stream, -1)
    for file in files:
        there[file.stream] = max(there[file.stream], file.number)
    said = {stream: state.told.segments(stream) - 1 for stream in Stream}
    return {stream: last for stream, last in said.items() if there[stream] < last}


def judge(run: RunDir, files: Iterable[SegmentFile], state: SessionState) -> None:
    """Let what must be there of a process and is not be problems of its run."""
    for file in absent(run, files, state):
        reason = "is missing, with all that its process wrote there"
        run.found.add(Problem(file.data, reason))
    for file in _endless(run, files, state):
        run.found.add(Problem(file.index, "has no end, though its process ended in order", offset=0))


def _endless(run: RunDir, files: Iterable[SegmentFile], state: SessionState) -> list[SegmentFile]:
    newest = {file.stream: file for file in files}
    found = [file for stream, file in newest.items() if stream not in state.closed]
    if not found or not state.ended or state.told.commits < 0:
        return []
    session = state.producer.session
    later = {file.stream: file for file in run.segments() if file.session == session}
    # Of a segment that has a successor by now the end says nothing of the process.
    return found if later == newest else []


def judge_gone(
    run: RunDir,
    files: Iterable[SegmentFile],
    state: SessionState,
    pruned: Callable[[SegmentFile], set[int]],
) -> None:
    """A stream that is gone is damage, but for payload whose removal the process has noted."""
    files = list(files)
    if unnoted := [f for f in files if f.stream is Stream.PAYLOAD and f.number not in state.pruned]:
        state.pruned |= pruned(unnoted[0])
    for file in files:
        if file.stream is Stream.PAYLOAD and file.number in state.pruned:
            run.found.clear(file.data)
        else:
            run.found.add(Problem(file.data, "is missing, with the frames its index lists"))


def lost_commits(run: RunDir, states: Iterable[SessionState]) -> dict[str, list[range]]:
    """Return, by session, the numbers of the commits that are known to be lost.

    Where files are cut, bad or gone those behind the newest that is left have no number: then the last range
    lies behind all others. Not where a process ended in order and its indexes tell of every commit.
    """
    root = run.path / _COMMITS
    hidden = {problem.path for problem in run.found if _hides(problem) and root in _above(problem.path)}
    lost: dict[str, list[range]] = {}
    for state in sorted(states, key=lambda state: state.heartbeat_us):  # of files copied to another rank: 0
        who = state.producer
        folder = run.producer_dir(Stream.COMMITS, who.role, who.rank)
        losses = [
            loss
            for loss in state.losses
            if loss.stream is Stream.COMMITS and loss.cause is not LossCause.REFUSED
        ]
        lost[who.session] = numbers = [
            range(loss.window, loss.window + (loss.rows if loss.cause is LossCause.MISSING else 1))
            for loss in losses
            if loss.window >= 0
        ]
        unnumbered = any(loss.window < 0 for loss in losses)
        of_these = any(_may_hold(path, folder, who.session) for path in hidden)
        if unnumbered or (of_these and not _are_all_told(run, state)):
            numbers.append(range(_LAST, _LAST + 1))
    return lost


def _may_hold(path: Path, folder: Path, session: str) -> bool:
    """Whether there may have been commits of a session at a path, which is no copy of a file in its place."""
    if path in (folder, folder.parent):
        return True
    return session in path.name and (path.parent == folder or not is_there(folder / path.name))


def _are_all_told(run: RunDir, state: SessionState) -> bool:
    if not state.ended or Stream.COMMITS not in state.counted:
        return False
    who = state.producer
    files = run.segments_of(who.role, who.rank, Stream.COMMITS, who.session)
    return 0 < state.told.commits <= files[-1].number + 1 if files else False


def _above(path: Path) -> tuple[Path, ...]:
    return path, *path.parents


def _hides(problem: Problem) -> bool:
    """Whether a problem may hide frames that nobody has counted: the number of a bad one is in its index."""
    return problem.frame is None or problem.path.suffix != ".arrows"
