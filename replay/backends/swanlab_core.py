"""An experiment on SwanLab's server through SwanLab's own core, without its `Run`.

Nothing is printed or asked, no signal handler or hook of the process is touched, nothing of this machine is
probed, and no call takes longer than its limit.
"""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

from .base import OWNER
from .swanlab_file import config_text, module, timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_MOST_WAITING: Final = 200_000  # records that may wait for the server
_LOGIN_SECONDS: Final = 10.0
_PASSING: Final = frozenset({408, 425, 429})  # "too slow", "too early", "too many requests"


class SwanlabSession:
    """One running experiment.

    `last_step` is the highest step that the server had when it was opened, `owner` the run that its config
    then said it was told; None where there was none.
    What the server refuses, SwanLab's transport drops in silence; here the next call raises it.
    """

    def __init__(self, core: Any, answer: Any, owner: str | None, target: str) -> None:
        self.last_step: int | None = answer.global_step if answer.global_step >= 0 else None
        self.owner = owner
        self._core = core
        self._target = target
        self._refused: str | None = None
        self._calls = 0
        self._transport = core._transport  # noqa: SLF001  (there is no public way to hear of it)
        self._dispatch = self._transport._dispatcher  # noqa: SLF001
        self._transport._dispatcher = self._watched  # noqa: SLF001

    @classmethod
    def start(
        cls,
        about: Mapping[str, Any],
        config: Mapping[str, Any],
        folder: Path,
        *,
        key: str | None,
        host: str | None,
        timeout: float,
        target: str,
    ) -> SwanlabSession:
        """Start or resume the experiment.

        ConfigError without an API key, BackendGoneError when the server refuses it, BackendError when it does
        not answer in time.
        """
        _client.enter()
        try:
            core, answer, owner = _within(
                timeout, partial(_started, about, folder, key, host, timeout, target), target
            )
            session = cls(core, answer, owner, target)
            save = module("save.v1.save")
            text = config_text({**config, OWNER: owner or config[OWNER]})
            core.upsert_saves([save.SaveRecord(name="config", type=save.SAVE_TYPE_CONFIG, payload=text)])
        except BaseException:
            _client.leave(failed=True)
            raise
        return session

    def put(self, scalars: list[Any]) -> None:
        """Hand over scalars, which are uploaded in the background.

        BackendGoneError once the server has refused something, BackendError while it lags far behind.
        """
        self._check()
        self._calls += 1
        if self._calls % 100 == 0 and len(self._transport.pending_records()) > _MOST_WAITING:
            raise errors.BackendError(
                f"expected swanlab to keep up, got {_MOST_WAITING} rows waiting: {self._target}"
            )
        self._core.upsert_scalars(scalars)

    def finish(self, timeout: float) -> None:
        """Upload what is left and end the experiment; BackendError when that takes longer."""
        failed = True
        try:
            _within(timeout, self._end, self._target)
            failed = False
        except errors.BackendError:
            self._check()  # a target that is gone says why
            raise
        finally:
            _client.leave(failed=failed)
        self._check()

    def _end(self) -> bool:
        core_pb, run_pb = module("grpc.core.v1.core"), module("run.v1.run")
        now = timestamp(time.time())
        record = run_pb.FinishRecord(state=run_pb.RUN_STATE_FINISHED, finished_at=now)
        self._core.deliver_run_finish(core_pb.DeliverRunFinishRequest(finish_record=record))
        answer = self._core.confirm_run_finish()
        if not answer.success:
            raise errors.BackendError(
                f"expected swanlab to end the run, got {answer.message}: {self._target}"
            )
        return True

    def _check(self) -> None:
        if self._refused is not None:
            raise errors.BackendGoneError(
                f"expected swanlab to take rows, got {self._refused}: {self._target}"
            )

    def _watched(self, records: Any) -> Any:
        result = self._dispatch(records)
        for failure in result.failures:
            if failure.status in _PASSING:  # SwanLab gives it up; what remains is sent again
                result.remaining_records = [*failure.records, *result.remaining_records]
            elif self._refused is None and not getattr(failure.exception, "retryable", True):
                self._refused = " ".join(f"{failure.status} {failure.message}".split())
        return result


