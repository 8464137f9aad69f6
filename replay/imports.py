"""Histories that other trackers keep, made into run directories: then they can be queried and told elsewhere.

    TensorBoard   a directory of event files, or one: every scalar of every file, sampled nowhere
    wandb         a run's directory or its .wandb file, or a folder with all lifetimes of one run

What resumed the run (a session start, a further directory) becomes an attempt of its own, which supersedes
the steps it did again; nothing of them is dropped.
"""

from __future__ import annotations

import shutil
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aggregator import progress_bar
from eventlog import Log, Options, as_key, as_metric, as_step, errors, is_time

from .backends.base import check_installed
from .backends.directory import MARKER
from .backends.tensorboard_file import EventFile, scalars
from .backends.wandb_file import WandbFile
from .backends.wandb_names import names

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    Row = tuple[int, float, dict[str, float]]  # step, Unix seconds, values

KINDS: Final = ("tensorboard", "wandb")


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import brought: attempts, steps, points (a key at a step), and what it could not.

    left_out: values that are no numbers (texts, media), per key     refused: points no run can hold (a
    negative step, an empty name)     elsewhere: directories within the source that hold event files of their
    own, as `SummaryWriter.add_scalars` makes them: runs of their own, and not read     problems: damage in
    the source, which may have cost any of the rest
    """

    run: str
    source: str
    attempts: int
    steps: int
    points: int
    left_out: dict[str, int]
    refused: int
    elsewhere: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every number of the source is in the run."""
        return not (self.refused or self.elsewhere or self.problems)


@dataclass
class _Lifetime:
    """One lifetime of the imported run: its rows in the order in which they are to be committed."""

    rows: Callable[[], Iterable[Row]]
    length: int
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    resume_step: int | None = None  # None: its first row's
    started: float = 0.0  # Unix seconds; 0.0: with its first row


@dataclass
class _History:
    lifetimes: list[_Lifetime]
    left_out: Counter[str] = field(default_factory=Counter[str])
    refused: int = 0
    elsewhere: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    points: int = 0
    steps: set[int] = field(default_factory=set[int])


