"""An adapter of one's own: a tracker that is a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from eventlog import errors
from replay import Capabilities, Order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replay import RunInfo


class JsonLines:
    """One line a step; a step is told once, and only after those below it."""

    name = "jsonl"
    capabilities = Capabilities(order=Order.STRICT)

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.target = str(self.path.absolute())  # two objects of one target share a cursor
        self.file: TextIO | None = None

    def open(self, run: RunInfo) -> None:  # noqa: ARG002  (what the run is, a file of lines need not know)
        self.file = self.path.open("a")

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        if self.file is None:
            raise errors.BackendError(f"expected an open backend, got a call at step {step}: {self.target}")
        self.file.write(json.dumps({"step": step, "time": time, "metrics": dict(metrics)}) + "\n")
        self.file.flush()  # safe when this returns, whatever happens to the process

    def last_step(self) -> int | None:
        rows = self.path.read_text().splitlines() if self.path.exists() else []
        return json.loads(rows[-1])["step"] if rows else None

    def close(self) -> None:
        if self.file is not None:
            self.file = self.file.close()
