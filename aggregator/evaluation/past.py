"""What a run's log remembers of evaluations: those whose commit is durable.

An evaluator tags its process's next commit with each evaluation, see `tags`. One whose results were not
committed when the process died is not remembered: it will be done again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from eventlog import RunReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from eventlog import Log

BEFORE = "before"  # the tag's value for the untouched model
RESUMED = "resumed"


def tags(name: str, updates: int) -> dict[str, Any]:
    """Return the tags of a commit that holds the evaluation of a model after that many updates."""
    done = updates or BEFORE
    return {f"{_key(name)}/{done}": done}


def resumed(name: str, updates: int) -> dict[str, Any]:
    """Return the tags of a commit by an attempt that goes on after that many updates."""
    return {f"{_key(name)}/{RESUMED}": updates}


class Done(NamedTuple):
    """An evaluation in the log: of a model after that many epochs, and the step whose commit holds it."""

    epochs: int
    step: int


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of the run up to now; nothing, where no log is started."""

    complete: Mapping[int, Done] = field(default_factory=dict[int, Done])  # by finished updates
    begin: int = 0  # finished updates that this attempt goes on after, as whoever started it says
    committed: int = -1  # the last committed step
    known: bool = False  # the log holds the run's past
    tagged: bool = False  # and the evaluator's: else it may work beside the committing process

    def standing(self, updates: int) -> dict[int, int]:
        """Return what stays for an attempt that goes on after that many updates: updates → epochs.

        It commits the steps from there on again, with whatever else their commits held.
        """
        begin = max(updates, self.begin)
        return {
            each: done.epochs for each, done in self.complete.items() if each <= updates and done.step < begin
        }

    def lost(self, evaluated: int, updates: int) -> bool:
        """Whether an evaluation that was made did not get into the log, or does not stay there."""
        gone = self.known and evaluated not in self.standing(updates)
        return gone and (self.tagged or self.committed < evaluated - 1)


def recall(log: Log, name: str, steps_per_epoch: int) -> Past:
    """Read what the run's attempts, this process's own included, committed of the evaluator `name`."""
    attempts = log.run.attempts()
    leaders = {attempt.session: attempt.number for attempt in attempts}
    given = {attempt.session: attempt.resume_step for attempt in attempts}
    commits: dict[str, list[_Commit]] = {session: [] for session in sorted(leaders, key=leaders.__getitem__)}
    for producer, _, batch in RunReader(log.run.path).commits(lambda session, _: session in leaders):
        if (commit := _commit(batch, name, steps_per_epoch)) is not None:
            commits[producer.session].append(commit)
    complete: dict[int, Done] = {}
    committed, tagged = -1, False
    for session, attempt in commits.items():
        if not attempt:
            continue
        # what an attempt does again is superseded: the commits of all steps from where it begins
        said = [given[session], *(commit.resumed for commit in attempt)]
        begin = next((each for each in said if each is not None), min(commit.step for commit in attempt))
        complete = {updates: done for updates, done in complete.items() if done.step < begin}
        complete |= {updates: done for commit in attempt for updates, done in commit.evaluations}
        committed = max(commit.step for commit in attempt)
        tagged |= any(commit.evaluations for commit in attempt)
    own = log.producer.session
    known = any(session != own or found for session, found in commits.items())
    return Past(complete, given.get(own) or 0, committed, known, tagged)


class _Commit(NamedTuple):
    step: int
    evaluations: tuple[tuple[int, Done], ...] = ()  # of a model after so many updates
    resumed: int | None = None  # finished updates that the attempt began with


def _commit(batch: pa.RecordBatch, name: str, steps_per_epoch: int) -> _Commit | None:
    """Return what a commit says in its first row; None for what was only added to an earlier step."""
    wanted = ("epoch", "epoch_step", "global_step", "tags")
    epoch, epoch_step, step, said = (batch.column(column)[0].as_py() for column in wanted)
    if epoch is None or epoch_step is None:
        return None
    tagged = json.loads(said) if said else {}
    found: list[tuple[int, Done]] = []
    for key, value in tagged.items():
        updates = 0 if value == BEFORE else value
        # a log of before the evaluations of a commit had a tag each has the name alone
        if key in (_key(name), f"{_key(name)}/{value}") and _is_count(updates):
            ended = updates == step + 1 and epoch_step >= steps_per_epoch - 1
            found.append((updates, Done(epoch + ended, step)))
    begins = tagged.get(f"{_key(name)}/{RESUMED}")
    return _Commit(step, tuple(found), begins if _is_count(begins) else None)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _key(name: str) -> str:
    return f"evaluation/{name}" if name else "evaluation"
