"""Live delivery: one backend, one thread, one bounded queue. Nothing here ever stops or holds up a training.

Rows are delivered in order or not at all: one that fails is tried again, and after repeated failures the
backend is switched off, so that what it lacks is one gap at the end, which replay fills. A target that only
takes later steps gets nothing more once the queue overflows, for the same reason; and what a killed lifetime
did not get through to it is told from the log before anything new.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors, ranges

from .acknowledged import PLAIN
from .backends.base import Rewriter, capabilities_of, name_of, target_of, tell_surely, with_lineage
from .ledger import Ledger
from .status import Notice, Renewal, Status
from .steps import DEFAULT_WAIT, Gate, Order, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from .acknowledged import Telling
    from .backends.base import Backend, RunInfo

_log = logging.getLogger("areal_metrics.replay")

QUEUE_ROWS: Final = 1000
PAUSES: Final = (0.5, 2.0)  # seconds between the tries
_MOST_SAID: Final = 600  # characters: an adapter may quote a whole page


class Delivery:
    """Opens a backend at once, loudly; then tells it, on a thread of its own, what `tell` hands over.

    Rows that come faster than the backend takes them wait, at most `queue_rows` of them. With `keeps` the
    caller tells the run from its beginning: what the target has acknowledged is passed over. `on_rewind`
    "new_run" and "rewrite" are as in the config; `story` returns the run from a step on (None: the whole), a
    row a step: for the latter, and for what the target lacks when the run is resumed.
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
        story: Callable[[int | None], Iterable[Row]] | None = None,
        telling: Telling = PLAIN,
    ) -> None:
        self.name = name_of(backend)
        run = with_lineage(run, backend, cursors)
        backend.open(run)
        self.skipped: set[int] = set()
        self.refused: set[int] = set()
        self.failure: BaseException | None = None
        """Why not everything was told: what switched the backend off, or kept it from closing."""
        self.untold = 0  # histograms that the target cannot show
        self._backend = backend
        self._run = run
        self._renews = on_rewind if on_rewind in ("new_run", "rewrite") else None
        self._story = story
        self._retold: int | None = None  # the last step that the story had
        self._keeps = keeps
        self._pauses = PAUSES if pauses is None else pauses
        self._queue_rows = queue_rows
        self._capabilities = capabilities_of(backend)
        self._said: set[str] = set()
        try:
            self._ledger = Ledger(backend, run, cursors, self._say, keeps=keeps, telling=telling)
        except BaseException:
            backend.close()
            raise
        can, last = self._capabilities, self._ledger.last
        # A target for which a gap that is not at its end can never be filled.
        self._appends = can.order is not Order.ANY and not isinstance(backend, Rewriter)
        fills = (self._appends or can.rewinds) and can.lasts and not keeps
        self._fills = fills and self._ledger.told_before
        self._gate = Gate(can.order, last_step=last, wait=wait, bars=self._ledger.bars)
        self._ready: deque[Row | Notice | Renewal] = deque()
        self._changed = threading.Condition()
        self._closing = self._off = self._stopped = False
        self._sent = self._held = self._dropped = self._failures = self._unconfirmed = 0
        self._held_steps: set[int] = set()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"areal-metrics-{self.name}", daemon=True)
        self._thread.start()

    def tell(self, row: Row, *, late: bool = False) -> bool:
        """Hand over the metrics of one commit, at once; False when the target cannot take all of them.

        `late`: they were measured at an earlier step than the commit's, which is no reason to begin anew.
        """
        if self._keeps and self._was_refused(row.step):
            self.refused.add(row.step)
            return True
        if self._keeps and self._ledger.passes(row):
            self.skipped.add(row.step)
            return True
        with self._changed:
            if self._renews and not late and not self._gate.takes(row):
                self._renew(row.step)
            before = self._gate.withheld
            self._enqueue(self._gate.put(row, time.monotonic()))
            taken = self._gate.withheld == before
            if not taken:
                self._ledger.miss(row)
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
                withheld_steps=ranges(self._withheld_steps() | self.refused),
                unconfirmed=self._unconfirmed,
            )

    @property
    def floor(self) -> int | None:
        """The step below which the target takes nothing any more; None while it takes everything."""
        with self._changed:
            return self._gate.floor

    @property
    def known(self) -> set[int]:
        """The attempts of which the target had acknowledged something before."""
        return self._ledger.known

    def withheld(self) -> set[int]:
        """Return the steps of which something is withheld from the target."""
        with self._changed:
            return self._withheld_steps() - self.refused

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
            with self._changed:
                self._unconfirmed = self._sent
            unsure = f"; of {self._sent} that were sent none is confirmed" if self._sent else ""
            waiting = self.status().waiting
            self._say("slow", f"did not finish in time, {waiting} steps are left to replay{unsure}")
            self.failure = self.failure or TimeoutError("it did not finish in time")
            self._note(self.failure)
            return False
        return True

    # -- on the caller's thread, under the lock ----------------------------------------------------

    def _renew(self, step: int) -> None:
        """Go on in a new run of the target, or go back in this one: once, lest there be one a late row."""
        whole, self._renews = self._renews == "rewrite", None
        self._enqueue(self._gate.close())
        self._ready.append(Renewal(step, whole))
        self._gate = Gate(self._gate.order, wait=self._gate.wait)

    def _was_refused(self, step: int) -> bool:
        """Whether the target would not take a step, and is beyond it."""
        last = self._ledger.last
        return step in self._ledger.refused_before and last is not None and step <= last

    def _withheld_steps(self) -> set[int]:
        return self._gate.withheld_steps | self._held_steps

    def _enqueue(self, rows: list[Row]) -> None:
        for row in rows:
            if not (self._off or self._stopped) and len(self._ready) < self._queue_rows:
                self._ready.append(row)
                continue
            self._dropped += 1
            if not (self._off or self._stopped):
                self._overflow(row)

    def _overflow(self, row: Row) -> None:
        self._ledger.miss(row)
        self._stopped = self._appends
        then = f"nothing is sent from step {row.step} on" if self._appends else "steps are dropped"
        self._say("full", f"is slower than the training: {then}, `replay` fills them in")

    def _say(self, what: str, message: str) -> None:
        """Warn, once for each kind of trouble; the counts are in `status()`."""
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s: %s", self.name, shorten(message, _MOST_SAID))

    # -- on the delivery's own thread --------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._next()) is not None:
            if isinstance(item, Notice):
                self._notify(item)
            elif isinstance(item, Renewal):
                self._begin_anew(item)
            else:
                if self._fills:
                    self._fill(item)
                self._deliver(item)
        try:
            self._backend.close()
            self._ledger.close()
        except BaseException as error:  # noqa: BLE001  (somebody else's code, and the thread is ours)
            self._note(error)
            self.failure = self.failure or error
            left = self._ledger.take_back()
            with self._changed:
                self._sent, self._dropped = self._sent - left, self._dropped + left
            self._say("close", f"closing failed, {left} steps that were sent are left to replay: {error}")
        with self._changed:
            self._unconfirmed = 0

    def _fill(self, row: Row) -> None:
        """Tell from the log what the target lacks between its last step and the first of this lifetime.

        One that takes steps in any order may also lack some before its last: as many as waited for it.
        """
        any_order, last = self._gate.order is Order.ANY, self._ledger.reached
        since = 0 if last is None else last + 1
        self._fills = any_order and row.step < since  # a late row, or one that goes back: not yet
        if self._story is None or row.step <= since:
            return
        since = max(0, since - QUEUE_ROWS) if any_order else since
        try:
            before = [told for told in self._story(since) if told.step < row.step]
        except Exception as error:  # noqa: BLE001  (a log in whatever state)
            self._note(error)
            self._say("hole", f"what it lacks below step {row.step} cannot be read from the log: {error}")
            return
        lacking = self._ledger.lacking(before)
        if steps := ranges(told.step for told in lacking):
            _log.info("%s: did not get steps %s before: they are told from the log", self.name, steps)
        for told in lacking:
            self._deliver(told)

    def _notify(self, notice: Notice) -> None:
        """Tell an alert, once: one that fails is counted, and stands in the log all the same."""
        backend: Any = self._backend
        try:
            backend.alert(*notice)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._note(error)
            self._say("alert", f"an alert failed: {error}")

    def _begin_anew(self, renewal: Renewal) -> None:
        """Open the target again: a fresh run of it, or what goes back; tell it the whole story, if asked."""
        back = renewal.whole and self._capabilities.rewinds
        continues = {"target": target_of(self._backend), "step": renewal.step}
        about = self._run if back else replace(self._run, fresh=True)
        if not renewal.whole:
            about = replace(about, config={**about.config, "continues": continues})
        try:
            self._backend.close()
            self._backend.open(about)
            rows = self._story(None) if renewal.whole and self._story is not None else ()
            self._ledger.begin_anew(about, whole=renewal.whole)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._note(error)
            self.failure = error
            self._switch_off(Row(renewal.step, {}, 0.0))
            return
        self._fills = self._fills and not renewal.whole
        self._say(
            "rewind", f"step {renewal.step} comes too late or again: told to {target_of(self._backend)}"
        )
        for row in rows:
            self._ledger.finds(row)
            self._deliver(row)
        self._retold = self._ledger.last_step

    def _is_retold(self, row: Row) -> bool:
        """Whether a row that waited is among what was read of the log meanwhile; a late one is withheld."""
        if self._retold is None or row.step > self._retold or self._gate.order is Order.ANY:
            return False
        if not self._ledger.knows(row):
            self._refused(row, errors.RewindError(f"expected a step above {self._retold}"))
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
        if self._off:
            with self._changed:
                self._dropped += 1
            return None
        if self._is_retold(row):
            return None
        self._ledger.tries(row)
        options: Any = {"pause": self._pause, "passing": BaseException, "noted": self._note}
        try:
            tell_surely(self._backend, row, self._pauses, **options)
        except errors.RefusedError as error:
            return self._refused(row, error)
        except BaseException as error:  # noqa: BLE001  (as above)
            self.failure = error
            self._ledger.fail(row)
            return self._switch_off(row)
        return self._acknowledged(row)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=seconds)

    def _acknowledged(self, row: Row) -> None:
        with self._changed:
            self._sent += 1
        if not self._capabilities.histograms:
            self.untold += len(row.histograms)
        self._ledger.took(row)

    def _refused(self, row: Row, error: errors.RefusedError) -> None:
        late = isinstance(error, errors.RewindError)
        with self._changed:
            self._held += 1
            self.refused.add(row.step)
            if late:
                self._held_steps.add(row.step)
        self._ledger.refuse(row, late=late)
        self._say("withheld", f"step {row.step} was refused: withheld, the log has it ({error})")

    def _note(self, error: BaseException) -> None:
        with self._changed:
            self._failures += 1
            self._error = self._error or f"{type(error).__name__}: {error}"

    def _switch_off(self, row: Row) -> None:
        with self._changed:
            self._off = True
            self._dropped += 1 + sum(isinstance(item, Row) for item in self._ready)
            self._ready.clear()
        self._say("off", f"step {row.step} failed ({self._error}); switched off, `replay` fills the gap")
