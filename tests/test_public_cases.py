"""Inputs of public bug reports, each with the value that is right.

`data/public_cases.jsonl` has what a reward has to score; the rest, about
reading, data, settings and manifests, is below. Ids are those of the reports'
list, "n" marks a neighbour of a report that was tried beside it.
"""

import json
import unicodedata
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import rewards
from grpo_lab.arena import datasets, manifest
from grpo_lab.arena.lint import lint
from grpo_lab.data import load_splits
from grpo_lab.errors import LabError
from grpo_lab.grid import expand
from grpo_lab.grid.control import read_changes
from grpo_lab.parameters import resolve
from grpo_lab.settings import ALL_LINEAR, RunSettings
from rewards import check_reward, extract_answer, is_correct

DATA = Path(__file__).parent / "data" / "public_cases.jsonl"
CASES = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_score(case):
    reward = getattr(rewards, case["reward"])
    found = reward([case["completion"]], answer=[case["gold"]])
    assert found == [case["score"]], case["why"]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("500K", "500000"), ("500K", "500"), ("5M", "5000000"), ("5M", "5"),
     ("3000", "3k"), ("500000", "500K"), ("2B", "2000000000")],
)  # fmt: skip
def test_a_letter_that_decides_nothing_is_counted_and_gives_none(answer, gold):
    shares = {}
    for reward in (rewards.correctness_reward, rewards.accuracy_reward):
        found = reward(
            [f"<answer>{answer}</answer>"],
            answer=[gold],
            log_metric=shares.__setitem__,
        )
        assert found == [None]
        assert shares[f"{reward.__name__}/failed"] == 1
    assert rewards.accuracy_reward(["<answer>7K</answer>"], ["500"]) == [0]
    assert not is_correct(f"<answer>{answer}</answer>", gold)


CHANNELS = (
    "<|channel|>analysis<|message|>Maybe \\boxed{17}?<|end|><|start|>assistant"
    "<|channel|>final<|message|>The answer is \\boxed{18}.<|return|>"
)
RUNAWAY = (
    "5+3=8.\n#### 8\n\nQuestion: Tom has 2 cats and gets 4.\n"
    "Answer: 2+4=6\n#### 6"
)


@pytest.mark.parametrize(
    ("text", "policy", "answer", "gold", "right"),
    [
        (r"\boxed{\text{The answer is 72}}", "stated", "72", "72", True),
        (RUNAWAY, "stated", "8", "8", True),
        (CHANNELS, "stated", "18", "18", True),
        (CHANNELS.partition("<|end|>")[0], "stated", None, "17", False),
        ("<thinking><answer>18</answer> but", "tagged", None, "18", False),
        ("[THINK]<answer>18</answer> but", "tagged", None, "18", False),
        ("**Answer:**\n\n- 18", "stated", "18", "18", True),
        ("**Answer:**\n\n- 18", "stated", "18", "-18", False),
        ("**Answer:**\n1. 18", "stated", "18", "1", False),
        ("The answer is eighteen (18).", "stated", None, "18", True),
        ("所以答案是 18。", "flexible", None, "18", True),
        ("La respuesta es 18.", "flexible", None, "18", True),
    ],
)
def test_an_answer_is_read(text, policy, answer, gold, right):
    if answer is not None:
        assert extract_answer(text, policy) == answer
    assert is_correct(text, gold, policy) is right


# --- check_reward -----------------------------------------------------------

ROWS = [
    {"question": f"{n}+{n}?", "answer": f"#### {2 * n}"} for n in range(1, 21)
]


def last_number(question, answer, completion):
    import re

    found = re.findall(r"-?\d+", completion)
    return float(bool(found) and found[-1] == answer.split("####")[-1].strip())


def plain_float(question, answer, completion):
    import re

    block = re.search(r"<answer>\s*(.*?)\s*</answer>", completion, re.DOTALL)
    try:
        return float(float(block[1]) == float(answer.split("####")[-1]))
    except (TypeError, ValueError):
        return 0.0


