"""The street keeps its order: who imports whom, what is loaded when, who prints, what the wheel holds."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# The order of the files is the order of the imports: a file imports only files above it in its house, and
# houses before its own. A new file gets a line here, where it belongs. A folder's files stand as folder/file.
STREET: dict[str, list[str]] = {
    "eventlog": [
        "errors", "clock", "warning", "output", "reduction", "arrays", "moments", "histogram", "device",
        "redaction", "tags", "batch", "pieces", "scope", "workflow_context", "frame", "overflow",
        "collection", "settlement", "specs", "binding", "recorder", "drained", "spill", "schema", "windows",
        "entries", "seen", "conformity", "message", "alike", "bulk", "parts", "columns", "encode", "files",
        "manifest", "attempt", "origin", "rundir", "machine", "extent", "segment", "budget", "losses",
        "reserve", "segments", "notes", "backlog", "queues", "priority", "writer", "sampling", "options",
        "ending", "sealed", "life", "blocks", "gaps", "shortfall", "state", "absence", "claims", "reader",
        "following", "judge", "source", "salvage", "rescue", "recovery", "rivals", "patience", "placement",
        "log", "process", "mistakes",
    ],
    "aggregator": [
        "progress", "globs", "naming", "plain", "merge", "plan", "wire", "channel", "collective",
        "exporting", "stats_tracker", "areal", "broadcast", "evaluation/schedule", "evaluation/past",
        "evaluation/failure", "evaluation/samples", "evaluation/results", "evaluation/evaluator",
        "evaluation/pace", "evaluation/texts", "evaluation/metrics", "evaluation/sampling",
        "evaluation/batching", "evaluation/distributed", "evaluation/hard", "evaluation/consistency",
        "evaluation/drift", "evaluation/comparison", "evaluation/rules", "evaluation/history",
        "evaluation/alerts", "offline/timeline", "offline/candidates", "offline/engine", "offline/checked",
        "offline/compacted", "offline/reading", "offline/lapses", "offline/placing", "offline/history",
        "offline/tags", "offline/payload", "offline/recompute", "offline/losses", "offline/absentees",
        "offline/restored", "offline/choice", "offline/names", "offline/memory", "offline/condition",
        "offline/pairing", "offline/drawing", "offline/grouping", "offline/statistics", "offline/distinct",
        "offline/tally", "offline/bins", "offline/scaleout", "offline/pooling", "offline/sequences",
        "offline/tables", "offline/unpacking", "offline/query", "offline/database", "offline/strict",
        "offline/export", "offline/session", "offline/union", "offline/parquet", "offline/compact",
    ],
    "replay": [
        "config", "version", "steps", "acknowledged", "cursor", "backends/base", "backends/contract",
        "backends/directory", "backends/keeping", "backends/memory", "backends/names", "backends/framing",
        "backends/edition", "backends/wandb_file", "backends/wandb_names", "backends/wandb",
        "backends/swanlab_file", "backends/swanlab_core", "backends/swanlab", "backends/tensorboard_file",
        "backends/tensorboard", "backends/trackio_run", "backends/trackio_server", "backends/trackio",
        "console", "imports", "metrics", "account", "renaming", "turn", "story", "statistics", "found",
        "standing", "appending", "player", "succession", "precedence", "supplement", "status", "ledger",
        "delivery", "recipient", "tail", "logger", "plots/lettering", "plots/canvas", "plots/curves",
        "plots/heatmap", "plots/radar", "plots/charts", "plots/page", "plots/report",
    ],
    "cli": [
        "render", "options", "pulse", "shim/sitecustomize", "run", "runs", "care", "watch", "query",
        "carry", "tables", "compare", "retell", "imports", "plot", "report", "app", "__main__",
    ],
}  # fmt: skip
HOUSES = list(STREET)

# Who alone may import what; a folder stands for its files.
DOORS: dict[str, tuple[str, ...]] = {
    "torch": (
        "aggregator/collective.py",
        "aggregator/broadcast.py",
        "aggregator/stats_tracker.py",
        "replay/backends/tensorboard",
    ),
    "torch.distributed": ("aggregator/collective.py",),
    "duckdb": ("aggregator/offline/",),
    "wandb": ("replay/backends/wandb",),
    "swanlab": ("replay/backends/swanlab",),
    "tensorboard": ("replay/backends/tensorboard",),
    "trackio": ("replay/backends/trackio",),
    "omegaconf": ("replay/config.py",),
    "matplotlib": ("replay/plots/",),
    "typer": ("cli/",),
    "scipy": ("aggregator/evaluation/drift.py",),
    "rich": ("cli/render.py", "replay/console.py", "aggregator/progress.py"),
    "plotly": ("replay/plots/page.py",),
    "pandas": (),
    "fnmatch": ("aggregator/globs.py",),
}
# What both halves of the aggregator stand on: pure, and free of torch and DuckDB.
COMMON_GROUND = ("globs", "naming")
PRINTERS = ("cli/render.py", "replay/console.py")
HEAVY = [
    "torch",
    "duckdb",
    "wandb",
    "swanlab",
    "tensorboard",
    "trackio",
    "matplotlib",
    "pandas",
    "omegaconf",
    "ray",
]
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "manager", "misc"}
MOST_LINES = 400
MOST_FUNCTION_LINES = 60


class Import(NamedTuple):
    """One imported name: `from a.b import c` gives target a.b and name c, `import a.b` no name."""

    target: str
    name: str | None
    line: int
    typing: bool  # only under TYPE_CHECKING: nothing is loaded


class Module(NamedTuple):
    """One source file of the four houses."""

    path: str  # "aggregator/offline/session.py"
    house: str
    place: str  # "offline/session", or "" and "offline/" for a façade
    tree: ast.Module

    @property
    def facade(self) -> bool:
        return self.path.endswith("__init__.py")


@cache
def modules() -> list[Module]:
    found = []
    for house in HOUSES:
        for path in sorted((ROOT / house).rglob("*.py")):
            relative = path.relative_to(ROOT)
            place = "/".join(relative.with_suffix("").parts[1:]).removesuffix("__init__")
            found.append(Module(str(relative), house, place, ast.parse(path.read_text("utf-8"))))
    return found


@cache
def imports(module: Module) -> list[Import]:
    """Return everything a module imports, lazily or for types only too, with relative names resolved."""
    found = []
    typing = {id(inner) for node in ast.walk(module.tree) if is_typing(node) for inner in ast.walk(node)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, None, node.lineno, id(node) in typing) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.path.removesuffix(".py").split("/")[: -node.level]
                base = ".".join([*parts, base] if base else parts)
            found += [Import(base, alias.name, node.lineno, id(node) in typing) for alias in node.names]
    return found


def is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def place_of(found: Import) -> str:
    """Return the place of what is imported in its house: "moments", "offline/session", "" for a façade."""
    parts = found.target.split(".")
    if found.name and (ROOT / Path(*parts, f"{found.name}.py")).exists():
        parts = [*parts, found.name]
    elif found.name and (ROOT / Path(*parts, found.name, "__init__.py")).exists():
        parts = [*parts, found.name, ""]
    elif (ROOT / Path(*parts) / "__init__.py").exists() and len(parts) > 1:
        parts = [*parts, ""]
    return "/".join(parts[1:])


def cases() -> list[object]:
    return [pytest.param(module, id=module.path) for module in modules()]


@pytest.mark.parametrize("module", cases())
def test_every_file_has_a_place(module: Module) -> None:
    """Every file stands in the street's order, under a noun of its own."""
    assert FORBIDDEN_NAMES.isdisjoint(module.place.split("/"))
    assert module.facade or module.place in STREET[module.house]


