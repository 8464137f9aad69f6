"""The example, small: two ranks and their workers train, are killed between two checkpoints, and go on."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from aggregator import open_run
from eventlog import RunReader

ROOT = Path(__file__).parents[2]
STEPS, SAVE_EVERY, KILL_AFTER, RESUMED = 8, 3, 4, 3
SMALL = ("--warmup-steps=4", "--prompts=8", "--group-size=4", "--held-out=6", "--width=32", "--layers=1")

_spec = importlib.util.spec_from_file_location("launch", ROOT / "examples/tiny_grpo/launch.py")
launch = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launch)


@dataclass(frozen=True)
class Story:
    """A run directory, and the last step that was committed before the kill."""

    path: Path
    killed_after: int


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A training that was killed after some step above the checkpoint of step 2, and resumed."""
    out = tmp_path_factory.mktemp("tiny_grpo")
    flags = (f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", "--eval-every=2", *SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with launch.Training(out, out / "attempt-0.log", *flags) as training:
            training.wait_for_step(KILL_AFTER)
            training.kill()
        killed_after = launch.last_step(out / "run")
        with launch.Training(out, out / "attempt-1.log", *flags) as training:
            training.finish()
    return Story(out / "run", killed_after)
