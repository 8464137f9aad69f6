"""Weights & Biases, offline: live through `wandb.init`, replay as a run file written directly.

Live, every lifetime of a run makes an offline directory of its own, as wandb does. Replay writes the whole
run into one `offline-run-…` directory, times and relative times as they were, without a process of wandb's,
without the network; the directory appears when it is complete. `wandb sync DIRECTORY` uploads either.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import shutil
import struct
import time
import zlib
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

from ..config import WANDB_MODES
from ..steps import Order
from . import directory
from .base import Capabilities, DisabledBackend, Written, section

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import BinaryIO

    from ..steps import Row
    from .base import Backend, RunInfo, Selection

_FLUSH_SECONDS: Final = 0.5  # wandb's own default loses up to 15 s to a SIGKILL
_FORBIDDEN: Final = re.compile(r"[:;,#?/\s]")


class WandbBackend:
    """One run of Weights & Biases in a directory below `path`.

    What is not given comes from the run: project from the experiment, name from the trial, group
    `{experiment}_{trial}`, id `{experiment}_{trial}_{id_suffix}` ("timestamp" adds a time). Live files lie in
    RUN/live unless `path` says otherwise, replayed ones in RUN/wandb.
    """

    name = "wandb"
    # Offline files of different lifetimes are never continued: each begins empty, and no cursor outlives it.
    capabilities = Capabilities(order=Order.STRICT, lasts=False)

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        id: str | None = None,  # noqa: A002  (wandb's word)
        id_suffix: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        notes: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        if find_spec("wandb") is None:
            raise errors.BackendMissingError(
                "expected the package wandb, got none: pip install 'areal-metrics[wandb]'"
            )
        self._path = None if path is None else Path(path)
        self._given: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "name": name,
            "id": id,
            "id_suffix": id_suffix,
            "group": group,
            "job_type": job_type,
            "notes": notes,
            "tags": [tags] if isinstance(tags, str) else None if tags is None else list(tags),
        }
        self._run: Any = None
        self._last: int | None = None

    @property
    def target(self) -> str:
        """The directory around the run's directory; before opening, without a path, only its meaning."""
        return "RUN/wandb" if self._path is None else str(self._path.absolute())

    # -- live --------------------------------------------------------------------------------------

    def open(self, run: RunInfo) -> None:
        """Start an offline run beside any other run of this process; nothing is asked, nothing is sent."""
        os.environ.setdefault(
            "WANDB_ERROR_REPORTING", "false"
        )  # read at import: else even offline phones home
        import wandb

        folder = self._path = self._path or run.path / "live"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode="offline",
            dir=str(folder),
            config=_config(run),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_transaction_log_flush_interval=_FLUSH_SECONDS
            ),
            **self._about(run, time.time()),
        )
        self._last = None

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Log one row with its step and its time."""
        if self._run is None:
            raise errors.BackendError(
                f"expected an open backend, got a call at step {step} before open or after close"
            )
        row = {to_wandb(key): value for key, value in metrics.items()}
        self._run.log({**row, "_timestamp": time}, step=step, commit=True)
        self._last = step

    def last_step(self) -> int | None:
        """Return the highest step told since opening; an offline run begins empty."""
        return self._last

    def close(self) -> None:
        """Finish the run; its file is complete when this returns."""
        if self._run is None:
            return
        import wandb

        run, self._run = self._run, None
        run.finish()
        if wandb.run is None:  # `finish` may return before the last bytes land; teardown waits for them
            wandb.teardown()

    # -- replay ------------------------------------------------------------------------------------

    def rewrite(
        self, run: RunInfo, rows: Iterable[Row], selection: Selection, *, dry_run: bool = False
    ) -> Written:
        """Write the whole run into a new directory, unless the one there holds exactly this already.

        A directory that was synced is left alone; the new one then gets an id with a number, since a second
        upload under the same id would append everything again.
        """
        folder = self._path = self._path or run.path / "wandb"
        marker = directory.claim(folder, run.id, "replay")
        content = _Content(self._about(run, run.started), _config(run), run.started, rows)
        if not content.steps:
            return Written(0, 0)
        held = str(marker.get("directory") or "")
        complete = bool(held) and (folder / held).is_dir()
        if complete and not run.fresh:
            directory.check_selection(marker, selection, folder)
            if marker.get("digest") == content.digest:
                if not dry_run:
                    _remove(folder.glob(".areal-*"))  # of a replay that was killed while tidying up
                return Written(0, content.steps, content.renamed)
        if not dry_run:
            another = complete and (run.fresh or _was_synced(folder / held))
            marker["generation"] = marker.get("generation", 0) + another
            marker["digest"] = content.digest
            _put(
                folder,
                content,
                directory.with_selection(marker, selection),
                replaces="" if another else held,
            )
        return Written(content.steps, 0, content.renamed)

    def _about(self, run: RunInfo, started: float) -> dict[str, Any]:
        """Return what names the run to wandb: as given, else as the run's own config says, else its names."""
        pair = f"{run.experiment}_{run.trial}"
        about = {"project": run.experiment, "name": run.trial, "group": pair, "id_suffix": "train"}
        own = section(run.config, "wandb")
        for source in ({key: own.get(key) for key in self._given}, self._given):
            about |= {key: value for key, value in source.items() if value}
        suffix = about.pop("id_suffix")
        if suffix == "timestamp":
            suffix = f"{datetime.fromtimestamp(started, UTC):%Y_%m_%d_%H_%M_%S}"
        return {"id": _FORBIDDEN.sub("-", f"{pair}_{suffix}")} | about


