"""The segments a process has open, one a stream: begun, followed by the next one, left behind, ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .origin import said_again
from .schema import LossCause, Stream
from .segment import Loss, SegmentWriter, Told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .budget import Budget
    from .rundir import Producer, RunDir


_MOVED: Final = "files of the run were removed or moved while it is recorded, it goes on in new ones"


class Segments:
    """Used by the writer's thread alone.

    What a failure costs is told to `lose`; what was noted in files that are gone, to `owe`.
    """

    def __init__(
        self,
        run: RunDir,
        producer: Producer,
        budget: Budget,
        *,
        segment_bytes: int,
        fsync: bool,
        attempt: int | None,
        policy: str,
        lose: Callable[[Loss], None],
        owe: Callable[[Iterable[Loss]], None],
    ) -> None:
        self.attempt = attempt  # written into the segments begun from now on
        self._run = run
        self._producer = producer
        self._budget = budget
        self._bytes = segment_bytes
        self._fsync = fsync
        self._policy = policy
        self._lose = lose
        self._owe = owe
        self._open: dict[Stream, SegmentWriter] = {}
        self._numbers = dict.fromkeys(Stream, 0)
        self.moved = False  # somebody removed the run's files, or moved them elsewhere

    def of(self, stream: Stream, size: int = 0, told: Told | None = None) -> SegmentWriter:
        """Return the segment that `size` more bytes go into; OSError when one cannot be begun."""
        segment = self._open.get(stream)
        if segment is None:
            return self._begin(stream)
        most = self._budget.segment_bytes(self._bytes) if stream is Stream.PAYLOAD else self._bytes
        if not size or not segment.frames or segment.size + size <= most:
            return segment
        try:
            fresh = self._begin(stream)
        except OSError:
            return segment  # too long is better than lost
        self._end(segment, told)  # only now: a newest segment with an end record means that the process ended
        if stream is Stream.PAYLOAD:
            self._budget.keep(segment)
        return fresh

    def _begin(self, stream: Stream) -> SegmentWriter:
        if self._run.manifest:
            said_again(self._run.path / "run.json", self._run.manifest)
        file = self._run.segment(stream, self._producer, self._numbers[stream])
        self._numbers[stream] += 1
        try:
            self._open[stream] = SegmentWriter(file, self._producer, self.attempt, self._policy)
        except FileExistsError:  # `leave` could not remove it: the next try takes the next number
            raise
        except OSError:
            self._numbers[stream] -= 1
            raise
        return self._open[stream]

    def note(self, losses: Iterable[Loss]) -> list[Loss]:
        """Note losses on the disk; return those of streams that take none."""
        left: list[Loss] = []
        for loss in losses:
            full = any(other.stream is loss.stream for other in left)
            try:
                if not full:
                    self.of(loss.stream).lost(loss)
            except OSError:
                full = True
                self.leave(loss.stream)  # which may owe more
            if full:
                left.append(loss)
        return left

    def leave(self, stream: Stream, *, gone: bool = False) -> None:
        """Leave a segment as it is after a failure; an empty one is removed and its number used again."""
        if (segment := self._open.pop(stream, None)) is None:
            return
        segment.leave()
        if not segment.stays:
            self._numbers[stream] -= 1
            self._owe(segment.said)
        elif stream is Stream.PAYLOAD and not gone:
            self._budget.keep(segment)

    def miss(self, *streams: Stream) -> str | None:
        """Leave what somebody removed or moved, if so of some streams; return what the user is told, once."""
        if not any(each and each.is_gone() for each in map(self._open.get, streams)):
            return None
        told, self.moved = self.moved, True
        for segment in [each for each in self._open.values() if each.is_gone()]:
            self.leave(segment.file.stream, gone=True)
            if segment.stays:
                self._count(segment, "removed or moved", size=segment.size, rows=segment.rows)
        return None if told else _MOVED

    def sync(self, *streams: Stream) -> None:
        """Bring what was written of some streams to the disk."""
        for segment in [self._open[stream] for stream in streams if stream in self._open]:
            try:
                if segment.unsynced:
                    segment.sync()
            except OSError as error:  # the system may have dropped what it could not write
                self.leave(segment.file.stream)
                self._count(segment, error)

    def begun(self, stream: Stream) -> int:
        """Return how many segments of a stream there are to stay."""
        segment = self._open.get(stream)
        return self._numbers[stream] - (segment is not None and not segment.stays)

    def finish(self, told: Told) -> None:
        """End all segments; the records' end says how many of the others there are, if all have theirs."""
        ended = True
        for stream in (Stream.PAYLOAD, Stream.COMMITS):
            segment = self._open.pop(stream, None)
            ended &= self._end(segment, told) if segment else not self._numbers[stream]
        begun = self._numbers[Stream.PAYLOAD], self._numbers[Stream.COMMITS]
        if segment := self._open.pop(Stream.RECORDS, None):  # its end is the session's
            self._end(segment, Told(*told[:2], *(begun if ended else ())))

    def forget(self) -> None:
        """Close the descriptors and nothing else: the files are another process's."""
        while self._open:
            self._open.popitem()[1].forget()

    def _end(self, segment: SegmentWriter, told: Told | None) -> bool:
        try:
            if self._fsync:
                segment.sync()
            return segment.finish(told)
        except OSError as error:
            self._count(segment, error)
            return False

    def _count(self, segment: SegmentWriter, what: object, *, size: int | None = None, rows: int = 0) -> None:
        first, last = segment.windows
        detail = f"{what}, windows {first} to {last} may be lost: {segment.file.data}"
        stream, size = segment.file.stream, segment.unsynced if size is None else size
        self._lose(Loss(stream, LossCause.PREVIOUS_SEGMENT, rows=rows, bytes=size, detail=detail))
