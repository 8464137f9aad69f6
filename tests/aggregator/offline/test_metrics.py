"""What was committed: attempts, supersession, list commits, long and wide tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aggregator import open_run
from eventlog import errors
from tests.runs import RunBuilder, at


def steps_and_values(session, key, **options):
    table = session.metrics([key], **options)
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


def life(run, attempt, steps, value, *, restored=None, windows=True, role="actor"):
    """One attempt: a leader that records and commits `v` at each step."""
    leader = run.producer(role, 0, attempt=attempt, started=1000 * attempt)
    for n, step in enumerate(steps):
        time = 1000 * attempt + n
        if windows:
            leader.tracker().scalar({"v": value(step)})
            stats = run.export(leader, time=time)
        else:
            stats = {"v": value(step)}
        leader.commit(step, stats, time=time + 0.5, leader=True, restored=restored)
    return leader


@pytest.mark.parametrize("windows", [True, False])
def test_after_a_resume_every_step_exists_once(run, windows):
    """The later attempt's values win from where it resumed, and what it replaced is counted (report a1)."""
    life(run, 0, range(16), float, windows=windows)
    life(run, 1, range(10, 21), lambda step: 100.0 + step, restored=8, windows=windows)
    session = run.open()
    table = session.metrics(["v"])
    assert list(range(21)) == table["step"].to_pylist()
    found = steps_and_values(session, "v")
    assert (9, 110, 115) == (found[9], found[10], found[15])
    info = session.info()
    assert 6 == info["superseded_steps"]
    assert {"first": 0, "last": 20, "count": 21} == info["steps"]
    assert [(0, 10, 6), (1, 11, 0)] == [
        (a["attempt"], a["steps"], a["superseded_steps"]) for a in info["attempts"]
    ]


def test_what_was_superseded_is_kept(run):
    """All attempts' rows are there when asked for, marked where they count no more (report a1)."""
    life(run, 0, range(4), float)
    life(run, 1, range(2, 5), lambda step: 100.0 + step, restored=1)
    with run.open(attempts="all") as session:
        rows = session.metrics(["v"]).to_pylist()
        assert [
            (0, 0, False),
            (1, 0, False),
            (2, 0, True),
            (2, 1, False),
            (3, 0, True),
            (3, 1, False),
            (4, 1, False),
        ] == [(row["step"], row["attempt"], row["superseded"]) for row in rows]
        sql = "select count(*) filter (superseded) as gone, count(*) as all from records where key = 'v'"
        assert [{"gone": 2, "all": 7}] == session.sql(sql).to_pylist()
    session = open_run(run.path)
    assert [{"n": 5}] == session.sql("select count(*) as n from records").to_pylist()


def test_an_attempt_that_died_early_takes_the_later_steps_back(run):
    """Steps above the resume point are no longer the older attempt's, also those not done again."""
    life(run, 0, range(16), float)
    life(run, 1, range(10, 13), lambda step: 100.0 + step, restored=8)
    assert list(range(13)) == run.open().metrics(["v"])["step"].to_pylist()


def test_summaries_span_attempts(run):
    """Least, greatest and last are of the whole run (report a13)."""
    life(run, 0, range(10), float)
    life(run, 1, range(10, 20), float, restored=9)
    sql = "select min(value) least, max(value) most, arg_max(value, step) last from metrics where key = 'v'"
    assert [{"least": 0, "most": 19, "last": 19}] == run.open().sql(sql).to_pylist()


def test_resume_needs_only_the_directory(run):
    """Two attempts without any network make one continuous run (report b12)."""
    life(run, 0, range(3), float)
    life(run, 1, range(3, 6), float, restored=2)
    assert {step: float(step) for step in range(6)} == steps_and_values(run.open(), "v")


def test_a_step_far_ahead_hides_nothing(run):
    """All rows are kept and come out in the order of steps (report a2)."""
    life(run, 0, [0, 1, 2, 1_000_000, 3, 4], float)
    assert [0, 1, 2, 3, 4, 1_000_000] == run.open().metrics(["v"])["step"].to_pylist()


def test_steps_need_not_begin_at_0(run):
    """No assumption about the first step or about gaps (report f3)."""
    life(run, 0, [61010, 61020, 100090], float)
    assert [61010, 61020, 100090] == run.open().metrics()["step"].unique().to_pylist()


def test_late_evaluations_keep_their_step_and_replace_only_their_own_keys(run):
    """An evaluation row carries the step it measured, whatever the order of arrival (report a17)."""
    life(run, 0, range(31), float)
    late = run.producer("actor", 0, attempt=1, started=1000)
    for time, step in ((1, 20), (2, 10)):
        late.tracker("eval-rollout").scalar({"reward": float(step)})
        late.commit(step, run.export(late, time=1000 + time), time=1000.5 + time, leader=True, restored=30)
    session = run.open()
    assert {10: 10.0, 20: 20.0} == steps_and_values(session, "eval-rollout/reward")
    assert {step: float(step) for step in range(31)} == steps_and_values(session, "v")
    assert 0 == session.info()["superseded_steps"]


