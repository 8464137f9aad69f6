"""The sheet a picture is drawn on: figure, panels, colours by name, and the way into a file.

matplotlib is imported when the first figure is made, and only its `Figure`: no pyplot, no current figure, no
back end to choose, so that drawing works in threads, on servers and inside somebody's notebook alike.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from eventlog import errors

from .lettering import fitted, packed, width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator
    from numpy.typing import NDArray

__all__ = [
    "MOST",
    "PALETTES",
    "Style",
    "grow",
    "left_out",
    "legend",
    "listed",
    "lone",
    "panels",
    "placed",
    "polar",
    "rows_of",
    "save",
    "stroke",
    "styles",
    "title",
    "whole",
]

Dashes = Literal["-", "--", "-.", ":"]
Style = tuple[str, Dashes]  # a colour and a line style: more lines than colours still differ

PALETTES: Final[dict[str, tuple[str, ...]]] = {
    # Okabe and Ito (2008): told apart with every common colour blindness. Yellow, faint on white, is last.
    "okabe-ito": (
        "#0072B2",
        "#D55E00",
        "#009E73",
        "#CC79A7",
        "#E69F00",
        "#56B4E9",
        "#000000",
        "#F0E442",
    ),
    "grey": ("#000000", "#555555", "#888888", "#AAAAAA"),
}
FORMATS: Final = (".png", ".svg")
_NO_XML: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")  # XML 1.0, 2.2
_LINES: Final[tuple[Dashes, ...]] = ("-", "--", "-.", ":")
MOST_ENTRIES: Final = 24  # of a legend
_SMALL: Final = 9  # points, of what stands below a figure
_ROW: Final = 0.2  # inches, of a line of it
_HANDLE: Final = 0.65  # inches, of a legend's line with the space around it
_TITLE: Final = 4.2  # inches that fit above a panel
_COLUMNS: Final = 3
MOST: Final = 1e300  # matplotlib's axes overflow soon after
_PANEL: Final = (4.8, 3.0)  # inches


def styles(count: int, palette: str = "okabe-ito") -> list[Style]:
    """Return `count` styles that differ: all colours with a full line first, then dashed, and so on.

    Raises:
        QueryError: the palette is none of `PALETTES`.
    """
    if palette not in PALETTES:
        raise errors.QueryError(f"expected a palette out of {', '.join(PALETTES)}, got {palette!r}")
    colours = PALETTES[palette]
    return [(colours[i % len(colours)], _LINES[i // len(colours) % len(_LINES)]) for i in range(count)]


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a new figure with `count` panels in rows of up to three, their x axes aligned in range.

    Raises:
        BackendMissingError: matplotlib is not installed.
    """
    columns, rows = min(count, _COLUMNS), rows_of(count)
    figure = _sheet(max(6.4, columns * _PANEL[0]), max(4.0, rows * _PANEL[1]))
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    for axis in axes[:count]:
        axis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelbottom=True)  # shared axes hide it but in the last row
        axis.xaxis.set_major_locator(whole())  # there is no step 0.5
    return figure, axes[:count]


def rows_of(count: int) -> int:
    """Return in how many rows `panels` puts so many panels."""
    return math.ceil(count / _COLUMNS)


