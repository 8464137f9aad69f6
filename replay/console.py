"""What is shown on a terminal: metrics as a table; names are never read as markup."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Mapping


def tabulate_stats(data: Mapping[str, float], col: int = 4, floatfmt: str = ".4e") -> str:
    """Return a table of `col` name and value pairs a line, in the data's order, read line by line.

    Integers are printed in full, other numbers by `floatfmt`. Widths are those of a terminal, where a Chinese
    character takes two columns. Drawn by hand: rich's own table costs a training step tens of milliseconds.
    """
    cells = [text for key, value in data.items() for text in (_name(key), _number(value, floatfmt))]
    if not cells:
        return "(no metrics)"
    width = 2 * max(1, min(col, len(data)))
    lines = [cells[start : start + width] for start in range(0, len(cells), width)]
    lines[-1] += [""] * (width - len(lines[-1]))
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    rules = ["─" * (size + 2) for size in widths]
    body = [f"│{'│'.join(_padded(cell, widths, at) for at, cell in enumerate(line))}│" for line in lines]
    return "\n".join([f"┌{'┬'.join(rules)}┐", *body, f"└{'┴'.join(rules)}┘"])


def print_stats(
    data: Mapping[str, float], col: int = 4, floatfmt: str = ".4e", *, file: TextIO | None = None
) -> None:
    """Print the table to `file`, standard output by default."""
    say(tabulate_stats(data, col, floatfmt), file=file)


def say(text: str, *, file: TextIO | None = None) -> None:
    """Print text; characters that the stream's encoding lacks are replaced, not raised."""
    stream: Any = file or sys.stdout
    if stream is not None:  # a process may have no standard output
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()


def _padded(cell: str, widths: list[int], at: int) -> str:
    space = " " * (widths[at] - cell_len(cell))
    return f" {cell}{space} " if at % 2 == 0 else f" {space}{cell} "


def _name(name: str) -> str:
    """Return a name as one printable line."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _number(value: float, floatfmt: str) -> str:
    return str(value) if isinstance(value, int) else format(value, floatfmt)
