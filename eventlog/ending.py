"""How this process comes to its end, as far as that can be known before it does.

An uncaught exception is in `sys.last_value` when exit handlers run; the code of an exit is nowhere. So
`sys.exit`, and `exit` and `quit` of an interactive Python, are wrapped once a log is open: they mark the
SystemExit that they raise. The mark is dropped with it: below no frame of Python where the interpreter itself
takes it, below one where somebody has caught it. A program's own `raise SystemExit(3)`, and a `sys.exit` it
imported by name before, cannot be seen: such a process "finished". Processes of `multiprocessing` run no exit
handlers but its own.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_code: Any = None  # of the exit that the interpreter took
_exits = 0  # an exit that came before the last one, or before the program went on, says nothing
_newest: weakref.ref[_Mark] | None = None  # the mark of the last one, while something holds on to it
_Exit = type(sys.exit)
_MARK = "_areal_metrics_mark"
_frame: Callable[[], Any] = sys._getframe  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


class _Mark:
    """Hangs on a SystemExit, and sees where that is dropped."""

    def __init__(self, code: Any) -> None:
        self.code = code
        self.number = _exits

    def __del__(self, frame: Callable[[], Any] = _frame) -> None:  # a default: it stays to the very end
        global _code
        if self.number == _exits and frame().f_back is None:
            _code = self.code


def watch(drain: Callable[[], None]) -> None:
    """Note the codes of exits from now on; have `drain` called where exit handlers are not run."""
    if isinstance(sys.exit, _Exit):
        sys.exit = _noted(sys.exit)
    quitter = type(getattr(builtins, "exit", None))
    if quitter.__module__ == "_sitebuiltins" and not hasattr(quitter.__call__, "__wrapped__"):
        quitter.__call__ = _noted(quitter.__call__)
    finalizers = sys.modules.get("multiprocessing.util")
    if finalizers is not None and is_of_multiprocessing():
        finalizers.Finalize(None, drain, exitpriority=0)


def is_of_multiprocessing() -> bool:
    """Whether this process is a child of `multiprocessing`, in which its own ways of ending hold."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None


def forget_exit() -> None:
    """Take back that there was an exit: somebody caught it, for the program went on."""
    global _code, _exits, _newest
    _code, _exits, _newest = None, _exits + 1, None


def _noted(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def exit(*args: Any, **named: Any) -> Any:  # noqa: A001 - it stands for sys.exit
        global _newest
        try:
            return leave(*args, **named)
        except SystemExit as error:
            if threading.current_thread() is threading.main_thread():
                forget_exit()
                mark = _Mark(error.code)
                setattr(error, _MARK, mark)
                _newest = weakref.ref(mark)
                del mark
            raise

    return exit


def outcome() -> tuple[str, str]:
    """Return how the process ends: "finished", or "exception" and which."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, SystemExit):
        return "exception", f"{type(error).__name__}: {error}"
    mark = _newest and _newest()
    code = error.code if error is not None else mark.code if mark is not None else _code
    return ("finished", "") if code in (None, 0, False) else ("exception", f"SystemExit: {code}")
