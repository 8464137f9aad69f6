"""eventlog records and keeps: what every process saw, in files that survive it.

import eventlog

eventlog.start(run_dir, role="actor")
...
eventlog.stop()
"""

from . import errors, moments, workflow_context
from .arrays import as_step
from .errors import ArealMetricsError
from .log import Log
from .process import current, start, stop
from .reader import RunReader
from .recorder import Recorder, drain, set_step
from .reduction import Kind, ReduceType, Spread
from .rundir import RunDir

__all__ = [
    "ArealMetricsError",
    "Kind",
    "Log",
    "Recorder",
    "ReduceType",
    "RunDir",
    "RunReader",
    "Spread",
    "as_step",
    "current",
    "drain",
    "errors",
    "moments",
    "set_step",
    "start",
    "stop",
    "workflow_context",
]
