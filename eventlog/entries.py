"""Index records by the thousand, as columns: an index is read and checked a chunk at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import google_crc32c
import numpy as np

from .schema import ENTRY_SIZE, IndexRecord, RecordType, crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    import pyarrow as pa
    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

# The fields of an `IndexRecord` in its order, where `schema` says that they lie, and the record's checksum.
_FIELDS: Final = {
    "type": ("u1", 0),
    "window": ("<i8", 8),
    "flags": ("u1", 1),
    "cause": ("<u2", 2),
    "frame": ("<u4", 4),
    "first_id": ("<i8", 16),
    "last_id": ("<i8", 24),
    "offset": ("<i8", 32),  # as int64: what is larger is behind no frame
    "length": ("<i8", 40),
    "rows": ("<u4", 48),
    "crc": ("<u4", 52),
    "checksum": ("<u4", 60),
}
_UINT64: Final = (1 << 64) - 1
_ENTRY: Final = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [kind for kind, _ in _FIELDS.values()],
        "offsets": [at for _, at in _FIELDS.values()],
        "itemsize": ENTRY_SIZE,
    }
)


class Entries(NamedTuple):
    """Index records that follow each other: `table[i]` is the one at place `first + i`."""

    first: int
    table: Any  # a structured array, with a field for each of an IndexRecord
    good: Bools  # intact; of the others nothing is known

    @classmethod
    def of(cls, data: bytes, first: int, segment_uid: bytes) -> Self:
        """Check the records in whole entries of an index, the first of which is at place `first`."""
        table = np.frombuffer(data, _ENTRY)
        seed, extend = crc32c(segment_uid), google_crc32c.extend
        found = [extend(seed, data[at : at + 60]) for at in range(0, len(data), ENTRY_SIZE)]
        return cls(first, table, np.array(found, np.uint32) == table["checksum"])

    def behind(self, sealed: int) -> Entries:
        """Return them, as bad those that begin before the end of one before; `sealed`: of those before."""
        places = np.flatnonzero(self.frames)
        starts = self.table["offset"][places]
        stops = starts + self.table["length"][places]
        whole = (stops >= starts).all()  # a length that no file has goes round
        if not len(places) or (whole and starts[0] >= sealed and (starts[1:] >= stops[:-1]).all()):
            return self
        good = self.good.copy()
        for place, start, stop in zip(places.tolist(), starts.tolist(), stops.tolist(), strict=True):
            good[place] = sealed <= start <= stop
            sealed = stop if good[place] else sealed
        return self._replace(good=good)

    def holes(self, sealed: int) -> Iterator[tuple[int, int]]:
        """Yield (place, bytes) of frames before which there are bytes of which no record speaks.

        Frames lie end to end: the records of those bytes are gone. Where one beside them is damaged that is
        told already. `sealed`: where the frame before the first one ends.
        """
        places = np.flatnonzero(self.frames)
        starts = self.table["offset"][places]
        before = np.append(sealed, (starts + self.table["length"][places])[:-1])
        for i in np.flatnonzero(starts > before).tolist():
            known = before[i] or not self.first  # else reading begins here
            if known and self.good[places[i - 1] if i else 0 : places[i]].all():
                yield self.first + int(places[i]), int(starts[i] - before[i])

    def and_then(self, others: Entries) -> Entries:
        """Return them and others that follow them."""
        if not len(self.good):
            return others
        joined = (np.concatenate(pair) for pair in zip(self[1:], others[1:], strict=True))
        return Entries(self.first, *joined)

    def cut(self, start: int, stop: int | None = None) -> Entries:
        """Return those at [start, stop)."""
        return Entries(self.first + start, self.table[start:stop], self.good[start:stop])

    @property
    def known(self) -> int:
        """How many there are up to the last intact one."""
        return int(np.flatnonzero(self.good)[-1]) + 1 if self.good.any() else 0

    @property
    def frames(self) -> Bools:
        """Which are intact records of frames."""
        return self.good & (self.table["type"] == RecordType.FRAME)

    @property
    def zero(self) -> bool:
        """Whether there is nothing but zeros."""
        return not self.table.view((np.uint8, ENTRY_SIZE)).any()

    def records(self) -> Iterator[tuple[int, IndexRecord | None]]:
        """Yield (place, record), None for a damaged one."""
        rows = zip(self.table.tolist(), self.good.tolist(), strict=True)
        for slot, (values, good) in enumerate(rows, self.first):
            yield slot, record_of(values) if good else None


class Sealed(NamedTuple):
    """An entry of an index: its place, what it says (None: damaged); of a frame that was read, its rows."""

    slot: int
    record: IndexRecord | None
    read: bool = False  # whether it is a frame that was asked for
    batch: pa.RecordBatch | None = None  # None, though read: damaged


def good_frames(read: Iterable[Iterable[Sealed]]) -> Iterator[tuple[IndexRecord, pa.RecordBatch]]:
    """Yield what the index says of frames, and their rows: of those that were read and are good."""
    for entries in read:
        for _, record, _, batch in entries:
            if record is not None and batch is not None:
                yield record, batch


def record_of(values: Any) -> IndexRecord:
    """Return an index record by the values of a row of a table."""
    kind, window, flags, cause, frame, first_id, last_id, offset, length, rows, crc, _ = values
    offset, length = offset & _UINT64, length & _UINT64
    return IndexRecord(kind, window, flags, cause, frame, first_id, last_id, offset, length, rows, crc)
