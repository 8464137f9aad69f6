"""What is printed: strict JSON, tables a program can read too, and nothing that a name could smuggle in."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli import render

ROOT = Path(__file__).parents[2]
NOON = datetime(2026, 11, 29, 12, 0, 0, 5, tzinfo=UTC)

HOSTILE = ["[bold red]x[/]", ":smile:", "\x1b[31mred", "a\nb", "tab\there", "$x_1$", "[/nope]", "ключ/值/🙂"]


def strictly(text: str) -> object:
    """Parse JSON as a strict parser does: NaN and Infinity are no numbers."""

    def refuse(name: str) -> object:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_json_of_a_table_is_strict_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """Every type has a form in JSON: NaN and infinities are strings, absent is null, integers stay exact."""
    table = pa.table(
        {
            "value": [1.5, math.nan, math.inf, -math.inf, None],
            "exact": [2**63 - 1, 1, 2, 3, None],
            "time": pa.array([NOON, None, None, None, None], pa.timestamp("us", "UTC")),
            "parts": [[1.0, math.nan], [], None, [], []],
            "mask": [b"\x01\xff", None, None, None, None],
            "flag": [True, False, None, None, None],
        }
    )
    render.rows(table, as_json=True)
    got = strictly(capsys.readouterr().out)
    assert {
        "value": 1.5,
        "exact": 2**63 - 1,
        "time": "2026-11-29T12:00:00.000005+00:00",
        "parts": [1.0, "NaN"],
        "mask": "Af8=",
        "flag": True,
    } == got[0]
    assert ["NaN", "Infinity", "-Infinity", None] == [row["value"] for row in got[1:]]


def test_json_rows_are_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The array has one row a line, also over several pieces, and an empty table is an empty array."""
    render.rows(pa.table({"step": range(2500)}), as_json=True)
    out = capsys.readouterr().out
    assert 2500 == len(out.splitlines())
    assert [{"step": i} for i in range(2500)] == strictly(out)
    render.rows(pa.table({"step": pa.array([], pa.int64())}), as_json=True)
    assert [] == strictly(capsys.readouterr().out)


@given(
    st.recursive(
        st.none() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_of_anything_is_strict(value: object) -> None:
    """Whatever a document holds, it is printed as JSON that a strict parser takes."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        render.document({"value": value}, as_json=True)
    assert {"value"} == set(strictly(out.getvalue()))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("as_json", [False, True])
def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str], name: str, as_json: bool) -> None:
    """Markup, emoji codes and terminal sequences in a name are text, in cells and in headings."""
    render.rows(pa.table({"key": [name], name + "!": [1.0]}), as_json=as_json)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    if as_json:
        assert [{"key": name, name + "!": 1.0}] == strictly(out)
    else:
        shown = name.replace("\x1b", "\\x1b").replace("\n", "\\n").replace("\t", "\\t")
        assert shown in out.splitlines()[1]
        assert f"{shown}!" in out.splitlines()[0]
        assert 2 == len(out.splitlines())


def test_long_tables_keep_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """A table printed in pieces has one heading, and its columns stay where they are; nothing is cropped."""
    wide = "k" * 300
    render.rows(
        pa.table({"step": range(2100), "key": ["a"] * 2099 + [wide], "value": [0.5] * 2100}), as_json=False
    )
    lines = capsys.readouterr().out.splitlines()
    assert 2101 == len(lines)
    assert 1 == len({line.index("a") for line in lines[1:2100]})
    assert wide in lines[-1]
    assert 1 == len({line.rindex("0.5") for line in lines[1:]})


def test_documents_are_outlined(capsys: pytest.CaptureFixture[str]) -> None:
    """A description is printed as headings with what belongs under them, lists of rows as tables."""
    data = {
        "run": "r1",
        "steps": {"first": 0, "last": 9},
        "attempts": [{"attempt": 0, "outcome": None}, {"attempt": 1}],
    }
    render.document(data, as_json=False)
    expected = [
        "run  r1",
        "steps",
        "  first  0",
        "  last   9",
        "attempts",
        "  attempt  outcome",
        "        0",
        "        1",
    ]
    assert expected == [line.rstrip() for line in capsys.readouterr().out.splitlines()]


UNSEEN = [
    "\u202e",
    "\u2066",
    "\u200b",
    "\u200d",
    "\ufeff",
    "\xad",
    "\u061c",
    "\u2028",
    "\x9b",
    "\x7f",
    "\U000e0041",
]


@pytest.mark.parametrize("unseen", UNSEEN, ids=ascii)
def test_what_reorders_or_hides_text_is_spelled_out(capsys: pytest.CaptureFixture[str], unseen: str) -> None:
    """A name that turns the direction of a line, or looks like another, is seen for what it is."""
    name = f"loss{unseen}gpj\u3000\xa0é🙂"
    render.rows(pa.table({"key": [name]}), as_json=False)
    render.document({name: {name: 1}}, as_json=False)
    render.line(name)
    render.say(name)
    shown = "".join(capsys.readouterr())
    assert (0, 5) == (shown.count(unseen), shown.count(ascii(unseen)[1:-1] + "gpj\u3000\xa0é🙂"))
    render.rows(pa.table({"key": [name]}), as_json=True)
    render.record({name: 1})
    render.document({name: [1]}, as_json=True)
    rows, record, document = (capsys.readouterr().out).split("\n", 2)
    assert not any(unseen in out for out in (rows, record, document))
    assert ([{"key": name}], {name: 1}, {name: [1]}) == tuple(map(strictly, (rows, record, document)))


def test_talk_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """What is told to a person is on stderr; an error is one line; control characters are spelled out."""
    render.say("two\nlines \x1b[2J")
    render.complain("expected a,\n   got b")
    assert ("", "two\nlines \\x1b[2J\nareal-metrics: expected a, got b\n") == capsys.readouterr()


QUIET = """
import pyarrow as pa, typer
from cli import render
try:
    render.rows(pa.table({"k": range(1000000)}), as_json=True)
except typer.Exit as exc:
    raise SystemExit(exc.exit_code + 7)
"""


def test_a_closed_pipe_is_no_failure() -> None:
    """When the reader has seen enough, the command ends quietly."""
    reading, writing = os.pipe()
    with subprocess.Popen([sys.executable, "-c", QUIET], cwd=ROOT, stdout=writing, stderr=-1) as process:
        os.close(writing)
        os.read(reading, 10)
        os.close(reading)
        _, errors = process.communicate()
    assert b"" == errors
    assert 7 == process.returncode


NARROW = "pa.table({'k': ['🙂é']})"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_narrow_terminal_shows_every_name(as_json: bool) -> None:
    """Where the encoding lacks a character it is spelled out, and JSON stays JSON."""
    code = f"import pyarrow as pa; from cli import render; render.rows({NARROW}, as_json={as_json})"
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "" == done.stderr
    if as_json:
        assert [{"k": "🙂é"}] == strictly(done.stdout)
    else:
        assert "\\U0001f642\\xe9" == done.stdout.splitlines()[1].strip()
