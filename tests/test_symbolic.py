"""Accuracy for golds in LaTeX: all public cases, and nothing that hangs."""

import json
import multiprocessing
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import papermill
import pytest

from grpo_lab.data import load_splits
from rewards import symbolic
from rewards.answers import POLICIES, gold_answer, gold_number
from rewards.batch import RewardError
from rewards.cookbook import COOKBOOK, think_format_reward
from rewards.health import Outcome
from rewards.options import with_options
from rewards.symbolic import accuracy_reward, grade, unusable_golds

ROOT = Path(__file__).parents[1]


def read_rows(name):
    text = (ROOT / "tests" / "data" / name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


# `right_from` is the strictest policy that finds the right answer; "never":
# no policy does; "no gold": the gold can't be read.
CASES = read_rows("reward_cases.jsonl")
CASES += read_rows("reward_cases_symbolic.jsonl")
CASES += read_rows("more_cases.jsonl")

# No looks give these away, and they take sympy minutes.
ENDLESS = (
    r"\sum_{i=1}^{99}\sum_{j=1}^{99}\sum_{k=1}^{99}\frac{1}{i+j+k}",
    r"\prod_{i=1}^{99}\prod_{j=1}^{99}\prod_{k=1}^{99}(1+\frac{i}{j+k})",
)


@pytest.fixture
def quick(monkeypatch):
    """Workers of this test's own, with a short deadline and no memory."""
    workers = symbolic.make_workers(cpu_seconds=0.3)
    monkeypatch.setattr(symbolic, "_workers", workers)
    monkeypatch.setattr(symbolic, "_known", {})
    yield workers
    workers.close()


def wanted(right_from):
    if right_from == "no gold":
        return [None] * len(POLICIES)
    first = (*POLICIES, "never").index(right_from)
    return [float(i >= first) for i in range(len(POLICIES))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_case(case):
    paid = [
        accuracy_reward([case["input"]], [case["gold"]], policy=policy)[0]
        for policy in POLICIES
    ]
    assert paid == wanted(case["right_from"]), case.get("why")


def test_a_batch_is_graded_as_its_completions_are():
    texts = [case["input"] for case in CASES]
    golds = [case["gold"] for case in CASES]
    together = accuracy_reward(texts, golds, policy="flexible")
    assert together == [wanted(case["right_from"])[-1] for case in CASES]
    backwards = accuracy_reward(texts[::-1], golds[::-1], policy="flexible")
    assert backwards == together[::-1]


def test_options_and_names_reach_a_trainer():
    stated = with_options(accuracy_reward, policy="stated")
    assert stated.__name__ == "accuracy_reward"
    assert pickle.loads(pickle.dumps(stated))(
        [r"so \boxed{\sqrt{4}}"], solution=["2"], prompts=["?"]
    ) == [1.0]
    assert accuracy_reward(
        [[{"role": "assistant", "content": "5</think><answer>5</answer>"}]],
        answer=["5"], prefilled="<think>\n",
    ) == [1.0]  # fmt: skip


def test_the_cookbook_pair_pays_one_each():
    good = "<think>half</think>\n<answer>$\\frac{1}{2}$</answer>"
    assert [part([good], solution=["0.5"])[0] for part in COOKBOOK] == [1, 1]
    assert (think_format_reward, accuracy_reward) == COOKBOOK


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "gold answers are missing"),
        ({"solution": None}, "gold answers are missing"),
        ({"solution": ["1"]}, "2 completions and 1 gold"),
        ({"solution": "12"}, "must be a list"),
    ],
)
def test_a_call_that_cannot_be_scored_is_refused(columns, said):
    with pytest.raises(RewardError, match=said):
        accuracy_reward(["<answer>1</answer>"] * 2, **columns)


def test_golds_that_cannot_be_used_are_found_when_data_is_loaded():
    broken = [None, "(1, 2", "", r"\boxed{|||}", "3 | 6", "None", "9^{9^9}"]
    usable = ["#### 5", "$x^2$", r"\text{east}", "1, 2"]
    assert unusable_golds(usable + broken) == [4, 5, 6, 7, 8, 9, 10]
    assert unusable_golds(["no number in here"]) == [0]
    assert unusable_golds([]) == []


def test_a_gold_that_hangs_blames_no_answer(quick):
    golds = [ENDLESS[0]] * 3
    outcomes = grade(["1", None, golds[0]], golds)
    assert outcomes == [Outcome.NO_GOLD, Outcome.NO_GOLD, Outcome.RIGHT]


def test_what_hangs_pays_nothing_is_counted_and_stops_nobody(quick):
    answers = [*ENDLESS, "x+1", "1 + x", "y", "9^{9^{9}}", "x + )", None]
    texts = [f"<answer>{a}</answer>" if a else "no idea" for a in answers]
    metrics, columns = {}, {}
    paid = accuracy_reward(
        texts, ["$x+1$"] * len(texts),
        log_metric=metrics.__setitem__, log_extra=columns.__setitem__,
    )  # fmt: skip
    assert paid == [0, 0, 1, 1, 0, 0, 0, 0]
    assert metrics == {
        "accuracy_reward/failed": 4 / 8,
        "accuracy_reward/no_answer": 1 / 8,
        "accuracy_reward/unreadable": 2 / 8,
        "accuracy_reward/undecided": 0,
        "accuracy_reward/timeout": 2 / 8,
        "accuracy_reward/no_gold": 0,
        "accuracy_reward/error": 0,
    }
    assert columns["accuracy_reward/outcome"] == [
        "timeout", "timeout", "right", "right", "wrong", "unreadable",
        "unreadable", "no_answer",
    ]  # fmt: skip
    assert columns["accuracy_reward/answer"] == [a or "" for a in answers]


