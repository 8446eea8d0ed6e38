"""The command `grpo-lab`: one name for the command lines of these packages.

    grpo-lab run lite/03_grid_search.ipynb -p PROFILE pocket
    grpo-lab sweep lite/03_grid_search.ipynb --vary SEED 1 2 3
    grpo-lab grid runs list
    grpo-lab arena experiments list
    grpo-lab rewards check reward.py --data rows.jsonl

Each verb is also a module, such as `python -m grpo_lab.runner`, which needs no
installation. What a verb needs is imported only when it is called.
"""

import importlib
import itertools
import os
import sys
from collections.abc import Sequence

VERBS = {
    ("run",): ("grpo_lab.runner", "run a lesson headless"),
    ("sweep",): ("grpo_lab.sweep", "run it for each combination of values"),
    ("grid",): ("grpo_lab.grid.__main__", "steer the runs of a grid"),
    ("arena",): ("grpo_lab.arena.cli", "register, train, deploy, ask"),
    ("rewards", "check"): (
        "rewards.contract.__main__",
        "check a reward file before it trains",
    ),
}
"""For the words of each verb its module, with a `main(argv)`, and its help."""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines of text, their cells below each other."""
    columns = itertools.zip_longest(*rows, fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
    )


def emit(text: str) -> None:
    """Print, even if nobody listens any more.

    `| head` ends early, and Ctrl-C ends a `| tee` as well: what is said then
    is lost, but no run.
    """
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # else it fails at the exit


def main(argv: Sequence[str] | None = None) -> int:
    """Call the verb that was typed; 2 if there is none of that name."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for words, (module, _) in VERBS.items():
        if tuple(argv[: len(words)]) == words:
            verb = importlib.import_module(module)
            return verb.main(argv[len(words) :])
    rows = [("  " + " ".join(w), text) for w, (_, text) in VERBS.items()]
    print(f"usage: grpo-lab VERB ...\n\n{aligned(rows)}")
    print("\nEach verb has its own --help.")
    return 0 if argv[:1] in (["-h"], ["--help"]) else 2
