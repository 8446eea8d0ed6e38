"""Files that a crash never leaves half-written."""

import os
import subprocess
import sys

import pytest

from grpo_lab.errors import LabError, first_line, nearest
from grpo_lab.files import (
    hold,
    last_line,
    own_directory,
    read_json,
    write_json,
    write_whole,
)


def test_json_there_and_back(tmp_path):
    path = tmp_path / "new" / "folder" / "value.json"
    value = {"text": "Größe ≤ 1 \u2028", "list": [1, 2.5, None, True]}
    write_json(path, value)
    assert read_json(path) == value
    assert [file.name for file in path.parent.iterdir()] == ["value.json"]
    assert read_json(tmp_path / "none.json") is None


def test_files_are_utf8_on_any_machine(tmp_path):
    """A Windows or POSIX locale must not decide how answers are written."""
    program = (
        "from grpo_lab.files import read_json, write_json\n"
        f"path = {str(tmp_path / 'value.json')!r}\n"
        "write_json(path, '\\xe9 \\u2264 1')\n"
        "assert read_json(path) == '\\xe9 \\u2264 1'"
    )
    environment = {**os.environ, "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program],
        env=environment,
        check=True,
    )
    assert read_json(tmp_path / "value.json") == "é ≤ 1"


def test_the_old_file_stays_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, "old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LabError, match="No space left.*Free some space"):
        write_json(path, "new")
    assert read_json(path) == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_is_no_folder_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="Could not write .*file/under"):
        write_whole(tmp_path / "file" / "under", "text")


@pytest.mark.parametrize("text", ["", '{"a": ', "\x00\x00"])
def test_a_broken_file_is_told_by_its_name(tmp_path, text):
    path = tmp_path / "value.json"
    path.write_text(text)
    with pytest.raises(LabError, match="value.json is broken.*delete it"):
        read_json(path)


def test_two_writers_of_one_file_do_not_take_each_others_part(
    tmp_path, monkeypatch
):
    path = tmp_path / "value.json"
    monkeypatch.setattr(os, "replace", lambda part, path: None)
    write_json(path, {"by": "one"})
    monkeypatch.setattr(os, "getpid", lambda: 1)
    write_json(path, {"by": "other"})
    assert len(list(tmp_path.iterdir())) == 2


def test_the_last_words_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("first\n  last words \n\n")
    assert last_line(log) == "last words"
    log.write_text("\n \n")
    assert last_line(log) == ""


def test_a_directory_is_held_by_one_at_a_time(tmp_path):
    folder = tmp_path / "new" / "deep"
    with hold(folder), pytest.raises(LabError, match="is at work in"):
        hold(folder).__enter__()
    with hold(folder):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match="can't be used: .*--output"):
        hold(tmp_path / "file").__enter__()


def test_the_first_line_of_an_error_and_the_nearest_name():
    assert first_line(ValueError("no such key:\nmore")) == "no such key."
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt."
    assert nearest("pocket-quen", ["POCKET-QWEN", "x"]) == "POCKET-QWEN"
    assert nearest("zzz", ["pocket-qwen"]) is None


def test_a_lesson_takes_a_new_an_empty_and_its_own_directory(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (tmp_path / "new" / "deep", empty):
        assert own_directory(folder, "04") == folder
        (folder / "reward.py").touch()
        assert own_directory(folder, "04") == folder
        with pytest.raises(LabError, match="not of this lesson"):
            own_directory(folder, "05")


def test_a_directory_of_the_users_own_is_left_alone(tmp_path):
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(LabError, match=r"reward\.py.*another OUTPUT_DIR"):
        own_directory(tmp_path, "04")
    assert [one.name for one in tmp_path.iterdir()] == ["reward.py"]
    with pytest.raises(LabError, match="can't be used for results"):
        own_directory(tmp_path / "reward.py", "04")
