"""Reward files in a process of their own, and the check of any reward."""

import asyncio
import contextlib
import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import types
from pathlib import Path

import pytest

import rewards.batch
import rewards.contract
import rewards.contract.__main__
import rewards.contract.check
import rewards.contract.probes
import rewards.contract.reward_file
import rewards.contract.subjects
import rewards.contract.trial
import rewards.contract.verdicts
from rewards import (
    FIVE_PART,
    RewardError,
    correctness_reward,
    published,
    strict_format_reward,
    tag_count_reward,
    with_options,
)
from rewards.contract import Verdict, Verdicts, check_reward, load_reward
from rewards.contract.probes import FORMS, examples_of, probes
from rewards.health import FailureLimit

ROWS = [
    {"question": "How much is 9 + 9?", "answer": "9 + 9 = 18\n#### 18"},
    {"question": "How much is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"},
    {"question": "How much is 40 + 60?", "answer": "#### 100"},
    {"question": "How much is 6 - 8?", "answer": "#### -2"},
    {"question": "How much is 1 / 2?", "answer": "#### 0.5"},
]
TAGGED = "<reasoning>\n9 + 9\n</reasoning>\n<answer>\n{}\n</answer>\n"

# A reward without a fault; {first} and {pay} are places for one.
FILE = """
import math
{top}
def reward(question, answer, completion):
    {first}
    _, opened, rest = completion.rpartition("<answer>")
    given, closed, _ = rest.partition("</answer>")
    gold = answer.rpartition("####")[2].strip()
    right = bool(opened and closed) and given.strip() == gold
    return {pay}
"""


def write(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def file(folder, top="", first="pass", pay="float(right)", name="mine.py"):
    text = FILE.format(top=top, first=first, pay=pay)
    return write(folder, text, name)


@contextlib.contextmanager
def loaded(path, **options):
    reward = load_reward(path, **options)
    try:
        yield reward
    finally:
        reward.close()


def give(reward, *texts, **columns):
    count = len(texts)
    columns = {"question": ["?"] * count} | columns
    return reward(list(texts), answer=["#### 18"] * count, **columns)


def failed(verdicts):
    return {verdict.name for verdict in verdicts.failures}


# --- a reward file as a reward of TRL's ----------------------------------


def test_a_file_scores_a_batch_and_has_its_name(tmp_path):
    with loaded(file(tmp_path, name="right answer.py")) as reward:
        assert reward.__name__ == "right_answer"
        right, wrong = TAGGED.format(18), TAGGED.format(19)
        assert give(reward, right, wrong, "") == [1.0, 0.0, 0.0]
        messages = [[{"role": "assistant", "content": right}]]
        assert reward(messages, answer=["#### 18"]) == [1.0]


def test_what_the_function_is_given(tmp_path):
    path = write(
        tmp_path,
        """
        def reward(question, answer, completion):
            texts = [question, answer, completion]
            return texts == ["9 + 9?", "18", "It is 18"]
        """,
    )
    prompt = [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "9 + 9?"},
    ]
    with loaded(path) as reward:
        texts = ["It is 18"]
        assert reward(texts, question=["9 + 9?"], answer=["18"]) == [1.0]
        assert reward(texts, problem=["9 + 9?"], solution=["18"]) == [1.0]
        assert reward(texts, ["9 + 9?"], ground_truth=[18]) == [1.0]
        assert reward(texts, prompts=[prompt], answer=["18"]) == [1.0]
        assert reward(texts, prompts=[prompt], answer=["17"]) == [0.0]
        assert reward([], prompts=[], answer=[]) == []


def test_a_call_that_does_not_fit_is_refused(tmp_path):
    with loaded(file(tmp_path)) as reward:
        with pytest.raises(RewardError, match="gold answers are missing"):
            reward(["a"], question=["?"])
        with pytest.raises(RewardError, match="2 completions and 1 quest"):
            reward(["a", "b"], question=["?"], answer=["1", "2"])


def test_a_row_without_a_gold_is_not_scored(tmp_path):
    with loaded(file(tmp_path)) as reward:
        scores = reward.scores(["<answer>None</answer>"] * 2, answer=[None, 1])
        assert [score.value for score in scores] == [None, 0.0]
        assert scores[0].failure == "no gold"


VALUES = {
    "True": 1.0,
    "3": 3.0,
    "-0.5": -0.5,
    "np.float32(0.5)": 0.5,
    "np.float64(0.5)": 0.5,
    "np.int64(2)": 2.0,
    "np.bool_(True)": 1.0,
    "np.array(0.5)": 0.5,
    "Fraction(1, 2)": 0.5,
}
NO_VALUES = {
    "None": "no number",
    "'1.0'": "no number",
    "[1.0]": "no number",
    "{1: 2}": "no number",
    "np.array([1.0, 2.0])": "no number",
    "1j": "no number",
    "Odd()": "no number",
    "math.nan": "not finite",
    "-math.inf": "not finite",
    "10**400": "not finite",
    "1 / 0": "error",
    "sys.exit(0)": "error",
    "exec('raise KeyboardInterrupt')": "error",
    "exec('raise Odd')": "error",
    "deep(0)": "error",
}


