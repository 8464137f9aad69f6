"""Arrow columns without `pa.array`: the same columns, and pandas is left alone."""

import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlog.columns import Form, Table
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


@pytest.mark.parametrize("kind", OF_KIND, ids=str)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_column_is_what_arrow_would_make(kind, data):
    """Whatever is in a list, nulls too, becomes the column that `pa.array` makes of it, and a valid one."""
    values = data.draw(st.lists(st.none() | OF_KIND[kind], max_size=20))
    found = Form(kind).of(values)
    found.validate(full=True)
    assert pa.array(values, kind).equals(found)


@settings(deadline=None)
@given(st.lists(st.tuples(INTEGERS, st.booleans()), max_size=20))
def test_an_array_may_have_nulls(pairs):
    """`valid` says which numbers of an array are there."""
    values, valid = np.array([v for v, _ in pairs], np.int64), np.array([t for _, t in pairs], np.bool_)
    found = Form(pa.int64()).of(values, valid)
    assert [value if there else None for value, there in pairs] == found.to_pylist()


def test_arrays_are_not_copied():
    """Numbers of the column's own type lie where they lay."""
    values = np.arange(10, dtype=np.float32)
    assert values.ctypes.data == Form(pa.float32()).of(values).buffers()[1].address


def test_every_type_of_the_format_is_covered():
    """There is no column of the format that this test file does not make."""
    floats = {pa.large_list(pa.float32()), pa.large_list(pa.float64())}
    assert {f.type for schema in (RECORDS, PAYLOAD, COMMITS) for f in schema} <= set(OF_KIND) | floats


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_lists_of_floats_are_joined_items(kind):
    """Lengths and joined items make the lists, null where they are not valid."""
    lengths, valid = np.array([2, 0, 3, 0]), np.array([True, True, True, False])
    found = Form(pa.large_list(kind)).lists(lengths, np.arange(5.0), valid)
    found.validate(full=True)
    assert [[0.0, 1.0], [], [2.0, 3.0, 4.0], None] == found.to_pylist()


def test_lists_are_made_once():
    """A list that equals the one before is the same column, also after the list was changed."""
    form, values = Form(pa.large_list(pa.int64())), [(1, 2), (3,)]
    found = form.again(values)
    assert found is form.again([(1, 2), (3,)])
    values.append(())
    assert [[1, 2], [3], []] == form.again(values).to_pylist()
    assert [[1, 2], [3]] == found.to_pylist()


def test_a_batch_has_every_column():
    """Columns that are not given are null, whatever their number of rows was before."""
    table = Table(COMMITS)
    for n in (3, 0, 5):
        batch = table.batch(n, {"commit": list(range(n)), "key": ["a"] * n})
        batch.validate(full=True)
        assert batch.schema.equals(COMMITS)
        assert [None] * n == batch["value"].to_pylist()
    with pytest.raises(TypeError, match="expected a type of lists, got int64"):
        table["commit"].lists(np.array([1]), np.array([1]))


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
