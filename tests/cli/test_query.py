"""`keys`, `metrics` and `sql`."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest

from aggregator import open_run
from tests.cli.conftest import RESUMED_AT, STEPS, Ask, write_run
from tests.runs import RunBuilder
from tests.storage import flip


def test_metrics_has_each_step_once(ask: Ask, root: Path) -> None:
    """Of a resumed run each step is printed once, with the value of the attempt that owns it."""
    answer = ask("metrics", root / "a", "ppo_actor/loss", "lr", "--json")
    assert (0, "") == (answer.code, answer.err)
    loss = {row["step"]: row["value"] for row in answer.json if row["key"] == "ppo_actor/loss"}
    rate = [row["value"] for row in answer.json if row["key"] == "lr"]
    assert {step: step + 0.5 for step in range(STEPS)} == loss
    assert [1.0] * RESUMED_AT + [0.5] * (STEPS - RESUMED_AT) == rate


def test_metrics_of_all_attempts(ask: Ask, root: Path) -> None:
    """With --attempts all, rows that a later attempt replaced are printed and marked."""
    rows = ask("metrics", root / "a", "lr", "--attempts", "all", "--json").json
    assert STEPS + 2 == len(rows)
    assert [RESUMED_AT, RESUMED_AT + 1] == [row["step"] for row in rows if row["superseded"]]


def test_metrics_takes_globs_and_bounds(ask: Ask, root: Path) -> None:
    """Keys are globs, --since and --until are steps, both included."""
    rows = ask("metrics", root / "a", "ppo_*/l?ss", "--since", 3, "--until", 4, "--json").json
    assert [("ppo_actor/loss", 3), ("ppo_actor/loss", 4)] == [(row["key"], row["step"]) for row in rows]


def test_metrics_without_keys_prints_all(ask: Ask, root: Path) -> None:
    """Without a key all metrics are printed, as the library returns them."""
    with open_run(root / "a") as session:
        assert session.metrics().num_rows == len(ask("metrics", root / "a", "--json").json)


def test_metrics_of_several_runs(ask: Ask, root: Path) -> None:
    """--with adds runs, and each row says which run it is of."""
    rows = ask("metrics", root / "a", "lr", "--with", root / "sub" / "b", "--since", 9, "--json").json
    assert [("a", 0.5), ("b", 1.0)] == sorted((row["run"], row["value"]) for row in rows)


def test_metrics_wide(ask: Ask, root: Path) -> None:
    """--wide prints a row a step and a column a key."""
    rows = ask("metrics", root / "sub" / "b", "lr", "ppo_actor/loss", "--wide", "--until", 1, "--json").json
    assert [(0, 1.0, 0.5), (1, 1.0, 2.5)] == [(row["step"], row["lr"], row["ppo_actor/loss"]) for row in rows]


def test_metrics_recomputed_from_the_log(ask: Ask, root: Path) -> None:
    """--source recomputed says what the log of all ranks says: here the same."""
    rows = ask("metrics", root / "a", "ppo_actor/loss", "--source", "recomputed", "--json").json
    assert [step + 0.5 for step in range(STEPS)] == [row["value"] for row in rows]
    assert {False} == {row["differs"] for row in rows}


def test_metrics_as_a_table(ask: Ask, root: Path) -> None:
    """A table has a heading and a line a row."""
    lines = ask("metrics", root / "a", "ppo_actor/loss").out.splitlines()
    assert ["step", "key", "value"] == lines[0].split()[:3]
    assert ["0", "ppo_actor/loss", "0.5"] == lines[1].split()[:3]
    assert 1 + STEPS == len(lines)


def test_nan_is_a_string_in_json(ask: Ask, tmp_path: Path) -> None:
    """NaN and infinities are printed as strings, so that any JSON reader takes them."""
    with RunBuilder(tmp_path) as run:
        actor = run.producer("actor", attempt=0)
        run.attempt(0, leader=actor)
        actor.commit(0, {"a": math.nan, "b": math.inf, "c": -math.inf}, leader=True)
    rows = ask("metrics", tmp_path, "--json").json
    assert ["NaN", "Infinity", "-Infinity"] == [row["value"] for row in rows]


def test_names_are_never_markup(ask: Ask, tmp_path: Path) -> None:
    """A key that looks like markup is printed as it is and can be asked for by its name."""
    key = "loss[bold]/:smile:"
    with RunBuilder(tmp_path) as run:
        actor = run.producer("actor", attempt=0)
        run.attempt(0, leader=actor)
        actor.commit(0, {key: 1.0}, leader=True)
    answer = ask("metrics", tmp_path, key)
    assert (0, key) == (answer.code, answer.out.splitlines()[1].split()[1])


def test_unknown_keys_are_refused(ask: Ask, root: Path) -> None:
    """A key or glob that matches nothing fails and names it."""
    for command in ("metrics", "keys"):
        answer = ask(command, root / "a", "los*")
        assert (1, "") == (answer.code, answer.out)
        assert "'los*'" in answer.err
        assert 1 == answer.err.count("\n")


def test_keys_lists_what_was_recorded_and_committed(ask: Ask, root: Path) -> None:
    """Every key is listed with its kind; patterns choose among them."""
    rows = ask("keys", root / "a", "--json").json
    assert {"scalar", "metric"} == {row["kind"] for row in rows}
    assert {"ppo_actor/loss"} == {row["key"] for row in ask("keys", root / "a", "*/loss", "--json").json}


def test_sql_answers_a_question(ask: Ask, root: Path) -> None:
    """A query over the records of every rank is answered: the loss of each rank, which no tracker has."""
    query = (
        "select rank, sum(sum) as total from records where key = 'ppo_actor/loss' group by rank order by rank"
    )
    answer = ask("sql", root / "sub" / "b", query, "--json")
    assert [{"rank": 0, "total": 90.0}, {"rank": 1, "total": 100.0}] == answer.json


def test_sql_reads_stdin(ask: Ask, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads the query from stdin."""
    monkeypatch.setattr("sys.stdin", io.StringIO("select count(distinct rank) as ranks\nfrom records"))
    assert [{"ranks": 2}] == ask("sql", root / "a", "-", "--json").json


