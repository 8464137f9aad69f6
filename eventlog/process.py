"""The one log of this process: started by hand or by the environment, ended by stop, exit, SIGTERM or fork.

`start` opens it, or the environment does at the first record: every argument of `start` has a variable,
AREAL_METRICS_DIR, AREAL_METRICS_ROLE, AREAL_METRICS_PAYLOAD, …; AREAL_METRICS_DISABLED=1 (or true, yes, on)
turns the log off. Where what the environment asks for cannot be started every record raises, until it can;
with AREAL_METRICS_ON_MISTAKE=warn the first one warns, and nothing is logged. With AREAL_METRICS_UNDER_RUN=1
(`areal-metrics run` that was not told where to record) a process with a log has those that it starts record
into the same run, and one that exports without a log warns of it.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from . import ending, warning
from .arrays import as_int, as_step
from .errors import ArealMetricsError, LogError
from .log import CLOSE_SECONDS, END_SECONDS, Log
from .options import ON_MISTAKE, Options, integer_of, lenient, switch_of, yes_or_no
from .overflow import ROOM, SECONDS
from .schema import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyarrow import RecordBatch

    from .options import Fsync

_current: Log | None = None
_after_fork: Options | None = None
_environment_read = False
_unlogged_said = False
_lock = threading.RLock()


def start(
    run_dir: str | os.PathLike[str],
    role: str = "main",
    rank: int | None = None,
    world_size: int | None = None,
    attempt: int | None = None,
    resume_step: int | None = None,
    resume: str = "allow",
    payload: str = "full",
    payload_budget: int | str | None = None,
    fsync: Fsync = False,
    spill_bytes: int | str = ROOM,
    spill_seconds: float = SECONDS,
) -> Log:
    """Start the log of this process in `run_dir`, which is created when it does not exist.

    `role` and `rank` name the producer (rank and world size from torch.distributed or RANK and WORLD_SIZE
    where not given); `attempt` and `resume_step` say what a restart is where the caller knows; `resume`
    must | never insists on an existing run or a new one; `payload` "full" keeps every selected value,
    "sample" (or "sample:N") at most 1024 (or N) of each record, "off" the moments alone; `payload_budget` is
    how many bytes of them this process keeps (5_000_000_000, "5GB"), the oldest go first; `fsync` False
    survives a killed process, "periodic" and "commit" a dead node. What is not exported for long leaves the
    memory: a tracker that holds more than `spill_bytes`, or anything for longer than `spill_seconds`, is
    written down in parts (0: never), which count when they are exported.
    """
    options = Options(
        os.fspath(run_dir) if isinstance(run_dir, os.PathLike) else run_dir,
        role,
        rank,
        world_size,
        None if attempt is None else as_int(attempt, "attempt"),
        None if resume_step is None else as_step(resume_step),
        resume,
        payload,
        payload_budget,
        fsync,
        spill_bytes,
        spill_seconds,
    )
    with _lock:
        if _current is not None:
            raise LogError(f"expected no started log, got one (stop it first): {_current.run.path}")
        return _install(Log(options))


def stop() -> None:
    """Write what is queued and end the log; without a started log nothing happens."""
    _stop("finished")


def _stop(outcome: str, detail: str = "") -> None:
    global _current
    with _lock:
        log, _current = _current, None
    if log is not None:
        if _UNDER_RUN in os.environ:
            os.environ.pop(_PREFIX + "DIR", None)
        _end(log, outcome, detail)


def _end(log: Log, outcome: str, detail: str) -> None:
    """End a log, in CLOSE_SECONDS all in all."""
    began = time.monotonic()
    try:
        log.overflow.leave()
        log.end(outcome, detail, END_SECONDS)
        log.overflow.leave_late(partial(_aside, log))
    finally:  # warnings may be errors
        log.close(CLOSE_SECONDS - (time.monotonic() - began))


def _aside(log: Log, work: Callable[[], None]) -> None:
    """Let the writer's thread do what may hang, behind all that is queued; wait END_SECONDS for both."""

    def done() -> list[RecordBatch]:
        work()
        return []

    until = time.monotonic() + END_SECONDS
    if log.writer.flush(END_SECONDS):
        log.writer.wait(log.writer.put(Stream.RECORDS, done, nbytes=0), until - time.monotonic())


