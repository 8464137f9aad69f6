"""Names: which of the known ones a question means, what is near one that is none, what runs are called."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

from ..globs import fits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MOST_NAMED: Final = 5


def match(keys: str | Iterable[str], known: Iterable[str], what: str) -> list[str]:
    """Return the known names that keys name, by themselves or as globs (see `fits`).

    UnansweredError, naming what is near, for a key that names none.
    """
    given: Any = keys
    listed: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if odd := [key for key in listed if not isinstance(key, str)]:
        raise errors.QueryError(f"expected a {what}, got {odd[0]!r}")
    names = dict.fromkeys(known)
    found: dict[str, None] = {}
    for key in listed:
        fitting = [key] if key in names else [name for name in names if fits(name, [key])]
        if not fitting:
            raise errors.UnansweredError(unknown(key, names, what))
        found.update(dict.fromkeys(fitting))
    return list(found)


def unknown(key: str, known: Iterable[str], what: str) -> str:
    """Say what there is instead: names that begin with the key, else names like it, else how many."""
    names = sorted(set(known))
    near = [name for name in names if name.startswith((f"{key}/", f"{key}__"))][:_MOST_NAMED]
    near = near or [name for name in names if key.startswith(f"{name}/")][-_MOST_NAMED:]
    lower = {name: name.lower() for name in names}
    near = near or [name for name in names if key.lower() in lower[name]][:_MOST_NAMED]
    close = get_close_matches(key.lower(), lower.values(), _MOST_NAMED, 0.5)
    near = near or [name for one in dict.fromkeys(close) for name in names if lower[name] == one]
    if near:
        listed = f"near: {', '.join(map(repr, near))}"
    else:
        listed = f"there are {len(names)}, none of them near" if names else "there is none"
    return f"expected a {what}, got {key!r}; {listed}"


def labels(paths: Sequence[Path]) -> list[str]:
    """Name runs by as many last parts of their paths as tell them apart; QueryError for one given twice."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise errors.QueryError(f"expected different run directories, got one twice: {paths[0]}")
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return ["/".join(part[-length:]) for part in parts]
