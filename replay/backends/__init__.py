"""The adapters, one tracker a file; a tracker's package is imported when its backend opens."""

from __future__ import annotations

import inspect
import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eventlog import errors, yes_or_no

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import StatsLoggerConfig
    from .base import Backend

__all__ = ["AVAILABLE", "backend_options", "check_available", "configured", "open_backend"]

_FACTORIES = {
    "memory": "MemoryBackend",
    "swanlab": "create",
    "tensorboard": "TensorBoardBackend",
    "trackio": "create",
    "wandb": "create",
}
AVAILABLE = tuple(_FACTORIES)


def open_backend(name: str, /, **options: Any) -> Backend:
    """Return a backend for `play` or `StatsLogger`; nothing is written before it is told of a run.

    `backend_options` says which options there are: the arguments of the backend's class.
    Numbers and booleans may be given as text, as a command line has them. ConfigError for a name or option
    that does not exist, or a value of another type, BackendMissingError for a missing package.
    """
    allowed = backend_options(name)
    if unknown := sorted(options.keys() - set(allowed)):
        raise errors.ConfigError(
            f"expected options of {name} among {', '.join(allowed)}, got {', '.join(unknown)}"
        )
    typed = {option: _typed(f"{name}.{option}", value, allowed[option]) for option, value in options.items()}
    return _factory(name)(**typed)


def backend_options(name: str) -> dict[str, str]:
    """Return the options of a backend and their types; ConfigError for a name that is none."""
    check_available(name)
    return _options(_factory(name))


def configured(config: StatsLoggerConfig) -> list[Backend]:
    """Return the backends that a checked config switches on; raises as `open_backend` does."""
    wandb, swanlab, trackio = config.wandb, config.swanlab, config.trackio
    backends: list[Backend] = []
    if wandb.mode != "disabled":
        also = {"base_url": wandb.wandb_base_url or None, "api_key": wandb.wandb_api_key or None}
        names = "mode entity project name job_type group notes tags id_suffix"
        backends.append(open_backend("wandb", **_given(wandb, names), **also))
    if swanlab.mode not in (None, "disabled"):
        also = {"path": swanlab.logdir}
        backends.append(open_backend("swanlab", **_given(swanlab, "mode project name api_key"), **also))
    if config.tensorboard.path is not None:
        backends.append(open_backend("tensorboard", path=config.tensorboard.path))
    if trackio.mode != "disabled":
        backends.append(open_backend("trackio", **_given(trackio, "mode project name space_id")))
    return backends


def check_available(name: str) -> None:
    """ConfigError for a name that is no backend."""
    if name not in AVAILABLE:
        raise errors.ConfigError(f"expected a backend among {', '.join(AVAILABLE)}, got {name!r}")


def _given(config: Any, names: str) -> dict[str, Any]:
    return {name: value for name in names.split() if (value := getattr(config, name))}


def _factory(name: str) -> Callable[..., Backend]:
    return getattr(import_module(f".{name}", __name__), _FACTORIES[name])


def _options(create: Callable[..., Backend]) -> dict[str, str]:
    """Return the keyword arguments and how they are annotated; `functools.wraps` shows those handed on."""
    own = inspect.signature(create, follow_wrapped=False).parameters.values()
    found = {each.name: str(each.annotation) for each in own if each.kind is not each.VAR_KEYWORD}
    wrapped = getattr(create, "__wrapped__", None)
    return found if wrapped is None else found | _options(wrapped)


def _typed(where: str, value: Any, annotation: str) -> Any:
    """Return the value of an option as its annotation wants it."""
    kinds = set(re.findall(r"\w+", annotation))
    if value is None or "Collection" in kinds:
        return value
    text = value if isinstance(value, str) else None
    if "bool" in kinds:
        wanted, found = "true or false", value if isinstance(value, bool) else yes_or_no(text or "")
    elif kinds & {"int", "float"}:
        wanted, found = "a number", _number(value)
    elif "Sequence" in kinds:
        several = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
        wanted, found = "text, or a list of texts", value if several else text
    elif "PathLike" in kinds:
        wanted, found = "a path", value if isinstance(value, os.PathLike) else text or None
    else:
        wanted, found = "text", text
    if found is None:
        raise errors.ConfigError(f"expected {where} to be {wanted}, got {value!r}")
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return None if isinstance(value, bool) else value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None
