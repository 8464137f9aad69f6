"""How a log is started: its options, checked; the run they name; which process of which world this is."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Literal

from .arrays import as_int
from .budget import as_bytes
from .errors import LogError
from .rundir import Producer, RunDir
from .sampling import size_of

Fsync = Literal[False, "periodic", "commit"]


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

    @property
    def sample_size(self) -> int | None:
        """How many values of a record are kept: None for all."""
        return size_of(self.payload)

    @property
    def budget(self) -> int | None:
        """The payload budget in bytes."""
        return None if self.payload_budget is None else as_bytes(self.payload_budget)


def open_run(options: Options) -> RunDir:
    """Open, join or create the run; LogError for options that are none."""
    if options.resume not in ("allow", "must", "never"):
        raise LogError(f"expected resume to be allow, must or never, got {options.resume!r}")
    if options.fsync not in (False, "periodic", "commit"):
        raise LogError(f"expected fsync to be False, 'periodic' or 'commit', got {options.fsync!r}")
    _ = options.sample_size, options.budget  # which raise
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
        started_us=time.time_ns() // 1000,
    )


def place_in_world(rank: int | None = None, world_size: int | None = None) -> tuple[int, int]:
    """Return (rank, world size): given, of torch.distributed, RANK and WORLD_SIZE, else (0, 1)."""
    if rank is not None:
        return as_int(rank, "rank"), 1 if world_size is None else as_int(world_size, "world_size")
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _world(role: str, world_size: int) -> str:
    """Name the world of ranks this process was launched in, alike in all of them."""
    launch = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    if not any(launch):
        launch = [socket.gethostname(), str(os.getppid())]
    text = "\n".join([*launch, role, str(world_size)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
