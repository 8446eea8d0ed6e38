"""What became of each completion: counted, logged, and stopped in time."""

import pytest

from rewards import (
    COOKBOOK,
    FIVE_PART,
    correctness_reward,
    reward_set,
)
from rewards.batch import RewardError
from rewards.health import FAILURES, FailureLimit, Outcome, report

GOOD, BAD = "<answer>5</answer>", "<answer>a few</answer>"


def score(reward, *texts, **kwargs):
    return reward(list(texts), answer=["#### 5"] * len(texts), **kwargs)


def test_only_the_right_answer_is_rewarded_and_the_unknown_is_left_out():
    scores = {outcome: outcome.score(2.0) for outcome in Outcome}
    assert scores.pop(Outcome.RIGHT) == 2.0
    assert scores.pop(Outcome.NO_GOLD) is None
    assert scores.pop(Outcome.UNDECIDED) is None
    assert set(scores.values()) == {0.0}


def test_every_share_is_logged_each_time_under_the_same_names():
    """On several GPUs each process must log the same names."""
    logged = []
    for outcomes in ([Outcome.RIGHT] * 3, list(Outcome)):
        shares, columns = {}, {}
        report(
            "mine", outcomes, {"answer": ["5", None, ""]},
            log_metric=shares.__setitem__, log_extra=columns.__setitem__,
        )  # fmt: skip
        logged.append(shares)
        assert columns["mine/outcome"] == [str(o) for o in outcomes]
        assert columns["mine/answer"] == ["5", "", ""]
    assert list(logged[0]) == list(logged[1])
    assert set(logged[0].values()) == {0}
    assert logged[1]["mine/failed"] == len(FAILURES) / len(Outcome)
    assert logged[1]["mine/no_answer"] == 1 / len(Outcome)


def test_a_reward_says_what_it_could_not_grade():
    shares = {}
    paid = score(
        correctness_reward, GOOD, BAD, "5", "<answer></answer>",
        log_metric=shares.__setitem__,
    )  # fmt: skip
    assert paid == [2.0, 0.0, 0.0, 0.0]
    assert shares["correctness_reward/failed"] == 0.25
    assert shares["correctness_reward/unreadable"] == 0.25
    assert shares["correctness_reward/no_answer"] == 0.5


def step(limit, failed, completions=2):
    shares = {"mine/failed": failed, "mine/unreadable": failed, "reward": 1.0}
    limit.add(shares, completions)


def test_a_run_ends_when_more_than_the_share_fails():
    limit = FailureLimit(max_failed_share=0.5, window=4)
    for _ in range(10):
        step(limit, 0.5)
    with pytest.raises(RewardError, match="unreadable 100%") as error:
        step(limit, 1.0)
    assert "Of the last 4 completions, 75 %" in str(error.value)
    assert "could not be graded by mine" in str(error.value)
    assert "max_failed_share" in str(error.value)


def test_it_waits_until_there_is_enough_to_judge():
    limit = FailureLimit(max_failed_share=0.5, window=6)
    step(limit, 1.0)
    step(limit, 1.0, 1)
    with pytest.raises(RewardError, match="Of the last 6"):
        step(limit, 1.0, 3)


def test_what_lies_far_back_is_forgotten():
    limit = FailureLimit(max_failed_share=0.4, window=10)
    step(limit, 1.0, 3)
    for _ in range(5):
        step(limit, 0.0, 4)
    with pytest.raises(RewardError, match="Of the last 11 completions, 64 %"):
        step(limit, 1.0, 7)


def test_a_share_of_one_never_ends_a_run():
    limit = FailureLimit(max_failed_share=1, window=1)
    for _ in range(5):
        step(limit, 1.0)


def test_the_reward_that_fails_most_decides():
    limit = FailureLimit(max_failed_share=0.5, window=2)
    shares = {"good/failed": 0.0, "bad/failed": 1.0, "bad/no_gold": 1.0}
    with pytest.raises(RewardError, match="graded by bad.* no_gold 100%"):
        limit.add(shares, 2)


def test_rewards_that_say_nothing_never_end_a_run():
    limit = FailureLimit(max_failed_share=0, window=1)
    limit.add({"reward": 1.0, "rewards/silent/mean": 0.0}, 2)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(RewardError, match="Type window=200"):
        FailureLimit(window=0)
    with pytest.raises(RewardError, match="lies between 0 and 1"):
        FailureLimit(max_failed_share=share)


COLUMNS = ("name", "outcomes", "details", "columns", "optional", "first",
           "completion", "expected", "reward", "part", "weight")  # fmt: skip


@pytest.mark.parametrize(
    "reward", [*FIVE_PART, *COOKBOOK, *reward_set([1, 1, 1, 1, 1])]
)
def test_no_column_of_the_data_gets_in_the_way(reward):
    """A trainer passes every column by its own name."""
    columns = {name: ["x"] for name in COLUMNS}
    plain = reward(completions=[GOOD], answer=["5"], prompts=["?"])
    assert reward(completions=[GOOD], answer=["5"], **columns) == plain
