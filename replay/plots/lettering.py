"""Lettering: texts measured in inches, so that what is written on a picture fits on it."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fitted", "packed", "short", "width"]

_INCH: Final = 72  # points
_LONGEST: Final = 240  # characters that are worth measuring


def short(name: str, most: int) -> str:
    """Return a name of at most so many characters, its middle replaced by an ellipsis."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


@cache
def width(text: str, points: float) -> float:
    """Return how wide a text of one line is at a font size, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    with warnings.catch_warnings():  # a name in a script that the font lacks is drawn as boxes
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        found = text_to_path.get_text_width_height_descent(text, FontProperties(size=points), ismath=False)
    return found[0] / _INCH


def fitted(text: str, inches: float, points: float) -> str:
    """Return a text that is no wider: of a longer one the middle is cut, its ends tell names apart."""
    cut = short(text, _LONGEST)
    while len(cut) > 3 and (wide := width(cut, points)) > inches:
        cut = short(text, min(len(cut) - 1, max(3, math.floor(len(cut) * inches / wide))))
    return cut


def packed(texts: Sequence[str], inches: float, points: float, between: str = " · ") -> list[str]:
    """Return lines no wider than that, made of whole texts in their order; a text that is wider is cut."""
    lines: list[str] = []
    for text in texts:
        item = fitted(text, inches, points)
        joined = f"{lines[-1]}{between}{item}" if lines else item
        if lines and width(joined, points) <= inches:
            lines[-1] = joined
        else:
            lines.append(item)
    return lines
