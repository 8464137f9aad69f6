"""Which segment speaks for a key at a step, and what it says beside what was committed.

The one that reproduces the committed value; else the leader's (its group exports before its own, the latest
first); else the group of the lowest role and rank that holds the key; else the workers' union.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from eventlog import moments

from ..naming import Meta, Names, percentile
from .candidates import GROUP, OWN
from .placing import first_rows, metrics_of
from .reading import codes, ints
from .recompute import histograms

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .candidates import Candidate
    from .history import History
    from .reading import Ints
    from .recompute import Segments, Spec

    Places = NDArray[np.intp]

_NOTHING: Final[dict[int, Any]] = {}
_RELATIVE: Final = 1e-9  # how far sums in another order may lie apart
_COUNTED_AT_A_TIME: Final = 512  # segments whose histograms are in memory
_OF_VALUES: Final = 1e-12  # … where they cancel: relative to the values that were summed


class Committed(NamedTuple):
    """A committed number: `exact` is set when it was an integer."""

    value: float
    exact: int | None
    time: int


class Spoken(NamedTuple):
    """What the log says a name was at a step; one per sub-index of a list commit."""

    segment: int
    name: str
    number: float
    sub_index: int
    time: int  # of the commit, else of the export
    committed: Committed | None
    differs: bool | None  # None: nothing was committed

    @property
    def exact(self) -> int | None:
        """The number, where it is an exact integer."""
        return self.number if isinstance(self.number, int) else None


def choose(
    history: History, found: Segments, names: Collection[str] | None = None, *, superseded: bool = False
) -> list[Spoken]:
    """Return what is said, by attempt, step and key; `superseded`: by outdated attempts too.

    Quantiles need the payload: they are said, and taken into account, where all of it is there; of `names`
    only those.
    """
    places = _standing(found, superseded=superseded)
    chooser = _court(history, found, names, places)
    return [spoken for those in _rivals(found, places) for spoken in chooser.speak(those)]


def speaking(history: History, found: Segments, *, superseded: bool = False) -> Ints:
    """Return the segments that speak, also those of which no number is exported."""
    ranked, firsts = _ranked(found, _standing(found, superseded=superseded))
    alone = np.diff(np.append(firsts, len(ranked))) == 1
    unheard = ranked[firsts[alone]]  # what has no rival needs no look at what was committed
    contested = ranked[np.isin(np.arange(len(ranked)), firsts[alone], invert=True)]
    if not len(contested):
        return np.sort(unheard)
    chooser = _court(history, found, (), contested)
    heard = [segment for those in _rivals(found, contested) for segment, *_ in chooser.decide(those)]
    return np.unique(np.concatenate([unheard, np.array(heard, np.int64)]))


def _standing(found: Segments, *, superseded: bool) -> Places:
    return np.arange(len(found)) if superseded else np.flatnonzero(~found.superseded)


def _court(history: History, found: Segments, names: Collection[str] | None, places: Places) -> _Chooser:
    numbers = _numbers(found, places)
    _add_quantiles(history, found, numbers, names)
    committed = _committed(history, {name for those in numbers.values() for name in those})
    return _Chooser(found, numbers, committed)


# -- numbers -------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _layout(keys: tuple[str, ...], metas: tuple[Meta, ...]) -> Names:
    return Names(keys, metas)


def _numbers(found: Segments, places: Places) -> dict[int, dict[str, float]]:
    """Return segment → exported names and numbers; made candidate by candidate, which mostly look alike."""
    numbers: dict[int, dict[str, float]] = {}
    order = places[np.argsort(found.candidate[places], kind="stable")]
    for those in np.split(order, first_rows(found.candidate[order])[1:]) if len(order) else ():
        specs = [found.specs[spec] for spec in found.spec[those].tolist()]
        keys = tuple(spec.key for spec in specs)
        if len(set(keys)) < len(keys):  # one key over several groups of its own
            values = [
                _layout((s.key,), (s.meta,)).of(found.rows[[i]]) for s, i in zip(specs, those, strict=True)
            ]
        else:
            together = _layout(keys, tuple(spec.meta for spec in specs)).of(found.rows[those])
            values = [_pick(together, names_of(spec)) for spec in specs]
        numbers.update(zip(those.tolist(), values, strict=True))
    return numbers


def _add_quantiles(
    history: History,
    found: Segments,
    numbers: dict[int, dict[str, float]],
    names: Collection[str] | None,
) -> None:
    """Add quantiles to the numbers of segments whose values are there, if any of `names` is one."""
    asked = [place for place, spec in enumerate(found.specs) if _is_asked(spec, names)]
    having = np.flatnonzero(np.isin(found.spec, asked)).tolist()
    chosen = [segment for segment in having if segment in numbers]
    for start in range(0, len(chosen), _COUNTED_AT_A_TIME):
        counted = histograms(history, found, chosen[start : start + _COUNTED_AT_A_TIME])
        for segment, counts in counted.items():
            spec = found.specs[found.spec[segment]]
            layout = _layout((spec.key,), (spec.meta,))
            numbers[segment] = layout.of(found.rows[[segment]], counts[np.newaxis])


def _is_asked(spec: Spec, names: Collection[str] | None) -> bool:
    """Whether any of the names (None: of all) is a quantile of the key."""
    quantiles = (f"{spec.key}/{percentile(q)}" for q in spec.meta.quantiles)
    return any(names is None or name in names for name in quantiles)


def names_of(spec: Spec) -> list[str]:
    """Return the names under which a key is exported."""
    return _layout((spec.key,), (spec.meta,)).names


def _pick(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: values[name] for name in names if name in values}


def _committed(history: History, names: set[str]) -> dict[tuple[int, int, str], dict[int, Committed]]:
    """Return (attempt, step, name) → sub-index → what was committed last under some names."""
    commits = history.commits
    words = commits.table["key"].combine_chunks().dictionary.to_pylist()
    wanted = np.array([word in names for word in words] + [False], np.bool_)  # the last: null, -1
    places = np.flatnonzero(wanted[codes(commits.table["key"])] & metrics_of(commits))
    started = np.array([producer.started_us for producer in history.reading.producers], np.int64)
    sids = commits.sids[places]
    numbers = ints(commits.table["commit"])[places]
    places = places[np.lexsort((numbers, sids, started[sids]))]
    rows = commits.table.select(["key", "value", "value_int", "sub_index"]).take(places).to_pydict()
    attempts, steps = commits.attempts[places].tolist(), commits.steps[places].tolist()
    times = ints(commits.table["time"])[places].tolist()
    committed: dict[tuple[int, int, str], dict[int, Committed]] = {}
    for attempt, step, name, value, exact, sub, time in zip(
        attempts, steps, *(rows[n] for n in ("key", "value", "value_int", "sub_index")), times, strict=True
    ):
        committed.setdefault((attempt, step, name), {})[sub or 0] = Committed(value, exact, time)
    return committed


# -- who speaks ----------------------------------------------------------------------------------------


def _rivals(found: Segments, places: Places) -> Iterator[list[int]]:
    """Yield the segments of each (attempt, step, key), the one to be preferred first."""
    ranked, firsts = _ranked(found, places)
    segments, stops = ranked.tolist(), np.append(firsts, len(ranked))[1:]
    for start, stop in zip(firsts.tolist(), stops.tolist(), strict=True):
        yield segments[start:stop]


def _ranked(found: Segments, places: Places) -> tuple[Places, Places]:
    """Return segments in the order of `_rivals`, and where those of each (attempt, step, key) begin."""
    made = found.candidates
    candidate = found.candidate[places]
    keys = sorted({spec.key for spec in found.specs})
    place = {key: i for i, key in enumerate(keys)}
    key = np.array([place[spec.key] for spec in found.specs], np.int64)[found.spec[places]]
    attempt = np.array([c.attempt for c in made], np.int64)[candidate]
    step = np.array([c.step for c in made], np.int64)[candidate]
    time = np.array([c.time for c in made], np.int64)[candidate]
    tier = np.array([_tier(c) for c in made], np.int64)[candidate]
    order = np.lexsort((candidate, -time, found.lowest[places], tier, key, step, attempt))
    return places[order], first_rows(attempt[order], step[order], key[order])


def _tier(candidate: Candidate) -> int:
    """Return the rank of a candidate where none reproduces what was committed, 0 first."""
    if candidate.source == OWN:
        return 2 if candidate.export_id is None else 1
    if candidate.source == GROUP:
        return 0 if candidate.leader else 3
    return 4


class _Chooser:
    """Decides between the segments of one key at one step."""

    def __init__(
        self,
        found: Segments,
        numbers: Mapping[int, Mapping[str, float]],
        committed: Mapping[tuple[int, int, str], Mapping[int, Committed]],
    ) -> None:
        self._found = found
        self._numbers = numbers
        self._committed = committed
        self._tolerance = _tolerances(found)

    def decide(self, rivals: Sequence[int]) -> Iterator[tuple[int, int, Mapping[str, Committed]]]:
        """Yield (segment, sub-index, what was committed) for each sub-index the key was committed under."""
        made = self._candidate(rivals[0])
        names = dict.fromkeys(name for segment in rivals for name in self._numbers[segment])
        said = {name: self._committed.get((made.attempt, made.step, name), _NOTHING) for name in names}
        subs = sorted({sub for those in said.values() for sub in those}) or [0]
        for turn, sub in enumerate(subs):
            those = {name: of_subs[sub] for name, of_subs in said.items() if sub in of_subs}
            yield self._speaker(rivals, those, turn if len(subs) > 1 else None), sub, those

    def speak(self, rivals: Sequence[int]) -> Iterator[Spoken]:
        """Yield every number that the best of the rivals says.

        What it does not say of what was committed (where a sum of nothing, which has no quantiles, was
        committed after others) is said by the rival that reproduces it.
        """
        for segment, sub, those in self.decide(rivals):
            for name, number in self._numbers[segment].items():
                yield self._said(segment, name, number, sub, those.get(name))
            rest = {name: was for name, was in those.items() if name not in self._numbers[segment]}
            for other in [s for s in rivals if rest and self._reproduces(s, rest)][:1]:
                for name, was in rest.items():
                    yield self._said(other, name, self._numbers[other][name], sub, was)

    def _said(self, segment: int, name: str, number: float, sub: int, was: Committed | None) -> Spoken:
        differs = None if was is None else not _agree(number, was, self._tolerance[segment])
        time = self._candidate(segment).time if was is None else was.time
        return Spoken(segment, name, number, sub, time, was, differs)

    def _candidate(self, segment: int) -> Candidate:
        return self._found.candidates[self._found.candidate[segment]]

    def _speaker(self, rivals: Sequence[int], those: Mapping[str, Committed], turn: int | None) -> int:
        if len(rivals) > 1 and those:
            for segment in rivals:
                if self._reproduces(segment, those):
                    return segment
            for segment in rivals:
                own = {name: was for name, was in those.items() if name in self._numbers[segment]}
                if own and self._reproduces(segment, own):
                    return segment
        if turn is None:
            return rivals[0]
        # The parts of a list commit come from as many exports: without better knowledge in their order.
        best = self._candidate(rivals[0])
        peers = [s for s in rivals if _tier(self._candidate(s)) == _tier(best)][::-1]
        return peers[min(turn, len(peers) - 1)]

    def _reproduces(self, segment: int, those: Mapping[str, Committed]) -> bool:
        numbers, tolerance = self._numbers[segment], self._tolerance[segment]
        return all(name in numbers and _agree(numbers[name], was, tolerance) for name, was in those.items())


def _agree(number: float, was: Committed, tolerance: float) -> bool:
    if isinstance(number, int):
        return number == (was.value if was.exact is None else was.exact)
    if math.isnan(number) or math.isnan(was.value):
        return math.isnan(number) and math.isnan(was.value)
    return math.isclose(number, was.value, rel_tol=_RELATIVE, abs_tol=tolerance)


def _tolerances(found: Segments) -> list[float]:
    """Return how far a number of each segment may lie from the committed one and still agree."""
    floats = moments.floats(found.rows)
    largest = np.maximum(np.abs(floats[:, moments.MIN]), np.abs(floats[:, moments.MAX]))
    return (_OF_VALUES * np.where(np.isfinite(largest), largest, 0.0)).tolist()
