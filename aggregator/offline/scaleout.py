"""Values read elsewhere: the statistics of a question as tasks over ranges of steps, on any engine.

A task reads what the session itself would read of its steps, and returns what is to be known of each record,
or of each group: numbers, not values. The session puts them together in the order in which it would have read
the records, so an answer is the same to the bit whatever the engine, its workers, and what died meanwhile.
Finished tasks lie in `RUN/tables/answers` until the question is answered: asked again after its process died,
it goes on from there.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from eventlog import Problem, errors, histogram, moments, read_file, schema

from . import bins
from .checked import NewFile
from .compacted import FOLDER
from .engine import Engine
from .grouping import Asked, pool
from .history import load
from .payload import cuts, sizes
from .reading import ints
from .statistics import quantiles, summary
from .tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from numpy.typing import NDArray

    from .drawing import Wanted
    from .engine import Name
    from .grouping import Pool
    from .history import History

    Places = NDArray[np.intp]
    Arrays = dict[str, NDArray[Any]]

RANGE_BYTES: Final = 256 << 20
_CRC_BYTES: Final = 4


class Run(NamedTuple):
    """A run as `load` takes it."""

    path: str
    label: str
    offset: int


@dataclass(frozen=True, slots=True)
class Question:
    """What is done with the values of each record or group.

    Their moments and deviations, record by record, if nothing else is said. `edges`: by group, how many lie
    in equal bins: from, to, how many; `log`: in the fixed bins; `quantiles`: those of each group.
    """

    asked: Asked
    wanted: Wanted
    edges: tuple[float, float, int] | None = None
    log: bool = False
    quantiles: tuple[float, ...] = ()


class _Task(NamedTuple):
    runs: tuple[Run, ...]
    i: int  # which of them
    question: Question
    steps: tuple[int, int]
    print: int  # of the records it is about
    answer: str  # where it is written; "": it is returned


class Elsewhere:
    """An engine that reads the values of a session's runs."""

    def __init__(self, runs: Sequence[Run], engine: Engine) -> None:
        self._runs = tuple(runs)
        self._engine = engine

    @classmethod
    def of(cls, runs: Sequence[Run], engine: Name | None, workers: int | None) -> Self | None:
        """Return the engine of a name, None without one; QueryError for workers of none."""
        if engine is not None:
            return cls(runs, Engine(engine, workers))
        if workers is not None:
            raise errors.QueryError(f"expected workers of an engine, got {workers!r} and no engine")
        return None

    def close(self) -> None:
        """Let go of its workers."""
        self._engine.close()

    def ask(self, seen: Tally, question: Question) -> list[tuple[int, Places, Arrays]]:
        """Return (history, places among its records, what is known of them) for all ranges of steps."""
        ranges = [(i, which) for i in range(len(seen.histories)) for which in self._ranges(seen, i)]
        told = hashlib.blake2b(repr((self._runs, question)).encode(), digest_size=12).hexdigest()
        folder = _folder(Path(self._runs[0].path), told)
        tasks = [self._task(seen, question, i, which, folder) for i, which in ranges]
        answers = self._engine.each(_answer, tasks)
        found = [one or _kept(task) for task, one in zip(tasks, answers, strict=True)]
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for (i, which), arrays in zip(ranges, found, strict=True):
            told_of = seen.histories[i].reading.reader.run.found
            for path, *what in json.loads(arrays["problems"].tobytes()):
                told_of.add(Problem(Path(path), *what))
            seen.note(i, which, arrays["count"], arrays["missing"], arrays["unmatched"])
        return [(i, which, arrays) for (i, which), arrays in zip(ranges, found, strict=True)]

    def holds_groups(self, seen: Tally) -> bool:
        """Whether each group lies in one range of steps, as those by step do: then a task knows all of it."""
        ranges = [(i, which) for i in range(len(seen.histories)) for which in self._ranges(seen, i)]
        return len(seen.made) == sum(len(np.unique(seen.made.of[i][which])) for i, which in ranges)

    def _ranges(self, seen: Tally, i: int) -> list[Places]:
        """Return the places of records in ranges of steps that hold about as many bytes as a task reads."""
        steps, records = seen.made.steps[i], seen.made.records[i]
        if not len(steps):
            return []
        distinct, of = np.unique(steps, return_inverse=True)
        per_step = np.bincount(of, weights=sizes(seen.histories[i])[records]).astype(np.int64)
        pieces = np.split(distinct, cuts(per_step, RANGE_BYTES))
        return [np.flatnonzero((steps >= piece[0]) & (steps <= piece[-1])) for piece in pieces]

    def _task(self, seen: Tally, question: Question, i: int, which: Places, folder: Path | None) -> _Task:
        steps = seen.made.steps[i][which]
        between = int(steps.min()), int(steps.max())
        mark = fingerprint(seen.histories[i], seen.made, i, which)
        name = f"{i}-{between[0]:08d}-{between[1]:08d}.{mark:08x}.npz"
        return _Task(self._runs, i, question, between, mark, "" if folder is None else str(folder / name))


def fingerprint(history: History, made: Pool, i: int, which: Places) -> int:
    """Return a checksum of which records are asked about: two processes that agree on it read the same."""
    records = made.records[i][which]
    crc_of = np.array([schema.crc32c(p.session.encode()) for p in history.reading.producers], np.int64)
    columns = [
        ints(history.records.table["record_id"])[records],
        crc_of[history.records.sids[records]],
        made.steps[i][which],
        np.unique(made.of[i][which], return_inverse=True)[1],
    ]
    return schema.crc32c(np.stack([*columns]).astype(np.int64).tobytes())