def one_line(question, answer, completion):
    import re

    block = re.search(r"<answer>(.*?)</answer>", completion)
    right = answer.split("####")[-1].strip()
    return float(bool(block) and block[1].strip() == right)


COMMA = [{"question": "500+580?", "answer": "#### 1,080"}] * 5


@pytest.mark.parametrize(
    ("reward", "rows", "failure"),
    [
        (last_number, ROWS, "not for truncated"),
        (plain_float, [*ROWS, *COMMA], "rewards right answers"),
        (one_line, ROWS, "same on its own line"),
    ],
)
def test_a_reward_that_misleads_is_found(reward, rows, failure):
    assert check_reward(reward, rows)[failure].passed is False


# --- Data -------------------------------------------------------------------


def loaded(folder: Path, **options):
    splits = load_splits(
        "gsm8k", path=str(folder), train_rows=2, eval_rows=1, **options
    )
    return sorted([*splits.train["answer"], *splits.eval["answer"]])


def kept(folder: Path, name: str, *rows: tuple[str, object]) -> None:
    lines = [json.dumps({"question": q, "answer": a}) for q, a in rows]
    (folder / name).write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("answers", "texts"),
    [
        (
            pyarrow.array([Decimal("18.50")] * 3, pyarrow.decimal128(8, 2)),
            ["18.5"] * 3,
        ),
        (pyarrow.array([0.1, 2.7, 5], pyarrow.float32()), ["0.1", "2.7", "5"]),
        (pyarrow.array(np.float16([0.1, 2.7, 5])), ["0.1", "2.7", "5"]),
    ],
    ids=["decimal", "32 bit", "16 bit"],
)
def test_a_number_of_parquet_is_what_was_written(tmp_path, answers, texts):
    table = pyarrow.table({"question": list("abc"), "answer": answers})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    assert loaded(tmp_path) == texts
    rows, _ = datasets.read("reasoning", None, file=tmp_path / "train.parquet")
    assert [row["answer"] for row in rows] == texts


def test_what_a_calculation_has_rounded_can_be_answered(tmp_path):
    kept(tmp_path, "train.jsonl", ("a", 0.1 + 0.6), ("b", 2), ("c", 3))
    noisy, *_ = loaded(tmp_path)
    assert rewards.correctness_reward(
        ["<answer>0.7</answer>"], answer=[noisy]
    ) == [2.0]


def test_a_missing_part_of_a_data_set_is_refused(tmp_path):
    table = pyarrow.table({"question": list("abc"), "answer": list("123")})
    for part in (0, 1):
        with pytest.raises(LabError, match="one of 3 parts"):
            pyarrow.parquet.write_table(
                table, tmp_path / f"train-0000{part}-of-00003.parquet"
            )
            loaded(tmp_path)
        with pytest.raises(LabError, match="one of 3 parts"):
            datasets.read(
                "reasoning",
                None,
                file=tmp_path / "train-00000-of-00003.parquet",
            )


def test_a_question_with_two_answers_is_refused(tmp_path):
    rows = [("1+1?", "2"), ("1 + 1?", "2.0"), ("b", "4"), ("c", "5")]
    kept(tmp_path, "train.jsonl", *rows)
    assert loaded(tmp_path) == ["2", "4", "5"]
    kept(tmp_path, "train.jsonl", *rows, ("1+1?", "3"))
    with pytest.raises(LabError, match="two answers that differ: '1"):
        loaded(tmp_path)


CAFES = "How many cafés has Mia's street?"


@pytest.mark.parametrize(
    "again",
    [
        unicodedata.normalize("NFD", CAFES),
        CAFES.replace("'", "’"),
        CAFES.replace("many", "ma\u200bny"),
        CAFES.replace(" ", "\u00a0"),
        CAFES.replace(" ", "  ").upper(),
    ],
)
def test_a_question_of_the_test_set_is_found_in_any_form(tmp_path, again):
    kept(tmp_path, "train.jsonl", (CAFES, "2"), ("b", "4"))
    kept(tmp_path, "test.jsonl", (again, "2"))
    with pytest.raises(LabError, match="in both the training and the"):
        loaded(tmp_path)


