"""Statistics of every sequence: of the leading dimension of a mask, or of its `cu_seqlens`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from eventlog import moments

from .grouping import SEQUENCE, Column, pool
from .payload import Payload
from .statistics import ALWAYS, DEVIATIONS, SUMMARIES, Deviations, checked_stats, quantiles
from .tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .drawing import Drawn, Wanted
    from .grouping import Asked
    from .history import History
    from .reading import Ints

    Places = NDArray[np.intp]

# What names a sequence: nothing less does.
_NAMES: Final = ("step", "role", "rank", "window", "call", SEQUENCE)
_SAMPLE: Final = "sample_id"
_MISSING: Final = "missing"
_KINDS: Final = {
    **dict.fromkeys((SEQUENCE, "count", "nonfinite", _MISSING), pa.int64()),
    _SAMPLE: pa.string(),
}


def by_sequence(
    histories: Sequence[History], asked: Asked, stats: str | float | Sequence[str | float], wanted: Wanted
) -> pa.Table:
    """Return a row per sequence of a record, also where none of it is selected; see `Session.reduce`.

    A record whose values are not kept has one row, of no sequence, that counts them.
    """
    names = checked_stats(stats)
    made = pool(histories, asked)
    tally = Tally(histories, made, asked, wanted)
    answers: list[dict[str, Sequence[Any]]] = []
    whose: list[tuple[Places, Ints]] = []
    tally.begin()
    for i, (records, steps) in enumerate(zip(made.records, made.steps, strict=True)):
        ats: list[int] = []
        for at, _, drawn in tally.draw_of(i, np.arange(len(records))):
            if drawn.missing:  # a row that says so
                ats.append(at)
                nothing: dict[str, list[Any]] = {name: [None] for name in (SEQUENCE, _SAMPLE, *names)}
                answers.append({**nothing, _MISSING: [drawn.missing]})
                continue
            n = drawn.sequences
            ats += [at] * n
            own = {SEQUENCE: range(n), _SAMPLE: drawn.samples or [None] * n, _MISSING: [0] * n}
            answers.append({**own, **_statistics(drawn, names)})
        of = np.array(ats, np.intp)
        whose.append((records[of], steps[of]))
    tally.check()
    said = ["run", *(["key"] if asked.named else []), *_NAMES, *(n for n in asked.by if n not in _NAMES)]
    said += ["attempt"] if asked.every and "attempt" not in said else []
    columns: dict[str, Any] = {}
    for name in [*said, _SAMPLE, *names, _MISSING]:
        if name in (SEQUENCE, _SAMPLE, *names, _MISSING):
            kind = _KINDS.get(name, pa.float64())
            columns[name] = pa.chunked_array([pa.array(one[name], kind) for one in answers], kind)
        elif name == "call":
            calls = [Payload(h).calls[places] for h, (places, _) in zip(histories, whose, strict=True)]
            columns[name] = pa.array(np.concatenate(calls))
        else:
            column = Column.of(histories, whose, name)
            columns[name] = column.take(np.arange(len(column.values)))
    by = [("run", "ascending"), *((name, "ascending") for name in said[1:] if name in ("key", *_NAMES))]
    return pa.table(columns).sort_by(by)


def _statistics(drawn: Drawn, names: dict[str, float | None]) -> dict[str, list[Any]]:
    """Return statistic → its value for every sequence of a record."""
    of, n = drawn.parts, drawn.sequences
    parts = np.split(drawn.values, np.searchsorted(of, np.arange(1, n))) if of is not None and n else []
    rows = np.stack([moments.of(part) for part in parts]) if n else moments.empty(0)
    spread = Deviations(n)
    if not DEVIATIONS.keys().isdisjoint(names):
        for sequence, part in enumerate(parts):
            spread.add(sequence, part)
    found: dict[str, list[Any]] = {}
    for name, q in names.items():
        if q is not None:
            found[name] = [quantiles(part, [q])[0] for part in parts]
        elif name in SUMMARIES:
            empty = (rows[:, moments.COUNT] == 0) & (name not in ALWAYS)
            values = SUMMARIES[name](rows).tolist()
            found[name] = [None if none else value for value, none in zip(values, empty, strict=True)]
        else:
            found[name] = spread.all(name)
    return found
