"""What a record is and what may be asked of its key. Both enums are written to disk by value."""

from __future__ import annotations

from enum import Enum as _Enum

__all__ = ["Kind", "ReduceType", "Spread"]


class Enum(_Enum):
    """An enum whose members hash by identity: they key the tables of the hot path."""

    __hash__ = object.__hash__


class ReduceType(Enum):
    """How the values of a key become exported numbers (DESIGN: Reduction)."""

    AVG_MIN_MAX = "avg_min_max"
    AVG = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    SCALAR = "scalar"


class Kind(Enum):
    """What one record is."""

    STAT = "stat"  # floating tensor under a mask, one record a call
    DENOMINATOR = "denominator"  # boolean mask, one record a call
    SCALAR = "scalar"  # floats, one record a key and window
    TIMING = "timing"  # seconds, as SCALAR
    COUNTER = "counter"  # exact sum, one record a key and window
    EXPORT = "export"  # what one export covered and how it ended


class Spread(Enum):
    """How the values of a key lie on the ranks of a group."""

    SHARDS = "shards"  # each rank holds other values: pooled (the default)
    REPLICATED = "replicated"  # each rank holds the same value: checked, counted once
    SHARES = "shares"  # each rank holds a part of one number: summed
