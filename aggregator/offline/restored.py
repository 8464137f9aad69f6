"""Recovery and verification of a run with its tables.

Frames are taken from them where compaction has left values there alone, and where the streams are damaged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

import eventlog
from eventlog import FileReport, RunDir, records_of, schema

from .absentees import absentees
from .compacted import FOLDER, TABLES, Compacted, by_name, name_of, recorded, table_of
from .history import load
from .reading import ints

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from numpy.typing import NDArray

    from eventlog import Recovery, SegmentFile, Verification

    from .compacted import Part

    Progress = Callable[[int, int], object]


def recover(
    run_dir: str | os.PathLike[str], into: str | os.PathLike[str], *, progress: Progress | None = None
) -> Recovery:
    """Save what can be saved of a run, as `eventlog.recover`, the rows in RUN/tables included.

    The copy has them as streams, and no tables. Rows of a table count only where its checksums are right.
    """
    return eventlog.recover(run_dir, into, kept=_Tables(Path(run_dir)).rows, progress=progress)


def verify(run_dir: str | os.PathLike[str], *, progress: Progress | None = None) -> Verification:
    """Check every byte of a run, as `eventlog.verify`, and of RUN/tables; and that no rank's part is missing.

    Ranks that took part in exports and left nothing of them in the log are problems of their folders.
    """
    found = eventlog.verify(run_dir, progress=progress)
    compacted = Compacted(RunDir.open(Path(run_dir)))
    sizes = {path: stamp.size for part in compacted.parts for path, stamp in part.files.values()}
    told = {path: FileReport(path.relative_to(found.path), FOLDER, size) for path, size in sizes.items()}
    compacted.check()
    for problem in compacted.problems():
        path = problem.path.relative_to(found.path)
        if path.parts[0] == FOLDER:
            file = told.get(problem.path, FileReport(path, FOLDER))
            told[problem.path] = replace(file, problems=(*file.problems, str(problem)))
    lacking = [
        FileReport(path, path.parts[0], problems=(str(problem),))
        for problem in absentees(load(Path(run_dir), str(run_dir)))
        for path in [problem.path.relative_to(found.path)]
    ]
    return replace(found, files=[*found.files, *told.values(), *lacking])


class _Tables:
    """The rows of a run that its tables have, frame by frame."""

    def __init__(self, path: Path) -> None:
        self._run = RunDir.open(path)
        self._compacted = Compacted(self._run)
        self._files = by_name(self._run)
        self._held: tuple[Path, schema.Stream, str] | None = None
        self._frames: dict[tuple[Path, int], _Frame] = {}

    def rows(self, file: SegmentFile, slot: int) -> pa.RecordBatch | None:
        """Return the rows of a frame by its place; None where no table has all of them."""
        name = name_of(self._run, file)
        for part in self._compacted.told(file.stream):
            if any(cover.holds(slot) for cover in part.covers[file.stream].get(name, ())):
                held = part.path, file.stream, file.session
                if self._held != held:
                    self._frames.clear()  # before the next ones: values are large
                    self._held, self._frames = held, self._read(part, file.stream, file.session)
                found = self._frames.get((file.data, slot))
                return None if found is None else found.batch()
        return None

    def _read(self, part: Part, stream: schema.Stream, session: str) -> dict[tuple[Path, int], _Frame]:
        """Read the rows of a process, and give each of its frames as many as it had, in their order."""
        whole = part in self._compacted.trusted(stream)
        tables = {name: _Table(recorded(part, name, session), whole=whole) for name in TABLES[stream]}
        frames: dict[tuple[Path, int], _Frame] = {}
        for name, covers in part.covers[stream].items():
            file = self._files.get(name)
            if file is None or file.session != session:
                continue
            for slot, record in records_of(file):
                inside = any(cover.holds(slot) for cover in covers)
                if record.type != schema.RecordType.FRAME or not inside:
                    continue
                table = tables[table_of(stream, record.window)]
                places = table.claimed(*_ids(stream, record), record.rows)
                if places is not None:
                    frames[file.data, slot] = _Frame(table.rows, places)
        return frames


def _ids(stream: schema.Stream, record: schema.IndexRecord) -> tuple[int, int]:
    """Return the first and last number of a frame's rows; a commit is a frame, and its window."""
    if stream is schema.Stream.COMMITS:
        return record.window, record.window
    return record.first_id, record.last_id


class _Frame(NamedTuple):
    """Where the rows of a frame lie."""

    rows: pa.Table
    places: NDArray[np.intp]

    def batch(self) -> pa.RecordBatch:
        """Return them."""
        found = self.rows.take(pa.array(self.places))
        columns = [column.combine_chunks() for column in found.columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.rows.schema)


class _Table:
    """The rows of one process in one table, by their numbers; each is claimed by one frame.

    Unless `whole`, not every frame is known that may claim some: each gets what no other can have a part of.
    """

    def __init__(self, rows: pa.Table, *, whole: bool) -> None:
        self.rows = rows
        self._whole = whole
        ids = ints(rows.column(0))
        parts = [ints(rows["element"], 0)] if "element" in rows.column_names else []
        self._order = np.lexsort((*parts, ids))
        self._ids = ids[self._order]
        self._free = np.ones(len(ids), np.bool_)

    def claimed(self, first: int, last: int, n: int) -> NDArray[np.intp] | None:
        """Claim the next n rows with numbers from first to last; None when there are not so many."""
        start, stop = np.searchsorted(self._ids, (first, last + 1))
        own = start + np.flatnonzero(self._free[start:stop])[:n]
        if len(own) < n or not (self._whole or stop - start == n):
            return None
        self._free[own] = False
        return self._order[own]
