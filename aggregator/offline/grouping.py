"""Which records are pooled, and by what: the records of keys that count, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from eventlog import Spread, errors, is_whole, moments

from .choice import speaking
from .names import unknown
from .pairing import among
from .payload import Payload
from .placing import groups
from .reading import NONE, codes, ints, nullable
from .recompute import moments_of, segments
from .tags import TAG, names_in, value_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from .history import History
    from .reading import Bools, Ints

    Places = NDArray[np.intp]

SEQUENCE: Final = "sequence"
BY: Final = ("step", "epoch", "attempt", "role", "rank", "session", "tracker", SEQUENCE)
# Why a window with a key has no value to tell, the first that applies, and what to do.
_LACKING: Final = {
    "without a step": "commit what is exported, or say which: set_step, export(step=)",
    "incomplete": "records are lost or still to be written: see info",
    "superseded": "a later attempt tells these steps: see attempts='all'",
    "in no export that counts": "it failed, or was of one rank beside the leader: see by='rank'",
}
POOLED: Final = pa.schema(
    {
        **dict.fromkeys(("run", "session", "role", "key", "kind", "spread"), pa.string()),
        **dict.fromkeys(("rank", "record_id", "window", "call", "step", "count"), pa.int64()),
        **dict.fromkeys(("min", "max"), pa.float64()),
        "whole": pa.bool_(),
    }
)
_BY: Final = f"{', '.join(BY)}, and tags, as in 'tags.modality'"
_SHARES: Final = (Spread.SHARES.value,)
_ALONE: Final = frozenset({"rank", "session", SEQUENCE})  # by these no two processes are put together
_OF_PROCESS: Final = frozenset({"role", "rank", "session"})


@dataclass(frozen=True, slots=True)
class Asked:
    """Which records a question is about: of what keys, by what, between which steps (both included).

    `every`: those of superseded attempts too. `named`: the answer has a column `key`.
    """

    keys: tuple[str, ...]
    by: tuple[str, ...]
    named: bool = False
    every: bool = False
    since: int | None = None
    until: int | None = None

    def __post_init__(self) -> None:
        if odd := [name for name in self.by if name not in BY and not name.startswith(TAG)]:
            raise errors.QueryError(f"expected to group by any of {_BY}, got {odd[0]!r}")

    @property
    def of_process(self) -> bool:
        """Whether processes are asked about, so that each stands for itself."""
        return not _OF_PROCESS.isdisjoint(self.by)


def checked_by(by: Any) -> tuple[str, ...]:
    """Return what to group by, each once; QueryError unless it is a name or several."""
    listed = [by] if isinstance(by, str) else by
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise errors.QueryError(f"expected to group by any of {_BY}, got {by!r}")
    return tuple(dict.fromkeys(listed))


def checked_bound(name: str, step: Any) -> int | None:
    """Return a bound; QueryError unless it is a step, or none."""
    if step is not None and not is_whole(step):
        raise errors.QueryError(f"expected {name} to be a step, got {step!r}")
    return None if step is None else int(step)


@dataclass(frozen=True, slots=True)
class Pool:
    """Groups of records: `columns` say what each group is, `rows` are its moments.

    `records[i]` are the records of the i-th history that are pooled, `steps[i]` the step that each counts
    for, `of[i]` its group. `shares`: which groups are of shares of numbers, put together;
    `whole`: which lack no rank's part, as far as the log knows.
    """

    columns: dict[str, pa.Array]
    rows: Ints
    records: Sequence[Places]
    steps: Sequence[Ints]
    of: Sequence[Places]
    shares: Bools
    whole: Bools

    def __len__(self) -> int:
        return len(self.rows)


def pool(histories: Sequence[History], asked: Asked) -> Pool:
    """Group the records that are asked about; UnansweredError when there are none."""
    counted = [_counted(history, asked) for history in histories]
    chosen = [those.between(asked) for those in counted]
    found = [(those.records, those.steps) for those in chosen]
    sizes = [len(records) for records, _ in found]
    if not sum(sizes):
        raise errors.UnansweredError(_nothing(histories, asked, np.concatenate([c.steps for c in counted])))
    names = [*(["key"] if asked.named else []), *(name for name in asked.by if name != SEQUENCE)]
    columns = {name: Column.of(histories, found, name) for name in ("run", *names)}
    numbers, n = groups(*(column.values for column in columns.values()))
    of = np.split(numbers, np.cumsum(sizes)[:-1])
    first = np.zeros(n, np.int64)
    first[numbers] = np.arange(len(numbers))
    said = {name: column.take(first) for name, column in columns.items()}
    records = [places for places, _ in found]
    rows = [moments_of(h.records.table, places) for h, places in zip(histories, records, strict=True)]
    steps = [steps for _, steps in found]
    shares = np.zeros(n, np.bool_)
    if _ALONE.isdisjoint(asked.by):
        for history, places, numbers in zip(histories, records, of, strict=True):
            shares[numbers[among(history, "spread", _SHARES)[places]]] = True
    whole = np.ones(n, np.bool_)
    for those, numbers in zip(chosen, of, strict=True):
        whole[numbers[~those.whole]] = False
    return Pool(said, merge(histories, records, steps, rows, of, n), records, steps, of, shares, whole)


def counting(history: History, *, every: bool) -> Bools:
    """Return which records count in the metric of their key: tensor-parallel copies once, for example."""
    counted = np.zeros(history.records.table.num_rows, np.bool_)
    counted[_speaking(history, None, every=every).records] = True
    return counted


def pooled(history: History, *, every: bool) -> pa.Table:
    """Return the records that count and the step each counts for, kept values or not: see POOLED.

    An export without reset covers records again: they have a row for each of its steps.
    """
    found = _speaking(history, None, every=every)
    found = found.once(found.steps)
    places = pa.array(found.records)
    own = {
        "call": pa.array(Payload(history).calls[found.records]),
        "step": pa.array(found.steps),
        "whole": pa.array(found.whole),
    }
    table = history.records.table
    columns = [own[name] if name in own else table[name].take(places) for name in POOLED.names]
    return pa.table(columns, names=POOLED.names).cast(POOLED)


class _Counted(NamedTuple):
    """Records, the step each counts for, and whether no rank's part is missing beside it."""

    records: Places
    steps: Ints
    whole: Bools

    def between(self, asked: Asked) -> _Counted:
        """Return those of the steps that are asked about."""
        chosen = np.ones(len(self.steps), np.bool_)
        if asked.since is not None:
            chosen &= self.steps >= asked.since
        if asked.until is not None:
            chosen &= self.steps <= asked.until
        return _Counted(self.records[chosen], self.steps[chosen], self.whole[chosen])

    def once(self, turns: Ints) -> _Counted:
        """Return each record once a turn, as it comes first; whole if it is each time."""
        turn = np.stack([self.records, turns], axis=1)
        _, first, of = np.unique(turn, axis=0, return_index=True, return_inverse=True)
        whole = np.ones(len(first), np.bool_)
        whole[of.reshape(-1)[~self.whole]] = False
        order = np.argsort(first)
        return _Counted(self.records[first[order]], self.steps[first[order]], whole[order])


