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


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of the run up to now; nothing, where no log is started."""

    complete: Mapping[int, int] = field(default_factory=dict[int, int])  # finished updates → epochs
    committed: int = -1  # the last committed step
    known: bool = False  # the log holds the run's past

    def lost(self, updates: int) -> bool:
        """Whether an evaluation that was made after that many updates did not get into the log."""
        tagged = bool(self.complete)  # else the evaluator may have worked beside the committing process
        return self.known and updates not in self.complete and (tagged or self.committed < updates - 1)


def recall(log: Log, name: str, steps_per_epoch: int) -> Past:
    """Read what the run's attempts, this process's own included, committed of the evaluator `name`."""
    attempts = log.run.attempts()
    leaders = {attempt.session: attempt.number for attempt in attempts}
    given = {attempt.session: attempt.resume_step for attempt in attempts}
    commits: dict[str, list[_Commit]] = {session: [] for session in sorted(leaders, key=leaders.__getitem__)}
    for producer, _, batch in RunReader(log.run.path).commits(lambda session, _: session in leaders):
        if (commit := _commit(batch, name, steps_per_epoch)) is not None:
            commits[producer.session].append(commit)
    complete: dict[int, int] = {}
    committed = -1
    for session, attempt in commits.items():
        if not attempt:
            continue
        # what an attempt does again is superseded: all that was measured after the updates it begins with
        said = [given[session], *(commit.resumed for commit in attempt)]
        begin = next((each for each in said if each is not None), min(commit.step for commit in attempt))
        complete = {updates: epochs for updates, epochs in complete.items() if updates <= begin}
        complete |= {updates: epochs for commit in attempt for updates, epochs in commit.evaluations}
        committed = max(commit.step for commit in attempt)
    own = log.producer.session
    return Past(complete, committed, known=any(session != own or found for session, found in commits.items()))


class _Commit(NamedTuple):
    step: int
    evaluations: tuple[tuple[int, int], ...] = ()  # finished updates and epochs of what was measured
    resumed: int | None = None  # finished updates that the attempt began with


def _commit(batch: pa.RecordBatch, name: str, steps_per_epoch: int) -> _Commit | None:
    """Return what a commit says in its first row; None for what was only added to an earlier step."""
    wanted = ("epoch", "epoch_step", "global_step", "tags")
    epoch, epoch_step, step, said = (batch.column(column)[0].as_py() for column in wanted)
    if epoch is None or epoch_step is None:
        return None
    tagged = json.loads(said) if said else {}
    found: list[tuple[int, int]] = []
    for key, value in tagged.items():
        updates = 0 if value == BEFORE else value
        # a log of before the evaluations of a commit had a tag each has the name alone
        if key in (_key(name), f"{_key(name)}/{value}") and _is_count(updates):
            ended = updates == step + 1 and epoch_step >= steps_per_epoch - 1
            found.append((updates, epoch + ended))
    begins = tagged.get(f"{_key(name)}/{RESUMED}")
    return _Commit(step, tuple(found), begins if _is_count(begins) else None)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _key(name: str) -> str:
    return f"evaluation/{name}" if name else "evaluation"
