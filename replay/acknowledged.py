"""Which commits a target has acknowledged: spans of commits one after another, so that few say it all.

A span is a box: the steps and the commit times of one attempt between which every commit that was there to be
told was told. A commit that the target did not get lies in no span, be it in the middle of what it holds:
whatever was not seen to be told counts as untold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .steps import Row

ANY_ATTEMPT: Final = -2  # of a span of which is only known that it lay there


@dataclass(frozen=True, slots=True)
class Telling:
    """As what commits were told, in words: of which keys, with which statistics, under which names.

    All are empty where everything that was committed is told as it is. `keys` are the names that were told;
    None: whichever were committed.
    """

    chosen: str = ""
    added: str = ""
    named: str = ""
    keys: tuple[str, ...] | None = ()

    @classmethod
    def of(cls, given: dict[str, Any]) -> Telling:
        """Return what `as_dict` has made of one; KeyError, TypeError for what is none."""
        keys = given["keys"]
        keys = json.loads(keys) if isinstance(keys, str) else keys
        words = (str(given[name]) for name in ("chosen", "added", "named"))
        return cls(*words, keys=None if keys is None else tuple(map(str, keys)))

    def as_dict(self) -> dict[str, Any]:
        """Return it for a file; the names in one word, since it is written with every row."""
        keys = None if self.keys is None else _in_a_word(self.keys)
        return {"chosen": self.chosen, "added": self.added, "named": self.named, "keys": keys}

    def is_as(self, other: Telling) -> bool:
        """Whether a commit is told alike."""
        return (self.chosen, self.added, self.named) == (other.chosen, other.added, other.named)

    def includes(self, row: Row, told: Telling) -> bool:
        """Whether a commit that was told like this has what the row says of it, which is told otherwise."""
        if self.named != told.named or row.histograms:
            return False
        if self.keys is None:
            return not told.added
        return row.metrics.keys() <= set(self.keys)


PLAIN: Final = Telling()


@lru_cache(maxsize=16)
def _in_a_word(names: tuple[str, ...]) -> str:
    return json.dumps(names, separators=(",", ":"))


@dataclass(slots=True)
class Span:
    """Commits of an attempt, told alike: steps from `first` to `last`, times (Unix) from `begin` to `end`."""

    telling: int
    attempt: int
    first: int
    last: int
    begin: float
    end: float

    @classmethod
    def of(cls, given: Sequence[Any]) -> Span:
        """Return what `as_list` has made of one; TypeError, ValueError for what is none."""
        telling, attempt, first, last, begin, end = given
        return cls(int(telling), int(attempt), int(first), int(last), float(begin), float(end))

    def as_list(self) -> list[float]:
        """Return it for a file."""
        return [self.telling, self.attempt, self.first, self.last, self.begin, self.end]

    def holds(self, attempt: int, step: int, time: float) -> bool:
        """Whether a commit lies in it."""
        return (
            self.attempt in (attempt, ANY_ATTEMPT)
            and self.first <= step <= self.last
            and self.begin <= time <= self.end
        )

    def meets(self, other: Span) -> bool:
        """Whether some commit of the attempt may lie in both."""
        return (
            self.first <= other.last
            and other.first <= self.last
            and self.begin <= other.end
            and other.begin <= self.end
        )

    def with_(self, other: Span) -> Span:
        """Return the smallest span that holds both."""
        return replace(
            self,
            first=min(self.first, other.first),
            last=max(self.last, other.last),
            begin=min(self.begin, other.begin),
            end=max(self.end, other.end),
        )


@dataclass(slots=True)
class Acknowledged:
    """The spans that a target has acknowledged; those of one session grow with every row.

    A session tells rows in one way, said to `begin`. A row that it takes lies beside the row before; those
    that it knows of but did not tell are said to `miss`.
    """

    tellings: list[Telling] = field(default_factory=list[Telling])
    spans: list[Span] = field(default_factory=list[Span])
    _now: int = field(default=-1, compare=False, repr=False)  # how it is told
    _beside: dict[int, Span] = field(default_factory=dict[int, Span], compare=False, repr=False)
    _missed: dict[int, list[Span]] = field(default_factory=dict[int, list[Span]], compare=False, repr=False)
    _names: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def begin(self, telling: Telling) -> None:
        """Begin a session."""
        self._beside, self._missed = {}, {}
        self._now = self._index(telling)
        self._names = frozenset(self.tellings[self._now].keys or ())

    def copy(self) -> Acknowledged:
        """Return what goes its own way, in the same session."""
        made = Acknowledged(list(self.tellings), [replace(span) for span in self.spans])
        made.begin(self.tellings[self._now] if self._now >= 0 else PLAIN)
        return made

    @property
    def attempts(self) -> set[int]:
        """The attempts of which something was acknowledged."""
        return {span.attempt for span in self.spans}

    @property
    def goes_on(self) -> bool:
        """Whether this session tells as the one did that told the newest span."""
        return bool(self.spans) and self.spans[-1].telling == self._now

    def take(self, row: Row) -> None:
        """Note that a row was told."""
        self._begun()
        self._take_names(row)
        for attempt, newest in _commits(row).items():
            told = self._span(row, attempt, newest)
            if self._is_missed(told):  # a part of it is withheld
                continue
            before = self._beside.get(attempt)
            grown = before and before.telling == self._now and before.with_(told)
            if before and grown and not self._is_missed(grown):
                before.last, before.first = grown.last, grown.first
                before.begin, before.end = grown.begin, grown.end
                continue
            self.spans.append(told)
            self._beside[attempt] = told
            self._missed[attempt] = [some for some in self._missed.get(attempt, ()) if some.end > newest]

    def miss(self, row: Row) -> None:
        """Note a row that the target does not get."""
        for attempt, newest in _commits(row).items():
            self._missed.setdefault(attempt, []).append(self._span(row, attempt, newest))

    def knows(self, row: Row) -> bool:
        """Whether every commit of a row was told, with all that the row says."""
        self._begun()
        return all(self._spans_of(row, attempt, time) for attempt, time in _commits(row).items())

    def holds(self, row: Row) -> bool:
        """Whether some of a row was told, however it was, as far as is known for certain."""
        names = [None if telling.keys is None else set(telling.keys) for telling in self.tellings]
        return any(
            span.attempt == attempt
            and span.holds(attempt, row.step, time)
            and _meet(names[span.telling], row)
            for attempt, time in _commits(row).items()
            for span in self.spans
        )

    def passes(self, row: Row) -> bool:
        """Whether a row was told; it then lies beside the next one."""
        self._begun()
        found = {attempt: self._spans_of(row, attempt, time) for attempt, time in _commits(row).items()}
        if not all(found.values()):
            return False
        for attempt, spans in found.items():
            own = [span for span in spans if span.telling == self._now and span.attempt == attempt]
            if own:
                self._beside[attempt] = own[-1]
            else:
                self._beside.pop(attempt, None)
        return True

    def believe(self, last: int, now: float) -> None:
        """Take it that all steps up to `last` that were committed by `now` lie there."""
        self.spans.append(
            Span(self._index(replace(PLAIN, chosen="found", keys=None)), ANY_ATTEMPT, 0, last, 0.0, now)
        )

    def cut(self, last: int) -> None:
        """Forget what is above a step."""
        self.spans = [span for span in self.spans if span.first <= last]
        for span in self.spans:
            span.last = min(span.last, last)
        self._beside = {}

    def _begun(self) -> None:
        if self._now < 0:
            self.begin(PLAIN)

    def _index(self, telling: Telling) -> int:
        for at, known in enumerate(self.tellings):
            if known.is_as(telling):
                return at
        self.tellings.append(telling)
        return len(self.tellings) - 1

    def _take_names(self, row: Row) -> None:
        if row.metrics.keys() <= self._names:
            return
        self._names |= row.metrics.keys()
        told = self.tellings[self._now]
        if told.keys is not None:
            self.tellings[self._now] = replace(told, keys=tuple(sorted(self._names)))

    def _is_missed(self, span: Span) -> bool:
        return any(span.meets(missed) for missed in self._missed.get(span.attempt, ()))

    def _span(self, row: Row, attempt: int, newest: float) -> Span:
        return Span(self._now, attempt, row.step, row.step, min(row.time, newest), newest)

    def _spans_of(self, row: Row, attempt: int, time: float) -> list[Span]:
        """Return the spans by which a commit was told."""
        return [
            span
            for span in self.spans
            if span.holds(attempt, row.step, time)
            and (
                span.telling == self._now
                or self.tellings[span.telling].includes(row, self.tellings[self._now])
            )
        ]


def _meet(names: set[str] | None, row: Row) -> bool:
    return names is None or not names.isdisjoint(row.metrics)


def _commits(row: Row) -> Mapping[int, float]:
    """Return the newest commit per attempt; a row that names none is one of an unknown attempt."""
    return row.commits or {-1: row.time}
