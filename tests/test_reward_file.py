"""Reward files: one function of a learner's, in a process of its own."""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from reward_files import ROWS, TAGGED, file, give, loaded, write

import rewards
import rewards.contract.reward_file
from rewards import RewardError, with_options
from rewards.contract import check_reward, load_reward
from rewards.health import FailureLimit

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
        "mine/undecided": 0.0,
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
        deed = "os.makedirs('a/b'); open('a/b/c', 'w')"
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


def test_a_library_can_be_imported(tmp_path):
    with loaded(file(tmp_path, top="import torch", pay="1")) as reward:
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
    "def reward(q, a, c):\n    return 1": ("(q, a, c)", "question=..."),
    "def reward(question, answer):\n    return 1": ("(question, answer)",),
    "def reward(completions, **kwargs):\n    return 1": ("completions",),
    "def reward(question, answer, completion, /):\n    return 1": (
        "question=...",
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


def test_a_path_that_holds_no_reward_file_is_refused(tmp_path):
    file(tmp_path)
    with pytest.raises(RewardError, match="no reward file.*mine.py"):
        load_reward(tmp_path / "other.py")
    with pytest.raises(RewardError, match="folder: none"):
        load_reward(tmp_path / "nowhere" / "other.py")
    with pytest.raises(RewardError, match="doesn't end"):
        load_reward(write(tmp_path, "", "reward.txt"))
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(RewardError, match="can't be read"):
        load_reward(tmp_path / "folder.py")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(RewardError, match="can't be read: .utf-8"):
        load_reward(tmp_path / "latin.py")


@pytest.mark.parametrize("seconds", [0, -1, "5", float("nan"), None])
def test_a_deadline_must_be_a_positive_number(seconds, tmp_path):
    with pytest.raises(RewardError, match="seconds"):
        load_reward(file(tmp_path), seconds=seconds)
