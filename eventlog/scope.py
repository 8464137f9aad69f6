"""Scopes: the prefix under which keys are recorded, one path per tracker, in a context variable.

A scope belongs to the task or thread that opened it: asyncio tasks inherit the path of their creator and
change only their own; threads start without one.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from .arrays import as_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from contextlib import AbstractContextManager

    F = TypeVar("F", bound=Callable[..., Any])

_PATHS: ContextVar[Mapping[object, str]] = ContextVar("areal_metrics_scopes", default={})  # noqa: B039 (never mutated)


def prefix(recorder: object) -> str:
    """Return the current path of a recorder, "" or ending in "/"."""
    return _PATHS.get().get(recorder, "")


@contextmanager
def scope(recorder: object, name: str) -> Generator[None]:
    """Record under `name` inside the block; nested scopes join with "/"."""
    with _path(recorder, prefix(recorder) + part(name)):
        yield


@contextmanager
def no_scope(recorder: object) -> Generator[None]:
    """Record without any prefix inside the block."""
    with _path(recorder, ""):
        yield


def scoped(enter: Callable[[], AbstractContextManager[None]]) -> Callable[[F], F]:
    """Decorate functions, sync or async, so that their bodies run inside what `enter` returns."""

    def decorate(function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def scoped_async(*args: Any, **kwargs: Any) -> Any:
                with enter():
                    return await function(*args, **kwargs)

            return scoped_async  # pyright: ignore[reportReturnType]

        @functools.wraps(function)
        def scoped_sync(*args: Any, **kwargs: Any) -> Any:
            with enter():
                return function(*args, **kwargs)

        return scoped_sync  # pyright: ignore[reportReturnType]

    return decorate


@contextmanager
def _path(recorder: object, path: str) -> Generator[None]:
    token = _PATHS.set({**_PATHS.get(), recorder: path})
    try:
        yield
    finally:
        _PATHS.reset(token)


def part(name: str) -> str:
    """Return a scope's contribution to the path: stripped of slashes, ending in one."""
    return as_key(name, "scope name") + "/"
