"""Scopes around functions and generators: the body is inside in each of its steps, its consumer never."""

import asyncio
import contextvars
import inspect

import pytest

from eventlog.recorder import Recorder
from eventlog.scope import scoped


@pytest.fixture
def recorder():
    return Recorder()


def inside(recorder, name="g"):
    """Return the decorator under test."""
    return scoped(lambda: recorder.scope(name))


def test_the_body_of_a_generator_is_inside_the_scope_and_its_consumer_is_not(recorder):
    """Each step sees its scopes, also those it opened itself; between steps the consumer sees its own."""
    seen = []

    @inside(recorder)
    def body(n):
        """Say it."""
        seen.append(recorder.full_key("x"))
        with recorder.scope("inner"):
            got = yield n
            seen.append(recorder.full_key("x"))
        yield got
        seen.append(recorder.full_key("x"))
        return "end"

    with recorder.scope("outer"):
        made = body(1)
        found = [next(made), recorder.full_key("y"), made.send(2), recorder.full_key("y")]
        with pytest.raises(StopIteration) as stopped:
            next(made)
    assert [1, "outer/y", 2, "outer/y"] == found
    assert ["outer/g/x", "outer/g/inner/x", "outer/g/x"] == seen
    assert ("end", "y") == (stopped.value.value, recorder.full_key("y"))
    assert ("body", "Say it.", True) == (body.__name__, body.__doc__, inspect.isgeneratorfunction(body))


@pytest.mark.parametrize("end", ["throw", "close", "context"])
def test_a_generator_ends_inside_its_scope(recorder, end):
    """Errors thrown in reach the body, and what it does at its end is recorded in its scope."""
    seen = []

    @inside(recorder)
    def body():
        try:
            yield 1
        except KeyError:
            yield 2
        finally:
            seen.append(recorder.full_key("x"))

    made = body()
    assert 1 == next(made)
    if end == "throw":
        assert 2 == made.throw(KeyError())
    elif end == "context":  # begun in one context, ended in another
        contextvars.copy_context().run(made.close)
    made.close()
    assert (["g/x"], "x") == (seen, recorder.full_key("x"))


def test_two_generators_do_not_see_each_other(recorder):
    """Interleaved generators keep their own scopes, decorators may be stacked, errors pass."""

    @inside(recorder, "a")
    @inside(recorder, "b")
    def body(n):
        for _ in range(n):
            yield recorder.full_key("x")
        raise KeyError(n)

    @inside(recorder, "c")
    def other(n):
        for _ in range(n):
            yield recorder.full_key("x")

    assert [("a/b/x", "c/x")] * 2 == list(zip(body(3), other(2), strict=False))
    with pytest.raises(KeyError):
        list(body(1))
    assert "x" == recorder.full_key("x")


def test_the_body_of_an_async_generator_is_inside_the_scope_and_its_consumer_is_not(recorder):
    """The same of async generators: sending, throwing, ending, across tasks that interleave."""
    seen = []

    @inside(recorder)
    async def body(n):
        try:
            for _ in range(n):
                await asyncio.sleep(0)
                got = yield recorder.full_key("x")
                seen.append(got)
        except KeyError:
            yield recorder.full_key("thrown")
        finally:
            await asyncio.sleep(0)
            seen.append(recorder.full_key("end"))

    async def consume(name):
        with recorder.scope(name):
            found = [(key, recorder.full_key("y")) async for key in body(2)]
        made = body(2)
        found.append((await made.asend(None), recorder.full_key("y")))
        await made.asend("sent")
        found.append((await made.athrow(KeyError()), recorder.full_key("y")))
        await made.aclose()
        return found

    async def main():
        return await asyncio.gather(*(consume(name) for name in "pq"))

    for name, found in zip("pq", asyncio.run(main()), strict=True):
        assert [(f"{name}/g/x", f"{name}/y")] * 2 + [("g/x", "y"), ("g/thrown", "y")] == found
    assert ["g/end", "g/end", "p/g/end", "q/g/end", "sent", "sent"] == sorted(filter(None, seen))
    assert inspect.isasyncgenfunction(body)


def test_an_async_generator_that_is_left_ends_inside_its_scope(recorder):
    """What is not consumed to its end is closed by the loop, in its scope."""
    seen = []

    @inside(recorder)
    async def body():
        try:
            yield 1
        finally:
            seen.append(recorder.full_key("end"))

    async def main():
        async for _ in body():
            break
        return recorder.full_key("y")

    assert ("y", ["g/end"]) == (asyncio.run(main()), seen)
