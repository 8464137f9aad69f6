"""Which commits a target has acknowledged: spans of commits one after another, so that few say it all.

A span is a box: the steps and the commit times of one attempt between which every commit that was there to be
told was told. A commit that the target did not get lies in no span, be it in the middle of what it holds:
whatever was not seen to be told counts as untold.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .steps import Row

ANY_ATTEMPT: Final = -2  # of a span of which is only known that it lay there


@dataclass(frozen=True, slots=True)
class Telling:
    """As what commits were told, in words: of which keys, with which statistics, under which names.

    All are empty where everything that was committed is told as it is. `keys` are the names that were told;
    None: whichever were committed. `elsewhere`: to the run for which this one goes on.
    """

    chosen: str = ""
    added: str = ""
    named: str = ""
    keys: tuple[str, ...] | None = ()
    elsewhere: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> Telling:
        """Return what `as_dict` has made of one; KeyError, TypeError for what is none."""
        keys = given["keys"]
        keys = json.loads(keys) if isinstance(keys, str) else keys
        words = (str(given[name]) for name in ("chosen", "added", "named"))
        names = None if keys is None else tuple(map(str, keys))
        return cls(*words, keys=names, elsewhere=given.get("elsewhere") is True)

    def as_dict(self) -> dict[str, Any]:
        """Return it for a file; the names in one word, since it is written with every row."""
        keys = None if self.keys is None else _in_a_word(self.keys)
        words = {"chosen": self.chosen, "added": self.added, "named": self.named, "keys": keys}
        return {**words, "elsewhere": True} if self.elsewhere else words

    def is_as(self, other: Telling) -> bool:
        """Whether a commit is told alike, and to the same run."""
        return self.elsewhere == other.elsewhere and self._says_as(other)

    def includes(self, row: Row, told: Telling) -> bool:
        """Whether a commit that was told like this has what the row says of it, which is told otherwise."""
        if self._says_as(told):
            return True
        if self.named != told.named or row.histograms:
            return False
        if self.keys is None:
            return not told.added
        return row.metrics.keys() <= set(self.keys)

    def _says_as(self, other: Telling) -> bool:
        return (self.chosen, self.added, self.named) == (other.chosen, other.added, other.named)


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

    def without(self, other: Span) -> list[Span]:
        """Return what is left of it without the commits of one step and some times."""
        step = other.first
        before, behind = math.nextafter(other.begin, 0.0), math.nextafter(other.end, math.inf)
        parts = [
            replace(self, last=step - 1),
            replace(self, first=step + 1),
            replace(self, first=step, last=step, end=before),
            replace(self, first=step, last=step, begin=behind),
        ]
        return [part for part in parts if part.first <= part.last and part.begin <= part.end]

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
        made._missed = {attempt: list(missed) for attempt, missed in self._missed.items()}
        return made

    def elsewhere(self) -> Acknowledged:
        """Return the same for the run that goes on for the one which was told all of this."""
        made = self.copy()
        telling = made.tellings[made._now]  # noqa: SLF001
        made.tellings = [replace(some, elsewhere=True) for some in made.tellings]
        made._now = made._index(telling)  # noqa: SLF001
        return made

    @property
    def attempts(self) -> set[int]:
        """The attempts of which something was acknowledged."""
        return {span.attempt for span in self.spans}

    def take(self, row: Row) -> None:
        """Note that a row was told."""
        self._begun()
        self._take_names(row)
        for told in self.spans_of(row):
            attempt = told.attempt
            before = self._beside.get(attempt)
            grown = before and before.telling == self._now and before.with_(told)
            if before and grown and not self._is_missed(grown):
                before.last, before.first = grown.last, grown.first
                before.begin, before.end = grown.begin, grown.end
                continue
            self.spans.append(told)
            self._beside[attempt] = told
            self._missed[attempt] = [some for some in self._missed.get(attempt, ()) if some.end > told.end]

    def spans_of(self, row: Row) -> list[Span]:
        """Return the spans of a row's commits alone, without those of which a part is withheld."""
        self._begun()
        spans = (self._span(row, attempt, newest) for attempt, newest in _commits(row).items())
        return [span for span in spans if not self._is_missed(span)]

    def miss(self, row: Row) -> None:
        """Note a row that the target does not get, be it that it seemed told by what lies around it."""
        for attempt, newest in _commits(row).items():
            missed = self._span(row, attempt, newest)
            self._missed.setdefault(attempt, []).append(missed)
            self._leave_out(missed)

    def misses(self, other: Acknowledged) -> None:
        """Note all that another's target did not get in this session."""
        for attempt, missed in other._missed.items():
            self._missed.setdefault(attempt, []).extend(missed)

    def finds(self, row: Row) -> None:
        """Note that a row was read from the log: what was missed of it by then is told with it."""
        for attempt, newest in _commits(row).items():
            missed = self._missed.get(attempt, ())
            self._missed[attempt] = [s for s in missed if s.first != row.step or s.begin > newest]

    def knows(self, row: Row) -> bool:
        """Whether every commit of a row was told, with all that the row says."""
        return all(self.among(self.spans, row))

    def among(self, spans: Sequence[Span], row: Row) -> list[bool]:
        """Say of each commit of a row whether it lies in one of some spans, with all that the row says."""
        self._begun()
        return [bool(self._spans_of(spans, row, *commit)) for commit in _commits(row).items()]

    def holds(self, row: Row, *, unsure: Sequence[Span] = ()) -> bool:
        """Whether some of a row was told to this run, or may have been, however it was."""
        names = [None if telling.keys is None else set(telling.keys) for telling in self.tellings]
        return any(
            span.attempt == attempt
            and span.holds(attempt, row.step, time)
            and not self.tellings[span.telling].elsewhere
            and _meet(names[span.telling], row)
            for attempt, time in _commits(row).items()
            for span in (*self.spans, *unsure)
        )

    def passes(self, row: Row) -> bool:
        """Whether a row was told; it then lies beside the next one."""
        self._begun()
        found = {commit[0]: self._spans_of(self.spans, row, *commit) for commit in _commits(row).items()}
        if not all(found.values()):
            return False
        for attempt, spans in found.items():
            own = [span for span in spans if span.telling == self._now and span.attempt == attempt]
            if own:
                self._beside[attempt] = own[-1]
            else:
                self._beside.pop(attempt, None)
        return True

    @property
    def found(self) -> int | None:
        """The highest step of what is only known to have been found there; None without any."""
        return max((span.last for span in self.spans if span.attempt == ANY_ATTEMPT), default=None)

    def believe(self, boxes: Iterable[tuple[int, int, int, float, float]]) -> None:
        """Take it that some commits lie there, and of what was only found there no others.

        A box is an attempt, the first and the last step, the first and the last time.
        """
        self.spans = [span for span in self.spans if span.attempt != ANY_ATTEMPT]
        telling = self._index(replace(PLAIN, chosen="found", keys=None))
        self.spans += [Span(telling, *box) for box in boxes]

    def cut(self, last: int) -> list[Span]:
        """Forget what is above a step; return it."""
        gone = [replace(span, first=max(span.first, last + 1)) for span in self.spans if span.last > last]
        self.spans = [span for span in self.spans if span.first <= last]
        for span in self.spans:
            span.last = min(span.last, last)
        self._beside = {}
        return gone

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

    def _leave_out(self, missed: Span) -> None:
        """Hold a commit no more that lies in what was told as it is told now."""
        for span in [s for s in self.spans if s.telling == self._now and s.attempt == missed.attempt]:
            if span.meets(missed):
                at = self.spans.index(span)
                self.spans[at : at + 1] = span.without(missed)
                self._beside.pop(missed.attempt, None)

    def _spans_of(self, spans: Sequence[Span], row: Row, attempt: int, time: float) -> list[Span]:
        """Return those of some spans by which a commit was told."""
        return [
            span
            for span in spans
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
