from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aggregator.offline.placing import outdated
from aggregator.offline.timeline import Binding, Claim, Commit, Export, Window, resolve


def window(session="a", number=0, time=0, **fields):
    return Window(session, number, time, **fields)


def export(session="a", window=0, time=0, export_id=None, **fields):
    return Export(session, window, time, export_id or f"{session}:{window}", **fields)


def commit(session="a", number=0, time=0, step=0, **fields):
    return Commit(session, number, time, step, **fields)


def bound(timeline, session="a", number=0):
    binding = timeline.windows[session, number]
    return binding.step, binding.bound_by


def superseded(timeline, attempt, steps):
    """Return which of some steps count no more as an attempt tells them."""
    steps = np.array(steps, np.int64)
    return steps[outdated(timeline, np.full(len(steps), attempt), steps)].tolist()


# -- the five rules --------------------------------------------------------------------------------------


def test_a_given_step_wins():
    """Rule 1: a step given by the caller beats the process's own commit."""
    timeline = resolve([window(given=7)], [export()], [commit(step=3, first=0, last=0)])
    assert (7, "given") == bound(timeline)


def test_the_step_of_the_export_call_is_given_too():
    """Rule 1: `export(step=…)` speaks for the window, also over records with a step of their own."""
    timeline = resolve([window(given=7)], [export(step=8)], [])
    assert (8, "given") == bound(timeline)


def test_a_step_of_a_part_of_a_window_is_the_last_to_speak():
    """It binds a window, and those of the same export, where nothing commits; else the commit does."""
    windows = [window(latest=7), window("b", 0)]
    exports = [export("a", 0, 0, "g:1", members=(0, 1)), export("b", 0, 0, "g:1", members=(0, 1))]
    timeline = resolve(windows, exports, [])
    assert [(7, "given"), (7, "export")] == [bound(timeline, session) for session in "ab"]
    assert (3, "commit") == bound(resolve(windows, exports, [commit(step=3, first=0, last=0)]))
    assert (3, "time") == bound(resolve(windows, exports, [commit("c", time=1, step=3)]))
    assert (None, None) == bound(resolve(windows, exports, [], torn={"a"}))


def test_the_own_commit_binds_all_windows_since_the_one_before():
    """Rule 2: one commit follows several exports, and owns every window drained since the last commit."""
    windows = [window(number=n) for n in range(5)]
    commits = [commit(number=0, step=10, first=0, last=2), commit(number=1, step=20, first=3, last=4)]
    timeline = resolve(windows, [], commits)
    assert [(10, "commit")] * 3 + [(20, "commit")] * 2 == [bound(timeline, number=n) for n in range(5)]


def test_a_commit_binds_no_window_of_another_process():
    """Rule 2 is about the process's own windows: equal numbers elsewhere mean nothing."""
    timeline = resolve([window("b", 0, time=99)], [], [commit("a", step=3, time=1, first=0, last=0)])
    assert (None, None) == bound(timeline, "b")


def test_windows_before_the_first_range_stay_out_of_it():
    """Rule 2: a range begins where it says, whatever lies before it."""
    timeline = resolve([window(number=1, time=50)], [], [commit(step=3, time=1, first=2, last=4)])
    assert (None, None) == bound(timeline, number=1)


def test_a_shared_export_id_lends_the_step():
    """Rule 3: a rank that never commits takes the step from the rank it exported with."""
    exports = [export("a", 4, 10, "g:1", members=(0, 1)), export("b", 9, 11, "g:1", members=(0, 1))]
    timeline = resolve(
        [window("a", 4), window("b", 9)], exports, [commit("a", step=3, time=5, first=0, last=4)]
    )
    assert (3, "export") == bound(timeline, "b", 9)


