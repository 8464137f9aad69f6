"""`follow`: tells trackers a run while it is written, from any machine that sees its directory."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aggregator import fits
from eventlog import Follower, errors, fixed, losses, ranges, schema

from .account import Report
from .backends.base import Rewriter, as_ours, capabilities_of, check_backends, name_of, target_of
from .metrics import without_counts
from .player import raise_or_leave, select, uncommitted
from .precedence import Precedence
from .recipient import CLOSE_SECONDS, Asked, Recipient
from .renaming import Renaming, pairs_of
from .statistics import check_stats
from .steps import DEFAULT_WAIT, Order, Row
from .succession import Succession
from .supplement import Supplement
from .turn import Turn

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from eventlog import Followed

    from .backends.base import Backend, Selection
    from .renaming import Rules

_log = logging.getLogger("areal_metrics.replay")

POLL_SECONDS: Final = 0.5
GIVE_UP_SECONDS: Final = 600.0
"""How long a run may give no sign of life before it is given up."""
ASK_SECONDS: Final = 5.0  # as often as processes give one


def follow(
    run_dir: str | os.PathLike[str],
    backends: Sequence[Backend],
    *,
    since: int | None = None,
    until: int | None = None,
    keys: Iterable[str] | None = None,
    stats: Iterable[str] = (),
    rename: Rules = (),
    cursors: str | os.PathLike[str] | None = None,
    new_run: bool = False,
    wait: float = DEFAULT_WAIT,
    give_up: float | None = GIVE_UP_SECONDS,
    poll: float = POLL_SECONDS,
    stop: threading.Event | None = None,
    failed: list[errors.ArealMetricsError] | None = None,
) -> list[Report]:
    """Tell the backends a run from its beginning and on, until it has finished; it need not exist yet.

    A step is told once a later one came, or nothing more of it for `wait` seconds. What a resumed run takes
    back is told anew to targets that can go back; others keep what they have, and it is counted. Targets
    that are written as a whole (offline files of wandb and SwanLab) are written at the end.

    Ends when the run has finished, `give_up` seconds after its last sign of life (None: never; NotARunError
    where it has not begun by then), at `stop`, or with Ctrl-C: each time what was handed to the targets is
    told first, and following again goes on from there (Ctrl-C may leave to it what was just read). `since`,
    `until`, `keys`, `stats`, `rename`, `cursors` and `new_run` are as for `play`; with `stats` a step is told
    `wait` seconds after its last commit.

    A backend that keeps failing is left behind; what is raised in the end, and `failed`, are as by `play`.
    """
    check_backends(backends)
    path = fixed(run_dir)
    if path.exists() and not path.is_dir():
        raise errors.NotARunError(f"expected a run's directory, got a file: {path}")
    folder = path / "cursors" if cursors is None else fixed(cursors)
    asked = Asked(path, select(since, until, keys), check_stats(stats), pairs_of(rename), folder, new_run)
    tail = _Tail(asked, backends, wait)
    try:
        try:
            for rows in _commits(asked, tail.succession, give_up, poll, stop or threading.Event()):
                tail.tell(rows)
        except KeyboardInterrupt:
            _log.warning("interrupted: what was handed over is told, following again goes on from there")
        tail.tell([], ending=True)
    except BaseException:
        tail.abandon()
        raise
    return tail.close(failed)


# -- what comes ------------------------------------------------------------------------------------


def _commits(
    asked: Asked,
    succession: Succession,
    give_up: float | None,
    poll: float,
    stop: threading.Event,
) -> Iterator[list[Row]]:
    """Yield the commits to tell, as they come."""
    follower, leading = Follower(asked.path, records=False), Precedence(asked.path)
    pulse, turns = _Pulse(follower, give_up), dict[str, Turn]()
    while not stop.is_set():
        finished = follower.finished()  # asked before the last look, and after it
        come = [
            row for told in follower.poll() for row in leading.take(told, _rows(told, asked.selection, turns))
        ]
        come += leading.released()
        yield succession.take(come)
        if come:
            pulse.felt()
        elif finished and follower.finished() and not succession.waiting:
            break
        elif pulse.stopped():
            if follower.reader is None:
                raise errors.NotARunError(f"expected a run within {give_up:g} s, got none: {asked.path}")
            _log.warning("no sign of life of the run for %g s: given up: %s", give_up, asked.path)
            break
        stop.wait(poll)
    yield succession.take(leading.released(ending=True))
    succession.problems |= {str(problem): None for problem in follower.problems} | leading.problems
    chosen = asked.selection
    succession.losses = losses.concerning(
        follower.losses, {schema.Stream.COMMITS}, chosen.since, chosen.until
    )


class _Pulse:
    """Feels whether a run lives: by what changes, since the clocks of two machines differ."""

    def __init__(self, follower: Follower, give_up: float | None) -> None:
        self._follower = follower
        self._give_up = float("inf") if give_up is None else give_up
        self._signs: list[int] = []
        self.felt()

    def felt(self) -> None:
        """Take note of a sign of life."""
        self._last = self._asked = time.monotonic()

    def stopped(self) -> bool:
        """Whether there was none for too long; the processes are asked now and then."""
        now = time.monotonic()
        begun = self._follower.reader is not None
        if begun and now - self._asked >= min(ASK_SECONDS, self._give_up):
            self._asked = now
            signs = [sign.seen_us for sign in self._follower.signs()]
            if signs != self._signs:
                self._signs = signs
                self.felt()
        return now - self._last > self._give_up


def _rows(told: Followed, selection: Selection, turns: dict[str, Turn]) -> Iterator[Row]:
    """Yield what a commit holds of the selection, a row for each of its parts."""
    step, time_us = told.step, told.commit["time"][0].value
    turn = turns.setdefault(told.producer.session, Turn()).of(time_us)
    if (selection.since is not None and step < selection.since) or (
        selection.until is not None and step > selection.until
    ):
        return
    columns = ("sub_index", "key", "value", "value_int")
    parts: dict[int, dict[str, float]] = {}
    for part, key, value, integer in zip(*(told.commit[name].to_pylist() for name in columns), strict=True):
        if key is not None and (selection.keys is None or fits(key, selection.keys)):
            parts.setdefault(part or 0, {})[key] = value if integer is None else integer
    attempt = told.commit["attempt"][0].as_py()
    for metrics in parts.values():
        yield Row(step, without_counts(metrics), time_us / 1e6, {attempt or 0: turn / 1e6})


# -- to whom it is told ----------------------------------------------------------------------------


class _Tail:
    """All targets, opened with the first commit."""

    def __init__(self, asked: Asked, backends: Sequence[Backend], wait: float) -> None:
        self.succession = Succession(asked.path)
        self._asked = asked
        self._names = Renaming(asked.rename)
        self._supplement = Supplement(asked.path, asked.stats, asked.selection, self.succession, wait)
        self._wait = 0.0 if asked.stats else wait  # a supplemented step has closed
        self._whole = [backend for backend in backends if _is_written_whole(backend)]
        self._backends = [backend for backend in backends if not _is_written_whole(backend)]
        self._order = list(backends)
        self._told: list[Recipient] = []
        self._failed: dict[int, errors.ArealMetricsError] = {}  # by the backend's `id`
        self._begun = False

    def tell(self, commits: list[Row], *, ending: bool = False) -> None:
        """Tell every target commits in their order; those of which one fails go on without it."""
        rows = self._supplement.take(commits, ending=ending)
        if rows and not self._begun:
            self._begun = True
            self._open()
        for row in map(self._names.row, rows):
            for told in self._told:
                told.tell(row)
        if self._begun and not self._whole and all(told.failure for told in self._told):
            raise_or_leave(list(self._failures().values()), None)

    def close(self, failed: list[errors.ArealMetricsError] | None) -> list[Report]:
        """Finish every target; return their reports, or raise the first error, or leave all in `failed`."""
        for told in self._told:
            told.finish()
        deadline, back = time.monotonic() + CLOSE_SECONDS, self.succession.taken_back()
        reports = {id(told.backend): told.report(deadline, back=bool(back)) for told in self._told}
        reports = {key: replace(report, partial=self._supplement.partial) for key, report in reports.items()}
        if self._begun:
            for backend in self._order:
                self._settle(backend, reports)
        lost = self._failures()
        raise_or_leave(list(lost.values()), failed)
        if self._begun and not lost:
            self._supplement.check()
        problems = tuple(self.succession.problems)
        return [
            replace(
                reports.get(id(backend)) or Report(name_of(backend), target_of(backend)),
                superseded=len(back),
                superseded_steps=ranges(back),
                uncommitted=0 if self._begun else uncommitted(self._asked.path),
                lost=losses.number(self.succession.losses),
                losses=tuple(losses.lines(self.succession.losses)),
                problems=problems,
            )
            for backend in self._order
            if id(backend) not in lost
        ]

    def abandon(self) -> None:
        """Let the targets finish what they were told."""
        for told in self._told:
            told.finish()
        for told in self._told:
            told.join(CLOSE_SECONDS)

    def _open(self) -> None:
        try:
            for backend in self._backends:
                try:
                    self._told.append(Recipient(backend, self._asked, self.succession, self._wait))
                except (Exception, SystemExit) as error:  # noqa: BLE001  (somebody else's code)
                    self._failed[id(backend)] = as_ours(error, backend)
                    if len(self._order) > 1:
                        _log.error("%s; the others are told", self._failed[id(backend)])
            _check_different([told.backend for told in self._told])
        except BaseException:
            self.abandon()
            raise

    def _settle(self, backend: Backend, reports: dict[int, Report]) -> None:
        """Tell the run as a whole, where that is how a target is written, or puts right what was told."""
        before = reports.get(id(backend))
        if id(backend) in self._failures():
            return
        if before is not None and not (isinstance(backend, Rewriter) and _takes_all(backend)):
            return
        try:
            after = (self._asked if before is None else replace(self._asked, new_run=False)).play(backend)
        except errors.ArealMetricsError as error:
            self._failed[id(backend)] = error
        else:
            done = after if before is None else replace(before, sent=before.sent + after.sent)
            whole = {name: getattr(after, name) for name in ("folded", "partial", "kept", "kept_steps")}
            reports[id(backend)] = replace(done, **whole)

    def _failures(self) -> dict[int, errors.ArealMetricsError]:
        """Return the errors of the backends that failed, in their order."""
        found = self._failed | {id(told.backend): told.failure for told in self._told if told.failure}
        return {id(backend): found[id(backend)] for backend in self._order if id(backend) in found}


def _check_different(backends: Sequence[Backend]) -> None:
    """ConfigError for two backends, opened by now, that tell one target."""
    seen: set[tuple[str, str]] = set()
    for backend in backends:
        name, target = name_of(backend), target_of(backend)
        if (name, target) in seen:
            raise errors.ConfigError(f"expected different targets, got {name} twice: {target}")
        seen.add((name, target))


def _takes_all(backend: Backend) -> bool:
    return capabilities_of(backend).order is Order.ANY


def _is_written_whole(backend: Backend) -> bool:
    """Whether a target can only be written anew, each time it is told more."""
    return isinstance(backend, Rewriter) and not (capabilities_of(backend).rewinds or _takes_all(backend))
