"""Views as files, read back by other libraries."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from aggregator.offline import export
from eventlog import errors
from tests.runs import RunBuilder


@pytest.fixture
def session(run):
    """NaN at step 1, nothing at step 2; a tensor, a text with a comma and a list."""
    leader = run.producer()
    for step, value in enumerate([0.5, math.nan, None]):
        leader.tracker().scalar({"lr": 0.1} | ({} if value is None else {"x": value}))
        leader.tracker().denominator({"m": np.array([True, False])})
        leader.tracker().stat("m", {"a,b": np.array([1.0 + step, 2.0])})
        leader.commit(step, run.export(leader, time=step), time=step + 0.5, leader=True)
    return run.open()


def test_metrics_come_back_from_parquet(session, tmp_path):
    """The file holds the table that `metrics` returns, in long and in wide form."""
    for wide in (False, True):
        path = tmp_path / "metrics.parquet"
        rows = session.export(path, wide=wide)
        table = session.metrics(wide=wide)
        assert table.num_rows == rows
        assert repr(table.to_pydict()) == repr(parquet.read_table(path).to_pydict())
        assert table.schema.equals(parquet.read_schema(path))


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv", "jsonl"])
def test_a_key_called_as_a_column_of_the_row_is_told_apart_in_files(run, tmp_path, ending):
    """Other libraries read the row's step and the metric `step`, each under its name."""
    run.producer().commit(3, {"step": 7.5, "x": 1.0}, time=1, leader=True)
    path = tmp_path / f"m.{ending}"
    run.open().export(path, wide=True)
    if ending == "csv":
        (row,) = csv.DictReader(path.read_text().splitlines())
    elif ending == "jsonl":
        row = json.loads(path.read_text())
    else:
        (row,) = (parquet if ending == "parquet" else feather).read_table(path).to_pylist()
    assert (3, 7.5, 1.0) == tuple(float(row[name]) for name in ("step", "~step", "x"))


def test_arrow_files_are_feather(session, tmp_path):
    """An .arrow file is what Feather readers take."""
    session.export(tmp_path / "m.arrow", ["lr"])
    assert session.metrics("lr").equals(feather.read_table(tmp_path / "m.arrow"))


def test_csv_tells_null_from_nan(session, tmp_path):
    """A key that was not logged is empty, one that was logged as NaN is nan (report f7)."""
    session.export(tmp_path / "m.csv", ["x", "lr"], wide=True)
    with (tmp_path / "m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert ["0.5", "nan", ""] == [row["x"] for row in rows]
    assert ["0", "1", "2"] == [row["step"] for row in rows]


def test_json_lines_tell_null_from_nan(session, tmp_path):
    """An object a line, strict JSON: NaN is a string, null is absent (report f7)."""
    session.export(tmp_path / "m.jsonl", ["x"], wide=True)
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [0.5, "NaN"] == [row["x"] for row in rows]
    session.export(tmp_path / "m.txt", view="records", format="jsonl")
    assert 3 + 2 + 3 + 3 == len((tmp_path / "m.txt").read_text().splitlines())


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv", "jsonl"])
def test_every_view_can_be_exported(session, tmp_path, ending):
    """Lists and bytes too: as JSON where a cell has no other form."""
    from aggregator.offline.database import VIEWS

    for view in VIEWS:
        rows = session.export(tmp_path / f"{view}.{ending}", view=view)
        assert session.sql(f"select count(*) as n from {view}")["n"].to_pylist() == [rows]
    with (tmp_path / f"tensors.{ending}").open("rb") as file:
        data = file.read()
    if ending == "csv":
        rows = list(csv.DictReader(data.decode().splitlines()))
        assert [[1.0, None], [2.0, None], [3.0, None]] == [json.loads(row["dense"]) for row in rows]


def test_keys_and_steps_of_any_view(session, tmp_path):
    """Globs and bounds choose rows."""
    path = tmp_path / "r.parquet"
    assert 2 == session.export(path, "a*", view="records", since=1)
    assert ["a,b"] * 2 == parquet.read_table(path)["key"].to_pylist()
    assert 2 == session.export(path, ["lr"], view="commits", until=1)


def test_twice_is_the_same_bytes(run, tmp_path):
    """All 2000 steps are there, the same each time (report f1)."""
    leader = run.producer()
    for step in range(2000):
        leader.commit(step, {"x": math.sin(step)}, time=step, leader=True)
    session = run.open()
    for ending in ("csv", "parquet", "jsonl", "arrow"):
        first, second = tmp_path / f"1.{ending}", tmp_path / f"2.{ending}"
        assert 2000 == session.export(first) == session.export(second)
        assert first.read_bytes() == second.read_bytes()
    assert [math.sin(step) for step in range(2000)] == session.metrics("x")["value"].to_pylist()


def test_runs_of_unequal_length_keep_all_their_steps(run, tmp_path):
    """Joining 521 steps with 516 gives 521 rows, five of them null (report f11)."""
    with RunBuilder(tmp_path / "other") as other:
        for one, steps in ((run, 521), (other, 516)):
            leader = one.producer()
            for step in range(steps):
                leader.commit(step, {"x": float(step)}, time=step, leader=True)
    session = run.open(tmp_path / "other")
    assert 521 + 516 == session.metrics("x").num_rows
    joined = session.sql("""
        select step, a.value as a, b.value as b
        from (from metrics where run = 'run') a
        full join (from metrics where run = 'other') b using (step, key)
        order by step
    """)
    assert (521, 5) == (joined.num_rows, joined["b"].null_count)
    pivoted = session.sql("pivot metrics on run using first(value) group by step order by step")
    assert (521, 5, 0) == (pivoted.num_rows, pivoted["other"].null_count, pivoted["run"].null_count)


def test_tables_go_to_pandas_and_polars(session):
    """Answers are Arrow tables: pandas and polars take them where they are installed."""
    table = session.metrics("x", wide=True)
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    assert [0, 1] == table.to_pandas()["step"].tolist()
    assert isinstance(table.to_pandas(), pandas.DataFrame)
    frame = polars.from_arrow(session.metrics(["x", "lr"], wide=True))
    assert [None, None, True] == [
        None if v is None else True for v in frame["x"].is_null().replace(False, None)
    ]
    assert [False, True, None] == frame["x"].is_nan().to_list()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("m.xlsx", {}, r"expected a file ending in .parquet, .*, or a format, got .*m.xlsx"),
        ("m.csv", {"format": "excel"}, "expected a format of parquet, arrow, csv, jsonl, got 'excel'"),
        ("m.csv", {"view": "metric"}, "expected a view, got 'metric'; near: 'metrics'"),
        ("m.csv", {"keys": "y"}, "expected a committed metric, got 'y'; there are 8, none of them near"),
        (
            "m.csv",
            {"keys": "y", "view": "records"},
            "expected a key in records, got 'y'; there are 4, none of them near",
        ),
        ("m.csv", {"keys": "y", "view": "windows"}, "expected a view with a column key, got 'windows'"),
        ("m.csv", {"wide": True, "view": "records"}, "expected wide and source for the view metrics only"),
        ("none/m.csv", {}, "expected a file in a directory that exists, got .*none/m.csv"),
        ("", {"format": "csv"}, "expected a file, got a directory"),
    ],
)
def test_wrong_exports_leave_nothing(session, tmp_path, name, options, message):
    """The error says what there is instead; no file is left."""
    keys = options.pop("keys", None)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(errors.QueryError, match=message):
        session.export(tmp_path / name, keys, **options)
    assert before == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run.json", "mine.csv", "events/mine.csv", "../link/run.json"])