def test_a_late_evaluation_binds_no_window_by_time():
    """Rule 4: a commit that goes back in step leaves the workers' windows to the commit that goes on."""
    commits = [
        commit("a", number, time, step, leader=True)
        for number, (time, step) in enumerate([(10, 0), (20, 1), (30, 2), (32, 0), (40, 3)])
    ]
    timeline = resolve([window("w", 0, 31), window("w", 1, 5)], [], commits)
    assert [(3, "time"), (0, "time")] == [bound(timeline, "w", number) for number in (0, 1)]


def test_a_late_evaluation_below_the_restored_step_binds_no_window_by_time():
    """Rule 4: nor does it where it is the first commit of an attempt that restored its state."""
    commits = [commit("a", 0, 10, 2, leader=True, restored=5), commit("a", 1, 20, 6, leader=True, restored=5)]
    assert (6, "time") == bound(resolve([window("w", 0, 1)], [], commits), "w")


def test_the_windows_of_a_lost_commit_are_unbound():
    """A commit that is known to be lost leaves its windows unbound: they never move to another step."""
    commits = [
        commit("a", 0, 10, 0, leader=True, first=0, last=0),
        commit("a", 2, 30, 2, first=2, last=2, leader=True),
    ]
    windows = [window("a", number, 1 + 10 * number) for number in range(3)] + [window("w", 0, 15)]
    timeline = resolve(windows, [], commits)
    assert [(0, "commit"), (None, None), (2, "commit")] == [bound(timeline, "a", n) for n in range(3)]
    assert (None, None) == bound(timeline, "w")


def test_an_attempt_that_only_commits_owns_what_it_restored_to():
    """Without any recording, a restored attempt owns from its first commit above the restored step."""
    first = [commit("a", n, n, n, attempt=0, leader=True) for n in range(10)]
    second = [commit("b", n, 100 + n, 5 + n, attempt=1, leader=True, restored=5) for n in range(3)]
    assert {0: None, 1: 6} == resolve([], [], first + second).owned_from
    unrestored = [made._replace(restored=None) for made in second]
    assert {0: None, 1: None} == resolve([], [], first + unrestored).owned_from


def test_a_second_group_lends_the_step_as_well():
    """Rule 3: ranks that share only the call's second group are bound through it."""
    exports = [
        export("a", 0, 1, "dp0:1", members=(0,)),
        export("a", 0, 1, "all:1", members=(0, 1)),
        export("b", 0, 1, "dp1:1", members=(1,)),
        export("b", 0, 1, "all:1", members=(0, 1)),
    ]
    timeline = resolve([window("a"), window("b")], exports, [commit("a", step=6, first=0, last=0)])
    assert (6, "export") == bound(timeline, "b")


def test_exports_lend_only_what_is_given_or_committed():
    """Rule 3 never chains: a window bound by time does not lend its step to others."""
    exports = [export("a", 0, 10, "g:1", members=(0, 1)), export("b", 0, 30, "g:1", members=(0, 1))]
    commits = [commit("c", 0, 20, step=1, leader=True), commit("c", 1, 40, step=2, leader=True)]
    timeline = resolve([window("a"), window("b")], exports, commits)
    assert (1, "time") == bound(timeline, "a")
    assert (2, "time") == bound(timeline, "b")


def test_the_leader_says_where_ranks_disagree():
    """Rule 3: when members of an export committed it as different steps, the leader's step is taken."""
    exports = [export(s, 0, 1, "g:1", members=(0, 1, 2)) for s in "abc"]
    commits = [
        commit("a", step=4, first=0, last=0),
        commit("b", step=5, first=0, last=0, leader=True),
    ]
    timeline = resolve([window(s) for s in "abc"], exports, commits)
    assert (5, "export") == bound(timeline, "c")


def test_the_first_commit_after_the_export_binds_a_worker():
    """Rule 4: a worker without commits and without a group takes the next commit of its attempt."""
    commits = [commit("a", n - 1, 10 * n, step=100 + n, leader=True) for n in range(1, 4)]
    exports = [export("w", 0, 5), export("w", 1, 10), export("w", 2, 11), export("w", 3, 31)]
    timeline = resolve([window("w", n) for n in range(4)], exports, commits)
    expected = [(101, "time"), (101, "time"), (102, "time"), (None, None)]
    assert expected == [bound(timeline, "w", n) for n in range(4)]


