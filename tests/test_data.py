"""Data: what is loaded, what is refused, and that both are repeatable."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from test_arena_datasets import write_csv, write_jsonl, write_parquet

from grpo_lab.data import SOURCES, load_splits
from grpo_lab.errors import LabError
from grpo_lab.pocket import problems
from grpo_lab.prompts import REASONING_PROMPT, THINK_PROMPT

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"


def rows(count: int, start: int = 0) -> list[dict]:
    """Different questions in GSM8K's form."""
    return [
        {
            "question": f"Ada has {n} plums and buys {n} more. How many?",
            "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}",
        }
        for n in range(start, start + count)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten training and five evaluation questions as JSONL."""
    write_jsonl(tmp_path / "train.jsonl", rows(10))
    write_jsonl(tmp_path / "test.jsonl", rows(5, start=100))
    return tmp_path


def load(folder: Path, train_rows: int = 10, eval_rows: int = 5, **options):
    return load_splits("gsm8k", str(folder), train_rows, eval_rows, **options)


def refusal(*arguments, **options) -> str:
    """The message of the error that `load_splits` ends in; one paragraph."""
    with pytest.raises(LabError) as caught:
        load_splits(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- What is loaded ---------------------------------------------------------


def test_a_row_has_prompt_question_and_answer(folder):
    splits = load(folder)
    assert len(splits.train) == 10
    assert len(splits.eval) == 5
    for split in (splits.train, splits.eval):
        assert split.column_names == ["prompt", "question", "answer"]
        for row in split:
            system, user = row["prompt"]
            assert system == {"role": "system", "content": REASONING_PROMPT}
            assert user == {"role": "user", "content": row["question"]}
            assert row["answer"].endswith(
                str(2 * int(row["question"].split()[2]))
            )
    assert str(folder) in splits.source


@pytest.mark.parametrize(
    "names",
    [
        ("train.parquet", "test.parquet"),
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        ("main/train-00000-of-00001.parquet", "main/test.parquet"),
        ("main/train.jsonl", "main/test.jsonl"),
        ("train.csv", "test.csv"),
    ],
)
def test_every_file_form_gives_the_same_splits(folder, tmp_path, names):
    other = tmp_path / "other"
    (other / "main").mkdir(parents=True)
    for name, content in zip(
        names, (rows(10), rows(5, start=100)), strict=True
    ):
        if name.endswith("jsonl"):
            write_jsonl(other / name, content)
        elif name.endswith("csv"):
            write_csv(other / name, content)
        else:
            write_parquet(other / name, content)
    assert load(other).fingerprint == load(folder).fingerprint


def test_latex_data_come_under_the_same_names(tmp_path):
    content = [
        {"problem": f"Half of {n}?", "solution": rf"So \boxed{{{n}/2}}."}
        for n in range(8)
    ]
    write_jsonl(tmp_path / "train.jsonl", content)
    splits = load_splits("numina_math_tir", str(tmp_path), 4, 4)
    row = splits.train[0]
    assert row["question"].startswith("Half of")
    assert r"\boxed" in row["answer"]
    assert row["prompt"][0]["content"] == THINK_PROMPT


def test_golds_that_no_answer_can_be_compared_with_are_left_out(tmp_path):
    content = [
        {"problem": f"Half of {n}?", "solution": rf"\boxed{{{gold}}}"}
        for n, gold in enumerate(["1", "(2", r"\sqrt{3}", "4 4", "5 |", "x"])
    ]
    write_jsonl(tmp_path / "train.jsonl", content)
    held_out = {"problem": "Half of 8?", "solution": r"\boxed{y}"}
    write_jsonl(tmp_path / "test.jsonl", [held_out])
    splits = load_splits("numina_math_tir", str(tmp_path), 3, 1)
    golds = [*splits.train["answer"], *splits.eval["answer"]]
    kept = ["1", r"\sqrt{3}", "x", "y"]
    assert sorted(golds) == [rf"\boxed{{{gold}}}" for gold in kept]
    assert "3 rows left out whose gold no answer" in splits.source
    message = refusal("numina_math_tir", str(tmp_path), 5, 1)
    assert "there are 3 different questions" in message


def test_a_seed_decides_rows_and_order(folder):
    first, again = (load(folder, 6, 3, seed=1) for _ in range(2))
    other = load(folder, 6, 3, seed=2)
    assert first.train["question"] == again.train["question"]
    assert first.fingerprint == again.fingerprint
    assert first.train["question"] != other.train["question"]
    assert first.eval["question"] != other.eval["question"]
    in_file_order = [row["question"] for row in rows(6)]
    assert first.train["question"] != in_file_order


def test_a_train_file_alone_is_split_without_overlap(folder):
    (folder / "test.jsonl").unlink()
    write_jsonl(folder / "train.jsonl", rows(10) + rows(10))
    splits = load(folder, 6, 4)
    questions = splits.train["question"][:] + splits.eval["question"][:]
    assert len(set(questions)) == 10
    own = load(folder, 6, 4, system_prompt="Only the number.")
    assert own.train[0]["prompt"][0]["content"] == "Only the number."
    assert own.fingerprint != splits.fingerprint
    assert "held out" in splits.source
    message = refusal("gsm8k", str(folder), train_rows=7, eval_rows=4)
    assert "there are 6 different questions" in message


# --- Fingerprint ------------------------------------------------------------


def test_the_fingerprint_is_the_same_in_another_process(folder):
    code = (
        "from grpo_lab.data import load_splits;"
        f"print(load_splits('gsm8k', {str(folder)!r}, 10, 5).fingerprint)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert printed == load(folder).fingerprint
    assert len(printed) == 64


def test_the_fingerprint_sees_every_text(folder):
    seen = {load(folder).fingerprint}
    for split, count, start in (("train", 10, 0), ("test", 5, 100)):
        for column in ("question", "answer"):
            changed = rows(count, start)
            changed[3][column] = "So " + changed[3][column]
            write_jsonl(folder / f"{split}.jsonl", changed)
            seen.add(load(folder).fingerprint)
    assert len(seen) == 5


# --- The generator ----------------------------------------------------------


@pytest.mark.parametrize("source", ["pocket", "pocket_latex"])
def test_generated_problems_are_repeatable_and_apart(source):
    first, again = (load_splits(source, "", 200, 100) for _ in range(2))
    other = load_splits(source, "", 200, 100, seed=7)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != other.fingerprint
    for splits in (first, other):
        assert len(set(splits.train["question"])) == 200
        assert len(set(splits.eval["question"])) == 100
        assert not any(map(problems.is_held_out, splits.train["question"]))
        assert all(map(problems.is_held_out, splits.eval["question"]))
    assert "seed 42" in first.source


def test_more_than_the_generator_knows_is_refused():
    message = refusal("pocket_latex", eval_rows=1000)
    assert "different" in message
    assert "EVAL_ROWS" in message


# --- What is refused --------------------------------------------------------


def test_an_unknown_source_names_the_nearest():
    message = refusal("GSM-8K")
    assert "'gsm8k'" in message
    assert "numina_math_tir" in message


def test_a_folder_without_rows(tmp_path):
    (tmp_path / "questions.txt").write_text("What?")
    for path, said in (
        (tmp_path / "nowhere", "It holds nothing"),
        (tmp_path, "It holds questions.txt"),
    ):
        message = refusal("gsm8k", str(path))
        assert said in message and "train.jsonl" in message


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *itertools.product(
            ["question", "answer"], [None, "", "  ", ["Why?"], {"a": 1}]
        ),
        ("answer", "no number"),
    ],
)
def test_a_row_that_can_not_be_used_is_named(folder, column, value):
    content = rows(10)
    content[4][column] = value
    write_jsonl(folder / "train.jsonl", content)
    message = refusal("gsm8k", str(folder))
    assert message.startswith("1 of 10 rows in ")
    assert "row 5 ends in" in message and "#### 72" in message


def test_rows_that_can_not_be_used_are_counted(tmp_path):
    content = [{"problem": f"{n}?", "solution": f"#### {n}"} for n in range(5)]
    write_jsonl(tmp_path / "train.jsonl", content)
    message = refusal("numina_math_tir", str(tmp_path), 2, 2)
    assert message.startswith("5 of 5") and message.count("ends in") == 3
    assert r"\boxed" in message


def test_questions_in_both_splits_are_counted_and_shown(folder):
    leaked = [
        {**row, "question": f"  {row['question'].upper()} "} for row in rows(4)
    ]
    write_jsonl(folder / "test.jsonl", rows(3, start=100) + leaked)
    message = refusal("gsm8k", str(folder), train_rows=10, eval_rows=5)
    assert message.startswith("4 questions are in both")
    assert message.count("PLUMS") == 3


def test_several_parquet_parts_are_one_split(folder):
    (folder / "train.jsonl").unlink()
    for part in range(2):
        file = folder / f"train-{part:05d}-of-00002.parquet"
        write_parquet(file, rows(5, start=5 * part))
    questions = load(folder).train["question"]
    assert set(questions) == {row["question"] for row in rows(10)}


@pytest.mark.parametrize("name", ["train_rows", "eval_rows"])
def test_too_few_rows_say_how_many_there_are(folder, name):
    asked = {"train_rows": 10, "eval_rows": 5}
    there = asked[name]
    message = refusal("gsm8k", str(folder), **{**asked, name: there + 1})
    assert f"Type {name.upper()} = {there}" in message
    message = refusal("gsm8k", str(folder), **{**asked, name: 0})
    assert f"{name.upper()} is 0" in message


# --- The Hub ----------------------------------------------------------------


def on_the_hub(monkeypatch, train: list[dict], test: list[dict]) -> list:
    """Put a data set where the Hub would be; returns the calls for it."""
    calls = []

    def load_dataset(*arguments, split, **options):
        calls.append((*arguments, split, options))
        rows_of = {"train": train, "test": test}
        return datasets.Dataset.from_list(rows_of[split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_the_hub_is_asked_for_the_pinned_revision(monkeypatch, folder):
    calls = on_the_hub(monkeypatch, rows(10), rows(5, start=100))
    splits = load_splits("gsm8k", "", 10, 5)
    revision = SOURCES["gsm8k"].revision
    assert calls == [
        ("openai/gsm8k", "main", split, {"revision": revision})
        for split in ("train", "test")
    ]
    assert "openai/gsm8k" in splits.source
    assert revision in splits.source
    assert splits.fingerprint == load(folder).fingerprint


def test_what_cannot_be_used_of_a_published_set_is_left_out(monkeypatch):
    train = [
        {"problem": f"Half of {n}?", "solution": rf"\boxed{{{n}/2}}"}
        for n in range(6)
    ]
    no_box = {"problem": "Why?", "solution": "Because."}
    test = [{"problem": "Half of 9?", "solution": r"\boxed{9/2}"}, train[0]]
    on_the_hub(monkeypatch, [*train, no_box], test)
    splits = load_splits("numina_math_tir", "", 5, 2)
    assert set(splits.train["question"]) == {
        f"Half of {n}?" for n in range(1, 6)
    }
    assert len(splits.eval) == 2


def test_without_a_network_the_way_out_is_told(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = refusal("gsm8k")
    assert "DATA_PATH" in message
    assert "PROFILE = 'pocket'" in message
    assert "Couldn't reach 'openai/gsm8k' on the Hub" in message
