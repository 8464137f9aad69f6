"""TensorBoard event files, written directly: no torch, no TensorFlow, one event per step.

Live, each lifetime of a run appends to a file of its own; when it resumes, the file begins its points with a
session start at the first step told, from which on readers discard what older files hold. Replay writes
segments of a fixed number of steps under fixed names, each whole or not at all, so that the directory always
ends as if replayed once. Live logging and replay need directories of their own.

Values are float32: that is what TensorBoard's scalars are. The log keeps float64. With `double` they are
tensors of float64, which TensorBoard shows only when started with `--load_fast=false`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors, ranges, replacing

from ..steps import Histogram, Order, Row
from . import directory
from .base import Capabilities, Written, check_installed, not_open
from .keeping import is_unknown, with_kept
from .tensorboard_file import framed, place_of, proto, records, scalars, step_event

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from .base import RunInfo, Selection

_log = logging.getLogger("areal_metrics.replay")

STEPS_PER_SEGMENT: Final = 1000
_EVENT_FILE: Final = re.compile(r"events\.out\.tfevents\.(\d+)(\..*)?")
_SEGMENT: Final = re.compile(r"events\.out\.tfevents\.\d{10}\.areal")
_FILE_VERSION: Final = "brain.Event:2"


class TensorBoardBackend:
    """Writes to the directory `path`; without one to RUN/tensorboard, live to RUN/live/tensorboard.

    `double`: see above.
    """

    name = "tensorboard"
    capabilities = Capabilities(order=Order.FORWARD, rewinds=True, histograms=True)

    def __init__(self, path: str | os.PathLike[str] | None = None, *, double: bool = False) -> None:
        check_installed("tensorboard")
        self._given = self._path = None if path is None else Path(path).absolute()
        self._double = double
        self._file: _EventFile | None = None
        self._started = 0.0
        self._resumes = False
        self._drawn: dict[str, Histogram] = {}

    @property
    def target(self) -> str:
        """The directory's absolute path; before opening, without one of its own, only its meaning."""
        return "RUN/tensorboard" if self._path is None else str(self._path)

    # -- live --------------------------------------------------------------------------------------

    def open(self, run: RunInfo) -> None:
        """Start an event file of this lifetime.

        Where the directory holds event files of another run or writer, a sub-directory named after the run is
        taken, which TensorBoard shows as a run of its own: a session start would hide the other's points.
        """
        folder = self._folder(run, live=True)
        if _is_others(folder, run):
            folder = self._path = folder / f"{run.experiment}_{run.trial}_{run.id[:8]}".replace("/", "_")
            _log.warning(
                "event files of another run or writer lie in %s: writing to %s", folder.parent, folder
            )
        marker = directory.claim(folder, run.id, "live")
        directory.write_marker(folder, marker)
        self._resumes = any(_event_files(folder))
        self._started, self._drawn = run.started, {}
        self._file = _EventFile.create(folder, run.started)
        self._file.append(*_about(run))

    def histogram(self, step: int, name: str, histogram: Histogram, time: float) -> None:
        """Keep a histogram for the step's event."""
        del step, time
        self._drawn[name] = histogram

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Append one event with all metrics of the step; it is in the file when this returns."""
        if self._file is None:
            raise not_open(step)
        drawn, self._drawn = self._drawn, {}  # whatever becomes of this row, the next has its own
        start = [_session_start(step, time)] if self._resumes else []
        try:
            event = step_event(step, time, metrics, _histograms(drawn), double=self._double)
            self._file.append(*start, event)
        except (OSError, errors.BackendError):
            self._file = _EventFile.create(self._file.folder, self._started)  # for the next try
            raise
        self._resumes = False

    def last_step(self) -> int | None:
        """Return the highest step in the directory's event files."""
        if self._path is None:
            return None
        return max((step for file in _event_files(self._path) for step in _steps(file)), default=None)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- replay ------------------------------------------------------------------------------------

    def rewrite(
        self, run: RunInfo, rows: Iterable[Row], selection: Selection, *, dry_run: bool = False
    ) -> Written:
        """Make the directory hold exactly `rows`; segments that lie there in this form stay untouched.

        Events of the replay that are none of the log's any more stay.
        A fresh run takes the first of PATH, PATH-2, PATH-3, … that holds nothing.
        """
        folder = self._folder(run)
        with directory.alone(folder, dry_run=dry_run):
            return self._rewrite(folder, run, rows, selection, dry_run=dry_run)

    def _rewrite(
        self, folder: Path, run: RunInfo, rows: Iterable[Row], selection: Selection, *, dry_run: bool
    ) -> Written:
        marker = directory.claim(folder, run.id, "replay")
        directory.check_selection(marker, selection, folder)
        if foreign := [file.name for file in _event_files(folder) if not _SEGMENT.fullmatch(file.name)]:
            raise errors.BackendError(
                f"expected a directory without other event files, got {foreign[0]!r}: {folder}"
            )
        wanted = directory.with_selection(marker, selection)
        if not dry_run and wanted != directory.read_marker(folder):
            directory.write_marker(folder, wanted)
        sent = skipped = 0
        names: set[str] = set()
        kept = _kept(folder, rows)
        old_ones = {event for _, event in kept.values()}
        with ExitStack() as later:
            for number, (header, events) in enumerate(_segments(run, rows, kept, double=self._double)):
                path = folder / f"events.out.tfevents.{number:010d}.areal"
                names.add(path.name)
                old = path.read_bytes() if path.exists() else b""
                known = set(records(old))
                told = [event in known for event in events if event not in old_ones]
                sent, skipped = sent + told.count(False), skipped + told.count(True)
                data = b"".join(map(framed, [*header, *events]))
                if data != old and not dry_run:
                    _replace(path, data, later if kept else None)
        if not dry_run:
            _remove_leftovers(folder, names)
        return Written(sent, skipped, kept=len(kept), kept_steps=ranges(kept))

    def _folder(self, run: RunInfo, *, live: bool = False) -> Path:
        first = self._given or run.path / ("live/tensorboard" if live else "tensorboard")
        self._path = directory.of_run(first, run)
        return self._path


