"""What never reached the disk: counted for the caller, and noted there as soon as it takes anything."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from .schema import LossCause, Stream
from .windows import ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from .rundir import Producer
    from .segment import Loss

    Place = tuple[Stream, int, int]
    Lost = tuple[Producer, Loss]

_NAMES = {Stream.RECORDS: "records", Stream.PAYLOAD: "values", Stream.COMMITS: "commits"}
_OF_WINDOWS = (Stream.RECORDS, Stream.PAYLOAD)  # the window of a commit is its number
_MOST_RUNS: Final = 8  # of steps, and of commits without a step, that are named


class Losses:
    """Losses by stream, cause and window. Whoever shares one holds a lock of his own."""

    def __init__(self) -> None:
        self.of_records = 0  # how often something of records or commits was lost
        self._kinds: set[tuple[Stream, int]] = set()
        self._counted: dict[Place, Loss] = {}
        self._unsaid: dict[Place, Loss] = {}

    def __iter__(self) -> Iterator[Loss]:
        return iter(list(self._counted.values()))

    def __len__(self) -> int:
        return len(self._counted)

    @property
    def owed(self) -> bool:
        """Whether some are not noted on the disk."""
        return bool(self._unsaid)

    def count(self, loss: Loss, *, owed: bool = True) -> bool:
        """Count a loss; `owed`: it is to be noted on the disk. Return whether it is the first of its kind."""
        first = (loss.stream, loss.cause) not in self._kinds
        self._kinds.add((loss.stream, loss.cause))
        self.of_records += loss.stream is not Stream.PAYLOAD and loss.cause is not LossCause.REFUSED
        _add(self._counted, loss)
        if owed:
            self.owe(loss)
        return first

    def owe(self, loss: Loss) -> None:
        """Note a counted loss again: what was noted is gone."""
        _add(self._unsaid, loss)

    def pay(self, *, known: bool = False) -> Loss | None:
        """Take the first loss that is to be noted; `known`: the first whose step no commit is awaited for."""
        found = (place for place, loss in self._unsaid.items() if not known or not loss.unbound)
        place = next(found, None)
        return None if place is None else self._unsaid.pop(place)

    def unsaid(self) -> list[Loss]:
        """Return those that are to be noted."""
        return list(self._unsaid.values())

    def bind(self, first: int, last: int, step: int) -> None:
        """Say which step the windows `first` to `last` are, where no step was known."""
        if not self._counted:
            return
        places = [(s, c, w) for w in range(first, last + 1) for s in _OF_WINDOWS for c in LossCause]
        for losses in (self._counted, self._unsaid):
            for place in places:
                if (loss := losses.get(place)) and loss.step is None:
                    losses[place] = replace(loss, step=step)


def told(losses: Iterable[Loss]) -> str:
    """Say of which steps something was lost: "records of steps 3-7, 9; commits of steps 3-7"."""
    said: list[str] = []
    lost = list(losses)
    for stream in Stream:
        own = [loss for loss in lost if loss.stream is stream and not _is_untraced(loss)]
        steps = ranges((loss.step for loss in own if loss.step is not None), most=_MOST_RUNS)
        unknown = len({loss.window for loss in own if loss.step is None})
        words = [f"steps {steps}"] if steps else []
        what = "number" if stream is Stream.COMMITS else "window"
        words += [f"{unknown} {what}{'s' * (unknown > 1)} without a step"] if unknown else []
        said += [f"{_NAMES[stream]} of {' and '.join(words)}"] if words else []
    untraced = [loss.detail for loss in lost if _is_untraced(loss)]
    said += [*untraced[:_MOST_RUNS], *(["…"] if len(untraced) > _MOST_RUNS else [])]
    return "; ".join(said)


def concerning(
    losses: Iterable[Lost], streams: Collection[Stream], since: int | None = None, until: int | None = None
) -> list[Lost]:
    """Return what an answer from some streams, of the steps from `since` to `until`, may lack.

    A recording mistake that was refused is none: what was recorded is whole without it.
    """
    low, high = (-1 if since is None else since), (1 << 62 if until is None else until)
    return [
        (who, loss)
        for who, loss in losses
        if loss.stream in streams
        and loss.cause is not LossCause.REFUSED
        and (loss.step is None or low <= loss.step <= high)
    ]


def lines(losses: Iterable[Lost]) -> list[str]:
    """Say what was lost in a line a process: "actor-0: commits of steps 3-7"."""
    own: dict[tuple[str, int], list[Loss]] = {}
    for who, loss in losses:
        own.setdefault((who.role, who.rank), []).append(loss)
    return [f"{role}-{rank}: {told(some)}" for (role, rank), some in own.items()]


def number(losses: Iterable[Lost]) -> int:
    """Return how many commits, and windows of records or values, were lost."""
    return sum(loss.rows if _is_untraced(loss) else 1 for _, loss in losses)


def _is_untraced(loss: Loss) -> bool:
    """Whether it is of commits that readers miss, of which `rows` say how many they are."""
    return loss.stream is Stream.COMMITS and loss.cause is LossCause.MISSING and loss.step is None


def _add(losses: dict[Place, Loss], loss: Loss) -> None:
    place = (loss.stream, loss.cause, loss.window)
    losses[place] = losses[place].plus(loss) if place in losses else loss
