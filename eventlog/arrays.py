"""The only door for tensors, arrays and numbers: check, detach, copy, widen, select.

Everything is duck-typed on what torch tensors offer, so that torch is never imported. What leaves this
module is numpy on the host, or a detached tensor on a device (see `device`). Whatever reading a value raises
leaves it as a RecordingError that names the key.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np

from .errors import RecordingError, RecordingTypeError, StepError
from .reduction import ReduceType, Spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    F = TypeVar("F", bound=Callable[..., Any])

MAX_STEP = 2**63 - 1
_WIDENED = {"float16", "bfloat16"}
_KEPT = {"float32", "float64"}
_NAME_OF = {np.dtype(name).char: name for name in _KEPT}
_TRANSFORMS = "record outside of torch.func's transforms (vmap, grad, …)"
_WRAP_HINT = "a negative step is often a 32-bit counter that wrapped around; count in int64"


def _guarded(what: str) -> Callable[[F], F]:
    """Decorate what reads the value of a key: `what` is expected, and nothing but a RecordingError raised."""

    def decorate(read: F) -> F:
        @functools.wraps(read)
        def guarded(value: Any, key: str, *rest: Any) -> Any:
            try:
                return read(value, key, *rest)
            except (RecordingError, MemoryError):
                raise
            except Exception as error:
                kind = type(value).__name__
                raise RecordingTypeError(
                    f"expected {what} for {key!r}, got {kind}, which cannot be read: {error}"
                ) from error

        return guarded  # pyright: ignore[reportReturnType]

    return decorate


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # noqa: BLE001 - above all integers with more digits than Python prints
        return f"a very large {type(value).__name__}"


def as_int(value: Any, what: str) -> int:
    """Return an option that is an integer of 0 or more; the error names it as `what`."""
    try:
        number = operator.index(value)
    except TypeError:
        got = f"{type(value).__name__} {value!r}"
        raise RecordingTypeError(f"expected {what} (an integer), got {got}") from None
    if isinstance(value, bool) or number < 0:
        raise RecordingError(f"expected {what} of 0 or more, got {value!r}")
    return number


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is a whole number, numpy's included; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def as_step(value: Any) -> int:
    """Return a training step as int; takes ints, integral floats, numpy integers and 1-element tensors.

    Raises StepError for negative, fractional, non-finite or out-of-range values and for what is no number.
    """
    step = value
    if _is_masked(value):
        raise StepError("expected a step (an integer), got a masked one")
    if not isinstance(step, (int, float)) and hasattr(step, "item"):
        step = _item(value, StepError("expected one step", value))
    if isinstance(step, bool):
        raise StepError(f"expected a step (an integer), got bool {step}")
    if isinstance(step, float):
        if not step.is_integer():
            raise StepError(
                f"expected an integral step, got {step!r}; log other axes as a metric of their own"
            )
        step = int(step)
    try:
        step = operator.index(step)
    except TypeError:
        raise StepError(f"expected a step (an integer), got {type(value).__name__} {value!r}") from None
    if step < 0:
        raise StepError(f"expected a step of 0 or more, got {_shown(step)}; {_WRAP_HINT}")
    if step > MAX_STEP:
        raise StepError(f"expected a step that fits int64 (at most {MAX_STEP}), got {_shown(step)}")
    return step


def _item(value: Any, otherwise: Exception) -> Any:
    if math.prod(getattr(value, "shape", ())) != 1:
        raise otherwise
    return value.item()


def as_key(name: Any, what: str = "key") -> str:
    """Return a name without slashes around it; refuses what is no text, is empty, or no valid Unicode."""
    if not isinstance(name, str):
        raise RecordingTypeError(f"expected a {what} (str), got {type(name).__name__} {name!r}")
    stripped = name.strip("/")
    if not stripped:
        raise RecordingError(f"expected a non-empty {what}, got {name!r}")
    if not stripped.isascii():
        try:
            stripped.encode()
        except UnicodeEncodeError:  # lone surrogates, as in undecodable file names
            raise RecordingError(f"expected a {what} that is valid Unicode, got {name!r}") from None
    return stripped


def as_tracker(name: Any) -> str:
    """Return the name of a tracker without slashes around it; "" is that of the default one."""
    return name if isinstance(name, str) and not name else as_key(name, "tracker name")


def as_id(sample: str) -> str:
    """Return the id of a sample, which must be a valid text; slashes around it belong to it."""
    as_key(sample, "sample id")
    return sample


def as_reduce_type(given: Any) -> ReduceType:
    """Return our member for ours or for AReaL's own of the same name."""
    if isinstance(given, ReduceType):
        return given
    try:
        return ReduceType[given.name]
    except (AttributeError, KeyError):
        names = ", ".join(member.name for member in ReduceType)
        raise RecordingError(f"expected a ReduceType ({names}), got {given!r}") from None


