"""What a backend is: the protocol, what it declares about itself, and what it is told about the run.

    open(run) -> None                  once, before anything else; raises when the target cannot be used
    log(step, metrics, time) -> None   all metrics of one step; `time` in Unix seconds; raises when refused
    last_step() -> int | None          the highest step the target holds, None when it holds none
    close() -> None                    everything told so far is safe when this returns

Beside these a backend has `name` ("tensorboard") and `target` (where it sends: a directory, a project and
run; the cursor's identity), and may declare `capabilities` and have `renamed`, the keys that have another
name there, and `run_id`, what the tracker calls the run; one whose target is known only when it is open may
have `called(run)`, which returns that id before, `destination(run)`, by which runs are kept apart, and, once
it is open, `owner`, the id of the run that its target was told before. One that has alerts has
`alert(title, text, level, step)`, with level info, warn or error; one that shows histograms has
`histogram(step, name, histogram, time)`, called before each try of `log` with the same step, and says so in
its capabilities. Any object of this shape is a backend.

What `log` raises decides what comes next: RefusedError (of which RewindError is one) gives up this row only,
BackendGoneError gives up the target, anything else is tried again.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from eventlog import errors

from ..cursor import Lineage
from ..steps import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ..steps import Row


OWNER: Final = "areal_metrics_run"  # in the config of a run there: the id of the run that it is told
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
    new run on the target even where there is one already, and `lineage` remembers which that was (see
    `named_there`).
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
    lineage: Lineage = field(default_factory=Lineage, compare=False, repr=False)


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
    """What a rewrite did: steps written anew, that lay there already, that it would not take; keys renamed.

    `kept` are steps that the log does not have and the target does: they stay. `refused_steps` and
    `kept_steps` name them: "5, 7-9".
    """

    sent: int
    skipped: int
    renamed: int = 0
    refused: int = 0
    refused_steps: str = ""
    kept: int = 0
    kept_steps: str = ""


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

        What lies there already in the same form is left untouched, and so is a step that is `unknown`.
        """
        ...


def check_backends(backends: Any) -> None:
    """ConfigError for what is no list of backends: a generator would be used up by looking at it."""
    if isinstance(backends, (str, bytes)) or not isinstance(backends, Collection):
        raise errors.ConfigError(f"expected backends as a list, got {backends!r}")
    for at, backend in enumerate(backends):
        if isinstance(backend, type) or any(not callable(getattr(backend, name, None)) for name in _METHODS):
            raise errors.ConfigError(
                f"expected objects with {', '.join(_METHODS)}, as open_backend returns, "
                f"got {backend!r}: backends[{at}]"
            )


def check_installed(package: str) -> None:
    """BackendMissingError, which says how it is installed, without the package of a tracker."""
    if find_spec(package) is None:
        raise errors.BackendMissingError(
            f"expected the package {package}, got none: pip install 'areal-metrics[{package}]'"
        )


def not_open(step: int) -> errors.BackendError:
    """Return what `log` raises before `open` and after `close`."""
    return errors.BackendError(
        f"expected an open backend, got a call at step {step} before open or after close"
    )


def name_of(backend: Backend) -> str:
    """Return the backend's name; that of its class for an object that has none."""
    return getattr(backend, "name", None) or type(backend).__name__.lower()


def target_of(backend: Backend) -> str:
    """Return the backend's target; for an object that names none, one that stands for this very object."""
    return getattr(backend, "target", None) or f"{name_of(backend)}-{id(backend):x}"


def as_ours(error: BaseException, backend: Backend) -> errors.ArealMetricsError:
    """Return what a backend raised as an error of the distribution that says which backend it was."""
    if isinstance(error, errors.ArealMetricsError):
        return error
    ours = errors.BackendError(f"{name_of(backend)} failed, got {error!r}: {target_of(backend)}")
    ours.__cause__ = error
    return ours


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


def arrived(backend: Backend, step: int) -> bool:
    """Whether a call that raised got through all the same, as far as the target can say."""
    can = capabilities_of(backend)
    if not can.reads_back or can.order is Order.ANY:
        return False
    try:
        last = backend.last_step()
    except Exception:  # noqa: BLE001  (somebody else's code, and in trouble)
        return False
    return last is not None and last >= step


def tell_surely(
    backend: Backend,
    row: Row,
    pauses: Sequence[float],
    *,
    pause: Callable[[float], object],
    passing: type[BaseException] = Exception,
    noted: Callable[[BaseException], object] = lambda _: None,
) -> None:
    """Tell a row, again after each of some pauses; raises what its last try did.

    What will never pass (RefusedError, BackendGoneError) is raised at once, as is what is not `passing`.
    """
    for seconds in (*pauses, None):
        try:
            tell(backend, row)
        except errors.RefusedError:
            raise
        except passing as error:
            noted(error)
            if seconds is None or isinstance(error, errors.BackendGoneError):
                raise
        else:
            return
        pause(seconds)
        if arrived(backend, row.step):
            return


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what a run's config says about one backend, in its `stats_logger` or at its root."""
    own = config.get("stats_logger") or config
    found = own.get(name)
    return found if isinstance(found, dict) else {}


def described(run: RunInfo) -> dict[str, Any]:
    """Return the config that a tracker is told, with the version of the code beside it."""
    version = {"version_info": dict(run.version_info)} if run.version_info else {}
    return {**run.config, **version}


def with_lineage(run: RunInfo, backend: Backend, cursors: Path, *, keeps: bool = True) -> RunInfo:
    """Return what a backend is told, which then knows and remembers with which of its runs to go on."""
    lineage = Lineage(cursors, name_of(backend), beside=run.path / "cursors", keeps=keeps)
    return replace(run, lineage=lineage)


def named_there(run: RunInfo, place: str, first: str) -> str:
    """Return the name of the run to open on a tracker: the first one's, or the newest's begun anew since.

    A fresh run is called after the time, and by chance: others begin theirs in the same second. `begun`
    remembers it, once it is there.
    """
    if run.fresh:
        return f"{first}-{datetime.now(UTC):%Y%m%d%H%M%S}-{secrets.token_hex(3)}"
    return run.lineage.newest(f"{place}{first}") or first


def begun(run: RunInfo, place: str, first: str, name: str) -> None:
    """Take note that a run was opened as `name` at `place`: a fresh one is gone on with from now on."""
    if run.fresh:
        run.lineage.begin(f"{place}{first}", name)


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
