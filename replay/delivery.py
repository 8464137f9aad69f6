"""Live delivery: one backend, one thread, one bounded queue. Nothing here ever stops or holds up a training.

Rows are delivered in order or not at all: one that fails is tried again, and after repeated failures the
backend is switched off, so that what it lacks is one gap at the end, which replay fills.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

from .backends.base import capabilities_of, name_of, store_for, target_of, tell
from .cursor import Cursor
from .status import Notice, Renewal, Status
from .steps import DEFAULT_WAIT, Gate, Order, Row, named, numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from .backends.base import Backend, RunInfo

_log = logging.getLogger("areal_metrics.replay")

QUEUE_ROWS: Final = 1000
PAUSES: Final = (0.5, 2.0)  # seconds between the tries


class Delivery:
    """Opens a backend at once, loudly; then tells it, on a thread of its own, what `tell` hands over.

    Rows that come faster than the backend takes them wait, at most `queue_rows` of them. With `keeps` the
    caller tells the run from its beginning: what the target has acknowledged is passed over. `on_rewind`
    "new_run" and "rewrite" are as in the config; `story` returns the whole run, a row a step, for the latter.
    """

    def __init__(
        self,
        backend: Backend,
        run: RunInfo,
        cursors: Path,
        *,
        wait: float = DEFAULT_WAIT,
        queue_rows: float = QUEUE_ROWS,
        pauses: Sequence[float] | None = None,
        keeps: bool = False,
        on_rewind: str = "warn",
        story: Callable[[], Iterable[Row]] | None = None,
    ) -> None:
        backend.open(run)
        self.name = name_of(backend)
        self.skipped: set[int] = set()
        self.refused: set[int] = set()
        self.failure: Exception | None = None
        """Why not everything was told: what switched the backend off, or kept it from closing."""
        self.untold = 0
        """Histograms that the target cannot show."""
        self._backend = backend
        self._run = run
        self._cursors = cursors
        self._renews = on_rewind if on_rewind in ("new_run", "rewrite") else None
        self._story = story
        self._retold: Cursor | None = None  # what the story had
        self._keeps = keeps
        self._pauses = PAUSES if pauses is None else pauses
        self._queue_rows = queue_rows
        self._capabilities = capabilities_of(backend)
        self._store = store_for(backend, cursors)
        try:
            self._cursor, last = self._begin()
        except BaseException:
            backend.close()
            raise
        self._before = replace(self._cursor)
        self._withheld_before = numbered(self._cursor.withheld)
        self._last_before = last
        self._gate = Gate(self._capabilities.order, last_step=last, wait=wait)
        self._ready: deque[Row | Notice | Renewal] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._sent = self._held = self._dropped = self._failures = 0
        self._held_steps: set[int] = set()
        self._noted = 0
        self._off = False
        self._error: str | None = None
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"areal-metrics-{self.name}", daemon=True)
        self._thread.start()

    def tell(self, row: Row) -> bool:
        """Hand over the metrics of one commit, at once; False when the target cannot take all of them."""
        if self._keeps and self._has(row):
            self.skipped.add(row.step)
            return True
        with self._changed:
            if self._renews and not self._gate.takes(row):
                self._renew(row.step)
            before = self._gate.withheld
            self._enqueue(self._gate.put(row, time.monotonic()))
            taken = self._gate.withheld == before
            self._changed.notify()
        if not taken:
            self._say("withheld", f"step {row.step} comes too late or again: only the log has it")
        return taken

    def alert(self, notice: Notice) -> bool:
        """Hand over an alert, behind the rows that wait; False where the backend has none, or is off."""
        takes = callable(getattr(self._backend, "alert", None))
        with self._changed:
            if not takes or self._off or self._closing or len(self._ready) >= self._queue_rows:
                return False
            self._ready.append(notice)
            self._changed.notify()
        return True

    def hold(self, step: int) -> None:
        """Count a row that is not to be delivered because a newer attempt of the run has taken over."""
        with self._changed:
            self._held += 1
            self._held_steps.add(step)
        self._say("superseded", f"a newer attempt of the run exists, nothing is sent from step {step} on")

    def restored(self, step: int) -> None:
        """Take note that the run was restored after `step`: what comes at or below it is late."""
        if self._capabilities.rewinds:  # others hold on to what they have, and know their own last step
            with self._changed:
                self._gate.raise_floor(step)

    def status(self) -> Status:
        """Return how things stand."""
        with self._changed:
            return Status(
                backend=self.name,
                target=target_of(self._backend),
                sent=self._sent,
                withheld=self._gate.withheld + self._held,
                dropped=self._dropped,
                failures=self._failures,
                waiting=sum(isinstance(item, Row) for item in self._ready),
                off=self._off,
                error=self._error,
                withheld_steps=named(self._withheld_steps()),
            )

    @property
    def floor(self) -> int | None:
        """The step below which the target takes nothing any more; None while it takes everything."""
        with self._changed:
            return self._gate.floor

    @property
    def known(self) -> set[int]:
        """The attempts of which the target had acknowledged something before."""
        return set(self._before.acknowledged)

    def withheld(self) -> set[int]:
        """Return the steps of which something is withheld from the target, by this lifetime or another."""
        with self._changed:
            return self._withheld_before | (self._withheld_steps() - self.refused)

    def finish(self, *, discard: bool = False) -> None:
        """Close the open step and let the thread end after what is queued, or with `discard` right away."""
        with self._changed:
            if not self._closing:
                self._closing = True
                if discard:
                    self._ready.clear()
                else:
                    self._enqueue(self._gate.close())
                self._changed.notify()

    def join(self, timeout: float) -> bool:
        """Wait for the thread; False, after a warning, when it took longer than `timeout` seconds."""
        self._thread.join(max(0.0, timeout))
        if self._thread.is_alive():
            self._say("slow", f"did not finish in time, {self.status().waiting} steps are left to replay")
            self.failure = self.failure or TimeoutError("it did not finish in time")
            return False
        return True

    # -- on the caller's thread, under the lock ----------------------------------------------------

    def _begin(self) -> tuple[Cursor, int | None]:
        """Return the cursor and the highest step that the target holds and keeps."""
        new = Cursor(self.name, target_of(self._backend))
        if self._run.fresh:
            return new, None
        cursor = self._store.load(required=not self._capabilities.reads_back)
        if self._capabilities.rewinds and not self._keeps:
            cursor.last_step = None  # told anew from here on
            return cursor, None
        last = self._backend.last_step()
        if (
            self._capabilities.rewinds
        ):  # the cursor knows from where on: the target may hold what was taken back
            whole = cursor.last_step is not None and last is not None and last >= cursor.last_step
            return (cursor, cursor.last_step) if whole else (new, None)
        if last is None and not self._capabilities.reads_back:
            last = cursor.last_step
        if last is not None and self._capabilities.completes and cursor.last_step != last:
            last -= 1  # told without an acknowledgement: what of it is missing is taken now
        return (new if last is None else cursor), last

    def _renew(self, step: int) -> None:
        """Go on in a new run of the target, or go back in this one: once, lest there be one a late row."""
        whole, self._renews = self._renews == "rewrite", None
        self._enqueue(self._gate.close())
        self._ready.append(Renewal(step, whole))
        self._gate = Gate(self._gate.order, wait=self._gate.wait)

    def _has(self, row: Row) -> bool:
        """Whether the target had a row before, or could not take it then."""
        if row.step in self._withheld_before:
            return True
        if self._before.acknowledged:
            return self._before.knows(row)
        last = None if self._capabilities.order is Order.ANY else self._last_before
        return last is not None and row.step <= last

    def _withheld_steps(self) -> set[int]:
        return self._gate.withheld_steps | self._held_steps

    def _enqueue(self, rows: list[Row]) -> None:
        for row in rows:
            if self._off or len(self._ready) >= self._queue_rows:
                self._dropped += 1
            else:
                self._ready.append(row)
        if self._dropped and not self._off:
            self._say("full", "is slower than the training: steps are dropped, `replay` fills them in")

    def _say(self, what: str, message: str) -> None:
        """Warn, once for each kind of trouble; the counts are in `status()`."""
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s: %s", self.name, message)

    # -- on the delivery's own thread --------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, Notice):
                self._notify(item)
            elif isinstance(item, Renewal):
                self._begin_anew(item)
            else:
                self._deliver(item)
        if self._note_withheld():
            self._save()
        try:
            self._backend.close()
        except Exception as error:  # noqa: BLE001  (somebody else's code: whatever it raises, the training goes on)
            self._note(error)
            self.failure = self.failure or error
            self._say("close", f"closing failed: {error}")

    def _notify(self, notice: Notice) -> None:
        """Tell an alert, once: one that fails is counted, and stands in the log all the same."""
        backend: Any = self._backend
        try:
            backend.alert(*notice)
        except Exception as error:  # noqa: BLE001  (as above)
            self._note(error)
            self._say("alert", f"an alert failed: {error}")

    def _begin_anew(self, renewal: Renewal) -> None:
        """Open the target again: a fresh run of it, or what goes back; tell it the whole story, if asked."""
        back = renewal.whole and self._capabilities.rewinds
        continues = {"target": target_of(self._backend), "step": renewal.step}
        about = self._run if back else replace(self._run, fresh=True)
        if not (back or renewal.whole):
            about = replace(about, config={**about.config, "continues": continues})
        try:
            self._backend.close()
            self._backend.open(about)
            rows = self._story() if renewal.whole and self._story is not None else ()
        except Exception as error:  # noqa: BLE001  (as above)
            self._note(error)
            self.failure = error
            self._switch_off(Row(renewal.step, {}, 0.0))
            return
        self._store = store_for(self._backend, self._cursors)
        self._cursor = Cursor(self.name, target_of(self._backend))
        self._say(
            "rewind", f"step {renewal.step} comes too late or again: told to {target_of(self._backend)}"
        )
        for row in rows:
            if not self._off:
                self._deliver(row)
        self._retold = replace(self._cursor)

    def _is_retold(self, row: Row) -> bool:
        """Whether a row that waited is among what was read of the log meanwhile; a late one is withheld."""
        last = None if self._retold is None else self._retold.last_step
        if self._retold is None or last is None or row.step > last or self._gate.order is Order.ANY:
            return False
        if any(row.time > self._retold.acknowledged.get(attempt, -1.0) for attempt in row.commits):
            self._refused(row, errors.RewindError(f"expected a step above {last}"))
        return True

    def _next(self) -> Row | Notice | Renewal | None:
        """Return the next row or alert to deliver, waiting for it; None at the end."""
        with self._changed:
            while not self._ready:
                if self._closing:
                    return None
                now = time.monotonic()
                self._enqueue(self._gate.tick(now))
                if not self._ready:
                    due = self._gate.due()
                    self._changed.wait(None if due is None else max(0.0, due - now))
            return self._ready.popleft()

    def _deliver(self, row: Row) -> None:
        if self._is_retold(row):
            return None
        last: Exception | None = None
        for pause in (None, *self._pauses):
            if pause is not None:
                self._pause(pause)
                if self._arrived(row):
                    return self._acknowledged(row)
            try:
                tell(self._backend, row)
            except errors.RefusedError as error:
                return self._refused(row, error)
            except Exception as error:  # noqa: BLE001  (as above)
                self._note(error)
                last = error
                if isinstance(error, errors.BackendGoneError):
                    break
            else:
                return self._acknowledged(row)
        self.failure = last
        return self._switch_off(row)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=seconds)

    def _arrived(self, row: Row) -> bool:
        """Whether a call that raised got through all the same."""
        try:
            last = self._backend.last_step() if self._capabilities.reads_back else None
        except Exception:  # noqa: BLE001  (as above)
            return False
        return last is not None and last >= row.step and self._gate.order is not Order.ANY

    def _acknowledged(self, row: Row) -> None:
        with self._changed:
            self._sent += 1
        self._note_withheld()
        if not self._capabilities.histograms:
            self.untold += len(row.histograms)
        self._cursor.took(row)
        self._cursor.run_id = getattr(self._backend, "run_id", None)
        self._save()

    def _note_withheld(self) -> bool:
        """Put what is withheld by now into the cursor; whether it was not there before."""
        with self._changed:
            count = len(self._gate.withheld_steps) + len(self._held_steps)
            if count == self._noted:
                return False
            self._noted = count
            self._cursor.withhold(self._withheld_steps())
        return True

    def _save(self) -> None:
        try:
            self._store.save(self._cursor)
        except errors.RunDirectoryError as error:
            self._say("cursor", str(error))

    def _refused(self, row: Row, error: errors.RefusedError) -> None:
        with self._changed:
            self._held += 1
            self._held_steps.add(row.step)
            self.refused.add(row.step)
        self._say("withheld", f"step {row.step} was refused: withheld, the log has it ({error})")

    def _note(self, error: Exception) -> None:
        with self._changed:
            self._failures += 1
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _switch_off(self, row: Row) -> None:
        with self._changed:
            self._off = True
            self._dropped += 1 + sum(isinstance(item, Row) for item in self._ready)
            self._ready.clear()
        self._say("off", f"step {row.step} failed ({self._error}); switched off, `replay` fills the gap")