def test_nothing_is_written_into_a_run(session, run, tmp_path, name):
    """A run's own files cannot be replaced, nor others put beside them, whatever the way there is."""
    (tmp_path / "link").symlink_to(run.path)
    before = sorted(run.path.rglob("*")), (run.path / "run.json").read_bytes()
    with pytest.raises(
        errors.QueryError, match=r"expected a file outside of runs, got one in the run .*run: "
    ):
        session.export(run.path / name, format="csv")
    assert before == (sorted(run.path.rglob("*")), (run.path / "run.json").read_bytes())


def test_a_failed_export_leaves_the_old_file(run, tmp_path):
    """What fails half-way replaces nothing."""
    leader = run.producer(payload=False)
    leader.tracker().scalar({"x": 1.0})
    leader.commit(0, run.export(leader, time=1), time=2, leader=True)
    path = tmp_path / "out.csv"
    path.write_text("old")
    with pytest.raises(errors.QueryError, match="the payload was off or pruned"):
        run.open().export(path, view="scalars")
    assert "old" == path.read_text()
    assert [path.name, "run"] == sorted(p.name for p in tmp_path.iterdir())


def test_two_exports_to_one_file_do_not_meet(tmp_path):
    """One that is made while another goes on has a file of its own; the last to end is there, whole."""
    path, schema = tmp_path / "out.jsonl", pa.schema({"x": pa.int64()})

    def of(numbers, meanwhile=lambda: None):
        def batches():
            for number in numbers:
                yield pa.record_batch({"x": [number]}, schema)
                meanwhile()

        return pa.RecordBatchReader.from_batches(schema, batches())

    export.write(of([1, 2, 3], lambda: export.write(of([7]), path, "jsonl")), path, "jsonl")
    assert [1, 2, 3] == [json.loads(line)["x"] for line in path.read_text().splitlines()]
    assert [path] == list(tmp_path.iterdir())


def test_large_views_are_written_a_part_at_a_time(session, tmp_path, monkeypatch):
    """The payload streams through; the file is the same as from memory."""
    from aggregator import open_run
    from aggregator.offline import memory

    session.export(tmp_path / "whole.parquet", view="payload")
    monkeypatch.setattr(memory, "_HELD", 0)
    monkeypatch.setattr(memory, "_PIECE", 1)
    path = session._histories[0].reading.reader.run.path
    with open_run(path) as other:
        other.export(tmp_path / "parts.parquet", view="payload")
    whole, parts = (parquet.read_table(tmp_path / f"{name}.parquet") for name in ("whole", "parts"))
    assert repr(whole.to_pydict()) == repr(parts.to_pydict())
    assert isinstance(whole, pa.Table)
