"""A program whose standard error is a terminal, and what it shows there."""

from __future__ import annotations

import os
import pty
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def on_terminal(command: Sequence[str], **options: Any) -> tuple[bytes, bytes]:
    """Run a command to its end; return its standard output, and what its terminal showed.

    The terminal is read meanwhile: what is drawn for long fills it, and whoever draws would wait for ever.
    """
    ours, theirs = pty.openpty()
    shown = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, **options) as process:
        os.close(theirs)
        with suppress(OSError):  # the end of a terminal
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
        out, _ = process.communicate()
    assert 0 == process.returncode, shown
    return out, shown
