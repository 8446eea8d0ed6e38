"""Tiny lessons for the tests of the runner and of sweeps."""

import json
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools.build import METADATA

PARAMETERS = """\
PROFILE: str = "lite"  # a row of the table
SEED: int = 0  # of chance
RATES: list[float] = [1.0]  # learning rates
OUTPUT_DIR: str = "runs/tiny"  # where results go
"""
CHECK = """\
from pathlib import Path

from grpo_lab.parameters import check

settings = check(globals())
"""
# A child in a session of its own, as a server or a data loader may be.
ENDLESS = """\
import json, os, subprocess, sys, time

code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
pids = json.dumps([child.pid, os.getpid(), os.getppid()])
Path(f"part-{SEED}").write_text(pids)
os.replace(f"part-{SEED}", f"pids-{SEED}")
print("waiting", flush=True)
time.sleep(600)
"""


def lesson(folder: Path, *cells: str, name: str = "01_tiny.ipynb") -> Path:
    """A lesson with a title, parameters, their check and these cells."""
    parameters = new_code_cell(PARAMETERS)
    parameters.metadata["tags"] = ["parameters"]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = new_notebook(metadata=METADATA)
    notebook.cells = [
        new_markdown_cell("# A tiny lesson"),
        parameters,
        *map(new_code_cell, (CHECK, *cells)),
    ]
    nbformat.write(notebook, path)
    return path


def start(cwd: Path, *arguments, module="grpo_lab.runner"):
    """Start a command line as a reader does."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def pids(folder: Path, seed: int = 0) -> list[int]:
    """What an `ENDLESS` run has started, its kernel, and its runner."""
    return json.loads(appears(folder / f"pids-{seed}"))


def shown(executed: Path) -> str:
    """All text of a notebook's outputs."""
    cells = nbformat.read(executed, as_version=4).cells
    outputs = [o for cell in cells for o in cell.get("outputs", ())]
    return "".join(o.get("text", "") + o.get("evalue", "") for o in outputs)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(true, seconds: float = 300) -> None:
    """Fail where something does not happen."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def appears(path: Path) -> str:
    """The text of a file, as soon as there is any."""
    wait_until(lambda: path.exists() and path.read_text())
    return path.read_text()
