"""Scopes: the prefix under which keys are recorded, one path per tracker, in a context variable.

A scope belongs to the task or thread that opened it: asyncio tasks inherit the path of their creator and
change only their own; threads start without one. The body of a generator has its scopes in each of its steps,
and whoever consumes it never sees them.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from .arrays import as_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping
    from contextlib import AbstractContextManager

    F = TypeVar("F", bound=Callable[..., Any])

_PATHS: ContextVar[Mapping[object, str]] = ContextVar("areal_metrics_scopes", default={})  # noqa: B039 (never mutated)
current = _PATHS.get  # the paths of this context; while it is the same object no path has changed


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
    """Decorate functions and generators, sync or async: their bodies run inside what `enter` returns."""

    def decorate(function: F) -> F:
        wrapper = functools.wraps(function)
        if inspect.isgeneratorfunction(function):
            return wrapper(_generator(function, enter))  # pyright: ignore[reportReturnType]
        if inspect.isasyncgenfunction(function):
            return wrapper(_async_generator(function, enter))  # pyright: ignore[reportReturnType]
        if inspect.iscoroutinefunction(function):

            async def scoped_async(*args: Any, **kwargs: Any) -> Any:
                with enter():
                    return await function(*args, **kwargs)

            return wrapper(scoped_async)  # pyright: ignore[reportReturnType]

        def scoped_sync(*args: Any, **kwargs: Any) -> Any:
            with enter():
                return function(*args, **kwargs)

        return wrapper(scoped_sync)  # pyright: ignore[reportReturnType]

    return decorate


class _Steps:
    """A context manager for every step of one generator: on with the scopes of its body, and off again."""

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self._enter = enter
        self._inside: Mapping[object, str] | None = None  # before the first step
        self._outside: Mapping[object, str] = {}

    def __enter__(self) -> None:
        self._outside = _PATHS.get()
        if self._inside is None:
            with self._enter():
                self._inside = _PATHS.get()
        _PATHS.set(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = _PATHS.get()  # the body may be inside of more scopes now
        _PATHS.set(self._outside)


def _generator(
    function: Callable[..., Generator[Any, Any, Any]], enter: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Generator[Any, Any, Any]]:
    def scoped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        body, step = function(*args, **kwargs), _Steps(enter)
        go_on: Callable[[], Any] = functools.partial(body.send, None)
        while True:
            try:
                with step:
                    made = go_on()
            except StopIteration as end:
                return end.value
            try:
                go_on = functools.partial(body.send, (yield made))
            except GeneratorExit:
                with step:
                    body.close()
                raise
            except BaseException as error:  # noqa: BLE001 - it is the body's
                go_on = functools.partial(body.throw, error)

    return scoped


def _async_generator(
    function: Callable[..., AsyncGenerator[Any, Any]], enter: Callable[[], AbstractContextManager[None]]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def scoped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        body, step = function(*args, **kwargs), _Steps(enter)
        go_on: Callable[[], Any] = functools.partial(body.asend, None)
        while True:
            try:
                with step:
                    made = await go_on()
            except StopAsyncIteration:
                return
            try:
                go_on = functools.partial(body.asend, (yield made))
            except GeneratorExit:
                with step:
                    await body.aclose()
                raise
            except BaseException as error:  # noqa: BLE001 - it is the body's
                go_on = functools.partial(body.athrow, error)

    return scoped


@contextmanager
def _path(recorder: object, path: str) -> Generator[None]:
    before = _PATHS.get()
    _PATHS.set({**before, recorder: path})
    try:
        yield
    finally:
        _PATHS.set(before)  # no token: a generator may end in another context than it began in


def part(name: str) -> str:
    """Return a scope's contribution to the path: stripped of slashes, ending in one."""
    return as_key(name, "scope name") + "/"
