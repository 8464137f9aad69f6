"""Builds run directories for tests: real files, written by the real recorder, encoder and writer.

Everything that decides a timeline is chosen by the test: sessions, ranks, worlds, attempts, window and commit
numbers, export ids, steps and times. Times are seconds after `EPOCH`.

    run = RunBuilder(path)
    run.attempt(resume_step=None)
    actors = [run.producer("actor", rank, world="w", world_size=2, attempt=0) for rank in range(2)]
    for step in range(3):
        for actor in actors:
            actor.tracker().scalar({"loss": step + actor.rank})
        stats = run.export(actors, time=10 * step)
        actors[0].commit(step, stats, time=10 * step + 5, leader=True)
        actors[1].commit(step, time=10 * step + 5)
    run.close()
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from aggregator.plan import Entry, Layout
from eventlog import Kind, Recorder, ReduceType, Spread, drain, encode, moments
from eventlog.manifest import create_json
from eventlog.rundir import Producer, RunDir
from eventlog.schema import Stream
from eventlog.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from eventlog import Drained

EPOCH = 1_767_225_600_000_000  # 2026-01-01, UTC µs


def at(seconds: float) -> int:
    """Return a time in UTC µs."""
    return EPOCH + round(seconds * 1_000_000)


@dataclass
class ProducerBuilder:
    """One process of the run. Records with real recorders, writes with a writer of its own."""

    run: RunDir
    producer: Producer
    attempt: int | None
    payload: bool
    writer: Writer
    windows: int = 0  # drained so far
    committed: int = 0  # windows that a commit covered so far
    commits: int = 0
    exports: int = 0
    texts: encode.Texts = field(default_factory=encode.Texts)
    trackers: dict[str, Recorder] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)  # tracker → the first window it still holds

    @property
    def session(self) -> str:
        """The uid of the process's lifetime."""
        return self.producer.session

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.producer.rank

    def tracker(self, name: str = "") -> Recorder:
        """Return the recorder of a tracker: call its `scalar`, `denominator`, `stat`, `counter`, `timing`."""
        return self.trackers.setdefault(name, Recorder(name))

    def drain(
        self,
        *,
        time: float = 0,
        step: int | None = None,
        reset: bool = True,
        tracker: str | None = None,
        key: str | None = None,
        lose: bool = False,
    ) -> tuple[Drained, int, int]:
        """Write what was recorded as the next window; return (what it was, window, first window covered).

        `lose` numbers the window but writes no record of it.
        """
        names = list(self.trackers) if tracker is None else [tracker]
        drained = drain([self.tracker(name) for name in names], key=key, reset=reset, step=step)
        frame, window = drained.frame, self.windows
        self.windows += 1
        since = min([window, *(self.kept[name] for name in names if name in self.kept)])
        for name in names:
            if reset and key is None:
                self.kept.pop(name, None)
            elif not reset:
                self.kept.setdefault(name, window)
        frame.window, frame.attempt = window, self.attempt
        if len(frame) and not lose:
            batch = encode.records(frame, self.texts).batch()
            place, kind = batch.schema.get_field_index("time"), batch.schema.field("time")
            times = pa.array([at(time)] * len(frame), kind.type)
            self._put(Stream.RECORDS, [batch.set_column(place, kind, times)], window)
            if self.payload:
                self._put(Stream.PAYLOAD, [message.batch() for message in encode.payload(frame)], window)
        return drained, window, since

    def note_export(
        self,
        export_id: str | None = None,
        *,
        window: int | None = None,
        first: int | None = None,
        members: Sequence[int] | None = None,
        time: float = 0,
        step: int | None = None,
        attempt: int | None = None,
        reset: bool = True,
        outcome: str = "ok",
        tracker: str | None = None,
        key: str | None = None,
    ) -> None:
        """Write an export row, of the newest window unless another is given."""
        window = self.windows - 1 if window is None else window
        self.exports += 1
        row = encode.ExportRow(
            record_id=_next_record(),
            time=at(time),
            window=window,
            step=step,
            attempt=self.attempt if attempt is None else attempt,
            export_id=export_id or f"{self.session[:16]}:{self.exports}",
            members=None if members is None else tuple(members),
            window_first=window if first is None else first,
            window_last=window,
            reset=reset,
            outcome=outcome,
            tracker=tracker,
            key=key,
        )
        self._put(Stream.RECORDS, [encode.export(row).batch()])

    def commit(
        self,
        step: int,
        metrics: Mapping[str, float] | Sequence[Mapping[str, float]] = (),
        *,
        time: float = 0,
        leader: bool = False,
        attempt: int | None = None,
        restored: int | None = None,
        epoch: int = 0,
        epoch_step: int = 0,
        windows: tuple[int, int] | None = None,
        tags: dict[str, Any] | None = None,
    ) -> None:
        """Write a commit, over the windows drained since the one before unless others are given."""
        if windows is None and self.committed < self.windows:
            windows = (self.committed, self.windows - 1)
        self.committed = self.windows
        first, last = windows or (None, None)
        parts = [metrics] if hasattr(metrics, "items") else list(metrics)
        made = encode.Commit(
            number=self.commits,
            time=at(time),
            attempt=self.attempt if attempt is None else attempt,
            leader=leader,
            restored_step=restored,
            epoch=epoch,
            epoch_step=epoch_step,
            global_step=step,
            window_first=first,
            window_last=last,
            metrics=tuple(dict(part) for part in parts),
            tags=tags,
        )
        self.commits += 1
        self._put(Stream.COMMITS, [encode.commit(made).batch()], made.number)

    def close(self) -> None:
        """End the process in order, on a slow machine too."""
        assert self.writer.close(100)

    def _put(self, stream: Stream, batches: list[Any], window: int = -1) -> None:
        ids = [
            i
            for batch in batches
            if "record_id" in batch.schema.names
            for i in batch["record_id"].to_pylist()
        ]
        span = {"first_id": min(ids), "last_id": max(ids)} if ids else {"first_id": window, "last_id": window}
        self.writer.put(stream, lambda: batches, window=window, nbytes=sum(b.nbytes for b in batches), **span)


