"""What metrics are called where a tracker keeps names to itself, forbids characters, or limits their length.

The mark is a tilde. `~~` stands for a tilde, `~2e;` for a forbidden character by its code point, a tilde
before a reserved name sets it apart; a name that is too long ends in a tilde and a hash of the whole. No two
names meet, and all but the shortened ones can be read back.
"""

from __future__ import annotations

import hashlib
import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger("areal_metrics.replay")

_ESCAPE: Final = re.compile(r"~(?:(~)|([0-9a-f]+);|)")
_HASH: Final = 16  # hexadecimal digits of a shortened name's hash


class Names:
    """The names that one tracker takes: `to` maps a metric's name to it, `back` what is read there.

    `forbidden` matches the characters to spell out, `reserved` says which names (spelled out already) need to
    be set apart, `limit` is the most characters a name may have. `renamed` holds what was mapped to something
    else; that this happens is logged once.
    """

    def __init__(
        self,
        tracker: str,
        *,
        forbidden: str | None = None,
        reserved: Callable[[str], bool] = lambda _: False,
        limit: int | None = None,
    ) -> None:
        self.renamed: dict[str, str] = {}
        self._tracker = tracker
        self._special = re.compile("~" if forbidden is None else f"~|{forbidden}")
        self._reserved = reserved
        self._limit = limit
        self._known: dict[str, str] = {}
        self._shortened: dict[str, str] = {}
        self._layout = lru_cache(maxsize=16)(lambda names: tuple(map(self.to, names)))

    def to(self, name: str) -> str:
        """Return what the tracker calls a metric."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._mapped(name)
            if known != name:
                if not self.renamed:
                    _log.info(
                        "%s keeps some names to itself: %r is called %r there", self._tracker, name, known
                    )
                self.renamed[name] = known
        return known

    def back(self, name: str) -> str:
        """Return the metric of a tracker's name; a shortened one only if this object has shortened it."""
        if name in self._shortened:
            return self._shortened[name]
        return _ESCAPE.sub(lambda found: found[1] or (chr(int(found[2], 16)) if found[2] else ""), name)

    def row(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return a row under the tracker's names."""
        keys = tuple(metrics)
        names = self._layout(keys)
        return dict(metrics) if names == keys else dict(zip(names, metrics.values(), strict=True))

    def _mapped(self, name: str) -> str:
        spelled = self._special.sub(_spelled, name)
        if self._reserved(spelled):
            spelled = f"~{spelled}"
        if self._limit is None or len(spelled) <= self._limit:
            return spelled
        # Without half an escape or a tilde at the cut, which the mark before the hash would complete.
        kept = re.sub(r"~+[0-9a-f]*$", "", spelled[: self._limit - _HASH - 1])
        shortened = f"{kept}~{hashlib.blake2b(name.encode(), digest_size=_HASH // 2).hexdigest()}"
        self._shortened[shortened] = name
        return shortened


def _spelled(found: re.Match[str]) -> str:
    return "~~" if found[0] == "~" else "".join(f"~{ord(character):x};" for character in found[0])
