"""`StatsLogger`: what was exported since the last commit becomes a step, in the log, then in the trackers."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import eventlog
from eventlog import Log, as_step, errors, redact_sensitive_config

from .backends import configured
from .backends.base import RunInfo, check_backends
from .config import MISSING, StatsLoggerConfig, entry, log_root, resolve
from .console import say, tabulate_stats
from .delivery import Delivery
from .metrics import flatten, without_counts
from .player import story_of
from .status import Notice
from .steps import Row
from .turn import Turn
from .version import version_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from .backends.base import Backend
    from .status import Status

CLOSE_SECONDS: Final = 30.0
"""How long `close` waits for the backends, all together."""

_console = logging.getLogger("areal_metrics.stats")
_trials: WeakKeyDictionary[Log, tuple[str, str]] = WeakKeyDictionary()


class _Part(NamedTuple):
    """Metrics of a commit, when that was made, and its turn (Unix seconds)."""

    metrics: dict[str, float]
    seconds: float
    turn: float


class FinetuneSpec(Protocol):
    """What is needed to say how far a training is; AReaL's class has these names, a mapping may."""

    total_train_epochs: int
    steps_per_epoch: int
    total_train_steps: int


class StatsLogger:
    """The committing end of a run, opened on every rank of the training.

    `config` is an experiment's config with a `.stats_logger`, or a bare StatsLoggerConfig; `ft_spec` says how
    long the training is. The log is the one that `eventlog.start` started; without one it is started here,
    under the config's log root or in `run` (a directory, or a Log). Rank 0 is the leader: it claims the
    attempt, tells the configured backends and those in `backends`, and prints. The others note their commits.

    Raises ConfigError and BackendError for a configured backend that does not work, before anything is
    claimed where that can be known; LogError when the log of this process belongs to another trial.
    """

    def __init__(
        self,
        config: Any,
        ft_spec: FinetuneSpec | Mapping[str, Any] | None = None,
        *,
        backends: Sequence[Backend] = (),
        run: str | os.PathLike[str] | Log | None = None,
    ) -> None:
        self.config = resolve(config)
        check_backends(backends)
        _check_spec(ft_spec)
        self.ft_spec = ft_spec
        told = [*configured(self.config), *backends]
        self._log, self._owns_log = _log_for(self.config, run)
        self._last_commit_step = -1
        self._restored_step: int | None = None
        self._closed = False
        self._untold: dict[int, list[_Part]] = {}  # by step: what was measured at later ones waits
        self._turn = Turn()
        self._process = os.getpid()
        self._deliveries: list[Delivery] = []
        self.leader = _rank(self._log) == 0
        if self.leader:
            self._lead(redact_sensitive_config(config), told)

    # -- committing --------------------------------------------------------------------------------

    def commit(self, epoch: int, step: int, global_step: int, data: Any) -> bool:
        """Make what was exported since the last commit step `global_step`; return whether that is durable.

        `data` is a dict of numbers, nested ones joined with "/", or a list of dicts, which stay one step and
        are told apart by their position. All three counts are zero-based; `step` counts within the epoch.
        The log has everything when this returns (see `Log.commit`); backends are told in the background.

        StepError for a step that is none, RecordingError for names that collide, RecordingTypeError for a
        value that is no number, LogError after closing: then nothing is committed. RewindError with
        `on_rewind: error` when a backend can no longer take the step: the log has it all the same.
        """
        at = as_step(epoch), as_step(step), as_step(global_step)
        if self._closed:
            raise errors.LogError(f"expected an open logger, got a commit of step {at[2]} after close")
        parts = data if isinstance(data, (list, tuple)) else [data]
        rows = [flatten(part) for part in parts] if self.leader else []
        began = eventlog.now_us()
        placed = self._log.placement.of(at[2], rows)
        durable = self._log.commit(*at, rows, time_us=began, restored_step=self._restored_step)
        self._last_commit_step = max(self._last_commit_step, at[2])
        if self.leader:
            stamp = began / 1e6, self._turn.of(began) / 1e6
            self._announce(*at, [without_counts(row) for row in rows])
            for each, those in placed.items():
                shown = [without_counts(row) for row in those if row or each == at[2]]
                self._untold.setdefault(each, []).extend(_Part(row, *stamp) for row in shown)
            self._tell_up_to(at[2])
        return durable

    def alert(self, title: str, text: str = "", level: str = "warn", step: int | None = None) -> None:
        """Tell the backends that have alerts, on rank 0; `level` is info, warn or error. Never waits."""
        if level not in ("info", "warn", "error"):
            raise errors.ConfigError(f"expected an alert's level to be info, warn or error, got {level!r}")
        for delivery in self._deliveries:
            delivery.alert(Notice(title, text, level, step))

    def state_dict(self) -> dict[str, int]:
        """Return `last_commit_step`: the resumed run's steps are above it (-1: nothing was committed)."""
        return {"last_commit_step": self._last_commit_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of the checkpoint this run resumes from; call it before the first commit.

        StepError for a state that `state_dict` cannot have returned.
        """
        restored = _restored(state_dict)
        self._last_commit_step = restored
        self._restored_step = None if restored < 0 else restored
        if self._restored_step is not None:
            for delivery in self._deliveries:
                delivery.restored(self._restored_step)

    def status(self) -> list[Status]:
        """Return how the delivery to each backend stands; empty on ranks other than 0."""
        return [delivery.status() for delivery in self._deliveries]

    @staticmethod
    def get_log_path(config: Any) -> str:
        """Return the log root of a config, created if need be; RunDirectoryError where it cannot be."""
        root = log_root(resolve(config))
        _create(root)
        return str(root)

    def print_stats(self, stats: Mapping[str, float]) -> None:
        """Show a table of metrics: in Python's logging where INFO is switched on, else on standard output."""
        _show(tabulate_stats(stats))

    # -- the end -----------------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Finish every backend within `timeout` seconds, then the attempt; may be called twice."""
        self._close("finished", "", timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in {None, 0}):
            self.close()
        else:
            self._close("exception", f"{type(error).__name__}: {error}", CLOSE_SECONDS)

    def _close(self, outcome: str, detail: str, timeout: float) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        self._tell_up_to(max(self._untold, default=-1))
        self._finish_backends(timeout)
        self._log.end(outcome, detail)
        if self._owns_log:
            _stop(self._log)

    def _finish_backends(self, timeout: float = CLOSE_SECONDS) -> None:
        if os.getpid() != self._process:
            return
        atexit.unregister(self._finish_backends)
        deadline = time.monotonic() + timeout
        superseded = bool(self._deliveries) and self._log.superseded()
        for delivery in self._deliveries:
            delivery.finish(discard=superseded)
        for delivery in self._deliveries:
            delivery.join(deadline - time.monotonic())

    # -- the leader --------------------------------------------------------------------------------

    def _lead(self, config: Any, backends: Sequence[Backend]) -> None:
        version = version_info().as_dict()
        claims = not self._log.leader
        if claims:
            self._log.claim_attempt(config=config, version_info=version)
        attempts = self._log.run.attempts()
        about = RunInfo(
            id=self._log.run.id,
            experiment=self.config.experiment_name,
            trial=self.config.trial_name,
            path=self._log.run.path,
            config=config,
            version_info=version,
            attempt=self._log.attempt,
            started=(attempts[0].started_us if attempts else eventlog.now_us()) / 1e6,
        )
        try:
            for backend in backends:
                self._deliveries.append(
                    Delivery(
                        backend,
                        about,
                        about.path / "cursors",
                        on_rewind=self.config.on_rewind,
                        story=partial(story_of, about.path),
                    )
                )
        except BaseException as error:
            if claims:
                self._close("exception", f"{type(error).__name__}: {error}", CLOSE_SECONDS)
            else:  # the attempt is somebody else's, who goes on
                self._closed = True
                self._finish_backends()
            raise
        atexit.register(self._finish_backends)

    def _tell_up_to(self, step: int) -> None:
        """Tell the backends what was committed of the steps up to one, the earliest first."""
        for at in sorted(each for each in self._untold if each <= step):
            self._tell(at, self._untold.pop(at), late=at < step)

    def _tell(self, step: int, parts: list[_Part], *, late: bool) -> None:
        if self._deliveries and self._log.superseded():
            for delivery in self._deliveries:
                delivery.hold(step)
            return
        attempt = -1 if self._log.attempt is None else self._log.attempt
        behind: dict[str, None] = {}
        for delivery in self._deliveries:
            for metrics, seconds, turn in parts:
                if not delivery.tell(Row(step, metrics, seconds, {attempt: turn}), late=late):
                    behind[delivery.name] = None
        if behind and not late and self.config.on_rewind == "error":
            raise errors.RewindError(
                f"expected a step that {', '.join(behind)} can still take, got {step}; the log has it"
            )

    def _announce(self, epoch: int, step: int, global_step: int, rows: list[dict[str, float]]) -> None:
        spec = self.ft_spec
        _show(
            f"Epoch {epoch + 1}/{_of(spec, 'total_train_epochs')} "
            f"Step {step + 1}/{_of(spec, 'steps_per_epoch')} "
            f"Train step {global_step + 1}/{_of(spec, 'total_train_steps')} done"
        )
        for number, row in enumerate(rows):
            if len(rows) > 1:
                _show(f"Stats ({number + 1}/{len(rows)}):")
            self.print_stats(row)


# -- what is handed in -----------------------------------------------------------------------------


def _check_spec(spec: Any) -> None:
    names = FinetuneSpec.__annotations__
    missing = [name for name in names if entry(spec, name, MISSING) is MISSING]
    if spec is not None and missing:
        raise errors.ConfigError(
            f"expected ft_spec with {', '.join(names)}, got {spec!r} without {', '.join(missing)}"
        )


def _restored(state: Any) -> int:
    """Return the step of a `state_dict`."""
    with contextlib.suppress(KeyError, TypeError, errors.StepError):
        step = state["last_commit_step"]
        return -1 if isinstance(step, int) and step == -1 else as_step(step)
    raise errors.StepError(f'expected {{"last_commit_step": int ≥ -1}}, got {state!r}')


# -- the log, and where this process stands --------------------------------------------------------


def _log_for(config: StatsLoggerConfig, run: str | os.PathLike[str] | Log | None) -> tuple[Log, bool]:
    """Return the log to use, and whether it was started here."""
    log, owns = _find_log(config, run)
    trial = (config.experiment_name, config.trial_name)
    known = _trials.setdefault(log, trial)
    if known != trial:
        raise errors.LogError(
            f"expected trial {'/'.join(known)}, whose log this process has, got {'/'.join(trial)}: "
            f"pass run= for a second one: {log.run.path}"
        )
    return log, owns


def _find_log(config: StatsLoggerConfig, run: str | os.PathLike[str] | Log | None) -> tuple[Log, bool]:
    if isinstance(run, Log):
        return run, False
    started = eventlog.current()
    if run is None:
        return (started, False) if started is not None else (_start_in(log_root(config)), True)
    if started is None:
        return eventlog.start(run), True
    if Path(run).resolve() == Path(started.run.path).resolve():
        return started, False
    return Log(eventlog.Options(os.fspath(run), role=started.options.role, rank=started.producer.rank)), True


def _start_in(root: Path) -> Log:
    # AReaL's launcher writes its own logs there before we come; this marks the directory as a run.
    _create(root / "events")
    return eventlog.start(root)


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.RunDirectoryError(
            f"expected stats_logger.fileroot where directories can be made, got {error.strerror}: {folder}"
        ) from error


def _stop(log: Log) -> None:
    if log is eventlog.current():
        eventlog.stop()
    else:
        log.close()


def _rank(log: Log) -> int:
    """Return the rank in torch.distributed if that runs now, else the one the log was started with."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return log.producer.rank


# -- the console -----------------------------------------------------------------------------------


def _of(spec: FinetuneSpec | Mapping[str, Any] | None, name: str) -> Any:
    return entry(spec, name, "?")


def _show(text: str) -> None:
    if _console.isEnabledFor(logging.INFO) and _console.hasHandlers():
        _console.info("%s", text if "\n" not in text else f"\n{text}")
    else:
        say(text)
