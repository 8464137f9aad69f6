"""Which window is which step, which attempt it belongs to, and which attempt owns a step. Pure.

Exports carry no step; only a commit does. A window's step is the first of these that applies, and
`Binding.bound_by` names it:

    given    the caller said it: `export(step=…)`, or `set_step` of all that is in the window
    commit   its own process committed it: the commit row names the windows drained since the commit before
    export   another rank's window of the same export is bound by one of the two above
    time     the first commit of the same attempt after its export that goes forward, as a late evaluation's
             does not
    given    where nothing commits: the latest of the steps that `set_step` said of parts of the window
    None     unbound, also where a commit of its own process that may have bound it is known to be lost

A record that carries a step is at that one; what was exported of it is at that of its window.
Nothing is counted or paired by number. Clocks never decide an attempt; they decide a step only where nothing
else does.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

GIVEN: Final = "given"
COMMIT: Final = "commit"
EXPORT: Final = "export"
TIME: Final = "time"

WindowKey = tuple[str, int]  # session, number


class Window(NamedTuple):
    """What a process recorded between two exports, as far as it can be read."""

    session: str
    number: int
    time: int | None = None  # of its newest record, UTC µs; None: no record of it can be read
    given: int | None = None  # the step that all its records carry
    latest: int | None = None  # the greatest that any of them carries
    attempt: int | None = None  # what the producer knew when it drained the window
    training: bool = True  # holds something else than evaluation


class Export(NamedTuple):
    """One row of an export call; a call over two groups has two rows with the same window."""

    session: str
    window: int  # the window this call drained
    time: int
    export_id: str
    members: tuple[int, ...] | None = None  # global ranks in group order; None: without a group
    first: int | None = None  # the earliest window covered; None: its own
    attempt: int | None = None
    step: int | None = None
    reset: bool = True
    ok: bool = True
    tracker: str | None = None  # what alone was exported; None: everything
    key: str | None = None


class Commit(NamedTuple):
    """One commit of one process: "what I drained since my last commit is this step"."""

    session: str
    number: int
    time: int
    step: int
    attempt: int | None = None
    leader: bool = False
    restored: int | None = None  # the last_commit_step the logger was restored with
    first: int | None = None  # windows drained since; None: none
    last: int | None = None
    adds: bool = False  # what was measured at another step than that of the commit before it


class Claim(NamedTuple):
    """An attempt, as its leader claimed it."""

    attempt: int
    session: str = ""
    resume_step: int | None = None


class Binding(NamedTuple):
    """Where a window belongs."""

    attempt: int
    step: int | None = None
    bound_by: str | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """What `resolve` found."""

    windows: Mapping[WindowKey, Binding]  # also of windows that only an export row mentions
    commit_attempts: Sequence[int]  # one per commit, in the order given
    owned_from: Mapping[int, int | None]  # attempt → the first step it owns; None: it owns nothing


def resolve(
    windows: Iterable[Window],
    exports: Iterable[Export],
    commits: Sequence[Commit],
    claims: Iterable[Claim] = (),
    torn: Collection[str] = (),
) -> Timeline:
    """Bind windows to steps and attempts, and find what each attempt owns.

    `torn` are the sessions of which commits behind the newest one given are lost.
    """
    known = {(w.session, w.number): w for w in windows}
    calls = _calls(exports)
    for session, number in calls:
        known.setdefault((session, number), Window(session, number, training=False))
    claims = list(claims)
    attempts, commit_attempts = _attempts(known, calls, commits, claims)
    bindings = _bind(known, calls, attempts, commits, commit_attempts, torn)
    owned_from = _ownership(known, bindings, commits, commit_attempts, claims)
    return Timeline(bindings, commit_attempts, owned_from)


def _calls(exports: Iterable[Export]) -> dict[WindowKey, list[Export]]:
    calls: dict[WindowKey, list[Export]] = {}
    for export in exports:
        calls.setdefault((export.session, export.window), []).append(export)
    return calls


# -- attempts ------------------------------------------------------------------------------------------


def _attempts(
    windows: Mapping[WindowKey, Window],
    calls: Mapping[WindowKey, list[Export]],
    commits: Sequence[Commit],
    claims: Iterable[Claim],
) -> tuple[dict[WindowKey, int], list[int]]:
    """Return the attempt of every window and of every commit."""
    found: dict[WindowKey, int | None] = {}
    for key, window in windows.items():
        learnt = [export.attempt for export in calls.get(key, ()) if export.attempt is not None]
        found[key] = learnt[0] if learnt else window.attempt
    # A process that did not know yet belongs to the first attempt it came to know; alone, to attempt 0.
    first: dict[str, int] = {}
    told = [(claim.session, claim.attempt) for claim in claims]
    told += [(commit.session, commit.attempt) for commit in commits if commit.attempt is not None]
    told += [(session, attempt) for (session, _), attempt in found.items() if attempt is not None]
    for session, attempt in told:
        first[session] = min(attempt, first.get(session, attempt))
    return (
        {key: first.get(key[0], 0) if attempt is None else attempt for key, attempt in found.items()},
        [first.get(c.session, 0) if c.attempt is None else c.attempt for c in commits],
    )


# -- steps ---------------------------------------------------------------------------------------------


def _bind(
    windows: Mapping[WindowKey, Window],
    calls: Mapping[WindowKey, list[Export]],
    attempts: Mapping[WindowKey, int],
    commits: Sequence[Commit],
    commit_attempts: Sequence[int],
    torn: Collection[str],
) -> dict[WindowKey, Binding]:
    bound: dict[WindowKey, Binding] = {}
    own = _own_commits(commits)
    for key, window in windows.items():
        step = next((e.step for e in calls.get(key, ()) if e.step is not None), window.given)
        if step is not None:
            bound[key] = Binding(attempts[key], step, GIVEN)
        elif (step := _covering(own.get(window.session, ()), window.number)) is not None:
            bound[key] = Binding(attempts[key], step, COMMIT)
    leaders = {c.session for c in commits if c.leader}
    shared = _shared_steps(bound, calls, leaders)
    clock = _clock(commits, commit_attempts)
    partly: dict[WindowKey, Binding] = {}
    for key, window in windows.items():
        if key not in bound:
            lost = _skipped(own.get(window.session, ()), window.number, torn=window.session in torn)
            later = [] if lost else clock.get(attempts[key], [])
            bound[key] = _bind_by_others(window, calls.get(key, []), attempts[key], shared, later)
            if bound[key].step is None and window.latest is not None and not (lost or later):
                partly[key] = bound[key] = Binding(attempts[key], window.latest, GIVEN)
    shared = _shared_steps(partly, calls, leaders)
    for key in [key for key, binding in bound.items() if shared and binding.step is None]:
        bound[key] = _bind_by_others(windows[key], calls.get(key, []), attempts[key], shared, [])
    return bound


def _bind_by_others(
    window: Window,
    exports: Sequence[Export],
    attempt: int,
    shared: Mapping[str, int],
    later: Sequence[tuple[int, int | None]],
) -> Binding:
    step = next((shared[e.export_id] for e in exports if e.export_id in shared), None)
    if step is not None:
        return Binding(attempt, step, EXPORT)
    time = exports[0].time if exports else window.time
    place = len(later) if time is None else bisect_left(later, time, key=lambda entry: entry[0])
    step = later[place][1] if place < len(later) else None
    return Binding(attempt) if step is None else Binding(attempt, step, TIME)


def _own_commits(commits: Iterable[Commit]) -> dict[str, list[tuple[int, int, int]]]:
    """Return session → (last window, first window, step) of its commits that cover windows, in order."""
    own: dict[str, list[tuple[int, int, int]]] = {}
    for commit in sorted(commits, key=lambda c: c.number):
        if commit.first is not None and commit.last is not None:
            own.setdefault(commit.session, []).append((commit.last, commit.first, commit.step))
    for ranges in own.values():
        ranges.sort(key=lambda covered: covered[0])
    return own


def _covering(ranges: Sequence[tuple[int, int, int]], window: int) -> int | None:
    place = bisect_left(ranges, (window,))
    if place == len(ranges) or ranges[place][1] > window:
        return None
    return ranges[place][2]


def _skipped(ranges: Sequence[tuple[int, int, int]], window: int, *, torn: bool) -> bool:
    """Whether a commit of the process is lost that may have covered a window which none covers.

    A later one that begins behind the window tells so; where there is none, what is known of the process.
    """
    place = bisect_left(ranges, (window,))
    return ranges[place][1] > window if place < len(ranges) else torn


def _shared_steps(
    bound: Mapping[WindowKey, Binding], calls: Mapping[WindowKey, list[Export]], leaders: set[str]
) -> dict[str, int]:
    """Return export id → step, of windows bound so far; where ranks disagree the leader says."""
    steps: dict[str, tuple[bool, int]] = {}
    for key, binding in bound.items():
        if binding.step is None:
            continue
        said = (key[0] not in leaders, binding.step)
        for export in calls.get(key, ()):
            steps[export.export_id] = min(said, steps.get(export.export_id, said))
    return {export_id: step for export_id, (_, step) in steps.items()}


def _clock(commits: Sequence[Commit], attempts: Sequence[int]) -> dict[int, list[tuple[int, int | None]]]:
    """Return attempt → (time, step) of its commits that go forward, in order of time.

    A step that the leader committed happened when the leader committed it: what the leader collected from
    workers it collected before that, whatever the other ranks' clocks say of their own rows. A commit whose
    predecessor is lost has the step None: what was exported before it may be the lost one's.
    """
    led = {(a, c.step) for a, c in zip(attempts, commits, strict=True) if c.leader}
    clock: dict[int, list[tuple[int, int | None]]] = {}
    expected: dict[str, int] = {}
    highest: dict[tuple[int, str], int] = {}
    for attempt, commit in _in_order(commits, attempts):
        gap = commit.number > expected.get(commit.session, 0)
        expected[commit.session] = commit.number + 1
        if commit.adds or (not commit.leader and (attempt, commit.step) in led):
            continue
        floor = -1 if commit.restored is None else commit.restored + 1
        forward = commit.step >= highest.get((attempt, commit.session), floor)
        if forward:
            highest[attempt, commit.session] = commit.step
            clock.setdefault(attempt, []).append((commit.time, None if gap else commit.step))
    for entries in clock.values():
        entries.sort(key=lambda entry: entry[0])
    return clock


# -- ownership -----------------------------------------------------------------------------------------


def _ownership(
    windows: Mapping[WindowKey, Window],
    bindings: Mapping[WindowKey, Binding],
    commits: Sequence[Commit],
    attempts: Sequence[int],
    claims: Iterable[Claim],
) -> dict[int, int | None]:
    """Return attempt → the first step it owns.

    The resume point where it was given; else the step of the first commit that binds training windows above
    the restored last_commit_step. (That is saved before the commit of its step: a lower bound only.) An
    attempt that restored a state but recorded nothing at all owns from its first commit above it. Where
    commits before that one are lost, it owns from the earliest step that they can have been of.
    """
    owned: dict[int, int | None] = dict.fromkeys(attempts)
    owned.update(dict.fromkeys(binding.attempt for binding in bindings.values()))
    trained = {(bindings[key].attempt, bindings[key].step) for key, w in windows.items() if w.training}
    recording = {binding.attempt for binding in bindings.values()}
    seen = _numbers(windows)
    led = {attempt for attempt, commit in zip(attempts, commits, strict=True) if commit.leader}
    expected: dict[str, int] = {}
    lost: dict[tuple[int, str], int] = {}
    for attempt, commit in _in_order(commits, attempts):
        place = attempt, commit.session
        lost[place] = lost.get(place, 0) + max(0, commit.number - expected.get(commit.session, 0))
        expected[commit.session] = commit.number + 1
        if owned[attempt] is not None or commit.adds or (attempt in led and not commit.leader):
            continue
        trains = (attempt, commit.step) in trained or _lost(commit, seen.get(commit.session, []))
        trains = trains or (commit.restored is not None and attempt not in recording)
        if trains and (commit.restored is None or commit.step > commit.restored):
            floor = commit.step - lost[place] if commit.restored is None else commit.restored + 1
            owned[attempt] = max(0, floor) if lost[place] else commit.step
    for claim in claims:
        owned[claim.attempt] = owned.get(claim.attempt) if claim.resume_step is None else claim.resume_step
    return dict(sorted(owned.items()))


def _in_order(commits: Sequence[Commit], attempts: Sequence[int]) -> list[tuple[int, Commit]]:
    """Return (attempt, commit) session by session, the earliest first; within one, numbers say the order."""
    sessions: dict[str, list[tuple[int, Commit]]] = {}
    for attempt, commit in zip(attempts, commits, strict=True):
        sessions.setdefault(commit.session, []).append((attempt, commit))
    began = {session: min(commit.time for _, commit in own) for session, own in sessions.items()}
    for own in sessions.values():
        own.sort(key=lambda pair: pair[1].number)
    return [pair for session in sorted(began, key=lambda s: (began[s], s)) for pair in sessions[session]]


def _numbers(windows: Iterable[WindowKey]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for session, number in sorted(windows):
        numbers.setdefault(session, []).append(number)
    return numbers


def _lost(commit: Commit, numbers: Sequence[int]) -> bool:
    """Whether nothing is left of the windows a commit covers: damage must not cost an attempt its steps."""
    if commit.first is None or commit.last is None:
        return False
    place = bisect_left(numbers, commit.first)
    return place == len(numbers) or numbers[place] > commit.last
