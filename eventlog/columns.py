"""Columns of numpy arrays and Python lists, laid out as an Arrow message holds them, and messages of them.

Arrow's own arrays and batches take several times as long to make as their bytes do, and `pa.array` loads
pandas where it is installed: half a second on the writer's thread, and an error when the first window of a
short program is encoded while the interpreter shuts down.
"""

from __future__ import annotations

import struct
from functools import lru_cache, partial, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from .message import Message, head
from .parts import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from .parts import Part

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

_COPIED: Final = 4096  # numbers of fewer bytes are copied at once: cheaper than to keep hold of them
_FEW: Final = 1024  # rows: what is made of them is remembered
_KEPT: Final = 64  # how much of it
_ALIGNED: Final = 8
T = TypeVar("T")
_longs: Final = [struct.Struct(f"<{n}q").pack for n in range(4)]  # a column has at most three buffers
_pair: Final = _longs[2]


class Columns(NamedTuple):
    """One column or several side by side: what the head of a message says of them, and their buffers."""

    nodes: bytes  # rows and nulls of every array, two int64
    sizes: bytes  # of every buffer, int64
    body: tuple[Part, ...]  # the buffers, those without a byte left out, each filled up to 8 bytes


class Valid(NamedTuple):
    """Which rows of a column are not null."""

    nulls: int
    bitmap: bytes  # empty when there are no nulls

    @classmethod
    def of(cls, there: Bools) -> Valid:
        """Read an array with true where there is a value."""
        return _valid(len(there), there.tobytes())


EVERY: Final = Valid(0, b"")


def remembered(make: Callable[..., T]) -> Callable[..., T]:
    """Remember what a function of a number of rows made for few: the next window asks for much the same."""
    usual = lru_cache(_KEPT)(make)

    @wraps(make)
    def made(n: int, *others: Any) -> T:
        return usual(n, *others) if n <= _FEW else make(n, *others)

    return made


@remembered
def _valid(n: int, there: bytes) -> Valid:
    if not (nulls := there.count(0)):
        return EVERY
    return Valid(nulls, np.packbits(np.frombuffer(there, np.bool_, n), bitorder="little").tobytes())


def beside(columns: Iterable[Columns]) -> Columns:
    """Return columns side by side."""
    nodes, sizes, bodies = zip(*columns)  # noqa: B905 - every one has the three
    return Columns(b"".join(nodes), b"".join(sizes), tuple(chain.from_iterable(bodies)))


def of_words(rows: NDArray[Any]) -> Columns:
    """Return the rows of a matrix of 8-byte numbers as columns without nulls."""
    count, n = rows.shape
    body = (rows.tobytes(),) if n else ()
    return Columns(_pair(n, 0) * count, _pair(0, 8 * n) * count, body)


def lists_of(lengths: Ints, valid: Valid = EVERY) -> Columns:
    """Return lists of such lengths without their items."""
    return _column(len(lengths), valid, _offsets(lengths))


