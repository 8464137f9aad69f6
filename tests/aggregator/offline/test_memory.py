"""What a session may take: a memory limit, a directory to spill to, and nothing else of the machine."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aggregator import open_run
from eventlog import errors
from tests.runs import RunBuilder

ROOT = Path(__file__).parents[3]


@pytest.fixture
def small(run):
    leader = run.producer()
    for step in range(6):
        leader.tracker().denominator({"m": np.ones((50, 100), bool)})
        values = np.random.default_rng(step).normal(size=(50, 100))
        leader.tracker().stat("m", {"x": values, "y": -values})
        leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
    run.close()
    return run.path


QUESTIONS = [
    lambda s: s.reduce("x", ["avg", "std", "median"], by=[]),
    lambda s: s.reduce("x", ["avg", "std", "p99"], where="y > 0"),
    lambda s: s.percentiles(["x", "y"], [0, 0.1, 0.5, 1], by=[]),
    lambda s: s.percentiles("x", [0.5, 0.99]),
    lambda s: s.histogram("x", 20),
    lambda s: s.correlation("x", "y"),
    lambda s: s.reduce("x", ["avg", "p10"], by="sequence"),
    lambda s: s.sql(
        "with v as (select step, unnest(values) as v from tensors) "
        "select step, sum(v order by v) from v group by step order by step"
    ),
    lambda s: s.sql("from percentile('x', 0.5)"),
    lambda s: s.sql("select * from payload order by record_id"),
]


@pytest.mark.parametrize("ask", QUESTIONS, ids=range(len(QUESTIONS)))
def test_answers_do_not_depend_on_the_limit(small, monkeypatch, ask):
    """Held at once or a piece at a time, the answer is the same to the bit (report g13)."""
    from aggregator.offline import memory

    with open_run(small) as session:
        whole = ask(session)
    monkeypatch.setattr(memory, "_HELD", 0)
    for piece in (1, 50_000):
        monkeypatch.setattr(memory, "_PIECE", piece)
        with open_run(small) as session:
            assert whole.to_pydict() == ask(session).to_pydict()


def test_a_payload_that_is_not_there_is_told_at_any_size(run, tmp_path, monkeypatch):
    """Of a large run whose payload was off the views are no more empty than of a small one."""
    from aggregator.offline import memory

    leader = run.producer(payload=False)
    leader.tracker().denominator({"m": np.ones(4, bool)})
    leader.tracker().stat("m", {"x": np.arange(4.0)})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    monkeypatch.setattr(memory, "_HELD", 0)
    session = run.open()
    for query in (
        "from tensors",
        "from percentile('x', 0.5)",
        "from histogram('x', 2)",
        "from by_sequence('x')",
    ):
        with pytest.raises(errors.UnansweredError, match="the payload was off or pruned"):
            session.sql(query)
    with pytest.raises(errors.UnansweredError, match="the payload was off or pruned"):
        session.export(tmp_path / "t.csv", view="tensors")


def test_limits_are_sizes(small):
    """Bytes, or a number and a unit; anything else is refused."""
    for limit in ("256MB", "256 MiB", "0.5GB", 200_000_000, "200000000"):
        with open_run(small, memory_limit=limit) as session:
            assert session.sql("select 1").num_rows
    for limit in ("lots", "12 XB", -1, True, ""):
        with pytest.raises(errors.QueryError, match="expected a memory limit in bytes or like 256MB, got"):
            open_run(small, memory_limit=limit)
    with pytest.raises(errors.QueryError, match="expected a memory limit of 64MiB or more, got '1kB'"):
        open_run(small, memory_limit="1kB")


def test_the_environment_is_asked_too(small, monkeypatch, tmp_path):
    """AREAL_METRICS_MEMORY_LIMIT and AREAL_METRICS_SPILL stand where nothing is given."""
    monkeypatch.setenv("AREAL_METRICS_MEMORY_LIMIT", "128MiB")
    monkeypatch.setenv("AREAL_METRICS_SPILL", str(tmp_path))
    with open_run(small) as session:
        settings = "select current_setting('memory_limit') as l, current_setting('temp_directory') as t"
        (found,) = session.sql(settings).to_pylist()
        assert ("128.0 MiB", str(tmp_path)) == (found["l"], str(Path(found["t"]).parent))
    monkeypatch.setenv("AREAL_METRICS_SPILL", str(tmp_path / "none"))
    with pytest.raises(errors.QueryError, match=r"expected a directory to spill to, got .*none"):
        open_run(small)
    with pytest.raises(errors.QueryError, match="expected a directory to spill to, got 5"):
        open_run(small, spill=5)


def test_what_needs_no_query_spills_nothing(small, tmp_path):
    """Metrics are told without a database: nothing is made for one, and nothing is left to close."""
    spill = tmp_path / "spill"
    spill.mkdir()
    with open_run(small, spill=spill) as session:
        assert session.metrics() is not None
        assert [] == list(spill.iterdir())
        assert session.sql("select 1").num_rows
        assert 1 == len(list(spill.iterdir()))
    assert [] == list(spill.iterdir())


def test_a_session_that_nobody_closes_leaves_nothing(small, tmp_path):
    """Forgotten, or alive when the process ends, a session takes its spill directory with it."""
    spill = tmp_path / "spill"
    spill.mkdir()
    session = open_run(small, spill=spill)
    assert session.sql("select 1").num_rows
    assert 1 == len(list(spill.iterdir()))
    del session
    gc.collect()
    assert [] == list(spill.iterdir())
    code = (
        "import sys; from aggregator import open_run; s = open_run(sys.argv[1], spill=sys.argv[2]); s.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(small), str(spill)], cwd=ROOT, check=True)
    assert [] == list(spill.iterdir())


def test_a_small_limit_is_for_few_threads(small):
    """Every thread needs memory of its own: there are no more of them than the limit is enough for."""
    setting = "select current_setting('threads') as n"
    with open_run(small, memory_limit="64MiB") as session:
        assert [2] == session.sql(setting)["n"].to_pylist()
    with open_run(small) as session, open_run(small, memory_limit="1TiB") as large:
        (usual,) = session.sql(setting)["n"].to_pylist()
        assert [max(2, usual)] == large.sql(setting)["n"].to_pylist()


SORT = "select count(*) as n from (select distinct range * 7919 % 8000009 as v from range(3000000))"


def test_queries_spill_into_the_directory_and_nowhere_else(small, tmp_path, monkeypatch):
    """What does not fit is spilled if a directory was given, and else an error that says so (report g10)."""
    spill, here = tmp_path / "spill", tmp_path / "here"
    spill.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    with open_run(small, memory_limit="64MiB", spill=spill) as session:
        assert [3_000_000] == session.sql(SORT)["n"].to_pylist()
        assert 1 == len(list(spill.iterdir()))
    assert [] == list(spill.iterdir())
    with (
        open_run(small, memory_limit="64MiB") as session,
        pytest.raises(
            errors.QueryError, match="expected a query that fits into the memory limit, got Out of Memory"
        ),
    ):
        session.sql(SORT)
    assert [] == list(here.iterdir())


@pytest.mark.parametrize(
    "query",
    [
        "copy (select 1) to '{spill}/out.csv'",
        "copy metrics to '{run}/out.parquet'",
        "select * from read_csv('/etc/passwd')",
        "select * from read_text('{spill}/note.txt')",
        "select * from read_text('{run}/run.json')",
        "select * from '{spill}/note.txt'",
        "select * from glob('{spill}/*')",
        "attach '{spill}/db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "set temp_directory = '/'",
        "set lock_configuration = false",
        "reset memory_limit",
        "pragma enable_external_access",
        "create table t as select 1",
        "create macro f() as 1",
        "select getenv('HOME')",
    ],
)
def test_sql_reaches_nothing_but_the_views(small, tmp_path, query):
    """A session with a spill directory cannot read or write files, attach, load, or change its settings."""
    (tmp_path / "note.txt").write_text("secret")
    before = sorted(path for path in [*tmp_path.iterdir(), *small.iterdir()])
    with (
        open_run(small, spill=tmp_path) as session,
        pytest.raises(errors.QueryError, match=r".") as caught,
    ):
        session.sql(query.format(spill=tmp_path, run=small))
    assert "secret" not in str(caught.value)
    assert before == sorted(path for path in [*tmp_path.iterdir(), *small.iterdir()])


# -- twenty million values -------------------------------------------------------------------------------

ASK = """
import json, resource, sys
from aggregator import open_run
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
path, spill, questions = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with open_run(path, memory_limit="256MB", spill=spill) as run:
    run.metrics()
    before, found = peak(), []
    for question in questions:
        found.append(eval(question).to_pylist()[:3])
