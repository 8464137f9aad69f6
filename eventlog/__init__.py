"""eventlog records and keeps: what every process saw, in files that survive it.

Every process that records calls `eventlog.start(run_dir, role="actor")`, or has AREAL_METRICS_DIR set;
`eventlog.stop()` writes what is queued. The recording verbs are those of `aggregator.stats_tracker`.
"""

from . import errors, histogram, losses, moments, schema, workflow_context
from .absence import lost_commits
from .arrays import as_key, as_metric, as_spread, as_step, as_tracker, is_whole
from .batch import parted
from .budget import as_bytes
from .clock import is_time, now_us
from .device import Lap
from .drained import Drained, drain
from .errors import ArealMetricsError
from .files import appearing, fixed, is_there, open_file, read_file, shown, sync_folder
from .following import Followed, Follower, follow
from .frame import Spec
from .life import is_over
from .log import Log
from .manifest import read_json, write_json
from .message import compressed_frame
from .mistakes import forgive
from .options import Options, lenient, yes_or_no
from .output import as_output, replacing
from .process import current, start, stop
from .reader import Block, RunReader, SessionState
from .recorder import Recorder, set_step
from .recovery import FileReport, Recovery, SalvageReport, Verification, recover, verify
from .redaction import redact_sensitive_config
from .reduction import Kind, ReduceType, Spread
from .rundir import Attempt, Problem, Producer, RunDir, SegmentFile, check_role
from .schema import IndexRecord
from .scope import scoped
from .segment import Loss, Pruned
from .source import records_of
from .tags import plain_tags
from .windows import WindowSet, ranges

__all__ = [
    "ArealMetricsError",
    "Attempt",
    "Block",
    "Drained",
    "FileReport",
    "Followed",
    "Follower",
    "IndexRecord",
    "Kind",
    "Lap",
    "Log",
    "Loss",
    "Options",
    "Problem",
    "Producer",
    "Pruned",
    "Recorder",
    "Recovery",
    "ReduceType",
    "RunDir",
    "RunReader",
    "SalvageReport",
    "SegmentFile",
    "SessionState",
    "Spec",
    "Spread",
    "Verification",
    "WindowSet",
    "appearing",
    "as_bytes",
    "as_key",
    "as_metric",
    "as_output",
    "as_spread",
    "as_step",
    "as_tracker",
    "check_role",
    "compressed_frame",
    "current",
    "drain",
    "errors",
    "fixed",
    "follow",
    "forgive",
    "histogram",
    "is_over",
    "is_there",
    "is_time",
    "is_whole",
    "lenient",
    "losses",
    "lost_commits",
    "moments",
    "now_us",
    "open_file",
    "parted",
    "plain_tags",
    "ranges",
    "read_file",
    "read_json",
    "records_of",
    "recover",
    "redact_sensitive_config",
    "replacing",
    "schema",
    "scoped",
    "set_step",
    "shown",
    "start",
    "stop",
    "sync_folder",
    "verify",
    "workflow_context",
    "write_json",
    "yes_or_no",
]
