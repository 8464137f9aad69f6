"""The command `areal-metrics`: its families of commands, and what an exit code means.

0    done
1    failed, as by a key that this run lacks: one line on stderr says what was expected, what came and where
2    asked wrongly, whatever the run holds
3    done, but something was lost, damaged or refused; stderr says what
130  interrupted
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import care, carry, compare, imports, plot, query, render, report, retell, run, runs, tables, watch
from .options import asked_wrongly

__all__ = ["app", "main"]

app = typer.Typer(
    name="areal-metrics",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 failed, 2 called wrongly, 3 done but something was lost or refused.",
)
for family in (run, runs, care, watch, query, carry, tables, compare, retell, imports, plot, report):
    app.add_typer(family.app, name=family.NAME)


def main() -> None:
    """Run the command line and exit; errors of the distribution and of files become one line on stderr."""
    try:
        app(prog_name="areal-metrics")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as exc:
        from eventlog import ArealMetricsError

        if not isinstance(exc, ArealMetricsError | OSError):
            raise
        render.complain("; ".join([str(exc), *getattr(exc, "__notes__", [])]))
        sys.exit(2 if asked_wrongly(exc) else 1)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        render.line(f"areal-metrics {version('areal-metrics')}")
        raise typer.Exit


@app.callback()
def areal_metrics(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Ask recorded training runs anything, and retell them to any tracker."""


if __name__ == "__main__":
    main()
