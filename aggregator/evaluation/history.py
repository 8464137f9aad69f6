"""The metrics that a run's log remembers: what its attempts committed of the steps before one."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from eventlog import RunReader, schema

from .rules import KEPT_ROWS, Past, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from eventlog import Log

    Ints = NDArray[np.int64]

_COLUMNS: Final = ("epoch", "global_step", "key", "value")


def recall(log: Log, step: int, past: Past) -> list[Row]:
    """Return the last rows that were committed before a step; of all before it `past` learns the highest.

    What an attempt does again is superseded: the newest one comes first, and older ones count up to where it
    begins.
    """
    reader = RunReader(log.run.path)
    kept: list[Row] = []
    for attempt in sorted(log.run.attempts(), key=lambda each: -each.number):
        begin = step if attempt.resume_step is None else attempt.resume_step
        pages: deque[_Page] = deque()
        rows = 0
        for page in _pages(reader, attempt.session):
            past.saw(page.highest(step))
            if attempt.resume_step is None and len(page.steps):
                begin = min(begin, int(page.steps.min()))
            pages.append(page)
            rows += page.count(step)
            while rows - pages[0].count(step) >= KEPT_ROWS:
                rows -= pages.popleft().count(step)
        kept = [*_newest(pages, step, KEPT_ROWS - len(kept)), *kept]
        step = min(step, begin)
    return kept


class _Page(NamedTuple):
    """Some of the rows that a process committed, in its order."""

    names: list[str]
    codes: NDArray[np.int32]  # of the names; -1 where no number stands
    values: NDArray[np.float64]
    firsts: Ints  # where each row begins; what comes before the first one is of the page before
    steps: Ints  # of each row

    def highest(self, step: int) -> dict[str, float]:
        """Return the greatest finite number of each name, in the rows before a step."""
        chosen = (self.codes >= 0) & np.isfinite(self.values)
        chosen &= np.repeat(self.steps < step, np.diff(self.firsts, append=len(self.codes)))
        highest = np.full(len(self.names), -np.inf)
        np.maximum.at(highest, self.codes[chosen], self.values[chosen])
        return dict(zip(self.names, highest.tolist(), strict=True))

    def count(self, step: int) -> int:
        """Return how many of the rows are of steps before one."""
        return int(np.count_nonzero(self.steps < step))

    def row(self, at: int) -> Row:
        """Return one of the rows."""
        end = self.firsts[at + 1] if at + 1 < len(self.firsts) else len(self.codes)
        rows = slice(self.firsts[at], end)
        pairs = zip(self.codes[rows].tolist(), self.values[rows].tolist(), strict=True)
        return Row(int(self.steps[at]), {self.names[code]: value for code, value in pairs if code >= 0})


def _pages(reader: RunReader, session: str) -> Iterator[_Page]:
    """Yield what a process committed; what it added to other steps is of the row before, as it was live."""

    def of_session(each: str, entries: NDArray[Any]) -> NDArray[np.bool_]:
        return np.full(len(entries), each == session)

    for block in reader.blocks(schema.Stream.COMMITS, _COLUMNS, of_session):
        yield _page(block.batch)


def _page(batch: pa.RecordBatch) -> _Page:
    key = batch.column("key")
    begins = key.is_null().to_numpy(zero_copy_only=False)
    begins &= batch.column("epoch").is_valid().to_numpy(zero_copy_only=False)
    firsts = np.flatnonzero(begins)
    start = int(firsts[0]) if len(firsts) else len(begins)
    return _Page(
        key.dictionary.to_pylist(),
        key.indices.fill_null(-1).to_numpy()[start:],
        batch.column("value").to_numpy(zero_copy_only=False)[start:],
        firsts - start,
        batch.column("global_step").to_numpy()[firsts],
    )


def _newest(pages: Sequence[_Page], step: int, n: int) -> list[Row]:
    """Return the last n rows of the steps before one."""
    found: list[Row] = []
    for page in reversed(pages):
        places = np.flatnonzero(page.steps < step)[::-1][: n - len(found)]
        found += [page.row(at) for at in places.tolist()]
    return found[::-1]
