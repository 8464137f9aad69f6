"""What a run's log remembers of evaluations: those whose commit is durable.

An evaluator tags its process's next commit with what it measured, see `tags`. An evaluation whose results
were not committed when the process died is not remembered: it will be done again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from eventlog import RunReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from eventlog import Log

BEFORE = "before"  # the tag's value for the untouched model


def tags(name: str, updates: int) -> dict[str, Any]:
    """Return the tags of a commit that holds the evaluation of a model after that many updates."""
    return {_key(name): updates or BEFORE}


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of the run up to now; nothing, where no log is started."""

    complete: Mapping[int, int] = field(default_factory=dict[int, int])  # finished updates → epochs
    committed: int = -1  # the last committed step
    known: bool = False  # the log holds the run's past

    def lost(self, updates: int) -> bool:
        """Whether an evaluation that was made after that many updates did not get into the log."""
        tagged = bool(self.complete)  # else the evaluator may have worked beside the committing process
        return self.known and updates not in self.complete and (tagged or self.committed < updates - 1)


def recall(log: Log, name: str, steps_per_epoch: int) -> Memory:
    """Read what the run's attempts, this process's own included, committed of the evaluator `name`."""
    leaders = {attempt.session: attempt.number for attempt in log.run.attempts()}
    commits: dict[str, list[_Commit]] = {session: [] for session in sorted(leaders, key=leaders.__getitem__)}
    for producer, _, batch in RunReader(log.run.path).commits(lambda session, _: session in leaders):
        commits[producer.session].append(_commit(batch, name, steps_per_epoch))
    complete: dict[int, int] = {}
    committed = -1
    for attempt in filter(None, commits.values()):
        steps = [commit.step for commit in attempt]
        # an attempt redoes the steps from its first one on: what was measured after them is superseded
        complete = {updates: epochs for updates, epochs in complete.items() if updates <= min(steps)}
        complete |= dict(commit.evaluation for commit in attempt if commit.evaluation)
        committed = max(steps)
    own = log.producer.session
    return Memory(
        complete, committed, known=any(session != own or found for session, found in commits.items())
    )


class _Commit(NamedTuple):
    step: int
    evaluation: tuple[int, int] | None  # finished updates and epochs of what was measured


def _commit(batch: pa.RecordBatch, name: str, steps_per_epoch: int) -> _Commit:
    """Return what a commit says in its first row."""
    wanted = ("epoch", "epoch_step", "global_step", "tags")
    epoch, epoch_step, step, tags = (batch.column(column)[0].as_py() for column in wanted)
    measured = json.loads(tags or "{}").get(_key(name))
    if measured is None:
        return _Commit(step, None)
    updates = 0 if measured == BEFORE else int(measured)
    ended = updates == step + 1 and epoch_step >= steps_per_epoch - 1
    return _Commit(step, (updates, epoch + ended))


def _key(name: str) -> str:
    return f"evaluation/{name}" if name else "evaluation"
