"""The only printer: data on stdout as a table or as JSON, talk on stderr.

JSON is strict (RFC 8259). What it has no form for is a string: "NaN", "Infinity" and "-Infinity" (null is
left to mean *absent*), times as ISO 8601 in UTC, bytes in base64. A table is one array with one row a line:
it can be read as a whole or line by line.

Names from a run are shown as they are: nothing in them is markup, an emoji code or a terminal sequence, and
what steers a terminal, turns the direction of a line or cannot be seen is spelled out.
"""

from __future__ import annotations

import io
import json
import os
import sys
import unicodedata
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    import pyarrow as pa
    from rich.table import Table

__all__ = ["complain", "damaged", "document", "line", "live", "lost", "record", "rows", "say"]

Cells = list[str]

_WIDE: Final = 1 << 20  # a row is a line: nothing is folded or cropped
_MOST_TOLD: Final = 20
_CHUNK: Final = 1000  # rows laid out at a time
_STEERING: Final = frozenset({"Cc", "Cf", "Zl", "Zp"})  # control and format characters, ends of lines


def rows(table: pa.Table, *, as_json: bool) -> None:
    """Print a table on stdout, in pieces: its length costs no memory."""
    with _stdout() as out:
        if as_json:
            _json_rows(table, out)
        else:
            _text_rows(table, out)


def document(data: dict[str, Any], *, as_json: bool) -> None:
    """Print one nested description on stdout: as JSON, or as headings with what belongs under them."""
    with _stdout() as out:
        if as_json:
            out.write(_dumps(data, indent=2) + "\n")
        else:
            _outline(data, 0, out)


def line(text: str) -> None:
    """Print a line of data on stdout."""
    with _stdout() as out:
        out.write(_printable(text) + "\n")


def record(data: dict[str, Any]) -> None:
    """Print one JSON object in one line on stdout."""
    with _stdout() as out:
        out.write(_dumps(data) + "\n")


@contextmanager
def live() -> Generator[Callable[[Cells, Sequence[Cells]], object] | None]:
    """Lend a table on stdout that is drawn anew each time: call it with the heads and the lines.

    None where stdout is no terminal. The first column is text, the others numbers.
    """
    if not sys.stdout.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    _take_all(sys.stdout)
    with Live(console=Console(markup=False, emoji=False, highlight=False), auto_refresh=False) as screen:

        def show(heads: Cells, lines: Sequence[Cells]) -> None:
            names = list(map(_printable, heads))
            rights = [column > 0 for column in range(len(names))]
            cells = [list(map(_printable, line)) for line in lines]
            screen.update(_grid(names, rights, [1] * len(names), cells), refresh=True)

        yield show


def say(message: str) -> None:
    """Tell the person at the terminal something, on stderr."""
    _take_all(sys.stderr)
    try:
        print("\n".join(map(_printable, message.split("\n"))), file=sys.stderr, flush=True)
    except OSError:  # nobody listens: no reason to fail
        return


def complain(message: str) -> None:
    """Print why a command failed, in one line on stderr."""
    say(f"areal-metrics: {' '.join(message.split())}")


def damaged(problems: Iterable[str], listing: str | None = "verify --json") -> None:
    """Print what of a run could not be read, one line each on stderr.

    Of many only the first, and the command that lists all; without one all.
    """
    _enumerate("damaged", problems, listing)


def lost(losses: Iterable[str]) -> None:
    """Print what of a run never reached its log, a line for each process on stderr; of many the first."""
    _enumerate("lost", losses, "info --json")


def _enumerate(what: str, those: Iterable[str], listing: str | None) -> None:
    told = list(those)
    most = len(told) if listing is None else _MOST_TOLD
    for one in told[:most]:
        say(f"{what}: {one}")
    if more := told[most:]:
        say(f"… and {len(more)} more; {listing} lists all")


@contextmanager
def _stdout() -> Generator[TextIO]:
    """Lend stdout; a reader that has seen enough (`| head`) ends the command, and is no failure."""
    _take_all(sys.stdout)
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - what is still buffered goes there at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise typer.Exit(0) from None


