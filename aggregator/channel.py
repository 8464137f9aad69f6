"""The agreement: how the ranks of one group come to the same numbers, or to the same error, never to a hang.

Every group has one *channel*. Its exports run in lockstep on all ranks; each begins with one round in which
all send a head and their moments in the agreed layout:

    a rank failed                   all tell what failed, and raise
    a rank does not fit the layout  all exchange names and agree on the next layout (or on who disagrees, and
                                    raise), then a second round, which fits
    ranks are not at the same export, or something raises inside a collective
                                    the channel is closed: every later export over it raises at once

Each decision depends on nothing but what all ranks have received, so all decide alike. How bytes travel is
the business of the *link*, which a channel is given.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from eventlog import errors, histogram, moments

from . import plan, wire
from .naming import Columns, names

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["Channel", "Link", "Outcome", "Request"]

_MOST_LISTED: Final = 10  # keys or ranks in one error message
_TEXT_LENGTH: Final = 500  # of an error as the peers are told it
_ordinals = itertools.count()


class Link(Protocol):
    """The collectives of one group, in which all its ranks take part; arrays are on the host."""

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks, in group order."""
        ...

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        ...

    def gather(self, vector: Ints) -> Ints:
        """Return the vectors of all ranks, shape (ranks, len(vector))."""
        ...

    def greatest(self, vector: Ints) -> Ints:
        """Return the elementwise maximum over the ranks."""
        ...

    def total(self, vector: Floats) -> Floats:
        """Return the elementwise sum over the ranks."""
        ...

    def tell(self, what: Any) -> list[Any]:
        """Return what each rank passed (anything small that pickles); slow."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What an export is; `problem` is what failed on this rank before it came to the channel."""

    operation: str | None  # None: it failed before that was known
    key: str | None  # of which it is the export, where it is not one of all
    session: str
    reset: bool
    step: int
    attempt: int
    full: bool
    problem: BaseException | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an export ended on one channel."""

    members: tuple[int, ...]
    export_id: str | None
    attempt: int
    columns: Columns | None
    error: BaseException | None
    key: str | None = None  # of what failed, as told by who knew it


@dataclass(frozen=True, slots=True)
class _Reply:
    """What a round brought: all heads, and what is still to be reduced.

    `pool` gives the moments and the unequal positions, `count` the histograms.
    """

    heads: Ints
    who: tuple[str, ...]
    pool: Callable[[], tuple[Ints, Ints]]
    count: Callable[[], Ints]

    def most(self, word: int) -> int:
        return max(self.heads[:, word].tolist())


class Channel:
    """What the ranks of one process group agreed on, and its wire; one thread at a time exports over it."""

    def __init__(self, link: Link) -> None:
        self.members, self.rank = link.members, link.rank
        self._link = link
        self._ranks = tuple(f"rank {rank}" for rank in link.members)
        self._ordinal = next(_ordinals)  # two groups of the same processes have different ids
        self._uid: str | None = None
        self._number = 0
        self._attempt = wire.UNSET
        self._closed: str | None = None
        self._told_key: str | None = None
        self._lock = threading.Lock()
        self._install(plan.Layout(), np.zeros(0, np.int64))

    def export(self, request: Request, load: plan.Load, rows: Ints, counts: Ints | None = None) -> Outcome:
        """Take part in one export of the group; raises nothing but interrupts."""
        with self._lock:
            if self._closed is not None:
                error = errors.DesyncError(self._closed)
                return Outcome(self.members, None, request.attempt, None, error)
            self._number += 1
            self._attempt, self._told_key = request.attempt, None
            columns, error = self._guarded(request, load, rows, counts)
            export_id = None if self._uid is None else f"{self._uid}:{self._number}"
            return Outcome(self.members, export_id, self._attempt, columns, error, self._told_key)

    def miss(self) -> None:
        """Count an export that this process did not take part in: the next one cannot pass for it."""
        with self._lock:
            self._number += 1

    def _guarded(
        self, request: Request, load: plan.Load, rows: Ints, counts: Ints | None
    ) -> tuple[Columns | None, BaseException | None]:
        take_part = self._alone if len(self.members) == 1 else self._together
        try:
            return take_part(request, load, rows, counts), None
        except errors.ReductionError as exc:  # every rank knows, and stands where this one stands
            return None, exc
        except BaseException as exc:
            self._close(f"an export ended inside a collective: {_describe(exc)}")
            if not isinstance(exc, Exception):
                raise
            error = errors.DesyncError(self._closed)
            error.__cause__ = exc
            return None, error

    def _alone(self, request: Request, load: plan.Load, rows: Ints, counts: Ints | None) -> Columns:
        """Answer for a group of one, which has nobody to ask."""
        self._name([(request.session, self._ordinal)])
        return Columns(load.names, load.of(rows).copy(), load.counts_of(counts))

    def _together(self, request: Request, load: plan.Load, rows: Ints, counts: Ints | None) -> Columns | None:
        at = self._place(load)
        misfit = at is None or self._uid is None
        self._fill(load, None if misfit else at, counts)
        reply = self._round(request, None if misfit else at, load.of(rows), misfit=misfit)
        if reply.most(wire.FAILED):
            raise self._failure(request)
        if reply.most(wire.MISFIT):
            self._exchange(request, load)
            self._fill(load, self._place(load), counts)
            reply = self._round(request, self._place(load), load.of(rows), misfit=False)
        reduced, unequal = reply.pool()
        if len(unequal):
            raise self._unequal(unequal[:_MOST_LISTED])
        exact = self._layout.exact
        if len(large := exact[moments.wrapped(reduced[exact])]):
            raise self._too_large(large[:_MOST_LISTED])
        if request.full:
            held = reduced[:, moments.PRESENT] > 0
            self._idle[self._layout.positions] = np.where(held, 0, self._idle[self._layout.positions] + 1)
        counted = reply.count()[self._seen_counts] if len(self._seen_counts) else None
        return Columns(self._names, reduced if self._seen is None else reduced[self._seen], counted)

    def _place(self, load: plan.Load) -> Ints | None:
        if load not in self._fits:
            self._fits[load] = self._layout.place(load)
        return self._fits[load]

    def _fill(self, load: plan.Load, at: Ints | None, counts: Ints | None) -> None:
        """Put what this rank has counted into the histograms of the next round."""
        if not len(self._counts):
            return
        self._counts[:] = 0
        own = load.counts_of(counts)
        if at is not None and own is not None:
            self._counts[self._layout.place_counts(load, at)] = own

    def _round(self, request: Request, at: Ints | None, rows: Ints, *, misfit: bool) -> _Reply:
        """Send what this rank has, in the layout all ranks have, and receive what all have."""
        self._vector[:] = self._blank
        self._vector[: wire.HEAD] = (
            misfit,
            0 if request.problem is None else 1,
            request.attempt,
            request.step,
            wire.UNSET if request.operation is None else _number_of(f"{request.operation} {request.full}"),
            self._number,
            self._layout.epoch,
            self._layout.hash,
            request.reset,
        )
        if at is not None:
            wire.body(self._vector)[at] = rows
        size = self._vector.nbytes + self._counts.nbytes
        gathers = len(self.members) * size <= wire.GATHER_BYTES
        reply = self._gather() if gathers else self._sum()
        if (text := wire.disagreement(reply.heads, reply.who)) is not None:
            self._close(f"expected all ranks at the same export, got {text} (this rank: {request.operation})")
            raise errors.DesyncError(self._closed)
        self._attempt = reply.most(wire.ATTEMPT)
        return reply

    def _gather(self) -> _Reply:
        layout, size = self._layout, len(self._vector)
        received = self._link.gather(wire.joined(self._vector, self._counts))
        vectors, rest = received[:, :size], received[:, size:]

        counts = rest.reshape(len(rest), -1, histogram.BUCKETS)
        held = wire.body(vectors)[:, :, moments.PRESENT]

        def pool() -> tuple[Ints, Ints]:
            rows, unequal = layout.pool(wire.body(vectors))
            if len(layout.asked_copies):
                unequal = np.union1d(unequal, layout.unlike(counts, held > 0))
            return rows, unequal

        def count() -> Ints:
            return layout.count_once(histogram.merge(counts), held.sum(axis=0))

        return _Reply(vectors[:, : wire.HEAD], self._ranks, pool, count)

    def _sum(self) -> _Reply:
        greatest = self._link.greatest(wire.maxima(self._vector, self._layout, self._counts))
        total, layout = self._link.total(wire.sums(self._vector, self._counts)), self._layout
        heads, rows, unequal = wire.read_summed(greatest, total, layout)
        return _Reply(
            heads, ("some ranks", "others"), lambda: (rows, unequal), lambda: wire.read_counts(total, layout)
        )

    def _exchange(self, request: Request, load: plan.Load) -> None:
        """Tell each other names, and replace the layout; the last step, so that no rank is half-way."""
        told = self._link.tell((request.session, self._ordinal, plan.propose(load)))
        self._name([(session, ordinal) for session, ordinal, _ in told])
        proposals = [(rank, text) for rank, (_, _, text) in zip(self.members, told, strict=True)]
        layout, idle, conflicts = plan.agree(self._layout, self._idle, proposals, full=request.full)
        if conflicts:
            more = len(conflicts) - _MOST_LISTED
            listed = conflicts[:_MOST_LISTED] + ([f"and {more} more keys"] if more > 0 else [])
            raise errors.AgreementError(self._text("; ".join(listed)))
        self._install(layout, idle)

    def _install(self, layout: plan.Layout, idle: Ints) -> None:
        self._layout, self._idle = layout, idle
        seen, self._names = layout.seen_by(self.rank)
        self._seen = None if len(seen) == len(layout.wire) else seen
        self._seen_counts = np.flatnonzero(np.isin(layout.asked, seen))
        self._counts = histogram.empty(len(layout.asked))
        self._fits: weakref.WeakKeyDictionary[plan.Load, Ints | None] = weakref.WeakKeyDictionary()
        self._blank = wire.vector(layout)
        self._vector = self._blank.copy()

    def _name(self, sessions: list[tuple[str, int]]) -> None:
        """Name the group by its processes, once: the id of its exports, the same on all ranks."""
        if self._uid is None:
            self._uid = hashlib.blake2b(repr(sessions).encode(), digest_size=12).hexdigest()

    # -- what went wrong ---------------------------------------------------------------------------

    def _failure(self, request: Request) -> errors.ReductionError:
        """Tell each other what failed, and of which key; return the error of those who did not fail."""
        problem = request.problem
        mine = None if problem is None else (_describe(problem), isinstance(problem, errors.AgreementError))
        told = self._link.tell((request.key, mine))
        self._told_key = next((key for key, _ in told if key is not None), None)
        failed = [
            (rank, *what) for rank, (_, what) in zip(self.members, told, strict=True) if what is not None
        ]
        text = "; ".join(f"rank {rank}: {what}" for rank, what, _ in failed[:_MOST_LISTED])
        disagreed = all(agreement for _, _, agreement in failed)
        cause = errors.AgreementError if disagreed else errors.PeerError
        return cause(self._text(f"expected no failure before the export, got {text}"))

    def _unequal(self, positions: NDArray[np.intp]) -> errors.AgreementError:
        """Tell each other the values of replicated keys, and return the error that names them."""
        told = self._link.tell(wire.body(self._vector)[positions].tolist())
        listed: list[str] = []
        for i, position in enumerate(positions):
            slot, meta = self._layout.wire[position]
            views: dict[str, list[int]] = {}
            for rank, rows in zip(self.members, told, strict=True):
                row = np.array(rows[i], np.int64)
                if row[moments.PRESENT]:
                    found = names(slot.key, meta.kind, meta.reduce_type, row)
                    views.setdefault(", ".join(f"{k} = {v!r}" for k, v in found.items()), []).append(rank)
            what = " but ".join(f"{text} on {plan.ranks_text(ranks)}" for text, ranks in views.items())
            if len(views) == 1:
                what = f"other values of the same {next(iter(views))}"
            listed.append(f"key {slot.key!r}: expected the same on all ranks (replicated), got {what}")
        return errors.AgreementError(self._text("; ".join(listed)))

    def _too_large(self, positions: NDArray[np.intp]) -> errors.ReductionError:
        keys = ", ".join(repr(self._layout.wire[position].slot.key) for position in positions)
        text = f"expected exact sums over all ranks that fit int64, got more for {keys}"
        return errors.ReductionError(self._text(text))

    def _close(self, text: str) -> None:
        self._closed = self._text(f"{text}; no export over this group is possible any more")

    def _text(self, text: str) -> str:
        return f"{text} (export {self._number} of the group of {plan.ranks_text(self.members)})"


@functools.lru_cache(maxsize=256)
def _number_of(text: str) -> int:
    """Return a number that stands for a text in all processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_TEXT_LENGTH]
    except Exception:  # noqa: BLE001 - an error that cannot even be printed
        return type(error).__name__
