"""Writes the golden runs: one small run directory per feature of the format, and what it must always read to.

    python tests/golden/make.py

Only what is not there yet is written: a golden run is never written again, so that every later version is
held to what an earlier one wrote. A new feature of the format gets a new function here.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import pyarrow as pa
import torch

from aggregator import open_run
from eventlog.errors import ArealMetricsError
from eventlog.manifest import read_json, write_json
from eventlog.reader import RunReader
from eventlog.rundir import RunDir
from eventlog.schema import ENTRY_SIZE, RECORDS, IndexHeader, IndexRecord, RecordType, Stream
from eventlog.writer import Writer
from tests.eventlog.test_reader import write_other
from tests.runs import RunBuilder, at
from tests.storage import producer, put_window, records, settle

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parent


def scalars(path: Path) -> None:
    """Write scalars, counters and timings of one process, three steps, finished."""
    with RunBuilder(path) as run:
        main = run.producer("main")
        run.attempt(leader=main, outcome="finished", config={"lr": 1e-5}, version_info={"version": "1"})
        for step in range(3):
            tracker = main.tracker()
            for value in (1.0, 2.0, 4.0 + step):
                tracker.scalar({"reward": value})
            tracker.counter({"accepted": 2**53 + step})
            tracker.timing("rollout", 0.25 * step)
            stats = run.export(main, time=10 * step)
            main.commit(step, stats, time=10 * step + 5, leader=True)


def tensors(path: Path) -> None:
    """Write masks and tensors with payload: NaN, infinities, no selected value, float64, two dimensions."""
    with RunBuilder(path) as run:
        main = run.producer("actor")
        tracker = main.tracker()
        for step in range(2):
            mask = torch.tensor([[True, False, True], [False, False, True]])
            tracker.denominator({"n_tokens": mask, "none": torch.zeros(2, 3, dtype=torch.bool)})
            values = torch.tensor([[1.5, 9.0, float("nan")], [9.0, 9.0, -0.5 - step]])
            tracker.stat("n_tokens", {"advantages": values})
            tracker.stat("n_tokens", {"logp": values.double().nan_to_num(nan=float("inf"))})
            tracker.stat("none", {"empty": values})
            stats = run.export(main, time=10 * step)
            main.commit(step, stats, time=10 * step + 5, leader=True)


def ranks(path: Path) -> None:
    """Write two ranks of a world that export as a group, and a process beside them that exports alone."""
    with RunBuilder(path) as run:
        actors = [run.producer("actor", rank, world="w", world_size=2, attempt=0) for rank in range(2)]
        rollout = run.producer("rollout", attempt=0)
        run.attempt(leader=actors[0])
        for step in range(3):
            for actor in actors:
                actor.tracker("rollout" if step == 1 else "").scalar({"loss": step + actor.rank})
            rollout.tracker("rollout").scalar({"rollout/reward": 0.5 * step})
            run.export(rollout, time=10 * step)
            stats = run.export(actors, time=10 * step + 1)
            for actor in actors:
                actor.commit(
                    step, stats if actor.rank == 0 else (), time=10 * step + 5, leader=actor.rank == 0
                )


def restarted(path: Path) -> None:
    """Write an attempt that was killed at step 4 and one that resumed at step 3."""
    with RunBuilder(path) as run:
        for attempt, steps in enumerate((range(5), range(3, 6))):
            main = run.producer("main", attempt=attempt, started=1000 * attempt)
            resumed = steps[0] if attempt else None
            outcome = "finished" if attempt else None
            run.attempt(attempt, leader=main, started=1000 * attempt, resume_step=resumed, outcome=outcome)
            for step in steps:
                main.tracker().scalar({"loss": step + 100 * attempt})
                stats = run.export(main, time=1000 * attempt + 10 * step)
                main.commit(step, stats, time=1000 * attempt + 10 * step + 5, leader=True, restored=resumed)


def lists(path: Path) -> None:
    """Write a commit with several parts, one with tags, epochs, and one of an exact integer."""
    with RunBuilder(path) as run:
        main = run.producer("main")
        run.attempt(leader=main)
        main.commit(0, [{"loss": 1.0}, {"loss": 2.0, "grad": float("nan")}], time=0, leader=True)
        main.commit(
            1, {"count": 2**60 + 1}, time=1, leader=True, epoch=1, epoch_step=1, tags={"eval": "before"}
        )
        main.commit(2, time=2, leader=True)


def segments(path: Path) -> None:
    """Write segments of a few frames each."""
    run = RunDir.create(path)
    writer = Writer(run, producer(run, pid=1, host="host"), segment_bytes=5000)
    for window in range(5):
        put_window(writer, window)
    writer.close()


def killed(path: Path) -> None:
    """Write a run whose process never ended: part of a frame and of an index record at the end."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run")
        writer = Writer(run, producer(run, pid=1, host="host"))
        for window in range(4):
            put_window(writer, window)
        settle(writer)
        shutil.copytree(run.path, path)
        writer.close()
    (index,) = path.rglob("*.records.0000.idx")
    content = index.read_bytes()[:-5]
    header = IndexHeader.unpack(content[:ENTRY_SIZE])
    assert header
    index.write_bytes(replace(header, opened_us=at(0)).pack() + content[ENTRY_SIZE:])  # it is long dead


