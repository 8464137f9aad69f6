"""The matrix of inputs: everything that holds floating values or truths is taken, and means the same."""

import warnings

import numpy as np
import pyarrow as pa
import pytest
import torch

from eventlog import Recorder, drain, moments
from eventlog.errors import RecordingError, RecordingTypeError

VALUES = [0.5, -1.0, 2.0, 0.25]  # exact in every floating type
MASK = [True, False, True, True]
BASE = torch.tensor(VALUES)


class Array:
    """Knows __array__ and nothing else."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


class Shaped(Array):
    """Says what it holds, as columns of tables and arrays of other libraries do."""

    @property
    def shape(self):
        return (len(self.values),)

    @property
    def dtype(self):
        return np.array(self.values).dtype


class Capsule:
    """Knows the DLPack protocol and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


INPUTS = {
    "float32": BASE,
    "float64": BASE.double(),
    "half": BASE.half(),
    "bfloat16": BASE.bfloat16(),
    "non-contiguous": torch.stack([BASE, BASE * 9], dim=1)[:, 0],
    "reversed": BASE.flip(0).flip(0),
    "requires-grad": BASE.clone().requires_grad_(),
    "of a graph": BASE.clone().requires_grad_() * 1,
    "parameter": torch.nn.Parameter(BASE.clone()),
    "numpy": np.array(VALUES, np.float32),
    "numpy half": np.array(VALUES, np.float16),
    "numpy float64": np.array(VALUES),
    "numpy strided": np.array([VALUES, VALUES], np.float32).T[:, 1],
    "numpy big-endian": np.array(VALUES, ">f4"),
    "numpy big-endian half": np.array(VALUES, ">f2"),
    "negated by a bit": torch.complex(torch.zeros(4), -BASE).conj().imag,
    "numpy read-only": np.broadcast_to(np.array(VALUES, np.float32), (1, 4))[0],
    "arrow": pa.array(VALUES),
    "__array__": Array(VALUES),
    "with a dtype": Shaped(VALUES),
    "__dlpack__": Capsule(BASE),
}
MASKS = {
    "torch": torch.tensor(MASK),
    "non-contiguous": torch.tensor([MASK, MASK]).T[:, 0],
    "numpy": np.array(MASK),
    "with a dtype": Shaped(MASK),
    "__array__": Array(MASK),
}


@pytest.mark.parametrize("name", INPUTS)
def test_every_kind_of_values_means_the_same(name):
    """Half, bfloat16, float64, strided, graph-bound, numpy and array-like values: the same numbers."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(MASK)})
    recorder.stat("m", {"x": INPUTS[name]})
    drained = drain([recorder])
    (row,) = (row for spec, row in zip(drained.specs, drained.rows, strict=True) if spec.key == "x")
    assert (3, 2.75, 0.25, 2.0) == (
        row[moments.COUNT], moments.total_of(row), moments.least(row), moments.greatest(row)
    )  # fmt: skip
    assert [0.5, 2.0, 0.25] == drained.frame.pieces[1].values().reshape(-1).tolist()


@pytest.mark.parametrize("name", MASKS)
def test_every_kind_of_mask_means_the_same(name):
    """Masks may be torch tensors, numpy arrays and array-likes of truths."""
    recorder = Recorder()
    recorder.denominator({"m": MASKS[name]})
    recorder.stat("m", {"x": BASE})
    drained = drain([recorder])
    assert [3, 3] == [int(row[moments.COUNT]) for row in drained.rows]
    assert [0.5, 2.0, 0.25] == drained.frame.pieces[1].values().reshape(-1).tolist()


def test_expanded_values_and_masks():
    """Broadcast views count with every element they stand for."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor([True, False, True]).expand(4, 3)})
    recorder.stat("m", {"x": torch.arange(4.0)[:, None].expand(4, 3)})
    mask, values = drain([recorder]).rows
    assert (8, 8, 12.0) == (mask[moments.INT_SUM], values[moments.COUNT], moments.total_of(values))


