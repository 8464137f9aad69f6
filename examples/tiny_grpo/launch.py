"""The training as a process: started under torchrun, watched through its own log, killed without warning."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pyarrow.compute as pc

from eventlog import RunReader
from eventlog.errors import NotARunError

TRAIN = Path(__file__).with_name("train.py")
RANKS = 2


class Training:
    """One lifetime of the training: two ranks and their rollout workers; what they print goes to a file."""

    def __init__(self, out: Path, printed: Path, *flags: str) -> None:
        self.run_dir, self.printed = out / "run", printed
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        self.started_us = time.time_ns() // 1000
        with printed.open("w") as file:
            self.process = subprocess.Popen(
                [*torchrun, str(TRAIN), "--out", str(out), *flags],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    def finish(self) -> None:
        """Wait for the end of the training; RuntimeError when it failed."""
        if code := self.process.wait():
            raise RuntimeError(f"expected the training to finish, got exit code {code}: {self.printed}")

    def wait_for_step(self, step: int) -> None:
        """Wait until the step is committed, as the log says, which can be read while it is written."""
        while last_step(self.run_dir) < step:
            if self.process.poll() is not None:
                raise RuntimeError(f"expected the training to reach step {step}, got its end: {self.printed}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL the launcher, then every process that records, all at once: the log knows who they are."""
        self.process.kill()
        for producer in RunReader(self.run_dir).producers():
            if producer.started_us >= self.started_us:  # a dead one's number may be someone else's by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(producer.pid, signal.SIGKILL)
        self.process.wait()


def last_step(run_dir: Path) -> int:
    """Return the last step that anyone committed; -1 before the first."""
    try:
        frames = [batch["global_step"] for _, _, batch in RunReader(run_dir).commits()]
    except NotARunError:  # it has only just been started
        return -1
    return max((pc.max(steps).as_py() for steps in frames), default=-1)
