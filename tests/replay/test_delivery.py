"""One backend on a thread of its own: nothing it does reaches the training."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from eventlog.errors import BackendGoneError
from replay import MemoryBackend
from replay.delivery import Delivery
from replay.steps import Row
from tests.replay.backend_contract import run_info

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Troubled(MemoryBackend):
    """A target that raises on chosen calls, and may wait for leave before each."""

    def __init__(
        self, *, fails: range = range(0), error: BaseException | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.fails, self.error, self.tries = fails, error or RuntimeError("no route"), 0
        self.leave = threading.Event()
        self.leave.set()
        self.entered = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self.entered.set()
        self.leave.wait()
        self.tries += 1
        if self.tries - 1 in self.fails:
            raise self.error
        super().log(step, metrics, time)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr("replay.delivery.PAUSES", (0.0, 0.0))


def deliver(backend: MemoryBackend, path: Path, steps: range, **options: Any) -> Delivery:
    """Tell steps to a backend and let it finish."""
    delivery = Delivery(backend, run_info(path), path / "cursors", **options)
    for step in steps:
        delivery.tell(Row(step, {"v": float(step)}, 1000.0 + step, {0: 1000.0 + step}))
    delivery.finish()
    assert delivery.join(60)
    return delivery


def steps_of(backend: MemoryBackend) -> list[int]:
    return [step for step, _, _ in backend.rows]


def test_rows_arrive_in_order_and_the_backend_is_closed(tmp_path: Path) -> None:
    """Every step is one call, and closing waits for all of them."""
    backend = MemoryBackend(strict=True)
    status = deliver(backend, tmp_path, range(50)).status()
    assert list(range(50)) == steps_of(backend)
    assert backend.closed
    assert (50, 0, 0, None) == (status.sent, status.withheld, status.dropped, status.error)


def test_a_call_that_fails_once_is_made_again(tmp_path: Path) -> None:
    """A passing failure loses nothing and leaves no gap; it is counted."""
    backend = Troubled(fails=range(2, 4))
    status = deliver(backend, tmp_path, range(6)).status()
    assert list(range(6)) == steps_of(backend)
    assert (6, 2, False) == (status.sent, status.failures, status.off)


def test_a_call_that_got_through_though_it_raised_is_not_repeated(tmp_path: Path) -> None:
    """Where the target can say what it holds, it is asked before a second try."""

    class Late(Troubled):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            MemoryBackend.log(self, step, metrics, time)
            if step == 2:
                raise TimeoutError("no answer")

    backend = Late(strict=True)
    assert 5 == deliver(backend, tmp_path, range(5)).status().sent
    assert list(range(5)) == steps_of(backend)


def test_a_backend_that_keeps_failing_is_switched_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After repeated failures nothing more is tried: one gap at the end, said once, counted (report b9)."""
    backend = Troubled(fails=range(3, 10**6))
    with caplog.at_level(logging.WARNING):
        status = deliver(backend, tmp_path, range(10)).status()
    assert [0, 1, 2] == steps_of(backend)
    assert (3, 7, 3, True, "RuntimeError: no route") == (
        status.sent,
        status.dropped,
        status.failures,
        status.off,
        status.error,
    )
    assert 1 == caplog.text.count("step 3 failed (RuntimeError: no route); switched off")