# -- files -----------------------------------------------------------------------------------------


def _event_files(folder: Path) -> list[Path]:
    """Return the event files as TensorBoard finds and orders them."""
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if "tfevents" in entry.name)


def _is_others(folder: Path, run: RunInfo) -> bool:
    marker = directory.read_marker(folder)
    if marker is None:
        return bool(_event_files(folder))
    return marker.get("run") != run.id or marker.get("writer") != "live"


def _kept(folder: Path, rows: Iterable[Row]) -> dict[int, tuple[float, bytes]]:
    """Return the steps that a replay told and the log does not have any more, with time and event."""
    kept: dict[int, tuple[float, bytes]] = {}
    # The first describes the run; of others a replay that was killed had not yet put all in place.
    for file in [*_event_files(folder)[1:], *folder.glob(".areal-*.tmp")]:
        for event in records(file.read_bytes()):
            place = place_of(event)
            if place is None or not is_unknown(rows, *place):
                continue
            if file.suffix == ".areal" or _has_scalars(proto("event").Event.FromString(event)):
                kept[place[0]] = place[1], event
    return kept


def _steps(file: Path) -> Iterator[int]:
    for event in map(proto("event").Event.FromString, records(file.read_bytes())):
        if _has_scalars(event):
            yield event.step


def _has_scalars(event: Any) -> bool:
    return any(number is not None for _, number in scalars(event))


class _EventFile:
    """One growing event file; every append is one write."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.folder = path.parent
        self._descriptor = descriptor
        self._path = path

    @classmethod
    def create(cls, folder: Path, started: float) -> _EventFile:
        """Create the next file in name order: readers take files in that order, whatever the clocks say."""
        numbers = [
            int(match[1]) for file in _event_files(folder) if (match := _EVENT_FILE.fullmatch(file.name))
        ]
        number = max(numbers, default=-1) + 1
        while True:
            path = folder / f"events.out.tfevents.{number:010d}.areal-live"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            except FileExistsError:
                number += 1
                continue
            file = cls(descriptor, path)
            file.append(_file_version(started))
            return file

    def append(self, *events: bytes) -> None:
        """Append records; a torn one would hide all that follow, so a short write ends the file."""
        if self._descriptor < 0:
            raise errors.BackendError(f"expected a whole event file, got one with a torn end: {self._path}")
        data = b"".join(map(framed, events))
        written = 0
        try:
            written = os.write(self._descriptor, data)
        finally:
            if 0 < written < len(data):
                self.close()
        if written < len(data):
            raise errors.BackendError(f"expected to write {len(data)} bytes, wrote {written}: {self._path}")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _replace(path: Path, data: bytes, later: ExitStack | None) -> None:
    """Put a file in place as a whole, at once or when `later` ends."""
    # Readers take any file with "tfevents" in its name, an unfinished one too.
    with ExitStack() as now:
        unfinished = (later or now).enter_context(replacing(path))
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _remove_leftovers(folder: Path, names: set[str]) -> None:
    """Remove segments beyond the last, and temporary files of a replay that was killed."""
    for entry in list(folder.iterdir()):
        leftover = entry.name.startswith(".areal-") and entry.name.endswith(".tmp")
        if leftover or (_SEGMENT.fullmatch(entry.name) and entry.name not in names):
            entry.unlink()


# -- events ----------------------------------------------------------------------------------------


def _segments(
    run: RunInfo, rows: Iterable[Row], kept: Mapping[int, tuple[float, bytes]], *, double: bool
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield per segment the records it begins with and one record per step; number 0 describes the run."""
    yield [_file_version(run.started), *_about(run)], []
    events: list[bytes] = []
    begun = 0.0
    for row in with_kept(rows, kept):
        if isinstance(row, Row):
            drawn = _histograms(row.histograms)
            time, event = row.time, step_event(row.step, row.time, row.metrics, drawn, double=double)
        else:
            time, event = row
        begun = begun if events else time
        events.append(event)
        if len(events) == STEPS_PER_SEGMENT:
            yield [_file_version(begun)], events
            events = []
    if events:
        yield [_file_version(begun)], events


