"""How often to evaluate: advice by the size of the data set, and a pace that follows the metrics.

Evaluating rarely at first and often when nothing happens any more is what fixed intervals come to; the pace
does the opposite: shorter intervals while the metric moves, longer ones when it has settled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

from .. import collective
from .evaluator import Evaluator, EvaluatorConfig, FinetuneSpec

if TYPE_CHECKING:
    from collections.abc import Callable

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
    Where `total_steps` says how long the training is, never more often than every tenth of it, above 10 000
    samples every fifth: what is configured in steps is rounded up to that, and in epochs with
    `steps_per_epoch`.
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
        if epochs is not None and steps_per_epoch is not None:
            epochs = max(epochs, math.ceil(least / steps_per_epoch))
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
        if not 1 <= self.least <= self.most:
            raise errors.ConfigError(
                f"expected least and most with 1 <= least <= most, got {self.least} and {self.most}"
            )
        if not self.interval:
            object.__setattr__(self, "interval", self.least)

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
    used; epochs and seconds stay as configured). Rank 0's result decides for all ranks. The pace is part of
    the state.
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
        self.metric, self._group = metric, group
        self._take(pace)

    @property
    def interval(self) -> int:
        """Steps between two evaluations, as of now."""
        return self.pace.interval

    def evaluate(self, evaluate_fn: Callable[[], Any] | None, epoch: int, step: int, global_step: int) -> Any:
        """Evaluate if it is due, and adapt to what came out; see `Evaluator.evaluate`."""
        return self._adapted(super().evaluate(evaluate_fn, epoch, step, global_step))

    def before_train(self, evaluate_fn: Callable[[], Any] | None, *, global_step: int | None = None) -> Any:
        """Evaluate before the first update; see `Evaluator.before_train`."""
        return self._adapted(super().before_train(evaluate_fn, global_step=global_step))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON takes it."""
        return {**super().state_dict(), "pace": [self.pace.interval, self.pace.last]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state; the bounds stay those of the configuration."""
        super().load_state_dict(state_dict)
        if "pace" in state_dict:
            interval, last = state_dict["pace"]
            bounded = min(max(int(interval), self.pace.least), self.pace.most)
            self._take(replace(self.pace, interval=bounded, last=last))

    def _take(self, pace: Pace) -> None:
        self.pace = pace
        progress = self.freq_ctl.progress
        progress.schedule = replace(progress.schedule, steps=pace.interval)

    def _adapted(self, result: Any) -> Any:
        """Adapt to a result; None is none, on all ranks alike."""
        if result is None:
            return None
        value = result.get(self.metric) if isinstance(result, Mapping) else result
        group = collective.joined(self._group)[0]
        value = collective.tell(float(value) if isinstance(value, int | float) else None, group)[0]
        if value is not None:
            self._take(self.pace.after(value))
        return result