def _started(
    about: Mapping[str, Any], folder: Path, key: str | None, host: str | None, timeout: float, target: str
) -> tuple[Any, Any, str | None]:
    """Return a running core, what the server answered, and which run an old experiment was told."""
    core_pb, run_pb = module("grpc.core.v1.core"), module("run.v1.run")
    settings = import_module("swanlab.sdk.internal.settings").create_settings()
    settings.merge_settings({"mode": "online", "interactive": False, "core": {"skip_store": True}})
    seconds = min(_LOGIN_SECONDS, timeout)
    _client.log_in(key or settings.api_key, host or settings.api_host, seconds, target)
    core = import_module("swanlab.sdk.internal.core_python.core").CorePython("online")
    record = run_pb.StartRecord(**about, resume=run_pb.RESUME_MODE_ALLOW, started_at=timestamp(time.time()))
    own = settings.to_core_proto(run_id=about["id"], run_dir=folder)  # a name only: nothing is stored
    answer = core.deliver_run_start(core_pb.DeliverRunStartRequest(start_record=record, core_settings=own))
    if not answer.success:
        raise _as_ours(answer.message, target)
    return core, answer, None if answer.new_experiment else _owner(core._ctx)  # noqa: SLF001


def _owner(context: Any) -> str | None:
    """Return which run an experiment's config says that it was told; None where nothing can be learned."""
    client = import_module("swanlab.sdk.internal.core_python.client")
    place = f"/project/{context.username}/{context.project}/runs/{context.experiment_id}"
    try:
        return client.get(place, retries=0, log_error=False).data["profile"]["config"][OWNER]["value"]
    except (OSError, LookupError, TypeError):  # no answer, or an experiment of somebody else's making
        return None


class _Client:
    """SwanLab's client, of which a process has one: opened for the first of our runs, left after the last.

    SwanLab's own words on standard output are silenced meanwhile. A client that was there already is shared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._place: str | None = None
        self._was_quiet = False

    def enter(self) -> None:
        """Count a run."""
        console = import_module("swanlab.sdk.internal.pkg.console")
        with self._lock:
            if not self._users:
                self._was_quiet, console.c.quiet = console.c.quiet, True
            self._users += 1

    def leave(self, *, failed: bool = False) -> None:
        """Count a run that ended; the client goes with the last, since its session ends with a run.

        After a failure silence stays: a call that was left behind may still have something to say.
        """
        client = import_module("swanlab.sdk.internal.core_python.client")
        console = import_module("swanlab.sdk.internal.pkg.console")
        with self._lock:
            self._users -= 1
            if not self._users:
                console.c.quiet = self._was_quiet or failed
                if self._place is not None and client.exists():
                    client.reset()
                self._place = None

    def log_in(self, key: str | None, host: str, seconds: float, target: str) -> None:
        """Open the client, unless there is one; a bad key is told from a silent server."""
        client = import_module("swanlab.sdk.internal.core_python.client")
        requests = import_module("requests")
        with self._lock:
            if client.exists():
                if self._place not in (None, host):
                    raise errors.BackendError(
                        f"expected one SwanLab server a process, got {self._place}: {target}"
                    )
                return
            if not key:
                raise errors.ConfigError(
                    "expected SWANLAB_API_KEY or swanlab.api_key for swanlab mode cloud, got neither"
                )
            try:
                url = f"{host.rstrip('/')}/api/login/api_key"
                answer = requests.post(url, headers={"authorization": key}, timeout=seconds)
            except requests.RequestException as error:
                raise errors.BackendError(f"expected swanlab to answer, got {error}: {target}") from error
            if not answer.ok:
                stays = answer.status_code in (401, 403)
                kind = errors.BackendGoneError if stays else errors.BackendError
                what = "take the API key" if stays else "answer the login"
                raise kind(f"expected swanlab to {what}, got {answer.status_code}: {target}")
            client.new(key, host)
            self._place = host


_client = _Client()


def _within(seconds: float, call: Callable[[], Any], target: str) -> Any:
    """Return what `call` returns or raises; BackendError when it takes too long (it is left behind then)."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:  # noqa: BLE001  (raised below, in the caller's thread)
            failed.append(error)

    thread = threading.Thread(target=work, name="areal-metrics-swanlab-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise (
            failed[0] if isinstance(failed[0], errors.ArealMetricsError) else _as_ours(str(failed[0]), target)
        )
    if not done:
        raise errors.BackendError(f"expected swanlab to answer within {seconds:g} s, got nothing: {target}")
    return done[0]


def _as_ours(problem: str, target: str) -> errors.BackendError:
    """Tell errors that stay (deleted, forbidden) from those that pass."""
    text = " ".join(problem.split())
    kind = errors.BackendGoneError if re.search(r"\[?40[134]\b", text) else errors.BackendError
    return kind(f"expected swanlab to take the run, got {text}: {target}")
