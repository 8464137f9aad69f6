"""The door: what is taken, what is refused, and what the message says."""

import re
from array import array
from fractions import Fraction

import numpy as np
import pytest
import torch

from eventlog import arrays
from eventlog.errors import RecordingError, RecordingTypeError, StepError


@pytest.mark.parametrize(
    "step", [7, 7.0, np.int32(7), np.int64(7), np.float32(7), torch.tensor(7), torch.tensor([7.0])]
)
def test_steps_are_taken_from_every_integer(step):
    """Ints, integral floats, numpy integers and one-element tensors are steps (reports a8, e12)."""
    assert arrays.as_step(step) == 7


def test_steps_beyond_32_bits_survive():
    """A step above 2**31 stays what it is (report a8)."""
    assert arrays.as_step(2**31 + 5) == 2**31 + 5


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (-1, "expected a step of 0 or more, got -1"),
        (np.int32(-1627389952), "32-bit counter that wrapped"),
        (3.5, "expected an integral step, got 3.5"),
        (float("nan"), "expected an integral step, got nan"),
        (2**63, "expected a step that fits int64"),
        ("3", "expected a step \\(an integer\\), got str '3'"),
        (None, "got NoneType None"),
        (True, "got bool True"),
        (np.bool_(True), "got bool True"),
        (torch.ones(2), "expected one step"),
    ],
)
def test_bad_steps_are_refused(step, message):
    """A negative, fractional, huge or non-numeric step is refused with expected and got (reports a8, e12)."""
    with pytest.raises(StepError, match=message):
        arrays.as_step(step)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float16(1.5), 1.5),
        (np.array([2.5]), 2.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor([[3]]), 3.0),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (30565379, 30565379.0),
        (2**70, 2.0**70),
    ],
)
def test_scalars_are_taken_from_every_number(value, number):
    """Numbers, bools, numpy scalars and one-element tensors of any dtype are taken (reports e2, e3, e10)."""
    assert arrays.as_scalar(value, "k") == number


@pytest.mark.parametrize(
    "value",
    [
        "nan",
        None,
        [1.0],
        b"1",
        bytearray(b"1"),
        memoryview(b"1"),
        array("b", b"1"),
        np.bytes_(b"1"),
        object(),
        torch.ones(2),
        1j,
    ],
)
def test_other_scalars_are_refused_naming_the_key(value):
    """What is no number raises a TypeError that names the key (report e2)."""
    with pytest.raises(RecordingTypeError, match=r"expected .*number for 'a/k', got"):
        arrays.as_scalar(value, "a/k")


def test_integers_beyond_float64_are_refused():
    """An integer too large for float64 is refused at the call, not at close (report e10)."""
    for number in (10**400, 10**5000, Fraction(10**400)):
        with pytest.raises(RecordingError, match="fits float64 for 'k'"):
            arrays.as_scalar(number, "k")


@pytest.mark.parametrize("number", [2**63, 10**5000, Fraction(10**400)], ids=["int64", "int", "fraction"])
def test_increments_beyond_int64_are_refused(number):
    """A counter's increment that int64 cannot hold is refused, however large, naming the key."""
    with pytest.raises(RecordingError, match=r"fits .* for .*'k'"):
        arrays.as_increment(number, "k")


def test_a_matrix_is_an_array():
    """A matrix of numpy is taken as what it holds, as mask and as values."""
    matrix = np.arange(3.0)[None].view(np.matrix)  # numpy warns where one is made
    values, _ = arrays.as_values(matrix, "k", (1, 3))
    row = np.empty(2)
    arrays.select_into(row, values, np.array([0, 2]))
    assert (np.ndarray, [0.0, 2.0]) == (type(values), row.tolist())
    assert np.ndarray is type(arrays.as_mask(matrix > 1, "m"))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3), "expected a bool tensor for denominator 'm', got float32"),
        (torch.ones(0, dtype=torch.bool), r"expected a non-empty tensor for 'm', got shape \(0,\)"),
        ([True], "expected a tensor for 'm', got list"),
    ],
)
def test_bad_masks_are_refused(mask, message):
    """A denominator must be a non-empty bool tensor; the message names key and what came."""
    with pytest.raises(ValueError, match=message):
        arrays.as_mask(mask, "m")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(3, dtype=torch.int64), "expected a floating tensor for 'k', got int64; convert it"),
        (torch.ones(2), r"expected shape \(3,\) \(that of its denominator\) for 'k', got \(2,\)"),
        (torch.ones(0), r"non-empty tensor for 'k', got shape \(0,\)"),
        (3.0, "expected a tensor for 'k', got float"),
        (torch.ones(3, device="meta"), "expected a tensor with data for 'k', got one on the meta device"),
        (torch.ones(3).to_sparse(), "expected a dense tensor for 'k', got torch.sparse_coo; pass x.to_dense"),
    ],
)
def test_bad_values_are_refused(values, message):
    """A stat must be floating and of its denominator's shape."""
    with pytest.raises(ValueError, match=message):
        arrays.as_values(values, "k", (3,))


MASKED = np.ma.array([1.0, 999.0], mask=[False, True])


@pytest.mark.parametrize(
    "read",
    [
        lambda: arrays.as_values(MASKED, "k", (2,)),
        lambda: arrays.as_mask(MASKED > 0, "k"),
        lambda: arrays.as_scalar(np.ma.masked, "k"),
        lambda: arrays.as_scalar(MASKED[1:], "k"),
        lambda: arrays.as_increment(np.ma.masked, "k"),
    ],
)
def test_masked_arrays_are_refused(read):
    """What lies under their masks would be counted; the message says what to pass instead."""
    with pytest.raises(TypeError, match=r"for 'k', got a masked one; (pass x.filled|leave out)"):
        read()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_widened(dtype):
    """Half types become float32 when they are recorded (report c10)."""
    assert arrays.as_values(torch.ones(3, dtype=dtype), "k", (3,))[0].dtype == np.float32


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(3.0).expand(3, 3)[:, :2],
        torch.arange(6.0, requires_grad=True).reshape(3, 2),
        torch.arange(6.0).reshape(3, 2).numpy(),
        torch.arange(6, dtype=torch.float64).reshape(3, 2),
    ],
)
def test_any_layout_is_selected_in_order(values):
    """Non-contiguous, expanded, graph-bound, numpy and float64 inputs give the same selection."""
    index = np.array([0, 3, 5], np.int32)
    taken, _ = arrays.as_values(values, "k", (3, 2))
    row = np.empty(3, taken.dtype)
    arrays.select_into(row, taken, index)
    expected = np.asarray(values.detach() if hasattr(values, "detach") else values).reshape(-1)[index]
    assert expected.tolist() == row.tolist()


def test_a_distributed_tensor_is_refused_by_name():
    """A DTensor is refused with the way out."""

    class DTensor:  # only the name counts: the real one needs a device mesh
        pass

    with pytest.raises(RecordingTypeError, match=re.escape("pass x.to_local()")):
        arrays.as_values(DTensor(), "k", (3,))
