"""What was done for one target: the account that `play` and `follow` give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """What replay did for one target. Counts are of steps, unless said otherwise.

    sent:     told now (would be, in a dry run)          skipped: the target has all of them already
    superseded: of older attempts, not told              refused: the target would not take them
    withheld: can no longer be told to an append-only target, in whole or in part, at this replay: late, of an
              attempt that came after it was told another, lost on the way, left out when it was told what
              follows, not known to have been told (no cursor was found, or a kill came over it), or now asked
              for under other names or with statistics; a new run can have them
    renamed:  keys with another name there
    kept:     steps that a target holds and the log does not have (it was damaged, or a part is not there):
              they stay as they lie there
    folded:   values that a later commit of the same step, or a later row of the same commit, gives again: of
              these the last is told
    untold:   histograms that the target cannot show
    partial:  statistics of values that are not all kept in the payload: told from those that are, if any;
              with source="recomputed" also metrics that were committed and cannot be recomputed: not told,
              and metrics that lack records, or all that a rank recorded: told of what is left
    lost:     commits that never reached the log; with source="recomputed" or statistics also windows of
              records. `losses` says whose, and of which steps, a line a process
    uncommitted: windows of a run that has ended and never committed a metric, so that there is nothing to
              tell; source="recomputed" tells those that were recorded with a step
    problems: damage found in the log as it was read, which may have cost any of the rest

    `superseded_steps`, `refused_steps`, `withheld_steps` and `kept_steps` name them: "12-15, 20".
    """

    backend: str
    target: str
    sent: int = 0
    skipped: int = 0
    superseded: int = 0
    refused: int = 0
    withheld: int = 0
    kept: int = 0
    renamed: int = 0
    folded: int = 0
    untold: int = 0
    partial: int = 0
    uncommitted: int = 0
    superseded_steps: str = ""
    refused_steps: str = ""
    withheld_steps: str = ""
    kept_steps: str = ""
    lost: int = 0
    losses: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def damaged(self) -> int:
        """How many problems the log has."""
        return len(self.problems)

    @property
    def complete(self) -> bool:
        """Whether the target now holds all that was selected, of a log that has it and no damage."""
        lacking = self.refused or self.withheld or self.kept or self.untold or self.partial
        return not (lacking or self.uncommitted or self.lost or self.problems)
