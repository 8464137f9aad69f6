"""What else is known of records, as JSON objects: their own tags, and those of the mask they are under.

A batch is tagged at its mask (`denominator(…, tags=)`): what was recorded under the mask is of that batch.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from .placing import groups
from .reading import codes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from .history import History
    from .reading import Ints

    Places = NDArray[np.intp]

TAG: Final = "tags."  # how the names of tags begin, where they stand among other columns


def carried(history: History, masks: Places) -> pa.ChunkedArray:
    """Return every record's tags with those of its mask (`masks`: its place, -1: none); its own stand."""
    tags = history.records.table["tags"].combine_chunks()
    own = codes(history.records.table["tags"])
    theirs = np.where(masks >= 0, own[np.maximum(masks, 0)], -1) if len(own) else own
    if (theirs < 0).all():
        return pa.chunked_array([tags])
    words = [*tags.dictionary.to_pylist(), None]  # null is -1, the last
    pairs, n = groups(own, theirs)
    first = np.zeros(n, np.intp)
    first[pairs] = np.arange(len(pairs))
    found = zip(own[first].tolist(), theirs[first].tolist(), strict=True)
    texts = [_joined(words[one], words[mask]) for one, mask in found]
    joined = pa.array(texts, tags.type.value_type).dictionary_encode().cast(tags.type)
    return pa.chunked_array([joined.take(pa.array(pairs))])


def _joined(own: str | None, mask: str | None) -> str | None:
    if own is None or mask is None:
        return own if mask is None else mask
    return json.dumps({**_said(mask), **_said(own)}, sort_keys=True)


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the names of all tags in some texts, as `TAG` has them begin."""
    return {f"{TAG}{name}" for text in texts for name in _said(text)}


def value_of(text: str, name: str) -> str | None:
    """Return what a text says of a tag: a string as it is, all else as JSON; None where it says nothing."""
    found = _said(text).get(name.removeprefix(TAG))
    return found if found is None or isinstance(found, str) else json.dumps(found, sort_keys=True)


def sampled(history: History) -> Ints:
    """Return how many values were drawn of each record of which the payload keeps a sample, else 0."""
    tags = history.records.table["tags"]
    found = [_drawn(text) for text in tags.combine_chunks().dictionary.to_pylist()]
    return np.array([*found, 0], np.int64)[codes(tags)]


def _drawn(text: str) -> int:
    """Return what tags say of a sample, 0 for nothing."""
    drawn = _said(text).get("sampled")
    return drawn if isinstance(drawn, int) else 0


def _said(text: str) -> dict[str, Any]:
    """Return what tags say; nothing where they are damaged."""
    try:
        said: Any = json.loads(text)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
