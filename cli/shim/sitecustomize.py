"""Python imports this at its start in every process under `areal-metrics run`; see `cli.run`.

It waits for AReaL to be imported and then puts the drop-ins under its names. A process that never does
pays next to nothing. A `sitecustomize` that would have been imported without us is imported all the same.
"""

from __future__ import annotations

import os.path
import sys
from importlib.machinery import PathFinder


class _Waiting:
    """An import hook that finds nothing; it is here to see `import areal`."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Install the drop-ins just before AReaL is looked for."""
        del path, target
        if fullname != "areal":
            return
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        try:
            from aggregator import areal
        except ImportError as error:
            _check_not_hidden()
            sys.stderr.write(
                f"areal-metrics: nothing is recorded, expected the package in {sys.executable}, got {error}\n"
            )
        else:
            areal.install()


def _check_not_hidden() -> None:
    """Raise ImportError where a module of the project has the name of a package of ours, which it hides."""
    for name, part in (("eventlog", "workflow_context.py"), ("aggregator", "areal.py")):
        spec = PathFinder.find_spec(name)
        file = None if spec is None else spec.origin
        if file is not None and part not in os.listdir(os.path.dirname(file)):  # noqa: PTH120, PTH208
            raise ImportError(
                f"expected `{name}` to be the package of areal-metrics, got a module that hides it: rename "
                f"it or train without `areal-metrics run`: {file}"
            )


def _import_next() -> None:
    """Import the `sitecustomize` that ours stands in front of, if there is one."""
    here = os.path.realpath(os.path.dirname(__file__))  # noqa: PTH120 - pathlib would be imported for it
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.realpath(p) != here])
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _Waiting())  # pyright: ignore[reportArgumentType]
_import_next()