def test_sql_schema_names_every_view(ask: Ask, root: Path) -> None:
    """--schema prints the columns of all views DESIGN names, so that nobody has to guess."""
    rows = ask("sql", root / "a", "--schema", "--json").json
    promised = "records payload scalars tensors masks windows exports commits attempts producers metrics"
    assert {*promised.split(), "evaluations", "samples"} <= {row["view"] for row in rows}
    assert ("metrics", "step") in {(row["view"], row["column"]) for row in rows}


def test_sql_errors_are_one_line(ask: Ask, root: Path) -> None:
    """What DuckDB refuses is one line on stderr and exit code 2; files and settings are out of reach."""
    for query in (
        "select nonsense from records",
        "selec 1",
        "copy records to '/tmp/x.csv'",
        "select 1; select 2",
    ):
        answer = ask("sql", root / "a", query)
        assert (2, "", 1) == (answer.code, answer.out, answer.err.count("\n"))
        assert "Traceback" not in answer.err


def test_sql_wants_a_query_or_the_schema(ask: Ask, root: Path) -> None:
    """Neither, or both, is a usage error."""
    query = "select 1"
    for words in ([], [query, "--schema"]):
        answer = ask("sql", root / "a", *words)
        assert (2, "") == (answer.code, answer.out)
        assert "expected a QUERY or --schema" in answer.err