def _file_version(time: float) -> bytes:
    return proto("event").Event(wall_time=time, file_version=_FILE_VERSION).SerializeToString()


def _session_start(step: int, time: float) -> bytes:
    pb = proto("event")
    start = pb.SessionLog(status=pb.SessionLog.SessionStatus.START)
    return pb.Event(wall_time=time, step=step, session_log=start).SerializeToString()


def _histograms(drawn: Mapping[str, Histogram]) -> bytes:
    """Return values for the end of an event."""
    if not drawn:
        return b""
    values = [_histogram(name, histogram) for name, histogram in drawn.items()]
    return proto("summary").Summary(value=values).SerializeToString()


def _histogram(name: str, histogram: Histogram) -> Any:
    """Return a histogram; its sums are those of the middles of the bins."""
    edges, counts = histogram
    middles = [left + (right - left) / 2 for left, right in pairwise(edges)]
    drawn = proto("histogram").HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        sum_squares=sum(count * (middle * middle) for count, middle in zip(counts, middles, strict=True)),
        bucket_limit=edges,
        bucket=[0, *counts],  # the first ends where the values begin
    )
    return proto("summary").Summary.Value(tag=name, histo=drawn)


def _about(run: RunInfo) -> list[bytes]:
    """Return events that show the config and the version info as text and as hyperparameters."""
    texts = {"config": run.config, "version_info": run.version_info}
    values = [_text(tag, content) for tag, content in texts.items() if content]
    pb = proto("event")
    events = [
        pb.Event(
            wall_time=run.started, step=run.attempt or 0, summary=proto("summary").Summary(value=[value])
        )
        for value in [*values, *_hyperparameters(run)]
    ]
    return [one.SerializeToString(deterministic=True) for one in events]


def _text(tag: str, content: Mapping[str, Any]) -> Any:
    summary, tensor, shape = proto("summary"), proto("tensor"), proto("tensor_shape").TensorShapeProto
    shown = json.dumps(content, indent=2, sort_keys=True, default=str)
    markdown = "\n".join(f"    {line}" for line in shown.splitlines())  # indented: shown as it is
    plugin = summary.SummaryMetadata.PluginData(plugin_name="text")
    return summary.Summary.Value(
        tag=f"{tag}/text_summary",
        metadata=summary.SummaryMetadata(plugin_data=plugin),
        tensor=tensor.TensorProto(
            dtype=proto("types").DataType.DT_STRING,
            string_val=[markdown.encode()],
            tensor_shape=shape(dim=[shape.Dim(size=1)]),
        ),
    )


def _hyperparameters(run: RunInfo) -> list[Any]:
    from tensorboard.plugins.hparams import summary_v2

    flat = dict(_flat("", run.config))
    if not flat:
        return []
    summary = summary_v2.hparams_pb(flat, trial_id=run.id, start_time_secs=run.started)
    return list(summary.value)


def _flat(prefix: str, content: Mapping[str, Any]) -> Iterator[tuple[str, float | str | bool]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if hasattr(value, "items"):
            yield from _flat(f"{name}.", value)
        elif isinstance(value, (bool, int, float, str)):
            yield name, value
        elif value is not None:
            yield name, json.dumps(value, default=str)