@functools.wraps(WandbBackend, updated=())
def create(*, mode: str | None = None, **options: Any) -> Backend:
    """Return the backend for a mode; None means WANDB_MODE, else online, as in wandb itself."""
    mode = mode or os.environ.get("WANDB_MODE") or "online"
    if mode not in WANDB_MODES:
        raise errors.ConfigError(f"expected a wandb mode of {', '.join(WANDB_MODES)}, got {mode!r}")
    if mode == "disabled":
        return DisabledBackend("wandb")
    if mode != "offline":
        raise errors.ConfigError(
            f"expected wandb mode offline or disabled, which is what this version has, got {mode!r}; "
            "offline files can be uploaded with `wandb sync`"
        )
    return WandbBackend(**options)


def to_wandb(key: str) -> str:
    """Return the name of a metric in wandb, which keeps names that begin with an underscore to itself."""
    return f"~{key}" if key.startswith(("_", "~")) else key


def from_wandb(name: str) -> str:
    """Return the metric of a name that `to_wandb` made."""
    return name.removeprefix("~")


def _config(run: RunInfo) -> dict[str, Any]:
    version = {"version_info": dict(run.version_info)} if run.version_info else {}
    return {**run.config, **version}


def _was_synced(folder: Path) -> bool:
    return any(folder.glob("*.synced"))


def _put(folder: Path, content: _Content, marker: dict[str, Any], *, replaces: str) -> None:
    """Build a run directory aside and put it in place; the marker, written last, makes it count."""
    run_id = content.about["id"] + (f"-{marker['generation'] + 1}" if marker["generation"] else "")
    name = f"offline-run-{datetime.fromtimestamp(content.started, UTC):%Y%m%d_%H%M%S}-{run_id}"
    folder.mkdir(parents=True, exist_ok=True)
    _remove(folder.glob(".areal-*"))
    building = folder / ".areal-building"
    (building / "files").mkdir(parents=True)
    content.write(building / f"run-{run_id}.wandb", run_id)
    for number, entry in enumerate(sorted({name, replaces or name})):
        if (folder / entry).is_dir():
            (folder / entry).rename(folder / f".areal-old-{number}")
    building.rename(folder / name)
    directory.write_marker(folder, {**marker, "directory": name})
    _remove(folder.glob(".areal-old-*"))


def _remove(folders: Iterable[Path]) -> None:
    for folder in list(folders):
        shutil.rmtree(folder)


def _proto() -> Any:
    return import_module("wandb.proto.wandb_internal_pb2")


