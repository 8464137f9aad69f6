"""Trackio on a server: one's own, or a Space of Hugging Face's.

Rows have ids made of their content, so none is ever taken twice. The server stamps rows with the time of
receipt; the true time goes along as a metric of its own, `~wall_time`.
"""

from __future__ import annotations

from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

from ..steps import Order
from .base import Capabilities, not_open
from .trackio_run import TrackioRun, config_of, content_of, worded

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from .base import RunInfo

WALL_TIME: Final = "~wall_time"  # the name of no metric: a tilde stands only before reserved ones
_SECONDS: Final = 10.0  # how long a server may take for an answer
_BATCH: Final = 100  # rows in one request, where they come faster than one a second


class TrackioServerBackend(TrackioRun):
    """A run on a server: the id of a Space, or a URL with its write token.

    Rows cannot be taken back there, so a resumed run goes on above the server's last step.
    """

    capabilities = Capabilities(order=Order.FORWARD)

    def __init__(self, place: str, *, project: str | None, name: str | None) -> None:
        super().__init__(project=project, name=name)
        self._server = place
        self._client: Any = None
        self._config: dict[str, Any] | None = None
        self._waiting: dict[str, dict[str, Any]] = {}
        self._sent = 0.0
        self._told: int | None = None

    @property
    def target(self) -> str:
        """The server, the project and the run's id; without the token."""
        return f"{self._server.partition('?')[0]} {self.project}#{self.run_id}"

    def open(self, run: RunInfo) -> None:
        """Reach the server; a Space that does not exist is created."""
        self.place(run)
        self._told = None
        from trackio import deploy
        from trackio.remote_client import RemoteClient

        with self._answered():
            if not self._server.startswith(("http://", "https://")):
                deploy.create_space_if_not_exists(self._server)
            self._client = RemoteClient(
                self._server, hf_token=self._token(), httpx_kwargs={"timeout": _SECONDS}
            )
        self.settle(run, self.target, lambda: self.last_step() is not None)
        self._config = config_of(run)
        self._waiting, self._sent = {}, 0.0

    def called(self, run: RunInfo) -> str:
        """Return the id of the run that `open` would open; of a fresh one that of the first."""
        self.place(run)
        return run.lineage.newest(self.target) or self.run_id

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Send the row; those that come fast go together, and are sent at the latest by `close`."""
        if self._client is None:
            raise not_open(step)
        row = self.names.row(metrics)
        row_id = self.row_id(step, content_of(row), time)
        self._waiting[row_id] = {  # a row that is told again after a failure waits once
            "project": self.project,
            "run": self.run,
            "run_id": self.run_id,
            "step": step,
            "metrics": worded(row | {WALL_TIME: time}),
            "log_id": row_id,
            "config": self._config,
        }
        if len(self._waiting) >= _BATCH or monotonic() - self._sent >= 1.0:
            self._send()
        self._told = step if self._told is None else max(self._told, step)

    def last_step(self) -> int | None:
        """Return the highest step: told since opening, else what the server has of this run."""
        if self._client is None or self._told is not None:
            return self._told
        with self._answered():
            about = {"project": self.project, "run": self.run, "run_id": self.run_id}
            return self._client.predict(api_name="/get_run_summary", **about)["last_step"]

    def close(self) -> None:
        """Send what waits; every row is in the server's file when this returns."""
        if self._client is not None:
            try:
                self._send()
            except BaseException:  # what was told before these is there
                self._told = min(entry["step"] for entry in self._waiting.values()) - 1
                raise
            finally:
                self._client = None

    def _send(self) -> None:
        if self._waiting:
            with self._answered():
                entries = list(self._waiting.values())
                self._client.predict(api_name="/bulk_log", logs=entries, hf_token=self._token())
            self._waiting.clear()
            self._config = None
        self._sent = monotonic()

    def _token(self) -> str | None:
        import huggingface_hub

        return None if self._server.startswith("http") else huggingface_hub.get_token()

    @contextmanager
    def _answered(self) -> Generator[None]:
        """Tell errors that stay from those that pass."""
        try:
            yield
        except Exception as error:
            response: Any = getattr(error, "response", None)
            status = getattr(response, "status_code", None)
            gone = status is not None and 400 <= status < 500 and status not in (408, 429)
            kind = errors.BackendGoneError if gone else errors.BackendError
            said = "" if status is None else f" {response.text[:200]}"
            problem = " ".join(f"{error}{said}".split())
            raise kind(f"expected trackio to take rows, got {problem}: {self.target}") from error
