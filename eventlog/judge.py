"""A child process that looks at frames no checksum vouches for: Arrow can crash on a damaged one."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from .message import Decoder
from .schema import NO_WINDOW, SCHEMAS, Stream

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    import pyarrow as pa

JUDGE_SECONDS: Final = 60.0  # what a frame may take to be looked at
_SERVE: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from eventlog.judge import serve; serve()"
)


class Seen(NamedTuple):
    """What a frame holds, as its rows say."""

    rows: int
    window: int  # NO_WINDOW for export rows, and for payload, which does not know it
    first_id: int
    last_id: int


# The child


def serve() -> None:
    """Look at frames for a `Judge`: a request a line on stdin, an answer a line on stdout."""
    for line in sys.stdin:
        path, offset, length, stream = json.loads(line)
        try:
            answer = _look(path, offset, length, Stream(stream))._asdict()
        except Exception as error:  # noqa: BLE001 - whatever Arrow has against the frame
            answer = {"wrong": f"{type(error).__name__}: {error}"}
        os.write(1, json.dumps(answer).encode() + b"\n")


def _look(path: str, offset: int, length: int, stream: Stream) -> Seen:
    with open(path, "rb") as file:  # noqa: PTH123 - plain bytes in a loop
        file.seek(offset)
        frame = file.read(length)
    batch = Decoder(SCHEMAS[stream]).batch(frame)
    batch.validate(full=True)
    if not batch.num_rows:
        raise ValueError("holds no rows")
    ids = batch.column(0)
    if ids.null_count:
        raise ValueError(f"lacks {ids.null_count} of {len(ids)} numbers")
    numbers = ids.to_pylist()
    first, last = min(numbers), max(numbers)
    if stream is Stream.PAYLOAD:
        return Seen(batch.num_rows, NO_WINDOW, first, last)
    if stream is Stream.COMMITS:
        return Seen(batch.num_rows, first, first, last)
    return Seen(batch.num_rows, _window(batch), first, last)


def _window(batch: pa.RecordBatch) -> int:
    windows = set(batch["window"].to_pylist())
    if set(batch["kind"].to_pylist()) == {"export"}:
        return NO_WINDOW
    if len(windows) != 1 or None in windows:
        raise ValueError(f"expected records of one window, got {sorted(windows, key=str)}")
    return windows.pop()


class Judge:
    """Looks at frames in a child process, a new one after each that did not survive; a context manager."""

    def __init__(self, seconds: float = JUDGE_SECONDS) -> None:
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._child.pid if self._child else None

    def look(self, path: Path, offset: int, length: int, stream: Stream) -> Seen | str:
        """Return what the frame at a place holds, or why it is none."""
        child = self._child = self._child or self._start()
        request = json.dumps([os.fspath(path), offset, length, int(stream)])
        with suppress(BrokenPipeError):
            if child.stdin:
                child.stdin.write(request.encode() + b"\n")
        line = self._line(child)
        if line is None or not line.endswith(b"\n"):
            code = self._end()
            if line is None:
                return f"took more than {self._seconds:g} s to look at"
            return f"crashed the process that looked at it ({_cause(code)})"
        answer = json.loads(line)
        return str(answer["wrong"]) if "wrong" in answer else Seen(**answer)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _SERVE, json.dumps(sys.path)]
        return subprocess.Popen(  # noqa: S603 - this interpreter
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )

    def _line(self, child: subprocess.Popen[bytes]) -> bytes | None:
        """Read the answer; None when it takes too long, an unfinished line when the child is gone."""
        line, deadline = b"", time.monotonic() + self._seconds
        if child.stdout is None:
            return line
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                if not (more := child.stdout.read(4096)):
                    break
                line += more
        return line

    def _end(self) -> int:
        child, self._child = self._child, None
        if child is None:
            return 0
        with child:  # closes the pipes and waits
            with suppress(subprocess.TimeoutExpired):
                return child.wait(0.2)  # crashed, and not yet collected
            child.kill()
        return child.returncode


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
