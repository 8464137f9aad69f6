"""What the trackers' files say, read without our code: by their own readers, SQLite, .wandb's framing."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import zlib
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Rows = list[tuple[int, dict[str, float], float]]  # (step, metrics, time), as MemoryBackend keeps them

OWN = {"_step", "_timestamp", "_runtime", "_wandb"}


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return tag → [(step, wall time, value)] as TensorBoard's loader sees them, sampling off."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(e.step, e.wall_time, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }


def tensorboard_texts(folder: Path) -> dict[str, str]:
    """Return tag → text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    reader.Reload()
    tags = [tag for tag in reader.Tags()["tensors"] if tag.endswith("/text_summary")]
    return {tag: reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags}


def tensorboard_events(file: Path) -> list[Any]:
    """Return every event of one file as written."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return list(LegacyEventFileLoader(str(file)).Load())


def tensorboard_rows(folder: Path) -> Rows:
    """Return one row per step and wall time; a tag twice at a step fails."""
    found = tensorboard_scalars(folder).items()
    return joined((step, time, tag, value) for tag, points in found for step, time, value in points)


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file; a torn end ends it, a wrong checksum raises."""
    from wandb.proto import wandb_internal_pb2 as pb

    data = file.read_bytes()
    assert (b":W&B", 0xBEE1, 0) == struct.unpack("<4sHB", data[:7])
    at, parts = 7, []
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        body = data[at + 7 : at + 7 + length]
        if len(body) < length:
            return
        assert checksum == zlib.crc32(bytes([kind]) + body), f"checksum at {at}"
        at += 7 + length
        parts.append(body)
        if kind in (1, 4):
            yield pb.Record.FromString(b"".join(parts))
            parts = []


def wandb_history(file: Path) -> list[dict[str, Any]]:
    """Return the history rows as they stand, wandb's own keys included."""
    rows = []
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            assert items["_step"] == record.history.step.num
            rows.append(items)
    return rows


def wandb_files(folder: Path) -> list[Path]:
    """Return the run files below a folder in the order of their names; symbolic links are not followed."""
    if folder.is_file():
        return [folder]
    return sorted(file for file in folder.glob("**/offline-run-*/*.wandb") if not file.parent.is_symlink())


def wandb_rows(folder: Path) -> Rows:
    """Return the rows of all run files below a folder, or of one."""
    return [
        (row["_step"], {key: value for key, value in row.items() if key not in OWN}, row["_timestamp"])
        for file in wandb_files(folder)
        for row in wandb_history(file)
    ]


def swanlab_files(folder: Path) -> list[Path]:
    """Return the run files below a folder in the order of their names."""
    return [folder] if folder.is_file() else sorted(folder.glob("**/run-*/*.swanlab"))


def swanlab_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .swanlab file by the reader that SwanLab ships."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    reader.open(file)
    for record in reader:
        yield Record.FromString(record)
    reader.close()


def swanlab_rows(folder: Path) -> Rows:
    """Return one row per step of all run files below a folder, or of one; a key twice at a step fails."""
    scalars = [r.scalar for f in swanlab_files(folder) for r in swanlab_records(f) if r.HasField("scalar")]
    return joined((s.step, s.timestamp.ToMicroseconds() / 1e6, s.key, s.value.number) for s in scalars)


def joined(points: Iterable[tuple[int, float, str, float]]) -> Rows:
    """Return one row per step and time of points (step, time, key, value); a key twice at a step fails."""
    rows: dict[tuple[int, float], dict[str, float]] = {}
    for step, time, key, value in points:
        row = rows.setdefault((step, time), {})
        assert key not in row, f"{key} twice at step {step}"
        row[key] = value
    return [(step, rows[step, time], time) for step, time in sorted(rows)]


def trackio_runs(database: Path) -> list[str]:
    """Return the names of the runs of a Trackio project, the oldest first."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        found = connection.execute(
            "SELECT run_name FROM metrics GROUP BY run_name ORDER BY min(id)"
        ).fetchall()
    return [name for (name,) in found]


def trackio_rows(database: Path, run: str | None = None) -> Rows:
    """Return the rows of a Trackio project, or of one of its runs, as SQLite keeps them: one entry each."""
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    question = "SELECT step, metrics, timestamp FROM metrics WHERE coalesce(?, run_name) = run_name"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        found = connection.execute(f"{question} ORDER BY step, timestamp, id", (run,)).fetchall()
    return [
        (
            step,
            {key: words.get(value, value) for key, value in json.loads(metrics).items()},
            datetime.fromisoformat(time).timestamp(),
        )
        for step, metrics, time in found
    ]
