"""Small functions from a run in columns to the tables a session answers with, deterministically sorted."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from eventlog import schema, shown

from .absentees import absentees
from .choice import choose, names_of
from .history import steps_of_windows
from .placing import first_rows, groups, leads, metrics_of
from .reading import NONE, codes, ints, nullable
from .recompute import segments, specs_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from eventlog import Loss, Problem, Producer, Pruned

    from .choice import Spoken
    from .history import History
    from .reading import Bools, Ints
    from .recompute import Segments

TIME: Final = pa.timestamp("us", "UTC")
TEXT: Final = pa.large_string()

METRICS: Final = pa.schema(
    {
        "run": TEXT,
        "step": pa.int64(),
        "key": TEXT,
        "value": pa.float64(),
        "time": TIME,
        "attempt": pa.int64(),
        "sub_index": pa.int64(),
        "value_int": pa.int64(),
        "epoch": pa.int64(),
        "superseded": pa.bool_(),
    }
)
_IDENTITY: Final = ("step", "key", "attempt", "sub_index")
_OF_A_ROW: Final = frozenset(
    {"run", "step", "attempt", "sub_index", "time"}
)  # what no key's column is called


# -- metrics -------------------------------------------------------------------------------------------


def committed(history: History) -> pa.Table:
    """Return every committed metric by step, key, attempt and sub-index, superseded ones too."""
    commits = history.commits
    places = np.flatnonzero(metrics_of(commits))
    alphabetical = _alphabetical(commits.table["key"])[places]
    subs = ints(commits.table["sub_index"], 0)[places]
    columns = (subs, commits.attempts[places], alphabetical, commits.steps[places])
    order = np.lexsort([column for column in columns if (column != column[:1]).any()] or columns)
    rows = commits.table.take(places[order])
    own = {"step": rows["global_step"], "sub_index": pa.array(subs[order])}
    columns = [own[name] if name in own else rows[name] for name in METRICS.names]
    return pa.table(columns, names=METRICS.names).cast(METRICS)


def recomputed(history: History, names: set[str] | None = None, *, superseded: bool) -> pa.Table:
    """Return what the log says of all or some names at every step, beside what was committed.

    `source` and `export_id` tell whose numbers speak; `differs` (null: nothing was committed) and
    `incomplete` (records of a rank are missing) tell how far to trust them. Where a recorded key was
    committed of which the log cannot say the number any more (a quantile without its payload, a window
    without its export row), `value`, `differs` and `source` are null and `incomplete` is true.
    """
    recorded = [(spec.key, name) for spec in specs_of(history) for name in names_of(spec)]
    wanted = {name for _, name in recorded} if names is None else names
    keys = None if names is None else {key for key, name in recorded if name in names}
    found = segments(history, keys)
    told = _spoken(history, found, choose(history, found, names, superseded=superseded))
    rest = _unspoken(history, wanted & {name for _, name in recorded}, told, superseded=superseded)
    rows = pa.concat_tables([told, rest], promote_options="default")
    return rows.sort_by([(name, "ascending") for name in _IDENTITY]).combine_chunks()


def _spoken(history: History, found: Segments, spoken: Sequence[Spoken]) -> pa.Table:
    of = [found.candidates[found.candidate[s.segment]] for s in spoken]
    return pa.table(
        {
            "run": pa.array([history.reading.label] * len(spoken), TEXT),
            "step": pa.array([made.step for made in of], pa.int64()),
            "key": pa.array([s.name for s in spoken], TEXT),
            "value": pa.array([float(s.number) for s in spoken], pa.float64()),
            "time": pa.array([s.time for s in spoken], pa.int64()).cast(TIME),
            "attempt": pa.array([made.attempt for made in of], pa.int64()),
            "sub_index": pa.array([s.sub_index for s in spoken], pa.int64()),
            "value_int": pa.array([s.exact for s in spoken], pa.int64()),
            "committed": pa.array([s.committed and s.committed.value for s in spoken], pa.float64()),
            "differs": pa.array([s.differs for s in spoken], pa.bool_()),
            "incomplete": pa.array([made.incomplete for made in of], pa.bool_()),
            "source": pa.array([made.source for made in of], TEXT),
            "export_id": pa.array([made.export_id for made in of], TEXT),
            "superseded": pa.array(found.superseded[[s.segment for s in spoken]], pa.bool_()),
        }
    )


def _unspoken(history: History, names: Collection[str], told: pa.Table, *, superseded: bool) -> pa.Table:
    """Return what was committed under some names and is not among what the log says."""
    rows = committed(history)
    keys = rows["key"].combine_chunks().dictionary_encode()
    named = np.array([word in names for word in keys.dictionary.to_pylist()], np.bool_)
    chosen = named[keys.indices.to_numpy()]
    if not superseded:
        chosen &= ~rows["superseded"].to_numpy()
    rows = rows.filter(pa.array(chosen))
    said = set(_identities(told))
    last = {place: i for i, place in enumerate(_identities(rows)) if place not in said}
    rows = rows.take(pa.array(list(last.values()), pa.int64()))
    whose = rows.select(["run", *_IDENTITY, "time", "superseded"])
    incomplete = pa.array(np.ones(len(rows), np.bool_))
    return whose.append_column("committed", rows["value"]).append_column("incomplete", incomplete)


def _identities(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in _IDENTITY), strict=True)


def select(
    rows: pa.Table, names: set[str] | None, since: int | None, until: int | None, *, superseded: bool
) -> pa.Table:
    """Return the rows of some names and steps; without superseded ones, and that column, unless wanted."""
    steps = ints(rows["step"])
    chosen = np.ones(rows.num_rows, np.bool_)
    if since is not None:
        chosen &= steps >= since
    if until is not None:
        chosen &= steps <= until
    if names is not None:
        keys = rows["key"].combine_chunks().dictionary_encode()
        chosen &= np.array([word in names for word in keys.dictionary.to_pylist()], np.bool_)[
            keys.indices.to_numpy()
        ]
    if superseded:
        return rows.filter(pa.array(chosen))
    chosen &= ~rows["superseded"].to_numpy()
    return rows.filter(pa.array(chosen)).drop_columns(["superseded"])


def wide(rows: pa.Table, *, by_attempt: bool) -> pa.Table:
    """Pivot metrics: a row per run, step and sub-index, a column per key; null where it was not logged.

    A key that was always an integer gets an integer column, exact beyond 2**53. `time` is the row's latest.
    A key that is called as a column of every row has a tilde before it: `~step`, and so `~~step` for `~step`.
    """
    words = rows["run"].combine_chunks().dictionary_encode()
    runs, steps, subs = words.indices.to_numpy(), ints(rows["step"]), ints(rows["sub_index"], 0)
    attempts = ints(rows["attempt"], 0) if by_attempt else np.zeros(len(steps), np.int64)
    row_of, n = groups(runs, steps, attempts, subs)
    first = np.zeros(n, np.int64)
    first[row_of] = np.arange(len(row_of))
    times = np.full(n, NONE)
    np.maximum.at(times, row_of, ints(rows["time"]))
    columns: dict[str, Any] = {"run": words.take(first).cast(TEXT), "step": pa.array(steps[first])}
    if by_attempt:
        columns["attempt"] = pa.array(attempts[first])
    columns |= {"sub_index": pa.array(subs[first]), "time": nullable(times, TIME)}
    names = list(columns)
    arrays = list(columns.values())
    values, integers = rows["value"].combine_chunks(), rows["value_int"].combine_chunks()
    for name, places in _by_key(rows["key"]):
        names.append(f"~{name}" if name.lstrip("~") in _OF_A_ROW else name)
        arrays.append(_pivoted(values.take(places), integers.take(places), row_of[places], n))
    return pa.table(arrays, names=names)


def _by_key(keys: pa.ChunkedArray) -> list[tuple[str, NDArray[np.intp]]]:
    """Return (key, its places in order) for every key, by name."""
    encoded = keys.combine_chunks().cast(TEXT).dictionary_encode()
    numbers = encoded.indices.to_numpy()
    order = np.argsort(numbers, kind="stable")
    cuts = np.searchsorted(numbers[order], np.arange(1, len(encoded.dictionary)))
    return sorted(
        zip(encoded.dictionary.to_pylist(), np.split(order, cuts), strict=False), key=lambda pair: pair[0]
    )


def _pivoted(given: pa.Array, exact: pa.Array, row_of: Ints, n: int) -> pa.Array:
    known = given.is_valid().to_numpy(zero_copy_only=False)
    integers = exact.null_count == given.null_count
    missing = np.ones(n, np.bool_)
    missing[row_of[known]] = False
    out = np.zeros(n, np.int64 if integers else np.float64)
    out[row_of[known]] = (exact if integers else given).drop_null().to_numpy(zero_copy_only=False)
    return pa.array(out, mask=missing)


def _alphabetical(column: pa.ChunkedArray) -> Ints:
    """Return the place of each text among the distinct ones in sorted order."""
    words = column.combine_chunks().dictionary.to_pylist()
    place = np.zeros(len(words) + 1, np.int64)
    place[np.array(sorted(range(len(words)), key=words.__getitem__), np.intp)] = np.arange(len(words))
    return place[codes(column)]


# -- what there is -------------------------------------------------------------------------------------


def attempts(history: History) -> pa.Table:
    """Return the run's attempts: who led them, how they ended, what they own."""
    claims = {claim.number: claim for claim in history.reading.attempts}
    people = {producer.session: producer for producer in history.reading.producers}
    rows: list[dict[str, Any]] = []
    newest = max(history.timeline.owned_from, default=None)
    for attempt, owned_from in history.timeline.owned_from.items():
        claim = claims.get(attempt)
        session = (claim and claim.session) or min(history.leaders.get(attempt, ()), default=None)
        led = people.get(session or "") or claim
        rows.append(
            {
                "run": history.reading.label,
                "attempt": attempt,
                "started": claim and claim.started_us,
                "ended": claim and claim.ended_us,
                "outcome": (claim and claim.outcome) or (None if attempt == newest else "unknown"),
                "role": led and led.role,
                "rank": led and led.rank,
                "session": session,
                "host": led and led.host,
                "resume_step": claim and claim.resume_step,
                "owned_from": owned_from,
                **_committed_in(history, attempt),
            }
        )
    return pa.Table.from_pylist(rows, _ATTEMPTS)


