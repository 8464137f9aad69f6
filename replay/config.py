"""What `StatsLogger` is configured with; AReaL's own objects, OmegaConf's and plain dicts are taken too."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from eventlog import errors, redact_sensitive_config

__all__ = [
    "StatsLoggerConfig",
    "SwanlabConfig",
    "TensorBoardConfig",
    "TrackioConfig",
    "WandBConfig",
    "load_config",
    "log_root",
    "redact_sensitive_config",
    "resolve",
]

MISSING: Final = "???"  # OmegaConf's word for "must be given"
WANDB_MODES: Final = ("online", "offline", "disabled", "shared")
SWANLAB_MODES: Final = ("cloud", "online", "local", "offline", "disabled")
TRACKIO_MODES: Final = ("online", "local", "disabled")
REWIND_POLICIES: Final = ("warn", "error", "rewrite", "new_run")


@dataclass
class WandBConfig:
    """Weights & Biases. What is empty is derived: project from the experiment, name from the trial."""

    mode: str = "disabled"
    wandb_base_url: str = ""
    wandb_api_key: str = ""
    entity: str | None = None
    project: str | None = None
    name: str | None = None
    job_type: str | None = None
    group: str | None = None
    notes: str | None = None
    tags: list[str] | None = None
    config: dict[str, Any] | None = None  # accepted as AReaL does; the experiment's whole config is sent
    id_suffix: str | None = "train"  # "timestamp": every start is a new run


@dataclass
class SwanlabConfig:
    """SwanLab."""

    project: str | None = None
    name: str | None = None
    config: dict[str, Any] | None = None  # as in WandBConfig
    logdir: str | None = None
    mode: str | None = "disabled"
    api_key: str | None = field(default_factory=lambda: os.environ.get("SWANLAB_API_KEY"))


@dataclass
class TensorBoardConfig:
    """TensorBoard; without a path it is off."""

    path: str | None = None


@dataclass
class TrackioConfig:
    """Trackio."""

    mode: str = "disabled"
    project: str | None = None
    name: str | None = None
    space_id: str | None = None


@dataclass
class StatsLoggerConfig:
    """Which trial this is, where its logs lie, and which trackers are told.

    `on_rewind` says what happens when a step comes that a tracker can no longer take: "warn" counts it and
    warns once, "error" raises RewindError at the commit (which is in the log by then), "new_run" goes on in a
    new run of the tracker, "rewrite" tells everything from the log to a new run, or to the same where the
    tracker can go back (TensorBoard). The last two happen once in a lifetime; what comes too late after that
    is counted.
    """

    experiment_name: str = MISSING
    trial_name: str = MISSING
    fileroot: str = MISSING
    wandb: WandBConfig = field(default_factory=WandBConfig)
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    on_rewind: str = "warn"


_Section = TypeVar("_Section", WandBConfig, SwanlabConfig, TensorBoardConfig, TrackioConfig)


def resolve(config: Any) -> StatsLoggerConfig:
    """Return the checked logger's config of an experiment's config (its `stats_logger`), or of a bare one.

    Any object or mapping with these names is taken. Names missing in the logger's part are looked up in the
    experiment's. ConfigError names what is missing or invalid, and what a mapping has beside these names: a
    mistyped one would switch a tracker off. Objects may have more fields, as AReaL's do.
    """
    experiment = _plain(config)
    given = _plain(entry(experiment, "stats_logger", experiment))
    own = given or experiment
    if given:
        _check_part("stats_logger", own, StatsLoggerConfig)
    resolved = StatsLoggerConfig(
        wandb=_section("wandb", WandBConfig, entry(own, "wandb", None)),
        swanlab=_section("swanlab", SwanlabConfig, entry(own, "swanlab", None)),
        tensorboard=_section("tensorboard", TensorBoardConfig, entry(own, "tensorboard", None)),
        trackio=_section("trackio", TrackioConfig, entry(own, "trackio", None)),
        on_rewind=_typed("on_rewind", entry(own, "on_rewind", None), str) or "warn",
        experiment_name=_required("experiment_name", own, experiment),
        trial_name=_required("trial_name", own, experiment),
        fileroot=_required("fileroot", own, experiment, entry(experiment, "cluster", None)),
    )
    _check(resolved)
    return resolved


def log_root(config: StatsLoggerConfig) -> Path:
    """Return `{fileroot}/logs/{user}/{experiment}/{trial}`; ConfigError for names that lead elsewhere."""
    for what, name in (("experiment_name", config.experiment_name), ("trial_name", config.trial_name)):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise errors.ConfigError(
                f"expected stats_logger.{what} to name a directory below the log root, got {name!r}"
            )
    root = Path(config.fileroot).expanduser() / "logs" / _user()
    return root / config.experiment_name / config.trial_name


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> StatsLoggerConfig:
    """Read a YAML file with the root key `stats_logger:`; overrides as "stats_logger.wandb.mode=offline".

    Raises ConfigError for a file without that key, unknown names, or when OmegaConf is not installed.
    """
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError
    except ImportError as error:
        raise errors.ConfigError(
            "expected the package omegaconf, got none: pip install 'areal-metrics[yaml]'"
        ) from error
    try:
        loaded, given = OmegaConf.load(os.fspath(path)), OmegaConf.from_dotlist(list(overrides))
        stray = sorted(set(map(str, given)) - set(map(str, loaded)))
        root = OmegaConf.to_container(OmegaConf.merge(loaded, given), resolve=True)
    except (OSError, OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise errors.ConfigError(
            f"expected a YAML file with the key stats_logger, got {problem}: {path}"
        ) from error
    if stray:
        raise errors.ConfigError(
            f"expected overrides below a key of the file (stats_logger.…), got {stray[0]}…: {path}"
        )
    own = root.get("stats_logger") if isinstance(root, dict) else None
    if not isinstance(own, dict):
        raise errors.ConfigError(f"expected the key stats_logger, got {sorted(map(str, root or ()))}: {path}")
    return resolve(root)


def entry(config: Any, name: str, default: Any) -> Any:
    """Return what a mapping or an object has under a name."""
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)


def _plain(config: Any) -> Any:
    """Return what is OmegaConf's as dicts, or as objects where it has the fields of some class."""
    module = sys.modules.get("omegaconf")
    if module is None or not module.OmegaConf.is_config(config):
        return config
    omegaconf = module.OmegaConf
    if not omegaconf.is_dict(config):
        return omegaconf.to_container(config, resolve=True)
    read = {key: MISSING if omegaconf.is_missing(config, key) else _plain(config[key]) for key in config}
    return read if omegaconf.get_type(config) is dict else SimpleNamespace(**read)


