"""The five-part set: what each part pays, and what no text can get."""

import collections
import inspect
import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewards import (
    FIVE_PART,
    MAX_REWARD,
    RANGES,
    RewardError,
    accuracy_reward,
    correctness_reward,
    extract_answer,
    integer_reward,
    is_correct,
    soft_format_reward,
    strict_format_reward,
    tag_count_reward,
)
from rewards.five_part import reward_set
from rewards.options import options_of, with_options

CALM = settings(
    deadline=None, derandomize=True, database=None, max_examples=300
)

with open(
    Path(__file__).parent / "data" / "reward_cases.jsonl", encoding="utf-8"
) as lines:
    CASES = [json.loads(line) for line in lines]

PREFILLED = {"F08": "<think>\n"}  # what the template wrote in those cases

PERFECT = (
    "<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"
)
LONG_TAIL = " and so on" * 60

# Ways to put an answer in tags, from the best form to the worst.
FORMS = [
    PERFECT,
    "<think>{reasoning}</think><answer>{answer}</answer>",
    "Sure!\n" + PERFECT + "\nI hope that helps.",
    PERFECT + LONG_TAIL,
    "<answer>{answer}</answer>",
    "<answer>{answer}</answer>" + LONG_TAIL,
    "<answer>{answer}</answer><answer>{answer}</answer>" + LONG_TAIL,
    "<think>{reasoning}</think>" * 2 + "<answer>{answer}</answer>",
    "{reasoning}</reasoning><answer>{answer}</answer>",
]


def parts(text, gold, reward_set=FIVE_PART):
    return [part([text], answer=[gold])[0] for part in reward_set]


def total(text, gold, reward_set=FIVE_PART):
    return sum(parts(text, gold, reward_set))


def fill(form, answer, reasoning="x"):
    return form.replace("{reasoning}", reasoning).replace(
        "{answer}", str(answer)
    )


# --- what each part pays -------------------------------------------------


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        (fill(PERFECT, 18), [2.0, 0.5, 0.5, 0.5, 0.5]),
        (fill(PERFECT, 18, "a\n\nb < c & d\n"), [2.0, 0.5, 0.5, 0.5, 0.5]),
        (fill(PERFECT, "18.0"), [2.0, 0.5, 0.5, 0.5, 0.5]),
        (fill(FORMS[1], 18), [2.0, 0.5, 0.0, 0.5, 0.5]),
        (fill(PERFECT, 18).replace("\n", "\r\n"), [2.0] + [0.5] * 4),
        (fill(PERFECT, 18).replace("\n", " \n\n "), [2.0] + [0.5] * 4),
        (fill(PERFECT, 18) + "\n\n", [2.0, 0.5, 0.5, 0.5, 0.5]),
        (fill(PERFECT, "18\n</answer>"), [2.0, 0.5, 0.0, 0.0, 0.375]),
        (fill(PERFECT, 18, "x</reasoning>\n<answer>"), [2, 0.5, 0, 0, 0.25]),
        (fill(PERFECT, 18).replace("\n18", " 18"), [2.0, 0.5, 0, 0.5, 0.5]),
        (fill(PERFECT, "$18 per day"), [2.0, 0.5, 0.5, 0.5, 0.5]),
        (fill(PERFECT, 17), [0.0, 0.5, 0.5, 0.5, 0.5]),
        (fill(PERFECT, "18.5"), [0.0, 0.0, 0.5, 0.5, 0.5]),
        (fill(PERFECT, "eighteen"), [0.0, 0.0, 0.5, 0.5, 0.5]),
        (fill(PERFECT, 18) + "<|im_end|>\n", [2.0, 0.5, 0.5, 0.5, 0.5]),
        ("So: " + fill(PERFECT, 18), [2.0, 0.5, 0.0, 0.5, 0.5]),
        (fill(PERFECT, 18) + " 0123456789", [2.0, 0.5, 0.0, 0.5, 0.49]),
        (fill(PERFECT, 18) + LONG_TAIL, [2.0, 0.5, 0.0, 0.5, 0.0]),
        ("<answer>18</answer>", [2.0, 0.5, 0.0, 0.0, 0.25]),
        ("<answer>18</answer><reasoning>x</reasoning>", [0, 0, 0, 0, 0.476]),
        ("<reasoning>x</think><answer>18</answer>", [2, 0.5, 0, 0, 0.375]),
        ("<reasoning>x<answer>18</answer>", [0.0, 0.0, 0.0, 0.0, 0.375]),
        ("<answer>" * 10 + "18</answer>", [2.0, 0.5, 0.0, 0.0, 0.125]),
        ("18", [0.0] * 5),
        ("#### 18", [0.0] * 5),
        ("", [0.0] * 5),
    ],
)
def test_what_the_five_parts_pay(text, paid):
    assert parts(text, "9 + 9 = 18\n#### 18") == pytest.approx(paid)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if "suggested_rewards" in c],
    ids=lambda case: case["id"],
)
def test_public_case_of_form(case):
    prefilled = PREFILLED.get(case["id"], "")
    paid = {
        name: part([case["input"]], prefilled=prefilled)[0]
        for name, part in (
            ("strict", strict_format_reward),
            ("soft", soft_format_reward),
            ("tag_count", tag_count_reward),
        )
    }
    wanted = case["suggested_rewards"]
    assert {name: paid[name] for name in wanted} == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_case_of_correctness(case):
    wanted = {"tagged": 2.0, "no gold": None}.get(case["right_from"], 0.0)
    assert correctness_reward([case["input"]], answer=[case["gold"]]) == [
        wanted
    ]


