"""Puts ours under AReaL's module names: code that imports AReaL's modules then uses the drop-ins.

    from aggregator import areal

    areal.install()  # before AReaL's modules are imported
    from areal.utils import stats_tracker  # is aggregator.stats_tracker

It works beside an installed AReaL and without one, and in a project that has a `replay` of its own (a
replay buffer). A name that only AReaL's own module has is still found under it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

__all__ = ["MODULES", "install", "uninstall"]

MODULES: Final = {
    "areal.infra.workflow_context": "eventlog.workflow_context",
    "areal.utils.evaluator": "aggregator.evaluation",
    "areal.utils.stats_logger": "replay.logger",
    "areal.utils.stats_tracker": "aggregator.stats_tracker",
}
"""AReaL's module names and what stands under them; imported when the name is."""


def _own(name: str) -> str:
    package, _, child = name.rpartition(".")
    return f"{package}._own_{child}"


_OWN: Final = {_own(name): name for name in MODULES}
_PACKAGES: Final = frozenset({"areal", "areal.infra", "areal.utils"})
_lock = threading.RLock()
_displaced: dict[str, ModuleType] = {}  # AReaL's modules that were imported before


def install() -> None:
    """Serve AReaL's module names with ours from now on, in this process; again changes nothing.

    Warns when AReaL's modules are imported already: they are replaced, but what others have taken out of
    them with `from … import` stays AReaL's.
    """
    with _lock:
        if _OURS in sys.meta_path:
            return
        sys.meta_path.insert(0, _OURS)
        sys.meta_path.append(_STAND_INS)
        early = [name for name in MODULES if name in sys.modules]
        for name in early:
            _displaced[name] = sys.modules.pop(name)
            importlib.import_module(name)
    if early:
        warnings.warn(
            f"expected install() before AReaL's modules are imported, got {', '.join(early)} already: "
            "replaced, but not where their names were taken by `from ... import`",
            stacklevel=2,
        )


def uninstall() -> None:
    """Take ours away again and put back what was there; without `install` nothing happens."""
    with _lock:
        if _OURS not in sys.meta_path:
            return
        sys.meta_path.remove(_OURS)
        sys.meta_path.remove(_STAND_INS)
        for name in MODULES:
            served = sys.modules.pop(name, None)
            sys.modules.pop(_own(name), None)
            if served is not None:
                _remove_fallback(served)
                _rebind(name, _displaced.pop(name, None))
        for name in sorted(_PACKAGES, reverse=True):
            module = sys.modules.get(name)
            if module is not None and module.__spec__ is not None and module.__spec__.origin == _STAND_IN:
                del sys.modules[name]
                _rebind(name, None)


def _rebind(name: str, module: ModuleType | None) -> None:
    """Make `name` mean `module` again, for `import` and as the attribute of its package."""
    package, _, child = name.rpartition(".")
    parent = sys.modules.get(package)
    if module is not None:
        sys.modules[name] = module
    if parent is not None and module is not None:
        setattr(parent, child, module)
    elif parent is not None and child in vars(parent):
        delattr(parent, child)


# -- import hooks ----------------------------------------------------------------------------------


class _Ours(MetaPathFinder):
    """Finds ours, and AReaL's own module beside it under a name with `_own_`; asked before anyone else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        if fullname in MODULES:
            return ModuleSpec(fullname, _ServeOurs(MODULES[fullname]), origin=MODULES[fullname])
        if fullname in _OWN:
            found = PathFinder.find_spec(_OWN[fullname], path)
            return None if found is None else spec_from_file_location(fullname, found.origin)
        return None


class _ServeOurs(Loader):
    """Serves an existing module, the very object, under another name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        del spec
        module = _imported(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        served = module.__spec__
        module.__spec__ = self._spec  # the import machinery has put the other name there
        if served is not None:
            _add_fallback(module, served.name)


def _imported(name: str) -> ModuleType:
    """Import a module of ours, also where the project has a module of its package's name.

    The project's stays what the name means; ours is imported from where it is installed, under a name that
    nobody else has. Our packages here are found already, and know each other's names: only one that none of
    them imports can stand beside another so, as `replay` does.
    """
    package, _, child = name.partition(".")
    ours = Path(__file__).parents[1] / package / "__init__.py"
    found = importlib.util.find_spec(package)
    file = None if found is None or found.origin is None else Path(found.origin)
    if not ours.exists() or (file is not None and file.exists() and file.samefile(ours)):
        return importlib.import_module(name)
    alias = f"areal_metrics_{package}"
    spec = spec_from_file_location(alias, ours, submodule_search_locations=[str(ours.parent)])
    if alias not in sys.modules and spec is not None and spec.loader is not None:
        sys.modules[alias] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[alias])
    return importlib.import_module(f"{alias}.{child}")


class _StandIns(MetaPathFinder):
    """Finds AReaL's packages, empty, where AReaL is not installed; asked after everyone else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname not in _PACKAGES:
            return None
        spec = ModuleSpec(fullname, None, origin=_STAND_IN, is_package=True)
        spec.submodule_search_locations = []
        return spec


_STAND_IN: Final = "stand-in"
_OURS: Final = _Ours()
_STAND_INS: Final = _StandIns()


# -- names that only AReaL's own module has --------------------------------------------------------


class _Fallback:
    """A module's `__getattr__`: what the module does not have is looked up in AReaL's own of that name."""

    def __init__(self, before: Callable[[str], Any] | None, areal: str) -> None:
        self.before = before
        self._areal = areal

    def __call__(self, name: str) -> Any:
        if self.before is not None:
            with contextlib.suppress(AttributeError):
                return self.before(name)
        if name.startswith("_"):
            raise AttributeError(f"module {MODULES[self._areal]!r} has no attribute {name!r}")
        own = _displaced.get(self._areal) or importlib.import_module(_own(self._areal))
        return getattr(own, name)


def _add_fallback(module: ModuleType, areal: str) -> None:
    before = vars(module).get("__getattr__")
    exists = areal in _displaced or importlib.util.find_spec(_own(areal)) is not None
    if exists and not isinstance(before, _Fallback):
        vars(module)["__getattr__"] = _Fallback(before, areal)


def _remove_fallback(module: ModuleType) -> None:
    fallback = vars(module).get("__getattr__")
    if isinstance(fallback, _Fallback):
        del vars(module)["__getattr__"]
        if fallback.before is not None:
            vars(module)["__getattr__"] = fallback.before
