"""Trackio: one SQLite file per project, or a server that keeps such a file.

Local rows are written through Trackio's own storage, those of a replay to its table, with ids made of their
content: a row that lies there is never written again, live logging and replay share one run, and replay ends
with exactly what the run committed.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from contextlib import closing, contextmanager
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors, ranges

from ..config import TRACKIO_MODES
from ..steps import Order
from . import directory
from .base import Capabilities, DisabledBackend, Written, check_installed, not_open
from .keeping import is_unknown
from .trackio_run import TrackioRun, as_text, config_of, content_of
from .trackio_server import TrackioServerBackend

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from ..steps import Histogram, Row
    from .base import Backend, RunInfo, Selection

Logged = tuple[int, bytes, float, str]  # step, content, time, id

_BATCH: Final = 1000  # rows a transaction
_INSERT: Final = """
INSERT OR IGNORE INTO metrics (timestamp, run_id, run_name, step, metrics, log_id) VALUES (?, ?, ?, ?, ?, ?)
"""
_swapping = threading.RLock()


def create(
    *,
    mode: str | None = None,
    project: str | None = None,
    name: str | None = None,
    path: str | os.PathLike[str] | None = None,
    space_id: str | None = None,
    server_url: str | None = None,
) -> Backend:
    """Return the backend for a mode, local unless a Space or a server is named."""
    mode = mode or ("online" if space_id or server_url else "local")
    if mode not in TRACKIO_MODES:
        raise errors.ConfigError(f"expected a trackio mode of {', '.join(TRACKIO_MODES)}, got {mode!r}")
    if mode == "disabled":
        return DisabledBackend("trackio")
    check_installed("trackio")
    if mode == "local":
        return TrackioBackend(path, project=project, name=name)
    place = (
        space_id or server_url or os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
    )
    if not place:
        raise errors.ConfigError(
            "expected trackio.space_id or trackio.server_url for mode online, got neither"
        )
    return TrackioServerBackend(place, project=project, name=name)


class TrackioBackend(TrackioRun):
    """A run in `path/<project>.db`; without a path where Trackio itself writes (TRACKIO_DIR).

    A step told again replaces what it tells again.
    """

    capabilities = Capabilities(order=Order.ANY, rewinds=True, histograms=True)

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        project: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(project=project, name=name)
        self._path = None if path is None else Path(path).absolute()
        self._config: dict[str, Any] | None = None
        self._open = False
        self._drawn: dict[str, Histogram] = {}

    @property
    def target(self) -> str:
        """The project's file and the run's id."""
        return f"{self._path or 'TRACKIO_DIR'}/{self.project}#{self.run_id}"

    # -- live --------------------------------------------------------------------------------------

    def open(self, run: RunInfo) -> None:
        """Make the project's file; BackendError when that is not possible."""
        self._settle(run)
        self._config = config_of(run)
        with self._storage() as storage, _told(self.target):
            storage.init_db(self.project)
        self._open, self._drawn = True, {}

    def histogram(self, step: int, name: str, histogram: Histogram, time: float) -> None:
        """Keep a histogram for the step's row."""
        del step, time
        self._drawn[name] = histogram

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Add the row; what was told before of the same keys at this step goes."""
        if not self._open:
            raise not_open(step)
        drawn, self._drawn = self._drawn, {}  # whatever becomes of this row, the next has its own
        row = self._row(metrics, drawn)
        content = content_of(row)
        row_id = self.row_id(step, content, time)
        with _told(self.target):
            self._put([(step, content, time, row_id)], self._config)
            with self._database() as database:
                self._forget(database, step, row.keys(), row_id)
        self._config = None

    def alert(self, title: str, text: str, level: str, step: int | None) -> None:
        """Add an alert to those of the run."""
        with self._storage() as storage, _told(self.target):
            storage.bulk_alert(self.project, self.run, [title], [text], [level], [step], run_id=self.run_id)

    def last_step(self) -> int | None:
        """Return the run's highest step in the file."""
        if not self.run_id:
            return None
        with _told(self.target), self._database() as database:
            question = "SELECT max(step) FROM metrics WHERE run_id = ?"
            return database.execute(question, (self.run_id,)).fetchone()[0]

    def close(self) -> None:
        """Take nothing more; every row was safe when `log` returned."""
        self._open = False

    # -- replay ------------------------------------------------------------------------------------

    def rewrite(
        self, run: RunInfo, rows: Iterable[Row], selection: Selection, *, dry_run: bool = False
    ) -> Written:
        """Make the run hold exactly `rows`: what lies there already stays, what is no longer told goes.

        Steps of which the log does not have all rows any more stay as they lie there.
        A fresh run takes the first id of ID-2, ID-3, … that holds nothing.
        """
        self._settle(run)
        marker = self._marker()
        directory.check_selection(marker, selection, self._file())
        held, wanted = self._held(), set[str]()
        kept = {
            step
            for step, time in held.values()
            if step is not None and is_unknown(rows, step, _seconds(time))
        }
        sent = skipped = 0
        batch: list[Logged] = []
        for row in rows:
            if row.step in kept:
                continue
            content = content_of(self._row(row.metrics, row.histograms))
            row_id = self.row_id(row.step, content, row.time)
            wanted.add(row_id)
            if row_id in held:
                skipped += 1
                continue
            sent += 1
            batch.append((row.step, content, row.time, row_id))
            if len(batch) == _BATCH:
                self._flush(batch, run, dry_run=dry_run)
        self._flush(batch, run, dry_run=dry_run)
        if not dry_run:
            self._tidy({row_id for row_id, (step, _) in held.items() if step not in kept} - wanted)
            self._mark(marker, directory.with_selection(marker, selection))
        return Written(sent, skipped, len(self.names.renamed), kept=len(kept), kept_steps=ranges(kept))

    def _row(self, metrics: Mapping[str, float], drawn: Mapping[str, Histogram]) -> dict[str, Any]:
        """Return a row as Trackio keeps it."""
        row: dict[str, Any] = self.names.row(metrics)
        for name, (edges, counts) in drawn.items():
            row[self.names.to(name)] = {"_type": "trackio.histogram", "bins": edges, "values": counts}
        return row

    def _flush(self, batch: list[Logged], run: RunInfo, *, dry_run: bool) -> None:
        if batch and not dry_run:
            with _told(self.target):
                self._put(batch, config_of(run))
        batch.clear()

    def _tidy(self, stale: set[str]) -> None:
        if stale:
            with _told(self.target), self._database() as database:
                ids = [(row_id,) for row_id in stale]
                database.executemany("DELETE FROM metrics WHERE log_id = ?", ids)

    # -- the file ----------------------------------------------------------------------------------

    @contextmanager
    def _storage(self) -> Generator[Any]:
        """Yield Trackio's storage; it works in our directory meanwhile, if that is another than its own."""
        module: Any = import_module("trackio.sqlite_storage")
        with _swapping:
            own = module.TRACKIO_DIR
            try:
                module.TRACKIO_DIR = self._path = self._path or Path(own).absolute()
                yield module.SQLiteStorage
            except ValueError as error:  # names that Trackio keeps to itself
                raise errors.ConfigError(f"expected another trackio.project, got {error}") from error
            finally:
                module.TRACKIO_DIR = own

    def _put(self, rows: list[Logged], config: dict[str, Any] | None) -> None:
        """Add rows: the first by Trackio's own storage, which makes what they need, the rest beside it."""
        self._put_slowly(rows[:1], config)
        if len(rows) > 1 and not self._insert(rows[1:]):
            self._put_slowly(rows, config)

    def _put_slowly(self, rows: list[Logged], config: dict[str, Any] | None) -> None:
        with self._storage() as storage:
            storage.bulk_log(
                self.project,
                self.run,
                [json.loads(content) for _, content, _, _ in rows],
                steps=[step for step, _, _, _ in rows],
                timestamps=[as_text(time) for _, _, time, _ in rows],
                log_ids=[row_id for _, _, _, row_id in rows],
                run_id=self.run_id,
                config=config,
            )

    def _insert(self, rows: list[Logged]) -> bool:
        """Add rows as `bulk_log` does, which spends most of its time looking for what no row of ours has.

        False unless the table took every one: what lies there already is passed over, but so is what a later
        Trackio's table would not have like this.
        """
        columns = [
            (as_text(time), self.run_id, self.run, step, content, row_id)
            for step, content, time, row_id in rows
        ]
        try:
            with self._database() as database:
                return database.executemany(_INSERT, columns).rowcount == len(rows)
        except sqlite3.OperationalError:
            return False

    def _forget(self, database: sqlite3.Connection, step: int, keys: Iterable[str], row_id: str) -> None:
        """Take these keys out of the other rows of a step; what is left has the id of its content."""
        told = set(keys)
        question = """
            SELECT id, metrics, timestamp FROM metrics WHERE run_id = ? AND step = ? AND log_id IS NOT ?
        """
        for number, content, time in database.execute(question, (self.run_id, step, row_id)).fetchall():
            before = json.loads(content)
            left = {key: value for key, value in before.items() if key not in told}
            if not left:
                database.execute("DELETE FROM metrics WHERE id = ?", (number,))
            elif len(left) < len(before):
                rest = content_of(left)
                database.execute(
                    "UPDATE OR REPLACE metrics SET metrics = ?, log_id = ? WHERE id = ?",
                    (rest, self.row_id(step, rest, _seconds(time)), number),
                )

    def _file(self) -> Path:
        with self._storage() as storage:
            return storage.get_project_db_path(self.project)

    @contextmanager
    def _database(self) -> Generator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._file(), timeout=30)) as database, database:
            yield database

    def _exists(self) -> bool:
        return self._file().exists()

    def _held(self) -> dict[str, tuple[int | None, str]]:
        """Return step and time of the run's rows, by their ids."""
        if not self._exists():
            return {}
        with _told(self.target), self._database() as database:
            columns = database.execute("PRAGMA table_info(metrics)").fetchall()
            if not any(name == "log_id" for _, name, *_ in columns):  # who made the file was killed over it
                return {}
            question = "SELECT log_id, step, timestamp FROM metrics WHERE run_id = ?"
            rows = database.execute(question, (self.run_id,))
            return {row_id: (step, time) for row_id, step, time in rows}

    def _settle(self, run: RunInfo) -> None:
        """Find the project and the run there; a fresh one has an id that holds nothing."""
        self.place(run)
        with self._storage() as storage:
            storage.validate_project_name(self.project)
        self.settle(run, self.target, lambda: bool(self._held()))

    def _marker(self) -> dict[str, Any]:
        """Return what a replay said that the run holds."""
        if not self._exists():
            return {}
        with self._storage() as storage, _told(self.target):
            return json.loads(storage.get_project_metadata(self.project, self._key()) or "{}")

    def _mark(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        if before != now and self._exists():
            with self._storage() as storage, _told(self.target):
                storage.set_project_metadata(self.project, self._key(), json.dumps(now))

    def _key(self) -> str:
        return f"areal-metrics:{self.run_id}"


def _seconds(text: str) -> float:
    """Return a row's time; 0.0, which is none of the log's, where somebody wrote another form."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return 0.0


@contextmanager
def _told(target: str) -> Generator[None]:
    """Raise what goes wrong with the file as BackendError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise errors.BackendError(f"expected to reach trackio, got {error}: {target}") from error