@pytest.mark.parametrize("module", cases())
def test_houses_import_only_houses_before_them(module: Module) -> None:
    """Arrows go eventlog <- aggregator <- replay <- cli; between houses only what a façade offers is used."""
    wrong = []
    for found in imports(module):
        house = found.target.split(".")[0]
        if house not in HOUSES or house == module.house:
            continue
        place = place_of(found)
        if HOUSES.index(house) > HOUSES.index(module.house):
            wrong.append(f"line {found.line}: {module.house} imports {house}")
        elif (behind := place_of(found._replace(name=None))) and not behind.endswith("/"):
            if behind not in exported(house):  # a module that the façade offers as a whole is open
                wrong.append(f"line {found.line}: {found.target} is behind its façade")
        elif found.name and not place.endswith("/") and found.name not in exported(found.target):
            wrong.append(f"line {found.line}: {found.target} does not offer {found.name}")
    assert [] == wrong


@pytest.mark.parametrize("module", [case for case in cases() if not case.values[0].facade])
def test_files_import_only_files_above_them(module: Module) -> None:
    """Within a house a file imports only files that stand above it, relatively, and never its façade."""
    order = STREET[module.house]
    wrong = []
    for found in imports(module):
        if found.target.split(".")[0] != module.house:
            continue
        place = place_of(found)
        if not place or place.endswith("/"):
            if module.place.startswith(place):  # the façade above itself
                wrong.append(f"line {found.line}: imports its own façade {found.target}")
        elif module.place in order and place in order and order.index(place) >= order.index(module.place):
            wrong.append(f"line {found.line}: {module.place} imports {place}")
    assert [] == wrong


@pytest.mark.parametrize("module", cases())
def test_houses_are_relative_inside_and_absolute_outside(module: Module) -> None:
    """Inside a house imports are relative, between houses absolute: the top-level names are generic."""
    absolute = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        if name.split(".")[0] == module.house
    ]
    assert [] == absolute