def test_values_without_dimensions():
    """A 0-dimensional mask and value are one element."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(True), "np": np.array(False)})
    recorder.stat("m", {"x": torch.tensor(0.5, dtype=torch.bfloat16)})
    recorder.stat("np", {"y": np.array(0.5)})
    assert [1, 0, 1, 0] == [int(row[moments.COUNT]) for row in drain([recorder]).rows[[0, 2, 1, 3]]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            BASE.int(),
            r"expected a floating tensor for 'x', got int32; convert it \(x.float\(\)\) or use counter",
        ),
        (BASE.long(), r"got int64; convert it \(x.float\(\)\) or use counter"),
        (BASE.byte().numpy(), r"got uint8; convert it"),
        (BASE.bool(), r"got bool; convert it"),
        (BASE.cfloat(), r"got complex64; convert it"),
        (Shaped([1, 2, 3, 4]), r"got int64; convert it"),
        (np.array(["a", "b", "c", "d"]), r"expected a floating tensor for 'x', got <U1"),
    ],
)
def test_what_is_not_floating_is_refused_with_the_way_out(values, message):
    """Integers, truths, complex numbers and texts are refused at the call, saying what to do."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(MASK)})
    with pytest.raises(RecordingError, match=message):
        recorder.stat("m", {"x": values})


class Refusing:
    """An array on another device: numpy may not read it."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("implicit conversion is not allowed")


class Far(Capsule):
    """A DLPack tensor on a device that numpy cannot read."""

    def __dlpack__(self, **_):
        raise BufferError("unsupported device")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (VALUES, r"expected a tensor for 'x', got list; pass torch.as_tensor\(x\)"),
        (0.5, r"expected a tensor for 'x', got float; pass torch.as_tensor"),
        (None, r"got NoneType"),
        (Refusing(), r"got Refusing; which numpy cannot read: implicit conversion is not allowed"),
        (Far(BASE), r"got Far; which numpy cannot read: unsupported device"),
    ],
)
def test_what_is_no_array_is_a_type_error(values, message):
    """Lists, numbers and arrays that numpy cannot read are refused with the way out."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(MASK)})
    with pytest.raises(RecordingTypeError, match=message):
        recorder.stat("m", {"x": values})


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def jagged():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize("make", [nested, jagged])
def test_nested_tensors_are_refused_with_the_way_out(make):
    """What has no one shape is no stat, no mask and no number."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(MASK)})
    with pytest.raises(RecordingTypeError, match=r"dense tensor for 'x', got a nested one; pass x.to_padded"):
        recorder.stat("m", {"x": make()})
    with pytest.raises(RecordingTypeError, match=r"dense tensor for 'm', got a nested one"):
        recorder.denominator({"m": make()})
    with pytest.raises(RecordingTypeError, match=r"number for 'x', got"):
        recorder.scalar({"x": make()})


def test_what_is_inside_a_transform_is_refused():
    """Inside of vmap a tensor stands for many: there is nothing to record yet."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(MASK)})

    def stat(row):
        with pytest.raises(
            RecordingTypeError, match=r"data for 'x', got one without; record outside of torch"
        ):
            recorder.stat("m", {"x": row})
        with pytest.raises(RecordingTypeError, match=r"data for 'm', got one without"):
            recorder.denominator({"m": row > 0})
        with pytest.raises(RecordingTypeError, match=r"number for 'x', got Tensor, which cannot be read"):
            recorder.scalar({"x": row[0]})
        return row

    torch.vmap(stat)(torch.ones(2, 4))


def test_numpy_is_told_how_numpy_converts():
    """The way out is that of the library that made the values."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(MASK)})
    with pytest.raises(
        RecordingError, match=r"got int64; convert it \(x.astype\(np.float32\)\) or use counter"
    ):
        recorder.stat("m", {"x": np.arange(4)})


class Broken:
    """Fails when it is looked at."""

    @property
    def shape(self):
        raise LookupError("no such thing")


def test_whatever_reading_a_value_raises_names_the_key():
    """An error of another library is ours, and has the other one as its cause."""
    recorder = Recorder()
    recorder.denominator({"m": torch.tensor(MASK)})
    for call in (recorder.denominator, lambda values: recorder.stat("m", values)):
        with pytest.raises(RecordingTypeError, match=r" for 'x', got Broken, .*: no such thing") as caught:
            call({"x": Broken()})
        assert isinstance(caught.value.__cause__, LookupError)
