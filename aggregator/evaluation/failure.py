"""A failure on one rank is an error on all of them: told in one collective, raised by everybody after it."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from eventlog import errors

from .. import collective

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch.distributed import ProcessGroup

T = TypeVar("T")

__all__ = ["Failure", "agreed", "ended", "text_of"]

_MOST_NAMED: Final = 5  # ranks
_TEXT_LENGTH: Final = 500


def text_of(error: BaseException | None) -> str | None:
    """Return an error as the other ranks are told it; None of none."""
    if error is None:
        return None
    try:
        said = str(error)
    except Exception as unsaid:  # noqa: BLE001 - the peers must hear of the error all the same
        said = f"(no text: {type(unsaid).__name__})"
    return f"{type(error).__name__}: {said}"[:_TEXT_LENGTH]


class Failure:
    """What went wrong on this rank, kept until its peers have heard of it."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    @property
    def text(self) -> str | None:
        """What the peers are told."""
        return text_of(self.error)

    @contextmanager
    def kept(self) -> Generator[None]:
        """Keep what is raised inside the block, and go on after it; an interrupt reaches all by itself."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a peer that does not hear of it waits for ever
            self.error = error

    def raise_together(self, told: Sequence[str | None], members: Sequence[int]) -> None:
        """Raise this rank's own error, or a PeerError that names the ranks with one; else nothing."""
        if self.error is not None:
            raise self.error
        failed = [
            f"rank {rank}: {text}" for rank, text in zip(members, told, strict=True) if text is not None
        ]
        if failed:
            raise errors.PeerError(
                f"expected no failure in the evaluation, got {'; '.join(failed[:_MOST_NAMED])}"
            )


@contextmanager
def agreed(group: ProcessGroup | None, members: Sequence[int]) -> Generator[None]:
    """Raise on all ranks what goes wrong on any of them; all of them must come to its end."""
    failure = Failure()
    with failure.kept():
        yield
    failure.raise_together(collective.tell(failure.text, group), members)


def ended(result: T) -> T:
    """Return what a function returned; an EvaluationError for a coroutine, of which nothing has run."""
    if not (inspect.iscoroutine(result) or inspect.isasyncgen(result)):
        return result
    name = result.__qualname__
    if inspect.iscoroutine(result):
        result.close()  # or Python would warn that nobody awaited it
    raise errors.EvaluationError(
        f"expected a result, got the coroutine of an async function, which nobody awaits: {name}; "
        "pass a plain function, such as lambda: asyncio.run(…)"
    )