class RunBuilder:
    """A run directory under construction; a context manager that closes it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run = RunDir.create(path)
        self.producers: list[ProducerBuilder] = []
        self._groups: dict[tuple[str, ...], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def attempt(
        self,
        number: int = 0,
        *,
        leader: ProducerBuilder | None = None,
        started: float = 0,
        resume_step: int | None = None,
        outcome: str | None = None,
        **fields: Any,
    ) -> int:
        """Claim an attempt of a given number."""
        (self.path / "attempts").mkdir(exist_ok=True)
        data = {
            "number": number,
            "started_us": at(started),
            "host": "host",
            "pid": 1,
            "role": leader.producer.role if leader else "",
            "rank": leader.rank if leader else 0,
            "session": leader.session if leader else "",
            "resume_step": resume_step,
            "outcome": outcome,
            **fields,
        }
        assert create_json(self.path / "attempts" / f"{number:04d}.json", data)
        return number

    def producer(
        self,
        role: str = "main",
        rank: int = 0,
        *,
        world: str | None = None,
        world_size: int = 1,
        started: float = 0,
        attempt: int | None = None,
        payload: bool = True,
        session: str | None = None,
    ) -> ProducerBuilder:
        """Start a process; its session is made of its place in the run unless given."""
        named = f"{role}/{rank}/{len(self.producers)}"
        session = session or hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
        made = Producer(
            self.run.id, session, role, rank, world or session, world_size, "host", 1, at(started)
        )
        builder = ProducerBuilder(self.run, made, attempt, payload, Writer(self.run, made))
        self.producers.append(builder)
        return builder

    def export(
        self,
        producers: ProducerBuilder | Sequence[ProducerBuilder],
        *,
        time: float = 0,
        step: int | None = None,
        attempt: int | None = None,
        reset: bool = True,
        tracker: str | None = None,
        key: str | None = None,
        export_id: str | None = None,
        lose: Sequence[int] = (),
    ) -> dict[str, float]:
        """Export what the processes recorded, one alone without a group, several as one group.

        Returns the numbers a live export returns. `lose` names ranks whose records never reach the disk.
        """
        alone = isinstance(producers, ProducerBuilder)
        group = [producers] if isinstance(producers, ProducerBuilder) else list(producers)
        members = None if alone else [p.rank for p in group]
        if not alone and export_id is None:
            sessions = tuple(p.session for p in group)
            self._groups[sessions] = number = self._groups.get(sessions, 0) + 1
            export_id = f"{hashlib.blake2b(''.join(sessions).encode(), digest_size=8).hexdigest()}:{number}"
        held = []
        for p in group:
            drained, window, first = p.drain(
                time=time, step=step, reset=reset, tracker=tracker, key=key, lose=p.rank in lose
            )
            p.note_export(
                export_id, window=window, first=first, members=members, time=time, step=step,
                attempt=attempt, reset=reset, tracker=tracker, key=key,
            )  # fmt: skip
            held.append(drained)
        return reduced(held)

    def close(self) -> None:
        """End all processes in order."""
        for producer in self.producers:
            producer.close()


def two_attempts(run: RunBuilder) -> None:
    """Record "x" at steps 0 to 3, then at 2 to 4 in an attempt after it: x is the step, then ten more."""
    for attempt, steps in enumerate([range(4), range(2, 5)]):
        leader = run.producer("actor", 0, attempt=attempt, started=100 * attempt)
        for step in steps:
            leader.tracker().scalar({"x": 10.0 * attempt + step})
            run.export(leader, time=100 * attempt + step)
            at_step = 100 * attempt + step + 0.5
            leader.commit(step, {}, time=at_step, leader=True, restored=1 if attempt else None)
    run.close()


class Spec(NamedTuple):
    """A recorder's spec, made up."""

    key: str
    kind: Kind = Kind.SCALAR
    reduce_type: ReduceType | None = ReduceType.SCALAR
    denominator: str | None = None
    label: str | None = None
    spread: Spread = Spread.SHARDS
    tracker: str = ""
    quantiles: tuple[float, ...] = ()


def reduced(held: Sequence[Drained]) -> dict[str, float]:
    """Return what an export over ranks that drained this returns: each rank's records, then the ranks."""
    entries = {Entry.of(spec).slot: Entry.of(spec) for drained in held for spec in drained.specs}
    layout = Layout(0, entries.values(), entries)
    place = {entry.slot: i for i, entry in enumerate(layout.wire)}
    stack = np.stack([moments.empty(len(place)) for _ in held])
    for rank, drained in enumerate(held):
        of = np.array([place[Entry.of(spec).slot] for spec in drained.specs], np.intp)
        stack[rank] = moments.pool(drained.rows, of, len(place))
    rows, _ = layout.pool(stack)
    _, names = layout.seen_by(0)
    return names.of(rows)


def _next_record() -> int:
    from eventlog.drained import reserve_ids

    return reserve_ids(1)
