"""The README says what happens: its examples are run, and print what stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def block(name):
    """Return the code block that follows the marker of that name."""
    found = re.search(
        rf"<!-- readme: {name} -->\n```\w+\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert found, name
    return found[1]


def run(code, cwd):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_the_first_example_prints_what_stands_below_it(tmp_path):
    """From record to replay: the README's output is the example's, to the letter."""
    done = run(block("example"), tmp_path)
    assert (0, "") == (done.returncode, done.stderr)
    assert block("output") == done.stdout


def test_the_refused_call_says_what_stands_below_it(tmp_path):
    """The README's error message is the one that is raised."""
    *calls, message = block("error").splitlines()
    code = [
        "import torch",
        "from aggregator import stats_tracker",
        *(call.removeprefix(">>> ") for call in calls),
    ]
    done = run("\n".join(code), tmp_path)
    assert message == done.stderr.splitlines()[-1]


def test_nothing_is_left_to_be_filled_in():
    """The README has no placeholders."""
    assert not re.search(r"@@|TODO|TBD|XXX", (ROOT / "README.md").read_text())


def test_the_compatibility_table_names_tests_that_exist():
    """Every line on AReaL says same, better or different, and names tests that show it."""
    table = (ROOT / "README.md").read_text().split("| | AReaL | here |")[1].split("\n\n")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    assert len(lines) > 20
    for *_, here, test in lines:
        assert re.search("same|better|different", here), here
        path = ""
        for one in re.findall(r"`([^`]+)`", test):
            path, name = one.split("::")[0] or path, one.split("::")[1]
            assert f"def {name}(" in (ROOT / "tests" / path).read_text(), test
        assert path, test
