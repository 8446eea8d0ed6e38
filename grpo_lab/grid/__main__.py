"""Steer a grid from a terminal, while it trains.

    python -m grpo_lab.grid runs list
    python -m grpo_lab.grid runs stop 2
    python -m grpo_lab.grid runs resume 2
    python -m grpo_lab.grid runs clone 1 --set learning_rate=5e-4 --warm

A run is meant by its number in the list, or by a part of its name. Without
`--grid` it is the grid below ./runs that was worked on last.

Exit codes: 0 all is well, 2 the input is wrong.
"""

import argparse
import sys
from pathlib import Path

from grpo_lab.errors import LabError
from rewards import RewardError


def _latest() -> Path:
    found = sorted(
        Path("runs").rglob("grid.json"), key=lambda path: path.stat().st_mtime
    )
    if not found:
        raise LabError(
            f"There is no grid below {Path.cwd() / 'runs'}. Name its "
            "directory, the one that holds grid.json: --grid DIRECTORY."
        )
    return found[-1].parent


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_lab.grid",
        description="Look at the runs of a grid and steer them.",
    )
    groups = parser.add_subparsers(required=True, metavar="runs")
    runs = groups.add_parser("runs", help="the runs of a grid")
    actions = runs.add_subparsers(dest="action", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--grid", type=Path, help="the grid's directory (default: the latest)"
    )
    actions.add_parser("list", parents=[where], help="how they stand")
    told = {
        "stop": "end one after the step that it is making",
        "resume": "let a stopped or failed one go on",
        "clone": "add one that differs from it",
    }
    for name, words in told.items():
        one = actions.add_parser(name, parents=[where], help=words)
        one.add_argument("run", help="its number or a part of its name")
    one.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting to change, such as learning_rate=5e-4",
    )
    one.add_argument(
        "--rewards",
        default="",
        metavar="NAMES",
        help="rewards of the grid, or reward files, separated by commas",
    )
    one.add_argument(
        "--warm",
        action="store_true",
        help="start from the run's last checkpoint",
    )
    one.add_argument(
        "--storage",
        default="",
        metavar="URI",
        help="where the checkpoints are, if the grid uses an object store",
    )
    return parser


def _act(arguments: argparse.Namespace) -> str:
    from grpo_lab.grid import control

    place = arguments.grid or _latest()
    if arguments.action == "list":
        return f"{place}\n{_text(control.table(place))}"
    run = control.find(place, arguments.run)
    if arguments.action == "stop":
        control.stop(run)
        return f"{run.name} ends after the step that it is making."
    if arguments.action == "resume":
        control.resume(run)
        return f"{run.name} goes on."
    names = [name.strip() for name in arguments.rewards.split(",") if name]
    folder = control.clone(
        run,
        control.read_changes(arguments.set),
        arguments.warm,
        names,
        arguments.storage,
    )
    return f"{folder.name} is a run of this grid now."


def _text(frame) -> str:
    shown = frame.drop(columns="why").astype(object)
    shown = shown.where(shown.notna(), "-")
    told = [
        f"{run}: {why}"
        for run, why in zip(frame["run"], frame["why"], strict=True)
        if why
    ]
    return "\n".join([shown.to_string(index=False), *told])


def main(argv: list[str] | None = None) -> int:
    """The command line; see the exit codes at the top."""
    arguments = _parser().parse_args(argv)
    from grpo_lab import environment

    environment.prepare()
    try:
        print(_act(arguments))
    except (LabError, RewardError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