def _committed_in(history: History, attempt: int) -> dict[str, int]:
    """Return how many commits an attempt made, and of how many steps they count or count no more."""
    own = np.flatnonzero((history.commits.attempts == attempt) & _leading(history))
    commits = history.commits.table
    live = ~history.commits.superseded[own]
    steps = history.commits.steps[own]
    metric = metrics_of(history.commits)[own]
    counting = np.unique(steps[metric & live])
    return {
        "commits": len(first_rows(history.commits.sids[own], ints(commits["commit"])[own])),
        "steps": len(counting),
        "superseded_steps": len(np.setdiff1d(steps[metric], counting)),
    }


def producers(history: History) -> pa.Table:
    """Return the run's recording processes: how far each got, and what it lost."""
    rows = [
        {
            "run": history.reading.label,
            "session": state.producer.session,
            "role": state.producer.role,
            "rank": state.producer.rank,
            "world": state.producer.world,
            "world_size": state.producer.world_size,
            "host": state.producer.host,
            "pid": state.producer.pid,
            "started": state.producer.started_us,
            "last_seen": state.heartbeat_us or None,
            "ended": state.ended,
            "windows": len(state.complete),
            "incomplete_windows": len(state.incomplete),
            "lost_rows": sum(loss.rows for loss in state.losses),
            "records_bytes": state.bytes[schema.Stream.RECORDS],
            "payload_bytes": state.bytes[schema.Stream.PAYLOAD],
            "commits_bytes": state.bytes[schema.Stream.COMMITS],
        }
        for state in history.reading.states
    ]
    return pa.Table.from_pylist(rows, _PRODUCERS)