# -- in a worker -------------------------------------------------------------------------------------------


def _answer(task: _Task) -> Arrays:
    """Answer a task, or find its answer; nothing is returned of what is written. Pure.

    What cannot be written is returned: the disk is full, or a session that asked the same has cleared up.
    """
    path = Path(task.answer)
    if task.answer and _is_there(path):
        return {}
    found = _computed(task)
    if not task.answer:
        return found
    held = io.BytesIO()
    np.savez(held, **found)  # pyright: ignore[reportArgumentType]
    data = held.getvalue()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NewFile(path) as file:
            file.write(schema.crc32c(data).to_bytes(_CRC_BYTES, "little") + data)
            file.finish()
    except OSError:
        return found
    return {}


def _computed(task: _Task) -> Arrays:
    for _ in range(2):
        histories = _histories(task.runs)
        made = pool(histories, task.question.asked)
        steps = made.steps[task.i]
        which = np.flatnonzero((steps >= task.steps[0]) & (steps <= task.steps[1]))
        if fingerprint(histories[task.i], made, task.i, which) == task.print:
            found = _known(Tally(histories, made, task.question.asked, task.question.wanted), task, which)
            problems = histories[task.i].reading.reader.problems
            said = json.dumps([(str(one.path), one.reason, one.frame, one.offset) for one in problems])
            return {**found, "problems": np.frombuffer(said.encode(), np.uint8)}
        _histories.cache_clear()  # a live run has grown since this process read it
    raise errors.UnansweredError(
        f"expected steps {task.steps[0]} to {task.steps[1]} as they were when the run was opened, got other "
        f"records: it is live; ask again, or with `until`; {task.runs[task.i].path}"
    )


@lru_cache(maxsize=1)
def _histories(runs: tuple[Run, ...]) -> list[History]:
    return [load(*run) for run in runs]


def _known(seen: Tally, task: _Task, which: Places) -> Arrays:
    """Return what a question wants to know of some records."""
    question, n = task.question, len(which)
    groups, of = np.unique(seen.made.of[task.i][which], return_inverse=True)
    at_of = {int(place): at for at, place in enumerate(which.tolist())}
    account = np.zeros((3, n), np.int64)  # values, missing, unmatched
    by_record = question.edges is None and not question.log and not question.quantiles
    rows, spread = moments.empty(n if by_record else 0), np.zeros((n if by_record else 0, 4))
    columns = question.edges[2] if question.edges else histogram.BUCKETS if question.log else 0
    counts = np.zeros((len(groups), columns), np.int64)
    nonfinite = np.zeros(len(groups), np.int64)
    values: list[list[NDArray[Any]]] = [[] for _ in groups]
    for place, _, drawn in seen.draw_of(task.i, which):
        at = at_of[place]
        account[:, at] = len(drawn.values), drawn.missing, drawn.unmatched
        if by_record:
            rows[at] = moments.of(drawn.values)
            if len(drawn.values):
                one = summary(drawn.values)
                spread[at] = one.count, one.odd, one.means[0], one.squares[0]
        elif question.quantiles:
            values[of[at]].append(drawn.values)
        else:
            counted = binned(drawn.values, question.edges)
            counts[of[at]] += counted
            nonfinite[of[at]] += len(drawn.values) - counted.sum()
    found = {"count": account[0], "missing": account[1], "unmatched": account[2]}
    if by_record:
        return {**found, "moments": rows, "spread": spread}
    if question.quantiles:
        said = [quantiles(np.concatenate([*own, _EMPTY]), question.quantiles) for own in values]
        none = [[math.nan if one is None else one for one in row] for row in said]
        return {**found, "quantiles": np.array(none), "known": np.array([row[0] is not None for row in said])}
    return {**found, "counts": counts, "nonfinite": nonfinite}


def binned(values: NDArray[Any], edges: tuple[float, float, int] | None) -> NDArray[np.int64]:
    """Return how many of the finite values lie in each of some equal bins, else in the fixed ones."""
    return histogram.of(values) if edges is None else bins.counts(values, *edges)


_EMPTY: Final = np.empty(0, np.float32)


# -- answers on the disk -----------------------------------------------------------------------------------


def _folder(run: Path, name: str) -> Path | None:
    """Return where the answers of a question lie; None where the run cannot be written to."""
    folder = run / FOLDER / "answers" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def _kept(task: _Task) -> Arrays:
    """Read the answer of a task; work it out where a session that asked the same has cleared it away."""
    try:
        return _read(Path(task.answer))
    except OSError:
        return _computed(task)


def _is_there(path: Path) -> bool:
    try:
        _read(path)
    except OSError:
        return False
    return True


def _read(path: Path) -> Arrays:
    """Read an answer; OSError when it is not there or damaged."""
    data = read_file(path)
    if schema.crc32c(data[_CRC_BYTES:]).to_bytes(_CRC_BYTES, "little") != data[:_CRC_BYTES]:
        raise OSError(f"expected an intact answer, got a damaged one: {path}")
    with np.load(io.BytesIO(data[_CRC_BYTES:]), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def alone(wanted: Wanted) -> Wanted:
    """Return what is drawn of each record, as a worker draws it."""
    return replace(wanted, elsewhere=None)
