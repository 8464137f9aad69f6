"""What holds for every test of evaluation."""

import pytest

import eventlog
from aggregator import stats_tracker


@pytest.fixture(autouse=True)
def nothing_left():
    """Every test begins and ends with an empty tracker, and without a log."""
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()
    eventlog.stop()