def whole() -> Locator:
    """Return what puts the ticks of an axis, or of a colour bar, on whole numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)


def polar() -> tuple[Figure, Any]:
    """Return a new figure with one panel whose x axis is an angle, clockwise from the top.

    Raises:
        BackendMissingError: matplotlib is not installed.
    """
    figure = _sheet(7.0, 6.0)
    axis: Any = figure.add_subplot(projection="polar")
    axis.set_theta_offset(math.pi / 2)
    axis.set_theta_direction(-1)
    axis.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axis.spines["polar"].set_color("#DDDDDD")
    axis.tick_params(pad=26)
    return figure, axis


def _sheet(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise errors.BackendMissingError(
            "expected matplotlib for a plot, got none: pip install 'areal-metrics[plots]'"
        ) from exc
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def legend(figure: Figure, entries: Sequence[tuple[str, Artist]]) -> None:
    """Put one legend for all panels below them; its texts are shown as they are, as far as they fit.

    The figure grows by it. Behind `MOST_ENTRIES` the rest is counted.
    """
    if not entries:
        return
    left = len(entries) - MOST_ENTRIES
    room = figure.get_figwidth() - 0.3
    labels = [fitted(label, room - _HANDLE, _SMALL) for label, _ in entries[:MOST_ENTRIES]]
    artists = [artist for _, artist in entries[:MOST_ENTRIES]]
    if left > 0:
        labels.append(f"and {left} more")
        artists.append(stroke("none"))
    columns = int(room / (_HANDLE + max(width(label, _SMALL) for label in labels)))
    columns = max(1, min(columns, len(labels)))
    # A label that begins with "_" would be left out: the texts are set afterwards.
    numbered = [str(i) for i in range(len(labels))]
    drawn = figure.legend(artists, numbered, loc="outside lower center", ncols=columns, fontsize=_SMALL)
    drawn.get_frame().set_linewidth(0)
    for text, label in zip(drawn.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
    grow(figure, math.ceil(len(labels) / columns) - 2)


def listed(figure: Figure, texts: Sequence[str]) -> None:
    """Write texts below all panels, in lines that break between them; the figure grows by it."""
    lines = packed(texts, figure.get_figwidth() - 0.3, _SMALL)
    figure.supxlabel("\n".join(lines), fontsize=_SMALL, parse_math=False)
    grow(figure, len(lines) - 1)


def grow(figure: Figure, lines: int) -> None:
    """Make room for so many lines of small text, so that the panels keep their height."""
    figure.set_figheight(figure.get_figheight() + max(0, lines) * _ROW)


def stroke(style: Style | str, **more: Any) -> Artist:
    """Return a line for a legend."""
    from matplotlib.lines import Line2D

    colour, dashes = (style, "-") if isinstance(style, str) else style
    return Line2D([], [], color=colour, linestyle=dashes, **more)


def title(axes: Any, text: str) -> None:
    """Write a title as it is: a key's `$` or `_` is no formula; of a long one the middle is cut."""
    axes.set_title(fitted(text, _TITLE, 10), fontsize="medium", loc="left", parse_math=False)


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as PNG or SVG, by the path's ending; the same figure gives the same bytes.

    Raises:
        QueryError: another ending.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise errors.QueryError(f"expected a file name ending in {' or '.join(FORMATS)}, got {path}")
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    vector = path.suffix.lower() == ".svg"
    drawn = io.BytesIO()
    # its ids would be random otherwise; a name in a script that the font lacks is drawn as boxes, and kept
    with mpl.rc_context({"svg.hashsalt": "areal-metrics"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        figure.savefig(drawn, format=path.suffix[1:].lower(), metadata={"Date": None} if vector else None)
    found = drawn.getvalue()
    if vector:  # the names are in its comments, too
        spelled = _NO_XML.sub(lambda odd: odd[0].encode("unicode_escape").decode(), found.decode())
        found = spelled.encode()
    path.write_bytes(found)
    return path


def placed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values, NaN for those that have no place on an axis: not finite, or beyond 1e300."""
    return np.where(np.abs(values) <= MOST, values, np.nan)


def left_out(values: NDArray[np.float64]) -> str:
    """Say how many values have no place on an axis; "" for none."""
    finite = np.isfinite(values)
    counts = {"not finite": ~finite, "beyond 1e300": finite & (np.abs(values) > MOST)}
    said = ", ".join(f"{count.sum()} {what}" for what, count in counts.items() if count.any())
    return f" ({said}: not drawn)" if said else ""


def lone(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which values have no finite neighbour: a line does not go through them, they need a point."""
    there = np.isfinite(values)
    before, after = np.append(False, there[:-1]), np.append(there[1:], False)
    return there & ~before & ~after
