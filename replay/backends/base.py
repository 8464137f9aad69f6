"""What a backend is: the protocol, what it declares about itself, and what it is told about the run.

    open(run) -> None                  once, before anything else; raises when the target cannot be used
    log(step, metrics, time) -> None   all metrics of one step; `time` in Unix seconds; raises when refused
    last_step() -> int | None          the highest step the target holds, None when it holds none
    close() -> None                    everything told so far is safe when this returns

Beside these a backend has `name` ("tensorboard") and `target` (where it sends: a directory, a project and
run; the cursor's identity), and may declare `capabilities` and have `renamed`, the keys that have another
name there; one that has alerts has `alert(title, text, level, step)`, with level info, warn or error; one
that shows histograms has `histogram(step, name, histogram, time)`, called before `log` of the same step, and
says so in its capabilities. Any object of this shape is a backend.

What `log` raises decides what comes next: RefusedError (of which RewindError is one) gives up this row only,
BackendGoneError gives up the target, anything else is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from eventlog import errors

from ..cursor import CursorFile, CursorInMemory
from ..steps import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ..cursor import CursorStore
    from ..steps import Row


_METHODS: Final = ("open", "log", "last_step", "close")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target can do; the defaults hold for an object that declares nothing.

    order:      which steps it takes (see `Order`)
    reads_back: `last_step()` is the truth of the target; False: None may also mean "cannot say"
    rewinds:    on resuming it can discard its own later steps, so nothing of a resumed run is withheld
    lasts:      the target outlives this process; only then it has a cursor file
    completes:  a step told again adds the keys it lacks and changes no other: an interrupted one is repeated
    histograms: it has `histogram`, and a `rewrite` of its own tells the rows' histograms
    """

    order: Order = Order.ANY
    reads_back: bool = True
    rewinds: bool = False
    lasts: bool = True
    completes: bool = False
    histograms: bool = False


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a backend is told about the run when it opens.

    `path` is the run directory; `started` Unix seconds of its first attempt or commit; `fresh` asks for a
    new run on the target even where there is one already.
    """

    id: str
    experiment: str
    trial: str
    path: Path
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    attempt: int | None = None
    started: float = 0.0
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """Which part of a run is told: steps from `since` to `until` (both inclusive), keys by globs."""

    since: int | None = None
    until: int | None = None
    keys: tuple[str, ...] | None = None

    def covers(self, other: Selection) -> bool:
        """Whether everything that `other` selects is selected here too (globs are compared as text)."""
        return (
            (self.since is None or (other.since is not None and self.since <= other.since))
            and (self.until is None or (other.until is not None and self.until >= other.until))
            and (self.keys is None or (other.keys is not None and set(other.keys) <= set(self.keys)))
        )

    def __str__(self) -> str:
        since = "the first" if self.since is None else self.since
        until = "the last" if self.until is None else self.until
        return f"steps {since} to {until} of {'all keys' if self.keys is None else ', '.join(self.keys)}"


@dataclass(frozen=True, slots=True)
class Written:
    """What a rewrite did: steps written anew, steps that lay there already, keys renamed, steps refused."""

    sent: int
    skipped: int
    renamed: int = 0
    refused: int = 0


class Backend(Protocol):
    """An adapter to one tracker. See the module's text for what each method promises."""

    name: str

    @property
    def target(self) -> str:
        """Where it sends: two backends with the same name and target tell the same thing."""
        ...

    def open(self, run: RunInfo) -> None:
        """Make the target ready for `log`."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Tell all metrics of one step."""
        ...

    def last_step(self) -> int | None:
        """Return the highest step the target holds."""
        ...

    def close(self) -> None:
        """Finish; may be called twice."""
        ...


@runtime_checkable
class Rewriter(Protocol):
    """A backend whose target replay writes as a whole, so that it always ends as if replayed once."""

    def rewrite(
        self, run: RunInfo, rows: Iterable[Row], selection: Selection, *, dry_run: bool = False
    ) -> Written:
        """Make the target hold exactly `rows` (ascending steps, one row each); `rows` may be read twice.

        What lies there already in the same form is left untouched.
        """
        ...


def check_backends(backends: Any) -> None:
    """ConfigError for what is no sequence of backends."""
    if isinstance(backends, (str, bytes)) or not hasattr(backends, "__iter__"):
        raise errors.ConfigError(f"expected backends as a list, got {backends!r}")
    for at, backend in enumerate(backends):
        if isinstance(backend, type) or any(not callable(getattr(backend, name, None)) for name in _METHODS):
            raise errors.ConfigError(
                f"expected objects with {', '.join(_METHODS)}, as open_backend returns, "
                f"got {backend!r}: backends[{at}]"
            )


def name_of(backend: Backend) -> str:
    """Return the backend's name; that of its class for an object that has none."""
    return getattr(backend, "name", None) or type(backend).__name__.lower()


def target_of(backend: Backend) -> str:
    """Return the backend's target; for an object that names none, one that stands for this very object."""
    return getattr(backend, "target", None) or f"{name_of(backend)}-{id(backend):x}"


def capabilities_of(backend: Backend) -> Capabilities:
    """Return what the backend declares; without a target of its own it does not last."""
    declared = getattr(backend, "capabilities", None)
    if isinstance(declared, Capabilities):
        return declared
    return Capabilities(lasts=bool(getattr(backend, "target", None)))


def tell(backend: Backend, row: Row) -> None:
    """Tell an opened backend one row, with the histograms if it shows them."""
    told: Any = backend
    if row.histograms and capabilities_of(backend).histograms:
        for name, histogram in row.histograms.items():
            told.histogram(row.step, name, histogram, row.time)
    backend.log(row.step, row.metrics, row.time)


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what a run's config says about one backend, in its `stats_logger` or at its root."""
    own = config.get("stats_logger") or config
    found = own.get(name)
    return found if isinstance(found, dict) else {}


def described(run: RunInfo) -> dict[str, Any]:
    """Return the config that a tracker is told, with the version of the code beside it."""
    version = {"version_info": dict(run.version_info)} if run.version_info else {}
    return {**run.config, **version}


def store_for(backend: Backend, folder: Path) -> CursorStore:
    """Return where the cursor of an opened backend is kept: in a file of `folder` if the target lasts."""
    name, target = name_of(backend), target_of(backend)
    if capabilities_of(backend).lasts:
        return CursorFile(folder, name, target)
    return CursorInMemory(backend, name, target)


class DisabledBackend:
    """What a backend in mode "disabled" is: it takes everything and keeps nothing."""

    capabilities = Capabilities(lasts=False)

    def __init__(self, name: str) -> None:
        self.name = name
        self.target = "disabled"

    def open(self, run: RunInfo) -> None:
        """Do nothing."""

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Do nothing."""

    def last_step(self) -> int | None:
        """Return None."""
        return None

    def close(self) -> None:
        """Do nothing."""

    def rewrite(
        self, run: RunInfo, rows: Iterable[Row], selection: Selection, *, dry_run: bool = False
    ) -> Written:
        """Write nothing."""
        del run, rows, selection, dry_run
        return Written(0, 0)