def test_damage_is_told_and_exits_3(ask: Ask, tmp_path: Path) -> None:
    """What could not be read is told on stderr; the data is still printed, and the exit code is 3."""
    run = write_run(tmp_path / "run", [range(3)], gain=1.0)
    segment = next((run / "events" / "actor-1").glob("*.records.0000.arrows"))
    flip(segment, segment.stat().st_size // 2)
    answer = ask("metrics", run, "lr", "--json")
    assert (3, 3) == (answer.code, len(answer.json))
    assert answer.err.startswith("damaged: ")
    assert segment.name in answer.err


def test_damage_that_workers_find_is_told_too(ask: Ask, tmp_path: Path) -> None:
    """An engine's workers read what is damaged: it is no less told, and the exit code is 3."""
    write_run(tmp_path / "run", [range(STEPS)], gain=1.0)
    (segment,) = tmp_path.glob("run/events/*-0/*.payload.*.arrows")
    flip(segment, segment.stat().st_size // 2)
    words = ("reduce", tmp_path / "run", "*", "--stat", "std")
    plain, elsewhere = ask(*words), ask(*words, "--engine", "local", "--workers", 1)
    assert (3, plain.out, plain.err) == (elsewhere.code, elsewhere.out, elsewhere.err)
    assert plain.err.startswith("damaged: ")


def test_of_much_damage_the_first_is_told(ask: Ask, tmp_path: Path) -> None:
    """A run with a hundred holes costs a screen, not a hundred lines; what lists all is said."""
    run = write_run(tmp_path / "run", [range(2)], gain=1.0)
    for number in range(2, 102):
        (run / "attempts" / f"{number:04}.json").write_text("x")
    answer = ask("metrics", run, "lr", "--json")
    assert (3, 2, 21) == (answer.code, len(answer.json), answer.err.count("\n"))
    assert "… and 80 more; verify --json lists all" == answer.err.splitlines()[-1]
    listed = ask("verify", run, "--json").json["files"]
    assert 100 == sum(len(file["problems"]) for file in listed)


def test_json_of_times_that_python_has_none_for(ask: Ask, root: Path) -> None:
    """Infinite and far times and intervals are strings, within lists too; nothing is cut off half-way."""
    query = """
    select timestamp 'infinity' as a, [timestamptz '-infinity'] as b, {'c': date 'infinity'} as c,
        timestamp '290000-01-01' as d, interval '1 month 2 days -1.5 seconds' as e, [interval '1 day'] as f
    """
    answer = ask("sql", root / "a", query, "--json")
    assert 0 == answer.code
    assert [
        {
            "a": "Infinity",
            "b": ["-Infinity"],
            "c": {"c": "Infinity"},
            "d": "290000-01-01T00:00:00.000000",
            "e": "P1M2DT-1.5S",
            "f": ["P0M1DT0S"],
        }
    ] == answer.json
    assert "P1M2DT-1.5S" in ask("sql", root / "a", query).out


# -- statistics ------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Record two steps of two sequences with rewards 1 and -1, and KL per token."""
    with RunBuilder(tmp_path / "run") as run:
        leader = run.producer("actor", attempt=0)
        for step in range(2):
            tracker = leader.tracker()
            tracker.denominator({"n_tokens": np.ones((2, 3), bool), "n_seqs": np.ones(2, bool)})
            tracker.stat("n_tokens", {"kl": np.arange(6.0).reshape(2, 3) + step, "loss": np.ones((2, 3))})
            tracker.stat("n_seqs", {"reward": np.array([1.0, -1.0])})
            leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
    return tmp_path / "run"


def test_reduce_under_a_condition(ask: Ask, trained: Path) -> None:
    """Mean KL over sequences whose reward is positive is one line."""
    answer = ask("reduce", trained, "kl", "--stat", "avg", "--stat", "p50", "--where", "reward > 0", "--json")
    assert [(0, 1.0, 1.0), (1, 2.0, 2.0)] == [(row["step"], row["avg"], row["p50"]) for row in answer.json]
    table = ask("reduce", trained, "kl", "--by", "sequence", "--until", 0).out.splitlines()
    heads = ["step", "role", "rank", "window", "call", "sequence", "sample_id", "avg", "missing"]
    assert heads == table[0].split()
    assert ["0", "actor", "0", "0", "0", "1", "4", "0"] == table[2].split()


def test_reduce_of_distinct_samples(ask: Ask, tmp_path: Path) -> None:
    """A sample that two ranks recorded counts once with --distinct; what the copy held is left out."""
    with RunBuilder(tmp_path / "run") as run:
        for rank, ids in enumerate((["a", "b"], ["c", "a"])):
            producer = run.producer("actor", rank, attempt=0)
            tracker = producer.tracker()
            tracker.denominator({"n": np.ones(2, bool)}, about={"sample_ids": ids})
            tracker.stat("n", {"x": np.array([1.0, 2.0]) + 10 * rank})
            producer.commit(0, run.export(producer, time=rank), time=rank + 0.5, leader=not rank)
    asked = ("reduce", tmp_path / "run", "x", "--stat", "sum", "--by", "role", "--json")
    assert [26.0] == [row["sum"] for row in ask(*asked).json]
    assert [14.0] == [row["sum"] for row in ask(*asked, "--distinct").json]


def test_percentiles_of_globs(ask: Ask, trained: Path) -> None:
    """Several keys are told apart by a column; three percentiles are printed unless others are asked for."""
    rows = ask("percentiles", trained, "k*", "loss", "--by", "epoch", "--json").json
    assert [("kl", 3.0), ("loss", 1.0)] == [(row["key"], row["p50"]) for row in rows]
    assert {"p50", "p90", "p99"} <= set(rows[0])
    single = ask("percentiles", trained, "kl", "-q", "0.25", "--since", 1, "--json").json
    assert [{"step": 1, "p25": 2.25, "count": 6, "missing": 0}] == single


def test_histogram_and_correlation(ask: Ask, trained: Path) -> None:
    """Both are of the whole run unless --by says otherwise."""
    rows = ask("histogram", trained, "kl", "--bins", 2, "--json").json
    assert [5, 7] == [row["count"] for row in rows]
    (row,) = ask("correlation", trained, "kl", "reward", "--json").json
    assert (12, True) == (row["count"], row["correlation"] < 0)
    assert 2 == len(ask("correlation", trained, "kl", "reward", "--by", "step", "--json").json)


def test_macros_on_the_command_line(ask: Ask, trained: Path) -> None:
    """SQL has the statistics as tables, and --schema documents them."""
    answer = ask("sql", trained, "from percentile('kl', 0.5)", "--memory-limit", "128MB", "--json")
    assert [(0, 2.5), (1, 3.5)] == [(row["step"], row["value"]) for row in answer.json]
    assert "percentile('key', 0.99)" in ask("sql", trained, "--schema").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reduce", "kl", "--stat", "mode"], "expected statistics of avg,"),
        (["reduce", "kl", "--stat", "p101"], "expected percentiles from 0 to 1, got 1.01"),
        (["reduce", "kl", "--by", "hour"], "expected to group by any of step,"),
        (
            ["reduce", "kl", "--where", "reward >"],
            "expected a number, got the end in the condition 'reward >'",
        ),
        (["percentiles", "kl", "-q", "99"], "expected percentiles from 0 to 1, got 99"),
        (["histogram", "kl", "--memory-limit", "lots"], "expected a memory limit in bytes or like 256MB"),
        (["histogram", "kl", "--bins", "0"], "expected at least one bin, got 0"),
        (["export", "out.xls"], "expected a file ending in .parquet"),
    ],
)
def test_wrong_questions_get_right_errors(ask: Ask, trained: Path, words: list[str], message: str) -> None:
    """One line says what was expected and what there is; the exit code is 2."""
    command, *rest = words
    answer = ask(command, trained, *rest)
    assert (2, "", 1) == (answer.code, answer.out, answer.err.count("\n"))
    assert message in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["metrics", "kl/average"], "expected a committed metric, got 'kl/average'; near: 'kl/avg'"),
        (["keys", "zzz"], "expected a key, got 'zzz'; there are 14, none of them near"),
        (["reduce", "kll"], "expected a recorded key, got 'kll'; near: 'kl'"),
        (["reduce", "kl/avg"], "expected a recorded key, got 'kl/avg'; near: 'kl'"),
        (["reduce", "kl", "--since", "7"], "expected values of 'kl' "),
        (["reduce", "kl", "--where", "loss"], "only a mask is true by itself"),
        (["percentiles", "zzz"], "expected a recorded key, got 'zzz'; there are 5, none of them near"),
        (
            ["histogram", "kl", "--where", "zzz > 0"],
            "in the condition, got 'zzz'; there are 5, none of them near",
        ),
        (["correlation", "kl", "rewards"], "expected a recorded key, got 'rewards'; near: 'reward'"),
        (["export", "OUT", "--keys", "zzz"], "expected a committed metric, got 'zzz'"),
        (["export", "OUT", "--view", "records", "--keys", "zzz"], "expected a key in records, got 'zzz'"),
        (["sql", "from percentile('kll', 0.5)"], "expected a recorded key, got 'kll'; near: 'kl'"),
        (["sql", "select key::int from records"], "to INT32 when casting from source column key"),
        (["plot", "curves", "RUN", "zzz", "--json"], "expected a committed metric, got 'zzz'"),
        (
            ["plot", "heatmap", "RUN", "--accuracy", "a", "--length", "b", "--json"],
            "expected steps that have 'a'",
        ),
        (["plot", "radar", "RUN", "zzz", "--json"], "expected a committed metric, got 'zzz'"),
        (["compare-evals", "--step", "0", "--step", "1"], "expected results of samples at step 0, got none"),
        (["replay", "--to", "tensorboard", "--keys", "zzz"], "expected a committed metric, got 'zzz'"),
        (
            ["replay", "--to", "tensorboard", "--rename", ".*=x"],
            "expected a name of its own for every metric",
        ),
    ],
)
def test_what_a_run_has_no_answer_to_is_no_wrong_call(
    ask: Ask, trained: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    """A key, a step or values that this run lacks, and another may have, are one line and exit code 1."""
    if "RUN" not in words:
        words = [words[0], "RUN", *words[1:]]
    answer = ask(*({"RUN": trained, "OUT": tmp_path / "out.csv"}.get(word, word) for word in words))
    assert (1, "", 1) == (answer.code, answer.out, answer.err.count("\n")), answer.err
    assert message in answer.err


def test_an_empty_run_answers_politely(ask: Ask, tmp_path: Path) -> None:
    """There are no rows, and no key: the error says so."""
    with RunBuilder(tmp_path):
        pass
    assert [] == ask("metrics", tmp_path, "--json").json == ask("keys", tmp_path, "--json").json
    assert [{"n": 0}] == ask("sql", tmp_path, "select count(*) as n from tensors", "--json").json
    answer = ask("reduce", tmp_path, "kl")
    assert (1, True) == (answer.code, "got 'kl'; there is none" in answer.err)
