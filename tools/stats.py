"""How big the project is and how long its tests take: `make stats`.

    python tools/stats.py                   print what is known
    python tools/stats.py NAME COMMAND...   run a command and note its duration

Makefile runs the three tiers of tests through the second form. The durations
are kept in build/durations.json, which git ignores.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "build" / "durations.json"

BUDGETS = {"grpo_lab + rewards": 16_000, "tests": 13_000}
"""Lines at most."""

TIERS = {"check": 3, "test": 15, "test-slow": None}
"""Minutes at most on two cores, by the name of a make target."""


def lines_by_file() -> dict[str, int]:
    """Lines of every Python file that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return {
        name: len((ROOT / name).read_bytes().splitlines())
        for name in listed
        if (ROOT / name).exists()
    }


def run_timed(name: str, command: list[str]) -> int:
    """Run a command and note how long it took if it passed.

    Returns:
        Its exit status.
    """
    started = time.monotonic()
    status = subprocess.run(command).returncode
    if status == 0:
        known = _durations()
        known[name] = round(time.monotonic() - started)
        DURATIONS.parent.mkdir(exist_ok=True)
        DURATIONS.write_text(json.dumps(known, indent=1))
    return status


def show(largest: int = 10) -> None:
    """Print lines by directory, the largest files and the durations."""
    files = lines_by_file()
    directories = Counter[str]()
    for name, count in files.items():
        directories[name.split("/")[0]] += count
    both = directories["grpo_lab"] + directories["rewards"]
    print(f"{'lines':>7}  of Python in")
    for name, count in directories.most_common():
        print(f"{count:7,}  {name}")
    for name, count in (
        ("grpo_lab + rewards", both),
        ("tests", directories["tests"]),
    ):
        print(f"{count:7,}  {name}, at most {BUDGETS[name]:,}")
    print("\nLargest files")
    for name, count in Counter(files).most_common(largest):
        print(f"{count:7,}  {name}")
    print(f"\nTests on {os.cpu_count()} cores, the last time that they passed")
    known = _durations()
    for name, limit in TIERS.items():
        took = f"{known[name] / 60:.1f} min" if name in known else "not yet"
        budget = f", at most {limit}" if limit else ""
        print(f"  make {name:9}  {took}{budget}")


def _durations() -> dict[str, int]:
    if not DURATIONS.exists():
        return {}
    return json.loads(DURATIONS.read_text())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run_timed(sys.argv[1], sys.argv[2:]))
    show()
