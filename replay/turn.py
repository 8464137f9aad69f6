"""When a commit came among those of its process: at its time, but where the clock was set back meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aggregator import Session

    Commit = tuple[int, int, int]  # step, attempt, time (µs)

_ORDER = """
select distinct session, commit, global_step, attempt, epoch_us(time) as us from commits where key is null
order by session, commit
"""


class Turn:
    """Gives the commits of one process, asked in their order, times that do not go back. All in µs.

    One that came when the clock had been set back is a microsecond behind the one before, so that no span of
    earlier ones holds it.
    """

    def __init__(self) -> None:
        self._time = self._turn = -1

    def of(self, time_us: int) -> int:
        """Return the turn of the next commit; parts of one have one time, and one turn."""
        if time_us >= self._turn:
            self._turn = time_us
        elif time_us != self._time:
            self._turn += 1
        self._time = time_us
        return self._turn


def in_turn(metrics: pa.Table, session: Session) -> pa.Table:
    """Return metrics of a session with a column more, `turn` (µs), where a clock was set back."""
    found = _strays(session) if _has_late(session.metrics()) else {}
    if not found:
        return metrics
    turns = [found.get(commit, commit[2]) for commit in commits_of(metrics)]
    return metrics.append_column("turn", pa.array(turns, pa.int64()))


def strays_of(metrics: pa.Table) -> dict[Commit, int]:
    """Return the turns of commits that are not their times."""
    if "turn" not in metrics.column_names:
        return {}
    turns = metrics["turn"].to_pylist()
    return {
        commit: turn for commit, turn in zip(commits_of(metrics), turns, strict=True) if turn != commit[2]
    }


def _strays(session: Session) -> dict[Commit, int]:
    found: dict[Commit, int] = {}
    turns: dict[str, Turn] = {}
    for row in session.sql(_ORDER).to_pylist():
        turn = turns.setdefault(row["session"], Turn()).of(row["us"])
        if turn != row["us"]:
            attempt = -1 if row["attempt"] is None else row["attempt"]
            found[row["global_step"], attempt, row["us"]] = turn
    return found


def commits_of(metrics: pa.Table) -> Iterator[Commit]:
    """Yield of each row of metrics the commit that it is of; -1 for an unknown attempt."""
    attempts = (-1 if attempt is None else attempt for attempt in metrics["attempt"].to_pylist())
    return zip(metrics["step"].to_pylist(), attempts, metrics["time"].cast("int64").to_pylist(), strict=True)


def _has_late(metrics: pa.Table) -> bool:
    """Whether some commit is older than one of an earlier step: else no order but theirs is possible."""
    names = ["attempt", "step", "time"]
    commits = metrics.group_by(names).aggregate([]).sort_by([(name, "ascending") for name in names])
    attempts, times = commits["attempt"].to_numpy(), commits["time"].cast("int64").to_numpy()
    return bool(((times[1:] < times[:-1]) & (attempts[1:] == attempts[:-1])).any())
