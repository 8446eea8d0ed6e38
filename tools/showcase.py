"""The README's picture and table, from a run: nothing in them by hand.

    python -m tools.showcase runs/03_grid_search

Reads the output directory of the grid-search lesson and writes the figures
to docs/ and the table between the two marks in README.md.
"""

import argparse
import sys
from pathlib import Path

from grpo_lab import figures, grid
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_whole
from rewards import FIVE_PART

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- grid: begin -->", "<!-- grid: end -->"


def markdown(results: dict, runs: grid.Grid) -> str:
    """The leaderboard as a markdown table, with where it was run."""
    board = figures.leaderboard_text(runs.leaderboard())
    rows = [list(board.columns), ["---"] * len(board.columns)]
    rows += board.to_numpy().tolist()
    questions = len(runs.best.evaluation.answers)
    lines = [
        f"Profile {results['profile']}, on {results['machine']}; "
        f"{questions} held-out questions. Square brackets: 95 % intervals.",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        results["verdict"],
    ]
    return "\n".join(lines)


def show(output_dir: Path, root: Path = ROOT) -> None:
    """Write docs/*.png and the table in README.md.

    Raises:
        LabError: the lesson has not been run to its end there.
    """
    results = read_json(output_dir / "results.json")
    if results is None:
        raise LabError(
            f"{output_dir} holds no results.json, so the lesson has not been "
            "run to its end there. Type `make demo`, then name its folder."
        )
    grid_dir = output_dir / "grid"
    planned = [grid_dir / "runs" / r["directory"] for r in results["runs"]]
    runs = grid.load(grid_dir, planned)
    pictures = {
        "grid_search_rewards": figures.reward_curves(runs, FIVE_PART),
        "grid_search_accuracy": figures.leaderboard_figure(runs.leaderboard()),
    }
    (root / "docs").mkdir(exist_ok=True)
    for name, figure in pictures.items():
        figure.savefig(root / "docs" / f"{name}.png", dpi=90)
    readme = root / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = markdown(results, runs)
    write_whole(readme, f"{before}{BEGIN}\n{table}\n{END}{after}")


def main() -> None:
    """Command line: the output directory of the lesson."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir", type=Path)
    try:
        show(parser.parse_args().output_dir)
    except LabError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
