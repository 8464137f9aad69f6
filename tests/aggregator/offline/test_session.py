"""SQL over a run: the questions no tracker can answer, what the views hold, and what a session refuses."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from aggregator import open_run
from aggregator.offline.database import MACROS, VIEWS
from eventlog import errors


@pytest.fixture
def trained(run):
    """Two ranks, three steps, two micro-batches a step: token-level and sequence-level masks and values.

    Returns (session, what each rank recorded: a dict per step, rank and micro-batch).
    """
    rng = np.random.default_rng(7)
    actors = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
    recorded = []
    for step in range(3):
        for actor in actors:
            tracker = actor.tracker()
            for _ in range(2):
                n = 3 + actor.rank  # sequences: of unequal number per rank
                made = {
                    "step": step,
                    "rank": actor.rank,
                    "tokens": rng.random((n, 5)) < 0.6,
                    "correct": rng.random(n) < 0.5,
                    "advantages": rng.normal(size=(n, 5)).astype(np.float32),
                    "reward": rng.normal(size=n).astype(np.float32),
                }
                recorded.append(made)
                masks = {
                    "n_valid_tokens": made["tokens"],
                    "n_seqs": np.ones(n, bool),
                    "correct_n_seqs": made["correct"],
                }
                with tracker.scope("ppo_actor"):
                    tracker.denominator(masks)
                    tracker.stat("n_valid_tokens", {"advantages": made["advantages"]})
                    tracker.stat(
                        "n_seqs",
                        {"task_reward": made["reward"], "correct": made["correct"].astype(np.float32)},
                    )
            tracker.timing("train_step", 1.0 + (step == 1) * actor.rank - (step != 1) * actor.rank / 2)
        stats = run.export(actors, time=10 * step)
        actors[0].commit(step, stats, time=10 * step + 5, epoch=0, leader=True)
        actors[1].commit(step, time=10 * step + 5)
    return run.open(), recorded


def of_step(recorded, step):
    return [made for made in recorded if made["step"] == step]


# -- the three questions ---------------------------------------------------------------------------------


def test_p99_of_the_absolute_advantage_by_step(trained):
    """A percentile over every token of every rank is one line."""
    session, recorded = trained
    rows = session.sql("""
        select step, quantile_cont(abs(a), 0.99) as p99
        from (select step, unnest(values) as a from tensors where key = 'ppo_actor/advantages')
        group by step order by step
    """).to_pylist()
    for step, row in enumerate(rows):
        pooled = np.concatenate([m["advantages"][m["tokens"]] for m in of_step(recorded, step)])
        assert step == row["step"]
        assert row["p99"] == pytest.approx(np.quantile(np.abs(pooled.astype(np.float64)), 0.99), rel=1e-12)
    assert 3 == len(rows)


def test_the_slower_rank_by_timings(trained):
    """Who was slow at each step is in the moments alone."""
    session, _ = trained
    sql = """
        select step, arg_max(rank, sum) as slower from records
        where key = 'timeperf/train_step' group by step order by step
    """
    assert [0, 1, 0] == session.sql(sql)["slower"].to_pylist()
    sql = (
        "select step, arg_max(rank, value) slower from scalars where kind = 'timing' group by all order by 1"
    )
    assert [0, 1, 0] == session.sql(sql)["slower"].to_pylist()


def correct_only(recorded, step):
    return (
        np.concatenate([m["reward"][m["correct"]] for m in of_step(recorded, step)]).astype(np.float64).mean()
    )


def test_mean_reward_of_the_correct_answers_by_a_mask(trained):
    """Values recorded under one mask are selected by another one of the same batch."""
    session, recorded = trained
    rows = session.sql("""
        select step, avg(reward) as reward from (
            select t.step, unnest(list_where(t.dense, m.mask)) as reward
            from tensors t join masks m using (session, "window", call)
            where t.key = 'ppo_actor/task_reward' and m.key = 'ppo_actor/correct_n_seqs'
        ) group by step order by step
    """)
    for step, reward in enumerate(rows["reward"].to_pylist()):
        assert reward == pytest.approx(correct_only(recorded, step), rel=1e-12)


def test_mean_reward_of_the_correct_answers_by_a_second_stat(trained):
    """Two stats under one mask are joined by it, value by value."""
    session, recorded = trained
    rows = session.sql("""
        select step, avg(reward) filter (correct > 0) as reward from (
            select t.step, unnest(t.values) as reward, unnest(c.values) as correct
            from tensors t join tensors c using (session, denominator_id)
            where t.key = 'ppo_actor/task_reward' and c.key = 'ppo_actor/correct'
        ) group by step order by step
    """)
    for step, reward in enumerate(rows["reward"].to_pylist()):
        assert reward == pytest.approx(correct_only(recorded, step), rel=1e-12)


# -- the views -------------------------------------------------------------------------------------------


def test_every_view_answers(trained):
    """Each of them can be read, described and counted."""
    session, _ = trained
    empty = {view for view in VIEWS if not session.sql(f"select count(*) as n from {view}")["n"][0].as_py()}
    assert {"evaluations", "samples"} == empty
    for view in VIEWS:
        described = session.sql(f"describe {view}")["column_name"].to_pylist()
        assert session.sql(f"from {view} limit 1").column_names == described
        assert "run" not in described


def test_every_column_is_documented(trained):
    """The schema lists every column of every view, with its type and what it means."""
    session, _ = trained
    rows = session.schema().to_pylist()
    assert {*VIEWS, *(view for *_, view in MACROS.values())} == {row["view"] for row in rows}
    assert [] == [row for row in rows if not row["comment"]]
    types = {(row["view"], row["column"]): row["type"] for row in rows}
    assert "DOUBLE[]" == types["tensors", "values"]
    assert "BOOLEAN[]" == types["masks", "mask"]
    assert "TIMESTAMP WITH TIME ZONE" == types["records", "time"]


def test_rows_come_in_a_fixed_order(trained):
    """Reading twice gives the same rows in the same order."""
    session, _ = trained
    for view in VIEWS:
        assert session.sql(f"from {view}").equals(session.sql(f"from {view}"))


def test_keys_tell_kind_count_and_steps(trained):
    """Recorded keys and committed metrics stand side by side."""
    session, recorded = trained
    rows = {(row["key"], row["kind"]): row for row in session.keys().to_pylist()}
    advantages = rows["ppo_actor/advantages", "stat"]
    assert sum(m["tokens"].sum() for m in recorded) == advantages["count"]
    assert ("avg_min_max", 0, 2) == tuple(
        advantages[name] for name in ("reduce_type", "first_step", "last_step")
    )
    assert 3 == rows["ppo_actor/advantages/avg", "metric"]["count"]
    assert ("timeperf/train_step", "timing") in rows
    assert sorted(rows) == list(rows)


def test_evaluations_are_the_evaluation_tracker_s(run):
    """The view holds what the eval-rollout tracker exported."""
    leader = run.producer()
    leader.tracker("eval-rollout").scalar({"reward": 1.0})
    leader.tracker("rollout").scalar({"reward": 0.0})
    leader.commit(0, run.export(leader), time=1, leader=True)
    keys = run.open().sql("select key from evaluations")["key"].to_pylist()
    assert ["eval-rollout/reward", "eval-rollout/reward__count"] == keys


def test_standard_statistics_read_no_payload(trained, monkeypatch):
    """Metrics, keys and records are answered without a look at the values."""
    session, _ = trained
    reader = session._histories[0].reading.reader
    monkeypatch.setattr(reader, "payload", lambda *_: pytest.fail("the payload was read"))
    session.metrics(source="recomputed")
    session.reduce("ppo_actor/advantages", ["avg", "min", "max", "sum", "count"], by=["step", "rank"])
    session.sql(
        "select key, sum(sum) / sum(count) from records where key like '%tensors%' or true group by key"
    )
    session.keys()
    session.info()


def test_a_pivot_is_a_question_too(trained):
    """PIVOT works with and without its values listed."""
    session, _ = trained
    query = "pivot (from metrics where key like '%advantages/m%') on key using first(value) group by step"
    table = session.sql(query)
    assert ["step", "ppo_actor/advantages/max", "ppo_actor/advantages/min"] == table.column_names
    listed = "pivot (from records where kind = 'timing') on rank in (0, 1) using first(sum) group by step"
    assert ["step", "0", "1"] == session.sql(listed).column_names


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "create table x as select 1",
        "drop view records",
        "insert into records select * from records",
        "copy (select 1) to '{path}'",
        "copy records to '{path}'",
        "attach '{path}'",
        "set threads = 1",
        "set enable_external_access = true",
        "install httpfs",
        "load json",
        "export database '{path}'",
        "call pragma_version()",
        "pragma database_list",
        "explain analyze copy (select 1) to '{path}'",
        "explain create table x as select 1",
        "explain (format json) create table x as select 1",
        "/* careful */ explain analyze create table x as select 1",
        "create table x as pivot metrics on key using first(value) group by step",
        "create or replace view main.metrics as pivot commits on key in ('a') using first(value)",
        "create temp view metrics as pivot commits on key in ('a') using first(value)",
        "with x as (pivot metrics on key using count(*)) insert into records from x",
        "--explain (\nexplain analyze create or replace view main.metrics as select 42 /*) x\nselect 1 --*/",
        "--explain (\nexplain analyze drop view main.keys /*) x\nselect 1 --*/",
        "explain (analyze) create temp table x as select 1",
        "explain analyze (format json) drop view main.keys",
        "begin",
        "commit",
        "prepare x as select 1",
        "set variable x = 1",
        "use log",
    ],
)
def test_a_session_only_reads(run, tmp_path, query):
    """Statements that do anything but read are refused, and leave nothing behind."""
    session = run.open()
    path = tmp_path / "written"
    with pytest.raises(
        errors.QueryError, match=r"expected a SELECT, WITH, .* statement, got .*: a session only reads"
    ):
        session.sql(query.format(path=path))
    assert not path.exists()


@pytest.mark.parametrize(
    "query",
    [
        "with x as (copy (select 1) to '{spill}/x.csv') from x",
        "with x as materialized (copy (select 1) to '{spill}/x.csv') select 1",
        "with x as (copy (select 1) to '{spill}/x.csv') pivot metrics on key using count(*)",
        "explain analyze with x as (copy (select 1) to '{spill}/x.csv') from x",
        "from (with x as (copy (select 1) to '{spill}/x.csv') from x)",
        "with x as (\u00a0copy (select 1) to '{spill}/x.csv') pivot metrics on key using count(*)",
        "copy (pivot metrics on key using first(value) group by step) to '{spill}/x.csv'",
        "explain analyze copy (pivot metrics on key using first(value) group by step) to '{spill}/x.csv'",
        "create view x as pivot metrics on key using first(value)",
        "select 1) as a, (with x as (copy (select 1) to '{spill}/x.csv') from x",
        "with x as (insert into log.records select * from records) select 1",
        "from force_checkpoint()",
        "from enable_logging(storage='file', storage_path='{spill}/log.csv')",
        "from enable_profiling(save_location='{spill}/profile.json')",
    ],
)
def test_nothing_that_is_part_of_a_query_writes(run, tmp_path, query):
    """What writes inside a query that reads is refused too, even to the one directory that DuckDB may use."""
    session = run.open(spill=tmp_path)
    (spill,) = session.sql("select current_setting('temp_directory') as spill")["spill"].to_pylist()
    before = session.schema()
    with pytest.raises(errors.QueryError):
        session.sql(query.format(spill=spill))
    assert before.equals(session.schema())
    assert [] == [path.name for path in tmp_path.glob("areal-metrics-*/*")]


@pytest.mark.parametrize(
    "query",
    [
        "select * from '{path}'",
        "select * from read_text('{path}')",
        "select * from read_csv('{path}')",
        "select * from glob('{path}*')",
        "select * from local_rows",
    ],
)
def test_a_session_reaches_nothing_besides_the_run(run, tmp_path, query):
    """Files outside and the caller's variables are out of reach."""
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    local_rows = run.open().metrics()
    assert local_rows is not None
    with pytest.raises(errors.QueryError):
        open_run(run.path).sql(query.format(path=secret))


