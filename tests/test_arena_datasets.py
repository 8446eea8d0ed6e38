"""Data sets of the arena: what is read, counted, refused and divided."""

import csv
import json
import os
from decimal import Decimal
from pathlib import Path

import datasets as hf_datasets
import pyarrow
import pyarrow.parquet
import pytest

from grpo_lab.arena import datasets
from grpo_lab.data import SOURCES
from grpo_lab.errors import LabError

PLAIN = {"question": "question", "answer": "answer"}
MINE = {"question": "problem", "answer": "result"}


def rows(count: int, question: str = "question", answer: str = "answer"):
    """Different questions in GSM8K's form, and a column nobody asked for."""
    return [
        {
            "id": n,
            question: f'Ada says "{n} plums", buys {n} more,\nand eats none?',
            answer: f"{n}+{n}={2 * n}\n#### {2 * n}",
        }
        for n in range(count)
    ]


def write_jsonl(file: Path, content: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return file


def write_parquet(file: Path, content: list[dict] | pyarrow.Table) -> Path:
    if isinstance(content, list):
        content = pyarrow.Table.from_pylist(content)
    pyarrow.parquet.write_table(content, file)
    return file


def write_csv(file: Path, content: list[dict]) -> Path:
    with file.open("w", newline="") as lines:
        table = csv.DictWriter(lines, content[0])
        table.writeheader()
        table.writerows(content)
    return file


WRITERS = {
    ".jsonl": write_jsonl,
    ".json": write_jsonl,
    ".parquet": write_parquet,
    ".csv": write_csv,
    ".CSV": write_csv,
}


def read(file: Path, mapping=PLAIN, category: str = "reasoning", **options):
    return datasets.read(category, mapping, file=file, **options)


def read_rows(tmp_path: Path, content: list[dict]):
    """What is read of rows in a file of JSON lines."""
    return read(write_jsonl(tmp_path / "rows.jsonl", content))


def counts(known: dict) -> tuple:
    """Rows that can be used, and those that were left out."""
    return tuple(
        known[one] for one in ("rows", "nulls", "unreadable", "repeated")
    )


def refusal(call, *arguments, **options) -> str:
    """The message of the error that a call ends in; one paragraph."""
    with pytest.raises(LabError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def refused(file: Path, *arguments) -> str:
    return refusal(read, file, *arguments)


# --- What is read -----------------------------------------------------------


@pytest.mark.parametrize("ending", WRITERS)
def test_every_form_gives_the_same_rows(tmp_path, ending):
    content = rows(5, "problem", "result")
    file = WRITERS[ending](tmp_path / f"mine{ending}", content)
    found, known = read(file, MINE)
    assert found == [
        {"question": row["problem"], "answer": row["result"]}
        for row in content
    ]
    _, other = read_rows(tmp_path, rows(5))
    assert known["fingerprint"] == other["fingerprint"]
    assert known["source"] == f"mine{ending}"
    assert counts(known) == (5, 0, 0, 0)


@pytest.mark.parametrize(
    "gold", ["016", "1e3", "1.50", "2020", "12345678901234567890123", "-0"]
)
@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_a_gold_is_read_as_it_was_typed(tmp_path, gold, ending):
    """The library `datasets` makes 16, 1000.0 and 1.5 of these in a CSV."""
    content = [{"id": 1, "question": "How many?", "answer": gold}]
    file = WRITERS[ending](tmp_path / f"rows{ending}", content)
    assert read(file)[0] == [{"question": "How many?", "answer": gold}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72, "72"),
        (72.0, "72"),
        (-0.5, "-0.5"),
        (1e20, "1" + 20 * "0"),
        (Decimal("72.00"), "72"),
        (Decimal("0.50"), "0.5"),
        (" 72 ", " 72 "),
    ],
)
def test_numbers_of_parquet_become_text(tmp_path, value, text):
    table = pyarrow.table({"question": ["a?", "b?"], "answer": [value, None]})
    found, known = read(write_parquet(tmp_path / "rows.parquet", table))
    assert found == [{"question": "a?", "answer": text}]
    assert known["nulls"] == 1


def test_marks_and_blank_lines_are_no_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    content = [{"question": f"{n}?", "answer": n} for n in range(3)]
    for ending in (".csv", ".jsonl"):
        file = WRITERS[ending](tmp_path / f"rows{ending}", content)
        file.write_text("\ufeff" + file.read_text() + "\n\n", "utf-8")
        assert read(f"~/{file.name}")[1]["rows"] == 3
    assert len(os.listdir(tmp_path)) == 2  # nothing was written


# --- What is counted --------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "  \n", float("nan")])
@pytest.mark.parametrize("column", ["question", "answer"])
def test_nothing_in_a_mapped_column_is_counted(tmp_path, column, value):
    content = rows(5)
    content[1][column] = value
    del content[3][column]
    content[4]["id"] = None
    found, known = read_rows(tmp_path, content)
    assert [row["question"][10] for row in found] == ["0", "2", "4"]
    assert counts(known) == (3, 2, 0, 0)


