"""A failure on one rank is an error on all of them: told in one collective, raised by everybody after it."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from eventlog import errors

from .. import collective

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch.distributed import ProcessGroup

__all__ = ["TOLD", "agreed", "raise_together", "text_of"]

TOLD: Final = (Exception, SystemExit, asyncio.CancelledError)
"""What the peers are told of; an interrupt from the keyboard reaches them by itself."""

_MOST_NAMED: Final = 5  # ranks
_TEXT_LENGTH: Final = 500


def text_of(error: BaseException | None) -> str | None:
    """Return an error as the other ranks are told it; None of none."""
    return None if error is None else f"{type(error).__name__}: {error}"[:_TEXT_LENGTH]


def raise_together(error: BaseException | None, told: Sequence[str | None], members: Sequence[int]) -> None:
    """Raise this rank's own error, or a PeerError that names the ranks with one; else nothing."""
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in zip(members, told, strict=True) if text is not None]
    if failed:
        raise errors.PeerError(
            f"expected no failure in the evaluation, got {'; '.join(failed[:_MOST_NAMED])}"
        )


@contextmanager
def agreed(group: ProcessGroup | None, members: Sequence[int]) -> Generator[None]:
    """Raise on all ranks what goes wrong on any of them; all of them must come to its end."""
    error = None
    try:
        yield
    except TOLD as failed:  # raised when the peers have heard of it
        error = failed
    raise_together(error, collective.tell(text_of(error), group), members)
