"""A condition on what was recorded, as text: `ppo_actor/final_reward > 0 and not ppo_actor/no_eos`.

    condition   any of several joined by `or`, of what is joined by `and`, of what may have `not` before it
    test        KEY < <= > >= = == != NUMBER; or KEY alone, which must be a mask: where it is true
    KEY         as recorded; in double quotes where it holds spaces, brackets or one of < > = ! "

Where a key has no value (its own mask did not select there, or the process did not record it) a test is
neither true nor false, as in SQL. Numbers compare as IEEE says: NaN is different from all, and not greater.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]

_TOKEN: Final = re.compile(r'\s*(?:("(?:[^"]|"")*")|([<>]=?|[=!]=|=)|([()])|([^\s()<>=!"]+)|(\S))')
_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_WORDS: Final = ("and", "or", "not")
_DEEPEST: Final = 50


@dataclass(frozen=True, slots=True)
class Truth:
    """Where something is true, and where it is false; neither: not known."""

    true: Bools
    false: Bools


@dataclass(frozen=True, slots=True)
class Test:
    """One comparison; without one, of a mask: where it is true."""

    key: str
    compare: str | None = None
    number: float = 0.0

    def of(self, values: NDArray[Any], known: Bools) -> Truth:
        """Return the truth about values, of which some are known."""
        found = values != 0 if self.compare is None else _COMPARE[self.compare](values, self.number)
        return Truth(found & known, ~found & known)


@dataclass(frozen=True, slots=True)
class _Not:
    inner: Condition

    def of(self, truth: Callable[[Test], Truth]) -> Truth:
        found = evaluate(self.inner, truth)
        return Truth(found.false, found.true)


@dataclass(frozen=True, slots=True)
class _Several:
    parts: tuple[Condition, ...]
    all: bool  # and, else or

    def of(self, truth: Callable[[Test], Truth]) -> Truth:
        found = evaluate(self.parts[0], truth)
        for part in self.parts[1:]:
            other = evaluate(part, truth)
            if self.all:
                found = Truth(found.true & other.true, found.false | other.false)
            else:
                found = Truth(found.true | other.true, found.false & other.false)
        return found


Condition = Test | _Not | _Several


def evaluate(condition: Condition, truth: Callable[[Test], Truth]) -> Truth:
    """Return the truth of a condition, given that of each test."""
    return truth(condition) if isinstance(condition, Test) else condition.of(truth)


def tests(condition: Condition) -> Iterator[Test]:
    """Yield every test of a condition."""
    if isinstance(condition, Test):
        yield condition
    elif isinstance(condition, _Not):
        yield from tests(condition.inner)
    else:
        for part in condition.parts:
            yield from tests(part)


def parse(text: str) -> Condition:
    """Read a condition; QueryError, which shows how one looks, for anything else."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.QueryError(f"expected a condition as a text, got {text!r}")
    reader = _Reader(text)
    condition = reader.any()
    if (token := reader.next()) is not None:
        raise reader.error("the end, 'and' or 'or'", token)
    return condition


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        # (what it is, its text): of a quoted key, a comparison, a bracket, a word, anything else
        found = [match.groups() for match in _TOKEN.finditer(text) if match.group().strip()]
        self._tokens = [next((kind, t) for kind, t in enumerate(groups) if t is not None) for groups in found]
        self._at = 0
        self._depth = 0

    def error(self, expected: str, token: str | None) -> errors.QueryError:
        got = "the end" if token is None else repr(token)
        return errors.QueryError(
            f"expected {expected}, got {got} in the condition {self._text!r}; "
            'one is: "KEY > 0", "MASK", "not MASK and (KEY < 1 or OTHER = 0)"'
        )

    def next(self) -> str | None:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else None

    def _take(self, *words: str) -> str | None:
        """Take the next token if it is one of some words, whatever their case."""
        token = self.next()
        if token is None or token.lower() not in words:
            return None
        self._at += 1
        return token

    def any(self) -> Condition:
        parts = [self._all()]
        while self._take("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else _Several(tuple(parts), all=False)

    def _all(self) -> Condition:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else _Several(tuple(parts), all=True)

    def _one(self) -> Condition:
        if opening := self._take("not", "("):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise errors.QueryError(
                    f"expected at most {_DEEPEST} brackets and 'not' within each other, got more"
                )
            condition = _Not(self._one()) if opening != "(" else self.any()
            if opening == "(" and not self._take(")"):
                raise self.error("')'", self.next())
            self._depth -= 1
            return condition
        key = self._key()
        compare = self._take(*_COMPARE)
        return Test(key) if compare is None else Test(key, compare, self._number())

    def _key(self) -> str:
        token = self.next()
        kind = self._tokens[self._at][0] if token is not None else None
        if token is None or kind not in (0, 3) or (kind == 3 and token.lower() in _WORDS):
            raise self.error("a key", token)
        self._at += 1
        return token if kind == 3 else token[1:-1].replace('""', '"')

    def _number(self) -> float:
        token = self.next()
        try:
            number = float(token or "")
        except ValueError:
            raise self.error("a number", token) from None
        self._at += 1
        return number