def test_plans_are_answered(run):
    """EXPLAIN of a question is one, in all its forms."""
    session = run.open()
    for form in (
        "explain",
        "EXPLAIN ANALYZE",
        "explain (format json)",
        "explain (analyze, format json)",
        "-- why\nexplain",
        "/* so */ explain /* slow */ analyze -- ?\n",
    ):
        assert session.sql(f"{form} select count(*) from tensors").num_rows


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("from json_execute_serialized_sql(json_serialize_sql({copies}))", "json_execute_serialized_sql"),
        ("from query({copies})", "query"),
        ('from "QUERY" /* so */ ({copies})', "query"),
        ("from\u00a0query\u2003({copies})", "query"),
        ('from "query"\u00a0-- why\n({copies})', "query"),
        ("from system.main.query({copies})", "query"),
        ("pivot (from system . main . \"query\" ('select 1')) on x using count(*)", "query"),
        ("explain analyze from query({copies})", "query"),
        ("select (select count(*) from query_table('met' || 'rics'))", "query_table"),
        ("from histogram_values('metrics', value)", "histogram_values"),
        ("from destroy_external_resource('qu' || 'ery', {copies})", "destroy_external_resource"),
        (
            "from register_external_resource_type('t', kind := 'database', create_function := 'query')",
            "register_external_resource_type",
        ),
        ("from truncate_duckdb_logs()", "truncate_duckdb_logs"),
        ("from checkpoint()", "checkpoint"),
        ("select * from metrics, lateral (from read_csv('{spill}/x.csv'))", "read_csv"),
        ("from glob('{spill}/*')", "glob"),
    ],
)
def test_a_query_calls_no_function_that_does_more_than_it_says(run, tmp_path, query, name):
    """What executes a text or what a text names, reads files, or acts, is refused."""
    session = run.open(spill=tmp_path)
    (spill,) = session.sql("select current_setting('temp_directory') as spill")["spill"].to_pylist()
    copies = f"'with x as (copy (select 1) to ''{spill}/x.csv'') select 1'"
    with pytest.raises(errors.QueryError, match=f"expected a query of the views, got a call of {name}: "):
        session.sql(query.format(spill=spill, copies=copies))
    assert [] == [path.name for path in tmp_path.glob("areal-metrics-*/*")]