def current(*, export: bool = False) -> Log | None:
    """Return the started log; the environment may start it here. None: nothing is logged.

    `export`: something is about to be exported. Under `areal-metrics run` it is warned of, once, that there
    is no log for it.
    """
    log = _current if _current is not None else _begun()
    if log is None and export and _UNDER_RUN in os.environ:
        _say_unlogged()
    return log


def _begun() -> Log | None:
    with _lock:
        if _current is None and _after_fork is not None:
            return _install(Log(_after_fork, warn_of_rivals=False))
        if _current is None and not _environment_read:
            return _start_from_environment()
        return _current


def _install(log: Log) -> Log:
    global _current, _after_fork
    _current, _after_fork = log, None
    if _UNDER_RUN in os.environ:
        os.environ[_PREFIX + "DIR"] = str(log.run.path)
    elsewhere = log.overflow.open()
    _chain_sigterm()
    ending.watch(_drain_at_exit)
    if elsewhere:
        _say_left(elsewhere)
    return log


def _say_left(values: dict[str, int]) -> None:
    """Warn of what was recorded for an export that its own log did not live to see."""
    keys = sorted(values)
    named = ", ".join(map(repr, keys[:5])) + (", …" if len(keys) > 5 else "")
    warning.warn(
        f"expected an export before the last log was stopped; {sum(values.values())} values of {named} were "
        "written down in it, in a window that stays incomplete: they count in no metric"
    )


def _say_unlogged() -> None:
    global _unlogged_said
    off = switch_of(_PREFIX + "DISABLED", os.environ.get(_PREFIX + "DISABLED", ""))
    if not _unlogged_said and not off:
        _unlogged_said = True
        warning.warn(
            "expected a log for what this process exports, got none: without --log-dir RUN_DIR "
            "`areal-metrics run` records processes with a StatsLogger and those they start after it"
        )


def _start_from_environment() -> Log | None:
    """Start what the environment asks for; where that fails, each record raises, or one warns of it."""
    global _environment_read
    try:
        log = _started_by_environment()
    except ArealMetricsError as error:
        if not lenient():
            raise
        log = None
        warning.warn(f"nothing is logged: {error} ({ON_MISTAKE}=warn)")
    _environment_read = True
    return log


def _started_by_environment() -> Log | None:
    env = {name: value for name in _VARIABLES if (value := os.environ.get(_PREFIX + name))}
    if switch_of(_PREFIX + "DISABLED", env.get("DISABLED", "")) or "DIR" not in env:
        return None
    texts = {name.lower(): env[name] for name in _TEXTS if name in env}
    numbers = {name.lower(): integer_of(_PREFIX + name, env[name]) for name in _INTEGERS if name in env}
    word = env.get("FSYNC", "no")
    fsync = False if yes_or_no(word) is False else word.lower()
    return start(env["DIR"], fsync=fsync, **texts, **numbers)  # pyright: ignore[reportArgumentType]


_PREFIX = "AREAL_METRICS_"
_UNDER_RUN = _PREFIX + "UNDER_RUN"
_INTEGERS = ("RANK", "WORLD_SIZE", "ATTEMPT", "RESUME_STEP", "SPILL_SECONDS")
_TEXTS = ("ROLE", "RESUME", "PAYLOAD", "PAYLOAD_BUDGET", "SPILL_BYTES")
_VARIABLES = ("DIR", "DISABLED", "FSYNC", *_TEXTS, *_INTEGERS)


def _drain_at_exit() -> None:
    log = _current
    if log is None or log.producer.pid != os.getpid():
        return
    _stop(*ending.outcome())


def _chain_sigterm() -> None:
    """Drain on SIGTERM, but only where nobody else handles it.

    Nor in children of `multiprocessing`: a pool ends those with it as they wait for a semaphore, and one that
    comes just before the wait is handled by nobody: the child would wait on, and the pool for the child.
    """
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        and not ending.is_of_multiprocessing()
    ):
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, _frame: object) -> None:
    log = _current
    if log is not None:
        _end(log, "signal", signal.Signals(number).name)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _forget_in_child() -> None:
    """After a fork: the parent's queue and files are the parent's; the child gets a session of its own."""
    global _current, _after_fork, _lock
    _lock = threading.RLock()
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        with suppress(ValueError):  # as it was; the child's own log decides anew
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _current is not None:
        _current.overflow.close()
        _current.writer.abandon()
        _after_fork, _current = _current.options, None


atexit.register(_drain_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
