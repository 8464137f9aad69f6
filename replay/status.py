"""What a live delivery says of itself, and what waits in its queue beside the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Status:
    """How the live delivery to one backend stands; all counts are of steps, `withheld` of commits.

    sent:     acknowledged          withheld: the target can no longer take them (replay with a new run can)
    dropped:  not tried, because the queue was full or the backend off, or lost when it was closed; replay
              fills them in
    unconfirmed: of those sent, not known to have arrived, since closing did not end in time
    failures: tries that failed     error:    the first failure     off: switched off after repeated failures

    `withheld_steps` names the steps of what is withheld: "12-15, 20".
    """

    backend: str
    target: str
    sent: int
    withheld: int
    dropped: int
    failures: int
    waiting: int
    off: bool
    error: str | None
    withheld_steps: str = ""
    unconfirmed: int = 0


class Notice(NamedTuple):
    """An alert on its way to a backend that has alerts."""

    title: str
    text: str
    level: str  # info, warn or error
    step: int | None


class Renewal(NamedTuple):
    """The place among the rows where the target begins anew, because of a step that it could not take."""

    step: int
    whole: bool  # with everything from the log
