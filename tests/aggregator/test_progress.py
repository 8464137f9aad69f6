"""The progress bar: on a terminal alone, whoever shows it, and in a process that has no standard error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from aggregator import progress_bar
from tests.terminal import on_terminal

ROOT = Path(__file__).parents[2]
SHOW = """
from aggregator import progress_bar

with progress_bar("[red]telling") as tell:
    tell(1, 4)
with progress_bar("counting", 3) as tell:
    tell(more=1)
    tell(more=1)
"""


def test_no_bar_is_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress is shown on a terminal only; whoever works may tell it all the same."""
    with progress_bar("x", 3) as tell:
        tell(2)
        tell(more=1)
    assert ("", "") == tuple(capsys.readouterr())


def test_a_process_without_stderr_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no standard error, as under pythonw or a daemon, nothing is shown and nothing fails."""
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar("x", 3) as tell:
        tell(2)


def test_how_much_is_done_is_shown_on_a_terminal() -> None:
    """Done and total, told as they stand or as what came; a name is shown as it is."""
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    out, seen = on_terminal([sys.executable, "-c", SHOW], cwd=ROOT, env=environment)
    assert b"" == out
    assert b"[red]telling" in seen
    assert b"25%" in seen
    assert b"67%" in seen
