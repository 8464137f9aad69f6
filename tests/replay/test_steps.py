"""The gate's laws, for every order of commits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replay.steps import Gate, Order, Row, newest

KEYS = st.sampled_from("abcd")
METRICS = st.dictionaries(KEYS, st.integers(0, 9).map(float), min_size=1)
COMMITS = st.lists(st.tuples(st.integers(0, 6), METRICS), max_size=25)
ORDERS = st.sampled_from(list(Order))


def through(
    gate: Gate, commits: list[tuple[int, dict[str, float]]], *, wait: list[bool] | None = None
) -> list[Row]:
    """Put commits through a gate, one a second; return what comes out."""
    out: list[Row] = []
    for number, (step, metrics) in enumerate(commits):
        out += gate.put(Row(step, metrics, float(number), {0: float(number)}), now=float(number))
        if wait and wait[number % len(wait)]:
            out += gate.tick(now=number + 2.0)
    return out + gate.close()


@given(COMMITS, st.lists(st.booleans(), min_size=1, max_size=5))
def test_strict_steps_only_rise(commits: list, wait: list[bool]) -> None:
    """A strict target is called once a step, each call with a higher step than the one before."""
    steps = [row.step for row in through(Gate(Order.STRICT), commits, wait=wait)]
    assert sorted(set(steps)) == steps


@given(COMMITS, st.lists(st.booleans(), min_size=1, max_size=5))
def test_forward_steps_never_fall_and_no_point_comes_twice(commits: list, wait: list[bool]) -> None:
    """A forward target gets rising or equal steps and no key of a step twice."""
    rows = through(Gate(Order.FORWARD), commits, wait=wait)
    assert sorted(row.step for row in rows) == [row.step for row in rows]
    points = [(row.step, key) for row in rows for key in row.metrics]
    assert len(set(points)) == len(points)


@given(COMMITS, ORDERS, st.lists(st.booleans(), min_size=1, max_size=5))
def test_nothing_vanishes_without_a_word(commits: list, order: Order, wait: list[bool]) -> None:
    """Of every step the newest value of each key is told, unless the step is among those withheld."""
    given = [(step, dict.fromkeys(metrics, float(number))) for number, (step, metrics) in enumerate(commits)]
    gate = Gate(order)
    told = {(row.step, key): v for row in through(gate, given, wait=wait) for key, v in row.metrics.items()}
    latest = {(step, key): value for step, metrics in given for key, value in metrics.items()}
    assert gate.withheld_steps == {step for (step, key), v in latest.items() if told.get((step, key)) != v}
    assert told.keys() <= latest.keys()
    assert len(gate.withheld_steps) <= gate.withheld <= len(given)


@given(COMMITS)
def test_a_target_that_takes_anything_gets_everything(commits: list) -> None:
    """Nothing is withheld from a target without an order; its last value of each key is the newest."""
    gate = Gate(Order.ANY)
    final = {(row.step, key): value for row in through(gate, commits) for key, value in row.metrics.items()}
    assert 0 == gate.withheld
    assert {(step, key): value for step, metrics in commits for key, value in metrics.items()} == final


@given(COMMITS, ORDERS)
def test_sorted_commits_lose_nothing(commits: list, order: Order) -> None:
    """In the order of their steps, as replay has them, every commit is told: one row a step (report a2)."""
    commits.sort(key=lambda commit: commit[0])
    gate = Gate(order)
    rows = through(gate, commits)
    assert 0 == gate.withheld
    assert sorted({step for step, _ in commits}) == [row.step for row in rows]


@given(COMMITS, st.integers(0, 6), st.sampled_from([Order.STRICT, Order.FORWARD]))
def test_nothing_is_told_again_to_a_target_that_holds_steps(commits: list, last: int, order: Order) -> None:
    """A target that holds steps up to some step gets only later ones, whatever comes (report a5)."""
    gate = Gate(order, last_step=last)
    assert all(row.step > last for row in through(gate, commits))
    assert gate.withheld >= sum(step <= last for step, _ in commits)


@given(COMMITS, ORDERS, st.sets(st.integers(0, 24)))
def test_what_is_barred_is_withheld_and_nothing_else_is_for_it(
    commits: list, order: Order, barred: set[int]
) -> None:
    """As if it had not come: the others' rows are the same, and it is counted and named."""
    gate, other = (Gate(order, bars=bars) for bars in (lambda row: row.time in barred, None))
    told = [commit for number, commit in enumerate(commits) if number not in barred]
    before = [(row.step, row.metrics) for row in through(other, told)]
    after: list[Row] = []
    for number, (step, metrics) in enumerate(commits):
        row = Row(step, metrics, float(number), {0: float(number)})
        assert number not in barred or not gate.takes(row)
        after += gate.put(row) if number not in barred else []
    assert before == [(row.step, row.metrics) for row in after + gate.close()]
    gate.put(Row(7, {"a": 1.0}, 0.0))
    assert (0 in barred) == (7 in gate.withheld_steps)


