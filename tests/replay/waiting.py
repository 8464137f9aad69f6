"""Waiting for what threads and processes do: as long as that takes on a busy machine, and never for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once a condition holds; fail where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds:g} s"
        time.sleep(0.02)


@contextmanager
def meanwhile(work: Callable[..., object], *given: Any, **options: Any) -> Generator[Thread]:
    """Let a thread work while the block runs, and end in time after it; what fails there is for pytest."""
    thread = Thread(target=work, args=given, kwargs=options, daemon=True)
    thread.start()
    yield thread
    until(lambda: not thread.is_alive())


def run_python(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, to the end of what it leaves behind, too, when it is killed.

    An orphaned wandb-core may send what it has, which is then no longer on its way to anywhere.
    """
    command = [sys.executable, "-c", code, *map(str, words)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, err = process.communicate(timeout=110)
    until(lambda: not _cores_of(process.pid))
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _cores_of(pid: int) -> list[Path]:
    """Return the processes in which wandb serves another one; none where the system does not list them."""
    found: list[Path] = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            words = place.read_bytes().split(b"\0")
            if words[0].endswith(b"wandb-core") and str(pid).encode() in words:
                found.append(place)
    return found