def _required(name: str, *configs: Any) -> str:
    for config in configs:
        value = entry(config, name, None)
        if value in (None, "", MISSING):
            continue
        if not isinstance(value, (str, os.PathLike)):
            raise errors.ConfigError(f"expected stats_logger.{name} as text or a path, got {value!r}")
        return os.fspath(value)
    raise errors.ConfigError(f"expected stats_logger.{name}, got none: it is required")


def _section(name: str, kind: type[_Section], given: Any) -> _Section:
    made, types = kind(), get_type_hints(kind)
    _check_part(f"stats_logger.{name}", given, kind)
    for each in fields(kind):
        value = entry(given, each.name, MISSING)
        if not (isinstance(value, str) and value == MISSING):
            setattr(made, each.name, _typed(f"{name}.{each.name}", value, types[each.name]))
    return made


_KINDS: Final[dict[Any, tuple[str, Callable[[Any], bool]]]] = {
    str: ("text", lambda value: isinstance(value, str)),
    list: ("a list of texts", lambda value: _is_list(value) and all(isinstance(each, str) for each in value)),
    dict: ("a mapping", lambda value: isinstance(value, Mapping)),
}


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _typed(where: str, given: Any, annotation: Any) -> Any:
    """Return the value of a field as its annotation says; ConfigError for one of another type."""
    value = os.fspath(given) if isinstance(given, os.PathLike) else given
    if value is None:
        return None
    parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    kinds = [get_origin(part) or part for part in parts if part is not NoneType]
    for kind in kinds:
        if _KINDS[kind][1](value):
            return kind(value)
    words = " or ".join(_KINDS[kind][0] for kind in kinds)
    raise errors.ConfigError(f"expected stats_logger.{where} to be {words}, got {given!r}")


def _check(config: StatsLoggerConfig) -> None:
    config.swanlab.mode = config.swanlab.mode or "disabled"
    for what, value, valid in (
        ("wandb.mode", config.wandb.mode, WANDB_MODES),
        ("swanlab.mode", config.swanlab.mode, SWANLAB_MODES),
        ("trackio.mode", config.trackio.mode, TRACKIO_MODES),
        ("on_rewind", config.on_rewind, REWIND_POLICIES),
    ):
        if value not in valid:
            raise errors.ConfigError(
                f"expected stats_logger.{what} to be one of {', '.join(valid)}, got {value!r}"
            )
    for what, path in (
        ("tensorboard.path", config.tensorboard.path),
        ("swanlab.logdir", config.swanlab.logdir),
    ):
        if path == "":
            raise errors.ConfigError(f"expected stats_logger.{what} to name a directory, got {path!r}")
    log_root(config)


def _check_part(where: str, given: Any, kind: type) -> None:
    """ConfigError for a mapping with names that mean nothing here, and for what has no names at all."""
    known = [each.name for each in fields(kind)]
    if isinstance(given, (str, bytes, int, float, list, tuple, set)):
        raise errors.ConfigError(f"expected {where} with {', '.join(known)}, got {given!r}")
    unknown = sorted(set(map(str, given)) - set(known)) if isinstance(given, Mapping) else []
    if unknown:
        near = dict.fromkeys(name for each in unknown for name in get_close_matches(each, known, 1))
        hint = f"; near: {', '.join(near)}" if near else ""
        raise errors.ConfigError(f"expected {where} with {', '.join(known)}, got {', '.join(unknown)}{hint}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return f"uid{os.getuid()}"
