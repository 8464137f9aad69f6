"""The pieces of a window's payload: masks, matrices of selected values, series of numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .batch import PLAIN, Batch
from .device import landed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .device import Parcel


@dataclass(frozen=True, slots=True)
class MaskPiece:
    """A mask as the payload keeps it, and what was said of its sequences."""

    record_id: int
    shape: tuple[int, ...]
    packed: NDArray[np.uint8] | Parcel
    batch: Batch = PLAIN

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.packed.nbytes

    def bits(self) -> NDArray[np.uint8]:
        """Return the mask a bit per element, lowest bit first; waits where it comes from a device."""
        return landed(self.packed)


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """Selected values of several records: row i of `matrix` belongs to record `ids[i]`."""

    ids: NDArray[np.int64]
    matrix: NDArray[Any] | Parcel

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.matrix.nbytes

    def values(self) -> NDArray[Any]:
        """Return the matrix; waits where it comes from a device."""
        return landed(self.matrix)


@dataclass(frozen=True, slots=True)
class SeriesPiece:
    """The values and times (UTC µs) of one scalar record, and the ids of the samples they belong to."""

    record_id: int
    values: list[float]
    times: list[int]
    samples: list[str] = field(default_factory=list[str])

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return 16 * len(self.values)


Piece = MaskPiece | MatrixPiece | SeriesPiece
