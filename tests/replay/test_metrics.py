"""What a commit's data becomes: flat names, plain numbers, no tracker's counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from eventlog.errors import RecordingError, RecordingTypeError
from replay.metrics import flatten, without_counts


def test_nested_dicts_are_joined_with_slashes() -> None:
    """Nested dicts become names with "/" (report e9)."""
    assert {"a/b/c": 1, "f": 4} == flatten({"a": {"b": {"c": 1}}, "f": 4})


def test_a_name_and_a_path_that_begins_with_it_may_coexist() -> None:
    """Names are never split: "x" beside "x/y" is fine (report e8)."""
    assert {"x": 1, "x/y": 2} == flatten({"x": 1, "x/y": 2})


def test_two_spellings_of_one_name_collide() -> None:
    """A nested dict and a name with "/" that mean the same are refused, not overwritten (report e8)."""
    with pytest.raises(RecordingError, match="expected one value for 'a/b', got two"):
        flatten({"a/b": 1, "a": {"b": 2}})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (2**53 + 1, 2**53 + 1),
        (2**70, float(2**70)),
        (0.5, 0.5),
        (True, 1),
        (np.float32(0.25), 0.25),
        (np.int64(-7), -7),
        (np.bool_(True), 1),
        (np.array([2.5]), 2.5),
        (torch.tensor(1.5), 1.5),
        (torch.tensor([3]), 3),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (math.inf, math.inf),
    ],
)
def test_what_is_a_number_is_taken(value: object, expected: float) -> None:
    """Numbers, switches, numpy values and tensors with one element become int or float."""
    got = flatten({"k": value})["k"]
    assert (expected, type(expected)) == (got, type(got))


@pytest.mark.parametrize("value", [None, "1.0", [1.0], np.ones(2), torch.ones(2, 2), 1j, object()])
def test_what_is_no_number_is_refused_by_its_name(value: object) -> None:
    """A value that is no number is a TypeError naming the key in full."""
    with pytest.raises(RecordingTypeError, match="'loss/total'"):
        flatten({"fine": 1.0, "loss": {"total": value}})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({1: 2.0}, r"expected a metric name \(str\), got int 1"),
        ({"a": {"": 2.0}}, "expected a non-empty metric name below 'a', got ''"),
        ({"\ud800": 2.0}, "expected a metric name that is valid Unicode"),
        (None, "expected a dict of metrics, or a list of dicts, got NoneType"),
        ([1.0], "expected a dict of metrics, or a list of dicts, got list"),
    ],
)
def test_data_that_has_no_names_is_refused(data: object, said: str) -> None:
    """Names are non-empty text, data is a dict."""
    with pytest.raises(RecordingError, match=said):
        flatten(data)


def test_only_the_trackers_own_counts_are_left_out() -> None:
    """`k__count` goes where `k` is; a user's metric that merely ends so stays (report s9)."""
    data = {"reward": 1.0, "reward__count": 5, "tokens__count": 7, "a/b": 1.0, "a/b__count": 2}
    assert {"reward": 1.0, "tokens__count": 7, "a/b": 1.0} == without_counts(data)


def test_a_number_beyond_float64_is_refused() -> None:
    """An integer that no float64 holds is one of our errors, and names its key (report e10)."""
    with pytest.raises(RecordingError, match="expected a number that fits float64 for 'x'"):
        flatten({"x": 10**400})