@pytest.mark.parametrize(
    "query",
    [
        "select count(*), sum(value), histogram(step), list(key order by key) from metrics",
        "select unnest(range(3)), * from range(3), generate_series(1, 3), unnest([1, 2]) as t(x)",
        "with read(query, read_text) as (select 1, 2) select query * (2), read_text / (3) from read",
        "select 'query(' || (key), key glob 'x*' from metrics as summary(step, key)",
        "from (select json_each.* from json_each('{\"a\": 1}'))",
        "select function_name from duckdb_functions() where function_name = 'query'",
        "from pragma_table_info('metrics')",
        "from percentile('v', 0.5), histogram('v', 2), by_rank('v'), by_sequence('w')",
    ],
)
def test_ordinary_functions_are_answered(run, query):
    """Scalars, aggregates, ranges, lists and the macros are called as ever; other names are only names."""
    leader = run.producer()
    leader.tracker().scalar({"v": 1.0})
    leader.tracker().denominator({"m": np.ones(2, bool)})
    leader.tracker().stat("m", {"w": np.ones(2)})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    assert run.open().sql(query).num_rows


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            "from delta_scan('x')",
            "expected what DuckDB itself has, got .* extension delta: a session loads none",
        ),
        ("select * from sqlite_scan('x', 'y')", "extension sqlite_scanner: a session loads none"),
        ("from sql_auto_complete('sel')", "extension autocomplete: a session loads none"),
        ("select st_point(1, 2)", "extension spatial: a session loads none"),
        ("select 'a'::int", "Could not convert string 'a' to INT32"),
        ("select date 'x' from metrics", "invalid date field format"),
        ("from percentile('v', 'x')", "Could not convert string 'x' to DOUBLE"),
    ],
)
def test_what_no_run_answers_is_asked_wrongly(run, query, message):
    """Extensions, and the query's own values that are no numbers, are no matter of the run."""
    leader = run.producer()
    leader.tracker().scalar({"v": 1.0})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    with pytest.raises(errors.QueryError, match=message) as caught:
        run.open().sql(query)
    assert errors.QueryError is type(caught.value)
    assert "directory" not in str(caught.value)