@given(COMMITS)
def test_a_row_has_the_time_of_its_first_commit_and_names_its_newest(commits: list) -> None:
    """Merging keeps the first time as the row's and the newest per attempt as what is acknowledged."""
    commits.sort(key=lambda commit: commit[0])
    for row in through(Gate(Order.STRICT), commits):
        times = [float(number) for number, (step, _) in enumerate(commits) if step == row.step]
        assert (times[0], {0: times[-1]}) == (row.time, row.commits)


def test_one_far_too_high_step_withholds_what_follows() -> None:
    """Steps 0, 1, 2, 1 000 000, 3, 4 live: the strict target gets four, two are counted (report a2)."""
    gate = Gate(Order.STRICT)
    rows = through(gate, [(step, {"v": float(step)}) for step in (0, 1, 2, 1_000_000, 3, 4)])
    assert [0, 1, 2, 1_000_000] == [row.step for row in rows]
    assert 2 == gate.withheld


def test_several_commits_of_a_step_are_one_row() -> None:
    """commit(0, a), commit(0, b), commit(1, a): two calls, the first with both (report a9)."""
    rows = through(Gate(Order.STRICT), [(0, {"a": 1.0}), (0, {"b": 2.0}), (1, {"a": 3.0})])
    assert [(0, {"a": 1.0, "b": 2.0}), (1, {"a": 3.0})] == [(row.step, row.metrics) for row in rows]


def test_a_step_closes_when_nothing_more_came_for_a_while() -> None:
    """Two seconds after its latest row a step closes; before that it does not."""
    gate = Gate(Order.STRICT, wait=2.0)
    assert None is gate.due()
    assert [] == gate.put(Row(0, {"a": 1.0}, 0.0), now=10.0)
    assert [] == gate.put(Row(0, {"b": 1.0}, 0.0), now=11.0)
    assert 13.0 == gate.due()
    assert [] == gate.tick(now=12.9)
    assert [{"a": 1.0, "b": 1.0}] == [row.metrics for row in gate.tick(now=13.0)]
    assert [] == gate.tick(now=99.0)


def test_what_comes_after_its_step_closed_goes_where_it_can() -> None:
    """New keys of the newest step still reach a forward target, not a strict one."""
    for order, expected in ((Order.FORWARD, [{"b": 2.0}]), (Order.STRICT, [])):
        gate = Gate(order)
        gate.put(Row(0, {"a": 1.0}, 0.0))
        gate.close()
        gate.put(Row(0, {"a": 9.0, "b": 2.0}, 0.0))
        assert expected == [row.metrics for row in gate.close()]
        assert 1 == gate.withheld


def test_a_restored_run_withholds_what_lies_at_or_below_its_checkpoint() -> None:
    """After a restore at step 9 a late row of step 9 is withheld, step 10 is not; an open step stays open."""
    gate = Gate(Order.FORWARD)
    gate.raise_floor(9)
    assert [10] == [row.step for row in through(gate, [(9, {"a": 1.0}), (10, {"a": 1.0})])]
    assert 1 == gate.withheld
    gate.put(Row(11, {"a": 1.0}, 0.0))
    gate.raise_floor(30)
    assert [11] == [row.step for row in gate.close()]


def test_an_empty_commit_closes_but_opens_nothing() -> None:
    """A commit without metrics tells nothing, but the step before it is over."""
    gate = Gate(Order.STRICT)
    gate.put(Row(0, {"a": 1.0}, 0.0))
    assert [0] == [row.step for row in gate.put(Row(1, {}, 0.0))]
    assert [] == gate.close()
    assert 0 == gate.withheld


def test_the_newest_commit_wins_per_attempt() -> None:
    """Commits of several attempts are remembered apart."""
    assert {0: 3.0, 1: 2.0} == newest({0: 1.0, 1: 2.0}, {0: 3.0}, {})
