"""eventlog records and keeps: what every process saw, in files that survive it.

Every process that records calls `eventlog.start(run_dir, role="actor")`, or has AREAL_METRICS_DIR set;
`eventlog.stop()` writes what is queued. The recording verbs are those of `aggregator.stats_tracker`.
"""

from . import errors, moments, schema, workflow_context
from .arrays import as_key, as_metric, as_step
from .errors import ArealMetricsError
from .frame import Spec
from .log import Log, Options
from .manifest import read_json, write_json
from .process import current, start, stop
from .reader import RunReader, SessionState
from .recorder import Drained, Recorder, drain, set_step
from .reduction import Kind, ReduceType, Spread
from .rundir import Attempt, Producer, RunDir
from .schema import IndexRecord
from .segment import Loss

__all__ = [
    "ArealMetricsError",
    "Attempt",
    "Drained",
    "IndexRecord",
    "Kind",
    "Log",
    "Loss",
    "Options",
    "Producer",
    "Recorder",
    "ReduceType",
    "RunDir",
    "RunReader",
    "SessionState",
    "Spec",
    "Spread",
    "as_key",
    "as_metric",
    "as_step",
    "current",
    "drain",
    "errors",
    "moments",
    "read_json",
    "schema",
    "set_step",
    "start",
    "stop",
    "workflow_context",
    "write_json",
]