def test_a_key_that_is_no_text_is_looked_for_as_one(run):
    """A number in place of a key is a key that is not there, as the macros say it."""
    leader = run.producer()
    leader.tracker().scalar({"v": 1.0})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    session = run.open()
    for query in ("from by_rank(1)", "from percentile(1, 0.5)", "from histogram(1)", "from by_sequence(1)"):
        with pytest.raises(errors.UnansweredError, match="expected a recorded key, got '1'; there are 1, "):
            session.sql(query)


@pytest.mark.parametrize("query", [5, None, b"select 1", "select '\ud800'"])
def test_a_query_is_a_text(run, query):
    """What is no text, or none that can be written, is told apart from a query that DuckDB refuses."""
    with pytest.raises(errors.QueryError, match="expected a query as a text, got "):
        run.open().sql(query)


def test_two_statements_are_refused(run):
    """One question at a time."""
    with pytest.raises(errors.QueryError, match="expected one statement, got 2"):
        run.open().sql("select 1; select 2")
    for nothing in (" ", ";", "-- why", "/* so */;"):
        with pytest.raises(errors.QueryError, match="expected one statement, got 0"):
            run.open().sql(nothing)


@pytest.mark.parametrize(
    "query",
    [
        "select count(*) as n from metrics;",
        "select count(*) as n from metrics ; -- all",
        "(select count(*) as n from metrics)",
        "select count(*) as n, 'über alle ❄❄❄❄❄❄❄❄' as \"größe\" from/**/metrics",
        "with a as (select 'é' as e, * from metrics) select count(*) as n from a -- )",
    ],
)
def test_queries_are_answered_whatever_stands_around_them(run, query):
    """Comments, semicolons, parentheses and letters beyond ASCII change nothing in what is answered."""
    run.producer().commit(0, {"x": 1.0}, leader=True)
    assert [1] == run.open().sql(query)["n"].to_pylist()