def test_time_binds_only_within_the_attempt():
    """Rule 4: a commit of another attempt does not bind, however near it is."""
    commits = [
        commit("a", 0, 20, step=1, attempt=1, leader=True),
        commit("b", 0, 10, step=9, attempt=0, leader=True),
    ]
    timeline = resolve([window("w", attempt=1)], [export("w", 0, 5)], commits)
    assert Binding(1, 1, "time") == timeline.windows["w", 0]


def test_another_rank_s_row_of_a_led_step_is_no_commit_of_its_own():
    """Rule 4: a step happened when its leader committed it; other ranks' clocks do not make it later."""
    commits = [
        commit("a", 0, 10, step=1, leader=True),
        commit("b", 0, 15, step=1),
        commit("a", 1, 20, step=2, leader=True),
    ]
    timeline = resolve([window("w")], [export("w", 0, 12)], commits)
    assert (2, "time") == bound(timeline, "w")


def test_without_a_leader_s_rows_the_others_clocks_serve():
    """Rule 4: a lost leader costs only its own files."""
    timeline = resolve([window("w")], [export("w", 0, 5)], [commit("b", 0, 10, step=4)])
    assert (4, "time") == bound(timeline, "w")


def test_a_window_that_nobody_committed_is_unbound():
    """Rule 5: it stays visible, with its attempt and without a step."""
    timeline = resolve([window(attempt=2, time=9)], [], [commit("b", time=1, attempt=2)])
    assert Binding(2, None, None) == timeline.windows["a", 0]


def test_a_late_evaluation_goes_where_it_was_measured():
    """Evaluations that arrive out of order keep the step they measured (report a17)."""
    windows = [window(number=n, training=n == 0) for n in range(3)]
    commits = [
        commit(number=0, time=1, step=30, first=0, last=0),
        commit(number=1, time=2, step=20, first=1, last=1),
        commit(number=2, time=3, step=10, first=2, last=2),
    ]
    timeline = resolve(windows, [], commits)
    assert [30, 20, 10] == [timeline.windows["a", n].step for n in range(3)]


# -- attempts ----------------------------------------------------------------------------------------------


def test_the_export_knows_the_attempt_better_than_the_drain():
    """What was learnt in the collective overrides what the producer believed before it."""
    timeline = resolve([window(attempt=0)], [export(attempt=1)], [])
    assert 1 == timeline.windows["a", 0].attempt


def test_without_any_claim_everything_is_attempt_0():
    """A run whose producers know of no attempt has one."""
    timeline = resolve([window()], [export()], [commit()])
    assert 0 == timeline.windows["a", 0].attempt
    assert [0] == timeline.commit_attempts
    assert [0] == list(timeline.owned_from)


def test_a_process_that_did_not_know_belongs_to_the_first_attempt_it_learnt():
    """A window drained before the claim was seen is not thrown back to attempt 0."""
    windows = [window(number=0), window(number=1, attempt=3), window(number=2, attempt=4)]
    assert 3 == resolve(windows, [], []).windows["a", 0].attempt


def test_a_leader_knows_its_attempt_by_its_claim():
    """The claim names the session, also for rows written before it."""
    assert 2 == resolve([window()], [], [], [Claim(2, "a")]).windows["a", 0].attempt


def test_clocks_never_decide_the_attempt():
    """A producer of attempt 0 with a clock far ahead stays in attempt 0."""
    windows = [window("a", time=10**15, attempt=0), window("b", time=0, attempt=1)]
    timeline = resolve(windows, [], [])
    assert [0, 1] == [timeline.windows[s, 0].attempt for s in "ab"]


# -- ownership -----------------------------------------------------------------------------------------------