@pytest.mark.parametrize("value", [True, ["72"], {"n": 72}, float("inf")])
def test_what_is_no_text_counts_as_nothing(tmp_path, value):
    content = rows(3)
    content[1]["answer"] = value
    assert counts(read_rows(tmp_path, content)[1]) == (2, 1, 0, 0)


def test_unreadable_and_repeated_rows_are_counted(tmp_path):
    content = rows(5)
    content[1]["answer"] = "none at all"
    again = {"question": content[0]["question"].upper() + " ", "answer": "0.0"}
    found, known = read_rows(tmp_path, [*content, again])
    assert [row["question"][10] for row in found] == ["0", "2", "3", "4"]
    assert found[0]["answer"].endswith("#### 0")
    assert counts(known) == (4, 0, 1, 1) and known["conflicting"] == 0


def test_a_question_with_two_answers_is_left_out(tmp_path):
    content = rows(3)
    again = {"question": content[0]["question"].upper(), "answer": "5"}
    found, known = read_rows(tmp_path, [*content, again])
    assert [row["question"][10] for row in found] == ["1", "2"]
    assert counts(known) == (2, 0, 0, 0) and known["conflicting"] == 2


def test_the_mapping_may_be_json_and_the_columns_crossed(tmp_path):
    content = [{"target": "18", "prompt": "What is 9 + 9?"}]
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    text = '{"prompt": "target", "target": "prompt"}'
    found, known = read(str(file), text, "sft", description="Sums.")
    assert found == [{"target": "What is 9 + 9?", "prompt": "18"}]
    assert (known["category"], known["description"]) == ("sft", "Sums.")


def test_a_prompt_may_have_several_pairs(tmp_path):
    pair = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    content = [pair, {**pair, "rejected": "Go"}, pair]
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    _, known = read(file, None, "preference")
    assert (known["rows"], known["repeated"]) == (2, 1)


# --- What is refused: the arguments -----------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"question": "a"},
        {"question": "a", "answer": "b", "id": "c"},
        {"question": "a", "answer": "a"},
        {"question": "a", "answer": None},
        {"question": "a", "answer": ""},
        {"question": "a", "answer": ["b"]},
        "{question: a}",
        '["question"]',
        7,
    ],
    ids=lambda given: str(given)[:30],
)
def test_a_mapping_must_name_a_column_for_each_text(tmp_path, given):
    message = refused(tmp_path / "rows.csv", given)
    assert message.startswith(f"column_mapping is {given!r}"[:200])
    assert "a different column for each of question, answer" in message
    assert '{"question": "your column of the question"' in message
    assert len(message) < 600
    message = refused(tmp_path / "rows.csv", PLAIN, "Resoning")
    assert "category = 'reasoning'" in message
    for options in ({}, {"file": "a.csv", "hf_split": "train"}):
        message = refusal(datasets.read, "reasoning", PLAIN, **options)
        assert message.startswith("A data set comes from one place")


# --- What is refused: the file ----------------------------------------------


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl"])
def test_a_column_that_is_not_there(tmp_path, ending):
    file = WRITERS[ending](tmp_path / f"rows{ending}", rows(3))
    message = refused(file, {"question": "QESTION", "answer": "answer"})
    assert f"{file} has no column 'QESTION'" in message
    assert "['id', 'question', 'answer']" in message
    assert "nearest is 'question'" in message


def test_a_missing_file_names_the_nearest(tmp_path):
    write_csv(tmp_path / "questions.csv", rows(1))
    message = refused(tmp_path / "question.csv")
    assert message.startswith(f"There is no file {tmp_path}/question.csv")
    assert "'questions.csv'" in message
    for name in ("rows.xlsx", "rows", ""):
        message = refused(tmp_path / name)
        assert ".csv, .parquet, .jsonl, .json" in message


