"""Recovery and verification of a run with its tables.

Payload is taken from them where compaction has left it there alone, and where the streams are damaged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

import eventlog
from eventlog import FileReport, RunReader, schema

from .compacted import FOLDER, PAYLOAD, Compacted, PayloadTable, by_name, name_of
from .reading import ints

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from eventlog import Recovery, SegmentFile, Verification

    from .compacted import Part

    Progress = Callable[[int, int], object]


def recover(
    run_dir: str | os.PathLike[str], into: str | os.PathLike[str], *, progress: Progress | None = None
) -> Recovery:
    """Save what can be saved of a run, as `eventlog.recover`, the payload in RUN/tables included.

    The copy has it as streams again, and no tables. Rows of a table count only where its checksums are right.
    """
    return eventlog.recover(run_dir, into, kept=_Tables(Path(run_dir)).rows, progress=progress)


def verify(run_dir: str | os.PathLike[str], *, progress: Progress | None = None) -> Verification:
    """Check every byte of a run, as `eventlog.verify`, and of RUN/tables."""
    found = eventlog.verify(run_dir, progress=progress)
    compacted = Compacted(eventlog.RunDir.open(Path(run_dir)))
    sizes = {path: stamp.size for part in compacted.parts for path, stamp in part.files.values()}
    told = {path: FileReport(path.relative_to(found.path), FOLDER, size) for path, size in sizes.items()}
    compacted.check()
    for problem in compacted.problems():
        path = problem.path.relative_to(found.path)
        if path.parts[0] == FOLDER:
            file = told.get(problem.path, FileReport(path, FOLDER))
            told[problem.path] = replace(file, problems=(*file.problems, str(problem)))
    return replace(found, files=[*found.files, *told.values()])


class _Rows(NamedTuple):
    """The payload of one process in one part, and where in it the rows of each frame are."""

    table: pa.Table
    places: Mapping[tuple[Path, int], NDArray[np.intp]]


class _Tables:
    """The payload in the tables of a run, frame by frame."""

    def __init__(self, path: Path) -> None:
        self._reader = RunReader(path)
        self._compacted = Compacted(self._reader.run)
        self._files = by_name(self._reader.run, schema.Stream.PAYLOAD)
        self._held: tuple[Path, str] | None = None
        self._rows = _Rows(pa.table({}), {})

    def rows(self, file: SegmentFile, slot: int) -> pa.RecordBatch | None:
        """Return the rows of a frame by its place; None where no table has all of them."""
        name = name_of(self._reader.run, file)
        for part in self._compacted.trusted(schema.Stream.PAYLOAD):
            covers = part.covers[schema.Stream.PAYLOAD].get(name, ())
            if any(cover.holds(slot) for cover in covers):
                if self._held != (part.path, file.session):
                    self._held, self._rows = (part.path, file.session), self._read(part, file.session)
                places = self._rows.places.get((file.data, slot))
                return None if places is None else _batch(self._rows.table.take(pa.array(places)))
        return None

    def _read(self, part: Part, session: str) -> _Rows:
        """Read the rows of a process, and give each of its frames as many as it had, in their order."""
        try:
            batches = list(PayloadTable(*part.files[PAYLOAD]).of(session))
        except (KeyError, OSError, pa.ArrowException):
            batches = []
        table = pa.Table.from_batches(batches, schema.PAYLOAD)
        order = np.lexsort((ints(table["element"], 0), ints(table["record_id"])))
        ids, free = ints(table["record_id"])[order], np.ones(len(order), np.bool_)
        places: dict[tuple[Path, int], NDArray[np.intp]] = {}
        for name, covers in part.covers[schema.Stream.PAYLOAD].items():
            file = self._files.get(name)
            if file is None or file.session != session:
                continue
            with self._reader.opened(file, newest=False) as segment:
                for slot, record in segment.entries():
                    inside = any(cover.holds(slot) for cover in covers)
                    if record is None or record.type != schema.RecordType.FRAME or not inside:
                        continue
                    start, stop = np.searchsorted(ids, (record.first_id, record.last_id + 1))
                    own = start + np.flatnonzero(free[start:stop])[: record.rows]
                    if len(own) == record.rows:
                        free[own] = False
                        places[file.data, slot] = order[own]
        return _Rows(table, places)


def _batch(table: pa.Table) -> pa.RecordBatch:
    columns = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=schema.PAYLOAD)