def test_half_of_a_character_names_its_row(tmp_path):
    kept(tmp_path, "train.jsonl", ("b", "2"), ("a \ud83d?", "1"), ("c", "3"))
    with pytest.raises(LabError, match="1 of 3 rows"):
        loaded(tmp_path)


# --- Parameters, settings and manifests -------------------------------------

BASE = RunSettings(model="pocket-qwen", learning_rate=1e-3)


def test_a_number_in_place_of_a_text_says_what_to_type():
    with pytest.raises(LabError, match="-r OUTPUT_DIR 2024"):
        resolve({"OUTPUT_DIR": "str"}, {"OUTPUT_DIR": 2024})


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": "5e-6"},
        {"max_grad_norm": -1},
        {"weight_decay": float("nan")},
        {"optimizer": "sgdd"},
        {"adam_beta2": 1.5},
        {"load_in_4bit": "False"},
        {"target_modules": []},
    ],
    ids=lambda changes: str(*changes),
)
def test_a_setting_that_can_not_be_is_refused(changes):
    [name] = changes
    word = "optimi" if name == "optimizer" else name.upper()
    with pytest.raises(LabError, match=word):
        expand(BASE, **{name: list(changes.values())})


def test_all_linear_means_every_linear_layer():
    found = RunSettings("pocket-qwen", 1e-3, target_modules="all-linear")
    assert found.target_modules == ALL_LINEAR
    assert read_changes(["target_modules=q_proj,v_proj"]) == {
        "target_modules": ["q_proj", "v_proj"]
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("gradient_checkpointing=True", True),
        ("gradient_checkpointing=true", True),
        ("learning_rate=.0005", 0.0005),
        ("learning_rate=5e-4", 0.0005),
        ("max_steps=1e3", 1000),
        ("optimizer=sgd", "sgd"),
    ],
)
def test_a_change_of_a_run_is_read_as_a_parameter_is(text, value):
    name = text.partition("=")[0]
    found = read_changes([text])
    assert found == {name: value}
    RunSettings(**BASE.to_dict() | found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weight_decay=NaN", "must be a number.*weight_decay=0.001"),
        ("gradient_checkpointing=maybe", "True or False"),
        ("max_steps=ten", "a whole number"),
        ("learning_rat=1", "Did you mean learning_rate"),
        ("learning_rate", "has no value"),
    ],
)
def test_a_change_that_says_nothing_names_what_to_type(text, said):
    with pytest.raises(LabError, match=said):
        read_changes([text])


def with_prompt(line: str) -> str:
    return manifest.EXAMPLE.replace(
        "  name: pocket ", f"  system_prompt: {line}\n  name: pocket "
    )


@pytest.mark.parametrize(
    ("line", "cut"),
    [
        ("End with #### and the number", True),
        ("Think.  # of the steps", True),
        ("'End with #### and the number'", False),
        ("|\n    End with #### and the number", False),
    ],
)
def test_a_prompt_that_ends_at_a_comment_is_told(line, cut):
    form = manifest.load(with_prompt(line))
    told = [one.text for one in lint(form) if "comment" in one.text]
    assert len(told) == cut
    prompt = form.environment.system_prompt.strip()
    assert prompt.endswith("number") is not cut


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        ("3072", "03072", 3072),
        ("3072", "3_072", 3072),
        ("3072", "50:00", None),
        ("3072", "0x1000", None),
        ("3072", "3,072", None),
    ],
)
def test_a_number_of_a_manifest_is_what_is_typed(before, after, value):
    text = manifest.EXAMPLE.replace(before, after)
    if value is None:
        with pytest.raises(LabError, match="training.max_steps"):
            manifest.load(text)
    else:
        assert manifest.load(text).training.max_steps == value
