"""The documents cannot rot: every command has help with an example, and the README knows it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.app import app

ROOT = Path(__file__).parents[1]


def commands(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every command of the command line by its words."""
    command = typer.main.get_command(app) if command is None else command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))
    if not hasattr(command, "commands"):
        yield " ".join(words), command


COMMANDS = dict(commands())


def help_of(words: str) -> str:
    command = COMMANDS[words]
    with command.make_context("areal-metrics", ["x"], resilient_parsing=True) as context:
        return command.get_help(context)


def test_these_are_the_commands() -> None:
    """The commands are those that this version promises."""
    wanted = """
        compact compare-evals correlation export histogram import info keys ls merge metrics percentiles
        plot-curves plot-heatmap plot-radar recover reduce replay report run sql verify watch
    """
    assert wanted.split() == sorted(words.replace(" ", "-") for words in COMMANDS)


@pytest.mark.parametrize("words", COMMANDS)
def test_help_ends_with_an_example(words: str) -> None:
    """The help of every command says what it does and ends with an example of that very command."""
    text = help_of(words)
    assert COMMANDS[words].help
    examples = text.partition("Example:")[2].strip().splitlines()
    assert examples
    for line in examples:
        assert ["areal-metrics", *words.split()] == shlex.split(line)[: 1 + len(words.split())]


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_has_help(words: str) -> None:
    """No argument or option is left without a word."""
    silent = [parameter.name for parameter in COMMANDS[words].params if not getattr(parameter, "help", None)]
    assert [] == silent


@pytest.mark.parametrize("words", sorted(COMMANDS.keys() - {"report", "run"}))
def test_what_prints_data_prints_json(words: str) -> None:
    """Every command that prints data has --json."""
    assert "--json" in {name for parameter in COMMANDS[words].params for name in parameter.opts}


@pytest.mark.parametrize("words", COMMANDS)
def test_examples_are_understood(words: str) -> None:
    """The examples in the help parse as they stand."""
    for line in help_of(words).partition("Example:")[2].strip().splitlines():
        given = shlex.split(line.partition(" < ")[0])[1 + len(words.split()) :]
        COMMANDS[words].make_context("areal-metrics", given).close()


@pytest.mark.parametrize("words", COMMANDS)
def test_readme_mentions_every_command(words: str) -> None:
    """The README shows or lists every command."""
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.search(rf"(areal-metrics |`){re.escape(words)}\b", readme)


@pytest.mark.parametrize("target", ["demo", "test", "test-long", "check", "bench", "clean"])
def test_make_targets_are_there(target: str) -> None:
    """The Makefile has the targets that CONTRIBUTING names."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def test_ci_runs_what_a_developer_runs() -> None:
    """CI calls the Makefile's targets and nothing of its own."""
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert "for target in check test test-long" in script
