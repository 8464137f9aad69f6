"""Which of the known names a question means, and what there is instead of one that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Final

from eventlog import errors

_MOST_NAMED: Final = 5


def match(keys: str | Iterable[str], known: Iterable[str], what: str) -> list[str]:
    """Return the known names that keys name, by themselves or as globs (`*`, `?`).

    QueryError, naming what is near, for a key that names none.
    """
    given: Any = keys
    listed: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if odd := [key for key in listed if not isinstance(key, str)]:
        raise errors.QueryError(f"expected a {what}, got {odd[0]!r}")
    names = dict.fromkeys(known)
    found: dict[str, None] = {}
    for key in listed:
        glob = "*" in key or "?" in key
        fitting = [key] if key in names else [name for name in names if glob and fnmatchcase(name, key)]
        if not fitting:
            raise errors.QueryError(unknown(key, names, what))
        found.update(dict.fromkeys(fitting))
    return list(found)


def unknown(key: str, known: Iterable[str], what: str) -> str:
    """Say what there is instead: names that begin with the key, else names like it."""
    names = sorted(set(known))
    near = [name for name in names if name.startswith((f"{key}/", f"{key}__"))][:_MOST_NAMED]
    near = near or [name for name in names if key.startswith(f"{name}/")][-_MOST_NAMED:]
    near = near or get_close_matches(key, names, _MOST_NAMED, 0.5) or names[:_MOST_NAMED]
    listed = f"near: {', '.join(map(repr, near))}" if near else "there is none"
    return f"expected a {what}, got {key!r}; {listed}"
