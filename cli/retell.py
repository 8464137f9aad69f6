"""Telling a run again, to any tracker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import render
from .options import Attempts, AttemptsOption, Json, RunDir, Since, Until, example

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()

_WORDS = {"true": True, "false": False}
