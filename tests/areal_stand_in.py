"""A package `areal` to import from: AReaL's module names, and a name of its own in each."""

from pathlib import Path

MODULES = {
    "infra/workflow_context.py": "async def get_httpx_client():\n    return 'client'\n",
    "utils/evaluator.py": "class Evaluator:\n    pass\n",
    "utils/logging.py": "def getLogger(name):\n    return name\n",
    "utils/stats_logger.py": "def resolve_wandb_run_id(config):\n    return 'id'\n",
    "utils/stats_tracker.py": "def export_all(**kwargs):\n    return {}\n",
}


def write_areal(root: Path) -> Path:
    """Write the package below `root`, which then belongs on the path; return `root`."""
    for name, text in {
        "__init__.py": "",
        "utils/__init__.py": "",
        "infra/__init__.py": "",
        **MODULES,
    }.items():
        path = root / "areal" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"ORIGIN = 'areal'\n\n{text}")
    return root
