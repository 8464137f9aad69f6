"""How this process comes to its end, as far as that can be known before it does.

An uncaught exception is in `sys.last_value` when exit handlers run; the code of `sys.exit` is nowhere, so
that function is wrapped once a log is open. Processes of `multiprocessing` run no exit handlers but its own.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_code: Any = None  # of the last sys.exit in the main thread
_Exit = type(sys.exit)


def watch(drain: Callable[[], None]) -> None:
    """Note the code of `sys.exit` from now on; have `drain` called where exit handlers are not run."""
    if isinstance(sys.exit, _Exit):
        sys.exit = _noted(sys.exit)
    processes, finalizers = (sys.modules.get(f"multiprocessing.{name}") for name in ("process", "util"))
    if processes is not None and finalizers is not None and processes.parent_process() is not None:
        finalizers.Finalize(None, drain, exitpriority=0)


def forget_exit() -> None:
    """Take back what `sys.exit` was called with: somebody caught it, for the program went on."""
    global _code
    _code = None


def _noted(leave: Callable[[Any], Any]) -> Any:
    def exit(status: Any = None, /) -> Any:  # noqa: A001 - it stands for sys.exit
        global _code
        if threading.current_thread() is threading.main_thread():
            _code = status
        return leave(status)

    exit.__doc__ = leave.__doc__
    return exit


def outcome() -> tuple[str, str]:
    """Return how the process ends: "finished", or "exception" and which."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    code = error.code if isinstance(error, SystemExit) else _code if error is None else None
    if error is not None and not isinstance(error, SystemExit):
        return "exception", f"{type(error).__name__}: {error}"[:500]
    return ("finished", "") if code in (None, 0, False) else ("exception", f"SystemExit: {code}"[:500])
