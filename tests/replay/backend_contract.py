"""What every backend must do, as tests that any adapter can run: subclass the contract, give two methods.

    class TestMine(BackendContract):
        def make(self, path): return MyBackend(path / "mine")
        def read(self, path): return [(step, metrics, time), ...]   # by the tracker's own reader

`RewriterContract` is for a backend with `rewrite`. `stored` says what the target makes of a value, `renamed`
what it calls a metric.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eventlog.errors import ArealMetricsError
from replay.backends.base import Backend, Capabilities, Rewriter, RunInfo, Selection
from replay.steps import Gate, Order, Row

if TYPE_CHECKING:
    from tests.replay.readers import Rows

ODD_NAMES = [
    "[/]" * 5,
    "[train] loss",
    "损失/均值",
    "a b",
    "my.loss",
    "_step",
    "~_step",
    "x" * 600,
    "a:b?c",
    "length",
]


def run_info(path: Path, **changes: Any) -> RunInfo:
    """Return what a backend is told about a small run in `path`."""
    said: dict[str, Any] = {
        "id": "0123456789abcdef" * 2,
        "experiment": "exp",
        "trial": "trial",
        "path": path / "run",
        "config": {"lr": 0.5, "model": {"layers": 2, "names": ["a", "b"], "none": None}},
        "version_info": {"commit_id": "abc", "branch": "main", "is_dirty": False, "version": "1"},
        "attempt": 0,
        "started": 999.0,
    }
    return RunInfo(**{**said, **changes})


def rows(steps: range, **more: float) -> list[Row]:
    """Return a row per step, its time ten seconds a step from 1000 on (report f9)."""
    return [
        Row(step, {"a/b": step / 7, "n": step, **more}, 1000.0 + 10.0 * step, {0: 1000.0 + step})
        for step in steps
    ]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file and folder with its time of change and its content."""
    return {
        str(entry.relative_to(folder)): (
            entry.stat().st_mtime_ns,
            b"" if entry.is_dir() else entry.read_bytes(),
        )
        for entry in sorted([folder, *folder.rglob("*")])
    }


class BackendContract:
    """The shared body. Live: open, log, close. Replay, where a target is rewritten as a whole: rewrite."""

    resumes = True  # a second lifetime continues the same target

    def make(self, path: Path) -> Backend:
        """Return a backend that writes below `path`; called twice it stands for the same target."""
        raise NotImplementedError

    def read(self, path: Path) -> Rows:
        """Return what the target holds, in the order of the steps."""
        raise NotImplementedError

    def stored(self, value: float) -> float:
        """Return what the target makes of a value."""
        return value

    def expected(self, told: list[Row]) -> Rows:
        """Return what the target is expected to hold after these rows."""
        return [(row.step, {key: self.stored(v) for key, v in row.metrics.items()}, row.time) for row in told]

    def tell(self, path: Path, told: list[Row]) -> Backend:
        """Open, tell, close."""
        backend = self.make(path)
        backend.open(run_info(path))
        for row in told:
            backend.log(row.step, row.metrics, row.time)
        backend.close()
        return backend

    def test_it_names_itself_and_its_target(self, tmp_path: Path) -> None:
        """A backend says its name, where it sends, and what the target can do."""
        backend = self.make(tmp_path)
        assert "" != backend.name
        assert isinstance(backend.target, str)
        assert isinstance(getattr(backend, "capabilities", None), Capabilities)
        assert self.make(tmp_path).target == backend.target or not backend.capabilities.lasts

    def test_rows_arrive_with_steps_values_and_times(self, tmp_path: Path) -> None:
        """Every row arrives once, with the true step and its original time (report f9)."""
        told = rows(range(12))
        self.tell(tmp_path, told)
        assert self.expected(told) == self.read(tmp_path)

    def test_steps_are_64_bit_and_need_not_be_dense(self, tmp_path: Path) -> None:
        """Steps beyond 2**31 and far apart arrive as they are (report a8)."""
        told = [Row(step, {"v": 1.0}, 1000.0) for step in (0, 7, 2**31 + 5, 2**53 + 1)]
        self.tell(tmp_path, told)
        assert [0, 7, 2**31 + 5, 2**53 + 1] == [step for step, _, _ in self.read(tmp_path)]

    def test_values_that_are_no_numbers_do_not_stop_the_others(self, tmp_path: Path) -> None:
        """NaN and infinities are delivered as what they are, beside ordinary values (report e1)."""
        values = {"nan": math.nan, "inf": math.inf, "ninf": -math.inf, "d": 1.0}
        self.tell(tmp_path, [Row(3, values, 1000.0)])
        ((_, got, _),) = self.read(tmp_path)
        assert math.isnan(got.pop("nan"))
        assert {"inf": math.inf, "ninf": -math.inf, "d": 1.0} == got

    def test_one_call_a_step_holds_any_number_of_keys(self, tmp_path: Path) -> None:
        """Two hundred keys are one call and one row (report d6)."""
        told = [Row(0, {f"k{i}": float(i) for i in range(200)}, 1000.0)]
        self.tell(tmp_path, told)
        assert self.expected(told) == self.read(tmp_path)

    def test_odd_names_can_be_told_apart(self, tmp_path: Path) -> None:
        """No name is lost, shortened into another or read as markup (reports e6, e7)."""
        told = [Row(0, {name: float(i) for i, name in enumerate(ODD_NAMES)}, 1000.0)]
        self.tell(tmp_path, told)
        ((_, got, _),) = self.read(tmp_path)
        assert {self.renamed(name): float(i) for i, name in enumerate(ODD_NAMES)} == got

    def renamed(self, name: str) -> str:
        """Return what the target calls a metric."""
        return name

    def test_the_last_step_is_the_highest_told(self, tmp_path: Path) -> None:
        """`last_step` is None at first, then the highest step told (report a4)."""
        backend = self.make(tmp_path)
        backend.open(run_info(tmp_path))
        assert None is backend.last_step()
        for row in rows(range(5)):
            backend.log(row.step, row.metrics, row.time)
        assert 4 == backend.last_step()
        backend.close()

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        """A second close does nothing."""
        self.tell(tmp_path, rows(range(1))).close()

    def test_calls_outside_its_time_are_refused(self, tmp_path: Path) -> None:
        """Before opening and after closing a row is refused, never silently dropped."""
        with pytest.raises(ArealMetricsError, match="expected an open backend"):
            self.make(tmp_path).log(0, {"a": 1.0}, 0.0)
        with pytest.raises(ArealMetricsError, match="expected an open backend"):
            self.tell(tmp_path, []).log(0, {"a": 1.0}, 0.0)

    def test_a_resumed_run_shows_each_step_once(self, tmp_path: Path) -> None:
        """Told 0..15, resumed at 10, told 10..20: every step can be read once (reports a1, a6)."""
        self.tell(tmp_path, rows(range(16)))
        if not self.resumes:
            return
        backend = self.make(tmp_path)
        backend.open(run_info(tmp_path, attempt=1))
        capabilities = backend.capabilities  # pyright: ignore[reportAttributeAccessIssue]
        gate = Gate(capabilities.order, last_step=None if capabilities.rewinds else backend.last_step())
        ready = [row for commit in rows(range(10, 21), again=1.0) for row in gate.put(commit)] + gate.close()
        for row in ready:
            backend.log(row.step, row.metrics, row.time)
        backend.close()
        steps = [step for step, _, _ in self.read(tmp_path)]
        assert sorted(set(steps)) == steps or capabilities.order is Order.ANY
        assert set(range(21)) == set(steps)


