"""The payload as a sample: of each record with more values, the same number, drawn at random, in their order.

The draw is what a reservoir of that size ends with: every value has the same chance. All records under one
mask keep the same elements, so that their values still belong together. It depends on nothing but role, rank
and record id: a program that records the same again keeps the same. A sampled record says so in its tags,
{"sampled": how many}; one whose values carry sample ids is an evaluation's and stays whole, as masks do.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from . import moments
from .errors import LogError
from .pieces import MaskPiece, MatrixPiece, Piece, SeriesPiece
from .schema import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .frame import Frame
    from .rundir import Producer

USUAL_SIZE: Final = 1024


def size_of(policy: str) -> int | None:
    """Return how many values of a record a payload policy keeps, None for all and 0 for none; LogError."""
    name, _, size = policy.partition(":")
    if name == "sample" and (not size or (size.isdecimal() and int(size))):
        return int(size or USUAL_SIZE)
    if policy not in ("full", "off"):
        raise LogError(f"expected payload to be full, sample, sample:N or off, got {policy!r}")
    return None if policy == "full" else 0


class Sample:
    """Draws samples for one producer."""

    def __init__(self, size: int, producer: Producer) -> None:
        self.size = size
        self._seed = crc32c(f"{producer.role}-{producer.rank}".encode())
        self._said = json.dumps({"sampled": size})

    def marked(self, frame: Frame) -> Frame:
        """Return a window's records, those that are sampled tagged."""
        sampled = (
            record for piece in frame.pieces if self._takes(frame, piece) for record in _records(piece)
        )
        return replace(frame, tags={**frame.tags, **{r: self._tags(frame.tags.get(r)) for r in sampled}})

    def _tags(self, others: str | None) -> str:
        """Return the tags of a sampled record, those it has already included."""
        return self._said if others is None else json.dumps({**json.loads(others), "sampled": self.size})

    def drawn(self, frame: Frame) -> Frame:
        """Return a window with its payload sampled."""
        kept: dict[tuple[int, int], NDArray[np.int64]] = {}
        pieces: list[Piece] = []
        for piece in frame.pieces:
            if not self._takes(frame, piece):
                pieces.append(piece)
            elif isinstance(piece, SeriesPiece):
                kept_calls = self._draw(piece.record_id, len(piece.values)).tolist()
                values = [piece.values[i] for i in kept_calls]
                pieces.append(replace(piece, values=values, times=[piece.times[i] for i in kept_calls]))
            elif isinstance(piece, MatrixPiece):
                matrix = piece.values()
                mask = frame.denominator_ids[int(piece.ids[0]) - frame.first_id]
                place = mask, matrix.shape[1]
                if place not in kept:
                    kept[place] = self._draw(*place)
                pieces.append(replace(piece, matrix=matrix[:, kept[place]]))
        return replace(frame, pieces=pieces)

    def _takes(self, frame: Frame, piece: Piece) -> bool:
        """Whether the records of a piece have more values than are kept; all of them have as many."""
        if isinstance(piece, MaskPiece) or (isinstance(piece, SeriesPiece) and piece.samples):
            return False
        first = next(_records(piece)) - frame.first_id
        return int(frame.moments[first, moments.COUNT]) > self.size

    def _draw(self, record: int, n: int) -> NDArray[np.int64]:
        """Return which of n values are kept, in order."""
        generator = np.random.default_rng([self._seed, record])
        return np.sort(generator.choice(n, self.size, replace=False, shuffle=False))


def _records(piece: Piece) -> Iterator[int]:
    if isinstance(piece, MatrixPiece):
        yield from piece.ids.tolist()
    else:
        yield piece.record_id