def restart(resumed_at=10, stopped_at=15, ends_at=20, restored=8, **second):
    """Return windows and commits of a run that was killed after a step and restarted."""
    windows, commits = [], []
    for attempt, (session, steps) in enumerate(
        {"a": range(stopped_at + 1), "b": range(resumed_at, ends_at + 1)}.items()
    ):
        for n, step in enumerate(steps):
            windows.append(window(session, n, time=1000 * attempt + step, attempt=attempt))
            held = {"restored": restored, **second} if attempt else {}
            commits.append(
                commit(
                    session,
                    n,
                    1000 * attempt + step,
                    step,
                    attempt=attempt,
                    leader=True,
                    first=n,
                    last=n,
                    **held,
                )
            )
    return windows, commits


def test_an_attempt_owns_from_its_first_training_commit_above_the_restored_step():
    """After a crash the later attempt wins from where it resumed (report a1)."""
    windows, commits = restart()
    timeline = resolve(windows, [], commits)
    assert {0: 0, 1: 10} == timeline.owned_from
    assert list(range(10, 21)) == superseded(timeline, 0, range(21))
    assert [] == superseded(timeline, 1, range(30))


def test_a_given_resume_step_is_the_point_whatever_was_committed():
    """`resume_step` in the attempt's file overrides what the commits show."""
    windows, commits = restart()
    timeline = resolve(windows, [], commits, [Claim(1, "b", resume_step=6)])
    assert 6 == timeline.owned_from[1]
    assert [6] == superseded(timeline, 0, [5, 6])


def test_the_restored_step_is_a_lower_bound_only():
    """AReaL saves the logger's state before the commit of its step: ownership begins at the commit."""
    windows, commits = restart(resumed_at=10, restored=8)
    assert 10 == resolve(windows, [], commits).owned_from[1]


def test_commits_at_or_below_the_restored_step_own_nothing():
    """A late evaluation below the resume point is an addition: it supersedes no step."""
    windows = [window("a", n, attempt=0) for n in range(5)] + [window("b", 0, attempt=1)]
    commits = [commit("a", n, n, n, attempt=0, leader=True, first=n, last=n) for n in range(5)]
    commits.append(commit("b", 0, 50, 2, attempt=1, leader=True, restored=4, first=0, last=0))
    timeline = resolve(windows, [], commits)
    assert None is timeline.owned_from[1]
    assert [] == superseded(timeline, 0, range(5))


def test_a_commit_of_evaluation_alone_owns_nothing():
    """An attempt that only reports an evaluation of a later step does not take the run over."""
    windows = [window("b", 0, attempt=1, training=False)]
    commits = [commit("b", 0, 50, 9, attempt=1, leader=True, restored=4, first=0, last=0)]
    assert None is resolve(windows, [], commits).owned_from[1]


def test_a_commit_without_windows_owns_nothing():
    """Metrics that were handed to commit without any recording are additions."""
    timeline = resolve([], [], [commit(step=5, attempt=1, leader=True)])
    assert {1: None} == timeline.owned_from


def test_windows_bound_through_others_train_too():
    """A controller records nothing itself: the ranks' windows bound to its commit make the step its own."""
    windows = [window("rank", 0, attempt=1)]
    commits = [commit("controller", 0, 50, 12, attempt=1, leader=True, restored=3)]
    timeline = resolve(windows, [export("rank", 0, 40, attempt=1)], commits)
    assert 12 == timeline.owned_from[1]


def test_damaged_records_do_not_cost_an_attempt_its_steps():
    """A commit over windows of which nothing can be read any more still owns (report b10)."""
    commits = [commit("b", 0, 50, 12, attempt=1, leader=True, restored=3, first=0, last=4)]
    assert 12 == resolve([], [], commits).owned_from[1]


def test_a_third_attempt_may_go_back_further():
    """The highest attempt that reached a step owns it, though an earlier one began later."""
    windows, commits = restart()
    windows.append(window("c", 0, time=9000, attempt=2))
    commits.append(commit("c", 0, 9000, 4, attempt=2, leader=True, restored=3, first=0, last=0))
    timeline = resolve(windows, [], commits)
    assert [[4, 5], [4, 12]] == [superseded(timeline, 0, range(6)), superseded(timeline, 1, [3, 4, 12])]


