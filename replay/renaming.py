"""Rules by which metrics get other names on their way to every target; no two may end under one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    Rules = Mapping[str, str] | Iterable[tuple[str, str]]


class Renaming:
    """Rules (regular expression, what stands in its place), all applied, in order.

    ConfigError for a rule that is none; QueryError for two metrics that would have one name.
    """

    def __init__(self, rules: Rules = ()) -> None:
        pairs: Any = rules.items() if isinstance(rules, Mapping) else rules
        self._rules = [_rule(pair) for pair in pairs]
        self._known: dict[str, str] = {}
        self._origins: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def to(self, name: str) -> str:
        """Return the new name of a metric."""
        known = self._known.get(name)
        if known is None:
            known = name
            for pattern, new in self._rules:
                known = pattern.sub(new, known)
            other = self._origins.setdefault(known, name)
            if other != name or not known:
                raise errors.QueryError(
                    f"expected a name of its own for every metric, got {known!r} for {other!r} and {name!r}"
                    if known
                    else f"expected a name for every metric, got none for {name!r}"
                )
            self._known[name] = known
        return known

    def row(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return a row under the new names."""
        return {self.to(name): value for name, value in metrics.items()}

    def table(self, rows: pa.Table) -> pa.Table:
        """Return a table with a column `key` under the new names."""
        if not self:
            return rows
        words = rows["key"].combine_chunks().dictionary_encode()
        new = pa.array([self.to(name) for name in words.dictionary.to_pylist()], words.dictionary.type)
        keys = pa.DictionaryArray.from_arrays(words.indices, new).cast(words.dictionary.type)
        return rows.set_column(rows.schema.get_field_index("key"), "key", keys)


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
