"""Arrow columns from numpy arrays and Python lists, without `pa.array`.

That function loads pandas where it is installed: half a second on the writer's thread, and an error when the
first window of a short program is encoded while the interpreter shuts down. It is also slower.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]


class Form:
    """Makes the columns of one of the format's types."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self._nulls: pa.Array = pa.nulls(0, kind)
        self._last: tuple[Any, pa.Array] = ([], self._nulls)
        self._items = Form(kind.value_type) if pa.types.is_large_list(kind) else None
        self._is_text = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        self._is_bool = pa.types.is_boolean(kind)
        self._dtype = None if self._items or self._is_text else _dtype(kind)

    def of(self, values: Any, valid: Bools | None = None) -> pa.Array:
        """Return values as a column; `valid` says which are not null, in a list None is null.

        A numpy array of the type's own numbers is not copied.
        """
        if isinstance(values, pa.Array):
            return values
        if not isinstance(values, np.ndarray):
            if valid is None and None in values:
                valid = np.fromiter((value is not None for value in values), np.bool_, len(values))
            if self._items:
                return self._of_lists(values, valid)
            if self._is_text:
                return self._of_texts(values, valid)
            if valid is not None:
                values = [0 if value is None else value for value in values]
        if self._is_bool:
            return self._column(
                len(values), valid, np.packbits(np.asarray(values, np.bool_), bitorder="little")
            )
        return self._column(len(values), valid, np.ascontiguousarray(values, self._dtype))

    def again(self, values: list[Any]) -> pa.Array:
        """Return a list as a column; one that equals the last one costs nothing."""
        before, column = self._last
        if values != before:
            column = self.of(values)
            self._last = list(values), column
        return column

    def lists(self, lengths: Ints, items: Any, valid: Bools | None = None) -> pa.Array:
        """Return a column of lists of such lengths, `items` joined in order."""
        if self._items is None:
            raise TypeError(f"expected a type of lists, got {self.kind}")
        buffers = [_validity(valid), pa.py_buffer(_offsets(lengths))]
        return pa.Array.from_buffers(self.kind, len(lengths), buffers, children=[self._items.of(items)])

    def nulls(self, n: int) -> pa.Array:
        """Return a column of nulls."""
        found = self._nulls
        if len(found) != n:
            found = self._nulls = pa.nulls(n, self.kind)
        return found

    def _column(self, n: int, valid: Bools | None, *buffers: Any) -> pa.Array:
        return pa.Array.from_buffers(self.kind, n, [_validity(valid), *map(pa.py_buffer, buffers)])

    def _of_lists(self, values: Sequence[Sequence[Any] | None], valid: Bools | None) -> pa.Array:
        rows = values if valid is None else [() if value is None else value for value in values]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))  # pyright: ignore[reportArgumentType]
        return self.lists(lengths, list(chain.from_iterable(rows)), valid)  # pyright: ignore[reportArgumentType]

    def _of_texts(self, values: Sequence[str | bytes | None], valid: Bools | None) -> pa.Array:
        rows = [b"" if v is None else v.encode() if isinstance(v, str) else v for v in values]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return self._column(len(rows), valid, _offsets(lengths), b"".join(rows))


class Table:
    """Makes the batches of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._forms = {field.name: Form(field.type) for field in schema}

    def __getitem__(self, name: str) -> Form:
        return self._forms[name]

    def batch(self, n: int, columns: Mapping[str, Any]) -> pa.RecordBatch:
        """Return a batch of n rows; columns that are not given are null."""
        arrays = [
            form.of(columns[name]) if name in columns else form.nulls(n) for name, form in self._forms.items()
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _dtype(kind: pa.DataType) -> Any:
    return np.dtype(np.int64 if pa.types.is_timestamp(kind) else kind.to_pandas_dtype())


def _validity(valid: Bools | None) -> pa.Buffer | None:
    return None if valid is None or valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _offsets(lengths: Ints) -> Ints:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
