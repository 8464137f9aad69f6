"""Weights & Biases: online, shared, and offline files.

Online, a run is resumed under its fixed id and told only what lies above the last step that the server has;
what it holds is read back before success is believed. Offline, every lifetime of a run makes a directory of
its own, as wandb does; replay writes the whole run into one, without a process of wandb's. In shared mode
wandb numbers the rows itself, so the true step goes along as the metric `global_step`, the others' axis.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from eventlog import errors

from ..config import WANDB_MODES
from ..steps import Order
from . import base, directory, wandb_file
from .base import Capabilities, DisabledBackend, begun, check_installed, described, named_there, not_open
from .edition import Contents, publish
from .wandb_file import WandbEdition, WandbFile, row_bytes
from .wandb_names import check_names, named_as, names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..steps import Histogram, Row
    from .base import Backend, RunInfo, Selection, Written

_FLUSH_SECONDS: Final = 0.5  # wandb's own default loses up to 15 s to a SIGKILL
_READ_BACK_SECONDS: Final = 10.0
_QUIET: Final = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": _FLUSH_SECONDS,
}


class WandbBackend:
    """One run of Weights & Biases on a server; `timeout` bounds opening and closing, in seconds each.

    What is not given comes from the run: project from the experiment, name from the trial, group
    `{experiment}_{trial}`, id `{experiment}_{trial}_{id_suffix}` ("timestamp" adds a time, "unique" a part of
    the run directory's id). wandb's own files lie in RUN/live unless `path` says otherwise.
    """

    name = "wandb"
    capabilities = Capabilities(order=Order.STRICT, histograms=True)
    mode: ClassVar[str] = "online"
    _running: ClassVar[set[int]] = set()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        id: str | None = None,  # noqa: A002  (wandb's word)
        id_suffix: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        notes: str | None = None,
        tags: str | Sequence[str] | None = None,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        check_installed("wandb")
        check_names(project, id)
        for variable, value in (("WANDB_BASE_URL", base_url), ("WANDB_API_KEY", api_key)):
            if value:
                os.environ[variable] = value  # for wandb's own tools too
        self._path: Path | None = None if path is None else Path(path).absolute()
        self._given: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "name": name,
            "id": id,
            "id_suffix": id_suffix,
            "group": group,
            "job_type": job_type,
            "notes": notes,
            "tags": [tags] if isinstance(tags, str) else None if tags is None else list(tags),
        }
        self._api_key, self._base_url = api_key, base_url
        self._timeout = float(timeout)
        self._names = names()
        self._run: Any = None
        self._drawn: dict[str, Histogram] = {}
        self._passing = ExitStack()
        self._told: int | None = None
        self._held: int | None = None
        self._address = ""
        self.run_id: str | None = None
        self.owner: str | None = None

    @property
    def target(self) -> str:
        """The server, and the run there."""
        return f"{self._server or 'wandb'} {self._address or self._given['id'] or 'RUN'}"

    @property
    def _server(self) -> str | None:
        return self._base_url or os.environ.get("WANDB_BASE_URL")

    @property
    def _key(self) -> str | None:
        return self._api_key or os.environ.get("WANDB_API_KEY")

    @property
    def renamed(self) -> Mapping[str, str]:
        """The keys that have another name there, and those names."""
        return self._names.renamed

    # -- live --------------------------------------------------------------------------------------

    def open(self, run: RunInfo) -> None:
        """Start or resume the run, beside any other run of this process; nothing is ever asked.

        ConfigError without an API key; BackendError when the server does not answer in time.
        """
        wandb = _import()
        about, place, first = self._placed(run)
        if not self._key and not wandb.login(host=self._server, prompt=False, verify=False):
            raise errors.ConfigError(
                f"expected WANDB_API_KEY or `wandb login` for wandb mode {self.mode}, got neither"
            )
        self._begin(run, about)
        self.owner = self._run.config.get(base.OWNER) or run.id
        self._run.config.update({base.OWNER: self.owner})
        begun(run, place, first, about["id"])
        self.run_id = about["id"]
        self._address = f"{self._run.entity}/{self._run.project}/{self._run.id}"
        self._held = self._run.starting_step - 1 if self._run.starting_step else None
        self._told = None

    def histogram(self, step: int, name: str, histogram: Histogram, time: float) -> None:
        """Keep a histogram for the step's row."""
        del step, time
        self._drawn[name] = histogram

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Log one row with its step and its time; RefusedError for one that wandb would leave out."""
        if self._run is None:
            raise not_open(step)
        drawn, self._drawn = self._drawn, {}  # whatever becomes of this row, the next has its own
        row = self._names.row(metrics)
        if (size := row_bytes(row)) > wandb_file.LARGEST_ROW:
            raise errors.RefusedError(
                f"expected a row of at most {wandb_file.LARGEST_ROW} bytes, got {size} at step {step}: "
                f"{self.target}"
            )
        shown = {
            self._names.to(name): _import().Histogram(np_histogram=(list(one.counts), list(one.edges)))
            for name, one in drawn.items()
        }
        self._log({**row, **shown, "_timestamp": time}, step)
        self._told = step

    def alert(self, title: str, text: str, level: str, step: int | None) -> None:
        """Send an alert; wandb has no step for it, so the text says it."""
        if self._run is not None:
            about = text if step is None else f"{text} (step {step})"
            self._run.alert(title=title, text=about, level=level.upper(), wait_duration=0)

    def last_step(self) -> int | None:
        """Return the highest step: told since opening, else what the server had then."""
        return self._held if self._told is None else self._told

    def close(self) -> None:
        """Upload what is left, and read back that it arrived; BackendError when it did not, in time."""
        if self._run is None:
            return
        wandb = _import()
        try:
            try:
                self._finish()
            except TimeoutError:
                if not self._arrived():  # a run that is gone says so here
                    raise
            self._confirm()
        except Exception as error:
            self._told = None  # what is known to have arrived is the last step from now on
            if isinstance(error, (wandb.Error, TimeoutError)):
                raise _as_ours(error, self.target) from error
            raise

    def called(self, run: RunInfo) -> str:
        """Return the id of the run that `open` would open."""
        return self._placed(run)[0]["id"]

    def destination(self, run: RunInfo) -> str:
        """Return which run `open` would open, as no other is called."""
        about, place, _ = self._placed(run, run.started)
        return f"{place}{about['id']}"

    # -- the SDK's run -----------------------------------------------------------------------------

    def _placed(self, run: RunInfo, now: float | None = None) -> tuple[dict[str, Any], str, str]:
        """Return what names the run, and of the first run in its stead the place and the id."""
        about = named_as(run, self._given, time.time() if now is None else now)
        place, first = f"{self._server or 'wandb'} {about.get('entity', '')}/{about['project']}/", about["id"]
        return about | {"id": named_there(run, place, first)}, place, first

    def _begin(self, run: RunInfo, about: Mapping[str, Any]) -> None:
        wandb = _import()
        self._drawn = {}
        service = self._path is None and self.mode != "offline"  # whose own files may lie anywhere
        passing = self._passing if service else None
        folder = directory.usable(self._path or run.path / "live", "wandb.path", passing)
        settings = {**_QUIET, "init_timeout": self._timeout}
        if self.mode != "offline":
            settings |= {"finish_timeout": self._timeout, "finish_timeout_raises": True}
            # Explicitly, since wandb remembers for a process whichever server and key it saw first.
            where = {"base_url": self._server, "api_key": self._key}
            settings |= {name: value for name, value in where.items() if value}
        try:
            self._run = wandb.init(
                mode=self.mode,
                dir=str(folder),
                config=described(run),
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(**settings),
                **about,
            )
        except Exception as error:  # whatever is wrong, be it said by pydantic
            self._passing.close()
            raise _as_ours(error, f"{self.target} {about['id']}") from error
        with self._lock:
            self._running.add(id(self))

    def _log(self, row: dict[str, Any], step: int) -> None:
        self._run.log(row, step=step, commit=True)

    def _finish(self) -> None:
        """Finish the run; `finish` may return before the last bytes land, teardown waits for them."""
        wandb = _import()
        run, self._run = self._run, None
        try:
            run.finish()
        finally:
            with self._lock:
                self._running.discard(id(self))
                if not self._running and wandb.run is None:
                    wandb.teardown()
            self._passing.close()

    def _confirm(self) -> None:
        """BackendError unless the server has the last step: a run that was deleted swallows rows silently."""
        deadline = time.monotonic() + _READ_BACK_SECONDS
        while not self._arrived():
            if time.monotonic() > deadline:
                raise errors.BackendError(
                    f"expected step {self._told} to have arrived, got less from the server: {self.target}"
                )
            time.sleep(0.5)

    def _arrived(self) -> bool:
        if self._told is None:
            return True
        where = {} if self._server is None else {"base_url": self._server}
        api = _import().Api(where, timeout=max(1, round(_READ_BACK_SECONDS)), api_key=self._key)
        last = api.run(self._address).lastHistoryStep
        self._held = last if self._held is None else max(self._held, last)
        return last >= self._told


class WandbSharedBackend(WandbBackend):
    """A run that several processes write to. It cannot say which steps it has: the cursor alone knows."""

    capabilities = Capabilities(order=Order.FORWARD, reads_back=False, histograms=True)
    mode = "shared"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._names = names("global_step")

    def open(self, run: RunInfo) -> None:
        """Join the run; `global_step` becomes the axis of every metric."""
        super().open(run)
        self._held = None
        self._run.define_metric("*", step_metric="global_step", step_sync=True)

    def _log(self, row: dict[str, Any], step: int) -> None:
        self._run.log({**row, "global_step": step})

    def _arrived(self) -> bool:
        return True  # the server's rows carry numbers of its own


class WandbOfflineBackend(WandbBackend):
    """Files in a directory below `path`, RUN/wandb for replay; `wandb sync DIRECTORY` uploads them."""

    # Files of different lifetimes are never continued: each begins empty, and no cursor outlives it.
    capabilities = Capabilities(order=Order.STRICT, lasts=False, histograms=True)
    mode = "offline"

    @property
    def target(self) -> str:
        """The directory around the run's directory; before opening, without a path, only its meaning."""
        return "RUN/wandb" if self._path is None else str(self._path)

    def open(self, run: RunInfo) -> None:
        """Start an offline run beside any other run of this process; nothing is asked, nothing is sent."""
        self._path = self._path or run.path / "live"
        about = named_as(run, self._given, time.time())
        place, first = f"{self._path} ", about["id"]
        about["id"] = self.run_id = named_there(run, place, first)
        self._begin(run, about)
        begun(run, place, first, about["id"])
        self._told = self._held = None
        self._file = Path(self._run.dir).parent / f"run-{about['id']}.wandb"

    def rewrite(
        self, run: RunInfo, rows: Iterable[Row], selection: Selection, *, dry_run: bool = False
    ) -> Written:
        """Write the whole run into a new directory, unless the one there holds exactly this already.

        A directory that was synced is left alone; the new one then gets an id with a number, since a second
        upload under the same id would append everything again.
        """
        folder = self._path = self._path or run.path / "wandb"
        about = named_as(run, self._given, run.started)
        contents = Contents(
            about, described(run), run.started, rows, self._names, self._is_too_large, draws=True
        )
        edition = WandbEdition(contents)
        return publish(edition, folder, run, selection, dry_run=dry_run, taken=_was_synced)

    def _is_too_large(self, row: Row) -> bool:
        return row_bytes(row.metrics) > wandb_file.LARGEST_ROW

    def _confirm(self) -> None:
        """BackendError unless the file has what was told: of a full disk wandb's process says nothing."""
        file = WandbFile(self._file)
        if self._told is None or file.ended():
            return
        self._held = max((step for step, _, _ in file.rows()), default=None)
        if self._held is None or self._held < self._told:
            raise errors.BackendError(
                f"expected step {self._told} in the file, got {self._held} as its last: {self._file}"
            )

    def _arrived(self) -> bool:
        return False  # only the file can tell, once it is complete


_BACKENDS: Final = {
    "online": WandbBackend,
    "shared": WandbSharedBackend,
    "offline": WandbOfflineBackend,
    "dryrun": WandbOfflineBackend,  # wandb's older word, which WANDB_MODE may still hold
}


@functools.wraps(WandbBackend, updated=())
def create(*, mode: str | None = None, **options: Any) -> Backend:
    """Return the backend for a mode; None means WANDB_MODE, else online, as in wandb itself."""
    mode = mode or os.environ.get("WANDB_MODE") or "online"
    if mode == "disabled":
        return DisabledBackend("wandb")
    if mode not in _BACKENDS:
        raise errors.ConfigError(f"expected a wandb mode of {', '.join(WANDB_MODES)}, got {mode!r}")
    return _BACKENDS[mode](**options)


def _import() -> Any:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read at import: else even offline phones home
    import wandb

    return wandb


def _as_ours(error: Exception, target: str) -> errors.BackendError:
    """Tell errors that stay (deleted, forbidden) from those that pass."""
    text = " ".join(str(error).split())
    reason = f"expected wandb to take the run, got {text}"
    if "previously created and deleted" in text:
        reason = "expected the run to be there, got one that was deleted: replay --new-run tells it anew"
    stays = re.search(r"(?:error|HTTP) 40[01349]\b|[Cc]ould not find run|permission denied", text)
    return (errors.BackendGoneError if stays else errors.BackendError)(f"{reason}: {target}")


def _was_synced(folder: Path) -> bool:
    return any(folder.glob("*.synced"))
