"""Writing the Parquet files of a part: the rows of its frames in an order that questions read them by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eventlog import RunReader, WindowSet, schema

from .checked import NewFile
from .compacted import (
    COMMITS,
    EXPORTS,
    FOLDER,
    NUMBERS,
    PAYLOAD,
    RECORDS,
    Cover,
    as_stored,
    by_name,
    index_checksum,
    table_of,
)
from .placing import first_rows
from .reading import EXPORT_COLUMNS, RECORD_COLUMNS, codes, encoded, ints

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from .reading import Ints

    Ranges = Sequence[tuple[int, int]]  # (first, stop) of places
    Frames = Mapping[str, Mapping[str, Ranges]]  # stream → data file → which
    Places = NDArray[np.intp]
    _Batches = list[tuple[str, pa.RecordBatch]]  # with the session

_COLUMNS: Final = {RECORDS: RECORD_COLUMNS, EXPORTS: EXPORT_COLUMNS}  # of the others, all
_ROWS: Final = 1 << 17  # of a row group that holds no values
_LEAST_GROUP: Final = 1 << 20  # bytes of values in a row group …
_MOST_GROUP: Final = 8 << 20  # … at least, where keys are small, and at most, where they are large
_ROW_BYTES: Final = 64


def write_part(
    run_dir: Path, name: str, frames: Frames
) -> tuple[dict[str, dict[str, list[Cover]]], dict[str, dict[str, Any]], list[str]]:
    """Write the files of a part, without damaged frames.

    Returns what of the frames they hold, what the part says of the files, and what is wrong with the frames.
    """
    reader = RunReader(run_dir)
    files = by_name(reader.run)
    batches: dict[str, _Batches] = {table: [] for table in (RECORDS, EXPORTS, COMMITS, PAYLOAD)}
    covers: dict[str, dict[str, list[Cover]]] = {}
    for stream, those in frames.items():
        for path in (path for path in files if path in those):  # in the order of producers
            file, wanted, bad = files[path], WindowSet(), WindowSet()
            for first, stop in those[path]:
                wanted.update(first, stop)
            with reader.opened(file, newest=False) as segment:
                for slot, window, batch in _read(segment, wanted):
                    table = table_of(file.stream, window)
                    if batch is None or _says_more(batch, table):
                        bad.add(slot)
                        continue
                    batches[table].append((file.session, batch))
            for first, stop in wanted.without(bad).runs():
                crc = index_checksum(file.data, first, stop)
                covers.setdefault(stream, {}).setdefault(path, []).append(Cover(first, stop, crc))
    made = {
        RECORDS: _texts(batches[RECORDS], schema.RECORDS, RECORD_COLUMNS),
        EXPORTS: _texts(batches[EXPORTS], schema.RECORDS, EXPORT_COLUMNS),
        COMMITS: _texts(batches[COMMITS], schema.COMMITS, schema.COMMITS.names),
    }
    folder = run_dir / FOLDER
    told = {
        table: _write(folder / f"{name}.{table}.parquet", [rows.slice(at, _ROWS) for at in _starts(rows)])
        for table, rows in made.items()
        if rows.num_rows
    }
    if batches[PAYLOAD]:
        groups = _by_key(batches[PAYLOAD], made[RECORDS])
        told[PAYLOAD] = _write(folder / f"{name}.{PAYLOAD}.parquet", groups)
    return covers, told, [str(problem) for problem in reader.problems]


def _read(segment: Any, wanted: WindowSet) -> Iterator[tuple[int, int, pa.RecordBatch | None]]:
    """Yield (place, window, rows) of the frames at some places; no rows of a damaged one."""
    begin, last = wanted.runs()[0][0], wanted.runs()[-1][1]
    for entries in segment.sealed(begin):
        for entry in entries:
            if entry.slot in wanted and entry.read:
                yield entry.slot, entry.record.window, entry.batch
        if entries and entries[-1].slot >= last:
            return


def _says_more(batch: pa.RecordBatch, table: str) -> bool:
    """Whether rows hold something that their table has no column for, as no process writes them."""
    kept = _COLUMNS.get(table, batch.schema.names)
    return any(batch[name].null_count < batch.num_rows for name in batch.schema.names if name not in kept)


def _texts(batches: _Batches, kind: pa.Schema, columns: Sequence[str]) -> pa.Table:
    rows = pa.Table.from_batches([batch for _, batch in batches], kind).select(list(columns))
    return encoded(rows.combine_chunks()).append_column("session", _sessions(batches))


def _sessions(batches: _Batches) -> pa.DictionaryArray:
    words = list(dict.fromkeys(session for session, _ in batches))
    numbers = np.array([words.index(session) for session, _ in batches], np.int32)
    of = np.repeat(numbers, [batch.num_rows for _, batch in batches])
    return pa.DictionaryArray.from_arrays(pa.array(of, pa.int32()), pa.array(words, pa.large_string()))


def _starts(rows: pa.Table) -> range:
    return range(0, rows.num_rows, _ROWS)


# -- values ------------------------------------------------------------------------------------------------


def _by_key(batches: _Batches, records: pa.Table) -> Iterator[pa.Table]:
    """Yield payload rows by key and window, a row group at a time; all rows of a record in one."""
    rows = pa.Table.from_batches([batch for _, batch in batches], schema.PAYLOAD).combine_chunks()
    sessions = _sessions(batches)
    key, window = _whose(records, sessions, ints(rows["record_id"]))
    of, ids, element = sessions.indices.to_numpy(), ints(rows["record_id"]), ints(rows["element"], 0)
    order = np.lexsort((element, ids, of, window, key))
    sizes = _sizes(rows)[order]
    firsts = first_rows(of[order], ids[order])
    keys = key[order][firsts]
    for start, stop in _groups(np.add.reduceat(sizes, firsts), keys, firsts, len(order)):
        own = pa.array(order[start:stop])
        (batch,) = rows.take(own).combine_chunks().to_batches()
        columns = {"session": sessions.take(own), **as_stored(batch)}
        yield pa.table(columns)


def _whose(records: pa.Table, sessions: pa.DictionaryArray, ids: Ints) -> tuple[Ints, Ints]:
    """Return key and window of the record of each row; -1 where it is in no part with it."""
    key, window = np.full(len(ids), -1), np.full(len(ids), -1)
    own_key, own_window, own_ids = (
        codes(records["key"]),
        ints(records["window"], -1),
        ints(records["record_id"]),
    )
    told = records["session"].combine_chunks()
    names = told.dictionary.to_pylist()
    of_record, of_row = told.indices.to_numpy(), sessions.indices.to_numpy()
    for i, session in enumerate(sessions.dictionary.to_pylist()):
        rows = np.flatnonzero(of_row == i)
        places = (
            np.flatnonzero(of_record == names.index(session)) if session in names else np.empty(0, np.intp)
        )
        places = places[np.argsort(own_ids[places], kind="stable")]
        if len(places) and len(rows):
            at = np.minimum(np.searchsorted(own_ids[places], ids[rows]), len(places) - 1)
            same = own_ids[places][at] == ids[rows]
            key[rows[same]], window[rows[same]] = own_key[places[at]][same], own_window[places[at]][same]
    return key, window


def _groups(sizes: Ints, keys: Ints, firsts: Places, n: int) -> Iterator[tuple[int, int]]:
    """Yield where row groups begin and end: at another key or when full, always between two records."""
    begin, size = 0, 0
    for i, (own, key) in enumerate(zip(sizes.tolist(), keys.tolist(), strict=True)):
        other = i > 0 and key != keys[i - 1]
        if size and (size + own > _MOST_GROUP or (other and size >= _LEAST_GROUP)):
            yield begin, int(firsts[i])
            begin, size = int(firsts[i]), 0
        size += own
    yield begin, n


def _sizes(rows: pa.Table) -> Ints:
    """Return about how many bytes each row takes."""
    found = np.full(rows.num_rows, _ROW_BYTES)
    for name in NUMBERS:
        lists = rows[name].combine_chunks()
        width = lists.type.value_type.bit_width // 8
        found += width * lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


# -- files -------------------------------------------------------------------------------------------------


def _write(path: Path, groups: Sequence[pa.Table] | Iterator[pa.Table]) -> dict[str, Any]:
    """Write tables as the row groups of one file; return what the part says of it."""
    rows, writer = 0, None
    with NewFile(path) as file:
        for group in groups:
            if writer is None:
                writer = pq.ParquetWriter(pa.PythonFile(file, "w"), group.schema, **_form(group.schema))
            writer.write_table(group, row_group_size=max(1, group.num_rows))
            rows += group.num_rows
        if writer is not None:
            writer.close()
        stamp = file.finish()
    return {"name": path.name, "rows": rows, **stamp.plain()}


def _form(kind: pa.Schema) -> dict[str, Any]:
    """Return how columns are written: texts as codes, values as they are, the rest compressed."""
    texts = [field.name for field in kind if pa.types.is_dictionary(field.type)]
    plain = ("values32", "values64")
    return {
        "use_dictionary": texts,
        "compression": {field.name: "none" if field.name in plain else "lz4" for field in kind},
        "write_statistics": ["record_id"],
        "store_schema": True,
    }