def test_what_counts_as_a_number_and_what_is_none(tmp_path):
    path = write(
        tmp_path,
        """
        import math
        import sys
        from fractions import Fraction
        import numpy as np

        class Odd(Exception):
            def __str__(self):
                raise ValueError
            __repr__ = __float__ = __str__

        def deep(n):
            return deep(n + 1)

        def reward(question, answer, completion):
            return eval(completion)
        """,
    )
    with loaded(path) as reward:
        scores = reward.scores(
            list(VALUES | NO_VALUES),
            answer=["1"] * len(VALUES | NO_VALUES),
        )
    assert [s.value for s in scores[: len(VALUES)]] == list(VALUES.values())
    none = scores[len(VALUES) :]
    assert [s.failure for s in none] == list(NO_VALUES.values())
    assert all(s.value is None and s.reason for s in none)
    ended = none[list(NO_VALUES).index("sys.exit(0)")]
    assert ended.reason == "line 16: a call of sys.exit"


HOSTILE = {
    "loop": "while True: pass",
    "c-loop": "9**9**9**9",
    "sleep": "time.sleep(1000)",
    "os-exit": "os._exit(0)",
    "crash": "ctypes.string_at(0)",
    "memory": "bytearray(50 * 2**30)",
    "kill": "os.kill(os.getpid(), 9)",
    "fork": "os.fork() or os._exit(0)",
    "fork-on": "os.fork()",
    "print": "print('5 {}' * 10**6)",
    "cwd": "os.chdir('/')",
    "close": "os.closerange(0, 3)",
}
HARMLESS = ("fork", "fork-on", "print", "cwd", "close")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A file that does what stands between <do> and </do>."""
    path = write(
        tmp_path_factory.mktemp("hostile"),
        """
        import ctypes, os, time

        def reward(question, answer, completion):
            exec(completion.rpartition("<do>")[2].partition("</do>")[0])
            return 1.0
        """,
    )
    reward = load_reward(path, seconds=1.0)
    yield reward
    reward.close()


def test_nothing_that_a_file_does_hurts_another_score(hostile):
    folder = os.getcwd()
    texts = []
    for deed in HOSTILE.values():
        texts += [f"<do>{deed}</do>", "<do></do>"]
    scores = give(hostile, *texts)
    assert scores[1::2] == [1.0] * len(HOSTILE)
    for name, score in zip(HOSTILE, scores[::2], strict=True):
        assert score == (1.0 if name in HARMLESS else None), name
    assert os.getcwd() == folder


def test_failures_are_logged_as_shares_and_reasons(hostile):
    shares, columns = {}, {}
    texts = ["while 1: pass", "1/0", "", "os._exit(1)"]
    scores = give(
        hostile,
        *(f"<do>{text}</do>" for text in texts),
        log_metric=shares.__setitem__,
        log_extra=columns.__setitem__,
    )
    assert scores == [None, None, 1.0, None]
    assert shares == {
        "mine/failed": 0.75,
        "mine/no_answer": 0.0,
        "mine/unreadable": 0.0,
        "mine/timeout": 0.25,
        "mine/no_gold": 0.0,
        "mine/error": 0.5,
    }
    assert columns["mine/outcome"] == ["timeout", "error", "scored", "error"]
    late, raised, fine, ended = columns["mine/reason"]
    assert fine == ""
    # Which of the two deadlines ends it depends on what else runs here.
    assert "no score in time: more than" in late and "ended" in ended
    assert raised.startswith("line ") and "ZeroDivisionError" in raised


def test_a_run_in_which_a_file_fails_too_much_is_stopped(hostile):
    limit = FailureLimit(max_failed_share=0.5, window=2)
    shares = {}
    texts = ["<do>1/0</do>"] * 2
    give(hostile, *texts, log_metric=shares.__setitem__)
    with pytest.raises(RewardError, match="could not be graded by mine"):
        limit.add(shares, len(texts))


def test_an_error_names_the_line_of_the_file(tmp_path):
    path = write(
        tmp_path,
        """\
        def helper(x):
            return x["score"]

        def reward(question, answer, completion):
            return helper({})
        """,
    )
    with loaded(path) as reward:
        [score] = reward.scores(["a"], answer=["1"])
    assert score.reason == "line 2: KeyError: 'score'"


def test_the_learners_code_never_runs_in_this_process(tmp_path):
    path = file(
        tmp_path,
        top=f"import os\nassert (imported := os.getpid()) != {os.getpid()}",
        first="if completion == 'call': return os.getpid()",
        pay="imported",
    )
    with loaded(path) as reward:
        called, imported = give(reward, "call", "import")
    assert called and imported and os.getpid() not in (called, imported)
    assert "reward_file" not in sys.modules


def test_a_change_of_the_file_does_not_change_a_run(tmp_path):
    path = file(tmp_path, first="completion == 'end' and os._exit(1)")
    path.write_text("import os\n" + path.read_text())
    with loaded(path) as reward:
        path.write_text("def reward(**kwargs): return 5.0")
        assert give(reward, TAGGED.format(18)) == [1.0]
        assert give(reward, "end") == [None]
        assert give(reward, TAGGED.format(18)) == [1.0]
    with loaded(path) as reward:
        assert give(reward, "a") == [5.0]


def test_a_helper_beside_the_file_and_dataclasses_work(tmp_path, monkeypatch):
    write(tmp_path, "PAY = 0.25", "my_helper.py")
    path = write(
        tmp_path,
        """
        from __future__ import annotations
        from dataclasses import dataclass
        from my_helper import PAY

        @dataclass
        class Pay:
            much: float

        def reward(question, answer, completion):
            return Pay(PAY).much

        if __name__ == "__main__":
            raise SystemExit("run as a script")
        """,
    )
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    with loaded(path) as reward:
        assert give(reward, "a") == [0.25]
    assert not (tmp_path / "__pycache__").exists()


def test_a_loaded_file_can_be_pickled_and_used_after_close(tmp_path):
    with loaded(file(tmp_path)) as reward:
        assert give(reward, TAGGED.format(18)) == [1.0]
        copied = pickle.loads(pickle.dumps(reward))
        bound = pickle.loads(pickle.dumps(with_options(reward)))
        assert bound.__name__ == reward.__name__
        bound.func.close()
        reward.close()
        reward.close()
        assert give(reward, TAGGED.format(18)) == [1.0]
        assert give(copied, TAGGED.format(18)) == [1.0]
        copied.close()


# --- the folder of a file ------------------------------------------------


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """The folder in which this test's temporary files are made."""
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def doing(folder):
    """A file that does what its completion says."""
    top = "import os, subprocess, tempfile"
    return file(folder, top=top, first="exec(completion)", pay="1.0")


