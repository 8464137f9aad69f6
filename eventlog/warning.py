"""Warnings, said of the user's line: the first one outside of this distribution's own packages."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

_ROOT: Final = Path(__file__).parents[1]
_OURS: Final = tuple(f"{_ROOT / house}{os.sep}" for house in ("eventlog", "aggregator", "replay", "cli"))


def warn(text: str) -> None:
    """Warn of something where the program called us, however deep below that it was found."""
    level = 1
    caller: FrameType | None = sys._getframe()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    while caller is not None and _is_ours(caller.f_code.co_filename):
        level, caller = level + 1, caller.f_back
    warnings.warn(text, stacklevel=level)


def _is_ours(path: str) -> bool:
    return path.startswith(_OURS) or path == contextlib.__file__
