"""What a batch says of itself besides its masks: where its sequences lie, whose they are, and its tags.

Sequences are the rows of a mask, or, in a packed batch, the stretches between the running totals of their
lengths (`cu_seqlens`, as variable-length attention takes them: 0, n0, n0 + n1, …, number of elements).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arrays
from .device import Held
from .errors import RecordingError, RecordingTypeError
from .tags import as_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_EXPECTED = "expected cu_seqlens (integers 0, n0, n0 + n1, … in one dimension)"


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What was said along with masks; `of` says it of one of them.

    Attributes: `bounds`, where each sequence begins in the flattened mask, and where the last one ends (on
    their device until the export); `sample_ids`, one a sequence; `tags`, a JSON object.
    """

    bounds: NDArray[np.int64] | Held | None = None
    sample_ids: tuple[str, ...] | None = None
    tags: str | None = None

    @classmethod
    def read(cls, cu_seqlens: Any = None, sample_ids: Any = None, tags: Any = None) -> Batch:
        """Check what a caller gave; a RecordingError says what of it is wrong."""
        return cls(
            None if cu_seqlens is None else _bounds(cu_seqlens),
            None if sample_ids is None else _ids(sample_ids),
            None if tags is None else as_json(tags),
        )

    def of(self, mask: Any, key: str) -> Batch:
        """Return what holds for a mask: packed, with one element a sequence, or one row a sequence."""
        if self is PLAIN:
            return self
        shape = tuple(mask.shape)
        elements = int(np.prod(shape, dtype=np.int64))
        bounds, sequences = self.bounds, shape[0] if shape else 1
        if bounds is not None:
            sequences = len(bounds) - 1
            if isinstance(bounds, np.ndarray):
                bounds = _fitting(bounds, elements, key)
        if self.sample_ids is not None and len(self.sample_ids) != sequences:
            raise RecordingError(
                f"expected {sequences} sample ids (one a sequence) for {key!r}, got {len(self.sample_ids)}"
            )
        return replace(self, bounds=bounds)

    def settled(self, bounds: NDArray[np.int64], elements: int, key: str) -> Batch:
        """Return it with bounds that lay on a device, which are checked only now."""
        return replace(self, bounds=_fitting(_on_host(bounds), elements, key))

    def selected(self, packed: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Count what a mask selects of each sequence; None where it has one element a sequence.

        `packed` holds the mask a bit per element, lowest bit first.
        """
        if self.bounds is None and len(shape) <= 1:
            return None
        bits = np.unpackbits(packed, count=math.prod(shape), bitorder="little")
        if not isinstance(self.bounds, np.ndarray):
            return np.add.reduce(bits.reshape(shape[0], -1), axis=1, dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(bits, dtype=np.int64)])
        return np.diff(before[self.bounds])


PLAIN = Batch()  # of a mask of which nothing was said


def parted(masks: Mapping[str, Any], about: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part masks from what is said of them: a bool tensor under an option's name is a mask of that name."""
    named = {name: value for name, value in about.items() if _is_mask(value)}
    return {**masks, **named}, {name: value for name, value in about.items() if name not in named}


def _is_mask(value: Any) -> bool:
    return arrays.dtype_name(getattr(value, "dtype", None)) == "bool"


def _bounds(given: Any) -> NDArray[np.int64] | Held:
    try:
        return _read_bounds(given)
    except RecordingError:
        raise
    except Exception as error:
        got = f"{type(given).__name__}, which cannot be read: {error}"
        raise RecordingTypeError(f"{_EXPECTED}, got {got}") from error


def _read_bounds(given: Any) -> NDArray[np.int64] | Held:
    array: Any = np.asarray(given) if _is_list(given) else given
    name = arrays.dtype_name(getattr(array, "dtype", f"a {type(given).__name__}"))
    if not name.startswith(("int", "uint")):
        raise RecordingTypeError(f"{_EXPECTED}, got {name}")
    if array.ndim != 1 or len(array) < 2:
        raise RecordingError(f"{_EXPECTED}, got shape {tuple(array.shape)}")
    if arrays.on_host(array):
        return _on_host(np.array(array.tolist(), np.int64))
    return Held(array.detach())


def _is_list(given: Any) -> bool:
    """Whether it is a list, or stands for one, as a range does."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray, memoryview))


def _on_host(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    if bounds[0] != 0:
        raise RecordingError(f"{_EXPECTED}, got {bounds[0]} as the first")
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])
    if len(falls):
        at = int(falls[0]) + 1
        raise RecordingError(f"{_EXPECTED}, got {bounds[at]} behind {bounds[at - 1]} at {at}")
    return bounds


def _fitting(bounds: NDArray[np.int64], elements: int, key: str) -> NDArray[np.int64] | None:
    """Return where sequences lie in a mask; None where each has one element, and the mask itself says it all.

    With sequences of no elements both may be: then they are packed, as the bounds say.
    """
    if bounds[-1] == elements:
        return None if (np.diff(bounds) == 1).all() else bounds
    if elements == len(bounds) - 1:
        return None
    raise RecordingError(
        f"expected cu_seqlens that end at {elements}, the number of elements of {key!r} (or a mask with "
        f"one element for each of the {len(bounds) - 1} sequences), got {bounds[-1]}"
    )


def _ids(given: Any) -> tuple[str, ...]:
    expected = "expected sample_ids as a list of str or int"
    if hasattr(given, "tolist") and arrays.on_host(given):
        given = given.tolist()
    if not _is_list(given):
        raise RecordingTypeError(f"{expected}, got {type(given).__name__}")
    for each in given:
        if not isinstance(each, (str, int)) or isinstance(each, bool):
            raise RecordingTypeError(f"{expected}, got {type(each).__name__} {each!r:.80} in it")
    return tuple(arrays.as_id(str(each)) for each in given)
