"""`follow`: tells trackers a run while it is written, from any machine that sees its directory."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from eventlog import Follower, RunDir, errors

from .account import Report
from .backends.base import Rewriter, as_ours, capabilities_of, check_backends, name_of, target_of
from .delivery import Delivery
from .metrics import without_counts
from .player import play, raise_or_leave, run_info, select, telling_of
from .precedence import Precedence
from .renaming import Renaming, pairs_of
from .statistics import check_stats
from .steps import DEFAULT_WAIT, Order, Row, named
from .succession import Succession, attempt_of
from .supplement import Supplement

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
CLOSE_SECONDS: Final = 120.0
PAUSES: Final = (0.5, 2.0, 10.0, 30.0, 60.0)  # nobody waits: an outage of a minute is no reason to give up


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
    where it has not begun by then), at `stop`, or with Ctrl-C: each time everything read so far is told
    first, and following again goes on from there. `since`, `until`, `keys`, `stats`, `rename`, `cursors` and
    `new_run` are as for `play`; with `stats` a step is told `wait` seconds after its last commit.

    A backend that keeps failing is left behind; what is raised in the end, and `failed`, are as by `play`.
    """
    check_backends(backends)
    path = Path(run_dir)
    if path.exists() and not path.is_dir():
        raise errors.NotARunError(f"expected a run's directory, got a file: {path}")
    folder = path / "cursors" if cursors is None else Path(cursors)
    asked = _Asked(path, select(since, until, keys), check_stats(stats), pairs_of(rename), folder, new_run)
    tail = _Tail(asked, backends, wait)
    try:
        try:
            for rows in _commits(path, asked, tail.succession, give_up, poll, stop or threading.Event()):
                tail.tell(rows)
        except KeyboardInterrupt:
            _log.warning("interrupted: what was read so far is told, following again goes on from there")
        tail.tell([], ending=True)
    except BaseException:
        tail.abandon()
        raise
    return tail.close(failed)


@dataclass(frozen=True)
class _Asked:
    """What is to be told, and where it is remembered."""

    path: Path
    selection: Selection
    stats: list[str]
    rename: Rules
    cursors: Path
    new_run: bool

    def play(self, backend: Backend) -> Report:
        """Tell a target the whole run as it is now."""
        return play(
            self.path,
            [backend],
            **asdict(self.selection),
            stats=self.stats,
            rename=self.rename,
            cursors=self.cursors,
            new_run=self.new_run,
        )[0]


# -- what comes ------------------------------------------------------------------------------------


def _commits(
    path: Path,
    asked: _Asked,
    succession: Succession,
    give_up: float | None,
    poll: float,
    stop: threading.Event,
) -> Iterator[list[Row]]:
    """Yield the commits to tell, as they come."""
    follower, leading = Follower(path, records=False), Precedence(path)
    pulse = _Pulse(follower, give_up)
    while not stop.is_set():
        finished = follower.finished()  # asked before the last look, and after it
        come = [row for told in follower.poll() for row in leading.take(told, _rows(told, asked.selection))]
        come += leading.released()
        yield succession.take(come)
        if come:
            pulse.felt()
        elif finished and follower.finished() and not succession.waiting:
            break
        elif pulse.stopped():
            if follower.reader is None:
                raise errors.NotARunError(f"expected a run within {give_up:g} s, got none: {path}")
            _log.warning("no sign of life of the run for %g s: given up: %s", give_up, path)
            break
        stop.wait(poll)
    yield succession.take(leading.released(ending=True))
    succession.problems |= {str(problem): None for problem in follower.problems}


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


def _rows(told: Followed, selection: Selection) -> Iterator[Row]:
    """Yield what a commit holds of the selection, a row for each of its parts."""
    step = told.step
    if (selection.since is not None and step < selection.since) or (
        selection.until is not None and step > selection.until
    ):
        return
    columns = ("sub_index", "key", "value", "value_int")
    parts: dict[int, dict[str, float]] = {}
    for part, key, value, integer in zip(*(told.commit[name].to_pylist() for name in columns), strict=True):
        if key is not None and (selection.keys is None or any(fnmatchcase(key, g) for g in selection.keys)):
            parts.setdefault(part or 0, {})[key] = value if integer is None else integer
    attempt = told.commit["attempt"][0].as_py()
    seconds = told.commit["time"][0].value / 1e6
    for metrics in parts.values():
        yield Row(step, without_counts(metrics), seconds, {attempt or 0: seconds})