def test_a_gold_that_cannot_be_read_gives_none():
    text = fill(PERFECT, 5)
    golds = ["#### 5", "five", None, "None", "#### "]
    assert correctness_reward([text] * 5, answer=golds) == [2.0] + [None] * 4


def test_an_integer_cannot_be_right_where_the_gold_is_none():
    text = "<answer>2</answer>"
    assert integer_reward([text] * 3, answer=["1/2", "2", "?"]) == [
        0,
        0.5,
        0.5,
    ]
    assert integer_reward([text], solution=["1/2"]) == [0.0]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("(A) 18", "18"), ("x ≈ 18", "18"), ("53/3 ≈ 18", "18"), ("0.5", "50%")],
)
def test_every_right_answer_beats_every_wrong_integer(answer, gold):
    least = f"<answer>{answer}</answer>" * 2 + LONG_TAIL
    assert parts(least, gold) == [2.0, 0.5, 0.0, 0.0, 0.0]
    assert total(fill(PERFECT, 17), gold) == 2.0


# --- options and weights --------------------------------------------------


@pytest.mark.parametrize("tag", ["<think>", "<reasoning>"])
@pytest.mark.parametrize("space", ["", "\n", " \n\n"])
def test_what_the_template_wrote_counts_as_said(tag, space):
    close = tag.replace("<", "</")
    text = f"x\n{close}\n<answer>\n18\n</answer>"
    gold = ["#### 18"]
    without = [part([text], answer=gold)[0] for part in FIVE_PART]
    assert without == [2.0, 0.5, 0.0, 0.0, 0.375]
    parts = reward_set(prefilled=tag + space)
    paid = [part([text], answer=gold)[0] for part in parts]
    assert paid == [2.0, 0.5, 0.5 * ("\n" in space), 0.5, 0.5]
    # A policy that says the tag again has doubled it.
    paid = [part([tag + text], answer=gold)[0] for part in parts]
    assert paid == [2.0, 0.5, 0.0, 0.0, 0.375]


def test_a_prefilled_reasoning_that_never_closes_holds_no_answer():
    text = ["so <answer>18</answer>"]
    assert correctness_reward(text, answer=["18"]) == [2.0]
    assert correctness_reward(text, answer=["18"], prefilled="<think>") == [0]
    assert integer_reward(text, prefilled="<think>") == [0.0]


@pytest.mark.parametrize("part", FIVE_PART)
@pytest.mark.parametrize(
    "prefilled", ["</think>", "<answer>", "<think><think>", "So <think>", 5]
)
def test_only_an_opening_tag_can_be_prefilled(part, prefilled):
    with pytest.raises(RewardError, match="opening reasoning tag"):
        part([], answer=[], prefilled=prefilled)
    with pytest.raises(RewardError, match="opening reasoning tag"):
        reward_set(prefilled=prefilled)


