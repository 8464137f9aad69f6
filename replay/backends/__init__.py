"""The adapters, one tracker a file; a tracker's package is imported when its backend opens."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from eventlog import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import StatsLoggerConfig, WandBConfig
    from .base import Backend

__all__ = ["AVAILABLE", "NOT_YET", "check_available", "configured", "open_backend"]

AVAILABLE = ("memory", "tensorboard", "wandb")
NOT_YET = ("swanlab", "trackio")


def open_backend(name: str, /, **options: Any) -> Backend:
    """Return a backend for `play` or `StatsLogger`; nothing is written before it is told of a run.

    memory:      strict=False
    tensorboard: path=RUN/tensorboard
    wandb:       mode, path, project, entity, name, id, id_suffix, group, job_type, notes, tags

    ConfigError for a name or option that does not exist, BackendMissingError for a missing package.
    """
    check_available(name)
    create = _factory(name)
    allowed = _options(create)
    if unknown := sorted(options.keys() - set(allowed)):
        raise errors.ConfigError(
            f"expected options of {name} among {', '.join(allowed)}, got {', '.join(unknown)}"
        )
    return create(**options)


def configured(config: StatsLoggerConfig) -> list[Backend]:
    """Return the backends that a checked config switches on; raises as `open_backend` does."""
    for name, section in (("swanlab", config.swanlab), ("trackio", config.trackio)):
        if section.mode != "disabled":
            check_available(name)
    backends: list[Backend] = []
    if config.wandb.mode != "disabled":
        backends.append(_configured_wandb(config.wandb))
    if config.tensorboard.path is not None:
        backends.append(open_backend("tensorboard", path=config.tensorboard.path))
    return backends


def _configured_wandb(config: WandBConfig) -> Backend:
    for variable, value in (
        ("WANDB_BASE_URL", config.wandb_base_url),
        ("WANDB_API_KEY", config.wandb_api_key),
    ):
        if value:
            os.environ[variable] = value  # for wandb's own tools too
    options = {
        name: getattr(config, name)
        for name in ("mode", "entity", "project", "name", "job_type", "group", "notes", "tags", "id_suffix")
        if getattr(config, name)
    }
    return open_backend("wandb", **options)


def check_available(name: str) -> None:
    """ConfigError for a name that is no backend, BackendMissingError for one this version does not have."""
    if name in NOT_YET:
        raise errors.BackendMissingError(
            f"expected one of {', '.join(AVAILABLE)}, got {name!r}, which this version cannot yet"
        )
    if name not in AVAILABLE:
        raise errors.ConfigError(
            f"expected a backend among {', '.join((*AVAILABLE, *NOT_YET))}, got {name!r}"
        )


def _factory(name: str) -> Callable[..., Backend]:
    if name == "memory":
        from .memory import MemoryBackend

        return MemoryBackend
    if name == "tensorboard":
        from .tensorboard import TensorBoardBackend

        return TensorBoardBackend
    from .wandb import create

    return create


def _options(create: Callable[..., Backend]) -> list[str]:
    """Return the names of the keyword arguments; `functools.wraps` shows those that are handed on."""
    own = inspect.signature(create, follow_wrapped=False).parameters.values()
    names = [parameter.name for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    wrapped = getattr(create, "__wrapped__", None)
    return names if wrapped is None else [*names, *_options(wrapped)]