def test_an_error_that_quotes_a_page_is_said_in_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What an adapter says is cut off, and stands in one line."""
    backend = Troubled(fails=range(10**6), error=RuntimeError("a page\nof it " * 500))
    with caplog.at_level(logging.WARNING):
        deliver(backend, tmp_path, range(2))
    (message,) = caplog.messages
    assert len(message) < 700
    assert message.startswith("memory: step 0 failed (RuntimeError: a page of it a page")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_backend_that_ends_its_thread_is_switched_off(tmp_path: Path, error: BaseException) -> None:
    """A call that exits is a failure like any other: counted, and nothing waits for ever behind it."""
    backend = Troubled(fails=range(3, 10**6), error=error)
    status = deliver(backend, tmp_path, range(10)).status()
    assert (3, 7, 3, True, 0) == (status.sent, status.dropped, status.failures, status.off, status.waiting)
    assert backend.closed


def test_a_target_that_is_gone_is_not_tried_again(tmp_path: Path) -> None:
    """A permanent refusal switches off at the first call (report b4)."""
    backend = Troubled(fails=range(1, 10**6), error=BackendGoneError("run deleted"))
    status = deliver(backend, tmp_path, range(5)).status()
    assert (1, 4, 1, True) == (status.sent, status.dropped, status.failures, status.off)


def test_a_slow_backend_holds_nobody_up(tmp_path: Path) -> None:
    """A backend that does not come back: telling returns, what does not fit is counted (report d4)."""
    backend = Troubled()
    backend.leave.clear()
    delivery = Delivery(backend, run_info(tmp_path), tmp_path / "cursors", queue_rows=10)
    for step in range(100):
        assert delivery.tell(Row(step, {"v": 1.0}, 1000.0))
        if step == 1:
            assert backend.entered.wait(60)
    assert (10, 88) == (
        delivery.status().waiting,
        delivery.status().dropped,
    )  # one at the backend, one still open
    backend.leave.set()
    delivery.finish()
    assert delivery.join(60)
    assert list(range(11)) == steps_of(backend)


def test_closing_never_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A backend that never returns is left behind after the given time, with a warning (report b15)."""
    backend = Troubled()
    backend.leave.clear()
    delivery = Delivery(backend, run_info(tmp_path), tmp_path / "cursors")
    for step in range(3):
        delivery.tell(Row(step, {"v": 1.0}, 1000.0))
    assert backend.entered.wait(60)
    delivery.finish()
    with caplog.at_level(logging.WARNING):
        assert not delivery.join(0.05)
    assert "did not finish in time, 2 steps are left to replay" in caplog.text
    backend.leave.set()
    assert delivery.join(60)


def test_a_backend_that_fails_to_close_is_said(tmp_path: Path) -> None:
    """An error while closing is kept in the status and goes no further."""

    class Stuck(MemoryBackend):
        def close(self) -> None:
            raise OSError("gone")

    assert "OSError: gone" == deliver(Stuck(), tmp_path, range(1)).status().error


def test_a_backend_that_does_not_open_is_loud(tmp_path: Path) -> None:
    """What was configured must work: an error while opening reaches the caller."""

    class Broken(MemoryBackend):
        def open(self, run: object) -> None:  # noqa: ARG002
            raise PermissionError("no key")

    with pytest.raises(PermissionError, match="no key"):
        Delivery(Broken(), run_info(tmp_path), tmp_path / "cursors")


def test_a_step_reaches_the_backend_without_a_later_one(tmp_path: Path) -> None:
    """An open step closes by itself after a while, so the newest point does not wait for the next."""
    backend = Troubled()
    delivery = Delivery(backend, run_info(tmp_path), tmp_path / "cursors", wait=0.01)
    delivery.tell(Row(0, {"v": 1.0}, 1000.0))
    assert backend.entered.wait(60)
    delivery.finish()
    assert delivery.join(60)
    assert [0] == steps_of(backend)


def test_a_resumed_run_says_how_much_is_held_back(tmp_path: Path) -> None:
    """A target that ignores steps below 30, resumed at 10: 20 rows withheld, not fine (report a5)."""
    backend = MemoryBackend(strict=True)
    deliver(backend, tmp_path, range(30))
    status = deliver(backend, tmp_path, range(10, 35)).status()
    assert (5, 20) == (status.sent, status.withheld)
    assert list(range(35)) == steps_of(backend)


def test_a_target_that_refuses_a_step_itself_is_counted(tmp_path: Path) -> None:
    """A refusal as too late by the target is withheld, not a failure, and what follows goes on."""

    class Strict(MemoryBackend):
        def last_step(self) -> int | None:
            return None

    class Refusing(Strict):
        def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
            if step == 1:
                from eventlog.errors import RewindError

                raise RewindError("too late")
            super().log(step, metrics, time)

    status = deliver(Refusing(), tmp_path, range(4)).status()
    assert (3, 1, 0, False) == (status.sent, status.withheld, status.failures, status.off)