class Form:
    """Makes the columns of one of the format's types."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self._items = Form(kind.value_type) if pa.types.is_large_list(kind) else None
        self._is_text = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        self._is_bool = pa.types.is_boolean(kind)
        self._dtype = None if self._items or self._is_text else _dtype(kind)
        self.nulls = remembered(self._all_null)  # a column of so many nulls
        self._last: tuple[Any, Columns] = ([], self.nulls(0))

    def of(self, values: Any, there: Bools | None = None) -> Columns:
        """Return values as a column; `there` says which are not null, in a list None is null.

        Many numbers of the type's own in a numpy array are not copied.
        """
        if not isinstance(values, np.ndarray):
            if there is None and None in values:
                there = np.fromiter((value is not None for value in values), np.bool_, len(values))
                if not there.any():
                    return self.nulls(len(values))
            valid = EVERY if there is None else Valid.of(there)
            if self._items:
                return self._of_lists(values, valid)
            if self._is_text:
                return self._of_texts(values, valid)
            if valid.nulls:
                values = [0 if value is None else value for value in values]
        else:
            valid = EVERY if there is None else Valid.of(there)
        if self._is_bool:
            bits = np.packbits(np.asarray(values, np.bool_), bitorder="little")
            return _column(len(values), valid, bits.tobytes())
        return _column(len(values), valid, _data(np.ascontiguousarray(values, self._dtype)))

    def again(self, values: list[Any]) -> Columns:
        """Return a list as a column; one that equals the last one costs nothing."""
        before, column = self._last
        if values != before:
            column = self.of(values)
            self._last = list(values), column
        return column

    def lists(self, rows: Columns, items: Any) -> Columns:
        """Return a column of lists, `rows` by `lists_of`, their items joined in order; binary is of bytes."""
        if self._is_text:
            inner = _column(0, EVERY, _data(items))
            return Columns(rows.nodes, rows.sizes + inner.sizes[8:], rows.body + inner.body)
        if self._items is None:
            raise TypeError(f"expected a type of lists, got {self.kind}")
        inner = self._items.of(items)
        return Columns(rows.nodes + inner.nodes, rows.sizes + inner.sizes, rows.body + inner.body)

    def _all_null(self, n: int) -> Columns:
        none = Valid(n, bytes(-(-n // 8)))
        if self._items:
            return beside([_column(n, none, bytes(8 * n + 8)), self._items.nulls(0)])
        if self._is_text:
            return _column(n, none, bytes(8 * n + 8), b"")
        size = -(-n // 8) if self._is_bool else n * np.dtype(self._dtype).itemsize
        return _column(n, none, bytes(size))

    def _of_lists(self, values: Sequence[Sequence[Any] | None], valid: Valid) -> Columns:
        rows = [() if value is None else value for value in values]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))  # pyright: ignore[reportArgumentType]
        return self.lists(lists_of(lengths, valid), list(chain.from_iterable(rows)))  # pyright: ignore[reportArgumentType]

    def _of_texts(self, values: Sequence[str | bytes | None], valid: Valid) -> Columns:
        rows = [b"" if v is None else v.encode() if isinstance(v, str) else v for v in values]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return _column(len(rows), valid, _offsets(lengths), b"".join(rows))


class Table:
    """Makes the messages of one schema.

    Neighbouring columns that come `together` are given as one, by the first one's name.
    """

    def __init__(self, schema: pa.Schema, *together: Sequence[str]) -> None:
        self.schema = schema
        self._forms = {field.name: Form(field.type) for field in schema}
        self._nulls = {name: form.nulls for name, form in self._forms.items()}
        for first, *others in together:
            nulls = [self._nulls[first], *map(self._nulls.pop, others)]
            self._nulls[first] = remembered(partial(_all_nulls, nulls))
        nulls = [pa.nulls(1, field.type) for field in schema]
        message = pa.RecordBatch.from_arrays(nulls, schema=schema).serialize().to_pybytes()
        found = head(message)
        if found is None or not all(found.numbers):
            raise TypeError(f"expected a head of an Arrow batch, got {found}")
        self._body_at, self._rows_at = found.numbers
        self._nodes_at, self._buffers_at = (at + 4 for at in found.vectors)  # behind the vectors' lengths
        self._form = message[: found.before_body]
        self._head = lru_cache(_KEPT)(self._new_head)

    def __getitem__(self, name: str) -> Form:
        return self._forms[name]

    def of(self, values: Mapping[str, Any]) -> dict[str, Columns]:
        """Return values by column as columns."""
        return {name: self._forms[name].of(column) for name, column in values.items()}

    def message(self, n: int, columns: Mapping[str, Columns], ids: tuple[int, int] | None = None) -> Message:
        """Return a message of n rows; columns that are not given are null. `ids`: its first and last one."""
        every = beside(columns[name] if name in columns else nulls(n) for name, nulls in self._nulls.items())
        return Message(self.schema, n, gathered([self._head(n, *every[:2]), *every.body]), ids)

    def _new_head(self, n: int, nodes: bytes, sizes: bytes) -> bytes:
        lengths = np.frombuffer(sizes, np.int64)
        filled = -(-lengths // _ALIGNED) * _ALIGNED
        stops = np.cumsum(filled)
        buffers = np.stack([stops - filled, lengths], axis=1).tobytes()
        made = bytearray(self._form)
        for at, numbers in ((self._nodes_at, nodes), (self._buffers_at, buffers)):
            made[at : at + len(numbers)] = numbers
        for at, number in ((self._rows_at, n), (self._body_at, int(stops[-1]))):
            made[at : at + 8] = number.to_bytes(8, "little")
        return bytes(made)


def _all_nulls(columns: Sequence[Callable[[int], Columns]], n: int) -> Columns:
    return beside(nulls(n) for nulls in columns)


def _dtype(kind: pa.DataType) -> Any:
    return np.dtype(np.int64 if pa.types.is_timestamp(kind) else kind.to_pandas_dtype())


def _column(n: int, valid: Valid, *buffers: Part) -> Columns:
    nulls, validity = valid
    sizes: list[int] = []
    body: list[Part] = []
    for buffer in (validity, *buffers):
        sizes.append(size := len(buffer))
        if size:
            body.append(buffer)
            if missing := -size % _ALIGNED:
                body.append(bytes(missing))
    return Columns(_pair(n, nulls), _longs[len(sizes)](*sizes), tuple(body))


def _data(numbers: NDArray[Any]) -> Part:
    return numbers.tobytes() if numbers.nbytes <= _COPIED else pa.py_buffer(numbers)


def _offsets(lengths: Ints) -> bytes:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.add.accumulate(lengths, out=offsets[1:])
    return offsets.tobytes()
