"""The rewards as a package of their own, without torch."""

import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALONE = tomllib.loads((ROOT / "rewards/pyproject.toml").read_text())
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())

EXAMPLE = r"""
import importlib.util
from rewards import FIVE_PART, COOKBOOK, accuracy_reward, with_options
from rewards import check_reward, load_reward
good = "<think>\n9 + 9\n</think>\n<answer>\n18\n</answer>\n"
rows = [{"question": "9 + 9?", "answer": "#### 18"}] * 2
print([part([good], answer=["#### 18"]) for part in FIVE_PART])
print([part([good], solution=["$18$"]) for part in COOKBOOK])
boxed = with_options(accuracy_reward, policy="stated")
print(boxed([r"So it is \boxed{\sqrt{8}}."], solution=[r"$2\sqrt{2}$"]))
with open("mine.py", "w") as file:
    file.write("def reward(question, answer, completion):\n"
               "    return float(f'<answer>\\n18\\n</answer>' in completion)")
print(load_reward("mine.py")([good], answer=["#### 18"]))
print(check_reward("mine.py", rows)["runs"].passed)
for name in ("torch", "transformers", "trl", "numpy", "grpo_lab"):
    assert importlib.util.find_spec(name) is None, name
"""


def test_it_asks_for_what_the_whole_project_has():
    ours = ALONE["project"]
    assert set(ours["dependencies"]) <= set(WHOLE["project"]["dependencies"])
    assert ours["requires-python"] == WHOLE["project"]["requires-python"]


def test_every_package_of_it_is_listed():
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "rewards").rglob("*.py")
        if "build" not in file.parts
    }
    assert set(ALONE["tool"]["setuptools"]["packages"]) == found


@pytest.mark.slow  # it fetches sympy and builds a parser
def test_it_runs_in_an_empty_environment_without_torch(tmp_path):
    source = tmp_path / "rewards"
    shutil.copytree(ROOT / "rewards", source)  # a build leaves files behind
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python]
        + ["install", "--quiet", source],
        check=True,
    )
    (tmp_path / "example.py").write_text(EXAMPLE)
    shown = subprocess.run(
        [python, "-P", "example.py"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines() == [
        "[[2.0], [0.5], [0.5], [0.5], [0.5]]",
        "[[1.0], [1.0]]",
        "[1.0]",
        "[1.0]",
        "True",
    ]
    assert [*(tmp_path / "venv").rglob("rewards/py.typed")]