def info(history: History) -> dict[str, Any]:
    """Return what there is to know of a run at a glance, as plain values."""
    reading = history.reading
    people, lives = producers(history).to_pylist(), attempts(history).to_pylist()
    metric = metrics_of(history.commits)
    steps = np.unique(history.commits.steps[_leading(history) & ~history.commits.superseded])
    unbound = history.windows.steps == NONE
    bound = steps_of_windows(history)
    manifest = reading.reader.run.manifest or {}
    created = manifest.get("created_us")
    return {
        "run": reading.reader.run.id,
        "path": shown(reading.reader.run.path),
        "label": reading.label,
        "created": None if created is None else datetime.fromtimestamp(created / 1e6, UTC),
        "format": manifest.get("format"),
        "attempts": [_without_run(row) for row in lives],
        "producers": [
            {**_without_run(row), "not_durable": state.told.not_durable, "waited": state.told.waited_us / 1e6}
            for row, state in zip(people, reading.states, strict=True)
        ],
        "steps": {
            "first": int(steps[0]) if len(steps) else None,
            "last": int(steps[-1]) if len(steps) else None,
            "count": len(steps),
        },
        "superseded_steps": sum(row["superseded_steps"] for row in lives),
        "superseded_rows": int((metric & history.commits.superseded).sum()),
        "unbound_windows": int(unbound.sum()),
        "incomplete_windows": history.windows.table["complete"].to_pylist().count(False),
        "keys": len(history.records.table["key"].combine_chunks().unique()),
        "records": history.records.table.num_rows,
        "metrics": int((metric & ~history.commits.superseded).sum()),
        "losses": [_loss(s.producer, loss, bound) for s in reading.states for loss in s.losses],
        "pruned": [_pruned(state.producer, gone) for state in reading.states for gone in state.prunes],
        "problems": [str(problem) for problem in problems(history)],
        "bytes": {
            stream.name.lower(): sum(s.bytes[stream] for s in reading.states) for stream in schema.Stream
        },
    }