def lost(path: Path) -> None:
    """Write a run that lost records, payload and a commit, and says so."""
    run = RunDir.create(path)
    writer = Writer(run, producer(run, pid=1, host="host"))

    def fail() -> Any:
        raise ValueError("no")

    for window in range(3):
        put_window(writer, window)
    for stream in (Stream.RECORDS, Stream.PAYLOAD, Stream.COMMITS):
        writer.put(stream, fail, window=3, first_id=300, last_id=302, nbytes=10)
    writer.close()


def pruned(path: Path) -> None:
    """Write payload whose oldest segment its process removed to keep a budget."""
    run = RunDir.create(path)
    writer = Writer(run, producer(run, pid=1, host="host"), segment_bytes=3000)
    for window in range(4):
        put_window(writer, window, values=200)
    writer.close()
    oldest, *_, newest = run.segments(Stream.PAYLOAD)
    content = newest.index.read_bytes()
    header = IndexHeader.unpack(content[:ENTRY_SIZE])
    assert header
    said = IndexRecord(RecordType.PRUNE, 0, last_id=oldest.number, rows=1, length=800)
    newest.index.write_bytes(content[:-ENTRY_SIZE] + said.pack(header.segment_uid) + content[-ENTRY_SIZE:])
    oldest.data.unlink()


def damaged(path: Path) -> None:
    """Write a run with a frame of zeros and a damaged index record."""
    segments(path)
    (data,) = path.rglob("*.records.0001.arrows")
    content = data.read_bytes()
    data.write_bytes(content[:-200] + bytes(200))
    (index,) = path.rglob("*.payload.0000.idx")
    content = bytearray(index.read_bytes())
    content[2 * ENTRY_SIZE + 9] ^= 1
    index.write_bytes(content)


def newer_minor(path: Path) -> None:
    """Write what a newer minor version might: one more column, one less, an index record of a new type."""
    schema = RECORDS.append(pa.field("mood", pa.large_string())).remove(RECORDS.get_field_index("count"))
    rows = [{"record_id": i, "window": 0, "key": f"k{i}", "mood": "good", "sum": 1.5} for i in range(3)]
    write_other(path, schema, pa.RecordBatch.from_pylist(rows, schema=schema), minor=3)
    manifest = read_json(path / "run.json")
    write_json(path / "run.json", {**manifest, "format": [1, 3], "mood": "good"})


def newer_major(path: Path) -> None:
    """Write a run of a newer major version, which is refused."""
    write_other(path, RECORDS, records(0), major=2)
    write_json(path / "run.json", {"id": "x", "format": [2, 0], "created_us": at(0)})


FEATURES: tuple[Callable[[Path], None], ...] = (
    scalars, tensors, ranks, restarted, lists, segments, killed, lost, pruned, damaged,
    newer_minor, newer_major,
)  # fmt: skip


def told(path: Path) -> dict[str, Any]:
    """Return everything a run reads to, as JSON has it; what is null is left out."""
    try:
        reader = RunReader(path)
    except ArealMetricsError as error:
        return {"refused": str(error).replace(str(path), "RUN")}
    with open_run(path, attempts="all") as session:
        metrics = session.metrics().to_pylist()
        recomputed = session.metrics(source="recomputed").to_pylist()
        windows = session.sql(
            'select role, rank, "window", step, bound_by, complete from windows'
        ).to_pylist()
    streams = {
        "records": reader.records(),
        "payload": reader.payload(),
        "commits": reader.commits(),
    }
    rows = {
        name: [_plain(row) for *_, b in frames for row in b.to_pylist()] for name, frames in streams.items()
    }
    states = [
        {
            "complete": state.complete.runs(),
            "incomplete": state.incomplete.runs(),
            "payload": state.payload.runs(),
            "ended": state.ended,
            "pruned": sorted(state.pruned),
            "losses": [_plain({**asdict(loss), "stream": loss.stream.name}) for loss in state.losses],
        }
        for state in reader.sessions()
    ]
    attempts = [_plain(asdict(attempt)) for attempt in reader.run.attempts()]
    problems = sorted([_kind(problem.path), problem.frame or 0] for problem in reader.problems)
    found = {"metrics": metrics, "recomputed": recomputed, "windows": windows, "sessions": states}
    found |= {"attempts": attempts, "problems": problems, **rows}
    return json.loads(json.dumps(found, default=_text))


def _kind(path: Path) -> str:
    """Return what kind of file it is: without time and session."""
    return path.name.partition(".")[2].partition(".")[2]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _laid_out(found: dict[str, Any]) -> str:
    """Return it as JSON with a row a line."""
    parts = []
    for name, value in sorted(found.items()):
        lines = [json.dumps(row, sort_keys=True) for row in value] if isinstance(value, list) else []
        shown = "[\n  {}\n ]".format(",\n  ".join(lines)) if lines else json.dumps(value)
        parts.append(f" {json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Write the golden runs that are not there yet."""
    for feature in FEATURES:
        folder = GOLDEN / feature.__name__
        if not folder.exists():
            feature(folder / "run")
            (folder / "expected.json").write_text(_laid_out(told(folder / "run")))


if __name__ == "__main__":
    main()
