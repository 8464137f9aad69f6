"""When to evaluate: the schedule, and where a run stands on it. Pure: the clock is given, nobody is asked.

Steps count finished updates (AReaL's `global_step + 1`), epochs finished epochs, both from the beginning of
the run: what is due does not depend on where a run was interrupted.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from eventlog import as_step, errors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Position:
    """How far a training is: finished epochs, finished updates."""

    epochs: int = 0
    updates: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every so many epochs, updates or seconds, whichever comes first; None switches a trigger off.

    A `start_epoch` above 1 moves the epochs: 2 with every second epoch means 2, 4, 6. Raises ConfigError for
    anything but positive numbers.
    """

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    start_epoch: int = 1

    def __post_init__(self) -> None:
        _check_whole("freq_epochs", self.epochs, least=1)
        _check_whole("freq_steps", self.steps, least=1)
        _check_whole("start_epoch", self.start_epoch, least=0)
        if self.seconds is not None and (not _is_number(self.seconds) or self.seconds <= 0):
            raise errors.ConfigError(f"expected freq_secs to be above 0 or None, got {self.seconds!r}")

    def due(self, previous: Position, current: Position, waited: float = 0.0) -> bool:
        """Whether an evaluation falls in (previous, current], `waited` seconds after the last one ended."""
        return (
            self._epoch_marks(current.epochs) > self._epoch_marks(previous.epochs)
            or self._step_marks(current.updates) > self._step_marks(previous.updates)
            or (self.seconds is not None and waited >= self.seconds)
        )

    def _step_marks(self, updates: int) -> int:
        return 0 if self.steps is None else updates // self.steps

    def _epoch_marks(self, epochs: int) -> int:
        if self.epochs is None:
            return 0
        first = self.start_epoch if self.start_epoch > 1 else self.epochs
        return 0 if epochs < first else (epochs - first) // self.epochs + 1


class Progress:
    """Where a run stands on its schedule.

    Seconds run while the process lives, from the end of the evaluation before: neither an evaluation's own
    duration nor the time between two attempts counts.
    """

    def __init__(self, schedule: Schedule, clock: Callable[[], float] = time.monotonic) -> None:
        self.schedule = schedule
        self.position = Position()  # all that was due up to here is dealt with
        self.evaluated: int | None = None  # finished updates at the last evaluation
        self.before_done = False  # the evaluation of the untouched model is done
        self._clock = clock
        self._since = clock()

    @property
    def waited(self) -> float:
        """Seconds since the last evaluation ended, or since the run began."""
        return self._clock() - self._since

    def due(self, at: Position) -> bool:
        """Whether an evaluation is due at `at`; asking changes nothing."""
        return self.schedule.due(self.position, at, self.waited)

    def advance(self, at: Position) -> None:
        """Note that what is due up to `at` is dealt with."""
        self.position = at

    def rewind(self, at: Position) -> None:
        """Go back to `at`, where a state is newer: what was due after it is due again."""
        if self.position.updates > at.updates:
            self.position, self.evaluated = at, None
            self.before_done &= at.updates > 0

    def restart(self) -> None:
        """Count the seconds from now: an evaluation has ended."""
        self._since = self._clock()

    # -- state -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON takes it. The schedule is no part of it: the configuration says that."""
        return {
            "epochs": self.position.epochs,
            "updates": self.position.updates,
            "evaluated": self.evaluated,
            "before_done": self.before_done,
            "waited": self.waited,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; AReaL's is taken too. Raises ConfigError for what is neither."""
        try:
            state = _from_areal(state_dict) if "step" in state_dict else dict(state_dict)
            position = Position(as_step(state["epochs"]), as_step(state["updates"]))
            evaluated = state["evaluated"]
            evaluated = None if evaluated is None else as_step(evaluated)
            before_done, waited = bool(state["before_done"]), float(state["waited"])
        except (KeyError, TypeError, ValueError) as error:
            raise errors.ConfigError(
                f"expected the state of an evaluator with {', '.join(self.state_dict())}, "
                f"got {type(error).__name__} {error} in {state_dict!r}"
            ) from error
        self.position, self.evaluated, self.before_done = position, evaluated, before_done
        self._since = self._clock() - (max(0.0, waited) if math.isfinite(waited) else 0.0)


def _from_areal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state of AReaL's three frequency controls.

    It holds the old frequencies, which are left alone (that of seconds under "frequence_seconds"), and times
    of a clock that went on between the attempts: only the interval up to the last check is of use.
    """
    epoch, step, seconds = state["epoch"], state["step"], state["time"]
    fired = seconds["last_steps"] == seconds["steps"]
    return {
        "epochs": max(epoch["steps"], state.get("epoch_count", 0)),  # it counts at one of the two places
        "updates": step["steps"],
        "evaluated": None,
        "before_done": not epoch.get("initial_value", False),
        "waited": 0.0 if fired else seconds.get("interval_seconds") or 0.0,
    }


def _check_whole(name: str, value: object, least: int) -> None:
    if value is not None and (not _is_number(value) or value != int(value) or value < least):
        raise errors.ConfigError(
            f"expected {name} to be a whole number of {least} or more or None, got {value!r}"
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
