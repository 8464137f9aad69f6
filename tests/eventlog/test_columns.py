"""Arrow columns without `pa.array`: the same columns, and pandas is left alone."""

import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlog.columns import Form, Table, Valid, lists_of, of_words
from eventlog.schema import COMMITS, PAYLOAD, RECORDS

INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
OF_KIND = {
    pa.int64(): INTEGERS,
    pa.timestamp("us", "UTC"): st.integers(0, 2**50),
    pa.float64(): FLOATS,
    pa.bool_(): st.booleans(),
    pa.large_string(): st.text(st.characters(exclude_categories=["Cs"])),
    pa.large_binary(): st.binary(),
    pa.large_list(pa.int64()): st.lists(INTEGERS, max_size=4),
    pa.large_list(pa.large_string()): st.lists(st.text("aé☃"), max_size=3),
}


def read(column, kind, n):
    """Return the column as a reader gets it; its message is what Arrow writes of that."""
    message = Table(pa.schema([("c", kind)])).message(n, {"c": column})
    array = message.batch()["c"]
    array.validate(full=True)
    if n:
        assert message.batch().serialize().to_pybytes() == b"".join(message.parts)
    return array


@pytest.mark.parametrize("kind", OF_KIND, ids=str)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_column_is_what_arrow_would_make(kind, data):
    """Whatever is in a list, nulls too, becomes the column that `pa.array` makes of it, and a valid one."""
    values = data.draw(st.lists(st.none() | OF_KIND[kind], max_size=20))
    assert pa.array(values, kind).equals(read(Form(kind).of(values), kind, len(values)))


@settings(deadline=None)
@given(st.lists(st.tuples(INTEGERS, st.booleans()), max_size=20))
def test_an_array_may_have_nulls(pairs):
    """`there` says which numbers of an array are."""
    values, there = np.array([v for v, _ in pairs], np.int64), np.array([t for _, t in pairs], np.bool_)
    found = read(Form(pa.int64()).of(values, there), pa.int64(), len(pairs))
    assert [value if valid else None for value, valid in pairs] == found.to_pylist()


def test_arrays_are_not_copied():
    """Many numbers of the column's own type lie where they lay."""
    values = np.arange(10_000, dtype=np.float32)
    (data,) = Form(pa.float32()).of(values).body
    assert values.ctypes.data == data.address


def test_every_type_of_the_format_is_covered():
    """There is no column of the format that this test file does not make."""
    floats = {pa.large_list(pa.float32()), pa.large_list(pa.float64())}
    assert {f.type for schema in (RECORDS, PAYLOAD, COMMITS) for f in schema} <= set(OF_KIND) | floats


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_lists_of_floats_are_joined_items(kind):
    """Lengths and joined items make the lists, null where they are not valid."""
    rows = lists_of(np.array([2, 0, 3, 0]), Valid.of(np.array([True, True, True, False])))
    found = read(Form(pa.large_list(kind)).lists(rows, np.arange(5.0)), pa.large_list(kind), 4)
    assert [[0.0, 1.0], [], [2.0, 3.0, 4.0], None] == found.to_pylist()


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_binary_is_lists_of_bytes(values):
    """Lengths and joined bytes make a column of binary."""
    rows, items = lists_of(np.array([*map(len, values)], np.int64)), np.frombuffer(b"".join(values), np.uint8)
    found = read(Form(pa.large_binary()).lists(rows, items), pa.large_binary(), len(values))
    assert values == found.to_pylist()


@given(st.lists(st.booleans(), max_size=40) | st.lists(st.booleans(), min_size=1023, max_size=1026))
def test_which_rows_are_null_is_counted_and_packed(there):
    """However many rows there are, the bitmap says of each whether it is there; it is empty when all are."""
    valid = Valid.of(np.array(there, np.bool_))
    assert there.count(False) == valid.nulls
    bits = np.unpackbits(np.frombuffer(valid.bitmap, np.uint8), count=len(there), bitorder="little")
    assert (there if valid.nulls else []) == (bits.astype(bool).tolist() if valid.nulls else [])
    assert bool(valid.nulls) == bool(valid.bitmap)


def test_lists_are_made_once():
    """A list that equals the one before is the same column, also after the list was changed."""
    form, values = Form(pa.large_list(pa.int64())), [(1, 2), (3,)]
    found = form.again(values)
    assert found is form.again([(1, 2), (3,)])
    values.append(())
    assert [[1, 2], [3], []] == read(form.again(values), form.kind, 3).to_pylist()
    assert [[1, 2], [3]] == read(found, form.kind, 2).to_pylist()


@pytest.mark.parametrize("together", [(), ("key", "value", "value_int")])
def test_a_message_has_every_column(together):
    """Columns that are not given are null, those that come together too, whatever the number of rows."""
    table = Table(COMMITS, *[together] if together else [])
    for n in (3, 0, 5):
        given = {"commit": list(range(n)), "tags": ["a"] * n}
        batch = table.message(n, table.of(given)).batch()
        batch.validate(full=True)
        assert batch.schema.equals(COMMITS)
        assert [{**dict.fromkeys(COMMITS.names), "commit": i, "tags": "a"} for i in range(n)] == (
            batch.to_pylist()
        )
    with pytest.raises(TypeError, match="expected a type of lists, got int64"):
        table["commit"].lists(lists_of(np.array([1])), np.array([1]))


def test_columns_that_come_together_are_given_as_one():
    """Neighbours may be made at once: numbers of eight bytes as the rows of a matrix."""
    table = Table(COMMITS, ("epoch", "epoch_step", "global_step"))
    numbers = np.arange(6).reshape(3, 2)
    batch = table.message(2, {"epoch": of_words(numbers)}).batch()
    assert numbers.tolist() == [batch[name].to_pylist() for name in ("epoch", "epoch_step", "global_step")]
    assert [None, None] == batch["sub_index"].to_pylist()


def test_a_program_that_ends_at_once_loses_nothing_where_pandas_is_installed(tmp_path):
    """The first window may be encoded while the interpreter shuts down: pandas is not loaded for it."""
    pytest.importorskip("pandas")
    code = f"""
    import atexit, sys
    atexit.register(lambda: print("pandas" in sys.modules, log.losses()))  # registered first, called last
    import eventlog, numpy
    log = eventlog.start({str(tmp_path)!r})
    recorder = eventlog.Recorder()
    recorder.denominator({{"m": numpy.ones((2, 3), bool)}})
    recorder.stat("m", {{"x": numpy.ones((2, 3))}})
    recorder.scalar({{"s": 1}})
    log.write(eventlog.drain([recorder]).frame)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "False []" == done.stdout.strip()


def test_a_log_that_follows_a_killed_one_leaves_pandas_alone(tmp_path):
    """To look at what the process before it left needs no pandas, which takes a second to load."""
    pytest.importorskip("pandas")
    code = (
        "import os, sys, eventlog; log = eventlog.start(sys.argv[1]); log.commit(0, 0, 0); "
        "print('pandas' in sys.modules, flush=True); os.kill(os.getpid(), 9)"
    )
    found = [
        subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, check=False)
        for _ in range(2)
    ]
    assert [b"False\n"] * 2 == [done.stdout for done in found]
