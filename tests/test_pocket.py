"""The pocket models' problems, corpus, tokenizer and weights."""

import json
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
import torch
from transformers import AutoTokenizer

from grpo_lab import models
from grpo_lab.evaluation import Answer, Evaluation
from grpo_lab.pocket import WEIGHTS_DIR, problems, target
from grpo_lab.prompts import REASONING_PROMPT, THINK_PROMPT, messages
from rewards import gold_number, is_correct
from rewards.numbers import box_statement
from tools import pocket_corpus as corpus
from tools import pocket_train as train

pytestmark = pytest.mark.numeric

KINDS = {**problems.WORD_KINDS, **problems.LATEX_KINDS}


def many(kind: str, count: int = 300) -> list[problems.Problem]:
    return list(islice(problems.stream(3, {kind: KINDS[kind]}), count))


# --- Problems ---------------------------------------------------------------


def evaluated(step: str) -> tuple[int, int]:
    """Both sides of an equation of integers."""
    left, right = step.split(" = ")
    assert re.fullmatch(r"-?\d+ [-+*] -?\d+", left)
    return eval(left), int(right)


@pytest.mark.parametrize("kind", problems.WORD_KINDS)
def test_word_problems_are_solved_rightly_and_slips_are_right_sums(kind):
    """A slip's arithmetic holds: only the way of solving is wrong."""
    for problem in many(kind):
        assert problem.kind == kind
        for steps, result in (
            (problem.steps, problem.result),
            (problem.slip, problem.slip_result),
        ):
            values = [evaluated(step) for step in steps]
            assert all(left == right for left, right in values), problem
            assert int(result) == values[-1][1]
        assert problem.slip_result != problem.result
        # A count of things is never negative.
        assert int(problem.result) >= 0, problem
        # Every number of a step stands in the question or in a step before.
        known = re.findall(r"\d+", problem.question) + ["2"]
        for step in problem.steps:
            left, right = step.split(" = ")
            assert set(re.findall(r"\d+", left)) <= set(known), problem
            known.append(right)


def fraction(text: str) -> Fraction:
    found = re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", text)
    return Fraction(int(found[1]), int(found[2])) if found else Fraction(text)


@pytest.mark.parametrize("kind", problems.LATEX_KINDS)
def test_latex_problems_are_solved_rightly(kind):
    for problem in many(kind):
        found = fraction(problem.result)
        assert found != fraction(problem.slip_result)
        if kind == "fraction_sum":
            a, c, b, c2 = map(int, re.findall(r"\d+", problem.question))
            assert found == Fraction(a, c) + Fraction(b, c2)
        elif kind == "share":  # b x = a
            b, a = map(int, re.findall(r"\d+", problem.question))
            assert found * b == a
        else:  # x + a = b
            a, b = map(int, re.findall(r"\d+", problem.question))
            assert found + a == b
        assert problem.result in problem.steps[-1]
        assert problem.slip_result in problem.slip[-1]


def test_rows_are_those_of_gsm8k():
    """Read by the rewards as real rows are, with calculator notes."""
    for problem in (p for kind in problems.WORD_KINDS for p in many(kind, 50)):
        row = problem.row()
        assert list(row) == ["question", "answer"]
        assert gold_number(row["answer"]) == int(problem.result)
        *lines, last = row["answer"].split("\n")
        assert last == f"#### {problem.result}"
        for line in lines:
            note = re.fullmatch(r"(.+) = <<(\S+)=(-?\d+)>>(-?\d+)", line)
            assert note and eval(note[2]) == int(note[3]) == int(note[4])
        for right, steps, result in (
            (True, problem.steps, problem.result),
            (False, problem.slip, problem.slip_result),
        ):
            told = corpus.write(steps, result, "tagged", "reasoning")
            assert is_correct(told, row["answer"]) == right


def test_latex_rows_are_those_of_numina():
    for problem in (p for kind in problems.LATEX_KINDS for p in many(kind, 9)):
        row = problem.latex_row()
        assert list(row) == ["problem", "solution"]
        assert box_statement(row["solution"])[1] == problem.result