@pytest.mark.parametrize(
    "deed",
    [
        "open('new', 'w'); assert os.path.exists('new')",
        "assert tempfile.mkstemp()[1].startswith(os.getcwd())",
        "name = subprocess.check_output(['mktemp'], text=True);"
        "assert name.startswith(os.getcwd())",
        "print('x'); os.write(1, b'x'); os.write(2, b'x')",
    ],
)
def test_what_a_file_writes_stays_in_its_folder(tmp_path, temp, capfd, deed):
    before = set(tmp_path.rglob("*"))
    with loaded(doing(tmp_path)) as reward:
        [score] = reward.scores([deed], answer=["1"])
    assert score.value == 1.0, score.reason
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "mine.py"}
    assert capfd.readouterr() == ("", "")


def test_no_file_is_left_after_close(tmp_path, temp):
    with loaded(doing(tmp_path)) as reward:
        assert not list(temp.iterdir())  # what loading it has made
        deed = "os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a', 0)"
        assert give(reward, deed) == [1.0]
        [folder] = temp.iterdir()
        copied = pickle.loads(pickle.dumps(reward))
        assert give(copied, "open('kept', 'w')") == [1.0]
        [other] = {*temp.iterdir()} - {folder}
        reward.close()
        assert [*temp.iterdir()] == [other]
        assert give(copied, "open('kept')") == [1.0]
        assert give(reward, "open('kept')", "os.rmdir('a')") == [None] * 2
        copied.close()
        assert len([*temp.iterdir()]) == 1
        give(reward, "open('big', 'w'); os._exit(1)")
    assert not list(temp.iterdir())
    reward = load_reward(doing(tmp_path))
    give(reward, "open('a', 'w')")
    del reward
    assert not list(temp.iterdir())


def test_the_folder_is_empty_again_after_a_loss(tmp_path):
    with loaded(doing(tmp_path)) as reward:
        give(reward, "open('left', 'w'); os._exit(1)")
        assert give(reward, "assert not os.listdir()") == [1.0]


def test_two_processes_do_not_share_a_folder(tmp_path):
    path = file(
        tmp_path,
        top="import time",
        first="open('note', 'w').write(completion); time.sleep(0.1)",
        pay="open('note').read() == completion",
    )
    with loaded(path) as reward:
        assert give(reward, *"abcdefghij") == [1.0] * 10


LEAVES = """
import os, sys, threading, time
from rewards import load_reward
reward = load_reward(sys.argv[1])
# this thread holds it to the end
holds = lambda held: time.sleep(600)
threading.Thread(target=holds, args=[reward], daemon=True).start()
def folders():
    return len(os.listdir(os.environ["TMPDIR"]))
def give(deed):
    [value] = reward([deed], question=["?"], answer=["1"])
    return value
assert give("open('kept', 'w')") == 1.0
if not os.fork():
    assert give("open('kept')") is None and folders() == 2
    sys.exit()
assert os.wait()[1] == 0
assert give("open('kept')") == 1.0 and folders() == 1
"""


def test_no_file_is_left_at_the_end_of_a_program(tmp_path, temp):
    subprocess.run(
        [sys.executable, "-c", LEAVES, doing(tmp_path)],
        cwd=Path(rewards.__file__).parent.parent,
        env=os.environ | {"TMPDIR": str(temp)},
        check=True,
    )
    assert not list(temp.iterdir())


def test_a_check_tells_where_to_read_from(tmp_path):
    verdicts = check_reward(file(tmp_path, first="open('table.json')"), ROWS)
    assert "FileNotFoundError" in verdicts["runs"].seen
    assert "(__file__).parent" in verdicts["runs"].advice
    assert "Mend" not in verdicts["runs"].advice


def test_what_the_program_imports_from_its_folder_is_found(
    tmp_path, monkeypatch
):
    (tmp_path / "lib").mkdir()
    write(tmp_path / "lib", "PAY = 0.25", "lib_of_mine.py")
    monkeypatch.chdir(tmp_path / "lib")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    path = file(tmp_path, first="from lib_of_mine import PAY", pay="PAY")
    with loaded(path) as reward:
        assert give(reward, "a") == [0.25]