def test_unknown_views_and_columns_are_explained(run):
    """The error is one line and says what there is instead."""
    session = run.open()
    with pytest.raises(
        errors.QueryError, match="Table with name recods does not exist; near: records; there are records, "
    ):
        session.sql("select * from recods")
    with pytest.raises(
        errors.QueryError, match=r'column "vale" not found.*Candidate bindings: .*"value"'
    ) as caught:
        session.sql("select vale from metrics")
    assert "\n" not in str(caught.value)
    with pytest.raises(errors.QueryError, match="syntax error at or near"):
        session.sql("selec 1")


@pytest.mark.parametrize(
    "query",
    [
        "-- don't\nselect count(*) from metrics -- isn't",
        "/* it's */ select count(*) from METRICS /* isn't */",
        "select count(*), 1 as \"it's\" from metrics where key <> 'x'",
        "select count(*) from metrics where key <> $$it's$$",
        "select count(*) from metrics where key <> e'it\\'s'",
        "select count(*) from 'metrics'",
        'select count(*) from "metrics"',
        "select count(*) from _metrics",
    ],
)
def test_however_a_query_names_a_view_its_rows_are_there(trained, query):
    """Quotes in comments and texts hide no view; what is made late is made for whatever may read it."""
    session, _ = trained
    answer = session.sql(query.replace("count(*)", "count(*) as n"))
    assert [session.metrics().num_rows] == answer["n"].to_pylist()


def test_errors_while_running_are_query_errors(run):
    """What only shows when the query runs is wrapped as well."""
    run.producer().commit(0, {"a": 1.0}, time=1, leader=True)
    with pytest.raises(errors.QueryError, match=re.compile("conver", re.IGNORECASE)):
        run.open().sql("select key::int from metrics")


def test_a_session_is_closed_by_its_context(run):
    """After the block the session answers no SQL any more, whether or not it was asked before."""
    with run.open() as asked:
        asked.sql("select 1")
    with run.open() as unasked:
        pass
    for session in (asked, unasked):
        for ask in (lambda s: s.sql("select 1"), lambda s: s.schema(), lambda s: s.keys()):
            with pytest.raises(errors.QueryError, match="expected an open session, got one that was closed"):
                ask(session)
        session.close()


def test_readers_and_a_writer_do_not_meet(run):
    """Two readers ask while a run is written: no lock, no error, and no file of theirs (report g11)."""
    leader = run.producer()
    found = {0: [], 1: []}
    done = threading.Event()

    def read(number):
        while True:
            last = done.is_set()
            with open_run(run.path) as session:
                steps = session.sql("select count(distinct step) as n from metrics")["n"][0].as_py()
                values = session.sql("select count(*) as n from scalars")["n"][0].as_py() if steps else 0
                found[number].append((steps, values))
            if last:
                return

    readers = [threading.Thread(target=read, args=(number,)) for number in found]
    for reader in readers:
        reader.start()
    for step in range(40):
        leader.tracker().scalar({"x": float(step)})
        leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
        assert leader.writer.flush(100)
    assert leader.writer.close(100)
    done.set()
    for reader in readers:
        reader.join()
    for seen in found.values():
        assert sorted(seen) == seen
        assert (40, 40) == seen[-1]
    assert {".arrows", ".idx", ".json"} == {path.suffix for path in run.path.rglob("*") if path.is_file()}


def test_columns_of_equal_names_are_told_apart(run):
    """A join's second `step` is `step_1`, as in DuckDB's subqueries: nothing is lost as rows."""
    table = run.open().sql("select 1 as step, 2 as step, 3 as step_1, 4 as step")
    assert [{"step": 1, "step_1": 2, "step_1_1": 3, "step_2": 4}] == table.to_pylist()