def test_an_option_is_bound_and_the_reward_keeps_its_name():
    bound = with_options(correctness_reward, policy="flexible")
    again = pickle.loads(pickle.dumps(bound))
    for reward in (bound, again, with_options(bound, prefilled="")):
        assert reward.__name__ == "correctness_reward"
        assert reward.__doc__ == correctness_reward.__doc__
        assert reward(completions=["It is 18."], answer=["18"]) == [2.0]
    assert correctness_reward(["It is 18."], answer=["18"]) == [0.0]


def test_an_option_that_a_reward_does_not_have_is_refused():
    with pytest.raises(RewardError, match="'polcy'.* are: policy, prefilled"):
        with_options(correctness_reward, polcy="stated")
    with pytest.raises(RewardError, match="no option 'answer'"):
        with_options(correctness_reward, answer=["18"])
    with pytest.raises(RewardError, match="'policy', 'x'.* are: prefilled"):
        with_options(tag_count_reward, policy="stated", x=1)


def test_a_learners_own_reward_has_options_too():
    def near(
        completions, answer, tolerance=0.1, prompts=None, log_metric=None
    ):
        return [tolerance for _ in completions]

    assert options_of(near) == ["tolerance"]
    bound = with_options(near, tolerance=0.5)
    assert bound(["x"], answer=["y"]) == [0.5]
    assert bound.__name__ == "near"


@pytest.mark.parametrize("reward", [correctness_reward, accuracy_reward])
def test_one_reward_under_two_names_is_logged_apart(reward):
    """A trainer makes one table of all columns, which must be as long."""
    other = with_options(reward, policy="flexible")
    other.__name__ = "other"
    inner = with_options(other)
    inner.__name__ = "inner"
    columns, metrics = collections.defaultdict(list), []
    rewards = [reward, other, pickle.loads(pickle.dumps(inner))]
    for one in rewards:
        one(
            ["It is 18."], answer=["18"],
            log_extra=lambda name, texts: columns[name].extend(texts),
            log_metric=lambda name, share: metrics.append(name),
        )  # fmt: skip
    names = [reward.__name__, "other", "inner"]
    assert columns == {
        f"{name}/{what}": [text]
        for name, *texts in zip(
            names, ["no_answer", "right", "right"], ["", "18", "18"],
            strict=True,
        )
        for what, text in zip(["outcome", "answer"], texts, strict=True)
    }  # fmt: skip
    assert len(metrics) == len(set(metrics)) == 7 * len(names)


def test_weights_multiply_what_each_part_pays():
    weights = [3, 0, 0.5, 1, 2]
    weighted = reward_set(weights)
    assert [part.__name__ for part in weighted] == [
        part.__name__ for part in FIVE_PART
    ]
    for form in FORMS:
        text, gold = [fill(form, 18)], ["18"]
        for part, plain, weight in zip(
            pickle.loads(pickle.dumps(weighted)),
            FIVE_PART,
            weights,
            strict=True,
        ):
            assert part(text, answer=gold) == [
                weight * plain(text, answer=gold)[0]
            ]
    assert weighted[0](["x"], answer=["no gold in here"]) == [None]
    assert reward_set()[0](["<answer>5</answer>"], solution=["5"]) == [2.0]
    # A column of the dataset can't take the place of a weight.
    assert weighted[0](["<answer>5</answer>"], answer=["5"], weight=[9]) == [
        6.0
    ]


@pytest.mark.parametrize(
    "weights",
    [
        *([1, 1, 1, 1], [1] * 6, [], [1, 1, 1, 1, -1], [1, 1, 1, 1, "1"]),
        *([1, 1, 1, 1, float("nan")], [float("inf"), 1, 1, 1, 1]),
        [1, 1, 1, 1, None],
    ],
)
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(RewardError, match="5 finite numbers"):
        reward_set(weights)


@pytest.mark.parametrize(
    "weights",
    [[0] * 5, [1, 1, 2, 1, 1], [0.75, 9, 1, 1, 1], [1, 0, 0, 0, 4]],
)
def test_weights_by_which_form_rivals_being_right_are_refused(weights):
    with pytest.raises(RewardError, match="form alone"):
        reward_set(weights)
    weights[0] += 0.001 + weights[0] * 1.01
    reward_set(weights)


# --- what no text can get ------------------------------------------------