class RewriterContract(BackendContract):
    """What a backend must do besides, whose target replay writes as a whole."""

    def read_replayed(self, path: Path) -> Rows:
        """Return what the target holds after a rewrite."""
        return self.read(path)

    def rewriter(self, path: Path) -> Rewriter:
        """Return the backend as what it is."""
        backend = self.make(path)
        assert isinstance(backend, Rewriter)
        return backend

    def rewrite(
        self, path: Path, told: list[Row], selection: Selection | None = None, **info: Any
    ) -> tuple[int, int]:
        """Rewrite the target; return (sent, skipped)."""
        written = self.rewriter(path).rewrite(run_info(path, **info), told, selection or Selection())
        return written.sent, written.skipped

    def test_a_rewrite_holds_exactly_the_rows(self, tmp_path: Path) -> None:
        """After a rewrite every step is there once, values and times equal the log's."""
        told = rows(range(25))
        assert (25, 0) == self.rewrite(tmp_path, told)
        assert self.expected(told) == self.read_replayed(tmp_path)

    def test_the_same_rewrite_again_writes_nothing(self, tmp_path: Path) -> None:
        """The second rewrite sends nothing and touches no file and no folder (report b3)."""
        told = rows(range(25))
        self.rewrite(tmp_path, told)
        before = snapshot(tmp_path)
        assert (0, 25) == self.rewrite(tmp_path, told)
        assert before == snapshot(tmp_path)

    def test_a_longer_rewrite_ends_as_if_made_once(self, tmp_path: Path) -> None:
        """A run that went on, its last steps replaced, is rewritten to what it is now (report b12)."""
        self.rewrite(tmp_path, rows(range(15)))
        told = rows(range(10)) + rows(range(10, 30), again=1.0)
        self.rewrite(tmp_path, told)
        assert self.expected(told) == self.read_replayed(tmp_path)

    def test_a_shorter_run_leaves_nothing_behind(self, tmp_path: Path) -> None:
        """Steps that the run no longer has are gone after a rewrite."""
        self.rewrite(tmp_path, rows(range(25)))
        told = rows(range(12))
        self.rewrite(tmp_path, told)
        assert self.expected(told) == self.read_replayed(tmp_path)

    def test_a_narrower_selection_is_refused(self, tmp_path: Path) -> None:
        """A rewrite that would take away what the target was told to hold is refused, a wider one is not."""
        told = rows(range(25))
        self.rewrite(tmp_path, told[10:], Selection(since=10))
        self.rewrite(tmp_path, told)
        with pytest.raises(
            ArealMetricsError,
            match=r"includes .*steps the first to the last .*got steps 10 to the last",
        ):
            self.rewrite(tmp_path, told[10:], Selection(since=10))
        assert self.expected(told) == self.read_replayed(tmp_path)

    def test_a_directory_of_another_run_is_refused(self, tmp_path: Path) -> None:
        """Two runs, or live logging and replay, never share a target (report a7)."""
        self.rewrite(tmp_path, rows(range(3)))
        with pytest.raises(ArealMetricsError, match="expected a directory of run other"):
            self.rewrite(tmp_path, rows(range(3)), id="other")

    def test_a_dry_run_only_counts(self, tmp_path: Path) -> None:
        """A dry run says what would be sent and writes nothing."""
        before = snapshot(tmp_path)
        written = self.rewriter(tmp_path).rewrite(
            run_info(tmp_path), rows(range(5)), Selection(), dry_run=True
        )
        assert (5, 0) == (written.sent, written.skipped)
        assert before == snapshot(tmp_path)
