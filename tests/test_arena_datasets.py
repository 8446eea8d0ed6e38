"""Data sets of the arena: what is read, counted, refused and divided."""

import csv
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import datasets as hf_datasets
import pyarrow
import pyarrow.parquet
import pytest

from grpo_lab.arena import datasets
from grpo_lab.arena.datasets import Registered
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


def refusal(call, *arguments, **options) -> str:
    """The message of the error that a call ends in; one paragraph."""
    with pytest.raises(LabError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def refused(file: Path, mapping=PLAIN, category: str = "reasoning") -> str:
    return refusal(datasets.read, category, mapping, file=file)


# --- What is read -----------------------------------------------------------


@pytest.mark.parametrize("ending", WRITERS)
def test_every_form_gives_the_same_rows(tmp_path, ending):
    content = rows(5, "problem", "result")
    file = WRITERS[ending](tmp_path / f"mine{ending}", content)
    found, known = datasets.read("reasoning", MINE, file=file)
    assert found == [
        {"question": row["problem"], "answer": row["result"]}
        for row in content
    ]
    plain = write_jsonl(tmp_path / "plain.jsonl", rows(5))
    _, other = datasets.read("reasoning", PLAIN, file=plain)
    assert known.fingerprint == other.fingerprint
    assert known.source == f"mine{ending}"
    assert (known.rows, known.nulls, known.unreadable, known.repeated) == (
        (5, 0, 0, 0)
    )


@pytest.mark.parametrize("category", datasets.CATEGORIES)
def test_every_category_takes_its_own_texts(tmp_path, category):
    keys = datasets.CATEGORIES[category]
    content = [{f"my {key}": f"{n}" for key in keys} for n in range(3)]
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    mapping = {key: f"my {key}" for key in keys}
    found, known = datasets.read(category, mapping, file=file)
    assert found == [dict.fromkeys(keys, f"{n}") for n in range(3)]
    assert (known.category, known.rows) == (category, 3)


def test_the_mapping_may_be_json_and_in_any_order(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    text = '{"answer": "answer", "question": "question"}'
    found, known = datasets.read("reasoning", text, file=str(file))
    assert found == datasets.read("reasoning", PLAIN, file=file)[0]
    assert known.column_mapping == PLAIN


def test_the_columns_may_be_crossed(tmp_path):
    crossed = {"question": "answer", "answer": "question"}
    content = [{"question": "18", "answer": "What is 9 + 9?"}]
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    found, _ = datasets.read("reasoning", crossed, file=file)
    assert found == [{"question": "What is 9 + 9?", "answer": "18"}]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72, "72"),
        (72.0, "72"),
        (-0.5, "-0.5"),
        (1e20, "1" + 20 * "0"),
        (Decimal("72.00"), "72"),
        (Decimal("0.50"), "0.5"),
        ("72.0", "72.0"),
        (" 72 ", " 72 "),
    ],
)
def test_numbers_become_text(tmp_path, value, text):
    content = [{"question": "How many?", "answer": value}]
    file = write_parquet(tmp_path / "rows.parquet", content)
    found, _ = datasets.read("reasoning", PLAIN, file=file)
    assert found == [{"question": "How many?", "answer": text}]


def test_a_short_float_is_not_widened(tmp_path):
    table = pyarrow.table(
        {
            "question": ["a?", "b?", "c?"],
            "answer": pyarrow.array([0.1, 72, None], pyarrow.float32()),
        }
    )
    file = write_parquet(tmp_path / "rows.parquet", table)
    found, known = datasets.read("reasoning", PLAIN, file=file)
    assert [row["answer"] for row in found] == ["0.1", "72"]
    assert known.nulls == 1


def test_marks_and_blank_lines_are_no_rows(tmp_path):
    content = [{"question": f"{n}?", "answer": n} for n in range(3)]
    for ending in (".csv", ".jsonl"):
        file = WRITERS[ending](tmp_path / f"rows{ending}", content)
        file.write_text("\ufeff" + file.read_text() + "\n\n", "utf-8")
        assert datasets.read("reasoning", PLAIN, file=file)[1].rows == 3


