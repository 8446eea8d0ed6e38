"""What the pocket models were made to show, and whether a grid shows it."""

import pandas as pd

from grpo_lab.evaluation import Evaluation, compare

BASE_RANGE = (0.15, 0.65)
"""Accuracy of a base model: able enough to learn, far from done."""
LEAST_GAIN = 0.25
"""Gain of the best run in held-out accuracy, with its interval above 0."""
LEAST_CONTRAST = 0.10
"""How far the worst run stays behind, so that comparing teaches something."""


def check(leaderboard: pd.DataFrame) -> pd.DataFrame:
    """Hold a pocket grid against its target, base model by base model.

    Args:
        leaderboard: from `Grid.leaderboard`; at least two runs a model.

    Returns:
        A row for each base model: the three figures, as shares of the
        held-out questions, and `met`, whether all three hold.
    """
    rows = []
    for model, runs in leaderboard.groupby("model", sort=False):
        best = runs.loc[runs["after"].idxmax()]
        contrast = best["after"] - runs["after"].min()
        met = (
            BASE_RANGE[0] <= best["before"] <= BASE_RANGE[1]
            and best["gain"] >= LEAST_GAIN
            and best["gain_low"] > 0
            and contrast >= LEAST_CONTRAST
        )
        figures = (best["before"], best["gain"], contrast)
        rows.append((model, *figures, "yes" if met else "no"))
    columns = ["model", "base accuracy", "best gain", "best minus worst run"]
    return pd.DataFrame(rows, columns=[*columns, "met"])


def check_first_run(base: Evaluation, after: Evaluation) -> pd.DataFrame:
    """Hold the first run against its target: form and accuracy both rise.

    Returns:
        A row for each of the two: the paired difference with its interval,
        as shares of the held-out questions, and `met`, whether it is not
        lower and the interval of at least one of the two lies above 0.
    """
    pairs = {
        what: compare(base, after, by)
        for what, by in (("form", "format_ok"), ("accuracy", "correct"))
    }
    proven = any(pair.interval[0] > 0 for pair in pairs.values())
    rows = []
    for what, pair in pairs.items():
        met = "yes" if proven and pair.difference >= 0 else "no"
        rows.append((what, pair.difference, *pair.interval, met))
    columns = ["what", "gain", "gain_low", "gain_high", "met"]
    return pd.DataFrame(rows, columns=columns)