def _counted(history: History, asked: Asked) -> _Counted:
    """Return all records, where processes are asked about, else those that count once."""
    if asked.of_process:
        placed = history.records
        chosen = among(history, "key", asked.keys)
        chosen &= placed.table["complete"].to_numpy() & (placed.steps != NONE)
        records = np.flatnonzero(chosen if asked.every else chosen & ~placed.superseded)
        return _Counted(records, placed.steps[records], np.ones(len(records), np.bool_))
    found = _speaking(history, set(asked.keys), every=asked.every)
    if len(found.records) == np.count_nonzero(np.bincount(found.records)):
        return found
    # An export without reset covers records again: once a step, or once in all.
    by_step = not {"step", "epoch", SEQUENCE}.isdisjoint(asked.by)
    return found.once(found.steps if by_step else np.zeros_like(found.steps))


def _nothing(histories: Sequence[History], asked: Asked, steps: Ints) -> str:
    """Say why there are no values: at which steps there are some, or what windows lack, and what to do."""
    keys = ", ".join(map(repr, asked.keys))
    if len(steps):
        given = {"since": asked.since, "until": asked.until}
        bounds = " and ".join(f"{name} {step}" for name, step in given.items() if step is not None)
        return f"expected values of {keys} {bounds}, got some of steps {steps.min()} to {steps.max()} alone"
    lacking = dict.fromkeys(_LACKING, 0)
    for history in histories:
        placed, left = history.records, among(history, "key", asked.keys)
        complete, every = placed.table["complete"].to_numpy(), np.ones(len(left), np.bool_)
        reasons = (placed.steps == NONE, ~complete, placed.superseded & (not asked.every), every)
        for what, those in zip(_LACKING, reasons, strict=True):
            lacking[what] += len(np.unique(placed.windows[left & those]))
            left &= ~those
    said = [
        f"{n} window{'' if n == 1 else 's'} {what} ({_LACKING[what]})" for what, n in lacking.items() if n
    ]
    return f"expected values of {keys} at some step, got {', '.join(said)}"


