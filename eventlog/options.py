"""How a log is started: its options, checked; the run they name; which process of which world this is."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import uuid
from dataclasses import dataclass
from typing import Final, Literal

from .arrays import as_int
from .attempt import LARGEST_NUMBER, check_number
from .budget import as_bytes
from .clock import now_us
from .errors import LogError
from .overflow import ROOM, SECONDS
from .rundir import Producer, RunDir, check_role
from .sampling import size_of

Fsync = Literal[False, "periodic", "commit"]
ON_MISTAKE: Final = "AREAL_METRICS_ON_MISTAKE"
_ENDLESS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Options:
    """How a log was started; see `start`."""

    run_dir: str
    role: str = "main"
    rank: int | None = None
    world_size: int | None = None
    attempt: int | None = None
    resume_step: int | None = None
    resume: str = "allow"
    payload: str = "full"
    payload_budget: int | str | None = None
    fsync: Fsync = False
    spill_bytes: int | str = ROOM
    spill_seconds: float = SECONDS

    def check(self) -> None:
        """Raise LogError (for a rank or world size RecordingError) for an option that is none."""
        if not isinstance(self.run_dir, str) or not self.run_dir or "\0" in self.run_dir:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LogError(f"expected a run directory, got {self.run_dir!r}")
        check_role(self.role)
        if self.attempt is not None:
            check_number(self.attempt, "an attempt")
        if self.resume not in ("allow", "must", "never"):
            raise LogError(f"expected resume to be allow, must or never, got {self.resume!r}")
        if self.fsync not in (False, "periodic", "commit"):
            raise LogError(f"expected fsync to be False, 'periodic' or 'commit', got {self.fsync!r}")
        if not isinstance(self.spill_seconds, (int, float)) or not 0 <= self.spill_seconds < _ENDLESS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LogError(f"expected spill_seconds of 0 (never) or more, got {self.spill_seconds!r}")
        # These raise.
        _ = self.sample_size, self.budget, self.spill_size, place_in_world(self.rank, self.world_size)

    @property
    def sample_size(self) -> int | None:
        """How many values of a record are kept: None for all."""
        return size_of(self.payload if isinstance(self.payload, str) else repr(self.payload))  # pyright: ignore[reportUnnecessaryIsInstance]

    @property
    def budget(self) -> int | None:
        """The payload budget in bytes."""
        return None if self.payload_budget is None else as_bytes(self.payload_budget)

    @property
    def spill_size(self) -> int:
        """How many bytes of a window are held in memory; 0: all."""
        return as_bytes(self.spill_bytes, "spill_bytes", least=0)


def open_run(options: Options) -> RunDir:
    """Open, join or create the run; LogError for options that are none."""
    options.check()
    if options.resume == "must":
        return RunDir.open(options.run_dir)
    run = RunDir.create(options.run_dir)
    if options.resume == "never" and run.attempts():
        raise LogError(f"expected no earlier attempt (resume='never'), got {len(run.attempts())}: {run.path}")
    return run


def this_process(options: Options, run: RunDir) -> Producer:
    """Name this process as a producer of the run, with a session of its own."""
    rank, world_size = place_in_world(options.rank, options.world_size)
    session = uuid.uuid4().hex
    return Producer(
        run=run.id,
        session=session,
        role=options.role,
        rank=rank,
        world=_world(options.role, world_size) if world_size > 1 else session,
        world_size=world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_us=now_us(),
    )


def place_in_world(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world size): given, of torch.distributed, RANK and WORLD_SIZE, else (0, 1).

    LogError for a world without a place, a rank outside it, or a variable that is no number.
    """
    if rank is not None:
        rank = check_number(as_int(rank, "rank"), "a rank")
        if world_size is None:
            return rank, 1
        return _placed(rank, as_int(world_size, "world_size"), "rank", "world_size")
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank = integer_of("RANK", os.environ.get("RANK") or "0")
    given = os.environ.get("WORLD_SIZE")
    if not given:
        return check_number(rank, "RANK"), 1
    return _placed(rank, integer_of("WORLD_SIZE", given), "RANK", "WORLD_SIZE")


def _placed(rank: int, world_size: int, *names: str) -> tuple[int, int]:
    if not 1 <= world_size <= LARGEST_NUMBER:
        raise LogError(f"expected {names[1]} of 1 to {LARGEST_NUMBER}, got {world_size}")
    if world_size > 1 and not 0 <= rank < world_size:  # of workers without a world each is one of its own
        raise LogError(f"expected {names[0]} from 0 to below {names[1]} {world_size}, got {rank}")
    return check_number(rank, names[0]), world_size


def integer_of(variable: str, text: str) -> int:
    """Return the number an environment variable holds; LogError when it holds none."""
    try:
        return int(text)
    except ValueError:
        raise LogError(f"expected {variable} to be an integer, got {text!r}") from None


def switch_of(variable: str, text: str) -> bool:
    """Return whether an environment variable says yes; LogError when it says neither yes nor no."""
    said = yes_or_no(text) if text.strip() else False
    if said is None:
        raise LogError(f"expected {variable} to be 1, true, yes or on, or 0, false, no or off, got {text!r}")
    return said


def yes_or_no(text: str) -> bool | None:
    """Return what a word for yes or no says, in whatever case; None for any other."""
    return _WORDS.get(text.strip().lower())


_WORDS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def lenient() -> bool:
    """Whether mistakes are warned of; LogError where the variable says neither raise nor warn."""
    word = os.environ.get(ON_MISTAKE) or "raise"
    if word not in ("raise", "warn"):
        raise LogError(f"expected {ON_MISTAKE} to be raise or warn, got {word!r}")
    return word == "warn"


def _world(role: str, world_size: int) -> str:
    """Name the world of ranks this process was launched in, alike in all of them."""
    launch = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    if not any(launch):
        launch = [socket.gethostname(), str(os.getppid())]
    text = "\n".join([*launch, role, str(world_size)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
