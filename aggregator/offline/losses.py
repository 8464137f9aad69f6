"""What of a run's records and commits is known to be lost, with its steps: of the steps that still count."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from eventlog import losses as words
from eventlog import schema

from .placing import outdated, window_code, window_parts
from .reading import ints

if TYPE_CHECKING:
    from eventlog import Loss, Producer

    from .history import History

    Lost = tuple[Producer, Loss]

_LAST: Final = int(np.iinfo(np.int64).max)  # an attempt that none comes after


def losses(history: History) -> list[Lost]:
    """Return what the processes noted as lost, and what readers conclude, each with the step it was of.

    Without what a later attempt took back.
    """
    found = [(state.producer, loss) for state in history.reading.states for loss in state.losses]
    if not found:
        return []
    found = [(who, _bound(history, who, loss)) for who, loss in found]
    place = _Places(history).of
    places = np.array([place(who, loss) for who, loss in found], np.int64)
    gone = outdated(history.timeline, places[:, 0], places[:, 1])
    return [one for one, past in zip(found, gone.tolist(), strict=True) if not past]


def lost(history: History) -> list[str]:
    """Say what is lost of the records and commits that count, in a line a process."""
    streams = (schema.Stream.RECORDS, schema.Stream.COMMITS)
    return words.lines(words.concerning(losses(history), streams))


def _bound(history: History, who: Producer, loss: Loss) -> Loss:
    binding = history.timeline.windows.get((who.session, loss.window)) if loss.unbound else None
    return loss if binding is None else replace(loss, step=binding.step)


class _Places:
    """The attempt and step of losses; where they are not known such as nobody takes back."""

    def __init__(self, history: History) -> None:
        self._windows = history.timeline.windows
        self._attempts: dict[str, int] = {}  # the last of each process, by its windows
        for (session, _), binding in self._windows.items():
            self._attempts[session] = max(binding.attempt, self._attempts.get(session, 0))
        self._sids = {who.session: sid for sid, who in enumerate(history.reading.producers)}
        commits = history.commits
        numbers = ints(commits.table["commit"])
        self._codes = window_code(commits.sids, numbers)  # by session and number, in order
        self._of = commits.attempts, commits.steps

    def of(self, who: Producer, loss: Loss) -> tuple[int, int]:
        """Return those of a loss of some process."""
        if loss.stream is not schema.Stream.COMMITS:
            binding = self._windows.get((who.session, loss.window))
            return (_LAST, 0) if binding is None or loss.step is None else (binding.attempt, loss.step)
        before = self._before(self._sids[who.session], loss.window)
        if loss.step is not None:
            return before[0] if before else self._attempts.get(who.session, _LAST), loss.step
        return (before[0], before[1] + 1) if before else (_LAST, 0)  # one without a trace is behind the last

    def _before(self, sid: int, number: int) -> tuple[int, int] | None:
        """Return the attempt and step of the commit of a process before a lost one."""
        at = int(np.searchsorted(self._codes, window_code(sid, max(number, 0)))) - 1
        if at < 0 or window_parts(self._codes[at : at + 1])[0][0] != sid:
            return None
        return int(self._of[0][at]), int(self._of[1][at])
