"""AREAL_METRICS_ON_MISTAKE: mistakes raise, or are warned of, counted, and cost nothing but themselves."""

import os
import subprocess
import sys
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

import eventlog
from aggregator import open_run, stats_tracker
from aggregator.stats_tracker import DistributedStatsTracker
from eventlog import mistakes, overflow
from eventlog.errors import LogError, RecordingError
from eventlog.schema import LossCause, Stream


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Every test begins without a log, and with no key warned of."""
    monkeypatch.setattr(mistakes, "_warned", set())
    stats_tracker.export_all()
    yield
    stats_tracker.export_all()
    eventlog.stop()


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.setenv(mistakes.VARIABLE, "warn")


@pytest.fixture
def tracker():
    return DistributedStatsTracker("t")


def warned(call):
    """Return what a call warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


ONES, MASK = torch.ones(2), torch.ones(2, dtype=torch.bool)
JAGGED = torch.nested.nested_tensor([ONES, torch.ones(3)], layout=torch.jagged)
MISTAKES = {
    "stat": (lambda t: t.stat("m", ok=ONES, bad=torch.ones(3)), "t/bad", {"t/ok/avg"}),
    "integers": (lambda t: t.stat("m", bad=MASK.int(), ok=ONES), "t/bad", {"t/ok/avg"}),
    "unknown": (lambda t: t.stat("nope", x=ONES), "t/x", set()),
    "kind": (lambda t: t.stat("m", "avg", x=ONES), "t/x", set()),
    "quantiles": (lambda t: t.stat("m", x=ONES, quantiles=7), "t/x", set()),
    "scalar": (lambda t: t.scalar(bad="nan", ok=1), "t/bad", {"t/ok"}),
    "counter": (lambda t: t.counter(ok=1, bad=1.5), "t/bad", {"t/ok"}),
    "denominator": (lambda t: t.denominator(ok=MASK, bad=ONES), "t/bad", {"t/ok"}),
    "sequences": (lambda t: t.denominator(bad=MASK, cu_seqlens=[0, 3]), "t/bad", set()),
    "nested": (lambda t: t.stat("m", ok=ONES, bad=JAGGED), "t/bad", {"t/ok/avg"}),
    "kinds": (lambda t: t.scalar(ok=1, m=1), "t/m", {"t/ok"}),
    "fraction": (lambda t: t.counter(ok=1, bad=Fraction(10**400)), "t/bad", {"t/ok"}),
    "bounds": (
        lambda t: t.denominator(bad=MASK, cu_seqlens=np.array([0, 2**64 - 1], np.uint64)),
        "t/bad",
        set(),
    ),
    "name": (lambda t: t.scalar(**{"/": 1, "ok": 1}), "'/'", {"t/ok"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_unless_told_otherwise(tracker, name):
    """By default a refused call raises, and nothing of it is recorded."""
    tracker.denominator(m=MASK)
    with pytest.raises(RecordingError):
        MISTAKES[name][0](tracker)
    assert tracker.export() == {"t/m": 2}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_costs_itself_and_nothing_else(tracker, tmp_path, name):
    """With =warn a call records its good entries; the bad one warns once and is a counted loss."""
    call, lost, kept = MISTAKES[name]
    log = eventlog.start(tmp_path)
    at = overflow.window.open
    tracker.denominator(m=MASK)
    first, second = warned(lambda: call(tracker)), warned(lambda: call(tracker))
    assert (1, []) == (len(first), second)
    assert first[0].startswith("expected ")
    assert first[0].endswith(
        f"lost, as is whatever else is refused of {lost!r} (AREAL_METRICS_ON_MISTAKE=warn)"
    )
    found = tracker.export()
    assert kept <= set(found)
    assert not [key for key in found if "bad" in key or "/x" in key]
    (loss,) = log.losses()
    assert (Stream.RECORDS, LossCause.REFUSED, at, 2) == (loss.stream, loss.cause, loss.window, loss.rows)
    assert loss.detail.startswith(f"{lost}: expected ")


@pytest.mark.usefixtures("lenient")
def test_counted_losses_are_in_the_log_and_spare_the_rest(tmp_path):
    """`info` lists what was refused; commits stay durable, windows whole, and live is recomputed."""
    log = eventlog.start(tmp_path, role="actor")
    log.claim_attempt()
    for step in range(2):
        stats_tracker.denominator(m=MASK)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stats_tracker.stat("m", ok=ONES * step, bad=torch.ones(3))
        assert log.commit(0, step, step, [stats_tracker.export_all()])
    eventlog.stop()
    with open_run(tmp_path) as run:
        info = run.info()
        said = "recording mistakes: its process warned of the keys"
        assert [("actor", "refused", step, None, said) for step in range(2)] == [
            (loss["role"], loss["cause"], loss["step"], loss["window"], loss["detail"])
            for loss in info["losses"]
        ]
        assert 2 == sum(loss["rows"] for loss in info["losses"])
        assert (0, 0) == (info["incomplete_windows"], log.not_durable)
        rows = run.metrics(source="recomputed").to_pylist()
    assert {(s, k) for s in (0, 1) for k in ("m", "ok/avg", "ok/min", "ok/max")} == {
        (row["step"], row["key"]) for row in rows if not row["differs"] and not row["incomplete"]
    }


@pytest.mark.usefixtures("lenient")
def test_a_refused_mask_leaves_no_old_one_behind(tracker):
    """Stats never bind to the mask of the batch before because the new one was refused."""
    tracker.denominator(m=MASK)
    tracker.stat("m", x=ONES)
    texts = warned(lambda: (tracker.denominator(m=ONES), tracker.stat("m", x=ONES * 100)))
    assert ["'t/m'", "'t/x'"] == [text.split(" refused of ")[1].split(" ")[0] for text in texts]
    assert "registered denominator, got 't/m'; registered now: none" in texts[1]
    tracker.denominator(m=MASK)
    tracker.stat("m", x=ONES * 3)
    assert tracker.export() == {"t/m": 4, "t/x/avg": 2.0, "t/x/min": 1.0, "t/x/max": 3.0}


@pytest.mark.usefixtures("lenient")
def test_a_refused_timing_lets_the_block_run(tracker):
    """A timing that is refused is lost; its block runs, and its errors pass."""
    ran = []

    def run():
        with tracker.record_timing("/"):
            ran.append(1)
        with tracker.record_timing("t", device="nonsense"):
            ran.append(2)

    assert 2 == len(warned(run))
    assert ([1, 2], {}) == (ran, tracker.export())
    with (
        pytest.warns(UserWarning, match="timeperf/again"),
        pytest.raises(KeyError),
        tracker.record_timing("again", device="nonsense"),
    ):
        raise KeyError


@pytest.mark.usefixtures("lenient")
def test_made_up_keys_stop_warning(tracker, monkeypatch):
    """The table of keys that were warned of is bounded."""
    monkeypatch.setattr(mistakes, "_WARNED_AT_MOST", 2)
    texts = warned(lambda: [tracker.scalar(**{f"k{i}": "text"}) for i in range(5)])
    assert (2, 2) == (len(texts), len(mistakes._warned))


def test_any_other_word_is_refused_before_anything_is_recorded(monkeypatch):
    """A wrong word in the environment fails when a tracker is made, not at the first mistake."""
    monkeypatch.setenv(mistakes.VARIABLE, "ignore")
    with pytest.raises(LogError, match="expected AREAL_METRICS_ON_MISTAKE to be raise or warn, got 'ignore'"):
        DistributedStatsTracker()
    code = "from aggregator import stats_tracker"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False
    )
    assert "LogError: expected AREAL_METRICS_ON_MISTAKE" in done.stderr


@pytest.mark.usefixtures("lenient")
def test_a_warning_is_of_the_users_line(tracker):
    """Whatever the verb is, it points to the call."""

    def record():
        tracker.scalar(bad="x", ok=1)
        with tracker.record_timing(""):
            pass
        tracker.denominator(m=MASK, worse=ONES)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record()
    first = record.__code__.co_firstlineno
    assert [(__file__, first + n) for n in (1, 2, 4)] == [(w.filename, w.lineno) for w in caught]
