"""What a live delivery keeps of its target: the cursor, written by the training's thread and by its own."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING

from eventlog import errors

from .acknowledged import PLAIN
from .backends.base import capabilities_of
from .standing import check_fresh, new_cursor, standing, store_for
from .steps import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .acknowledged import Telling
    from .backends.base import Backend, RunInfo
    from .cursor import Cursor
    from .steps import Row


class Ledger:
    """The cursor of an opened backend, and the highest step that its target holds and keeps (`last`).

    `keeps` is as for `Delivery`. A cursor that cannot be written is said, and stops nothing.
    """

    def __init__(
        self,
        backend: Backend,
        run: RunInfo,
        cursors: Path,
        say: Callable[[str, str], None],
        *,
        keeps: bool,
        telling: Telling = PLAIN,
    ) -> None:
        self._backend = backend
        self._cursors = cursors
        self._beside = run.path / "cursors"
        self._say = say
        self._keeps = keeps
        self._telling = telling
        self._can = capabilities_of(backend)
        self._lock = threading.Lock()
        self._store = store_for(backend, cursors, beside=self._beside)
        self._told = array("Q")  # the steps that were told in this lifetime
        self._unsaved = False
        self._follows = True  # whether what was told is written down at once
        self.reached: int | None = None
        """The highest step that was told before this lifetime, whether it stays or not."""
        self._cursor, self.last = self._begin(run)
        self._before = self._cursor.copy()
        self.refused_before = frozenset(self._cursor.refused)

    @property
    def known(self) -> set[int]:
        """The attempts of which the target had acknowledged something before."""
        return self._before.told.attempts

    @property
    def told_before(self) -> bool:
        """Whether something was told to this target before this lifetime."""
        return self._cursor.begun or self.last is not None

    @property
    def last_step(self) -> int | None:
        """The highest step that was acknowledged."""
        return self._cursor.last_step

    def passes(self, row: Row) -> bool:
        """Whether the target had a row before this lifetime."""
        if not self._before.knows(row):
            return False
        with self._lock:
            self._cursor.passes(row)
        return True

    def bars(self, row: Row) -> bool:
        """Whether a row must not be told: what lies there is not known for certain."""
        return self._before.bars(row, completes=self._can.completes)

    def knows(self, row: Row) -> bool:
        """Whether the target has a row by now."""
        with self._lock:
            return self._cursor.knows(row)

    def lacking(self, rows: Iterable[Row]) -> list[Row]:
        """Return those of some rows that the target lacks, and may be told."""
        lacking = [row for row in rows if not self.knows(row)]
        for row in filter(self.bars, lacking):
            self.miss(row)
        return [row for row in lacking if not self.bars(row)]

    def tries(self, row: Row) -> None:
        """Note that a row is about to be told: if a kill comes, the target says whether it was.

        That it was is written with the next row, or at the end, but where the target could not say it.
        """
        with self._lock:
            below = self._cursor.tries(row)
            self._cursor.run_id = getattr(self._backend, "run_id", None)
        self._follows = below or self._can.rewinds or not self._can.reads_back
        if below or not self._can.rewinds:
            self.save()

    def took(self, row: Row) -> None:
        """Note that the target acknowledged a row."""
        with self._lock:
            self._told.append(row.step)
            self._cursor.took(row)
        self._noted()

    def fail(self, row: Row) -> None:
        """Note a row that could not be told."""
        with self._lock:
            self._cursor.fail(row, reads_back=self._can.reads_back)
        self._unsaved = True

    def refuse(self, row: Row, *, late: bool) -> None:
        """Note a row that the target would not take; `late`: any more."""
        with self._lock:
            if late:
                self._cursor.fail(row, reads_back=False)
                self._cursor.told.miss(row)
            else:
                self._cursor.refuse(row)
        self._noted()

    def finds(self, row: Row) -> None:
        """Note that a row was read from the log, with what was withheld of it by then."""
        with self._lock:
            self._cursor.told.finds(row)

    def miss(self, row: Row) -> None:
        """Note a row that the target does not get."""
        with self._lock:
            self._cursor.told.miss(row)

    def save(self) -> None:
        """Write the cursor."""
        with self._lock:
            cursor = self._cursor.copy()
        self._unsaved = False
        try:
            self._store.save(cursor)
        except errors.RunDirectoryError as error:
            self._say("cursor", str(error))

    def close(self) -> None:
        """Write what was not written yet: the target is closed."""
        if self._unsaved:
            self.save()

    def begin_anew(self, run: RunInfo, *, whole: bool) -> None:
        """Go on with the run that the backend has opened now; `whole`: nothing of it was told."""
        if run.fresh:
            check_fresh(self._backend)
        self._store = store_for(self._backend, self._cursors, beside=self._beside)
        new = new_cursor(self._backend, self._telling)
        with self._lock:
            if whole:  # what it does not get meanwhile it lacks
                new.told.misses(self._cursor.told)
            self._cursor = new if whole else self._cursor.continued(new.target)
            self._before = self._cursor.copy()
        self.save()

    def take_back(self) -> int:
        """Believe a target that could not be closed as to what it holds; return how many steps it lost."""
        if self._can.order is Order.ANY or not self._can.reads_back:
            return 0
        try:
            last = self._backend.last_step()
        except Exception:  # noqa: BLE001  (somebody else's code, and in trouble)
            return 0
        last = -1 if last is None else last
        with self._lock:
            lost = sum(step > last for step in self._told)
            self._cursor.settle(last, completes=self._can.completes)
        if lost:
            self.save()
        return lost

    def _noted(self) -> None:
        self._unsaved = True
        if self._follows:
            self.save()

    def _begin(self, run: RunInfo) -> tuple[Cursor, int | None]:
        if run.fresh or not self._can.rewinds:
            cursor, self.reached = standing(self._backend, self._store, run, telling=self._telling)
            return cursor, self.reached
        cursor = self._store.load(required=not self._can.reads_back)
        cursor.told.begin(self._telling)
        cursor.trying.clear()  # told again, it replaces itself
        if not self._keeps:
            cursor.begun, self.reached = bool(cursor.told.spans), cursor.last_step
            cursor.last_step = None  # told anew from here on
            return cursor, None
        # The cursor knows from where on: the target may hold what was taken back.
        last, known = self._backend.last_step(), cursor.last_step
        whole = known is not None and last is not None and last >= known
        return (cursor, known) if whole else (new_cursor(self._backend, self._telling), None)