class _Content:
    """What a replayed run's file says, and a digest of it that does not depend on wandb's version."""

    def __init__(
        self,
        about: Mapping[str, Any],
        config: dict[str, Any],
        started: float,
        rows: Iterable[Row],
    ) -> None:
        self.about = about
        self.started = started or next((row.time for row in rows), 0.0)
        self._config = config
        self._rows = rows
        self.steps, self.renamed, self.digest = self._measure()

    def _measure(self) -> tuple[int, int, str]:
        digest = hashlib.blake2b(_json([dict(self.about), self._config, self.started]), digest_size=16)
        steps, names = 0, set[str]()
        for row in self._rows:
            steps += 1
            names.update(row.metrics)
            digest.update(_json([row.step, row.time, *row.metrics.items()]))
        return steps, sum(to_wandb(key) != key for key in names), digest.hexdigest()

    def write(self, path: Path, run_id: str) -> None:
        """Write the file; a reader finds the header, the run, its history, the summary and the exit."""
        from wandb import __version__

        pb = _proto()

        with path.open("xb") as stream:
            file = _RunFile(stream)
            version = pb.VersionInfo(producer=__version__, min_consumer="0.70.0")
            file.put(pb.Record(header=pb.HeaderRecord(version_info=version)))
            file.put(pb.Record(run=self._run_record(pb, run_id)))
            last: dict[str, str] = {}
            for row in self._rows:
                items = self._items(row)
                last |= items
                history = pb.HistoryRecord(step=pb.HistoryStep(num=row.step))
                for key, value in items.items():
                    history.item.add(nested_key=[key], value_json=value)
                file.put(pb.Record(history=history))
            summary = pb.SummaryRecord()
            for key, value in last.items():
                summary.update.add(nested_key=[key], value_json=value)
            file.put(pb.Record(summary=summary))
            runtime = math.ceil(float(last.get("_runtime", 0)))
            file.put(pb.Record(exit=pb.RunExitRecord(exit_code=0, runtime=runtime)))
            stream.flush()
            os.fsync(stream.fileno())

    def _run_record(self, pb: Any, run_id: str) -> Any:
        names = {"name": "display_name", "group": "run_group"}
        about = {names.get(key, key): value for key, value in self.about.items() if key != "id"}
        record = pb.RunRecord(run_id=run_id, **about)
        record.start_time.FromNanoseconds(int(self.started * 1e9))
        for key, value in self._config.items():
            record.config.update.add(key=key, value_json=_json(value).decode())
        return record

    def _items(self, row: Row) -> dict[str, str]:
        items = {to_wandb(key): _number(value) for key, value in row.metrics.items()}
        return items | {
            "_timestamp": _number(row.time),
            "_step": _number(row.step),
            "_runtime": _number(max(0.0, row.time - self.started)),
        }


def _number(value: float) -> str:
    """Return a number as JSON; for all but infinities and NaN that is its repr, at a fifth of the cost."""
    text = float.__repr__(value) if isinstance(value, float) else str(value)
    return json.dumps(value) if text[-1] in "fn" else text


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


class _RunFile:
    """The framing of a `.wandb` file: LevelDB's log blocks, their CRC plain CRC-32."""

    _BLOCK: Final = 32768
    _HEADER: Final = struct.Struct("<IHB")
    _FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._number = 0
        self._at = stream.write(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))

    def put(self, record: Any) -> None:
        """Append one record, in as many chunks as the blocks need."""
        self._number += 1
        record.num = self._number
        left, first = record.SerializeToString(), True
        while left or first:
            room = self._room()
            part, left = left[:room], left[room:]
            kind = (
                (self._FULL if not left else self._FIRST)
                if first
                else (self._LAST if not left else self._MIDDLE)
            )
            checksum = zlib.crc32(bytes([kind]) + part)
            self._at += self._stream.write(self._HEADER.pack(checksum, len(part), kind) + part)
            first = False

    def _room(self) -> int:
        """Return how much data the block still takes, moving on to the next where only padding is left."""
        free = self._BLOCK - self._at % self._BLOCK
        if free < self._HEADER.size:
            self._at += self._stream.write(b"\0" * free)
            free = self._BLOCK
        return free - self._HEADER.size
