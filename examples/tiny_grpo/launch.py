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
        self.started_us = time.time_ns() // 1000
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        with printed.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, str(TRAIN), f"--out={out}", *flags],
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

    def wait_for_step(self, step: int) -> None:
        """Wait until the step is committed, as the log says: it can be read while it is written."""
        while last_step(self.run_dir) < step:
            if self.process.poll() is not None:
                raise RuntimeError(f"expected the training to reach step {step}, got its end: {self.printed}")
            time.sleep(0.1)

    def finish(self) -> None:
        """Wait for the end of the training; RuntimeError when it failed."""
        if code := self.process.wait():
            raise RuntimeError(f"expected the training to finish, got exit code {code}: {self.printed}")

    def kill(self) -> None:
        """SIGKILL the launcher and every process that records: the log knows who they are."""
        self.process.kill()
        with contextlib.suppress(NotARunError):
            for producer in RunReader(self.run_dir).producers():
                if producer.started_us > self.started_us:  # an older one's number may be another's by now
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(producer.pid, signal.SIGKILL)
        self.process.wait()


def last_step(run_dir: Path) -> int:
    """Return the last step that the leader committed; -1 before the first."""
    try:
        commits = (rows.filter(rows["leader"]) for _, _, rows in RunReader(run_dir).commits())
        return max((pc.max(rows["global_step"]).as_py() for rows in commits if rows.num_rows), default=-1)
    except NotARunError:  # only just started
        return -1
