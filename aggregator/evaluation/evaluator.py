"""The evaluator: calls the evaluation when the schedule says so, on all ranks alike; AReaL's by name."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import eventlog
from eventlog import as_step

from .. import collective, stats_tracker
from . import past
from .failure import Failure, ended, text_of
from .results import TRACKER
from .schedule import Position, Progress, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

T = TypeVar("T")

_log = logging.getLogger("areal_metrics.evaluation")


class FinetuneSpec(Protocol):
    """What is needed to know the end of an epoch; AReaL's class has the name."""

    steps_per_epoch: int


@dataclass
class EvaluatorConfig:
    """When to evaluate: every so many epochs, steps or seconds, whichever comes first; None: not by these.

    `eval_before_train` measures the untouched model too, as does `start_epoch: 0`; a `start_epoch` above 1
    is the first epoch after which it is measured. The names of the trial are AReaL's, and not needed here.
    """

    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    freq_epochs: int | None = None
    freq_steps: int | None = None
    freq_secs: float | None = None
    eval_before_train: bool = False
    start_epoch: int = 1


class EpochStepTimeFreqCtl:
    """Says, once per check, whether a trigger has gone off: epochs, steps or seconds, whichever comes first.

    With seconds, all ranks of `group` (of the default one if None) must check together: rank 0's clock
    decides. Without torch.distributed running, the process decides alone.
    """

    def __init__(
        self,
        freq_epoch: int | None,
        freq_step: int | None,
        freq_sec: float | None,
        initial_epoch_value: bool = False,
        group: ProcessGroup | None = None,
        *,
        start_epoch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = Progress(Schedule(freq_epoch, freq_step, freq_sec, start_epoch), clock)
        self.before = initial_epoch_value or start_epoch == 0  # the first check goes off
        self.group = group

    def check(self, epochs: int, steps: int) -> bool:
        """Count the epochs and steps finished since the last check; return whether a trigger has gone off.

        The seconds begin again here: call `reset_time` when what was triggered has ended.
        """
        progress = self.progress
        here = progress.position
        at = Position(here.epochs + epochs, here.updates + steps)
        due = self.decide(progress.due(at) or (self.before and not progress.before_done))
        progress.advance(at)
        progress.before_done = True
        if due:
            progress.evaluated = at.updates
            progress.restart()
        return due

    def decide(self, due: bool, *, together: bool = False) -> bool:
        """Return rank 0's decision; `together` asks for it where no clock is involved, too."""
        if self.progress.schedule.seconds is None and not together:
            return due
        group, _, at = collective.joined(self.group)
        return due if group is None else collective.agree(due and at == 0, group)

    def reset_time(self) -> None:
        """Count the seconds from now."""
        self.progress.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON takes it."""
        return self.progress.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, ours or AReaL's; the frequencies stay those of the configuration."""
        self.progress.load_state_dict(state_dict)


class Evaluator:
    """Calls the evaluation at the right moments of a run; AReaL's Evaluator by name and signature.

        evaluator = Evaluator(config.evaluator, ft_spec)
        evaluator.before_train(evaluate)
        for global_step in ...:
            train(...)
            evaluator.evaluate(evaluate, epoch, step, global_step)
            logger.commit(epoch, step, global_step, stats)

    `config` is an EvaluatorConfig or anything with those names. All ranks call the same methods. With
    torch.distributed running, rank 0 (of `group`, if given) decides for all where seconds are configured,
    before training, and at the first check after a resume; and all tell each other how an evaluation went:
    one that failed on any rank is an error on all, and due again at the next check. Where a log is started it
    remembers which evaluations were committed: a resumed run repeats none of them and makes up for the one
    that was lost. Evaluators on schedules of their own have names of their own: what they record into the
    `eval-rollout` tracker begins with that name.
    """

    def __init__(
        self,
        config: Any,
        ft_spec: FinetuneSpec,
        *,
        name: str = "",
        group: ProcessGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.ft_spec = ft_spec
        self.name = name
        start_epoch = _get(config, "start_epoch")
        self.freq_ctl = EpochStepTimeFreqCtl(
            _get(config, "freq_epochs"),
            _get(config, "freq_steps"),
            _get(config, "freq_secs"),
            bool(_get(config, "eval_before_train")),
            group,
            start_epoch=1 if start_epoch is None else start_epoch,
            clock=clock,
        )
        self._progress = self.freq_ctl.progress
        self._past: past.Past | None = None
        self._claimed: int | None = None  # the last evaluation, as a restored state says
        self._restored = self._checked = self._asked_before = self._said = False

    def before_train(
        self, evaluate_fn: Callable[[], T] | None, *, global_step: int | None = None
    ) -> T | None:
        """Evaluate before the first update, once per run; after a resume, make up for what was lost.

        `global_step` is that of the checkpoint's last update (-1: none); by default as the restored state
        says, and without one the run starts over. The commit of the first step holds the result, tagged
        "before": a run that starts over commits it anew, and so evaluates anew. Where another evaluation may
        be due by then, what this one records begins with `before/`. Returns what `evaluate_fn` returned.
        """
        progress = self._progress
        updates = progress.position.updates if global_step is None else _updates(global_step)
        progress.rewind(Position(updates // self.ft_spec.steps_per_epoch, updates))
        owed = self._recall(updates)
        if updates:
            epochs = max(progress.position.epochs, updates // self.ft_spec.steps_per_epoch)
            at = Position(epochs, updates)
            due = owed or progress.due(at)
        else:
            at = Position()
            due = self.freq_ctl.before and (owed or not progress.before_done)
        together = bool(updates) or self.freq_ctl.before  # else nothing can be due on any rank
        result = self._measure(evaluate_fn, at, self.freq_ctl.decide(due, together=together))
        self._asked_before = True
        return result

    def evaluate(
        self, evaluate_fn: Callable[[], T] | None, epoch: int, step: int, global_step: int
    ) -> T | None:
        """Evaluate if an evaluation has become due since the last call; call it after every update.

        The three counts are zero-based and of the update just finished, `step` within its epoch. Returns
        what `evaluate_fn` returned, or None. None for `evaluate_fn` skips, and says so once.
        """
        epochs = as_step(epoch) + (as_step(step) >= self.ft_spec.steps_per_epoch - 1)
        at = Position(epochs, as_step(global_step) + 1)
        resumed = not self._checked and (self._restored or at.updates > 1)
        if resumed:
            self._progress.rewind(Position(as_step(epoch), at.updates - 1))
        owed = self._recall(at.updates - 1) if resumed else False
        due = owed or self._first_of_run(at) or self._progress.due(at)
        result = self._measure(evaluate_fn, at, self.freq_ctl.decide(due, together=resumed))
        self._checked = True
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON takes it."""
        return self.freq_ctl.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint, ours or AReaL's, on every rank; the configuration wins."""
        self.freq_ctl.load_state_dict(state_dict)
        self._restored, self._checked, self._past = True, False, None
        self._claimed = self._progress.evaluated

    def _first_of_run(self, at: Position) -> bool:
        """Whether the first check stands in for the evaluation before training, as in AReaL's loop."""
        progress = self._progress
        if self._checked or self._asked_before or progress.before_done or not self.freq_ctl.before:
            return False
        if self._restored:
            return progress.position.updates == 0
        return at.updates == 1 or self._past is None or not self._past.known

    def _measure(self, evaluate_fn: Callable[[], T] | None, at: Position, due: bool) -> T | None:
        progress = self._progress
        if not due:
            progress.advance(at)
            return None
        result, evaluated = self._together(evaluate_fn, at)
        progress.advance(at)
        if not evaluated:
            return None
        progress.restart()
        progress.evaluated, self._claimed = at.updates, None
        progress.before_done = True  # or it is too late for it
        log = eventlog.current()
        if log is not None:
            log.note(past.tags(self.name, at.updates))
        return result

    def _together(self, evaluate_fn: Callable[[], T] | None, at: Position) -> tuple[T | None, bool]:
        """Evaluate, and return whether any rank did; raise on all what goes wrong on one.

        Those without a function only listen: for them it has been evaluated, too.
        """
        result, news, failure = None, None, Failure()
        if evaluate_fn is None:
            self._say_skipped()
        else:
            scope = "/".join(filter(None, (self.name.strip("/"), "before" if self._apart(at) else "")))
            tracker = stats_tracker.get(TRACKER)
            with failure.kept():
                with tracker.scope(scope) if scope else nullcontext():
                    result = ended(evaluate_fn())
                news = self._news(result)
        acting, members, _ = collective.joined(self.freq_ctl.group)
        told = collective.tell((failure.text, news, evaluate_fn is not None), acting)
        failure.raise_together([text for text, *_ in told], members)
        self._heard([each for _, each, _ in told])
        return result, any(there for *_, there in told)

    def _news(self, result: Any) -> Any:
        """Return what to tell the peers of a result."""

    def _heard(self, news: list[Any]) -> None:
        """Take what the ranks told of their results."""

    def _apart(self, at: Position) -> bool:
        """Whether the untouched model is measured, and another evaluation may get into the same commit."""
        first = Position(int(self.ft_spec.steps_per_epoch == 1), 1)
        schedule = self._progress.schedule
        return not at.updates and (schedule.seconds is not None or schedule.due(Position(), first))

    def _say_skipped(self) -> None:
        if not self._said:
            self._said = True
            _log.warning("evaluation is skipped: it was due, and there is nothing to evaluate with")

    def _recall(self, updates: int) -> bool:
        """Correct the progress by what the log says up to `updates`; return whether an evaluation was lost.

        Only rank 0 looks: it decides for all.
        """
        if self._past is None:
            self._past = self._look_back()
        if updates and (log := eventlog.current()) is not None:
            log.note(past.resumed(self.name, updates))
        complete = self._past.standing(updates)
        progress = self._progress
        progress.before_done |= bool(complete)
        newest = max(complete, default=0)
        if newest > progress.position.updates:
            progress.advance(Position(max(progress.position.epochs, complete[newest]), newest))
            progress.restart()
        claimed = self._claimed
        return claimed is not None and claimed <= updates and self._past.lost(claimed, updates)

    def _look_back(self) -> past.Past:
        log = eventlog.current() if collective.joined(self.freq_ctl.group)[2] == 0 else None
        if log is None:
            return past.Past()
        try:
            return past.recall(log, self.name, self.ft_spec.steps_per_epoch)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's decision
            _log.warning("the log's past evaluations cannot be read (%s): %s", text_of(error), log.run.path)
            return past.Past()


def _updates(global_step: int) -> int:
    return 0 if global_step == -1 else as_step(global_step) + 1


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
