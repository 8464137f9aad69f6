"""What a person sees of a step."""

from __future__ import annotations

import io
import math

from rich.cells import cell_len

from replay import print_stats, tabulate_stats
from replay.console import say


def test_pairs_are_laid_out_in_columns() -> None:
    """Name and value pairs, as many a line as asked, numbers by the format, integers in full."""
    assert (
        "┌───┬────────────┬────┬────┐\n"
        "│ a │ 1.0000e+00 │ bb │ 12 │\n"
        "│ c │        nan │    │    │\n"
        "└───┴────────────┴────┴────┘"
    ) == tabulate_stats({"a": 1.0, "bb": 12, "c": math.nan}, col=2)
    assert "│ a │ 0.50 │" in tabulate_stats({"a": 0.5}, floatfmt=".2f")


def test_names_are_shown_as_they_are() -> None:
    """Brackets are no markup, line breaks do not tear it, wide characters keep it straight (report e6)."""
    table = tabulate_stats({"[/]" * 200: 1.0, "[red]loss": 2.0, "损失/均值": 3.0, "a\nb": 4.0}, col=1)
    assert "[red]loss" in table
    assert "a\\nb" in table
    assert 1 == len({cell_len(line) for line in table.splitlines()})


def test_no_metrics_are_said() -> None:
    """An empty commit shows that it is empty."""
    assert "(no metrics)" == tabulate_stats({})


def test_a_terminal_without_the_characters_gets_others() -> None:
    """A stream whose encoding lacks a character shows a replacement instead of raising."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_stats({"损失": 1.0}, file=stream)
    stream.seek(0)
    assert "? ?? ? 1.0000e+00 ?" in stream.read()


def test_text_goes_to_standard_output(capsys) -> None:
    """Without another stream text goes to standard output."""
    say("hello")
    assert "hello\n" == capsys.readouterr().out
