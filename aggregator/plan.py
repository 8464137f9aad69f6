"""The agreed layout of a group: which key sits in which slot. Pure: nothing here communicates.

A *slot* is a key of a tracker reduced over one set of ranks; a *layout* lists the slots a group knows, some
of which it carries on its wire. Ranks propose what they hold, and `agree` makes the next layout, or the list
of conflicts, out of nothing but the old layout and the gathered proposals: every rank comes to the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from eventlog import Kind, ReduceType, Spread, errors, histogram, moments

from .naming import Meta, Names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = [
    "IDLE_EXPORTS",
    "Entry",
    "Layout",
    "Load",
    "Meta",
    "Route",
    "Slot",
    "Spec",
    "agree",
    "members_of",
    "propose",
    "ranks_text",
    "route",
]

IDLE_EXPORTS: Final = 16  # a slot nobody filled for so many exports leaves at the next exchange


class Spec(Protocol):
    """What a recorder says of a key (`eventlog`'s specs are such)."""

    @property
    def tracker(self) -> str:
        """Name of its tracker, "" for the default one."""
        ...

    @property
    def key(self) -> str:
        """The key in full, tracker and scope included."""
        ...

    @property
    def label(self) -> str | None:
        """The ranks of its own reduce_group, as "0,1,5"; None: it follows the export's group."""
        ...

    @property
    def kind(self) -> Kind:
        """What its records are."""
        ...

    @property
    def reduce_type(self) -> ReduceType | None:
        """How its values become numbers."""
        ...

    @property
    def denominator(self) -> str | None:
        """The key of its mask."""
        ...

    @property
    def spread(self) -> Spread:
        """How its values lie on the ranks."""
        ...

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Which quantiles of its values are asked."""
        ...


class Slot(NamedTuple):
    """Where a key is reduced: by default (no label) over everyone in the export's group."""

    tracker: str
    key: str
    label: str | None = None


class Entry(NamedTuple):
    """A slot and what its key is."""

    slot: Slot
    meta: Meta

    @classmethod
    def of(cls, spec: Spec) -> Entry:
        """Read a recorder's spec."""
        return cls(
            Slot(spec.tracker, spec.key, spec.label),
            Meta(spec.kind, spec.reduce_type, spec.denominator, spec.spread, spec.quantiles),
        )


@dataclass(frozen=True, eq=False)
class Load:
    """What an export brings to one group: it checks all `entries`, and carries the `chosen` ones."""

    entries: tuple[Entry, ...] = ()
    chosen: tuple[int, ...] = ()

    def of(self, rows: Ints) -> Ints:
        """Return the rows of the chosen entries."""
        return rows if len(self.chosen) == len(rows) else rows[list(self.chosen)]

    def counts_of(self, counts: Ints | None) -> Ints | None:
        """Return the histograms of the chosen entries with quantiles, given those of all with quantiles."""
        return None if counts is None or not len(self.names.asked) else counts[self._counts]

    @cached_property
    def _counts(self) -> list[int]:
        place = {i: n for n, i in enumerate(i for i, e in enumerate(self.entries) if e.meta.quantiles)}
        return [place[i] for i in self.chosen if i in place]

    @cached_property
    def names(self) -> Names:
        """The names of the chosen entries."""
        return _names(self.entries[i] for i in self.chosen)


def _names(entries: Iterable[Entry]) -> Names:
    found = tuple(entries)
    return Names((entry.slot.key for entry in found), (entry.meta for entry in found))


def _order(slot: Slot) -> tuple[str, str, str]:
    return slot.tracker, slot.key, slot.label or ""


@lru_cache(maxsize=4096)
def members_of(label: str) -> frozenset[int]:
    """Return the ranks a label names."""
    return frozenset(int(rank) for rank in label.split(","))


class Layout:
    """What a group knows, sorted by tracker, key and label: the same on each of its ranks.

    Attributes: `known`; `wire`, the entries it carries, in wire order; `positions` of those within `known`;
    `hash`, an int64 that names the layout across processes; `shares`, `replicated`, `exact` (integers) and
    `asked` (which have histograms), wire positions; `asked_copies`, which of the histograms are of copies.
    """

    def __init__(self, epoch: int = 0, known: Iterable[Entry] = (), carried: Iterable[Slot] = ()) -> None:
        carried = frozenset(carried)
        self.epoch = epoch
        self.known = tuple(sorted(known, key=lambda entry: _order(entry.slot)))
        self.positions = np.array([i for i, e in enumerate(self.known) if e.slot in carried], np.intp)
        self.wire = tuple(self.known[i] for i in self.positions)
        self.hash = _fingerprint(self.known, carried)
        spreads = [entry.meta.spread for entry in self.wire]
        self.shares = np.array([i for i, s in enumerate(spreads) if s is Spread.SHARES], np.intp)
        self.replicated = np.array([i for i, s in enumerate(spreads) if s is Spread.REPLICATED], np.intp)
        kinds = [entry.meta.kind in (Kind.COUNTER, Kind.DENOMINATOR) for entry in self.wire]
        self.exact = np.flatnonzero(kinds)
        self.asked = np.array([i for i, e in enumerate(self.wire) if e.meta.quantiles], np.intp)
        self.asked_copies = np.flatnonzero(np.isin(self.asked, self.replicated))
        self._metas = dict(self.known)
        self._wire_index = {entry.slot: i for i, entry in enumerate(self.wire)}

    def place(self, load: Load) -> Ints | None:
        """Return the wire positions of a load's chosen entries; None when not all its entries fit."""
        if any(self._metas.get(slot) != meta for slot, meta in load.entries):
            return None
        found = [self._wire_index.get(load.entries[i].slot, -1) for i in load.chosen]
        return None if -1 in found else np.array(found, np.int64)

    def place_counts(self, load: Load, at: Ints) -> Ints:
        """Return which histograms of the wire a load fills, whose chosen entries are placed `at`."""
        return np.searchsorted(self.asked, at[load.names.asked])

    def carries(self, slot: Slot) -> bool:
        """Whether the slot is on the wire."""
        return slot in self._wire_index

    def seen_by(self, rank: int) -> tuple[NDArray[np.intp], Names]:
        """Return the wire positions whose numbers are a rank's own, and the names of their keys."""
        seen = [
            i for i, (slot, _) in enumerate(self.wire) if slot.label is None or rank in members_of(slot.label)
        ]
        return np.array(seen, np.intp), _names(self.wire[i] for i in seen)

    def pool(self, stack: Ints) -> tuple[Ints, NDArray[np.intp]]:
        """Reduce moments of shape (ranks, wire, WORDS) as `moments.across` does."""
        return moments.across(stack, self.shares, self.replicated)

    def count_once(self, counts: Ints, holders: Ints) -> Ints:
        """Leave one of the copies in summed histograms; `holders`: how many ranks hold each wire entry."""
        return histogram.once(counts, holders[self.asked], self.asked_copies)

    def unlike(self, counts: Ints, held: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Return the wire positions of copies with unequal histograms, shape (ranks, asked, BUCKETS).

        `held`, shape (ranks, wire), says which ranks have which entries.
        """
        at = self.asked[self.asked_copies]
        copies, there = counts[:, self.asked_copies], held[:, at]
        first = copies[there.argmax(axis=0), np.arange(len(at))]
        return at[~((copies == first).all(axis=-1) | ~there).all(axis=0)]


def _fingerprint(known: Sequence[Entry], carried: frozenset[Slot]) -> int:
    text = json.dumps([[*_as_list(entry), entry.slot in carried] for entry in known])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _as_list(entry: Entry) -> list[Any]:
    slot, meta = entry
    reduce_type = None if meta.reduce_type is None else meta.reduce_type.value
    return [*slot, meta.kind.value, reduce_type, meta.denominator, meta.spread.value, meta.quantiles]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Which of an export's groups carries which key; `local` keys need no group."""

    specs: tuple[Spec, ...]
    groups: tuple[tuple[int, ...], ...]
    reduced: bool
    loads: tuple[Load, ...]
    local: Load


def route(specs: tuple[Spec, ...], groups: tuple[tuple[int, ...], ...], rank: int, *, reduced: bool) -> Route:
    """Send each key to the first group (given by its ranks) that contains the ranks it is reduced over.

    `reduced` says that the first group is the export's reduce_group, which takes the keys without a label;
    they stay local otherwise. Raises an AgreementError for a key given twice and for one no group can take.
    """
    entries = tuple(Entry.of(spec) for spec in specs)
    _check_distinct(entries)
    chosen: list[list[int]] = [[] for _ in groups]
    local: list[int] = []
    sets = [frozenset(group) for group in groups]
    for i, (slot, _) in enumerate(entries):
        if slot.label is None:
            (chosen[0] if reduced else local).append(i)
            continue
        wanted = members_of(slot.label)
        at = next((g for g, group in enumerate(sets) if wanted <= group), None)
        if at is not None and rank in wanted:
            chosen[at].append(i)
        elif wanted == frozenset((rank,)):
            local.append(i)
        else:
            raise errors.AgreementError(
                f"key {slot.key!r}: expected this rank ({rank}) in its reduce_group, and that within "
                f"reduce_group or key_sync_group, got {ranks_text(wanted)} in groups of "
                f"{' and '.join(map(ranks_text, groups)) or 'no ranks'}"
            )
    loads = tuple(Load(entries, tuple(of_group)) for of_group in chosen)
    return Route(specs, groups, reduced, loads, Load(entries, tuple(local)))


def _check_distinct(entries: Sequence[Entry]) -> None:
    seen: dict[Slot, Meta] = {}
    for slot, meta in entries:
        if slot in seen:
            raise errors.AgreementError(
                f"key {slot.key!r}: expected one kind in an export, got {seen[slot]} and {meta} on this rank"
            )
        seen[slot] = meta


def propose(load: Load) -> str:
    """Return a load as the text that ranks exchange."""
    return json.dumps([[_as_list(entry) for entry in load.entries], load.chosen])


def _read(proposal: str) -> Load:
    entries, chosen = json.loads(proposal)
    return Load(tuple(map(_from_list, entries)), tuple(chosen))


def _from_list(parts: Sequence[Any]) -> Entry:
    tracker, key, label, kind, reduce_type, denominator, spread, quantiles = parts
    reduction = None if reduce_type is None else ReduceType(reduce_type)
    meta = Meta(Kind(kind), reduction, denominator, Spread(spread), tuple(quantiles))
    return Entry(Slot(tracker, key, label), meta)


def agree(
    layout: Layout, idle: Ints, proposals: Sequence[tuple[int, str]], *, full: bool
) -> tuple[Layout, Ints, list[str]]:
    """Make the next layout from what the ranks hold, as (rank, proposal); or say what they disagree on.

    `idle` counts, per known entry, how long nobody had it: exports for what the wire carries, exchanges for
    the rest. `full` says that the export covers all keys, so that what is not proposed was idle. Returns
    (layout, its idle counts, conflicts); with conflicts nothing changes.
    """
    told, carried = _told(proposals)
    if conflicts := [text for views in told.values() for text in _conflicts(views)]:
        return layout, idle, sorted(conflicts)
    entries = {entry.slot: entry for views in told.values() for entry in views}
    counts = dict.fromkeys(entries, 0)
    for entry, count in zip(layout.known, idle.tolist(), strict=True):
        slot = entry.slot
        if slot in entries or count >= IDLE_EXPORTS or _displaced(entry, told.get(slot[:2], ())):
            continue
        entries[slot] = entry
        counts[slot] = count if layout.carries(slot) else count + full
    wanted = [slot for slot in entries if slot in carried or layout.carries(slot)]
    new = Layout(layout.epoch + 1, entries.values(), wanted)
    return new, np.array([counts[entry.slot] for entry in new.known], np.int64), []


def _told(
    proposals: Sequence[tuple[int, str]],
) -> tuple[dict[tuple[str, str], dict[Entry, list[int]]], set[Slot]]:
    """Return who holds each key, (tracker, key) -> entry -> ranks, and the slots to carry."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in proposals:  # mostly all ranks say the same: read it once
        ranks_of.setdefault(text, []).append(rank)
    told: dict[tuple[str, str], dict[Entry, list[int]]] = {}
    carried: set[Slot] = set()
    for text, ranks in ranks_of.items():
        load = _read(text)
        carried.update(load.entries[i].slot for i in load.chosen)
        for entry in load.entries:
            told.setdefault(entry.slot[:2], {}).setdefault(entry, []).extend(ranks)
    return told, carried


def _conflicts(views: dict[Entry, list[int]]) -> list[str]:
    """Return what ranks disagree on about one key."""
    if len(views) == 1:
        return []
    metas: dict[Meta, list[int]] = {}
    labels: dict[str | None, list[int]] = {}
    for (slot, meta), ranks in views.items():
        metas.setdefault(meta, []).extend(ranks)
        labels.setdefault(slot.label, []).extend(ranks)
    key = next(iter(views)).slot.key
    found: list[str] = []
    if len(metas) > 1:
        texts = [(str(meta), ranks) for meta, ranks in metas.items()]
        found.append(f"key {key!r}: expected the same on all ranks, got {_listed(texts)}")
    if _labels_clash(list(labels)):
        texts = [(f"group {b}" if b else "no group of its own", ranks) for b, ranks in labels.items()]
        found.append(f"key {key!r}: expected one reduce_group per rank, got {_listed(texts)}")
    return found


def _listed(views: Iterable[tuple[str, list[int]]]) -> str:
    return " but ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in sorted(views))


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks: "rank 3", "ranks 0, 2, 5"."""
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _labels_clash(labels: list[str | None]) -> bool:
    """Whether some rank would receive a key from two groups: ranks' own groups may only lie side by side."""
    if None in labels:
        return len(labels) > 1
    groups = [members_of(label) for label in labels if label is not None]
    return sum(map(len, groups)) > len(frozenset[int]().union(*groups))


def _displaced(old: Entry, fresh: Iterable[Entry]) -> bool:
    """Whether what ranks hold now replaces an entry: another meaning, or other groups of the same ranks."""
    return any(old.meta != entry.meta or _labels_clash([old.slot.label, entry.slot.label]) for entry in fresh)
