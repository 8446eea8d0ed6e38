"""Greedy accuracy, its intervals, and paired comparisons."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from speed_helpers import assert_same_answers

from grpo_lab import evaluation, models
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Answer, Comparison, Evaluation

pytestmark = pytest.mark.numeric

# --- Statistics -------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, 857-872, table I,
        # method 3 (the score method without continuity correction).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_as_published(successes, total, low, high):
    found = evaluation.wilson_interval(successes, total)
    assert found == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_by_its_formula():
    z, n, p = 1.959963984540054, 400, 0.6
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    assert evaluation.wilson_interval(240, 400) == pytest.approx(
        (middle - half, middle + half)
    )
    assert evaluation.wilson_interval(20, 20)[1] == 1


@pytest.mark.parametrize(
    ("gained", "lost", "p_value"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (5, 0, 2 / 2**5),
        (8, 2, 2 * (1 + 10 + 45) / 2**10),
        (1, 6, 2 * (1 + 7) / 2**7),
    ],
)
def test_mcnemar_by_hand(gained, lost, p_value):
    """Twice the tail of a fair coin, counted by hand."""
    found = Comparison(gained, lost, total=100).p_value
    assert found == pytest.approx(p_value)


def test_paired_interval_by_hand():
    """Bonett and Price: one more on each side, two more questions."""
    pair = Comparison(gained=20, lost=5, total=98)
    assert pair.difference == pytest.approx(15 / 98)
    # (21 + 6 of 100: difference 0.15, variance (0.27 - 0.0225) / 100)
    half = 1.959963984540054 * math.sqrt(0.2475 / 100)
    assert pair.interval == pytest.approx((0.15 - half, 0.15 + half))
    equal = Comparison(0, 0, 50)
    assert equal.interval[0] < 0 < equal.interval[1]


def answers(correct: list[bool], questions=None) -> Evaluation:
    return Evaluation(
        tuple(
            Answer(
                question=questions[at] if questions else f"question {at}",
                gold="#### 1",
                text="",
                correct=right,
                format_ok=at % 2 == 0,
                tokens=10 + at,
                truncated=at == 0,
            )
            for at, right in enumerate(correct)
        ),
        seconds=1.5,
    )


def test_evaluation_adds_up():
    found = answers([True, False, True, True])
    assert (found.correct, found.accuracy) == (3, 0.75)
    assert found.interval == evaluation.wilson_interval(3, 4)
    assert found.format_ok_share == 0.5
    assert found.clipped_ratio == 0.25
    assert found.mean_tokens == 11.5
    assert found.seconds_per_answer == 1.5 / 4


def test_compare_pairs_questions():
    first = answers([True, True, False, False, False])
    second = answers([True, False, True, True, False])
    assert evaluation.compare(first, second) == Comparison(2, 1, 5)
    assert evaluation.compare(second, first) == Comparison(1, 2, 5)


def test_compare_by_the_form():
    """`answers` tags every second answer, whatever is right."""
    first = answers([True, True, False])
    plain = [replace(one, format_ok=False) for one in first.answers]
    bare = Evaluation(tuple(plain), seconds=1.0)
    assert evaluation.compare(bare, first, "format_ok") == Comparison(2, 0, 3)
    assert evaluation.compare(bare, first) == Comparison(0, 0, 3)


def test_compare_refuses_other_questions():
    first = answers([True, False])
    with pytest.raises(ValueError, match="other questions"):
        evaluation.compare(first, answers([True, False], ["a", "b"]))
    with pytest.raises(ValueError):
        evaluation.compare(first, answers([True, False, True]))


def test_save_and_load(tmp_path):
    found = answers([True, False, True])
    found.save(tmp_path / "deep" / "evaluation.json")
    assert Evaluation.load(tmp_path / "deep" / "evaluation.json") == found
    assert Evaluation.load(tmp_path / "none.json") is None


# --- Answers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "correct", "format_ok"),
    [
        ("<reasoning>\n6 + 1\n</reasoning>\n<answer>\n7\n</answer>", 1, 1),
        ("<reasoning>\n6 + 1\n</reasoning>\n<answer>\n8\n</answer>", 0, 1),
        ("6 + 1 = 7\nThe answer is 7.", 1, 0),
        ("6 + 1 = 8\nThe answer is 8.", 0, 0),
        ("", 0, 0),
    ],
)
def test_grade_reads_untagged_answers_too(text, correct, format_ok):
    graded = evaluation.grade("6 + 1?", "6 + 1 = 7\n#### 7", text, 9, False)
    assert (graded.correct, graded.format_ok) == (
        bool(correct),
        bool(format_ok),
    )
    assert (graded.question, graded.tokens) == ("6 + 1?", 9)


LATEX_GOLD = r"So the result is $\boxed{\frac{1}{2}}$."


@pytest.mark.parametrize(
    ("text", "correct", "format_ok"),
    [
        ("<think>\n2 : 4\n</think>\n<answer>$0.5$</answer>", 1, 1),
        ("<think>\n4 : 2\n</think>\n<answer>$2$</answer>", 0, 1),
        (r"2 : 4. The answer is $\frac{2}{4}$.", 1, 0),
        ("<reasoning>2 : 4</reasoning><answer>0.5</answer>", 1, 0),
        ("", 0, 0),
    ],
)
def test_grade_reads_latex_golds(text, correct, format_ok):
    graded = evaluation.grade(
        "2 : 4?", LATEX_GOLD, text, 9, False, evaluation.LATEX
    )
    assert (graded.correct, graded.format_ok) == (
        bool(correct),
        bool(format_ok),
    )


@pytest.mark.parametrize(
    ("grader", "gold", "told"),
    [
        (evaluation.NUMBERS, LATEX_GOLD.replace("1", "x"), "DATA = 'gsm8k'"),
        (evaluation.LATEX, "N/A", "DATA = 'numina_math_tir'"),
    ],
)
def test_a_gold_that_can_not_be_read_is_refused(grader, gold, told):
    with pytest.raises(LabError, match=told):
        evaluation.grade("?", gold, "7", 1, False, grader)


@pytest.fixture(scope="module")
def policy(tiny_qwen):
    return models.load_policy(str(tiny_qwen), load_in_4bit=False)


def test_tokens_and_truncation_are_counted(policy, monkeypatch):
    """Five new tokens: ended by its end token, ended at once, cut."""
    model, tokenizer = policy
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    word = tokenizer.encode("The")[0]
    new = torch.tensor(
        [
            [word, word, end, pad, pad],
            [end, pad, pad, pad, pad],
            [word, word, word, word, word],
            [word, word, word, word, end],
        ]
    )

    def generate(input_ids, max_new_tokens, **kwargs):
        assert max_new_tokens == 5
        return torch.cat([input_ids, new], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    chats = [[{"role": "user", "content": "?" * n}] for n in (1, 9, 2, 5)]
    texts = evaluation.generate(model, tokenizer, chats, 5)
    assert texts == [
        ("TheThe", 3, False),
        ("", 1, False),
        ("TheTheTheTheThe", 5, True),
        ("TheTheTheThe", 5, False),
    ]


def test_every_end_token_of_a_model_ends_an_answer(policy, monkeypatch):
    """Llama 3 ends a turn with one token and a text with another."""
    model, tokenizer = policy
    other = tokenizer.encode("7")[0]
    word = tokenizer.encode("The")[0]
    monkeypatch.setattr(
        model.generation_config,
        "eos_token_id",
        [tokenizer.eos_token_id, other],
    )
    monkeypatch.setattr(
        model,
        "generate",
        lambda input_ids, **kwargs: torch.cat(
            [input_ids, torch.tensor([[word, other, word]])], dim=1
        ),
    )
    chat = [{"role": "user", "content": "?"}]
    found = evaluation.generate(model, tokenizer, [chat], 3)
    assert found == [("The7", 2, False)]
    # A model that names another end than its tokenizer has both.
    other = tokenizer.eos_token_id
    monkeypatch.setattr(model.generation_config, "eos_token_id", word)
    found = evaluation.generate(model, tokenizer, [chat], 3)
    assert found == [("The", 1, False)]
    monkeypatch.setattr(model.generation_config, "eos_token_id", 1)
    found = evaluation.generate(model, tokenizer, [chat], 3)
    assert found == [("The", 2, False)]


def test_greedy_whatever_the_model_brings_along(policy, tiny_splits):
    model, tokenizer = policy
    plain = evaluation.evaluate(model, tokenizer, tiny_splits.eval, 12, 6)
    assert len(plain.answers) == 6
    assert {answer.tokens for answer in plain.answers} == {12}
    own = model.generation_config
    brought = {
        "do_sample": True,
        "temperature": 5.0,
        "top_k": 3,
        "top_p": 0.5,
        "repetition_penalty": 3.0,
    }
    kept = {name: getattr(own, name) for name in brought}
    own.update(**brought)
    try:
        torch.manual_seed(1)
        again = evaluation.evaluate(model, tokenizer, tiny_splits.eval, 12, 6)
    finally:
        own.update(**kept)
    assert again.answers == plain.answers


def test_answers_do_not_depend_on_the_batch(policy, tiny_splits):
    """Padding on the left, masked, in batches of 1, 4 (4 + 2) and 6."""
    model, tokenizer = policy
    lengths = {len(row["question"]) for row in tiny_splits.eval}
    assert len(lengths) > 2
    by_size = [
        evaluation.evaluate(model, tokenizer, tiny_splits.eval, 12, size)
        for size in (1, 4, 6)
    ]
    for other in by_size[1:]:
        assert_same_answers(other, by_size[0])
    questions = [answer.question for answer in by_size[1].answers]
    assert questions == tiny_splits.eval["question"][:]


def test_the_mode_of_the_model_is_put_back(policy, tiny_splits):
    model, tokenizer = policy
    rows = tiny_splits.eval.select(range(1))
    told = []
    for training in (True, False):
        model.train(training)
        evaluation.evaluate(
            model, tokenizer, rows, 2, 1, lambda *at: told.append(at)
        )
        assert model.training is training
    assert told == [(1, 1), (1, 1)]


def test_the_prompt_is_that_of_training(policy, tiny_splits, monkeypatch):
    """The whole conversation, and the assistant's turn opened."""
    model, tokenizer = policy
    seen = []

    def generate(input_ids, attention_mask, **kwargs):
        seen.extend(
            tokenizer.decode(ids[mask.bool()])
            for ids, mask in zip(input_ids, attention_mask, strict=True)
        )
        end = torch.full((len(input_ids), 1), tokenizer.eos_token_id)
        return torch.cat([input_ids, end], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    evaluation.evaluate(model, tokenizer, tiny_splits.eval, 4, 3)
    assert seen == [
        tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )
        for prompt in tiny_splits.eval["prompt"]
    ]


def test_an_evaluation_along_a_training(policy, tiny_splits, tmp_path):
    """Each snapshot is what is judged, and the base comes back bare."""
    model, tokenizer = policy
    rows = tiny_splits.eval
    plain = evaluation.evaluate(model, tokenizer, rows, 4, 6)
    folders = {}
    for step in (2, 4):
        adapter = get_peft_model(
            copy.deepcopy(model),
            LoraConfig(
                r=8, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        for name, weight in adapter.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=step)
        folders[step] = tmp_path / str(step)
        adapter.save_pretrained(folders[step])
    judged = evaluation.evaluate_snapshots(
        model, folders, tokenizer, rows, 4, 6
    )
    assert list(judged) == [0, 2, 4]
    assert judged[0].answers == plain.answers
    texts = [[a.text for a in judged[step].answers] for step in judged]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    assert not any("lora" in name for name, _ in model.named_modules())
    again = evaluation.evaluate(model, tokenizer, rows, 4, 6)
    assert again.answers == plain.answers