@pytest.mark.parametrize("library", ["sympy", "torch", "transformers"])
def test_libraries_can_be_imported(library, tmp_path):
    if not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed")
    with loaded(file(tmp_path, top=f"import {library}", pay="1")) as reward:
        assert give(reward, "a") == [1.0]


def test_without_a_temporary_folder_it_says_so(tmp_path, monkeypatch):
    def refuse(**options):
        raise FileNotFoundError(2, "No usable temporary directory")

    path = file(tmp_path)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(RewardError, match="TMPDIR"):
        load_reward(path)


# --- files that can't be used --------------------------------------------

UNUSABLE = {
    "def reward(question, answer completion):\n    pass": (
        "line 1 is no valid Python",
        "def reward(question, answer completion):",
    ),
    "x = 1": ("named reward", "none at all"),
    "reward = 3": ("named reward",),
    "def score(question, answer, completion):\n    return 1": (
        "named reward",
        "only score",
    ),
    "def reward(q, a, c):\n    return 1": ("(q, a, c)", "by keyword"),
    "def reward(question, answer):\n    return 1": ("(question, answer)",),
    "def reward(completions, **kwargs):\n    return 1": ("completions",),
    "def reward(question, answer, completion, /):\n    return 1": (
        "by keyword",
    ),
    "async def reward(question, answer, completion):\n    return 1": (
        "asynchronous",
    ),
    "def reward(question, answer, completion):\n    yield 1": ("`yield`",),
    "a = 1\nb = a / 0": ("line 2: ZeroDivisionError",),
    "raise ValueError('two\\nlines')": ("line 1: ValueError: two lines.",),
    "e = OSError('no')\ne.add_note('a note')\nraise e": ("OSError: no.",),
    "import no_such_package_here": (
        "imports 'no_such_package_here'",
        "line 1",
    ),
    "import sys\nsys.exit(3)": ("line 2: a call of sys.exit",),
    "import os\nos._exit(0)": ("ended the process",),
    "x = bytearray(50 * 2**30)": ("memory",),
    "x = '\0'": ("null bytes",),
    "(" * 1000: ("no valid Python", "line 1"),
    "def f():\n  return f()\nf()": ("RecursionError", "line 2"),
    "open('table.json')": ("line 1: FileNotFoundError", "(__file__).parent,"),
}


@pytest.mark.parametrize("source", UNUSABLE)
def test_a_file_that_cannot_be_used_is_refused_in_one_paragraph(
    source, tmp_path
):
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(RewardError) as refusal:
        load_reward(path)
    message = str(refusal.value)
    assert "\n" not in message
    assert message.startswith("The reward file bad.py can't be used: ")
    assert message.endswith(f"then load {path} again.")
    for words in UNUSABLE[source]:
        assert words in message


def test_a_file_that_never_stops_importing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards.contract.reward_file, "IMPORT_SECONDS", 0.5)
    path = write(tmp_path, "while True: pass")
    with pytest.raises(RewardError, match="importing it takes more than 0.5"):
        load_reward(path)


def test_a_file_that_prints_is_harmless(tmp_path, capfd):
    top = "print('1 {}'); print('1 {}', file=open('/dev/stderr', 'w'))"
    path = file(tmp_path, top=top, first="print('2 {}')")
    with loaded(path) as reward:
        assert give(reward, TAGGED.format(18)) == [1.0]
    assert capfd.readouterr() == ("", "")


def test_a_path_that_holds_no_reward_file_is_refused(tmp_path):
    file(tmp_path)
    with pytest.raises(RewardError, match="no reward file.*mine.py"):
        load_reward(tmp_path / "other.py")
    with pytest.raises(RewardError, match="no Python file"):
        load_reward(tmp_path / "nowhere" / "other.py")
    with pytest.raises(RewardError, match="doesn't end"):
        load_reward(write(tmp_path, "", "reward.txt"))
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(RewardError, match="can't be read"):
        load_reward(tmp_path / "folder.py")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(RewardError, match="not UTF-8"):
        load_reward(tmp_path / "latin.py")


@pytest.mark.parametrize("seconds", [0, -1, "5", float("nan"), None])
def test_a_deadline_must_be_a_positive_number(seconds, tmp_path):
    with pytest.raises(RewardError, match="seconds"):
        load_reward(file(tmp_path), seconds=seconds)


# --- what a check finds --------------------------------------------------


def test_a_good_file_passes_every_check(tmp_path):
    verdicts = check_reward(file(tmp_path), ROWS)
    assert verdicts.passed, str(verdicts)
    assert all(verdict.passed for verdict in verdicts), str(verdicts)
    assert verdicts.form == "<reasoning> and <answer>"