def _speaking(history: History, keys: Collection[str] | None, *, every: bool) -> _Counted:
    """Return the records behind the segments that speak for their key."""
    found = segments(history, keys)
    counted = np.isin(found.of_records, speaking(history, found, superseded=every))
    of = found.candidate[found.of_records[counted]]
    steps = np.array([made.step for made in found.candidates], np.int64)[of]
    records, windows = history.records, history.windows
    places = found.records[counted]
    of_window = windows.steps[np.searchsorted(windows.windows, records.windows[places])]
    steps = np.where(records.steps[places] == of_window, steps, records.steps[places])  # its own
    lacking = np.array([made.incomplete for made in found.candidates], np.bool_)[of]
    return _Counted(places, steps, ~lacking)


@dataclass(frozen=True, slots=True)
class Column:
    """What each of some records is: numbers (null is NONE), or the places of texts among `words`."""

    values: Ints
    words: Sequence[str] | None = None

    @classmethod
    def of(cls, histories: Sequence[History], found: Sequence[tuple[Places, Ints]], name: str) -> Column:
        """Return one thing about the records of every history, which come with their steps."""
        if name == "run":
            sizes = [len(records) for records, _ in found]
            return cls(np.repeat(np.arange(len(found)), sizes), [h.reading.label for h in histories])
        if name == "step":
            return cls(np.concatenate([steps for _, steps in found]))
        if name.startswith(TAG):
            columns = [Payload(history).tags for history in histories]
        else:
            columns = [history.records.table[name] for history in histories]
        if not pa.types.is_dictionary(columns[0].type):
            values = [ints(column)[records] for column, (records, _) in zip(columns, found, strict=True)]
            return cls(np.concatenate(values))
        texts = [column.combine_chunks().dictionary.to_pylist() for column in columns]
        if name.startswith(TAG):
            if name not in (known := names_in(text for those in texts for text in those)):
                raise errors.UnansweredError(unknown(name, known, "tag that was recorded"))
            texts = [[value_of(text, name) for text in those] for those in texts]
        words = sorted({word for those in texts for word in those if word is not None})
        place = {None: NONE, **{word: i for i, word in enumerate(words)}}
        codes_of = [np.array([place[word] for word in those] + [NONE], np.int64) for those in texts]
        return cls(
            np.concatenate(
                [
                    mapped[codes(column)[records]]  # null is -1, the last
                    for mapped, column, (records, _) in zip(codes_of, columns, found, strict=True)
                ]
            ),
            words,
        )

    def take(self, places: Places) -> pa.Array:
        """Return the values of some records as a column of an answer."""
        if self.words is None:
            return nullable(self.values[places])
        words = pa.array(self.words, pa.string())
        return pa.DictionaryArray.from_arrays(nullable(self.values[places]), words).cast(pa.string())


def merge(
    histories: Sequence[History],
    records: Sequence[Places],
    steps: Sequence[Ints],
    rows: Sequence[Ints],
    of: Sequence[Places],
    n: int,
) -> Ints:
    """Merge moments of records into groups: on each rank first, then over the ranks, as an export does."""
    by_rank: list[Ints] = []
    group: list[Places] = []
    for history, places, own, numbers in zip(histories, records, rows, of, strict=True):
        ranks, m = groups(numbers, history.records.sids[places])
        by_rank.append(moments.pool(own, ranks, m))
        group.append(np.zeros(m, np.int64))
        group[-1][ranks] = numbers
    if len(by_rank) == 1:  # what is large is not copied
        merged = moments.pool(by_rank[0], group[0], n)
    else:
        merged = moments.pool(np.concatenate(by_rank), np.concatenate(group), n)
    for history, places, at, own, numbers in zip(histories, records, steps, rows, of, strict=True):
        shares = among(history, "spread", _SHARES)[places]
        if shares.any():
            sids = history.records.sids[places[shares]]
            _count_shares_once(merged, own[shares, moments.COUNT], numbers[shares], at[shares], sids)
    return merged


def _count_shares_once(rows: Ints, counts: Ints, of: Places, steps: Ints, sids: Ints) -> None:
    """A number in parts is as many numbers as each rank holds parts of a step, not as there are parts."""
    places, n = groups(of, steps)
    ranks, m = groups(places, sids)
    of_rank, of_place, place = np.zeros(m, np.int64), np.zeros(n, np.int64), np.zeros(m, np.intp)
    np.add.at(of_rank, ranks, counts)
    place[ranks] = places
    np.maximum.at(of_place, place, of_rank)
    group = np.zeros(n, np.intp)
    group[places] = of
    np.subtract.at(rows[:, moments.COUNT], of, counts)
    np.add.at(rows[:, moments.COUNT], group, of_place)
