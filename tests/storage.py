"""Small runs with known rows for tests of the storage, and everything a reader says of a run."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import tests.patience  # noqa: F401 - for processes that pytest does not begin
from eventlog.clock import now_us
from eventlog.reader import RunReader, SessionState
from eventlog.rundir import Problem, Producer, RunDir
from eventlog.schema import COMMITS, PAYLOAD, RECORDS, Stream
from eventlog.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IDS_A_WINDOW = 100


def producer(run: RunDir, role: str = "actor", rank: int = 0, **changes: Any) -> Producer:
    """Return a producer of this process with a new session."""
    session, host = uuid.uuid4().hex, socket.gethostname()
    return replace(Producer(run.id, session, role, rank, "w", 2, host, os.getpid(), now_us()), **changes)


def records(window: int, rows: int = 3) -> pa.RecordBatch:
    """Return a window's records, every value known from its number."""
    first = window * IDS_A_WINDOW
    said = [
        {"record_id": first + i, "window": window, "key": f"k{i}", "sum": window + i / 8} for i in range(rows)
    ]
    return pa.RecordBatch.from_pylist(said, schema=RECORDS)


def payload(window: int, values: int = 16) -> pa.RecordBatch:
    """Return a window's payload: one record of that many float32."""
    said = {"record_id": window * IDS_A_WINDOW, "element": 0, "last": True, "values32": [window] * values}
    return pa.RecordBatch.from_pylist([said], schema=PAYLOAD)


def commits(number: int) -> pa.RecordBatch:
    """Return a commit that binds the window of its number to the step of its number."""
    said = {"commit": number, "global_step": number, "window_first": number, "window_last": number}
    return pa.RecordBatch.from_pylist([said], schema=COMMITS)


def put_records(writer: Writer, window: int, rows: int = 3) -> int:
    """Hand over one window's records."""
    first = window * IDS_A_WINDOW
    ids = {"first_id": first, "last_id": first + rows - 1}
    return writer.put(
        Stream.RECORDS, lambda: [records(window, rows)], window=window, nbytes=rows * 300, **ids
    )


def put_payload(writer: Writer, window: int, values: int = 16) -> int:
    """Hand over one window's payload."""
    first = window * IDS_A_WINDOW
    ids = {"first_id": first, "last_id": first}
    return writer.put(
        Stream.PAYLOAD, lambda: [payload(window, values)], window=window, nbytes=values * 4, **ids
    )


def put_window(writer: Writer, window: int, values: int = 16) -> int:
    """Hand over a window's records, payload and commit; return the commit's ticket."""
    put_records(writer, window)
    put_payload(writer, window, values)
    return writer.put(Stream.COMMITS, lambda: [commits(window)], window=window, nbytes=300)


def settle(writer: Writer) -> None:
    """Wait until everything handed over is written, payload too."""
    assert writer.flush(60.0)


def write_run(path: Path, windows: int = 3, role: str = "actor", rank: int = 0, **options: Any) -> RunDir:
    """Write that many windows and close."""
    run = RunDir.create(path)
    writer = Writer(run, producer(run, role, rank), **options)
    for window in range(windows):
        put_window(writer, window)
    assert writer.close()
    return run


@dataclass
class Told:
    """What a reader said: rows by (stream, role, rank, session, window, frame, first id), and all else."""

    frames: dict[tuple[Any, ...], list[dict[str, Any]]]
    problems: list[Problem]
    states: list[SessionState]
    reader: RunReader

    def windows(self, stream: Stream = Stream.RECORDS) -> list[int]:
        """Return the windows of the frames of a stream, in order."""
        return [key[4] for key in self.frames if key[0] is stream]

    def reasons(self) -> str:
        """Return the problems, one a line."""
        return "\n".join(map(str, self.problems))


def tell(path: Path, reader: RunReader | None = None) -> Told:
    """Read everything of a run and its sessions' states."""
    reader = reader or RunReader(path)
    frames = {key: batch.to_pylist() for key, batch in _all(reader)}
    states = reader.sessions()
    reader.producers()
    reader.run.attempts()
    return Told(frames, reader.problems, states, reader)


def _all(reader: RunReader) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    streams = {
        Stream.RECORDS: reader.records,
        Stream.PAYLOAD: reader.payload,
        Stream.COMMITS: reader.commits,
    }
    for stream, read in streams.items():
        for who, record, batch in read():
            key = (stream, who.role, who.rank, who.session, record.window, record.frame, record.first_id)
            yield key, batch


def only(path: Path, pattern: str) -> Path:
    """Return the one file of a run that matches."""
    (found,) = path.rglob(pattern)
    return found


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Turn one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
