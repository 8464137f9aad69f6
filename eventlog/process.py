"""The one log of this process: started by hand or by the environment, ended by stop, exit, SIGTERM or fork.

`start` opens it, or the environment does at the first record: every argument of `start` has a variable,
AREAL_METRICS_DIR, AREAL_METRICS_ROLE, AREAL_METRICS_PAYLOAD, …; AREAL_METRICS_DISABLED=1 (or true, yes, on)
turns the log off. Where what the environment asks for cannot be started every record raises, until it can;
with AREAL_METRICS_ON_MISTAKE=warn the first one warns, and nothing is logged.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import warnings
from typing import TYPE_CHECKING

from . import ending
from .arrays import as_step
from .errors import ArealMetricsError, LogError
from .log import CLOSE_SECONDS, END_SECONDS, Log
from .options import ON_MISTAKE, Options, integer_of, lenient, switch_of
from .overflow import ROOM, SECONDS

if TYPE_CHECKING:
    from .options import Fsync

_current: Log | None = None
_after_fork: Options | None = None
_environment_read = False
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
        None if attempt is None else as_step(attempt),
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
        _end(log, outcome, detail)


def _end(log: Log, outcome: str, detail: str) -> None:
    """End a log, in CLOSE_SECONDS all in all."""
    began = time.monotonic()
    log.end(outcome, detail, END_SECONDS)
    log.close(CLOSE_SECONDS - (time.monotonic() - began))


def current() -> Log | None:
    """Return the started log; the environment may start it here. None: nothing is logged."""
    if _current is not None:
        return _current
    with _lock:
        if _current is None and _after_fork is not None:
            return _install(Log(_after_fork, warn_of_rivals=False))
        if _current is None and not _environment_read:
            return _start_from_environment()
        return _current


def _install(log: Log) -> Log:
    global _current, _after_fork
    _current, _after_fork = log, None
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
    warnings.warn(
        f"expected an export before the last log was stopped; {sum(values.values())} values of {named} were "
        "written down in it, in a window that stays incomplete: they count in no metric",
        stacklevel=4,
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
        warnings.warn(f"nothing is logged: {error} ({ON_MISTAKE}=warn)", stacklevel=4)
    _environment_read = True
    return log


def _started_by_environment() -> Log | None:
    env = {name: value for name in _VARIABLES if (value := os.environ.get(_PREFIX + name))}
    if switch_of(_PREFIX + "DISABLED", env.get("DISABLED", "")) or "DIR" not in env:
        return None
    texts = {name.lower(): env[name] for name in _TEXTS if name in env}
    numbers = {name.lower(): integer_of(_PREFIX + name, env[name]) for name in _INTEGERS if name in env}
    fsync = {"": False, "0": False}.get(env.get("FSYNC", ""), env.get("FSYNC"))
    return start(env["DIR"], fsync=fsync, **texts, **numbers)  # pyright: ignore[reportArgumentType]


_PREFIX = "AREAL_METRICS_"
_INTEGERS = ("RANK", "WORLD_SIZE", "ATTEMPT", "RESUME_STEP", "SPILL_SECONDS")
_TEXTS = ("ROLE", "RESUME", "PAYLOAD", "PAYLOAD_BUDGET", "SPILL_BYTES")
_VARIABLES = ("DIR", "DISABLED", "FSYNC", *_TEXTS, *_INTEGERS)


def _drain_at_exit() -> None:
    log = _current
    if log is None or log.producer.pid != os.getpid():
        return
    _stop(*ending.outcome())


def _chain_sigterm() -> None:
    """Drain on SIGTERM, but only where nobody else handles it."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
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
    if _current is not None:
        _current.overflow.close()
        _current.writer.abandon()
        _after_fork, _current = _current.options, None


atexit.register(_drain_at_exit)
os.register_at_fork(after_in_child=_forget_in_child)
