"""Watching runs while they are written."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import pulse, render
from .options import Json, example

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eventlog import Follower, RunReader

__all__ = ["NAME", "app"]

NAME = None  # its command stands at the top
app = typer.Typer()

_STATE_SECONDS: Final = 5.0  # signs of life come as often
_MOST_KEYS: Final = 40  # of a table, when none are chosen


@app.command(
    epilog=example(
        "watch runs/a", "watch runs/a runs/b --keys 'ppo_actor/*/avg'", "watch runs/a --json | head"
    )
)
def watch(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR...", help="Directories of the runs; they need not exist yet."),
    ],
    keys: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Keys to show, globs too; repeatable.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show what there is now, and end.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.01, help="How often to look.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Show what runs commit, as they commit it.

    On a terminal a table of the newest values, a column per run; else a line per step, with --json a JSON
    object. Ends when the runs have finished.
    """
    from aggregator import labels
    from eventlog import losses

    boards = [_Board(name, path, keys or []) for name, path in zip(labels(run_dirs), run_dirs, strict=True)]
    try:
        if once and not as_json:
            for board in boards:
                list(board.poll())
            _check(boards)
            _table(boards)
        else:
            _watch(boards, every, once=once, as_json=as_json)
            _check(boards)
    finally:
        lost = losses.lines(lost for board in boards for lost in board.follower.losses)
        problems = [str(problem) for board in boards for problem in board.follower.problems]
        render.damaged(problems)
        render.lost(lost)
    if problems or lost:
        raise typer.Exit(3)


def _watch(boards: Sequence[_Board], every: float, *, once: bool, as_json: bool) -> None:
    with render.live() as show:
        while True:
            over = all(board.finished() for board in boards)  # asked before the last look
            for board in boards:
                for news in board.poll():
                    if as_json:
                        render.record(news)
                    elif show is None:
                        render.line(_line(news))
            if show and not as_json:
                show(*_cells(boards))
            if over or once:
                return
            time.sleep(every)


def _check(boards: Sequence[_Board]) -> None:
    """UnansweredError for a key that is none of those that the runs have committed, if they have any."""
    from aggregator import match

    if known := set[str]().union(*(board.known for board in boards)):
        match(boards[0].keys, known, "key")


@dataclass
class _Board:
    """What is known of one run, and how its keys stand."""

    name: str
    path: Path
    keys: list[str]
    known: set[str] = field(default_factory=set[str])
    latest: dict[str, float] = field(default_factory=dict[str, float])
    step: int | None = None
    times: list[int] = field(default_factory=list[int])  # of its commits
    state: str = ""
    _looked: float = -_STATE_SECONDS  # for its state
    _led: set[str | None] = field(default_factory=set[str | None])  # keys that the leader says

    def __post_init__(self) -> None:
        from eventlog import Follower

        self.follower: Follower = Follower(self.path, records=False)

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics that were committed since, of the keys that are chosen."""
        for told in self.follower.poll():
            self._looked = -_STATE_SECONDS
            rows = told.commit.to_pylist()
            self.times = [*self.times[-1000:], *(_us(row["time"]) for row in rows[:1] if row["time"])]
            self.known.update(row["key"] for row in rows if row["key"] is not None)
            parts: dict[int, dict[str, Any]] = {}
            if rows[0]["leader"]:
                self._led.update(row["key"] for row in rows)
            for row in rows:
                speaks = rows[0]["leader"] or row["key"] not in self._led
                if row["key"] is not None and speaks and self._chosen(row["key"]):
                    exact = row["value_int"]
                    value = row["value"] if exact is None else exact
                    parts.setdefault(row["sub_index"] or 0, {})[row["key"]] = value
            for number, metrics in sorted(parts.items()):
                self.latest |= metrics
                self.step = rows[0]["global_step"]
                said = {"run": self.name, "step": self.step, "sub_index": number}
                yield {**said, "attempt": rows[0]["attempt"], "time": rows[0]["time"], "metrics": metrics}

    def _chosen(self, key: str) -> bool:
        from aggregator import fits

        return not self.keys or fits(key, self.keys)

    def finished(self) -> bool:
        """Whether nothing more will come."""
        over = self.follower.finished()
        if over:
            self._looked = -_STATE_SECONDS
        return over

    def pulse(self) -> str:
        """Return how the newest attempt ended, or whether the run lives."""
        reader = self.follower.reader
        if reader is None:
            return "not there"
        if time.monotonic() - self._looked >= _STATE_SECONDS:
            self._looked = time.monotonic()
            self.state = self._state(reader)
        return self.state

    def _state(self, reader: RunReader) -> str:
        attempts = reader.run.attempts()
        if attempts and attempts[-1].outcome:
            return attempts[-1].outcome
        signs = self.follower.signs()
        patience, now = pulse.stuck_after(self.times), time.time()
        return pulse.together(
            pulse.state(
                ended=sign.ended,
                seen_us=sign.seen_us,
                progress_us=max([sign.started_us, *self.times]),
                patience=patience,
                now=now,
            )
            for sign in signs
        )


def _line(news: dict[str, Any]) -> str:
    values = " ".join(f"{key}={_number(value)}" for key, value in news["metrics"].items())
    return f"{news['run']} step {news['step']}: {values}"


def _number(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"


def _cells(boards: Sequence[_Board]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the lines of the table: how each run is, and its newest values."""
    chosen = list(dict.fromkeys(key for board in boards for key in board.latest))
    shown = sorted(chosen) if boards[0].keys else sorted(chosen)[:_MOST_KEYS]
    lines = [
        ["state", *(board.pulse() for board in boards)],
        ["step", *(_number(board.step) for board in boards)],
        ["committed", *(_ago(board.times) for board in boards)],
        *([key, *(_number(board.latest.get(key)) for board in boards)] for key in shown),
    ]
    if len(shown) < len(chosen):
        lines.append([f"… and {len(chosen) - len(shown)} more: choose with --keys"])
    return ["", *(board.name for board in boards)], lines


def _table(boards: Sequence[_Board]) -> None:
    import pyarrow as pa

    heads, lines = _cells(boards)
    full = [[*line, *[""] * (len(heads) - len(line))] for line in lines]
    render.rows(pa.table(list(map(pa.array, zip(*full, strict=True))), names=heads), as_json=False)


def _ago(times: Sequence[int]) -> str:
    if not times:
        return ""
    seconds = max(0, round(time.time() - times[-1] / 1e6))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min ago" if hours else f"{minutes} min {seconds:02} s ago"


def _us(moment: datetime) -> int:
    return round(moment.astimezone(UTC).timestamp() * 1e6)