PIECES = [
    *("<reasoning>", "</reasoning>", "<think>", "</think>"),
    *("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>"),
    *("<answer>", "</answer>", "<ANSWER>", "</Answer >", "<answer x=1>"),
    *("<THINK>", "</reasoning >", "<answer/>", "< answer>", "<"),
    *("<|im_end|>", "</s>", r"\boxed{", r"\boxed{7}", "}", "####", "#### 7"),
    *("7", "18", "-1", "1/2", "1,000", "$", "%", "=", "9 + 9 = 18", "None"),
    *(" ", "\n", "\r\n", "\t", "\u200b", "\u2212", "\uff11", "\x00", "\x85"),
    *("the answer is ", "Answer: 7.", "Sure!", "x" * 300),
]
JUNK = st.text() | st.lists(
    st.sampled_from(PIECES) | st.text(max_size=5), max_size=12
).map("".join)
# Well-formed completions with junk where it hurts most.
ANY_TEXT = JUNK | st.builds(
    "{0}<{3}>{1}</{3}>{0}<answer>{2}</answer>{0}".format,
    st.sampled_from(["", "\n", " ", "Sure!"]),
    JUNK,
    JUNK,
    st.sampled_from(["reasoning", "think"]),
)
GOLDS = st.integers().map(str) | st.fractions().map(str)
PLAIN_TEXT = st.text(st.characters(exclude_characters="<"))

# The set as it is, and where the template has written the opening tag: what
# follows it may be any of the forms without its own.
SETS = {
    prefilled: reward_set(prefilled=prefilled)
    for prefilled in ("", "<think>\n", "<reasoning>")
}


def without_opening(form, prefilled):
    newline = "\n?" if prefilled.endswith("\n") else ""
    return re.sub(f"<(?:reasoning|think)>{newline}", "", form, count=1)


SET_AND_FORM = st.sampled_from(
    [
        (parts, without_opening(form, prefilled) if prefilled else form)
        for prefilled, parts in SETS.items()
        for form in FORMS
        # no answer follows a reasoning that never closes
        if not prefilled or "</" in form.partition("<answer>")[0]
    ]
)


@CALM
@given(ANY_TEXT, GOLDS, st.sampled_from(list(SETS.values())))
def test_every_part_stays_in_its_range(text, gold, parts):
    for part, (least, most) in zip(parts, RANGES.values(), strict=True):
        assert least <= part([text], answer=[gold])[0] <= most


@CALM
@given(GOLDS, SET_AND_FORM, st.sampled_from(FORMS), ANY_TEXT)
@example("1/2", (FIVE_PART, FORMS[6]), PERFECT, "")
def test_a_right_answer_beats_every_wrong_one(gold, in_form, other, text):
    parts, form = in_form
    right = total(fill(form, gold), gold, parts)
    for wrong in (
        fill(form, f"-1{gold.lstrip('-')}"),  # in the same form
        fill(form, gold + " or 10000000"),
        fill(other, 10**50),  # an integer, in any form
        fill(other, ""),
        gold,  # no tags
        f"#### {gold}",
        text,
    ):
        if not parts[0]([wrong], answer=[gold])[0]:
            assert right > total(wrong, gold, parts)


@CALM
@given(ANY_TEXT, GOLDS, st.sampled_from(list(SETS.values())))
@example(fill(PERFECT, 17), "18", FIVE_PART)
@example(fill(PERFECT, 17), "1/2", FIVE_PART)
@example("\n</think>\n<answer>\n17\n</answer>", "18", SETS["<think>\n"])
@example("<answer>(A) 18</answer>", "18", FIVE_PART)
@example("<answer>0.5</answer>", "50%", FIVE_PART)
def test_form_alone_never_reaches_what_a_right_answer_gets(text, gold, parts):
    # The least that any right answer gets: no form at all, but an integer is
    # an integer.
    least = 2.0 + 0.5 * ("/" not in gold)
    correct, integer, *form = [
        part([text], answer=[gold])[0] for part in parts
    ]
    assert sum(form) <= 1.5 < least
    if correct:
        assert correct + integer == least
    else:
        assert integer + sum(form) < least