def as_spread(word: str) -> Spread:
    """Return how values lie on ranks, by its word."""
    try:
        return Spread(word)
    except ValueError:
        words = ", ".join(repr(each.value) for each in Spread)
        raise RecordingError(f"expected a spread ({words}), got {word!r}") from None


def as_number(value: Any, key: str) -> float:
    """Return a recorded scalar as int or float: numbers, bool, numpy scalars, 1-element tensors of any dtype.

    A tensor on a device is read here, which waits for the device: hand over floats where that matters.
    """
    kind = type(value)
    if kind is float or kind is int:
        return value
    return _number(value, key)


@_guarded("a number")
def _number(value: Any, key: str) -> float:
    if _is_masked(value):
        raise RecordingTypeError(f"expected a number for {key!r}, got a masked one; leave out what is masked")
    if hasattr(value, "item") and hasattr(value, "shape"):
        shape = tuple(value.shape)
        value = _item(
            value, RecordingTypeError(f"expected one number for {key!r}, got an array of shape {shape}")
        )
    if isinstance(value, int):  # a bool too
        return int(value)
    try:
        if hasattr(type(value), "__float__") or hasattr(
            type(value), "__index__"
        ):  # no text, no buffer of one
            return float(value)
    except OverflowError:
        raise _too_large(value, key) from None
    except (TypeError, ValueError):
        pass
    raise RecordingTypeError(f"expected a number for {key!r}, got {type(value).__name__} {_shown(value)}")


def _is_masked(value: Any) -> bool:
    """Whether a value is one of numpy.ma: what it masks would be read as if it were there."""
    return isinstance(value, np.ndarray) and type(value) is not np.ndarray and hasattr(value, "filled")


def _too_large(value: Any, key: str) -> RecordingError:
    return RecordingError(f"expected a number that fits float64 for {key!r}, got {_shown(value)}")


def as_scalar(value: Any, key: str) -> float:
    """Return `as_number` as float64; refuses integers too large for one."""
    try:
        return float(as_number(value, key))
    except OverflowError:
        raise _too_large(value, key) from None


def as_metric(value: Any, key: str) -> float:
    """Return a committed number: an integer that fits int64 as it is, anything else as float64."""
    number = as_number(value, key)
    exact = isinstance(number, int) and -(2**63) <= number < 2**63
    return number if exact else as_scalar(number, key)


def as_increment(value: Any, key: str) -> int:
    """Return a counter's increment: an integer (or integral float) that fits int64."""
    number = as_number(value, key)
    if isinstance(number, float):
        if not number.is_integer():
            raise RecordingError(
                f"expected an integer for counter {key!r}, got {number!r}; use scalar for it"
            )
        number = int(number)
    if not -(2**63) <= number < 2**63:
        raise RecordingError(
            f"expected an increment that fits int64 for counter {key!r}, got {_shown(number)}"
        )
    return number


@functools.cache
def dtype_name(dtype: Any) -> str:
    """Return "float32", "bfloat16", "strided" … for a torch or numpy dtype, or a layout."""
    return str(dtype).removeprefix("torch.")


def on_host(array: Any) -> bool:
    """Whether the array's memory can be read by numpy."""
    if (on_cpu := getattr(array, "is_cpu", None)) is not None:  # a tensor
        return on_cpu
    device = getattr(array, "device", None)
    return device is None or device == "cpu" or getattr(device, "type", "cpu") == "cpu"


