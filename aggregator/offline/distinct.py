"""Of samples that several records hold, the one that counts: of each sample id and step the first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eventlog import errors

from .grouping import SEQUENCE
from .pairing import Pairing
from .payload import Held, Payload, cuts, sizes
from .reading import ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .grouping import Asked, Pool
    from .history import History
    from .reading import Bools

    Places = NDArray[np.intp]


def firsts(histories: Sequence[History], made: Pool, asked: Asked, most: int) -> list[dict[int, Bools]]:
    """Return which sequences of each record of a pool are the first of their sample in its group and step.

    Of the lowest rank, and there of the first record. Records whose sequences are not kept are left out.
    `most`: about how many bytes are in memory at a time. UnansweredError for sequences without ids.
    """
    if SEQUENCE in asked.by:
        raise errors.QueryError("expected distinct with groups of sequences, got by='sequence'")
    told: set[tuple[int, int, str]] = set()
    found: list[dict[int, Bools]] = []
    for i, history in enumerate(histories):
        records, steps, of = made.records[i], made.steps[i], made.of[i]
        payload = Payload(history)
        pairing = Pairing(history, payload)
        order = np.lexsort((records, ints(history.records.table["rank"])[records], steps))
        found.append({})
        for piece in np.split(order, cuts(sizes(history)[records[order]], most)):
            masks = pairing.mask[records[piece]]
            held = Held(history, *payload.rows(np.unique(masks[masks >= 0])))
            for at, mask in zip(piece.tolist(), masks.tolist(), strict=True):
                parts = held.parts(mask) if mask >= 0 else None
                if parts is None:
                    continue
                if (samples := held.samples(mask)) is None:
                    raise errors.UnansweredError(
                        f"expected the sample ids of {pairing.name(int(records[at]))!r}, got none: give "
                        "denominator(sample_ids=) those of the mask's sequences"
                    )
                names = [(int(of[at]), int(steps[at]), sample) for sample in samples]
                found[i][at] = np.array([name not in told and not told.add(name) for name in names], np.bool_)
    return found