@pytest.mark.parametrize("half", ["offline", "live"])
def test_the_halves_of_the_aggregator_are_strangers(half: str) -> None:
    """The in-run half and `offline/` do not import each other."""
    wrong = []
    for module in modules():
        if module.house != "aggregator" or module.facade:
            continue
        offline = module.place.startswith("offline/")
        for found in imports(module):
            if not found.target.startswith("aggregator"):
                continue
            place = place_of(found)
            other = place.startswith("offline/") != offline and place not in COMMON_GROUND
            if other and offline == (half == "offline"):
                wrong.append(f"{module.path}:{found.line} {found.target}")
    assert [] == wrong


@pytest.mark.parametrize("package", sorted(DOORS))
def test_each_library_has_one_door(package: str) -> None:
    """torch, duckdb, matplotlib and each tracker's SDK are imported only where DESIGN says."""
    wrong = []
    for module in modules():
        if module.path.startswith(DOORS[package]):
            continue
        for found in imports(module):
            full = f"{found.target}.{found.name}" if found.name else found.target
            if not found.typing and f"{full}.".startswith(f"{package}."):
                wrong.append(f"{module.path}:{found.line} imports {full}")
        if package == "torch.distributed":
            wrong += [f"{module.path}:{line}" for line in uses_of(module.tree, "torch", "distributed")]
    assert [] == wrong


def uses_of(tree: ast.Module, value: str, attribute: str) -> list[int]:
    """Return the lines where `value.attribute` is read."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == value
    ]


@pytest.mark.parametrize("module", cases())
def test_only_the_printers_print(module: Module) -> None:
    """Nothing but `cli/render.py` and the live console writes to stdout."""
    if module.path in PRINTERS:
        return
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    prints = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    echoes = uses_of(module.tree, "typer", "echo") + uses_of(module.tree, "typer", "secho")
    flushed = [
        n.value.lineno for n in ast.walk(module.tree) if isinstance(n, ast.Attribute) and n.attr == "flush"
    ]
    written = [line for line in uses_of(module.tree, "sys", "stdout") if line not in flushed]
    assert [] == prints + echoes + written


@pytest.mark.parametrize("module", cases())
def test_files_and_functions_stay_short(module: Module) -> None:
    """A file has at most 400 lines, a function at most 60 below its signature."""
    assert MOST_LINES >= len((ROOT / module.path).read_text("utf-8").splitlines())
    functions = [n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {f"{f.name}:{f.lineno}": f.end_lineno - f.body[0].lineno + 1 for f in functions}
    long = {name: size for name, size in sizes.items() if size > MOST_FUNCTION_LINES}
    assert {} == long


def test_every_test_says_what_it_shows() -> None:
    """Every test of the suite has a docstring."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            )
            if is_test and not ast.get_docstring(node):
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert [] == silent


# What is loaded, in a fresh interpreter: nobody's imports are in the way there.


@cache
def loaded(code: str) -> frozenset[str]:
    """Return the top-level modules that are loaded after running `code`."""
    ask = (
        f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ask], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    return frozenset(json.loads(done.stdout.splitlines()[-1]))


HELP = """
import sys
from cli.app import main
sys.argv = ["areal-metrics", "--help"]
try:
    main()
except SystemExit as exc:
    assert exc.code in (0, None)
"""


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import eventlog", HEAVY),
        ("import aggregator", HEAVY),
        ("import replay", HEAVY),
        ("import cli.app", [*HEAVY, "pyarrow"]),
        ("from aggregator import open_run", [name for name in HEAVY if name != "duckdb"]),
        ("from replay import play", [name for name in HEAVY if name not in ("duckdb", "omegaconf")]),
        (HELP, [*HEAVY, "pyarrow"]),
    ],
    ids=["eventlog", "aggregator", "replay", "cli", "open_run", "play", "help"],
)
def test_loads_nothing_that_was_not_asked_for(code: str, absent: list[str]) -> None:
    """Importing a house, or asking the command line for help, loads no library it does not need."""
    assert frozenset() == loaded(code) & frozenset(absent)


@cache
def exported(package: str) -> list[str]:
    return list(importlib.import_module(package).__all__)


FACADES = ["eventlog", "aggregator", "aggregator.evaluation", "replay", "replay.plots"]


@pytest.mark.parametrize("package", FACADES)
def test_facades_offer_what_they_say(package: str) -> None:
    """A façade's `__all__` is sorted, has no name twice, and every name of it can be imported."""
    names = exported(package)
    assert sorted(set(names)) == names
    module = importlib.import_module(package)
    assert [] == [name for name in names if not hasattr(module, name)]
    assert set(names) <= set(dir(module))


@pytest.mark.parametrize("house", HOUSES)
def test_houses_are_typed(house: str) -> None:
    """Each house tells type checkers that it has types."""
    assert (ROOT / house / "py.typed").exists()


def test_wheel_holds_the_four_houses(tmp_path: Path) -> None:
    """The wheel's top level is the four packages and nothing else; the SQL and the licence are in it."""
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = "areal_metrics-0.1.0.dist-info"
    assert {*HOUSES, info} == {name.split("/")[0] for name in names}
    assert {"aggregator/offline/views.sql", f"{info}/licenses/LICENSE", "eventlog/py.typed"} <= set(names)