def test_an_addition_that_repeats_a_key_replaces_it_alone(run):
    """A later attempt's evaluation of an old step wins for its keys; the step's other keys stay."""
    first = run.producer("actor", 0, attempt=0)
    first.commit(5, {"eval/a": 1.0, "v": 2.0}, time=1, leader=True)
    second = run.producer("actor", 0, attempt=1, started=100)
    second.commit(5, {"eval/a": 7.0}, time=101, leader=True, restored=9)
    session = run.open()
    assert {5: 7.0} == steps_and_values(session, "eval/a")
    assert {5: 2.0} == steps_and_values(session, "v")
    assert (0, 1) == (session.info()["superseded_steps"], session.info()["superseded_rows"])


def test_two_commits_of_one_step_are_one_row_per_key(run):
    """The later commit's value wins key by key; what only the first one had stays."""
    leader = run.producer()
    leader.commit(3, {"a": 1.0, "b": 2.0}, time=2, leader=True)
    leader.commit(3, {"b": 5.0, "c": 6.0}, time=1, leader=True)  # a clock that was set back decides nothing
    table = run.open().metrics()
    assert {"a": 1.0, "b": 5.0, "c": 6.0} == dict(
        zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
    )


def test_a_list_commit_keeps_its_parts(run):
    """The dicts of a list are parts of one step; a later commit replaces only what it repeats."""
    leader = run.producer()
    leader.commit(3, [{"a": 1.0}, {"a": 2.0, "b": 3.0}], time=1, leader=True)
    leader.commit(3, [{"a": 9.0}], time=2, leader=True)
    session = run.open()
    rows = session.metrics().to_pylist()
    assert [("a", 0, 9.0), ("a", 1, 2.0), ("b", 1, 3.0)] == [
        (r["key"], r["sub_index"], r["value"]) for r in rows
    ]
    wide = session.metrics(wide=True).drop_columns(["time"]).to_pylist()
    assert [
        {"step": 3, "sub_index": 0, "a": 9.0, "b": None},
        {"step": 3, "sub_index": 1, "a": 2.0, "b": 3.0},
    ] == wide


def test_split_brain_rows_are_ordered_by_the_start_of_their_leaders(run):
    """Of two leaders of one attempt, the one that started later wins, whatever its commit numbers."""
    early, late = (
        run.producer("actor", 0, attempt=0, started=0),
        run.producer("actor", 0, attempt=0, started=50),
    )
    for number in range(3):
        early.commit(7, {"a": float(number)}, time=10 + number, leader=True)
    late.commit(7, {"a": 100.0}, time=60, leader=True)
    assert {7: 100.0} == steps_and_values(run.open(), "a")


def test_null_is_not_nan(run):
    """What was not logged is null, what was logged as NaN is NaN, long, wide and in SQL (report f7)."""
    leader = run.producer()
    leader.commit(1, {"k": math.nan, "other": 1.0}, time=1, leader=True)
    leader.commit(2, {"other": math.inf}, time=2, leader=True)
    session = run.open()
    column = session.metrics(wide=True)["k"]
    assert [True, False] == column.is_valid().to_pylist()
    assert math.isnan(column[0].as_py())
    assert [{"n": 1}] == session.sql(
        "select count(*) as n from metrics where key = 'k' and isnan(value)"
    ).to_pylist()
    assert math.inf == steps_and_values(session, "other")[2]


def test_integers_are_exact(run):
    """Counts beyond 2**53 survive, in their own column and in the wide table."""
    leader = run.producer()
    leader.commit(1, {"n": 2**53 + 1, "x": 0.5}, time=1, leader=True)
    session = run.open()
    assert [2**53 + 1] == session.metrics(["n"])["value_int"].to_pylist()
    assert [2**53 + 1] == session.metrics(wide=True)["n"].to_pylist()
    assert [None] == session.metrics(["x"])["value_int"].to_pylist()


def test_times_are_utc_timestamps(run):
    """A metric's time is the commit's, with its zone."""
    run.producer().commit(1, {"a": 1.0}, time=12.5, leader=True)
    table = run.open().metrics()
    assert "timestamp[us, tz=UTC]" == str(table.schema.field("time").type)
    assert [at(12.5)] == table["time"].cast("int64").to_pylist()


def test_wide_has_a_row_per_step_and_all_of_them(run):
    """Keys of different steps are joined from both sides (report f11)."""
    leader = run.producer()
    for step in range(6):
        leader.commit(step, {"a": 1.0} if step < 4 else {"b": 2.0}, time=step, leader=True)
    wide = run.open().metrics(wide=True)
    assert list(range(6)) == wide["step"].to_pylist()
    assert (2, 4) == (wide["a"].null_count, wide["b"].null_count)


def test_wide_of_all_attempts_tells_them_apart(run):
    """A superseded step has a row of its own, with its attempt."""
    life(run, 0, range(3), float)
    life(run, 1, range(2, 4), lambda step: 10.0 * step, restored=1)
    wide = run.open(attempts="all").metrics(["v"], wide=True)
    found = list(zip(*(wide[name].to_pylist() for name in ("step", "attempt", "v")), strict=True))
    assert [(0, 0, 0.0), (1, 0, 1.0), (2, 0, 2.0), (2, 1, 20.0), (3, 1, 30.0)] == found


