"""Which mask a stat binds to: what a task or thread registered is its own.

The masks of a context lie in a context variable, as scopes do: asyncio tasks inherit those of their creator
and change only their own; threads start without any. So tasks and threads that use the same names never take
each other's masks, and an export elsewhere takes none away.
"""

from __future__ import annotations

from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

from . import scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .frame import Masked
    from .specs import Under

    Own = Mapping[tuple[object, str], Masked | None]

# Of a context: beyond, the older half goes. Names made up anew must not pile up, nor the masks under them.
NAMES_AT_MOST: Final = 1 << 10
BYTES_AT_MOST: Final = 32 << 20  # of masks in no window any more
_FEW: Final = 16  # names, of which the bytes are not counted
_OWN: ContextVar[Own] = ContextVar("areal_metrics_masks", default={})  # noqa: B039 (never mutated)
current = _OWN.get  # the masks of this context; while it is the same object no name is bound anew


class Place:
    """Where stats go: their specs and their mask, as long as the same is said and nothing around changes."""

    __slots__ = ("_denominator", "_label", "_own", "_paths", "_reduce_type", "masked", "under")

    def __init__(
        self, denominator: object, reduce_type: object, label: str | None, under: Under, masked: Masked
    ) -> None:
        self._denominator, self._reduce_type, self._label = denominator, reduce_type, label
        self._paths, self._own = scope.current(), current()
        self.under, self.masked = under, masked

    def is_of(self, denominator: object, reduce_type: object, label: str | None) -> bool:
        """Whether that is said again, in the same scopes, and no mask was bound since."""
        return (
            denominator is self._denominator
            and reduce_type is self._reduce_type
            and label == self._label
            and scope.current() is self._paths
            and current() is self._own
        )


NOWHERE: Final = Place(object(), None, None, cast("Under", None), cast("Masked", None))


def bound(recorder: object, name: str, otherwise: Masked | None) -> Masked | None:
    """Return the mask this context registered last under a full name; `otherwise` where it registered none.

    None: the last one it would register was refused.
    """
    return _OWN.get().get((recorder, name), otherwise)


def names(recorder: object) -> set[str]:
    """Return the full names under which this context has masks of a recorder."""
    return {name for (owner, name), masked in _OWN.get().items() if owner is recorder and masked is not None}


def bind(recorder: object, masks: Iterable[tuple[str, Masked | None]]) -> None:
    """Let the stats of this context bind to masks; None: to nothing, for a mask was refused."""
    own = dict(_OWN.get())
    for name, masked in masks:
        own.pop((recorder, name), None)  # the newest lie at the end
        own[recorder, name] = masked
    if len(own) > NAMES_AT_MOST or (len(own) > _FEW and sum(map(_held, own.values())) > BYTES_AT_MOST):
        own = dict(islice(own.items(), len(own) // 2, None))
    _OWN.set(own)


def _held(masked: Masked | None) -> int:
    """Return the bytes that nothing but the binding holds: packed, or on a device as they are."""
    if masked is None or not masked.drained:
        return 0
    return masked.elements if masked.mask is not None else masked.elements // 8


def release(recorder: object) -> None:
    """Let no stat of this context bind to what it registered with a recorder so far."""
    if own := _OWN.get():
        _OWN.set({key: masked for key, masked in own.items() if key[0] is not recorder})


def begin_anew() -> None:
    """In a forked child: the masks are in the parent's log."""
    _OWN.set({})