@CALM
@given(
    st.lists(st.integers(0, 32).map(lambda n: n / 8), min_size=5, max_size=5),
    GOLDS,
    st.sampled_from(FORMS),
    ANY_TEXT,
)
def test_no_weights_that_are_accepted_break_the_set(weights, gold, form, text):
    try:
        parts = reward_set(weights)
    except RewardError:
        right, _, *rest = weights
        assert sum(rest) * 0.5 >= right * 2.0
        return
    right = total(fill(form, gold), gold, parts)
    for wrong in (text, fill(PERFECT, 10**50), fill(PERFECT, "")):
        if not is_correct(wrong, gold):
            assert right > total(wrong, gold, parts)
    for part, weight, (least, most) in zip(
        parts, weights, RANGES.values(), strict=True
    ):
        assert weight * least <= part([text], answer=[gold])[0]
        assert part([text], answer=[gold])[0] <= weight * most


@CALM
@given(SET_AND_FORM, PLAIN_TEXT, PLAIN_TEXT)
def test_longer_reasoning_never_lowers_the_reward(in_form, reasoning, more):
    parts, form = in_form
    short = total(fill(form, 18, reasoning), "18", parts)
    assert total(fill(form, 18, reasoning + more), "18", parts) >= short
    assert total(fill(form, 18, reasoning * 50), "18", parts) >= short


@CALM
@given(PLAIN_TEXT, st.sampled_from(["reasoning", "think"]))
def test_form_is_blind_to_what_is_in_the_blocks(text, tag):
    completion = fill(PERFECT, "18", text).replace("reasoning>", f"{tag}>")
    assert extract_answer(completion) == "18"
    assert total(completion, "18") == MAX_REWARD
    for prefilled in (f"<{tag}>", f"<{tag}>\n"):
        cut = completion.removeprefix(prefilled)
        parts = reward_set(prefilled=prefilled)
        assert total(cut, "18", parts) == MAX_REWARD


# --- the contract with the trainer ---------------------------------------


def test_the_set_is_the_five_parts_in_order_and_reaches_its_maximum():
    assert [part.__name__ for part in FIVE_PART] == [
        "correctness_reward",
        "integer_reward",
        "strict_format_reward",
        "soft_format_reward",
        "tag_count_reward",
    ]
    assert MAX_REWARD == 4.0 == total(fill(PERFECT, 18), "#### 18")  # T11


@pytest.mark.parametrize("part", FIVE_PART)
def test_a_part_can_go_to_another_process(part):
    assert pickle.loads(pickle.dumps(part)) is part
    assert inspect.isfunction(part)


@pytest.mark.parametrize("part", FIVE_PART)
def test_plain_and_conversational_completions_score_alike(part):
    texts = [fill(PERFECT, 18), "I don't know.", ""]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {"answer": ["#### 18"] * 3, "prompts": ["?"] * 3}
    scores = part(completions=texts, **columns)
    assert scores == part(completions=chats, **columns)
    assert scores == [RANGES[part][1], 0.0, 0.0]
    assert part([], answer=[]) == []


def test_a_message_without_text_scores_nothing():
    call = [{"role": "assistant", "content": None, "tool_calls": ["..."]}]
    assert total(call, "18") == 0.0


@pytest.mark.parametrize("column", ["answer", "solution", "ground_truth"])
def test_the_golds_may_have_any_of_three_names(column):
    texts = ["<answer>5</answer>", "<answer>6</answer>"]
    assert correctness_reward(texts, **{column: [5, "#### 5"]}) == [2.0, 0.0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "column 'answer'"),  # T05
        ({"solution": None}, "column 'answer'"),  # T06
        ({"ground_truths": ["5", "5"]}, "are: ground_truths"),  # T07, T10
        ({"x": [1, 2], "prompts": ["?"] * 2, "log_metric": print}, "are: x."),
        ({"answer": "55"}, "must be a list"),
        ({"answer": 5}, "must be a list"),
        ({"answer": ["5"]}, "2 completions and 1 gold"),  # T08
        ({"solution": ["5"] * 3}, "2 completions and 3 gold"),
    ],
)
def test_golds_that_do_not_fit_are_refused(columns, message):
    with pytest.raises(RewardError, match=message):
        correctness_reward(completions=["<answer>5</answer>"] * 2, **columns)


@pytest.mark.parametrize("part", FIVE_PART)
def test_one_string_is_not_a_batch(part):
    with pytest.raises(RewardError, match=r"completions=\[text\]"):
        part("<answer>5</answer>", answer=["5"] * 18)
