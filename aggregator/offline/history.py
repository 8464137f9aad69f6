"""One run in columns: every record, export, window and commit on the run's timeline.

Rows are worked on as columns; only windows (thousands, not records) become objects, for `timeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eventlog import Kind, lost_commits

from . import timeline
from .lapses import silenced, torn
from .placing import BOUND_BY, Placed, Windows, first_rows, place, place_commits, window_code, window_parts
from .reading import NONE, Reading, Rows, nullable, plain, read, shifted, without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from .reading import Ints
    from .timeline import Timeline

T = TypeVar("T")
BESIDE_TRAINING: Final = ("rollout", "eval-rollout")  # trackers that workflow_context names
# What the timeline asks of each.
_OF_EXPORTS: Final = (
    "window", "export_id", "window_first", "attempt", "step", "reset", "outcome", "tracker", "key",
)  # fmt: skip
_OF_COMMITS: Final = (
    "commit", "global_step", "attempt", "leader", "restored_step", "window_first", "window_last",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class History:
    """One run on its timeline."""

    reading: Reading
    timeline: Timeline
    made: Sequence[timeline.Export]  # the rows of `exports` as the timeline takes them
    leaders: Mapping[int, set[str]]  # attempt → the sessions that led it
    records: Placed
    exports: Placed
    windows: Placed
    commits: Placed
    _found: dict[Callable[[History], Any], Any] = field(default_factory=dict[Any, Any], repr=False)

    def once(self, find: Callable[[History], T]) -> T:
        """Return what a function finds in the run, found once and kept."""
        if find not in self._found:
            self._found[find] = find(self)
        return self._found[find]


def steps_of_windows(history: History) -> dict[tuple[str, int], int | None]:
    """Return the step of each window, by session and number; None for those bound to none."""
    columns = (history.windows.table[name].to_pylist() for name in ("session", "window", "step"))
    return {(session, window): step for session, window, step in zip(*columns, strict=True)}


def load(path: str | Path, label: str, offset: int = 0) -> History:
    """Read a run and place it on its timeline, `offset` steps later; raises as `reading.read` does."""
    with without_collections():
        return _load(path, label, offset)


def _load(path: str | Path, label: str, offset: int) -> History:
    reading = shifted(read(path, label), offset)
    seen = _Seen(reading)
    made = _exports(reading)
    firsts = first_rows(reading.commits.sids, reading.commits.ints("commit"))
    commits = _commits(reading, firsts)
    claims = [timeline.Claim(a.number, a.session, a.resume_step) for a in reading.attempts]
    lost = lost_commits(reading.reader.run, reading.states)
    found = timeline.resolve(seen.plain(), made, commits, claims, torn(lost, commits))
    leaders = _leaders(reading, commits, found)
    epochs = _epochs(reading, firsts, found)
    windows = seen.placed(found)
    rows, every = seen.rows(), np.arange(len(seen.codes))
    return History(
        reading=reading,
        timeline=found,
        made=made,
        leaders=leaders,
        records=place(reading, reading.records, windows, seen.of_records, found, epochs, by_key=True),
        exports=place(reading, reading.exports, windows, seen.of_exports, found, epochs),
        windows=place(reading, rows, windows, every, found, epochs),
        commits=place_commits(reading, found, firsts, silenced(reading, lost, commits, found, leaders)),
    )


class _Seen:
    """Every window that a record, an export row or a loss tells of, sorted by (session, number)."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        sid = {producer.session: i for i, producer in enumerate(reading.producers)}
        of_records = window_code(reading.records.sids, reading.records.ints("window", 0))
        of_exports = window_code(reading.exports.sids, reading.exports.ints("window", 0))
        lost = np.array([window_code(sid[session], window) for session, window in reading.damaged], np.int64)
        # A window's records mostly lie together: what is asked of each is asked of such runs of them.
        self._starts = first_rows(of_records)
        in_a_row = np.diff(np.append(self._starts, len(of_records)))
        self.codes = np.unique(np.concatenate([of_records[self._starts], of_exports, lost]))
        self._of_starts = np.searchsorted(self.codes, of_records[self._starts])
        self.of_records = np.repeat(self._of_starts, in_a_row)
        self.of_exports = np.searchsorted(self.codes, of_exports)
        self.counts = np.bincount(self._of_starts, in_a_row, len(self.codes)).astype(np.int64)
        self.sids, self.numbers = window_parts(self.codes)
        self.complete = ~(np.isin(self.codes, lost) | self._lacking_export(of_exports))

    def _lacking_export(self, of_exports: Ints) -> NDArray[np.bool_]:
        """Return the windows whose export row damage may have taken: nobody knows what they came to."""
        damaged = {problem.path.name for problem in self.reading.reader.problems}
        hurt = [
            sid
            for sid, producer in enumerate(self.reading.producers)
            if any(producer.session in name for name in damaged)
        ]
        return np.isin(self.sids, hurt) & ~np.isin(self.codes, of_exports)

    def _greatest(self, column: Ints) -> Ints:
        """Return the greatest value of a column in the records of each window."""
        out = np.full(len(self.codes), NONE)
        if len(self._starts):
            greatest = np.maximum.reduceat(column, self._starts)
            np.maximum.at(out, self._of_starts, greatest)
        return out

    def _every(self, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return whether all records of each window are among some."""
        out = np.ones(len(self.codes), np.bool_)
        if len(self._starts):
            np.logical_and.at(out, self._of_starts, np.logical_and.reduceat(rows, self._starts))
        return out

    def _said(self) -> tuple[Ints, Ints]:
        """Return the step that all records of each window carry, and the greatest that any carries for all.

        What was measured at a step of its own carries that for itself alone, unless the window has only such.
        """
        records = self.reading.records
        steps = records.ints("step")
        own = records.equals("kind", Kind.SCALAR.value) & records.table["tags"].is_valid().to_numpy()
        if own.any():
            own &= ~self._every(own)[self.of_records]
            steps = np.where(own, NONE, steps)
        greatest = self._greatest(steps)
        same = own | (steps == greatest[self.of_records])
        return np.where(self._every(same), greatest, NONE), greatest

    def _training(self) -> NDArray[np.bool_]:
        """Return which windows hold more than rollouts and timings; of what cannot be read it is assumed."""
        out = ~self.complete & (self.counts == 0)
        records = self.reading.records
        beside = records.equals("kind", Kind.TIMING.value)
        for tracker in BESIDE_TRAINING:
            beside |= records.equals("tracker", tracker)
        if len(self._starts):
            np.logical_or.at(out, self._of_starts, np.logical_or.reduceat(~beside, self._starts))
        return out

    def plain(self) -> list[timeline.Window]:
        """Return the windows as the timeline takes them."""
        sessions = [producer.session for producer in self.reading.producers]
        records = self.reading.records
        columns = [
            self.sids,
            self.numbers,
            self._greatest(records.ints("time")),
            *self._said(),
            self._greatest(records.ints("attempt")),
            self._training(),
        ]
        return [
            timeline.Window(sessions[sid], number, *map(_some, said), training=trained)
            for sid, number, *said, trained in zip(*(c.tolist() for c in columns), strict=True)
        ]

    def placed(self, found: Timeline) -> Windows:
        """Return the windows with what the timeline says of them."""
        sessions = [producer.session for producer in self.reading.producers]
        keys = zip(self.sids.tolist(), self.numbers.tolist(), strict=True)
        bindings = [found.windows[sessions[sid], number] for sid, number in keys]
        return Windows(
            codes=self.codes,
            attempts=np.array([b.attempt for b in bindings], np.int64),
            steps=np.array([NONE if b.step is None else b.step for b in bindings], np.int64),
            bound_by=np.array([BOUND_BY.index(b.bound_by) if b.bound_by else -1 for b in bindings], np.int8),
            complete=self.complete,
        )

    def rows(self) -> Rows:
        """Return the windows as rows of their own."""
        n = len(self.codes)
        none = np.full(n, NONE)
        columns = {
            "window": pa.array(self.numbers),
            "time": nullable(self._greatest(self.reading.records.ints("time")), pa.timestamp("us", "UTC")),
            "step": nullable(none),
            "attempt": nullable(none),
            "records": pa.array(self.counts),
        }
        return Rows(pa.table(columns), self.sids)


def _some(value: int) -> int | None:
    return None if value == NONE else value


# -- what the timeline takes besides -----------------------------------------------------------------------


def _exports(reading: Reading) -> list[timeline.Export]:
    sessions = [producer.session for producer in reading.producers]
    columns = {name: plain(reading.exports.table[name]) for name in _OF_EXPORTS}
    columns["time"] = reading.exports.ints("time").tolist()
    columns["session"] = [sessions[sid] for sid in reading.exports.sids.tolist()]
    columns["members"] = _members(reading.exports.table["members"])
    columns["first"] = columns["window_first"]
    columns["reset"] = [reset is not False for reset in columns["reset"]]
    columns["ok"] = [outcome == "ok" for outcome in columns["outcome"]]
    rows = zip(*(columns[name] for name in timeline.Export._fields), strict=True)
    return [timeline.Export(*row) for row in rows]


def _members(column: pa.ChunkedArray) -> list[tuple[int, ...] | None]:
    """Return the group of each export; the same ranks are one object, or a thousand ranks cost gigabytes."""
    lists = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    offsets, ranks = lists.offsets.to_numpy(), lists.values.to_numpy()
    known: dict[bytes, tuple[int, ...]] = {}
    found: list[tuple[int, ...] | None] = []
    for start, stop, there in zip(offsets, offsets[1:], lists.is_valid().to_pylist(), strict=False):
        group = ranks[start:stop]
        if (key := group.tobytes()) not in known:
            known[key] = tuple(group.tolist())
        found.append(known[key] if there else None)
    return found


def _commits(reading: Reading, firsts: NDArray[np.intp]) -> list[timeline.Commit]:
    sessions = [producer.session for producer in reading.producers]
    commits = reading.commits.take(firsts)
    columns = {name: plain(commits.table[name]) for name in _OF_COMMITS}
    times, adds = commits.ints("time").tolist(), (commits.ints("epoch") == NONE).tolist()
    return [
        timeline.Commit(
            session=sessions[sid],
            number=columns["commit"][i],
            time=times[i],
            step=columns["global_step"][i],
            attempt=columns["attempt"][i],
            leader=bool(columns["leader"][i]),
            restored=columns["restored_step"][i],
            first=columns["window_first"][i],
            last=columns["window_last"][i],
            adds=adds[i],
        )
        for i, sid in enumerate(commits.sids.tolist())
    ]


def _leaders(reading: Reading, commits: Sequence[timeline.Commit], found: Timeline) -> dict[int, set[str]]:
    leaders: dict[int, set[str]] = {}
    for attempt, commit in zip(found.commit_attempts, commits, strict=True):
        if commit.leader:
            leaders.setdefault(attempt, set()).add(commit.session)
    for claim in reading.attempts:
        if claim.session:
            leaders.setdefault(claim.number, {claim.session})
    return leaders


def _epochs(reading: Reading, firsts: NDArray[np.intp], found: Timeline) -> dict[tuple[int, int], int]:
    """Return (attempt, step) → epoch; the leader's word stands before the others'."""
    commits = reading.commits.take(firsts)
    leader = pc.fill_null(commits.table["leader"], fill_value=False).to_pylist()
    said = zip(
        leader,
        found.commit_attempts,
        commits.ints("global_step").tolist(),
        commits.ints("epoch").tolist(),
        strict=True,
    )
    return {(attempt, step): epoch for _, attempt, step, epoch in sorted(said) if epoch != NONE}