def _take_all(stream: TextIO) -> None:
    """Make the stream take every character: a locale is no reason to fail over a run's name."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


# JSON


def _json_rows(table: pa.Table, out: TextIO) -> None:
    from aggregator import rows_of

    out.write("[")
    before = ""
    for batch in table.to_batches(max_chunksize=_CHUNK):
        for row in rows_of(batch):
            out.write(f"{before}{_dumps(row)}")
            before = ",\n"
    out.write("]\n")


def _dumps(value: Any, indent: int | None = None) -> str:
    from aggregator import strict_json

    narrow = (sys.stdout.encoding or "utf-8").lower() != "utf-8"
    text = strict_json(value, ascii_only=narrow, indent=indent)
    if text.isprintable():
        return text
    return "".join(json.dumps(each)[1:-1] if each != "\n" and _steers(each) else each for each in text)


def _utc(value: datetime) -> datetime:
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


# Text


def _text_rows(table: pa.Table, out: TextIO) -> None:
    from rich.cells import cell_len

    names = [_printable(name) for name in table.column_names]
    rights = [_is_number(field.type) for field in table.schema]
    widths = [cell_len(name) for name in names]
    for cells in _cells(table):
        widths = [max(pair) for pair in zip(widths, map(cell_len, cells), strict=True)]
    for start in range(0, max(table.num_rows, 1), _CHUNK):
        _show(_grid(names, rights, widths, _cells(table.slice(start, _CHUNK)), head=start == 0), out)


def _cells(table: pa.Table) -> Iterator[Cells]:
    from aggregator import values_of

    for batch in table.to_batches(max_chunksize=_CHUNK):
        columns = [list(map(_cell, values_of(column))) for column in batch.columns]
        yield from map(list, zip(*columns, strict=True))


def _grid(
    names: Cells, rights: list[bool], widths: list[int], lines: Iterable[Cells], *, head: bool = True
) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, show_header=head, header_style="bold")
    for name, right, width in zip(names, rights, widths, strict=True):
        grid.add_column(Text(name), justify="right" if right else "left", min_width=width)
    for cells in lines:
        grid.add_row(*map(Text, cells))
    return grid


def _show(grid: Any, out: TextIO) -> None:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; `_stdout` knows better

    Plain(file=out, width=_WIDE, markup=False, emoji=False, highlight=False).print(grid)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _outline(data: dict[str, Any], depth: int, out: TextIO) -> None:
    from rich.padding import Padding

    plain = {key: value for key, value in data.items() if not _is_nested(value)}
    width = max(map(len, plain), default=0)
    pad = "  " * depth
    out.writelines(
        f"{pad}{_label(key):<{width}}  {_cell(value)}".rstrip() + "\n" for key, value in plain.items()
    )
    for key, value in data.items():
        if key in plain:
            continue
        out.write(f"{pad}{_label(key)}\n")
        if isinstance(value, dict):
            _outline(value, depth + 1, out)
        else:
            names = list(dict.fromkeys(name for item in value for name in item))
            lines = [[_cell(item.get(name)) for name in names] for item in value]
            rights = [all(isinstance(item.get(name), int | float | None) for item in value) for name in names]
            grid = _grid(list(map(_label, names)), rights, [1] * len(names), lines)
            _show(Padding(grid, (0, 0, 0, 2 * depth + 2), expand=False), out)


def _is_nested(value: Any) -> bool:
    return bool(value) and (
        isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], dict))
    )


def _label(name: str) -> str:
    return _printable(name.replace("_", " "))


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6g}"
        case datetime():
            return f"{_utc(value):%Y-%m-%d %H:%M:%S}Z"
        case bytes():
            return f"{len(value)} bytes"
        case list() | tuple():
            return f"[{', '.join(map(_cell, value))}]"
        case _:
            return _printable(str(value))


def _printable(text: str) -> str:
    """Return the text with what is not to be seen spelled out: a name must not steer the terminal."""
    if text.isprintable():
        return text
    return "".join(each.encode("unicode_escape").decode() if _steers(each) else each for each in text)


def _steers(character: str) -> bool:
    return unicodedata.category(character) in _STEERING
