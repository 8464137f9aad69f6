"""Every error of the distribution, in one tree.

Messages say what was expected, what came and where; a path comes last.

    ArealMetricsError
    ├── RecordingError (ValueError)        a recording call was refused; nothing of it was recorded
    │   └── RecordingTypeError (TypeError)     … because of the type of a value
    ├── StepError (ValueError)             a step that is negative, fractional or no number
    ├── LogError (RuntimeError)            the log of this process: started twice, on a bad option
    ├── RunDirectoryError                  a run directory that cannot be used
    │   ├── NotARunError (ValueError)          there is no run there
    │   ├── ManifestError (ValueError)         a JSON file of the run is unreadable or fails its checksum
    │   └── FormatVersionError (ValueError)    written by a newer major version of the format
    ├── ReductionError                     an export that could not be reduced
    │   ├── AgreementError (ValueError)        ranks disagree on what a key is; raised on every rank
    │   ├── PeerError (RuntimeError)           another rank failed before or in the export
    │   ├── DesyncError (RuntimeError)         ranks are not at the same export; the channel is closed
    │   └── MergeError (ValueError)            worker exports that cannot be merged without loss
    ├── QueryError (ValueError)            a question that no run can answer as it is asked
    │   └── UnansweredError                    … that this run cannot: it lacks what is asked for
    ├── ConfigError (ValueError)           a configuration that is missing or wrong
    ├── DependencyError (ImportError)      an optional package that is needed for this is not installed
    ├── EvaluationError (ValueError)       samples or results that cannot be evaluated as they are given
    │   └── DistributedEvaluationError (RuntimeError)  ranks deviate, or samples are missing: no score
    └── BackendError (RuntimeError)        a tracking backend
        ├── BackendMissingError (ImportError)  its package is not installed
        ├── BackendGoneError                   the target no longer takes anything: retrying is useless
        └── RefusedError                       the target will never take this row; later ones it may
            └── RewindError (ValueError)           … because it already holds a later step
"""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "ArealMetricsError",
    "BackendError",
    "BackendGoneError",
    "BackendMissingError",
    "ConfigError",
    "DependencyError",
    "DesyncError",
    "DistributedEvaluationError",
    "EvaluationError",
    "FormatVersionError",
    "LogError",
    "ManifestError",
    "MergeError",
    "NotARunError",
    "PeerError",
    "QueryError",
    "RecordingError",
    "RecordingTypeError",
    "ReductionError",
    "RefusedError",
    "RewindError",
    "RunDirectoryError",
    "StepError",
    "UnansweredError",
]


class ArealMetricsError(Exception):
    """The root: `except ArealMetricsError` catches everything this distribution raises on purpose."""


class RecordingError(ArealMetricsError, ValueError):
    """A recording call was refused; nothing of the call was recorded, nothing before it is lost."""


class RecordingTypeError(RecordingError, TypeError):
    """A recorded value has a type that no number can be read from."""


class StepError(ArealMetricsError, ValueError):
    """A step is negative, fractional, too large for int64, or no number."""


class LogError(ArealMetricsError, RuntimeError):
    """The log of this process cannot be started or used as asked."""


class RunDirectoryError(ArealMetricsError):
    """A run directory cannot be used."""


class NotARunError(RunDirectoryError, ValueError):
    """No run lies at the path."""


class ManifestError(RunDirectoryError, ValueError):
    """A JSON file of a run is unreadable, incomplete, or fails its checksum."""


class FormatVersionError(RunDirectoryError, ValueError):
    """The run was written by a newer major version of the format than this reader knows."""


class ReductionError(ArealMetricsError):
    """An export could not be reduced."""


class AgreementError(ReductionError, ValueError):
    """Ranks disagree on the kind, reduction, denominator or group of a key; every rank raises it."""


class PeerError(ReductionError, RuntimeError):
    """Another rank failed before or during this export; every rank of the group raises."""


class DesyncError(ReductionError, RuntimeError):
    """The ranks of a group are not at the same export; no export over that group is possible any more."""


class MergeError(ReductionError, ValueError):
    """Exports of workers cannot be merged without losing or inventing something."""


class QueryError(ArealMetricsError, ValueError):
    """The log cannot answer the question as asked; the message says what can be asked instead."""


class UnansweredError(QueryError):
    """The question is a proper one, but this run has no answer: a key it lacks, values it did not keep."""


class ConfigError(ArealMetricsError, ValueError):
    """A configuration value is missing or not one of the valid ones."""


class DependencyError(ArealMetricsError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


class EvaluationError(ArealMetricsError, ValueError):
    """Samples or results of an evaluation are not as they have to be; the message says which."""


class DistributedEvaluationError(EvaluationError, RuntimeError):
    """Ranks deviate from each other, or not every sample was evaluated: what there is is no score."""


class BackendError(ArealMetricsError, RuntimeError):
    """A tracking backend failed."""


class BackendMissingError(BackendError, ImportError):
    """A backend was asked for whose package is not installed."""


class BackendGoneError(BackendError):
    """The target refuses for good (deleted, forbidden): retrying cannot help."""


class RefusedError(BackendError):
    """The target will never take this row (too large, refused names); the rows after it may go on."""


class RewindError(RefusedError, ValueError):
    """A step lies below what the target already holds, and it cannot go back."""