TEXT = 'question,answer\n"Où?",1\n'
BROKEN = {
    "empty csv": (".csv", b"", "Empty CSV file"),
    "empty parquet": (".parquet", b"", "can't be read as parquet"),
    "empty json": (".jsonl", b"", "has no rows"),
    "header only": (".csv", b"question,answer\n", "has no rows"),
    "too long": (".csv", b'question,answer\n"a\nb?",1\nW,h,y\n', "Row #3"),
    "tabs": (".csv", b"question\tanswer\nWhy?\t1\n", "no column"),
    "utf-16": (".csv", TEXT.encode("utf-16"), "text as UTF-8"),
    "latin-1": (".csv", TEXT.encode("latin-1"), "text as UTF-8"),
    "half a row": (".json", b'{"a": 1}\n\n{"a"\n', "Line 3 of "),
    "a list": (".json", b'[{"question": 1}]', "one JSON object"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_says_where(tmp_path, kind):
    ending, content, said = BROKEN[kind]
    file = tmp_path / f"rows{ending}"
    file.write_bytes(content)
    message = refused(file)
    assert said in message and str(file) in message


def test_a_broken_parquet_file(tmp_path):
    file = write_parquet(tmp_path / "rows.parquet", rows(100))
    file.write_bytes(file.read_bytes()[:-400])
    assert "can't be read as parquet" in refused(file)


def test_no_row_that_can_be_used(tmp_path):
    content = [
        {"question": "Who?", "answer": "Ada"},
        {"question": "Why?", "answer": None},
        {"question": "When?", "answer": "never " * 100},
    ]
    message = refused(write_jsonl(tmp_path / "rows.jsonl", content))
    assert "No row of rows.jsonl can be used" in message
    assert "1 have nothing" in message
    assert "2 have an answer that can't be read" in message
    assert "'Who?'" in message
    assert "'Why?'" in message
    assert "'When?'" not in message
    assert "#### 72" in message


# --- What is kept -----------------------------------------------------------


def test_rows_are_kept_whole_or_not_at_all(tmp_path, monkeypatch):
    content = [{"question": "Où\u2028? \r\n\x85", "answer": "1"}]
    datasets.write(content, tmp_path)

    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    refusal(datasets.write, [{"question": "b?", "answer": "2"}], tmp_path)
    assert datasets.load_rows(tmp_path) == content
    assert len(list(tmp_path.iterdir())) == 1


# --- What is divided --------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, dict]:
    """Twenty questions, registered and kept."""
    found, known = read_rows(tmp_path, rows(20))
    datasets.write(found, tmp_path / "kept")
    return tmp_path / "kept", known


def divide(kept, fitness=5, test=3, seed=1, prompt="Solve it."):
    return datasets.splits(*kept, fitness, test, seed, prompt)


def test_three_parts_share_no_question(kept):
    divided, test = divide(kept)
    parts = [
        part["question"][:] for part in (divided.train, divided.eval, test)
    ]
    assert [len(part) for part in parts] == [12, 5, 3]
    assert len({question for part in parts for question in part}) == 20
    for row in [divided.train[0], divided.eval[0], test[0]]:
        system, user = row["prompt"]
        assert system["content"] == "Solve it."
        assert user["content"] == row["question"]
    assert divided.source.startswith("rows.jsonl")
    again, again_test = divide(kept)
    other, other_test = divide(kept, seed=2)
    assert divided.fingerprint == again.fingerprint != other.fingerprint
    assert test["question"] == again_test["question"] != other_test["question"]
    assert len(divide(kept, 19, 0)[1]) == 0
    changed = datasets.load_rows(kept[0])
    changed[0]["answer"] = "#### 5"
    datasets.write(changed, kept[0])
    assert "the file was changed since" in refusal(divide, kept)


@pytest.mark.parametrize("sizes", [(15, 5), (0, 5), (5, -1)])
def test_sizes_that_do_not_fit(kept, sizes):
    message = refusal(divide, kept, *sizes)
    assert message.startswith(f"fitness_rows is {sizes[0]}")
    assert "20 usable rows" in message
    assert "fitness_rows = 5 and test_rows = 5" in message


def test_grpo_takes_reasoning_only(kept):
    folder, known = kept
    message = refusal(divide, (folder, known | {"category": "sft"}))
    assert "category 'sft'" in message and "category = 'reasoning'" in message


# --- The Hub ----------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch) -> list:
    """A data set where the Hub would be; the calls for it."""
    calls = []

    def load_dataset(name, config, split, revision):
        calls.append((name, config, split, revision))
        if split == "tran":
            raise ValueError("Unknown split 'tran'.\nOne of: train, test")
        return hf_datasets.Dataset.from_list(rows(3))

    monkeypatch.setattr(hf_datasets, "load_dataset", load_dataset)
    return calls


def read_hub(name="openai/gsm8k", mapping=PLAIN, **options):
    return datasets.read("reasoning", mapping, hf_dataset_name=name, **options)


def test_the_hub_is_asked_for_the_pinned_revision(hub, tmp_path):
    found, known = read_hub(hf_split="test")
    read_hub(hf_config="socratic")
    _, other = read_hub("someone/plums")
    revision = SOURCES["gsm8k"].revision
    assert hub == [
        ("openai/gsm8k", "main", "test", revision),
        ("openai/gsm8k", "socratic", "train", revision),
        ("someone/plums", None, "train", None),
    ]
    assert "openai/gsm8k" in known["source"] and revision in known["source"]
    assert other["source"] == (
        "someone/plums at its newest revision, split train"
    )
    assert found == read_rows(tmp_path, rows(3))[0]


def test_without_the_hub_the_way_out_is_told(hub, monkeypatch):
    message = refusal(read_hub, hf_split="tran")
    assert "Unknown split 'tran'." in message
    assert "hf_split" in message and "file = " in message

    def list_datasets(**options):
        raise ConnectionError("offline mode is enabled")

    monkeypatch.setattr(
        datasets.huggingface_hub, "list_datasets", list_datasets
    )
    message = refusal(datasets.list_hub, "plums")
    assert "offline mode is enabled" in message and "file = " in message


@pytest.mark.parametrize("name", ["csv", "a/b/c", "/b", "hf://a/b", "my/rows"])
def test_a_name_is_not_looked_for_here(hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my" / "rows").mkdir(parents=True)
    message = refusal(read_hub, name)
    assert repr(name) in message
    assert "'openai/gsm8k'" in message
    assert not hub
