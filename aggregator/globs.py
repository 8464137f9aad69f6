"""Globs: which names a key means that may stand for several."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["fits"]


def fits(name: str, keys: Iterable[str]) -> bool:
    """Return whether a name is one of some keys, or fits one that is a glob.

    `*` stands for any text, `?` for one character, and nothing else is special: brackets are themselves.
    """
    return any(name == key or fnmatchcase(name, key.replace("[", "[[]")) for key in keys)