print(json.dumps({"grown": peak() - before, "found": found}))
"""
LARGE = [
    "run.reduce('x', ['std', 'count'], by=[])",
    "run.percentiles('x', [0.01, 0.5], by=[])",
    "run.percentiles('x', 0.99, by='step')",
    "run.reduce('x', ['avg', 'count'], by=[], where='x > 0')",
    "run.sql('select avg(v) as avg, count(*) as n from (select unnest(values) as v from tensors)')",
]


@pytest.mark.long
def test_twenty_million_values_fit_into_256_mb(tmp_path):
    """Statistics, exact percentiles and SQL over 20 million values stay within the limit (report g10)."""
    steps, rows = 20, 500
    with RunBuilder(tmp_path / "run") as run:
        ranks = [run.producer("actor", rank, world="w", world_size=2) for rank in range(2)]
        everything = []
        for step in range(steps):
            for producer in ranks:
                values = np.random.default_rng([step, producer.rank]).normal(size=(rows, 1000))
                everything.append(values)
                producer.tracker().denominator({"m": np.ones(values.shape, bool)})
                producer.tracker().stat("m", {"x": values})
            stats = run.export(ranks, time=step)
            for producer in ranks:
                leads = producer is ranks[0]
                producer.commit(step, stats if leads else (), time=step + 0.5, leader=leads)
                assert producer.writer.flush(60)
    spill = tmp_path / "spill"
    spill.mkdir()
    words = [sys.executable, "-c", ASK, str(tmp_path / "run"), str(spill), json.dumps(LARGE)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    answer = json.loads(done.stdout)
    assert answer["grown"] < 256 * 10**6
    pooled = np.concatenate(everything, axis=None)
    spread, ends, by_step, filtered, averaged = answer["found"]
    assert len(pooled) == spread[0]["count"] == averaged[0]["n"]
    assert spread[0]["std"] == pytest.approx(pooled.std(ddof=1), rel=1e-9)
    assert [ends[0]["p1"], ends[0]["p50"]] == pytest.approx(
        np.quantile(pooled, [0.01, 0.5]).tolist(), rel=1e-12
    )
    first = np.quantile(np.concatenate(everything[:2], axis=None), 0.99)
    assert by_step[0]["p99"] == pytest.approx(first, rel=1e-12)
    assert filtered[0]["avg"] == pytest.approx(pooled[pooled > 0].mean(), rel=1e-9)
    assert averaged[0]["avg"] == pytest.approx(pooled.mean(), abs=1e-9)
