"""Rules by which metrics get other names on their way to every target; no two may end under one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eventlog import errors

from .metrics import is_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .steps import Row

    Rules = Mapping[str, str] | Iterable[tuple[str, str]]


class Renaming:
    """Rules (regular expression, what stands in its place), all applied, in order.

    ConfigError for a rule that is none; UnansweredError for two metrics that would have one name.
    """

    def __init__(self, rules: Rules = ()) -> None:
        self._rules = [_rule(pair) for pair in pairs_of(rules)]
        self._known: dict[str, str] = {}
        self._origins: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def __str__(self) -> str:
        return "; ".join(f"{pattern.pattern} = {new}" for pattern, new in self._rules)

    def to(self, name: str) -> str:
        """Return the new name of a metric."""
        known = self._known.get(name)
        if known is None:
            known = name
            for pattern, new in self._rules:
                known = pattern.sub(new, known)
            other = self._origins.setdefault(known, name)
            if other != name or not known:
                raise errors.UnansweredError(
                    f"expected a name of its own for every metric, got {known!r} for {other!r} and {name!r}"
                    if known
                    else f"expected a name for every metric, got none for {name!r}"
                )
            self._known[name] = known
        return known

    def row(self, row: Row) -> Row:
        """Return a row under the new names."""
        if not self:
            return row
        return replace(
            row,
            metrics={self.to(name): value for name, value in row.metrics.items()},
            histograms={self.to(name): drawn for name, drawn in row.histograms.items()},
        )

    def check(self, names: Iterable[str]) -> None:
        """UnansweredError where two of these would have one name; the tracker's own counts are not told."""
        every = set(names)
        for name in sorted(every):
            if not is_count(name, every):
                self.to(name)


def pairs_of(rules: Rules) -> list[Any]:
    """Return the rules one by one, as a caller gave them: not checked."""
    return list(rules.items() if isinstance(rules, Mapping) else rules)


def _rule(pair: tuple[str, str]) -> tuple[re.Pattern[str], str]:
    try:
        pattern, new = pair
        compiled = re.compile(pattern)
        compiled.sub(new, "")  # a replacement that names groups the expression lacks fails here
    except (TypeError, ValueError, re.error, IndexError) as error:
        raise errors.ConfigError(
            f"expected rules as pairs of a regular expression and a replacement, got {pair!r}: {error}"
        ) from error
    return compiled, new