def test_verdicts_are_remembered_and_failures_are_not(quick):
    answers, golds = [r"\sqrt{49}", "x", ENDLESS[1]], ["7"] * 3
    found = grade(answers, golds)
    assert found == [Outcome.RIGHT, Outcome.WRONG, Outcome.TIMEOUT]
    quick.close()
    assert grade(answers[:2], golds[:2]) == found[:2]  # nobody is asked
    with pytest.raises(RewardError, match="closed"):
        grade(answers[2:], golds[2:])


def test_remembering_is_safe_among_threads(monkeypatch):
    monkeypatch.setattr(symbolic, "REMEMBERED", 50)
    wrong = []

    def work(start):
        for n in range(start, start + 4000):
            if grade([str(n % 97)], [str(n % 101)]) != [
                Outcome.RIGHT if n % 97 == n % 101 else Outcome.WRONG
            ]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_long_answer_costs_this_process_nothing():
    long = "<answer>" + "abci " * 200_000 + "!</answer>"
    start = time.process_time()
    assert accuracy_reward([long] * 4, ["$x$"] * 4) == [0.0] * 4
    assert time.process_time() - start < 5  # measured: 0.2 s


def test_a_gold_is_parsed_once_for_all_its_answers(quick, monkeypatch):
    asked = []
    ask = quick.ask
    monkeypatch.setattr(
        quick, "ask", lambda groups: asked.append(groups) or ask(groups)
    )
    answers = [rf"\sqrt{{{n}}}" for n in (8, 8, 2, 4)] + ["x"]
    golds = [r"2\sqrt{2}"] * 5
    assert grade(answers, golds)[:2] == [Outcome.RIGHT] * 2
    [[group]] = asked
    assert group[0] == [golds[0]]
    assert sorted(pair[1] for pair in group[1:]) == sorted(set(answers))
    grade(answers, golds)
    assert len(asked) == 1


def test_an_alarm_of_the_caller_survives(quick):
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 100)
        assert grade([r"\frac{2}{4}x"], [r"\frac{x}{2}"]) == [Outcome.RIGHT]
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 50
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_from_several_threads_at_once(quick):
    found = {}

    def work(n):
        answers = [rf"\sqrt{{{n * n * 2}}}", rf"\sqrt{{{n}}}", ENDLESS[0]]
        found[n] = grade(answers, [rf"{n}\sqrt{{2}}"] * 3)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [Outcome.RIGHT, Outcome.WRONG, Outcome.TIMEOUT]
    assert found == {n: expected for n in range(3, 7)}


def _grade_one(n):
    return [str(o) for o in grade([rf"\sqrt{{{4 * n}}}"], [rf"2\sqrt{{{n}}}"])]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_inside_another_pool_of_processes(method, plain_main):
    """Its workers are daemons, which may have no multiprocessing children."""
    assert _grade_one(2) == ["right"]  # the parent's workers run by now
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map(_grade_one, [2, 3, 5]) == [["right"]] * 3
    assert _grade_one(7) == ["right"]


def test_a_program_that_uses_it_ends_at_once_and_leaves_nothing():
    code = (
        "from rewards.symbolic import grade\n"
        "print(*grade([r'\\sqrt{8}'], [r'2\\sqrt{2}']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("right\n", "")


def test_in_a_notebook_under_papermill(tmp_path):
    cell = (
        "from rewards.symbolic import grade\n"
        f"print(*grade([r'{ENDLESS[0]}', r'\\sqrt{{8}}', 'x'], "
        "[r'2\\sqrt{2}'] * 3))"
    )
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell)]
    )
    nbformat.write(notebook, tmp_path / "in.ipynb")
    done = papermill.execute_notebook(
        str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"),
        kernel_name="python3", cwd=str(tmp_path), progress_bar=False,
    )  # fmt: skip
    [output] = done.cells[0].outputs  # and nothing on standard error
    assert output.text == "timeout right wrong\n"


def test_importing_the_rewards_is_light_and_starts_nothing():
    code = (
        "import sys\n"
        "import rewards, rewards.symbolic, rewards.cookbook\n"
        "heavy = {'torch', 'transformers', 'trl', 'sympy', 'math_verify'}\n"
        "heavy |= {'numpy', 'multiprocessing'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert len(sys.modules) < 400, len(sys.modules)\n"
        "import threading; assert threading.active_count() == 1"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_the_worker_answers_as_the_module_says():
    """Right in this process: what runs in the worker is plain functions."""
    from rewards.symbolic_worker import handler

    answer = handler()
    assert answer([r"\sqrt{2}"]) is True and answer(["|||"]) is False
    assert answer([r"\sqrt{2}", r"\frac{2}{\sqrt{2}}"]) == "right"


@pytest.mark.parametrize("source", ["pocket", "pocket_latex"])
def test_generated_golds_are_right_and_constants_are_wrong(source):
    """What the pocket lessons train on, graded as they do."""
    golds = load_splits(source, train_rows=200, eval_rows=1).train["answer"]
    assert unusable_golds(golds) == []
    for form in ("<answer>{}</answer>", "<answer>${}$</answer>"):
        texts = [form.format(gold_answer(gold)) for gold in golds]
        assert set(accuracy_reward(texts, golds)) == {1.0}
    for wrong in ("", "None", "-987654321", r"\frac{987}{654321}", "q", "0.5"):
        texts = [f"<answer>{wrong}</answer>"] * len(golds)
        paid = accuracy_reward(texts, golds)
        right = [wrong == "0.5" and gold_number(g) == 0.5 for g in golds]
        assert paid == [float(one) for one in right], wrong