# -- to whom it is told ----------------------------------------------------------------------------


class _Tail:
    """All targets, opened with the first commit."""

    def __init__(self, asked: _Asked, backends: Sequence[Backend], wait: float) -> None:
        self.succession = Succession(asked.path)
        self._asked = asked
        self._names = Renaming(asked.rename)
        self._supplement = Supplement(asked.path, asked.stats, asked.selection, self.succession, wait)
        self._wait = 0.0 if asked.stats else wait  # a supplemented step has closed
        self._whole = [backend for backend in backends if _is_written_whole(backend)]
        self._backends = [backend for backend in backends if not _is_written_whole(backend)]
        self._order = list(backends)
        self._told: list[_Told] = []
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
        deadline = time.monotonic() + CLOSE_SECONDS
        reports = {id(told.backend): told.report(deadline) for told in self._told}
        reports = {key: replace(report, partial=self._supplement.partial) for key, report in reports.items()}
        if self._begun:
            for backend in self._order:
                self._settle(backend, reports)
        lost = self._failures()
        raise_or_leave(list(lost.values()), failed)
        if self._begun and not lost:
            self._supplement.check()
        problems, back = tuple(self.succession.problems), self.succession.taken_back()
        return [
            replace(
                reports.get(id(backend)) or Report(name_of(backend), target_of(backend)),
                superseded=len(back),
                superseded_steps=named(back),
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
                    self._told.append(_Told(backend, self._asked, self.succession, self._wait))
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


class _Told:
    """One target that is told commit by commit, as live; a new attempt is a lifetime of its own to it."""

    def __init__(self, backend: Backend, asked: _Asked, succession: Succession, wait: float) -> None:
        self.backend = backend
        self._asked = asked
        self._succession = succession
        self._wait = wait
        self._sent = self._untold = 0
        self._skipped: set[int] = set()
        self._refused: set[int] = set()
        self._delivery = self._begin(keeps=True, fresh=asked.new_run)
        self._known = self._delivery.known  # attempts that it was told of

    @property
    def failure(self) -> errors.ArealMetricsError | None:
        """Why it is not told any more."""
        failure = self._delivery.failure
        return None if failure is None else as_ours(failure, self.backend)

    def tell(self, row: Row) -> None:
        """Hand over a commit."""
        attempt = attempt_of(row)
        first = self._succession.owned_from(attempt)
        if first is not None and attempt not in self._known and self._must_go_back(first):
            self._go_back(first)
        self._known.add(attempt)
        self._delivery.tell(row)

    def finish(self) -> None:
        """Tell the open step, and close."""
        self._delivery.finish()

    def join(self, seconds: float) -> None:
        """Wait until it is closed."""
        self._delivery.join(seconds)

    def report(self, deadline: float) -> Report:
        """Return what was done, once it is closed."""
        self._delivery.join(deadline - time.monotonic())
        self._count()
        held = self._delivery.withheld()
        return Report(
            name_of(self.backend),
            target_of(self.backend),
            sent=self._sent,
            skipped=len(self._skipped - held - self._refused),
            refused=len(self._refused),
            withheld=len(held),
            renamed=len(getattr(self.backend, "renamed", ())),
            untold=self._untold,
            refused_steps=named(self._refused),
            withheld_steps=named(held),
        )

    def _begin(self, *, keeps: bool, fresh: bool = False) -> Delivery:
        asked = self._asked
        return Delivery(
            self.backend,
            run_info(RunDir.open(asked.path), fresh=fresh),
            asked.cursors,
            wait=self._wait,
            queue_rows=float("inf"),
            pauses=PAUSES,
            keeps=keeps,
            telling=telling_of(asked.selection, asked.stats, Renaming(asked.rename)),
        )

    def _must_go_back(self, first: int) -> bool:
        """Whether the target holds what an attempt takes back, and can be told so by a new lifetime."""
        floor = self._delivery.floor
        return capabilities_of(self.backend).rewinds and floor is not None and first <= floor

    def _go_back(self, first: int) -> None:
        self._delivery.finish()
        if self._delivery.join(CLOSE_SECONDS) and self._delivery.failure is None:
            self._count()
            self._delivery = self._begin(keeps=False)
            self._delivery.restored(first - 1)

    def _count(self) -> None:
        self._sent += self._delivery.status().sent
        self._untold += self._delivery.untold
        self._skipped |= self._delivery.skipped
        self._refused |= self._delivery.refused


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