def test_only_mapped_columns_of_parquet_are_read(tmp_path, monkeypatch):
    asked = []
    original = pyarrow.parquet.ParquetFile.iter_batches

    def iter_batches(self, *arguments, **options):
        asked.append(options["columns"])
        return original(self, *arguments, **options)

    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "iter_batches", iter_batches
    )
    file = write_parquet(tmp_path / "rows.parquet", rows(2500))
    found, _ = datasets.read("reasoning", PLAIN, file=file)
    assert len(found) == 2500
    assert asked == [["question", "answer"]]


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "rows.jsonl", rows(3))
    _, known = datasets.read("reasoning", PLAIN, file="~/rows.jsonl")
    assert known.rows == 3


def test_a_description_is_kept(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", rows(1))
    _, known = datasets.read(
        "reasoning", PLAIN, file=file, description="Plums."
    )
    assert known.description == "Plums."


# --- What is counted --------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", "  \n", float("nan")])
@pytest.mark.parametrize("column", ["question", "answer"])
def test_nothing_in_a_mapped_column_is_counted(tmp_path, column, value):
    content = rows(5)
    content[1][column] = value
    del content[3][column]
    content[4]["id"] = None
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    found, known = datasets.read("reasoning", PLAIN, file=file)
    assert [row["question"][10] for row in found] == ["0", "2", "4"]
    assert (known.rows, known.nulls, known.unreadable) == (3, 2, 0)


@pytest.mark.parametrize(
    "value", ["none at all", True, ["72"], {"n": 72}, float("inf")]
)
def test_a_gold_nobody_can_read_is_counted(tmp_path, value):
    content = rows(3)
    content[1]["answer"] = value
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    found, known = datasets.read("reasoning", PLAIN, file=file)
    assert [row["question"][10] for row in found] == ["0", "2"]
    assert (known.nulls, known.unreadable, known.repeated) == (0, 1, 0)


def test_half_a_character_is_counted(tmp_path):
    content = rows(3)
    content[1]["question"] += "\ud83d"
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    assert datasets.read("reasoning", PLAIN, file=file)[1].unreadable == 1


def test_other_categories_need_no_number(tmp_path):
    mapping = {"prompt": "question", "target": "answer"}
    content = [{"question": "Why?", "answer": "none at all"}]
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    assert datasets.read("sft", mapping, file=file)[1].rows == 1


def test_a_repeated_question_counts_once(tmp_path):
    content = rows(4)
    again = {**content[0], "question": content[0]["question"].upper() + " "}
    file = write_jsonl(
        tmp_path / "rows.jsonl", [*content, {**again, "answer": "5"}]
    )
    found, known = datasets.read("reasoning", PLAIN, file=file)
    assert (known.rows, known.repeated) == (4, 1)
    assert found[0]["answer"].endswith("#### 0")


def test_a_prompt_may_have_several_pairs(tmp_path):
    mapping = {key: key for key in datasets.CATEGORIES["preference"]}
    pair = {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}
    content = [pair, {**pair, "rejected": "Go"}, pair]
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    _, known = datasets.read("preference", mapping, file=file)
    assert (known.rows, known.repeated) == (2, 1)


@pytest.mark.parametrize("key", ["question", "answer"])
def test_the_fingerprint_sees_every_text(tmp_path, key):
    content = rows(3)
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    before = datasets.read("reasoning", PLAIN, file=file)[1].fingerprint
    content[1]["id"] = 99
    write_jsonl(file, content)
    same = datasets.read("reasoning", PLAIN, file=file)[1].fingerprint
    content[1][key] = "So " + content[1][key]
    write_jsonl(file, content)
    after = datasets.read("reasoning", PLAIN, file=file)[1].fingerprint
    assert before == same != after


def test_the_fingerprint_is_the_same_in_another_process(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    code = (
        "from grpo_lab.arena import datasets;"
        f"print(datasets.read('reasoning', {PLAIN!r}, file={str(file)!r})"
        "[1].fingerprint)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    _, known = datasets.read("reasoning", PLAIN, file=file)
    assert printed == known.fingerprint
    assert len(printed) == 64


def test_what_is_known_survives_json(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    _, known = datasets.read("reasoning", PLAIN, file=file)
    saved = json.loads(json.dumps(known.to_dict()))
    assert Registered.from_dict({**saved, "name": "plums"}) == known


# --- What is refused: the arguments -----------------------------------------


def test_an_unknown_category_names_the_nearest(tmp_path):
    message = refused(tmp_path / "rows.csv", category="Resoning")
    assert "category = 'reasoning'" in message
    assert "preference" in message


def test_an_unknown_key_names_the_nearest(tmp_path):
    message = refused(tmp_path / "rows.csv", {"qestion": "a", "answer": "b"})
    assert "'qestion'" in message
    assert "'question' is the nearest" in message


def test_a_missing_key_is_named(tmp_path):
    message = refused(tmp_path / "rows.csv", {"question": "a"})
    assert "lacks answer" in message


@pytest.mark.parametrize(
    "given", ["{question: a}", '["question"]', "7", 7, None, "[" * 100_000]
)
def test_a_mapping_of_another_form(tmp_path, given):
    message = refused(tmp_path / "rows.csv", given)
    assert message.startswith("column_mapping is ")
    assert '{"question": "your column of the question"' in message
    assert len(message) < 500


@pytest.mark.parametrize("column", [None, "", 3, ["a"]])
def test_a_column_that_is_no_name(tmp_path, column):
    message = refused(
        tmp_path / "rows.csv", {"question": "a", "answer": column}
    )
    assert "'answer'" in message
    assert repr(column) in message


def test_one_column_for_two_texts(tmp_path):
    message = refused(tmp_path / "rows.csv", {"question": "a", "answer": "a"})
    assert "more than one text from the column 'a'" in message


def test_a_file_or_the_hub_but_not_both():
    for options, start in (
        ({}, "Neither file nor"),
        ({"file": "a.csv", "hf_dataset_name": "a/b"}, "Both file and"),
    ):
        message = refusal(datasets.read, "reasoning", PLAIN, **options)
        assert message.startswith(start)


@pytest.mark.parametrize("name", ["hf_config", "hf_split"])
def test_a_file_has_no_parts_of_the_hub(name):
    options = {"file": "a.csv", name: "main"}
    message = refusal(datasets.read, "reasoning", PLAIN, **options)
    assert message.startswith(f"{name} is given for the file a.csv")


# --- What is refused: the file ----------------------------------------------


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl"])
def test_a_column_that_is_not_there(tmp_path, ending):
    file = WRITERS[ending](tmp_path / f"rows{ending}", rows(3))
    message = refused(file, {"question": "QESTION", "answer": "answer"})
    assert "'QESTION'" in message
    assert "id, question, answer" in message
    assert "nearest is 'question'" in message
    assert str(file) in message
    message = refused(file, {"question": "question", "answer": "zzz"})
    assert "Type one of them" in message


def test_many_columns_are_not_all_shown(tmp_path):
    content = [{f"c{n}": "1" for n in range(50)}]
    file = write_csv(tmp_path / "rows.csv", content)
    assert "c19 and 30 more" in refused(file)


def test_two_columns_with_one_name(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("question,answer,answer\nWhy?,1,2\n")
    assert "more than one column with the name 'answer'" in refused(file)
    table = pyarrow.table(
        [["Why?"], ["1"], ["2"]], names=["question", "answer", "answer"]
    )
    file = write_parquet(tmp_path / "rows.parquet", table)
    assert "more than one column with the name 'answer'" in refused(file)


def test_a_missing_file_names_the_nearest(tmp_path):
    write_csv(tmp_path / "questions.csv", rows(1))
    message = refused(tmp_path / "question.csv")
    assert message.startswith(f"There is no file {tmp_path}/question.csv")
    assert "'questions.csv'" in message


@pytest.mark.parametrize("name", ["nowhere/x.csv", "~nobody/x.csv", "x" * 999])
def test_a_path_that_leads_nowhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert refused(Path(name)).startswith("There is no file ")


def test_a_folder(tmp_path):
    assert "is a folder" in refused(tmp_path)
    (tmp_path / "rows.csv").mkdir()
    assert "is a folder" in refused(tmp_path / "rows.csv")


def test_a_device():
    assert "no ordinary file" in refused(Path("/dev/null"))


@pytest.mark.parametrize("name", ["rows.xlsx", "rows"])
def test_an_unknown_ending(tmp_path, name):
    (tmp_path / name).write_text("question,answer\n")
    message = refused(tmp_path / name)
    assert repr(Path(name).suffix) in message
    assert ".csv, .parquet, .jsonl, .json" in message


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl", ".json"])
def test_an_empty_file(tmp_path, ending):
    file = tmp_path / f"rows{ending}"
    file.touch()
    assert "is empty, 0 bytes" in refused(file)


@pytest.mark.parametrize("ending", [".csv", ".parquet", ".jsonl"])
def test_a_file_without_rows(tmp_path, ending):
    file = tmp_path / f"rows{ending}"
    if ending == ".parquet":
        write_parquet(file, pyarrow.table({"question": [], "answer": []}))
    else:
        file.write_text("question,answer\n" if ending == ".csv" else "\n")
    message = refused(file)
    assert "has no rows" in message
    assert "question, answer" in message


@pytest.mark.parametrize("row", ["Why?", "Why?,because,5"])
def test_a_ragged_csv_names_the_line(tmp_path, row):
    file = tmp_path / "rows.csv"
    file.write_text(f'question,answer\n"a\nb?",1\n{row}\n')
    message = refused(file)
    assert "line 4" in message
    assert f"{row.count(',') + 1} values" in message


def test_a_quotation_mark_that_is_never_closed(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('question,answer\nWhy?,1\n"How?,2\n')
    assert "no well-formed CSV up to line 3" in refused(file)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_csv_without_commas(tmp_path, mark):
    file = tmp_path / "rows.csv"
    file.write_text(f"question{mark}answer\nWhy?{mark}1\n")
    assert "not separated by commas" in refused(file)


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_text_that_is_not_utf8(tmp_path, ending, encoding):
    file = tmp_path / f"rows{ending}"
    text = 'question,answer\n"Où?",1\n'
    if ending == ".jsonl":
        text = '{"question": "Où?", "answer": 1}\n'
    file.write_text(text, encoding=encoding)
    assert "UTF-8" in refused(file)


def test_broken_json_names_the_line(tmp_path):
    file = write_jsonl(tmp_path / "rows.json", rows(3))
    file.write_text(file.read_text()[:-3])
    assert refused(file).startswith(f"Line 3 of {file} is no valid JSON")
    file.write_text(json.dumps(rows(3)))
    assert "one JSON object" in refused(file)
    file.write_text("[" * 100_000)
    assert "no valid JSON" in refused(file)


@pytest.mark.parametrize("kept", [20, -400])
def test_a_broken_parquet_file(tmp_path, kept):
    file = write_parquet(tmp_path / "rows.parquet", rows(100))
    file.write_bytes(file.read_bytes()[:kept])
    assert "can't be read as parquet" in refused(file)


def test_parquet_that_is_broken_in_the_middle(tmp_path):
    file = write_parquet(tmp_path / "rows.parquet", rows(100))
    column = pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(1)
    content = bytearray(file.read_bytes())
    start = column.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    file.write_bytes(content)
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
    assert "2 have what can't be read" in message
    assert "'Who?'" in message
    assert "'Why?'" in message
    assert "'When?'" not in message
    assert "#### 72" in message


# --- What is kept -----------------------------------------------------------


def test_rows_are_kept_as_they_are(tmp_path):
    content = [{"question": "Où\u2028? \r\n\x85", "answer": "1"}]
    datasets.write(content, tmp_path / "new" / "folder")
    assert datasets.load_rows(tmp_path / "new" / "folder") == content
    kept = list((tmp_path / "new" / "folder").iterdir())
    assert [file.name for file in kept] == ["train.jsonl"]


def test_rows_are_kept_whole_or_not_at_all(tmp_path, monkeypatch):
    datasets.write([{"question": "a?", "answer": "1"}], tmp_path)

    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    refusal(datasets.write, [{"question": "b?", "answer": "2"}], tmp_path)
    assert datasets.load_rows(tmp_path)[0]["question"] == "a?"
    assert len(list(tmp_path.iterdir())) == 1


def test_rows_that_are_gone(tmp_path):
    message = refusal(datasets.load_rows, tmp_path)
    assert str(tmp_path / "train.jsonl") in message


# --- What is divided --------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Registered]:
    """Twenty questions, registered and kept."""
    file = write_jsonl(tmp_path / "rows.jsonl", rows(20))
    found, known = datasets.read("reasoning", PLAIN, file=file)
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


def test_a_seed_decides_the_parts(kept):
    first, first_test = divide(kept)
    again, again_test = divide(kept)
    other, other_test = divide(kept, seed=2)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first_test["question"] == again_test["question"]
    assert first_test["question"] != other_test["question"]


def test_the_fingerprint_is_of_what_is_trained_and_ranked_on(kept):
    seen = {
        divide(kept, *arguments)[0].fingerprint
        for arguments in ((), (4, 4), (5, 2), (5, 3, 1, "Only the number."))
    }
    assert len(seen) == 4


def test_the_saved_form_will_do_and_no_test_rows(kept):
    folder, known = kept
    divided, test = divide((folder, known.to_dict()), 19, 0)
    assert (len(divided.train), len(divided.eval), len(test)) == (1, 19, 0)


def test_too_few_rows_say_what_fits(kept):
    message = refusal(divide, kept, 15, 5)
    assert "20 usable rows" in message
    assert "need 21" in message
    assert "fitness_rows = 5 and test_rows = 5" in message
    assert "leaves 10" in message


def test_hardly_any_rows(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", rows(2))
    found, known = datasets.read("reasoning", PLAIN, file=file)
    datasets.write(found, tmp_path)
    assert "Add rows" in refusal(divide, (tmp_path, known), 1, 1)


@pytest.mark.parametrize("sizes", [(0, 5), (5, -1)])
def test_sizes_that_measure_nothing(kept, sizes):
    assert "at least 1 question" in refusal(divide, kept, *sizes)


@pytest.mark.parametrize("category", ["preference", "sft"])
def test_grpo_takes_reasoning_only(tmp_path, category):
    keys = datasets.CATEGORIES[category]
    content = [{key: f"{key} {n}" for key in keys} for n in range(20)]
    file = write_jsonl(tmp_path / "rows.jsonl", content)
    found, known = datasets.read(category, {k: k for k in keys}, file=file)
    datasets.write(found, tmp_path / "kept")
    message = refusal(divide, (tmp_path / "kept", known))
    assert f"category {category!r}" in message
    assert "GRPO takes reasoning only" in message
    assert "category = 'reasoning'" in message


def test_rows_that_were_changed_since(kept):
    folder, known = kept
    changed = datasets.load_rows(folder)
    changed[0]["answer"] = "#### 5"
    datasets.write(changed, folder)
    assert "the file was changed since" in refusal(divide, (folder, known))


# --- The Hub ----------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch) -> list:
    """A data set where the Hub would be; the calls for it."""
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return hf_datasets.Dataset.from_list(rows(3))

    monkeypatch.setattr(datasets.datasets, "load_dataset", load_dataset)
    return calls


def read_hub(name="openai/gsm8k", mapping=PLAIN, **options):
    return datasets.read("reasoning", mapping, hf_dataset_name=name, **options)


def test_the_hub_is_asked_for_the_pinned_revision(hub, tmp_path):
    found, known = read_hub(hf_config="socratic", hf_split="test")
    revision = SOURCES["gsm8k"].revision
    assert hub == [
        (
            ("openai/gsm8k", "socratic"),
            {"split": "test", "revision": revision},
        )
    ]
    assert "openai/gsm8k" in known.source
    assert revision in known.source
    file = write_jsonl(tmp_path / "rows.jsonl", rows(3))
    assert found == datasets.read("reasoning", PLAIN, file=file)[0]


def test_a_pinned_source_knows_its_config(hub):
    read_hub()
    assert hub[0][0] == ("openai/gsm8k", "main")
    assert hub[0][1]["split"] == "train"


def test_another_data_set_is_not_pinned(hub):
    _, known = read_hub("someone/plums")
    assert hub == [
        (("someone/plums", None), {"split": "train", "revision": None})
    ]
    assert known.source == (
        "someone/plums at its newest revision, split train"
    )


def test_the_revision_that_was_loaded_is_told(monkeypatch):
    loaded = hf_datasets.Dataset.from_list(rows(3))
    commit = "0123456789" * 4
    loaded.info.download_checksums = {
        f"hf://datasets/someone/plums@{commit}/train.parquet": {}
    }
    monkeypatch.setattr(
        datasets.datasets, "load_dataset", lambda *_, **__: loaded
    )
    assert commit in read_hub("someone/plums")[1].source


def test_the_mapping_is_checked_against_the_hub_too(hub):
    message = refusal(read_hub, mapping=MINE)
    assert "id, question, answer" in message
    assert "'problem'" in message


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub"),
        hf_datasets.exceptions.DatasetNotFoundError("doesn't exist"),
        ValueError("Unknown split 'tran'.\nOne of: train, test"),
        RuntimeError("Dataset scripts are no longer supported"),
    ],
)
def test_without_the_hub_the_way_out_is_told(monkeypatch, error):
    def load_dataset(*arguments, **options):
        raise error

    monkeypatch.setattr(datasets.datasets, "load_dataset", load_dataset)
    message = refusal(read_hub)
    assert str(error).split("\n")[0] in message
    assert "hf_split" in message
    assert "file = " in message


def test_a_folder_here_is_not_taken_for_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert "is a path here" in refusal(read_hub)
    assert not hub


@pytest.mark.parametrize("name", ["csv", "a/b/c", "/b", "hf://a/b"])
def test_a_name_without_an_owner_is_not_looked_for_here(hub, name):
    message = refusal(read_hub, name)
    assert repr(name) in message
    assert "'openai/gsm8k'" in message
    assert not hub


def test_a_known_name_gets_its_owner(hub):
    message = refusal(read_hub, "numina_math_tir")
    assert "'AI-MO/NuminaMath-TIR'" in message


def test_the_hub_can_be_searched(monkeypatch):
    asked = []

    class Found:
        id, downloads, likes = "someone/plums", 7, 2
        author = "someone"

    def list_datasets(**options):
        asked.append(options)
        yield Found

    monkeypatch.setattr(
        datasets.huggingface_hub, "list_datasets", list_datasets
    )
    found = datasets.list_hub("plums")
    assert found == [{"id": "someone/plums", "downloads": 7, "likes": 2}]
    assert asked == [{"search": "plums", "limit": 20}]


def test_a_search_without_a_network(monkeypatch):
    def list_datasets(**options):
        raise ConnectionError("offline mode is enabled")
        yield

    monkeypatch.setattr(
        datasets.huggingface_hub, "list_datasets", list_datasets
    )
    message = refusal(datasets.list_hub, "plums")
    assert "offline mode is enabled" in message
    assert "file = " in message