def test_sides_never_meet_and_one_question_in_ten_is_held_out():
    train_side = problems.sample(1000, held_out=False, seed=1)
    other_seed = problems.sample(1000, held_out=False, seed=2)
    held_out = problems.sample(400, held_out=True, seed=1)
    first, second, evaluated = (
        {p.question for p in side}
        for side in (train_side, other_seed, held_out)
    )
    assert (len(first), len(evaluated)) == (1000, 400)
    assert not (first | second) & evaluated
    assert {p.kind for p in held_out} == set(problems.WORD_KINDS)
    questions = {p.question for p in islice(problems.stream(5), 5000)}
    share = sum(map(problems.is_held_out, questions)) / len(questions)
    assert 0.08 < share < 0.12
    shift = {"shift": problems.LATEX_KINDS["shift"]}
    with pytest.raises(ValueError, match="Ask for fewer"):
        problems.sample(2000, held_out=True, seed=1, kinds=shift)


def test_a_seed_means_the_same_in_every_process():
    """Python's own hashes differ from process to process; ours must not."""
    program = (
        "from grpo_lab.pocket import problems\n"
        "from tools import pocket_corpus as corpus\n"
        "from itertools import islice\n"
        "print(problems.sample(50, held_out=True, seed=9))\n"
        "print(list(islice(corpus.examples(9), 50)))\n"
        "print(next(corpus.drills(9)))\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    here = f"{problems.sample(50, held_out=True, seed=9)}\n".encode()
    assert texts.pop().startswith(here)
    assert problems.sample(50, held_out=True, seed=8) != problems.sample(
        50, held_out=True, seed=9
    )


# --- Corpus -----------------------------------------------------------------


@pytest.fixture(scope="module")
def examples():
    return list(islice(corpus.examples(4), 6000))


def shape(example: corpus.Example) -> str:
    tag = "think" if example.system_prompt == THINK_PROMPT else "reasoning"
    reasoned = f"<{tag}>\n" in example.completion
    answered = "<answer>\n" in example.completion
    if reasoned:
        return "tagged" if answered else "tagged_reasoning"
    if answered:
        return "tagged_answer"
    return "plain" if "\nThe answer is" in example.completion else "bare"


def test_the_corpus_is_what_it_says(examples):
    """Its shapes, its two tasks, and no held-out question."""
    assert not [e for e in examples if problems.is_held_out(e.question)]
    assert sum(corpus.SHAPES.values()) == pytest.approx(1)
    found = Counter(map(shape, examples))
    for name, share in corpus.SHAPES.items():
        assert found[name] / len(examples) == pytest.approx(share, abs=0.03)
    prompts = Counter(example.system_prompt for example in examples)
    assert set(prompts) == {REASONING_PROMPT, THINK_PROMPT}
    share = prompts[THINK_PROMPT] / len(examples)
    assert share == pytest.approx(corpus.LATEX_SHARE, abs=0.03)
    for example in examples:
        words = example.system_prompt == REASONING_PROMPT
        other = "think" if words else "reasoning"
        assert f"<{other}>" not in example.completion


def test_the_corpus_slips_as_often_as_it_says(monkeypatch):
    """Counted on the problems themselves, kind by kind."""
    assert set(corpus.SLIPS) == set(KINDS)
    made, total, slipped = [], Counter(), Counter()
    example = corpus._example

    def noted(problem, rng):
        made.append(problem)
        return example(problem, rng)

    monkeypatch.setattr(corpus, "_example", noted)
    for written in islice(corpus.examples(6), 9000):
        problem = made[-1]
        total[problem.kind] += 1
        lines = [line.strip("$") for line in written.completion.split("\n")]
        numbers = [
            line.removeprefix("The answer is ").rstrip(".").strip("$")
            for line in lines
        ]
        slipped[problem.kind] += problem.slip_result in numbers
    for kind, share in corpus.SLIPS.items():
        found = slipped[kind] / total[kind]
        assert found == pytest.approx(share, abs=0.06), kind


def test_drills_are_right_sums():
    for page in islice(corpus.drills(2), 50):
        assert len(page) == corpus.DRILL_LENGTH
        for left, right in page:
            assert eval(left.removesuffix(" =")) == int(right)


# --- Tokenizer and training -------------------------------------------------


@pytest.fixture(scope="module", params=sorted(train.RECIPES))
def tokenizer(request):
    return train.build_tokenizer(train.RECIPES[request.param])


def test_digits_and_tags_are_one_token_each(tokenizer):
    pieces = tokenizer.tokenize("12 + 345 = 357")
    digits = [piece for piece in pieces if any(c.isdigit() for c in piece)]
    assert [d.strip("Ġ") for d in digits] == list("12345357")
    for tag in train.TAGS:
        ids = tokenizer.encode(tag, add_special_tokens=False)
        assert len(ids) == 1, tag


def test_text_comes_back_as_it_went_in(tokenizer, examples, tmp_path):
    texts = [example.completion for example in examples[:200]]
    texts += ["  spaces  and\ttabs\n\n", "é ≤ 日本 🙂", "a<b>c</answer>d", ""]
    for text in [*texts, *train.TAGS]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<answer>\n42\n</answer>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.padding_side == "left"
    assert loaded.eos_token != loaded.pad_token
    models.check_chat_template(loaded, "it")


def test_only_completions_are_learned(tokenizer):
    example = next(corpus.examples(1))
    ids, labels = train.encode(example, tokenizer)
    assert len(ids) == len(labels)
    learned = [label for label in labels if label != -100]
    assert tokenizer.decode(learned) == (
        example.completion + tokenizer.eos_token
    )
    # The policy is later prompted with the very same tokens.
    assert (
        ids[: labels.index(learned[0])]
        == tokenizer.apply_chat_template(
            messages(example.question, example.system_prompt),
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
    )
    batch = next(train.batches(train.RECIPES["pocket-qwen"], tokenizer))
    padding = batch["input_ids"] == tokenizer.pad_token_id
    assert padding.any()
    assert (batch["labels"][padding] == -100).all()
    kept = batch["labels"] != -100
    assert (batch["labels"][kept] == batch["input_ids"][kept]).all()


def test_training_leaves_a_model_that_loads(tmp_path):
    recipe = train.Recipe(
        name="small", family="llama", hidden_size=32, num_layers=1,
        num_heads=2, num_kv_heads=1, intermediate_size=64, seed=1,
        batch_size=8, steps=8, warmup=2,
    )  # fmt: skip
    record = train.train(recipe, tmp_path)
    assert record["steps_done"] == 8
    assert record["loss"][7] < record["loss"][0]
    saved = json.loads((tmp_path / "training.json").read_text())
    assert saved["parameters"] == record["parameters"]
    policy, tokenizer = models.load_policy(str(tmp_path))
    output = policy(**tokenizer("12 + 5", return_tensors="pt"))
    assert torch.isfinite(output.logits).all()


# --- Weights ----------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(train.RECIPES))
def test_weights_in_the_repository(name):
    folder = WEIGHTS_DIR / name
    files = {path.name for path in folder.iterdir()}
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= 8 * 10**6
    assert [f for f in files if f.endswith(".safetensors")] == [
        "model.safetensors"
    ]
    assert not [f for f in files if f.endswith((".bin", ".pt", ".pkl"))]
    assert files >= {
        "README.md", "config.json", "tokenizer.json", "training.json",
        "chat_template.jinja",
    }  # fmt: skip
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card
    record = json.loads((folder / "training.json").read_text())
    assert record["steps_done"] == record["recipe"]["steps"]
    policy, tokenizer = models.load_policy(name)
    models.check_chat_template(tokenizer, name)
    count = sum(
        p.numel()
        for p in train.build_model(train.RECIPES[name], tokenizer).parameters()
    )
    assert record["parameters"] == count
    built = train.build_tokenizer(train.RECIPES[name])
    assert built.get_vocab() == tokenizer.get_vocab()
    assert policy.config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("before", "after", "met"),
    [
        # right and in the requested format of 40, before and after
        ((10, 10), (20, 30), ["yes", "yes"]),
        ((10, 10), (10, 30), ["yes", "yes"]),
        ((10, 10), (9, 30), ["yes", "no"]),
        ((10, 10), (11, 11), ["no", "no"]),
    ],
)
def test_the_target_of_the_first_run(before, after, met):
    def judged(right, in_form):
        answers = (
            Answer(str(at), "1", "", at < right, at < in_form, 1, False)
            for at in range(40)
        )
        return Evaluation(tuple(answers), 1.0)

    found = target.check_first_run(judged(*before), judged(*after))
    assert list(found["what"]) == ["form", "accuracy"]
    assert list(found["met"]) == met
    gains = [(after[1] - before[1]) / 40, (after[0] - before[0]) / 40]
    assert list(found["gain"]) == gains
