"""How often to evaluate: advice by the size of the data set, and a pace that follows the metrics.

Evaluating rarely at first and often when nothing happens any more is what fixed intervals come to; the pace
does the opposite: shorter intervals while the metric moves, longer ones when it has settled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from eventlog import as_metric, as_step, errors

from .evaluator import Evaluator, EvaluatorConfig, FinetuneSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["AdaptiveEvaluator", "Pace", "advise_schedule"]

_SMALL, _MEDIUM = 10_000, 100_000  # samples
_OF_TRAINING: Final = 10  # at most so many evaluations of a training, where a data set is small
_OF_TRAINING_LARGE: Final = 5


def advise_schedule(
    n_samples: int, *, total_steps: int | None = None, steps_per_epoch: int | None = None
) -> EvaluatorConfig:
    """Return when to evaluate with so many samples.

    Under 10 000 every 100 steps; up to 100 000 every epoch and every 1000 steps; above that every epoch.
    Where `total_steps` says how long the training is, never more often than every tenth of it, from 10 000
    samples on every fifth: by one trigger alone, the rarer of the two. Epochs then need `steps_per_epoch`:
    an EvaluationError above 100 000 samples without it.
    """
    if n_samples < 1:
        raise errors.EvaluationError(f"expected 1 sample or more, got {n_samples}")
    if n_samples < _SMALL:
        steps, epochs, parts = 100, None, _OF_TRAINING
    elif n_samples <= _MEDIUM:
        steps, epochs, parts = 1000, 1, _OF_TRAINING_LARGE
    else:
        steps, epochs, parts = None, 1, _OF_TRAINING_LARGE
    if total_steps is not None:
        least = math.ceil(total_steps / parts)
        steps = None if steps is None else max(steps, least)
        if steps_per_epoch is not None and epochs is not None:
            epochs = max(epochs, math.ceil(least / steps_per_epoch))
            rarer = steps is None or epochs * steps_per_epoch > steps
            steps, epochs = (None, epochs) if rarer else (steps, None)
        elif steps is None:
            raise errors.EvaluationError(
                f"expected steps_per_epoch with total_steps for {n_samples} samples (by epochs), got none"
            )
        else:
            epochs = None
    return EvaluatorConfig(freq_steps=steps, freq_epochs=epochs)


@dataclass(frozen=True, slots=True)
class Pace:
    """An interval in steps that follows a metric; pure.

    With v the value and v' the one before, the metric's movement per evaluation is |v - v'| / max(|v'|,
    `scale`). Below `still` the interval doubles, above `moving` it halves, within [`least`, `most`] steps.
    """

    least: int
    most: int
    still: float = 0.01
    moving: float = 0.05
    scale: float = 0.1  # what counts as one unit of a metric near 0
    interval: int = 0
    last: float | None = None

    def __post_init__(self) -> None:
        whole = all(isinstance(each, Integral) for each in (self.least, self.most, self.interval))
        if not whole or not 1 <= self.least <= self.most:
            raise errors.ConfigError(
                "expected least and most as whole numbers with 1 <= least <= most, "
                f"got {self.least!r} and {self.most!r}"
            )
        if not 0 <= self.still <= self.moving or not 0 < self.scale < math.inf:
            raise errors.ConfigError(
                "expected 0 <= still <= moving, and a scale above 0, "
                f"got {self.still!r}, {self.moving!r} and {self.scale!r}"
            )
        if not self.interval:
            object.__setattr__(self, "interval", self.least)
        if not self.least <= self.interval <= self.most:
            raise errors.ConfigError(
                f"expected an interval within least and most, got {self.interval!r}, "
                f"not within {self.least} and {self.most}"
            )

    def after(self, value: float) -> Pace:
        """Return the pace after an evaluation; a value that is no number changes nothing."""
        if not math.isfinite(value):
            return self
        interval = self.interval
        if self.last is not None:
            movement = abs(value - self.last) / max(abs(self.last), self.scale)
            if movement < self.still:
                interval = min(self.most, 2 * interval)
            elif movement > self.moving:
                interval = max(self.least, interval // 2)
        return replace(self, interval=interval, last=value)


class AdaptiveEvaluator(Evaluator):
    """An evaluator whose steps follow a metric of what the evaluation returns.

        evaluator = AdaptiveEvaluator(config, ft_spec, metric="accuracy", pace=Pace(least=50, most=800))

    Evaluations fall on multiples of the interval in force: it starts at `pace.least` (`freq_steps` is not
    used; epochs and seconds stay as configured). What the evaluation returns is a number, or numbers by name;
    that of the first rank that returns one decides for all. An EvaluationError for results without the
    metric. The pace is part of the state.
    """

    def __init__(
        self,
        config: Any,
        ft_spec: FinetuneSpec,
        *,
        metric: str,
        pace: Pace,
        group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, ft_spec, group=group, **options)
        self.metric = metric
        self._take(pace)

    @property
    def interval(self) -> int:
        """Steps between two evaluations, as of now."""
        return self.pace.interval

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON takes it."""
        return {**super().state_dict(), "pace": [self.pace.interval, self.pace.last]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; the bounds stay those of the configuration."""
        pace = self._restored_pace(state_dict["pace"]) if "pace" in state_dict else self.pace
        super().load_state_dict(state_dict)
        self._take(pace)

    def _restored_pace(self, said: Any) -> Pace:
        try:
            interval, last = said
            bounded = min(max(as_step(interval), self.pace.least), self.pace.most)
            return replace(
                self.pace, interval=bounded, last=None if last is None else as_metric(last, "pace")
            )
        except (TypeError, ValueError) as error:
            raise errors.ConfigError(
                f"expected a pace as its interval and the last number, got {said!r:.80}"
            ) from error

    def _take(self, pace: Pace) -> None:
        self.pace = pace
        progress = self.freq_ctl.progress
        progress.schedule = replace(progress.schedule, steps=pace.interval)

    def _news(self, result: Any) -> Any:
        """Return this rank's number (None: no result), or a text that says what is wrong with it."""
        if result is None:
            return None
        value = result
        if isinstance(result, Mapping):
            if self.metric not in result:
                known = ", ".join(map(repr, sorted(map(str, result)))) or "none"
                return f"expected the metric {self.metric!r} among the results, got {known}"
            value = result[self.metric]
        try:
            return None if value is None else float(as_metric(value, self.metric))
        except errors.RecordingError:
            got = f"{type(value).__name__} {value!r:.80}"
            return f"expected a number for the metric {self.metric!r}, got {got}"

    def _heard(self, news: list[Any]) -> None:
        if wrong := [each for each in news if isinstance(each, str)]:
            raise errors.EvaluationError(wrong[0])
        if numbers := [each for each in news if each is not None]:
            self._take(self.pace.after(numbers[0]))