def test_steps_may_start_anywhere():
    """Nothing assumes step 0 or steps without gaps (report f3)."""
    steps = [61010, 61020, 100090]
    windows = [window(number=n) for n in range(3)]
    commits = [commit(number=n, step=s, first=n, last=n, leader=True) for n, s in enumerate(steps)]
    timeline = resolve(windows, [], commits)
    assert steps == [timeline.windows["a", n].step for n in range(3)]
    assert 61010 == timeline.owned_from[0]


# -- laws --------------------------------------------------------------------------------------------------


@st.composite
def runs(draw):
    """Make a run of up to three attempts with ranks that commit or not, and workers."""
    windows, exports, commits, claims = [], [], [], []
    clock, resume = 0, 0
    for attempt in range(draw(st.integers(1, 3))):
        resume = draw(st.integers(0, resume + 4))
        claims.append(Claim(attempt, f"{attempt}r0", draw(st.sampled_from([None, resume]))))
        restored = None if attempt == 0 else draw(st.integers(-1, resume - 1))
        committing = draw(st.booleans())
        for n, step in enumerate(range(resume, resume + draw(st.integers(0, 5)))):
            clock += 10
            for rank in range(2):
                session = f"{attempt}r{rank}"
                windows.append(Window(session, n, clock, attempt=attempt))
                exports.append(Export(session, n, clock, f"{attempt}:{n}", (0, 1), attempt=attempt))
                if rank == 0 or committing:
                    commits.append(
                        Commit(session, n, clock + 5 - rank, step, attempt, rank == 0, restored, n, n)
                    )
            worker = f"{attempt}w"
            windows.append(Window(worker, n, clock + 1, attempt=attempt))
            exports.append(Export(worker, n, clock + 1, f"{worker}:{n}", attempt=attempt))
    return windows, exports, commits, claims


@given(runs())
def test_every_window_of_a_committed_step_is_bound_to_it(run):
    """Ranks by commit or export, workers by time: all windows of a step agree with the leader."""
    windows, exports, commits, claims = run
    timeline = resolve(windows, exports, commits, claims)
    steps = {(c.attempt, c.number): c.step for c in commits if c.leader}
    for w in windows:
        assert steps[w.attempt, w.number] == timeline.windows[w.session, w.number].step


@given(runs(), st.randoms(use_true_random=False))
def test_the_order_of_reading_does_not_matter(run, chance: random.Random):
    """Files are read in any order: the timeline is the same."""
    expected = resolve(*run)
    mixed = [list(rows) for rows in run]
    for rows in mixed:
        chance.shuffle(rows)
    found = resolve(*mixed)
    assert dict(expected.windows) == dict(found.windows)
    assert dict(expected.owned_from) == dict(found.owned_from)


@given(runs())
def test_each_step_has_one_owner_and_the_newest_is_never_superseded(run):
    """Ownership is a function of the step, and the last attempt is in front of nobody."""
    timeline = resolve(*run)
    lost = {attempt: superseded(timeline, attempt, range(20)) for attempt in timeline.owned_from}
    assert [] == lost[max(lost)]
    for step in range(20):
        owners = [a for a, first in timeline.owned_from.items() if first is not None and first <= step]
        assert [a for a in lost if a < max(owners, default=0)] == [a for a in lost if step in lost[a]]


@given(runs())
def test_a_given_step_is_kept_whatever_else_is_known(run):
    """Rule 1 holds in every run."""
    windows, exports, commits, claims = run
    windows = [w._replace(given=1000 + w.number) for w in windows]
    timeline = resolve(windows, exports, commits, claims)
    for w in windows:
        assert Binding(w.attempt, w.given, "given") == timeline.windows[w.session, w.number]