@pytest.mark.parametrize("attempts", ["latest", "all"])
def test_keys_called_as_columns_of_the_row_have_wide_columns_of_their_own(run, tmp_path, attempts):
    """A tilde sets them apart, another one those that had one: no two columns meet."""
    keys = ["run", "step", "time", "sub_index", "attempt", "~step", "~~run", "~other", "other"]
    for builder in (run, other := RunBuilder(tmp_path / "other")):
        leader = builder.producer()
        for step in (3, 4):
            values = {key: 10.0 * step + n for n, key in enumerate(keys)}
            leader.commit(step, values, time=step, leader=True)
    other.close()
    named = {key: f"~{key}" for key in keys[:7]} | {"~other": "~other", "other": "other"}
    for session in (run.open(attempts=attempts), run.open(other.path, attempts=attempts)):
        rows = session.metrics(wide=True)
        assert len(rows.column_names) == len(set(rows.column_names))
        assert {3, 4} == set(rows["step"].to_pylist())
        assert {at(3), at(4)} == set(rows["time"].cast("int64").to_pylist())
        for row in rows.to_pylist():
            expected = {named[key]: 10.0 * row["step"] + n for n, key in enumerate(keys)}
            assert expected == {name: row[name] for name in expected}
        assert [30.0, 40.0] == session.metrics("run", wide=True)["~run"].to_pylist()[:2]


def test_keys_and_steps_select(run):
    """Keys may be names or globs; since and until are inclusive."""
    leader = run.producer()
    for step in range(5):
        leader.commit(step, {"x/a": 1.0, "x/b": 2.0, "y": 3.0, "[odd] name*": 4.0}, time=step, leader=True)
    session = run.open()
    assert {"x/a", "x/b"} == set(session.metrics("x/*")["key"].to_pylist())
    assert {"[odd] name*"} == set(session.metrics(["[odd] name*"])["key"].to_pylist())
    assert {"[odd] name*"} == set(session.metrics("[odd]*")["key"].to_pylist())
    assert [1, 2, 3] == session.metrics("y", since=1, until=3)["step"].to_pylist()
    assert 0 == session.metrics("y", since=9).num_rows


@pytest.mark.parametrize("source", ["committed", "recomputed"])
def test_an_unknown_key_is_told_what_there_is(run, source):
    """The error names keys near to it; a recorded key leads to its exported names."""
    leader = run.producer()
    leader.tracker().denominator({"n": np.ones(2, bool)})
    leader.tracker().stat("n", {"loss": np.ones(2)})
    leader.commit(0, run.export(leader), time=1, leader=True)
    session = run.open()
    with pytest.raises(
        errors.QueryError, match=f"expected a {source} metric, got 'loss'; near: 'loss/avg', 'loss/max'"
    ):
        session.metrics(["loss"], source=source)
    with pytest.raises(errors.QueryError, match="got 'los/avg'; near: 'loss/avg'"):
        session.metrics("los/avg", source=source)


def test_wrong_choices_are_refused(run):
    """Sources and attempts that are none are named with the valid ones."""
    session = run.open()
    with pytest.raises(errors.QueryError, match="expected source to be committed or recomputed, got 'live'"):
        session.metrics(source="live")
    with pytest.raises(errors.QueryError, match="expected attempts to be latest or all, got 'newest'"):
        open_run(run.path, attempts="newest")


def test_an_empty_run_has_empty_tables(run):
    """A run in which nothing happened answers with no rows, and with all columns."""
    session = run.open()
    columns = ["step", "key", "value", "time", "attempt", "sub_index", "value_int"]
    assert columns == session.metrics().column_names
    assert ["step", "sub_index", "time"] == session.metrics(wide=True).column_names
    assert 0 == session.metrics(source="recomputed").num_rows
    assert 0 == session.keys().num_rows
    assert {"first": None, "last": None, "count": 0} == session.info()["steps"]


def test_several_runs_have_a_run_column(run, tmp_path):
    """Runs are told apart by the shortest ends of their paths; all steps of both are there (report f11)."""
    other = tmp_path / "deeper" / "run"
    for path, n in ((run, 3), (RunBuilder(other), 2)):
        leader = path.producer()
        for step in range(n):
            leader.commit(step, {"a": float(step)}, time=step, leader=True)
        path.close()
    session = run.open(other)
    counted = session.sql("select run, count(*) as n from metrics group by run order by run").to_pylist()
    assert [{"run": "deeper/run", "n": 2}, {"run": f"{tmp_path.name}/run", "n": 3}] == counted
    joined = session.metrics(wide=True)
    assert ["run", "step", "sub_index", "time", "a"] == joined.column_names
    assert 5 == joined.num_rows
    assert 2 == len(session.info()["runs"])
    with pytest.raises(errors.QueryError, match="expected different run directories, got one twice"):
        open_run(run.path, run.path)