FAULTY = {
    "wrong ones are paid": (
        {"pay": "0.1 + (abs(float(given or 0) - float(gold)) < 3)"},
        {"not for wrong"},
    ),
    "int() cuts the rest": (
        {"pay": "given.strip() != '' and int(float(given)) == float(gold)"},
        {"pays for right", "not for wrong", "runs"},
    ),
    "the gold somewhere": (
        {"pay": "gold in given"},
        {"not for wrong", "not for a hedge"},
    ),
    "the sign is lost": (
        {"pay": "given.strip().strip('-') == gold.strip('-')"},
        {"not for wrong"},
    ),
    "empty texts are paid": (
        {"pay": "right or not completion.strip()"},
        {"pays for right"},
    ),
    "placeholders are paid": (
        {"pay": "right or given.strip() == '...'"},
        {"not for a placeholder"},
    ),
    "tags are paid": (
        {"pay": "right or bool(closed and not given.strip())"},
        {"not for tags only"},
    ),
    "an unclosed tag is paid": (
        {"pay": "right or bool(opened and not closed)"},
        {"not for truncated"},
    ),
    "copying is paid": (
        {"pay": "right or completion == question"},
        {"not for the question"},
    ),
    "one line only": (
        {"pay": "right and completion.count(chr(10)) < 9"},
        {"pays for many lines"},
    ),
    "the gold is not read": (
        {"pay": "given.strip() == answer"},
        {"pays for right", "varies in a group"},
    ),
    "only the form": (
        {"pay": "bool(opened and closed)"},
        {"pays for right"},
    ),
    "one row is not paid": (
        {"pay": "right and gold != '0.5'"},
        {"pays for right", "varies in a group"},
    ),
    "None for wrong ones": (
        {"pay": "1.0 if right else None"},
        {"gives a number", "varies in a group"},
    ),
    "infinite": (
        {"pay": "1.0 if right else -math.inf"},
        {"is finite", "varies in a group"},
    ),
    "it raises for some": (
        {"first": "completion[0]"},
        {"runs"},
    ),
    "random": (
        {"top": "import random", "pay": "right + random.random() / 9"},
        {"same score twice"},
    ),
    "a counter": (
        {
            "top": "calls = []",
            "first": "calls.append(1)",
            "pay": "right * len(calls)",
        },
        {"same score twice"},
    ),
    "only what is new": (
        {
            "top": "seen = set()",
            "first": "new = completion not in seen; seen.add(completion)",
            "pay": "right + new / 9",
        },
        {"same score twice"},
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_file_is_found_out(fault, tmp_path):
    changes, expected = FAULTY[fault]
    verdicts = check_reward(file(tmp_path, **changes), ROWS)
    assert expected <= failed(verdicts), str(verdicts)
    assert not verdicts.passed
    for verdict in verdicts.failures:
        assert verdict.seen and verdict.advice


# For these faults, too, nothing else may be blamed.
@pytest.mark.parametrize(
    "fault",
    [
        "the sign is lost",
        "placeholders are paid",
        "an unclosed tag is paid",
        "copying is paid",
        "one line only",
        "tags are paid",
        "it raises for some",
        "a counter",
    ],
)
def test_nothing_else_is_blamed(fault, tmp_path):
    changes, expected = FAULTY[fault]
    verdicts = check_reward(file(tmp_path, **changes), ROWS)
    assert failed(verdicts) == expected, str(verdicts)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("<think> and <answer>", r"(?s)<think>.*</think>\n<answer>(.*?)</"),
        (
            "<think> and <answer>, a line each",
            r"<think>.*</think>\n<answer>(\S+)</",
        ),
        (
            "<answer> after a <think> that the prompt has opened",
            r"^[^<]+</think>\n<answer>(.*)</",
        ),
        ("a box", r"boxed\{(.*?)\}\$\."),
        ("#### and the answer", r"#### (.*)"),
        ("The answer is ...", r"answer is (.*)\.$"),
        ("the answer alone", r"^(\S+)$"),
    ],
)
def test_the_form_that_pays_is_found(form, pattern, tmp_path):
    path = file(
        tmp_path,
        top="import re",
        first=f"found = re.search({pattern!r}, completion)",
        pay="bool(found) and found[1].strip() == gold",
    )
    verdicts = check_reward(path, ROWS)
    assert verdicts.form == form
    assert verdicts["pays for right"].passed, str(verdicts)
    assert not failed(verdicts) - {"pays for many lines"}, str(verdicts)


def test_the_published_arena_reward_is_seen_through():
    verdicts = check_reward(published.published_arena_reward, ROWS)
    assert verdicts["pays for right"].passed
    # it loses the sign, and takes 18 out of 18.5
    assert failed(verdicts) == {"not for wrong"}, str(verdicts)


def test_a_file_that_answers_nothing_in_time_is_not_called_often(tmp_path):
    path = file(tmp_path, top="import time", first="time.sleep(1000)")
    verdicts = check_reward(path, ROWS, seconds=0.6)
    assert {"runs", "pays for right"} <= failed(verdicts)
    assert "2 x timeout in 2 completions" in verdicts["runs"].seen
    assert verdicts["not for wrong"].passed is None


def test_a_file_that_hangs_for_some_is_stopped_early(tmp_path):
    path = file(tmp_path, first="while not completion.strip(): pass")
    verdicts = check_reward(path, ROWS * 4, seconds=0.6)
    assert failed(verdicts) == {"runs"}, str(verdicts)
    assert "timeout" in verdicts["runs"].seen
    assert "stopped after" in verdicts["runs"].seen
    assert verdicts["runs"].completion.strip() == ""
    assert verdicts["pays for right"].passed


def test_a_slow_reward_is_stopped_when_the_time_is_up(monkeypatch):
    now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(rewards.contract.trial, "time", clock)

    def slow(completions, answer, **kwargs):
        now[0] += 1.2 * len(completions)
        return right_ones(completions, answer)

    verdicts = check_reward(slow, ROWS * 4)
    assert failed(verdicts) == {"fast enough"}, str(verdicts)
    assert (
        "1,200.00 ms each, 4,800.00 s for 4,000"
        in verdicts["fast enough"].seen
    )
    assert "stopped after 60 s" in verdicts["runs"].seen
    assert verdicts["pays for right"].passed
    assert 60 <= now[0] < 80


