"""SwanLab: its server, and local files.

The server is told through SwanLab's own core, which fetches the last step of every key and drops what the
server has: a step told again adds only what is missing. Local files are written directly, since SwanLab's own
writer keeps everything in memory until the end.
"""

from __future__ import annotations

import os
import re
import time as clock
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from eventlog import errors

from ..config import SWANLAB_MODES
from ..steps import Order
from .base import (
    OWNER,
    Capabilities,
    DisabledBackend,
    begun,
    check_installed,
    described,
    named_there,
    not_open,
    section,
)
from .edition import Contents, publish
from .names import Names
from .swanlab_core import SwanlabSession
from .swanlab_file import (
    SwanlabEdition,
    SwanlabFile,
    config_path,
    run_directory,
    scalars,
    write_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import BinaryIO

    from ..steps import Row
    from .base import Backend, RunInfo, Selection, Written

_LONGEST_NAME: Final = 512
_HIGHEST_STEP: Final = 2**48
_PROJECT: Final = re.compile(r"[^0-9a-zA-Z_\-+.]")
_RUN_ID: Final = re.compile(r'[<>:"/\\|?*#%\x00-\x1f\x7f\s]')


def names() -> Names:
    """Return SwanLab's names: it strips edges, so that names meet, and drops control characters."""
    edges = r"\A[\s./]+|[\s./]+\Z"
    return Names(
        "swanlab",
        forbidden=rf"{edges}|[\x00-\x1f\x7f]",
        reserved=lambda name: name.startswith("__swanlab__"),
        limit=_LONGEST_NAME,
    )


def create(
    *,
    mode: str | None = None,
    path: str | os.PathLike[str] | None = None,
    project: str | None = None,
    workspace: str | None = None,
    name: str | None = None,
    id: str | None = None,  # noqa: A002  (SwanLab's word)
    group: str | None = None,
    tags: str | Sequence[str] | None = None,
    api_key: str | None = None,
    host: str | None = None,
    timeout: float = 60.0,
) -> Backend:
    """Return the backend for a mode; None means SWANLAB_MODE, else cloud, as in SwanLab itself."""
    mode = mode or os.environ.get("SWANLAB_MODE") or "cloud"
    if mode not in SWANLAB_MODES:
        raise errors.ConfigError(f"expected a swanlab mode of {', '.join(SWANLAB_MODES)}, got {mode!r}")
    if mode == "disabled":
        return DisabledBackend("swanlab")
    check_installed("swanlab")
    given: dict[str, Any] = {
        "project": project,
        "workspace": workspace,
        "name": name,
        "id": id,
        "group": group,
    }
    given |= {"tags": [tags] if isinstance(tags, str) else None if tags is None else list(tags)}
    if mode in ("local", "offline"):
        return SwanlabBackend(path, given)
    return SwanlabCloudBackend(given, api_key=api_key, host=host, timeout=timeout)


class _Named:
    """What both targets have in common: names, steps that fit, what the run is called."""

    name = "swanlab"

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = dict(given)
        self._names = names()
        self._told: int | None = None
        self.run_id: str | None = None

    @property
    def renamed(self) -> Mapping[str, str]:
        """The keys that have another name there, and those names."""
        return self._names.renamed

    def _about(self, run: RunInfo) -> dict[str, Any]:
        """Return what names the run to SwanLab: as given, else as the run's config says, else its names."""
        pair = f"{run.experiment}_{run.trial}"
        about = {
            "project": run.experiment,
            "name": f"{run.trial}_train",
            "group": pair,
            "id": f"{pair}_train",
        }
        own = section(run.config, "swanlab")
        for source in ({key: own.get(key) for key in self._given}, self._given):
            about |= {key: value for key, value in source.items() if value}
        project, run_id = _PROJECT.sub("-", about["project"])[:100], _RUN_ID.sub("-", about["id"])[:200]
        return about | {"project": project, "id": run_id}

    def _row(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        if _is_too_high(step):
            raise errors.RefusedError(f"expected a step up to {_HIGHEST_STEP} for swanlab, got {step}")
        return self._names.row(metrics)


def _is_too_high(step: int) -> bool:
    return step > _HIGHEST_STEP


class SwanlabBackend(_Named):
    """Files in a directory below `path`: RUN/swanlab for replay, RUN/live/swanlab for live logging.

    Live, every lifetime makes a directory of its own, as SwanLab does.
    """

    # Files of different lifetimes are never continued: each begins empty, and no cursor outlives it.
    capabilities = Capabilities(order=Order.FORWARD, lasts=False)

    def __init__(self, path: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._path = None if path is None else Path(path).absolute()
        self._stream: BinaryIO | None = None
        self._file: SwanlabFile | None = None

    @property
    def target(self) -> str:
        """The directory around the run's directory; before opening, without a path, only its meaning."""
        return "RUN/swanlab" if self._path is None else str(self._path)

    def open(self, run: RunInfo) -> None:
        """Start a new run's file."""
        parent = self._path = self._path or run.path / "live" / "swanlab"
        about, now = self._about(run), clock.time()
        place, first = f"{parent} ", about["id"]
        about["id"] = self.run_id = named_there(run, place, first)
        while (folder := parent / run_directory(now, about["id"])).exists():
            now += 1.0
        try:
            write_config(folder, described(run))
            self._stream = (folder / f"run-{about['id']}.swanlab").open("xb")
        except OSError as error:
            raise errors.BackendError(
                f"expected a directory to write to, got {error.strerror}: {folder}"
            ) from error
        self._file = SwanlabFile(self._stream, flush=True)
        self._file.start(about, now, config_path(folder))
        self._stream.flush()
        begun(run, place, first, about["id"])
        self._told = None

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Append the row; it is in the file when this returns."""
        if self._file is None:
            raise not_open(step)
        self._file.log(step, self._row(step, metrics), time)
        self._told = step if self._told is None else max(self._told, step)

    def last_step(self) -> int | None:
        """Return the highest step told since opening; a new file begins empty."""
        return self._told

    def close(self) -> None:
        """Say that the run ended, and close its file."""
        if self._file is not None and self._stream is not None:
            self._file.finish(clock.time())
            self._stream.close()
            self._file = self._stream = None

    def rewrite(
        self, run: RunInfo, rows: Iterable[Row], selection: Selection, *, dry_run: bool = False
    ) -> Written:
        """Write the whole run into a new directory, unless the one there holds exactly this already."""
        folder = self._path = self._path or run.path / "swanlab"
        contents = Contents(
            self._about(run),
            described(run),
            run.started,
            rows,
            self._names,
            lambda row: _is_too_high(row.step),
        )
        return publish(SwanlabEdition(contents), folder, run, selection, dry_run=dry_run)


class SwanlabCloudBackend(_Named):
    """One experiment on SwanLab's server, resumed under its fixed id.

    `timeout` bounds opening and closing, in seconds each.
    """

    capabilities = Capabilities(order=Order.FORWARD, completes=True)

    def __init__(
        self, given: Mapping[str, Any], *, api_key: str | None, host: str | None, timeout: float
    ) -> None:
        super().__init__(given)
        self._api_key = api_key
        self._host = host
        self._timeout = float(timeout)
        self._session: SwanlabSession | None = None
        self._address = ""
        self.owner: str | None = None

    @property
    def target(self) -> str:
        """The server, and the experiment there."""
        return f"{self._server} {self._address or self._given['id'] or 'RUN'}"

    @property
    def _server(self) -> str:
        return self._host or os.environ.get("SWANLAB_API_HOST", "swanlab")

    def open(self, run: RunInfo) -> None:
        """Start or resume the experiment; nothing is asked.

        ConfigError without an API key, BackendGoneError when the server refuses it, BackendError when it does
        not answer in time.
        """
        about, place, first = self._placed(run)
        self.run_id = about["id"]
        self._address = f"{about['project']}/{about['id']}"
        self._session = SwanlabSession.start(
            about,
            {**described(run), OWNER: run.id},
            run.path,
            key=self._api_key,
            host=self._host,
            timeout=self._timeout,
            target=self.target,
        )
        self.owner = self._session.owner or run.id
        begun(run, place, first, about["id"])
        self._told = None

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Hand the row to the core, which uploads it in the background; raises what went wrong there."""
        if self._session is None:
            raise not_open(step)
        self._session.put(scalars(step, self._row(step, metrics), time))
        self._told = step if self._told is None else max(self._told, step)

    def last_step(self) -> int | None:
        """Return the highest step: told since opening, else what the server had then."""
        if self._told is not None or self._session is None:
            return self._told
        return self._session.last_step

    def called(self, run: RunInfo) -> str:
        """Return the id of the experiment that `open` would open."""
        return self._placed(run)[0]["id"]

    def destination(self, run: RunInfo) -> str:
        """Return which experiment `open` would open, as no other is called."""
        about, place, _ = self._placed(run)
        return f"{place}{about['id']}"

    def _placed(self, run: RunInfo) -> tuple[dict[str, Any], str, str]:
        """Return what names the run, and of the first run in its stead the place and the id."""
        about = self._about(run)
        place, first = f"{self._server} {about.get('workspace', '')}/{about['project']}/", about["id"]
        return about | {"id": named_there(run, place, first)}, place, first

    def close(self) -> None:
        """Upload what is left, end the experiment; BackendError when the server did not take it in time."""
        session, self._session = self._session, None
        if session is not None:
            told, self._told = self._told, session.last_step  # that is what is sure if it fails
            session.finish(self._timeout)
            self._told = told
