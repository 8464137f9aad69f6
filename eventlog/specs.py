"""What the keys of one recorder are: interned, so that equal means identical and a steady step makes none.

Within a window a key is one thing: the second one is refused at its call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .arrays import as_key
from .errors import RecordingError
from .frame import Spec
from .reduction import Kind, ReduceType, Spread

if TYPE_CHECKING:
    from collections.abc import Collection

INTERNED_AT_MOST: Final = 1 << 16


class Specs:
    """The specs of a tracker's keys, made when they are first asked for; its length is how many there are."""

    def __init__(self, tracker: str) -> None:
        self._tracker = tracker
        self._specs: dict[tuple[Any, ...], Spec] = {}
        self._under: dict[tuple[Any, ...], Under] = {}
        self._spread: dict[str, Spread] = {}
        self._taken: set[Spec] = set()  # by what the window holds
        self._settled: set[Spec] = set()  # no two of them are one key as two things
        self._first: dict[tuple[str, str | None], Spec] = {}  # of these, by key and label
        self.asks = False  # whether quantiles of any key were ever asked

    def __len__(self) -> int:
        return len(self._specs)

    def of(
        self,
        key: str,
        kind: Kind,
        reduce_type: ReduceType | None,
        denominator: str | None = None,
        label: str | None = None,
        quantiles: tuple[float, ...] = (),
    ) -> Spec:
        """Return the spec of a full key; a RecordingError for what shares of a number do not have."""
        identity = (key, kind, reduce_type, denominator, label, quantiles)
        spec = self._specs.get(identity)
        if spec is None:
            spread = self._spread.get(key, Spread.SHARDS)
            if spread is Spread.SHARES and reduce_type in (ReduceType.MIN, ReduceType.MAX):
                wanted = reduce_type.name
                raise RecordingError(
                    f"expected AVG or SUM for {key!r}, whose values are shares, got {wanted}"
                )
            if spread is Spread.SHARES and quantiles:
                raise RecordingError(f"expected no quantiles of {key!r}, whose values are shares")
            spec = Spec(self._tracker, key, kind, reduce_type, denominator, label, spread, quantiles)
            self._specs[identity] = spec
            self.asks = self.asks or bool(quantiles)
        return spec

    def under(
        self,
        prefix: str,
        denominator: str,
        reduce_type: ReduceType,
        label: str | None,
        quantiles: tuple[float, ...] = (),
    ) -> Under:
        """Return the specs of the stats under a denominator, both named as they are below `prefix`."""
        said = (prefix, as_key(denominator), reduce_type, label, quantiles)
        found = self._under.get(said)
        if found is None:
            found = self._under[said] = Under(self, *said)
        return found

    def claim(self, specs: Collection[Spec]) -> None:
        """Note what the window is to hold; refuse a key it holds as something else, and then note nothing.

        No export could tell a number for such a key.
        """
        if not self._settled.issuperset(specs):
            self._settle([spec for spec in specs if spec not in self._settled])
        self._taken.update(specs)

    def _settle(self, fresh: Collection[Spec]) -> None:
        """Add to what goes together; what a key was in a window before may make room."""
        replaced: list[Spec] = []
        for spec in fresh:
            first = self._first.get(_slot(spec), spec)
            if _what(first) == _what(spec):
                continue
            same = [each for each in self._settled if _slot(each) == _slot(spec)]
            if not self._taken.isdisjoint(same):
                got = f"{_text(first)} and {_text(spec)}"
                raise RecordingError(f"expected one kind of {spec.key!r} until its export, got {got}")
            replaced += same
        self._settled.difference_update(replaced)
        self._settled.update(fresh)
        self._first.update((_slot(spec), spec) for spec in fresh)

    def forget(self) -> None:
        """The window holds nothing any more."""
        self._taken = set()

    def forget_key(self, key: str) -> None:
        """The window holds nothing of one key any more."""
        self._taken = {spec for spec in self._taken if spec.key != key}

    def held(self, key: str) -> Spec | None:
        """Return what the window has a full key as; None where it has not."""
        return next((spec for spec in self._taken if spec.key == key), None)

    def declare(self, keys: Collection[str], spread: Spread) -> None:
        """State how the values of full keys lie on the ranks, from now on.

        A RecordingError, with which nothing changes, for a key that the window holds as something else.
        """
        changed = {key for key in keys if self._spread.get(key, Spread.SHARDS) is not spread}
        if not changed:
            return
        for key in sorted(changed.intersection(spec.key for spec in self._taken)):
            got = self._spread.get(key, Spread.SHARDS).value
            raise RecordingError(
                f"expected {key!r} to be declared before it is recorded, or after its export, got "
                f"{spread.value} for what is recorded as {got}"
            )
        self._spread.update(dict.fromkeys(changed, spread))
        self._specs = {identity: spec for identity, spec in self._specs.items() if identity[0] not in changed}
        self._settled = {spec for spec in self._settled if spec.key not in changed}
        self._under = {}

    def trim(self) -> bool:
        """Forget all when there are too many: keys made up anew each step must not pile up."""
        if max(len(self._specs), len(self._under), len(self._settled)) <= INTERNED_AT_MOST:
            return False
        self._specs, self._under, self._settled, self._first = {}, {}, set(), {}
        return True


def _slot(spec: Spec) -> tuple[str, str | None]:
    return spec.key, spec.label


def _what(spec: Spec) -> tuple[Any, ...]:
    return spec.kind, spec.reduce_type, spec.denominator, spec.spread, spec.quantiles


def _text(spec: Spec) -> str:
    words = [spec.kind.value]
    if spec.kind is Kind.STAT and spec.reduce_type is not None:
        words += [spec.reduce_type.value, f"under {spec.denominator!r}"]
    if spec.quantiles:
        words.append(f"with quantiles {spec.quantiles}")
    return " ".join(words if spec.spread is Spread.SHARDS else [*words, f"({spec.spread.value})"])


class Under(dict[str, Spec]):
    """The specs of what is recorded under one denominator in one scope, by the key as the caller gives it."""

    def __init__(
        self,
        specs: Specs,
        prefix: str,
        denominator: str,
        reduce_type: ReduceType,
        label: str | None,
        quantiles: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.denominator = prefix + denominator  # in full
        self._specs = specs
        self._prefix = prefix
        self._said = (Kind.STAT, reduce_type, self.denominator, label, quantiles)

    def __missing__(self, key: str) -> Spec:
        spec = self[key] = self._specs.of(self._prefix + as_key(key), *self._said)
        return spec
