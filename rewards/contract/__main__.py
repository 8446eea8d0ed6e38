"""The terminal's way to `check_reward`: python -m rewards.contract."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rewards.batch import RewardError
from rewards.contract.check import check_reward


def main(arguments: Any = None) -> int:
    """Check a reward file from the terminal; return the exit status.

    0: nothing failed, 1: something did, 2: it can't be checked.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rewards.contract",
        description="Check a reward file on rows of data before training.",
    )
    parser.add_argument("reward", help="the file with your function reward")
    parser.add_argument(
        "--data", required=True, help="JSON lines with question and answer"
    )
    parser.add_argument(
        "--rollouts", type=int, default=4000, help="completions to be scored"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="what one call may take"
    )
    given = parser.parse_args(arguments)
    try:
        verdicts = check_reward(
            given.reward,
            _read_rows(Path(given.data)),
            rollouts=given.rollouts,
            seconds=given.seconds,
        )
    except RewardError as error:
        print(error, file=sys.stderr)
        return 2
    print(verdicts)
    return 0 if verdicts.passed else 1


def _read_rows(path: Path) -> list[dict[str, Any]]:
    where = ""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        rows = []
        for number, line in enumerate(lines, start=1):
            where = f" in line {number}"
            if line.strip():
                rows.append(json.loads(line))
    except (OSError, ValueError) as error:
        raise RewardError(
            f"The rows can't be read from {path}{where}: {error}. Give a "
            "file of JSON lines such as "
            '{"question": "9 + 9?", "answer": "#### 18"}.'
        ) from None
    return rows


if __name__ == "__main__":
    sys.exit(main())
