"""What every backend must do, as tests for pytest: subclass the contract and say how to make and read yours.

    from replay import BackendContract

    class TestMine(BackendContract):
        def make(self, path): return MyBackend(path / "mine")
        def read(self, path): return [(step, metrics, time), ...]   # by the tracker's own reader

`RewriterContract` is for a backend with `rewrite`. The attributes and the other hooks say what the tracker
can do no better. pytest itself is not imported here.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eventlog import errors

from ..steps import Gate, Order, Row
from .base import Capabilities, Rewriter, RunInfo, Selection, capabilities_of, name_of, target_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from .base import Backend

    Told = list[tuple[int, dict[str, float], float]]

ODD_NAMES = (
    "[/]" * 5,
    "[train] loss",
    "损失/均值",
    "a b",
    " edges ",
    "my.loss",
    ".hidden",
    "_step",
    "~_step",
    "__x",
    "x" * 600,
    "x" * 600 + "y",
    "a:b?c",
    "new\nline",
    "length",
    "step",
)


def example_run(path: Path, **changes: Any) -> RunInfo:
    """Return what a backend is told about a small run in `path`; `changes` are fields of RunInfo."""
    run = RunInfo(
        id="0123456789abcdef" * 2,
        experiment="exp",
        trial="trial",
        path=path / "run",
        config={"lr": 0.5, "model": {"layers": 2, "names": ["a", "b"], "none": None}},
        version_info={"commit_id": "abc", "branch": "main", "is_dirty": False, "version": "1"},
        attempt=0,
        started=999.0,
    )
    return replace(run, **changes)


def example_rows(steps: range, **more: float) -> list[Row]:
    """Return a row per step, its time ten seconds a step from 1000 on."""
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
    """Open, log, close: what holds for every backend. Each test gets an empty directory from pytest."""

    resumes = True  # a second lifetime continues the same target
    times = True  # the target keeps the times it is told
    largest_step = 2**53 + 1

    def make(self, path: Path) -> Backend:
        """Return a backend that writes below `path`; called twice it stands for the same target."""
        raise NotImplementedError

    def read(self, path: Path) -> Told:
        """Return what the target holds, in the order of the steps."""
        raise NotImplementedError

    def stored(self, value: float) -> float:
        """Return what the target makes of a value."""
        return value

    def renamed(self, name: str) -> str:
        """Return what the target calls a metric."""
        return name

    # -- what the tests are made of ----------------------------------------------------------------

    def tell(self, path: Path, told: list[Row], **info: Any) -> Backend:
        """Open, tell, close."""
        backend = self.make(path)
        backend.open(example_run(path, **info))
        for row in told:
            backend.log(row.step, row.metrics, row.time)
        backend.close()
        return backend

    def check_holds(self, path: Path, told: list[Row]) -> None:
        """AssertionError unless the target holds exactly these rows."""
        got = self.read(path)
        _same([row.step for row in told], [step for step, _, _ in got], "steps")
        for row, (_, metrics, time) in zip(told, got, strict=True):
            expected = {self.renamed(key): self.stored(value) for key, value in row.metrics.items()}
            _same(sorted(expected), sorted(metrics), f"names at step {row.step}")
            for key, value in expected.items():
                _same(value, metrics[key], f"{key} at step {row.step}")
            if self.times:
                _same(row.time, time, f"the time of step {row.step}")

    # -- the tests ---------------------------------------------------------------------------------

    def test_it_names_itself_and_its_target(self, tmp_path: Path) -> None:
        """A backend says its name, where it sends, and what the target can do."""
        backend = self.make(tmp_path)
        _true(name_of(backend), "a name")
        _true(target_of(backend), "a target")
        _true(isinstance(getattr(backend, "capabilities", None), Capabilities), "capabilities")
        if capabilities_of(backend).lasts:
            _same(target_of(backend), target_of(self.make(tmp_path)), "the target of a second object")

    def test_rows_arrive_with_steps_values_and_times(self, tmp_path: Path) -> None:
        """Every row arrives once, with the true step, exact values and its original time (report f9)."""
        told = example_rows(range(12))
        self.tell(tmp_path, told)
        self.check_holds(tmp_path, told)

    def test_steps_are_64_bit_and_need_not_be_dense(self, tmp_path: Path) -> None:
        """Steps beyond 2**31 and far apart arrive as they are (report a8)."""
        steps = (0, 7, 2**31 + 5, self.largest_step)
        told = [Row(step, {"v": 1.0}, 1000.0 + at) for at, step in enumerate(steps)]
        self.tell(tmp_path, told)
        self.check_holds(tmp_path, told)

    def test_values_that_are_no_numbers_do_not_stop_the_others(self, tmp_path: Path) -> None:
        """NaN and infinities are delivered beside ordinary values (report e1)."""
        told = [Row(3, {"nan": math.nan, "inf": math.inf, "ninf": -math.inf, "d": 1.0}, 1000.0)]
        self.tell(tmp_path, told)
        self.check_holds(tmp_path, told)

    def test_one_call_a_step_holds_any_number_of_keys(self, tmp_path: Path) -> None:
        """Two hundred keys are one call and one row (report d6)."""
        told = [Row(0, {f"k{i}": float(i) for i in range(200)}, 1000.0)]
        self.tell(tmp_path, told)
        self.check_holds(tmp_path, told)

    def test_odd_names_can_be_told_apart(self, tmp_path: Path) -> None:
        """No name is lost, shortened into another or read as markup (reports e6, e7)."""
        told = [Row(0, {name: float(i) for i, name in enumerate(ODD_NAMES)}, 1000.0)]
        self.tell(tmp_path, told)
        _same(len(ODD_NAMES), len({self.renamed(name) for name in ODD_NAMES}), "different names")
        self.check_holds(tmp_path, told)

    def test_the_last_step_is_the_highest_told(self, tmp_path: Path) -> None:
        """`last_step` is None at first, then the highest step told (report a4)."""
        backend = self.make(tmp_path)
        backend.open(example_run(tmp_path))
        _same(None, backend.last_step(), "the last step of nothing")
        for row in example_rows(range(5)):
            backend.log(row.step, row.metrics, row.time)
        _same(4, backend.last_step(), "the last step")
        backend.close()

    def test_closing_twice_is_fine(self, tmp_path: Path) -> None:
        """A second close does nothing."""
        self.tell(tmp_path, example_rows(range(1))).close()

    def test_calls_outside_its_time_are_refused(self, tmp_path: Path) -> None:
        """Before opening and after closing a row is refused, never silently dropped."""
        with _refused("expected an open backend"):
            self.make(tmp_path).log(0, {"a": 1.0}, 0.0)
        with _refused("expected an open backend"):
            self.tell(tmp_path, []).log(0, {"a": 1.0}, 0.0)

    def test_a_resumed_run_shows_each_step_once(self, tmp_path: Path) -> None:
        """Told 0..15, resumed at 10, told 10..20: every step can be read once (reports a1, a4, a6)."""
        self.tell(tmp_path, example_rows(range(16)))
        if not self.resumes:
            return
        backend = self.make(tmp_path)
        backend.open(example_run(tmp_path, attempt=1))
        capabilities = capabilities_of(backend)
        gate = Gate(capabilities.order, last_step=None if capabilities.rewinds else backend.last_step())
        ready = [row for commit in example_rows(range(10, 21), again=1.0) for row in gate.put(commit)]
        for row in ready + gate.close():
            backend.log(row.step, row.metrics, row.time)
        backend.close()
        steps = [step for step, _, _ in self.read(tmp_path)]
        if capabilities.order is not Order.ANY or capabilities.rewinds:
            _same(sorted(set(steps)), steps, "steps, each once")
        _same(set(range(21)), set(steps), "steps")


class RewriterContract(BackendContract):
    """What a backend must do besides, whose target replay writes as a whole."""

    shares = False  # several runs live in one target without touching each other

    def state(self, path: Path) -> Any:
        """Return what must not change when nothing is to be written."""
        return snapshot(path)

    def rewrite(
        self, path: Path, told: list[Row], selection: Selection | None = None, **info: Any
    ) -> tuple[int, int]:
        """Rewrite the target; return (sent, skipped)."""
        backend = self.make(path)
        if not isinstance(backend, Rewriter):
            raise AssertionError(f"expected a backend with rewrite, got {backend!r}")  # noqa: TRY004
        dry_run = info.pop("dry_run", False)
        written = backend.rewrite(example_run(path, **info), told, selection or Selection(), dry_run=dry_run)
        return written.sent, written.skipped

    def test_a_rewrite_holds_exactly_the_rows(self, tmp_path: Path) -> None:
        """After a rewrite every step is there once, values and times equal the log's."""
        told = example_rows(range(25))
        _same((25, 0), self.rewrite(tmp_path, told), "(sent, skipped)")
        self.check_holds(tmp_path, told)

    def test_the_same_rewrite_again_writes_nothing(self, tmp_path: Path) -> None:
        """The second rewrite sends nothing and touches no file and no folder (report b3)."""
        told = example_rows(range(25))
        self.rewrite(tmp_path, told)
        before = self.state(tmp_path)
        _same((0, 25), self.rewrite(tmp_path, told), "(sent, skipped)")
        _same(before, self.state(tmp_path), "state")

    def test_a_longer_rewrite_ends_as_if_made_once(self, tmp_path: Path) -> None:
        """A run that went on, its last steps replaced, is rewritten to what it is now (report b12)."""
        self.rewrite(tmp_path, example_rows(range(15)))
        told = example_rows(range(10)) + example_rows(range(10, 30), again=1.0)
        self.rewrite(tmp_path, told)
        self.check_holds(tmp_path, told)

    def test_a_shorter_run_leaves_nothing_behind(self, tmp_path: Path) -> None:
        """Steps that the run no longer has are gone after a rewrite."""
        self.rewrite(tmp_path, example_rows(range(25)))
        told = example_rows(range(12))
        self.rewrite(tmp_path, told)
        self.check_holds(tmp_path, told)

    def test_a_narrower_selection_is_refused(self, tmp_path: Path) -> None:
        """A rewrite that would take away what the target was told to hold is refused, a wider one is not."""
        told = example_rows(range(25))
        self.rewrite(tmp_path, told[10:], Selection(since=10))
        self.rewrite(tmp_path, told)
        with _refused(r"includes .*steps the first to the last .*got steps 10 to the last"):
            self.rewrite(tmp_path, told[10:], Selection(since=10))
        self.check_holds(tmp_path, told)

    def test_two_runs_never_mix(self, tmp_path: Path) -> None:
        """A directory of another run is refused; a project that several runs share keeps them apart (a7)."""
        told = example_rows(range(3))
        self.rewrite(tmp_path, told)
        if self.shares:
            _same((5, 0), self.rewrite(tmp_path, example_rows(range(5)), id="other"), "(sent, skipped)")
            _same((0, 3), self.rewrite(tmp_path, told), "(sent, skipped)")
        else:
            with _refused("expected a directory of run other"):
                self.rewrite(tmp_path, told, id="other")
            self.check_holds(tmp_path, told)

    def test_a_new_run_stands_beside_the_old_one(self, tmp_path: Path) -> None:
        """Asked for a new run, everything is told again, and what was there stays."""
        self.rewrite(tmp_path, example_rows(range(3)))
        _same((3, 0), self.rewrite(tmp_path, example_rows(range(3)), fresh=True), "(sent, skipped)")

    def test_a_dry_run_only_counts(self, tmp_path: Path) -> None:
        """A dry run says what would be sent and writes nothing."""
        before = snapshot(tmp_path)
        _same((5, 0), self.rewrite(tmp_path, example_rows(range(5)), dry_run=True), "(sent, skipped)")
        _same(before, snapshot(tmp_path), "files")


def _true(holds: object, what: str) -> None:
    if not holds:
        raise AssertionError(f"expected {what}, got {holds!r}")


def _same(expected: Any, got: Any, what: str) -> None:
    both_nan = all(isinstance(value, float) and math.isnan(value) for value in (expected, got))
    if expected != got and not both_nan:
        raise AssertionError(f"expected {expected!r}, got {got!r}: {what}")


@contextmanager
def _refused(words: str) -> Generator[None]:
    try:
        yield
    except errors.ArealMetricsError as error:
        if not re.search(words, str(error)):
            raise AssertionError(f"expected an error that matches {words!r}, got {error}") from error
    else:
        raise AssertionError(f"expected an error that matches {words!r}, got none")