def test_the_planned_rollouts_decide_what_is_fast(tmp_path):
    path = file(tmp_path)
    few = check_reward(path, ROWS, rollouts=1)["fast enough"]
    many = check_reward(path, ROWS, rollouts=1, limit_seconds=1e-9)
    assert few.passed and "1 rollouts" in few.seen
    assert failed(many) == {"fast enough"}


# --- functions with TRL's signature --------------------------------------


def right_ones(completions, answer):
    return [
        float(f"<answer>\n{gold.rpartition('####')[2].strip()}\n<" in text)
        for text, gold in zip(
            rewards.batch.completion_texts(completions), answer, strict=True
        )
    ]


def test_the_five_parts_pass_on_real_rows():
    path = Path(__file__).parent / "data" / "gsm8k_rows.jsonl"
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(next(lines)) for _ in range(20)]
    verdicts = check_reward(list(FIVE_PART), rows)
    assert verdicts.passed, str(verdicts)
    assert all(verdict.passed for verdict in verdicts), str(verdicts)
    assert verdicts.form == "<reasoning> and <answer>"
    assert "4 for a right answer, 2 for a wrong" in (
        verdicts["pays for right"].seen
    )


def test_the_form_alone_fails():
    for reward in (
        strict_format_reward,
        tag_count_reward,
        [strict_format_reward, tag_count_reward],
    ):
        verdicts = check_reward(reward, ROWS)
        assert failed(verdicts) == {"pays for right"}
        assert "only the form is paid" in verdicts["pays for right"].advice
    assert check_reward([strict_format_reward, correctness_reward], ROWS)


@pytest.mark.parametrize("value", [0.0, 1.0, -1, None])
def test_a_constant_fails(value):
    def constant(completions, **kwargs):
        return [value] * len(completions)

    verdicts = check_reward(constant, ROWS)
    assert failed(verdicts) == {"pays for right", "varies in a group"}


def test_what_the_published_five_parts_lose_over_several_lines():
    verdicts = check_reward(list(published.FIVE_PART_AS_PUBLISHED), ROWS)
    assert verdicts["pays for right"].passed, str(verdicts)
    # their format parts stop at the first line of the reasoning
    soft = check_reward(
        [
            published.published_correctness_reward,
            published.published_soft_format_reward,
        ],
        ROWS,
    )
    assert "gets 2, with one 2.5" in soft["pays for many lines"].seen


def test_a_function_that_trl_could_not_call_does_not_run():
    verdicts = check_reward(right_ones, ROWS)
    assert {"runs", "pays for right"} <= failed(verdicts)
    assert "unexpected keyword argument" in verdicts["runs"].seen
    assert "**kwargs" in verdicts["runs"].advice


def test_what_never_gave_a_score_is_not_praised(tmp_path):
    verdicts = check_reward(file(tmp_path, pay="1 / 0"), ROWS)
    assert failed(verdicts) == {"runs", "pays for right", "varies in a group"}
    assert "**kwargs" not in verdicts["runs"].advice
    for name in ("gives a number", "is finite", "same score twice"):
        assert verdicts[name].passed is None
    verdicts = check_reward(file(tmp_path, pay="None", name="none.py"), ROWS)
    assert verdicts["runs"].passed
    assert verdicts["gives a number"].passed is False
    assert verdicts["is finite"].passed is None


def test_the_function_of_a_file_is_judged_before_it_is_in_a_file():
    def reward(question, answer, completion):
        return right_ones([completion], [answer])[0]

    verdicts = check_reward(reward, ROWS)
    assert verdicts.passed, str(verdicts)


def test_every_argument_of_trl_is_there():
    def reward(
        prompts,
        completions,
        completion_ids,
        question,
        answer,
        level,
        trainer_state,
        log_extra,
        log_metric,
    ):
        assert trainer_state.global_step == 0
        assert len(completion_ids) == len(prompts) == len(question)
        assert prompts == question and level == ["easy"] * len(question)
        log_extra("column", question)
        log_metric("metric", 0.5)
        return right_ones(completions, answer)

    verdicts = check_reward(reward, [r | {"level": "easy"} for r in ROWS])
    assert verdicts.passed, str(verdicts)


def test_an_asynchronous_function_is_judged_also_inside_a_loop():
    async def reward(completions, answer, **kwargs):
        await asyncio.sleep(0)
        return right_ones(completions, answer)

    async def notebook():
        return check_reward(reward, ROWS)

    assert check_reward(reward, ROWS).passed
    assert asyncio.run(notebook()).passed


def test_a_function_of_message_lists_is_judged():
    def reward(completions, answer, **kwargs):
        return right_ones([c[0]["content"] for c in completions], answer)

    verdicts = check_reward(reward, ROWS)
    assert verdicts.passed, str(verdicts)
    assert "reads message lists only" in verdicts["plain as messages"].seen
    assert verdicts["plain as messages"].passed is None


