"""What became of each completion: counted, logged, and stopped in time."""

import pickle

import pytest

from rewards import correctness_reward
from rewards.batch import RewardError
from rewards.health import FAILURES, Outcome, report, watch
from rewards.options import with_options

GOOD, BAD = "<answer>5</answer>", "<answer>a few</answer>"


def score(reward, *texts, **kwargs):
    return reward(list(texts), answer=["#### 5"] * len(texts), **kwargs)


def silent(completions, **kwargs):
    return [0.0] * len(completions)


def test_only_the_right_answer_is_paid_and_no_gold_is_left_out():
    pays = {outcome: outcome.pay(2.0) for outcome in Outcome}
    assert pays.pop(Outcome.RIGHT) == 2.0
    assert pays.pop(Outcome.NO_GOLD) is None
    assert set(pays.values()) == {0.0}


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


def test_a_run_ends_when_more_than_the_share_fails():
    watched = watch(correctness_reward, max_failed_share=0.5, window=4)
    for _ in range(10):
        assert score(watched, GOOD, BAD) == [2.0, 0.0]
    with pytest.raises(RewardError, match="unreadable 100%") as error:
        score(watched, BAD, BAD)
    assert "Of the last 4 completions, 75 %" in str(error.value)
    assert "max_failed_share" in str(error.value)


def test_it_waits_until_there_is_enough_to_judge():
    watched = watch(correctness_reward, max_failed_share=0.5, window=6)
    score(watched, BAD, BAD)
    score(watched, BAD)
    with pytest.raises(RewardError, match="Of the last 6"):
        score(watched, BAD, BAD, BAD)


def test_what_lies_far_back_is_forgotten():
    watched = watch(correctness_reward, max_failed_share=0.4, window=10)
    score(watched, *[BAD] * 3)
    for _ in range(5):
        score(watched, *[GOOD] * 4)
    with pytest.raises(RewardError, match="Of the last 11 completions, 64 %"):
        score(watched, *[BAD] * 7)


def test_a_share_of_one_never_ends_a_run():
    watched = watch(correctness_reward, max_failed_share=1, window=1)
    assert score(watched, BAD, BAD) == [0.0, 0.0]


def test_a_missing_answer_is_no_failure():
    watched = watch(correctness_reward, max_failed_share=0, window=1)
    assert score(watched, "5", "no idea") == [0.0, 0.0]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(RewardError, match="lies between 0 and 1"):
        watch(correctness_reward, max_failed_share=share)


def test_the_trainer_still_gets_everything():
    shares = {}
    reward = with_options(correctness_reward, policy="flexible")
    watched = watch(reward)
    assert watched.__name__ == "correctness_reward"
    assert score(watched, "5", log_metric=shares.__setitem__) == [2.0]
    assert shares["correctness_reward/failed"] == 0
    assert score(pickle.loads(pickle.dumps(watched)), GOOD) == [2.0]


def test_a_reward_that_says_nothing_is_let_through():
    watched = watch(silent, max_failed_share=0, window=1)
    assert score(watched, GOOD, BAD) == [0.0, 0.0]
