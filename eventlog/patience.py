"""How long the disk is waited for: a bounded time in all, until it moves again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .writer import Writer


class Patience:
    """What a log waits for a writer, whose waits and losses it is that count."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._stuck_at: int | None = None  # the writer's progress when a wait for it was in vain
        self._spent = 0.0  # seconds of waiting in vain there
        self._lost = 0  # how often something of records or commits was lost, by the last question

    def wait(self, ticket: int, seconds: float) -> bool:
        """Whether, within so many seconds, all records and commits up to a ticket are written or lost.

        The seconds count from the first wait that was in vain since the writer got any further.
        """
        before = self._writer.progress
        spent = self._spent if self._stuck_at == before else 0.0
        left = max(0.0, seconds - spent)
        written = self._writer.wait(ticket, left)
        self._stuck_at = None if written else self._writer.progress
        self._spent = spent + left if self._stuck_at == before else left
        return written

    def why_not(self, ticket: int, seconds: float) -> str | None:
        """Return why not all since the last question, up to a ticket, is on the file; None when it is."""
        written = self.wait(ticket, seconds)
        before, self._lost = self._lost, self._writer.records_lost
        if written and before == self._lost:
            return None
        return "a loss" if written else "no answer yet"
