"""The `.swanlab` file: written and read without SwanLab's process, whose own loses all of it to a SIGKILL.

`swanlab sync --id ID DIRECTORY` uploads it; without an id every upload becomes a new experiment.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..steps import Row
from .framing import SWANLAB, RecordReader, RecordWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from .edition import Contents

_CONFIG = -3  # the numbers that SwanLab gives to records of which a run has one
_START, _FINISH = -1, -2


class SwanlabFile:
    """Appends to a new run's file; with `flush` every row is in the file when `log` returns."""

    def __init__(self, stream: BinaryIO, *, flush: bool = False) -> None:
        self._stream = stream
        self._writer = RecordWriter(stream, SWANLAB)
        self._number = 0
        self._columns: set[str] = set()
        self._flush = flush

    def start(self, about: Mapping[str, Any], started: float, config: Path) -> None:
        """Say what the run is, and where its config lies."""
        record = module("run.v1.run").StartRecord(**about, started_at=timestamp(started))
        self._put(_START, started, start=record)
        save = module("save.v1.save")
        about_config = save.SaveRecord(name="config", source_path=str(config), type=save.SAVE_TYPE_CONFIG)
        self._put(_CONFIG, started, save=about_config)

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Append all scalars of a step; a key's column comes before its first."""
        for scalar in scalars(step, metrics, time):
            if scalar.key not in self._columns:
                self._columns.add(scalar.key)
                self._put(None, time, column=_column(scalar.key))
            self._put(None, time, scalar=scalar)
        if self._flush:
            self._stream.flush()

    def finish(self, time: float) -> None:
        """Say that the run ended well."""
        run = module("run.v1.run")
        self._put(
            _FINISH, time, finish=run.FinishRecord(state=run.RUN_STATE_FINISHED, finished_at=timestamp(time))
        )

    def _put(self, number: int | None, time: float, **content: Any) -> None:
        if number is None:
            self._number = number = self._number + 1
        record = module("record.v1.record").Record(num=number, timestamp=timestamp(time), **content)
        self._writer.put(record.SerializeToString())


class SwanlabEdition:
    """A `run-…` directory with the run's file and its config; its times are those of the training."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents

    def name(self, generation: int) -> str:
        """Return the directory's name, as SwanLab forms it."""
        return run_directory(self.contents.started, self._run_id(generation))

    def write(self, building: Path, final: Path, generation: int) -> None:
        """Write the files; the run refers to its config by the path that it will have."""
        contents, run_id = self.contents, self._run_id(generation)
        write_config(building, contents.config)
        time = contents.started
        with (building / f"run-{run_id}.swanlab").open("xb") as stream:
            file = SwanlabFile(stream)
            file.start({**contents.about, "id": run_id}, time, config_path(final))
            for row, metrics in contents.rows():
                time = row.time
                file.log(row.step, metrics, time)
            file.finish(time)
            stream.flush()
            os.fsync(stream.fileno())

    def held(self, folder: Path) -> Iterator[Row]:
        """Yield the rows of such a directory, under SwanLab's names."""
        rows: dict[int, tuple[float, dict[str, float]]] = {}
        for path in folder.glob("*.swanlab"):
            for record in map(module("record.v1.record").Record.FromString, RecordReader(path, SWANLAB)):
                if record.HasField("scalar"):
                    told = record.scalar
                    seconds = told.timestamp.ToMicroseconds() / 1e6
                    _, metrics = rows.setdefault(told.step, (seconds, {}))
                    metrics[told.key] = told.value.number
        yield from (Row(step, metrics, time) for step, (time, metrics) in rows.items())

    def _run_id(self, generation: int) -> str:
        return self.contents.about["id"] + (f"-{generation + 1}" if generation else "")


def run_directory(started: float, run_id: str) -> str:
    """Return what SwanLab calls the directory of a run."""
    return f"run-{datetime.fromtimestamp(started, UTC):%Y%m%d_%H%M%S}-{run_id}"


def config_path(folder: Path) -> Path:
    """Return where a run's directory keeps the config."""
    return folder.absolute() / "files" / "config.yaml"


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Create the run's directory, with the config as SwanLab writes it."""
    path = config_path(folder)
    path.parent.mkdir(parents=True)
    path.write_bytes(config_text(config))


def config_text(config: Mapping[str, Any]) -> bytes:
    """Return a config in SwanLab's form."""
    content = {
        key: {"value": value, "desc": "", "sort": at} for at, (key, value) in enumerate(config.items())
    }
    return import_module("yaml").safe_dump(content, allow_unicode=True, default_flow_style=False).encode()


def scalars(step: int, metrics: Mapping[str, float], time: float) -> list[Any]:
    """Return SwanLab's records of one row."""
    data, kind = module("metric.data.v1.data"), module("metric.column.v1.column").COLUMN_TYPE_SCALAR
    when = timestamp(time)
    return [
        data.ScalarRecord(
            key=key, step=step, type=kind, timestamp=when, value=data.ScalarValue(number=float(value))
        )
        for key, value in metrics.items()
    ]


def timestamp(seconds: float) -> Any:
    """Return a time, exact to the microsecond."""
    made = import_module("google.protobuf.timestamp_pb2").Timestamp()
    made.FromMicroseconds(round(seconds * 1e6))
    return made


def module(name: str) -> Any:
    """Return one of SwanLab's protocol modules."""
    return import_module(f"swanlab.proto.swanlab.{name}_pb2")


def _column(key: str) -> Any:
    column = module("metric.column.v1.column")
    return column.ColumnRecord(
        column_class=column.COLUMN_CLASS_CUSTOM,
        column_type=column.COLUMN_TYPE_SCALAR,
        column_key=key,
        section_name=key.partition("/")[0] if "/" in key else "",
        section_type=column.SECTION_TYPE_PUBLIC,
    )