def problems(history: History) -> list[Problem]:
    """Return what could not be read, and which ranks left nothing of an export that they took part in."""
    return [*history.reading.reader.problems, *history.once(absentees)]


def _leading(history: History) -> Bools:
    """Whether each commit row is a leader's; all of them where no leader's are left."""
    found = leads(history.commits.table)
    return found if found.any() else np.ones(len(found), np.bool_)


def _without_run(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "run"}


def _loss(producer: Producer, loss: Loss, bound: Mapping[tuple[str, int], int | None]) -> dict[str, Any]:
    row = loss.as_row(producer)
    if row["step"] is None and loss.stream is not schema.Stream.COMMITS:  # whose windows are numbers
        row["step"] = bound.get((producer.session, loss.window))
    return row


def _pruned(producer: Producer, gone: Pruned) -> dict[str, Any]:
    first, last = gone.windows
    return {
        "role": producer.role,
        "rank": producer.rank,
        "session": producer.session,
        "first_window": None if first < 0 else first,
        "last_window": None if last < 0 else last,
        "rows": gone.rows,
        "bytes": gone.bytes,
    }


_ATTEMPTS: Final = pa.schema(
    {
        "run": TEXT,
        "attempt": pa.int64(),
        "started": TIME,
        "ended": TIME,
        "outcome": TEXT,
        "role": TEXT,
        "rank": pa.int64(),
        "session": TEXT,
        "host": TEXT,
        "resume_step": pa.int64(),
        "owned_from": pa.int64(),
        "commits": pa.int64(),
        "steps": pa.int64(),
        "superseded_steps": pa.int64(),
    }
)
_PRODUCERS: Final = pa.schema(
    {
        "run": TEXT,
        "session": TEXT,
        "role": TEXT,
        "rank": pa.int64(),
        "world": TEXT,
        "world_size": pa.int64(),
        "host": TEXT,
        "pid": pa.int64(),
        "started": TIME,
        "last_seen": TIME,
        "ended": pa.bool_(),
        "windows": pa.int64(),
        "incomplete_windows": pa.int64(),
        "lost_rows": pa.int64(),
        "records_bytes": pa.int64(),
        "payload_bytes": pa.int64(),
        "commits_bytes": pa.int64(),
    }
)