def import_history(
    source: str | os.PathLike[str],
    run_dir: str | os.PathLike[str],
    *,
    kind: str | None = None,
    progress: bool = False,
) -> Imported:
    """Make a run directory of a history that another tracker kept; it appears when it is complete.

    `kind` is tensorboard or wandb, seen from the files if not given; `progress` shows a bar on a terminal.
    NotARunError where there is nothing to import, or more than one run; RunDirectoryError where `run_dir`
    holds something already or cannot be written.
    """
    place, target = Path(source), Path(run_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise errors.RunDirectoryError(f"expected a new directory for the run, got one in use: {target}")
    kind = kind or _kind(place)
    if kind not in KINDS:
        raise errors.ConfigError(f"expected a history of {' or '.join(KINDS)}, got {kind!r}")
    check_installed(kind)
    history = (_tensorboard if kind == "tensorboard" else _wandb)(place)
    building = target.with_name(f".{target.name}.areal-import")
    try:
        shutil.rmtree(building, ignore_errors=True)  # of an import that was killed
        with progress_bar(kind, sum(life.length for life in history.lifetimes), shown=progress) as advance:
            attempts = _write(history, building, advance)
        if not attempts:
            others = f"only {', '.join(list(history.left_out)[:5])}" if history.left_out else "nothing"
            raise errors.NotARunError(f"expected a history with numbers, got {others}: {place}")
        if target.exists():
            target.rmdir()
        building.rename(target)
    except OSError as error:
        raise errors.RunDirectoryError(
            f"expected to write the run, got {error.strerror}: {target}"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)  # there only if something failed
    return Imported(
        run=str(target),
        source=kind,
        attempts=attempts,
        steps=len(history.steps),
        points=history.points,
        left_out=dict(sorted(history.left_out.items())),
        refused=history.refused,
        elsewhere=tuple(history.elsewhere),
        problems=tuple(history.problems),
    )


def _kind(place: Path) -> str:
    if _wandb_files(place):
        return "wandb"
    if _event_files(place):
        return "tensorboard"
    below = _below(place)
    hint = f"; its runs lie in {', '.join(below[:5])}" if below else ""
    raise errors.NotARunError(f"expected event files or a wandb run, got neither{hint}: {place}")


# -- writing ---------------------------------------------------------------------------------------


def _write(history: _History, folder: Path, advance: Callable[[int], object]) -> int:
    """Write every lifetime as an attempt; return how many had something to tell."""
    attempts = done = 0
    for life in history.lifetimes:
        rows = iter(_fitting(history, life.rows()))
        first = next(rows, None)
        if first is None:
            continue
        started = life.started if life.started and is_time(life.started) else first[1]
        resume = life.resume_step if life.resume_step is not None else first[0]
        log = Log(
            Options(str(folder), role="import", rank=0, resume_step=resume if attempts else None),
            warn_of_rivals=False,
        )
        try:
            log.claim_attempt(config=life.config, started_us=round(started * 1e6))
            for step, time, metrics in chain([first], rows):
                if not log.commit(0, 0, step, [metrics], time_us=round(time * 1e6)):
                    raise errors.RunDirectoryError(f"expected step {step} on disk, got a loss: {folder}")
                done += 1
                advance(done)
            log.end("finished")
        finally:
            log.close()
        attempts += 1
    return attempts


def _fitting(history: _History, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield what a run can hold, and count all of it."""
    before, untimed = 0.0, list[str]()
    for step, time, given in rows:
        metrics: dict[str, float] = {}
        if not is_time(time):
            untimed.append(f"expected Unix seconds as the time of step {step}, got {time:g}")
            time = before  # noqa: PLW2901
        before = time
        for key, value in given.items():
            try:
                as_step(step)
                as_key(key)  # slashes around a name are a part of it, as in a commit
                metrics[key] = as_metric(value, key)
            except errors.ArealMetricsError:
                history.refused += 1
        if metrics:
            history.points += len(metrics)
            history.steps.add(step)
            yield step, time, metrics
    if untimed:
        more = f", and of {len(untimed) - 1} more rows" if len(untimed) > 1 else ""
        history.problems.append(f"{untimed[0]}{more}: they have the time of the row before")


# -- TensorBoard -----------------------------------------------------------------------------------


def _event_files(place: Path) -> list[Path]:
    """Return the event files of one run, in the order in which TensorBoard reads them."""
    if place.is_file():
        return [place] if "tfevents" in place.name else []
    return sorted(file for file in place.glob("*tfevents*") if file.is_file())


def _below(place: Path) -> list[str]:
    """Return the directories within one that hold event files."""
    if not place.is_dir():
        return []
    return sorted({str(file.parent) for file in place.rglob("*tfevents*")} - {str(place)})


class _Points:
    """Scalars of one lifetime, in the order in which they were read."""

    def __init__(self, started: float = 0.0, resume_step: int | None = None) -> None:
        self.started = started
        self.resume_step = resume_step
        self._tags: dict[str, int] = {}
        self._steps, self._times, self._values, self._keys = array("q"), array("d"), array("d"), array("q")

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, time: float, tag: str, value: float) -> None:
        """Append a point."""
        self._steps.append(step)
        self._times.append(time)
        self._values.append(value)
        self._keys.append(self._tags.setdefault(tag, len(self._tags)))

    def rows(self) -> Iterator[Row]:
        """Yield rows by ascending steps: a step's tags together, the n-th point of a tag in the n-th row."""
        names = list(self._tags)
        order = np.argsort(np.frombuffer(self._steps, np.int64), kind="stable").tolist()
        for step, same in groupby(order, key=self._steps.__getitem__):
            rows: list[tuple[float, dict[str, float]]] = []
            seen: Counter[int] = Counter()
            for at in same:
                tag = self._keys[at]
                if seen[tag] == len(rows):
                    rows.append((self._times[at], {}))
                rows[seen[tag]][1][names[tag]] = self._values[at]
                seen[tag] += 1
            for time, metrics in rows:
                yield step, time, metrics


def _tensorboard(place: Path) -> _History:
    """Read all event files; a session start above step 0 begins a new lifetime, as for TensorBoard."""
    history, lifetimes = _History([], elsewhere=_below(place)), [_Points()]
    if not (files := _event_files(place)):
        raise errors.NotARunError(f"expected event files, got none: {place}")
    for path in files:
        file = EventFile(path)
        for event in file:
            if event.session_log.status == event.session_log.START and event.step > 0:
                lifetimes.append(_Points(event.wall_time, event.step))
            elif event.file_version and not lifetimes[0].started:
                lifetimes[0].started = event.wall_time
            for tag, value in scalars(event):
                if value is None:
                    history.left_out[tag] += 1
                else:
                    lifetimes[-1].add(event.step, event.wall_time, tag, value)
        history.problems += file.damage
    history.lifetimes = [
        _Lifetime(points.rows, len(points), {}, points.resume_step, points.started) for points in lifetimes
    ]
    return history


# -- wandb -----------------------------------------------------------------------------------------


def _wandb_files(place: Path) -> list[Path]:
    """Return the files of a run's lifetimes, the oldest first: wandb's directories begin with their time."""
    if place.is_file():
        return [place] if place.suffix == ".wandb" else []
    own = sorted(place.glob("*.wandb"))
    return own or sorted(file for file in place.glob("*run-*/*.wandb") if not file.parent.is_symlink())


def _wandb(place: Path) -> _History:
    """Read all lifetimes of one run."""
    history = _History([])
    files = [WandbFile(path) for path in _wandb_files(place)]
    configs = [file.config() for file in files]
    ids = dict.fromkeys(config["wandb"]["id"] for config in configs if config)
    if len(ids) != 1:
        found = ", ".join(ids) or "none"
        raise errors.NotARunError(f"expected the files of one wandb run, got {found}: {place}")
    last = -1
    for file, config in zip(files, configs, strict=True):
        steps = array("q", (step for step, *_ in file.rows()))
        if file.damage is not None:
            history.problems.append(file.damage)
        # Offline a resumed run numbers its rows from 0 again; `wandb sync` puts them behind those before.
        anew = last >= 0 and len(steps) > 0 and steps[0] == 0 and file.resumes()
        rows = _wandb_rows(history, file, last if anew else None)
        history.lifetimes.append(_Lifetime(rows, len(steps), _named(config), started=file.started()))
        for step in steps:
            last = max(step, last + 1) if anew else max(step, last)
    return history


def _wandb_rows(history: _History, file: WandbFile, behind: int | None) -> Callable[[], Iterator[Row]]:
    ours = (file.path.parent.parent / MARKER).exists()  # a replay's: what it spelled out is read back
    name = names().back if ours else str

    def rows() -> Iterator[Row]:
        last, before = 0.0, behind
        for step, time, values in file.rows():
            if before is not None:
                step = before = max(step, before + 1)  # noqa: PLW2901
            last = last if time is None else time
            media = _media(values)
            numbers: dict[str, float] = {}
            others = set(media)
            for key, value in values.items():
                if any(key.startswith(f"{of}.") for of in media):
                    continue
                if isinstance(value, (bool, int, float)):
                    numbers[name(key)] = value
                else:
                    others.add(key)
            history.left_out.update(others)
            yield step, last, numbers

    return rows


def _media(values: dict[str, Any]) -> list[str]:
    """Return the keys that have an image, a table …: wandb keeps what it is, and its sizes, below the key."""
    kinds = (key for key, value in values.items() if key.endswith("._type") and isinstance(value, str))
    return [key.removesuffix("._type") for key in kinds]


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config that names the run as wandb did, where it does not name it itself."""
    called = config.get("wandb", {})
    names = {"experiment_name": called.get("project"), "trial_name": called.get("name") or called.get("id")}
    return {key: value for key, value in names.items() if value} | config
