"""What the lessons claim about what is learned, held against results.json.

Each function takes the results that one lesson wrote and fails where the
lesson's prose would be untrue. They are asked of the results committed with
the embedded outputs (`make test`) and of whole lessons run anew
(`make test-slow`). What a run learns depends on its seed, and with it on how a
CPU rounds, so the bounds are those that five seeds keep with room to spare.
"""

import pytest


def first_run(results: dict) -> None:
    """Lesson 02: form and accuracy rise, and a bad reward lowers accuracy."""
    before, after = results["before"], results["after"]
    assert before["questions"] == after["questions"] >= 200
    gains = {row["what"]: row for row in results["target"]}
    assert set(gains) == {"form", "accuracy"}
    for name, key in (("form", "in_form"), ("accuracy", "accuracy")):
        assert gains[name]["gain"] == pytest.approx(after[key] - before[key])
        assert gains[name]["gain_low"] > 0
    for row in results["too_short"]:
        # 0.88 and more over five seeds
        assert row["clipped_ratio"] > 0.75
        assert row["think_format_reward"] == row["accuracy_reward"] == 0
        assert row["frac_reward_zero_std"] == 1
    ours = results["rises"]["cookbook pair"]
    cheat = results["rises"]["paid for effort"]
    assert ours["reward"][1] > 1.5 * ours["reward"][0]
    assert cheat["reward"][1] > 1.5 * cheat["reward"][0]
    assert ours["accuracy"][1] > ours["accuracy"][0] == cheat["accuracy"][0]
    assert cheat["accuracy"][1] < cheat["accuracy"][0]


def grid_search(results: dict) -> None:
    """Lesson 03: each model learns, and its better rate is the better one."""
    assert len(results["runs"]) == 4
    assert {run["status"] for run in results["runs"]} == {"done"}
    by_model = {}
    for row in results["leaderboard"]:
        by_model.setdefault(row["model"], []).append(row)
    assert set(by_model) == {"pocket-qwen", "pocket-llama"}
    gains = []
    for model, rows in by_model.items():
        best = max(rows, key=lambda row: row["after"])
        worst = min(row["after"] for row in rows)
        assert 0.15 <= best["before"] <= 0.65, (model, best)
        assert best["gain_low"] > 0 and best["p_value"] < 0.01, (model, best)
        assert best["after"] > worst, (model, rows)
        gains.append(best["gain"])
    assert max(gains) >= 0.2, gains


def evolution(results: dict) -> None:
    """Lesson 04: a population learns, and so does the control."""
    for name, found in results["results"].items():
        assert found["questions"] == 200
        assert 0.2 < found["before"] < 0.6, name
        assert found["gain"] > 0.1 and found["gain_interval"][0] > 0, name
    agreement = results["agreement"]
    assert agreement["questions"] == 50 and not agreement["worse"]


def scale_out(results: dict) -> None:
    """Lesson 05: a killed run ends as one that was not, halving saves."""
    assert set(results["same_as_here"].values()) == {True}
    stopped = [
        run
        for run in results["halved"]["runs"]
        if run["clone"] is None and run["status"] == "stopped"
    ]
    assert 1 <= len(stopped) <= 3
    assert 0 < results["savings"]["share"] < 1


CLAIMS = {
    "02_first_grpo_run": first_run,
    "03_grid_search": grid_search,
    "04_evolve_and_deploy": evolution,
    "05_scale_out": scale_out,
}