def test_a_cursor_that_cannot_be_written_stops_nothing_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Live, an unwritable cursor is said once; the rows still arrive."""

    class Lasting(MemoryBackend):
        def __init__(self) -> None:
            super().__init__()
            from replay import Capabilities

            self.capabilities = Capabilities()

    (tmp_path / "cursors").write_text("in the way")
    backend = Lasting()
    with caplog.at_level(logging.WARNING):
        deliver(backend, tmp_path, range(5))
    assert list(range(5)) == steps_of(backend)
    assert 1 == caplog.text.count("expected to write the cursor of memory")


class Renewable(MemoryBackend):
    """A service with strict steps that makes a run of its own when asked for a fresh one."""

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.runs: list[list[Any]] = [self.rows]

    def open(self, run: Any) -> None:
        super().open(run)
        if run.fresh:
            self.target += "-new"
            self.runs.append(self.rows)


def resumed(path: Path, backend: MemoryBackend, policy: str) -> Delivery:
    """Deliver steps 0 to 15, then, in a second lifetime, 10 to 20 and two late rows."""
    deliver(backend, path, range(16))
    first = [Row(step, {"v": float(step)}, 1000.0 + step, {0: 1000.0 + step}) for step in range(10)]
    second = [Row(step, {"v": 100.0 + step}, 2000.0 + step, {1: 2000.0 + step}) for step in range(10, 21)]
    delivery = Delivery(
        backend, run_info(path), path / "cursors", on_rewind=policy, story=lambda _: [*first, *second[:4]]
    )
    for row in second:
        delivery.tell(row)
    for step in (12, 13):
        assert not delivery.tell(Row(step, {"late": 1.0}, 3000.0 + step, {1: 3000.0 + step}))
    delivery.finish()
    assert delivery.join(60)
    return delivery


def test_a_rewound_run_can_go_on_in_a_new_one(tmp_path: Path) -> None:
    """new_run: the old one keeps what it has, the new one says what it continues; once a lifetime (a5)."""
    backend = Renewable()
    status = resumed(tmp_path, backend, "new_run").status()
    old, new = backend.runs
    assert [(step, {"v": float(step)}) for step in range(16)] == [(s, row) for s, row, _ in old]
    assert [(step, {"v": 100.0 + step}) for step in range(10, 21)] == [(s, row) for s, row, _ in new]
    assert (11, 2, "12-13", 0) == (status.sent, status.withheld, status.withheld_steps, status.failures)
    assert backend.run is not None
    assert {"target": backend.target.removesuffix("-new"), "step": 10} == backend.run.config["continues"]


def test_a_rewound_run_can_be_told_anew(tmp_path: Path) -> None:
    """rewrite: a new run gets everything from the log, and what waited meanwhile only once (report a3)."""
    backend = Renewable()
    status = resumed(tmp_path, backend, "rewrite").status()
    old, new = backend.runs
    assert list(range(16)) == [step for step, _, _ in old]
    expected = [(step, {"v": float(step if step < 10 else 100 + step)}) for step in range(21)]
    assert expected == [(s, row) for s, row, _ in new]
    assert (21, 2, "12-13", 0) == (status.sent, status.withheld, status.withheld_steps, status.failures)


def test_a_new_run_that_cannot_be_begun_switches_off(tmp_path: Path) -> None:
    """A target that refuses a fresh run is off, said and counted; nobody is held up."""

    class Closed(Renewable):
        def open(self, run: Any) -> None:
            if run.fresh:
                raise PermissionError("no more runs")
            super().open(run)

    delivery = resumed(tmp_path, Closed(), "new_run")
    status = delivery.status()
    assert (True, "PermissionError: no more runs", 0) == (status.off, status.error, status.sent)
    assert isinstance(delivery.failure, PermissionError)


def test_what_the_target_calls_the_run_is_kept(tmp_path: Path) -> None:
    """The cursor holds the target's own id of the run (report a16)."""
    from replay.cursor import CursorInMemory

    backend = MemoryBackend()
    backend.run_id = "abc"  # pyright: ignore[reportAttributeAccessIssue]
    deliver(backend, tmp_path, range(2))
    assert "abc" == CursorInMemory(backend, "memory", backend.target).load().run_id