def _checked(value: Any, key: str) -> tuple[Any, tuple[int, ...], str]:
    """Return a non-empty array or tensor, detached, with its shape and the name of its dtype."""
    if type(value).__name__ == "DTensor":
        raise RecordingTypeError(f"expected a local tensor for {key!r}, got a DTensor; pass x.to_local()")
    if getattr(value, "is_nested", False):
        hint = "pass x.to_padded_tensor(0.0) and a mask of its shape"
        raise RecordingTypeError(f"expected a dense tensor for {key!r}, got a nested one; {hint}")
    try:
        shape, name = tuple(value.shape), dtype_name(value.dtype)
    except (AttributeError, TypeError):
        return _checked(_like(value, key), key)
    if 0 in shape:
        raise RecordingError(f"expected a non-empty tensor for {key!r}, got shape {shape}")
    if _is_masked(value):
        hint = "pass x.filled(0), and ~numpy.ma.getmaskarray(x) in its denominator"
        raise RecordingTypeError(f"expected a plain array for {key!r}, got a masked one; {hint}")
    if isinstance(value, np.ndarray):
        plain = np.asarray(value)  # not a matrix, which has two dimensions whatever is taken of it
        native = plain.astype(plain.dtype.newbyteorder("="), copy=False)
        return native, shape, dtype_name(native.dtype)
    if not hasattr(value, "layout"):  # no torch tensor either
        return _checked(_like(value, key), key)
    if dtype_name(value.layout) != "strided":
        raise RecordingError(f"expected a dense tensor for {key!r}, got {value.layout}; pass x.to_dense()")
    if value.is_meta:
        raise RecordingError(f"expected a tensor with data for {key!r}, got one on the meta device")
    if _is_tensor(type(value)):
        _check_memory(value, key)
    return (value.resolve_neg() if value.is_neg() else value).detach(), shape, name


def _check_memory(tensor: Any, key: str) -> None:
    """Refuse what stands for other tensors, which would outlive its transform on a device."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        raise RecordingTypeError(
            f"expected a tensor with data for {key!r}, got one without; {_TRANSFORMS}"
        ) from None


def _like(value: Any, key: str) -> NDArray[Any]:
    """Return what numpy makes of an array-like (`__array__` or `__dlpack__`)."""
    why = "pass torch.as_tensor(x)"
    try:
        if hasattr(value, "__array__"):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        why = f"which numpy cannot read: {error}"
    raise RecordingTypeError(f"expected a tensor for {key!r}, got {type(value).__name__}; {why}")


@_guarded("a bool tensor")
def as_mask(value: Any, key: str) -> Any:
    """Return a denominator: a detached boolean array, a numpy view where the host can read it."""
    array, _, name = _checked(value, key)
    if name != "bool":
        raise RecordingError(f"expected a bool tensor for denominator {key!r}, got {name}")
    return _host_view(array)


@functools.cache
def _is_tensor(kind: type) -> bool:
    """Whether a type is torch.Tensor itself: no subclass has a say in what its methods do."""
    return kind.__module__ == "torch" and kind.__qualname__ == "Tensor"


def as_values(value: Any, key: str, shape: tuple[int, ...]) -> tuple[Any, str]:
    """Return a stat's values and the dtype they came in: detached, float32 or float64, on the host a view.

    Half types are widened to float32, on a device when the window is settled: sums kept in bfloat16 stop
    growing at 256.
    """
    try:  # the common case, in fewer steps
        if _is_tensor(type(value)) and on_host(value):
            array = (value.detach() if value.requires_grad else value).numpy()
            if array.shape == shape and (name := _NAME_OF.get(array.dtype.char)):
                return array, name
    except (RuntimeError, TypeError):  # of a type or layout that numpy has not; negated only by a bit; …
        pass
    return _values(value, key, shape)


@_guarded("a floating tensor")
def _values(value: Any, key: str, shape: tuple[int, ...]) -> tuple[Any, str]:
    array, found, name = _checked(value, key)
    if found != shape:
        raise RecordingError(f"expected shape {shape} (that of its denominator) for {key!r}, got {found}")
    if name in _WIDENED:
        if on_host(array):
            with np.errstate(all="ignore"):  # of a signalling NaN, whatever numpy is told to do
                array = array.astype(np.float32) if isinstance(array, np.ndarray) else array.float()
    elif name not in _KEPT:
        how = "x.astype(np.float32)" if isinstance(array, np.ndarray) else "x.float()"
        raise RecordingError(
            f"expected a floating tensor for {key!r}, got {name}; convert it ({how}) or use counter()"
        )
    return _host_view(array), name


def _host_view(array: Any) -> Any:
    """Return a numpy view of what the host can read, anything else as it is."""
    if isinstance(array, np.ndarray) or not on_host(array):
        return array
    return array.numpy()


def select_into(row: NDArray[Any], values: NDArray[Any], index: NDArray[np.integer] | None) -> None:
    """Copy the selected values, in order, into `row`; index None selects all."""
    if index is None:
        row.reshape(values.shape)[...] = values
    else:
        values.take(index, None, row, "clip")  # clip: the row is written without a buffer