def test_rows_with_conversational_prompts_get_message_lists():
    rows = [
        row | {"prompt": [{"role": "user", "content": row["question"]}]}
        for row in ROWS
    ]

    def plain_only(completions, answer, **kwargs):
        return right_ones([c.strip() + "\n" for c in completions], answer)

    def prompted(prompts, completions, answer, **kwargs):
        for prompt, completion in zip(prompts, completions, strict=True):
            assert type(prompt) is type(completion)
        return right_ones(completions, answer)

    verdicts = check_reward(plain_only, rows)
    assert {"runs", "pays for right"} <= failed(verdicts)
    assert check_reward(list(FIVE_PART), rows).passed
    assert check_reward(prompted, rows).passed
    assert check_reward(prompted, ROWS)["plain as messages"].passed


def test_messages_and_texts_that_are_scored_differently_are_found():
    def reward(completions, answer, **kwargs):
        bonus = 0 if isinstance(completions[0], str) else 0.5
        texts = rewards.batch.completion_texts(completions)
        return [s + bonus for s in right_ones(texts, answer)]

    assert failed(check_reward(reward, ROWS)) == {"plain as messages"}
    # where the rows say which one is used, the other doesn't matter
    rows = [row | {"prompt": row["question"]} for row in ROWS]
    verdicts = check_reward(reward, rows)
    assert verdicts.passed
    assert verdicts["plain as messages"].passed is None


def test_scores_relative_to_the_batch_are_reported():
    def relative(completions, answer, **kwargs):
        scores = right_ones(completions, answer)
        return [s - sum(scores) / len(scores) / 2 for s in scores]

    def positional(completions, answer, **kwargs):
        scores = right_ones(completions, answer)
        return [s + i / 100 for i, s in enumerate(scores)]

    verdicts = check_reward(relative, ROWS)
    assert "same on its own" in failed(verdicts)
    assert "relative" in verdicts["same on its own"].advice
    assert verdicts["same in any order"].passed
    assert "same in any order" in failed(check_reward(positional, ROWS))


