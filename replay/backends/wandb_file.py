"""The `.wandb` file: written without wandb's process and without the network, and read back.

The format is wandb's own transaction log (header version 0), which `wandb sync DIRECTORY` uploads.
"""

from __future__ import annotations

import json
import math
import os
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ..steps import Row
from .framing import WANDB, RecordReader, RecordWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from ..steps import Histogram
    from .edition import Contents

LARGEST_ROW: Final = 10_000_000  # bytes; wandb leaves larger ones out with no more than a warning
_OWN: Final = frozenset({"_step", "_timestamp", "_runtime", "_wandb"})


class WandbEdition:
    """An `offline-run-…` directory; its times and relative times are those of the training."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents

    def name(self, generation: int) -> str:
        """Return the directory's name, as wandb forms it."""
        started = datetime.fromtimestamp(self.contents.started, UTC)
        return f"offline-run-{started:%Y%m%d_%H%M%S}-{self._run_id(generation)}"

    def write(self, building: Path, final: Path, generation: int) -> None:
        """Write the run's file; a reader finds the header, the run, its history, the summary and the exit."""
        del final
        pb, run_id = _proto(), self._run_id(generation)
        (building / "files").mkdir()
        with (building / f"run-{run_id}.wandb").open("xb") as stream:
            file = RecordWriter(stream, WANDB)
            for number, record in enumerate(self._records(pb, run_id), 1):
                record.num = number
                file.put(record.SerializeToString())
            stream.flush()
            os.fsync(stream.fileno())

    def held(self, folder: Path) -> Iterator[Row]:
        """Yield the rows of such a directory, under wandb's names; a histogram as wandb keeps it."""
        for path in folder.glob("*.wandb"):
            for step, time, values in WandbFile(path).rows():
                yield Row(step, values, time or 0.0)

    def _records(self, pb: Any, run_id: str) -> Iterator[Any]:
        from wandb import __version__

        version = pb.VersionInfo(producer=__version__, min_consumer="0.70.0")
        yield pb.Record(header=pb.HeaderRecord(version_info=version))
        yield pb.Record(run=self._run(pb, run_id))
        last: dict[str, str] = {}
        yield from self._history(pb, last)
        summary = pb.SummaryRecord()
        for key, value in last.items():
            summary.update.add(nested_key=[key], value_json=value)
        yield pb.Record(summary=summary)
        runtime = math.ceil(float(last.get("_runtime", 0)))
        yield pb.Record(exit=pb.RunExitRecord(exit_code=0, runtime=runtime))

    def _run_id(self, generation: int) -> str:
        return self.contents.about["id"] + (f"-{generation + 1}" if generation else "")

    def _run(self, pb: Any, run_id: str) -> Any:
        names = {"name": "display_name", "group": "run_group"}
        about = {names.get(key, key): value for key, value in self.contents.about.items() if key != "id"}
        record = pb.RunRecord(run_id=run_id, **about)
        record.start_time.FromNanoseconds(int(self.contents.started * 1e9))
        for key, value in self.contents.config.items():
            record.config.update.add(key=key, value_json=json.dumps(value, sort_keys=True, default=str))
        return record

    def _history(self, pb: Any, last: dict[str, str]) -> Iterator[Any]:
        """Yield a record per row; `last` gets the newest value of every key."""
        for row, metrics in self.contents.rows():
            items = {key: _json(value) for key, value in metrics.items()} | {
                "_timestamp": _json(row.time),
                "_step": _json(row.step),
                "_runtime": _json(max(0.0, row.time - self.contents.started)),
            }
            items |= {self.contents.names.to(name): _drawn(h) for name, h in row.histograms.items()}
            last |= items
            history = pb.HistoryRecord(step=pb.HistoryStep(num=row.step))
            for key, value in items.items():
                history.item.add(nested_key=[key], value_json=value)
            yield pb.Record(history=history)


class WandbFile:
    """Reads a run's file: `run` (name, project, config …) and its rows; `damage` says where it broke off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = RecordReader(path, WANDB)

    @property
    def damage(self) -> str | None:
        """Why reading stopped before the end, None where it did not; known after the rows were read."""
        return self._reader.damage

    def config(self) -> dict[str, Any]:
        """Return what the run was configured with, and how it is called under `wandb`."""
        for record in self._records("run"):
            config = dict(map(_value, record.run.config.update))
            called = {"project": record.run.project, "name": record.run.display_name, "id": record.run.run_id}
            return {key: value for key, value in config.items() if key != "_wandb"} | {"wandb": called}
        return {}

    def started(self) -> float:
        """Return when the run began, in Unix seconds; 0.0 where the file does not say."""
        return next((run.run.start_time.ToMicroseconds() / 1e6 for run in self._records("run")), 0.0)

    def resumes(self) -> bool:
        """Whether the run was to go on with one of the same id."""
        return any(run.run.resume for run in self._records("run"))

    def ended(self) -> bool:
        """Whether the file holds the end of its run, and so all that came before."""
        parse = _proto().Record.FromString
        return any(record.WhichOneof("record_type") == "exit" for record in map(parse, self._reader.last()))

    def rows(self) -> Iterator[tuple[int, float | None, dict[str, Any]]]:
        """Yield (step, Unix seconds or None, values) in the order of the file; nested keys joined by dots."""
        for record in self._records("history"):
            row = dict(map(_value, record.history.item))
            step, time = row.pop("_step", record.history.step.num), row.pop("_timestamp", None)
            yield int(step), time, {key: value for key, value in row.items() if key not in _OWN}

    def _records(self, kind: str) -> Iterator[Any]:
        parse = _proto().Record.FromString
        for record in map(parse, self._reader):
            if record.WhichOneof("record_type") == kind:
                yield record


def row_bytes(row: Mapping[str, float]) -> int:
    """Return about how many bytes a row has as JSON; exactly where it is so large that it matters."""
    most = sum(len(key) * 4 + 32 for key in row)
    return most if most < LARGEST_ROW else len(json.dumps(dict(row), ensure_ascii=False).encode())


def _value(item: Any) -> tuple[str, Any]:
    return item.key or ".".join(item.nested_key), json.loads(item.value_json)


def _drawn(histogram: Histogram) -> str:
    """Return a histogram as wandb keeps it."""
    return json.dumps({"_type": "histogram", "values": histogram.counts, "bins": histogram.edges})


def _json(value: Any) -> str:
    """Return a value as JSON; for a finite number that is its repr, at a fifth of the cost."""
    text = float.__repr__(value) if isinstance(value, float) else str(value)
    return text if text[-1].isdigit() else json.dumps(value)


def _proto() -> Any:
    return import_module("wandb.proto.wandb_internal_pb2")
