"""Table in, figure out: pictures of runs, drawn by matplotlib (extra `plots`) without any global state."""

from __future__ import annotations

from .canvas import PALETTES, save
from .curves import curves, smoothed

__all__ = ["PALETTES", "curves", "save", "smoothed"]