def test_a_function_that_changes_its_arguments_is_found():
    def pops(completions, answer, **kwargs):
        scores = right_ones(completions, answer)
        completions.clear()
        kwargs["tags"][0].clear()
        return scores

    def parses(completions, answer, **kwargs):
        scores = right_ones(completions, answer)
        answer[:] = [text.rpartition("####")[2] for text in answer]
        return scores

    rows = [row | {"tags": ["easy"]} for row in ROWS]
    verdicts = check_reward(parses, rows)
    assert failed(verdicts) == {"changes no argument"}
    assert "'answer'" in verdicts["changes no argument"].seen
    assert failed(check_reward(pops, rows)) == {"changes no argument"}
    assert failed(check_reward([pops, *FIVE_PART], rows)) == {
        "changes no argument"
    }
    assert rows == [row | {"tags": ["easy"]} for row in ROWS]


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda n: 1.0, "not iterable"),
        (lambda n: [1.0], "1 scores for 2"),
        (lambda n: sys.exit(), "sys.exit"),
        (lambda n: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_function_that_breaks_training_does_not_run(result, reason):
    def reward(completions, **kwargs):
        return result(len(completions)) if len(completions) > 1 else result(1)

    def broken(completions, **kwargs):
        return [1.0] * 2 if reason.startswith("1 sc") else reward(completions)

    verdicts = check_reward(broken, ROWS)
    assert "runs" in failed(verdicts)
    assert reason.replace("1 scores for 2", "2 scores for 1") in (
        verdicts["runs"].seen
    )


def test_the_completion_that_a_function_cannot_take_is_shown():
    def reward(completions, answer, **kwargs):
        texts = rewards.batch.completion_texts(completions)
        assert all(texts), "empty"
        return right_ones(texts, answer)

    verdicts = check_reward(reward, ROWS)
    assert failed(verdicts) == {"runs"}
    assert verdicts["runs"].completion == ""
    assert "AssertionError: empty" in verdicts["runs"].seen


def test_a_file_and_functions_are_judged_as_a_sum(tmp_path):
    verdicts = check_reward([file(tmp_path), strict_format_reward], ROWS)
    assert verdicts.passed, str(verdicts)
    assert verdicts.reward == "sum of mine, strict_format_reward"
    assert "1.5 for a right answer" in verdicts["pays for right"].seen
    with pytest.raises(RewardError, match="list of"):
        check_reward([], ROWS)
    with pytest.raises(RewardError, match="list of"):
        check_reward(3, ROWS)


def test_a_sum_of_nothing_but_none_is_no_score():
    def right_or_none(completions, answer, **kwargs):
        return [s or None for s in right_ones(completions, answer)]

    verdicts = check_reward([right_or_none, right_or_none], ROWS)
    assert "2 for a right answer, no score" in verdicts["pays for right"].seen


def test_a_loaded_file_can_be_judged_and_used_further(tmp_path):
    with loaded(file(tmp_path)) as reward:
        assert check_reward(reward, ROWS).passed
        assert give(reward, TAGGED.format(18)) == [1.0]


# --- rows ----------------------------------------------------------------


def test_golds_that_cannot_be_read_are_counted():
    rows = [*ROWS, {"question": "Why?", "answer": "nobody could ever know it"}]
    verdicts = check_reward(list(FIVE_PART), rows)
    assert verdicts.passed
    assert verdicts["golds can be read"].passed is None
    assert verdicts["golds can be read"].seen.startswith("5 of 6")
    verdicts = check_reward(list(FIVE_PART), rows[-1:])
    assert failed(verdicts) == {"golds can be read"}
    assert verdicts["pays for right"].passed is None


def test_latex_golds_and_other_columns():
    rows = [
        {"problem": "Halve 1.", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        {"problem": "Solve it.", "solution": r"So $\boxed{x^2 + 1}$."},
    ]

    def reward(completions, solution, **kwargs):
        boxes = [s.partition("$")[2].rpartition("$")[0] for s in solution]
        texts = rewards.batch.completion_texts(completions)
        pairs = zip(texts, boxes, strict=True)
        return [float(f"${box}$" in text) for text, box in pairs]

    verdicts = check_reward(reward, rows)
    assert verdicts.passed, str(verdicts)


def test_one_row_is_enough_for_what_it_can_show():
    verdicts = check_reward(list(FIVE_PART), ROWS[:1])
    assert verdicts.passed
    assert verdicts["not for swapped"].passed is None


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        (["a row"], "must be a dict"),
        ([3], "must be a dict"),
        ([{"question": "?", "gold": 3}], "question, gold"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(rows, words):
    with pytest.raises(RewardError, match=words):
        check_reward(list(FIVE_PART), rows)


@pytest.mark.parametrize("form", FORMS)
def test_no_probe_but_the_right_ones_says_the_answer(form):
    examples, _ = examples_of(ROWS, 5)
    for example in examples:
        texts = {p.text for p in probes(example, form) if p.kind == "right"}
        assert len(texts) == 1 and example.answer in texts.pop()
        for probe in probes(example, form):
            if probe.kind in ("truncated", "empty", "tags only"):
                assert example.answer not in probe.text
            if probe.kind == "wrong":
                assert not correctness_reward(
                    [f"<answer>{probe.text}</answer>"],
                    answer=[example.answer],
                )[0]


def test_a_question_that_holds_the_answer_is_not_held_against_a_reward():
    rows = [{"question": "Is 9 + 9 still 18?", "answer": "18"}, ROWS[1]]
    examples, _ = examples_of(rows, 2)
    kinds = [{p.kind for p in probes(e, "a box")} for e in examples]
    assert ["question" in found for found in kinds] == [False, True]


# --- the table -----------------------------------------------------------


def test_the_table_is_aligned_in_79_columns(tmp_path):
    path = file(
        tmp_path,
        pay="bool(opened and closed)",
        name="a" * 60 + ".py",
    )
    rows = [{"question": "w" * 300, "answer": "#### " + "9" * 60}, *ROWS]
    verdicts = check_reward(path, rows)
    lines = str(verdicts).split("\n")
    assert max(map(len, lines)) <= 79
    column = {line.index("yes") for line in lines if "  yes  " in line}
    assert len(column) == 1
    assert "pays for right: NO" in lines
    table = verdicts.table()
    assert [row["name"] for row in table] == [v.name for v in verdicts]
    json.dumps(table)


def test_what_is_shown_is_escaped():
    row = Verdict("runs", False, "<b>&", "<script>\x1b[2J</script>", "<i>")
    verdicts = Verdicts("<mine>", "<think>", (row,))
    shown = verdicts._repr_html_()
    for tag in ("<script>", "<b>&", "<i>", "<mine>", "<think>", "\x1b"):
        assert tag not in shown
        assert "\x1b" not in str(verdicts)
    assert "&lt;script&gt;\\x1b[2J" in shown


def test_a_verdict_is_found_by_its_name():
    verdicts = Verdicts("mine", "", (Verdict("runs", None, "not tried"),))
    assert verdicts["runs"].passed is None
    assert verdicts.passed
    with pytest.raises(KeyError, match="there are"):
        verdicts["flies"]


# --- the command line ----------------------------------------------------


def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = rewards.contract.__main__.main([str(a) for a in arguments])
    return status, out.getvalue(), err.getvalue()


def test_the_command_line_prints_the_table(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    status, out, err = run(file(tmp_path), "--data", data)
    assert (status, err) == (0, "") and "pays for right" in out
    bad = file(tmp_path, pay="1.0", name="bad.py")
    status, out, _ = run(bad, "--data", data, "--rollouts", 10)
    assert status == 1 and "pays for right: NO" in out
    status, out, err = run(tmp_path / "none.py", "--data", data)
    assert (status, out) == (2, "") and "There is no reward file" in err
    status, out, err = run(bad, "--data", tmp_path / "none.jsonl")
    assert (status, out) == (2, "") and "can't be read" in err
    data.write_text('{"question": "?", "answer": "1"}\n{oops\n')
    status, out, err = run(bad, "--data", data)
    assert status == 2 and "in line 2" in err
    rows = "\n".join(map(json.dumps, ROWS))
    data.write_text(rows, encoding="utf-8-sig")  # as Windows saves it
    assert run(file(tmp_path), "--data", data)[0] == 0
    status, _, err = run(bad, "--data", data, "--rollouts", -5)
    assert status == 2 and "numbers above 0" in err
    data.write_text(json.dumps(ROWS))
    status, _, err = run(bad, "--data", data)
    assert status == 2 and "A row must be a dict, and one is list" in err


def test_the_command_line_runs_as_a_module(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    done = subprocess.run(
        [sys.executable, "-m", "rewards.contract", file(tmp_path)]
        + ["--data", data],
        capture_output=True,
        text=True,
        cwd=Path(rewards.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert "nothing failed" in done.stdout
