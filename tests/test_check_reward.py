"""What a check of a reward finds, in a reward file and in any function."""

import asyncio
import contextlib
import io
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
from reward_files import ROWS, TAGGED, failed, file, give, loaded

import rewards.batch
import rewards.contract.__main__
import rewards.contract.trial
from rewards import (
    FIVE_PART,
    RewardError,
    correctness_reward,
    extract_answer,
    published,
    strict_format_reward,
    tag_count_reward,
)
from rewards.contract import Verdict, Verdicts, check_reward
from rewards.contract.probes import FORMS, examples_of, probes

# --- what a check finds --------------------------------------------------


def test_a_good_file_passes_every_check(tmp_path):
    verdicts = check_reward(file(tmp_path), ROWS)
    assert verdicts.passed, str(verdicts)
    assert all(verdict.passed for verdict in verdicts), str(verdicts)
    assert verdicts.form == "<reasoning> and <answer>"


FAULTY = {
    "wrong ones are rewarded": (
        {"pay": "0.1 + (abs(float(given or 0) - float(gold)) < 3)"},
        {"not for wrong"},
    ),
    "int() cuts the rest": (
        {"pay": "given.strip() != '' and int(float(given)) == float(gold)"},
        {"rewards right answers", "not for wrong", "runs"},
    ),
    "the gold somewhere": (
        {"pay": "gold in given"},
        {"not for wrong", "not for a hedge"},
    ),
    "the sign is lost": (
        {"pay": "given.strip().strip('-') == gold.strip('-')"},
        {"not for wrong"},
    ),
    "empty texts are rewarded": (
        {"pay": "right or not completion.strip()"},
        {"rewards right answers"},
    ),
    "placeholders are rewarded": (
        {"pay": "right or given.strip() == '...'"},
        {"not for a placeholder"},
    ),
    "tags are rewarded": (
        {"pay": "right or bool(closed and not given.strip())"},
        {"not for tags only"},
    ),
    "an unclosed tag is rewarded": (
        {"pay": "right or bool(opened and not closed)"},
        {"not for truncated"},
    ),
    "copying is rewarded": (
        {"pay": "right or completion == question"},
        {"not for the question"},
    ),
    "one line only": (
        {"pay": "right and completion.count(chr(10)) < 9"},
        {"rewards long reasoning"},
    ),
    "the gold is not read": (
        {"pay": "given.strip() == answer"},
        {"rewards right answers", "varies in a group"},
    ),
    "only the form": (
        {"pay": "bool(opened and closed)"},
        {"rewards right answers"},
    ),
    "one row is not rewarded": (
        {"pay": "right and gold != '0.5'"},
        {"rewards right answers", "varies in a group"},
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


NOTHING_ELSE = (
    "the sign is lost", "placeholders are rewarded", "one line only",
    "an unclosed tag is rewarded", "copying is rewarded", "a counter",
    "tags are rewarded", "it raises for some",
)  # fmt: skip
"""Faults for which no other check may fail."""


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_file_is_found_out(fault, tmp_path):
    changes, expected = FAULTY[fault]
    verdicts = check_reward(file(tmp_path, **changes), ROWS)
    assert expected <= failed(verdicts), str(verdicts)
    if fault in NOTHING_ELSE:
        assert failed(verdicts) == expected, str(verdicts)
    for verdict in verdicts.failures:
        assert verdict.seen and verdict.advice


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
def test_the_form_that_scores_is_found(form, pattern, tmp_path):
    path = file(
        tmp_path,
        top="import re",
        first=f"found = re.search({pattern!r}, completion)",
        pay="bool(found) and found[1].strip() == gold",
    )
    verdicts = check_reward(path, ROWS)
    assert verdicts.form == form
    assert verdicts["rewards right answers"].passed, str(verdicts)
    lines = {"rewards long reasoning", "same on its own line"}
    assert not failed(verdicts) - lines, str(verdicts)


def test_the_published_arena_reward_is_seen_through():
    verdicts = check_reward(published.published_arena_reward, ROWS)
    assert verdicts["rewards right answers"].passed
    # it loses the sign, and takes 18 out of 18.5
    assert failed(verdicts) == {"not for wrong"}, str(verdicts)


def test_a_file_that_answers_nothing_in_time_is_not_called_often(tmp_path):
    path = file(tmp_path, top="import time", first="time.sleep(1000)")
    verdicts = check_reward(path, ROWS, seconds=0.6)
    assert {"runs", "rewards right answers"} <= failed(verdicts)
    assert "2 x timeout in 2 completions" in verdicts["runs"].seen
    assert verdicts["not for wrong"].passed is None


def test_a_file_that_hangs_for_some_is_stopped_early(tmp_path):
    path = file(tmp_path, first="while not completion.strip(): pass")
    verdicts = check_reward(path, ROWS * 4, seconds=0.6)
    assert failed(verdicts) == {"runs"}, str(verdicts)
    assert "timeout" in verdicts["runs"].seen
    assert "stopped after" in verdicts["runs"].seen
    assert verdicts["runs"].completion.strip() == ""
    assert verdicts["rewards right answers"].passed


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
    assert verdicts["rewards right answers"].passed
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
        verdicts["rewards right answers"].seen
    )


def test_the_form_alone_fails():
    for reward in (
        strict_format_reward,
        tag_count_reward,
        [strict_format_reward, tag_count_reward],
    ):
        verdicts = check_reward(reward, ROWS)
        assert failed(verdicts) == {"rewards right answers"}
        assert (
            "only the form is rewarded"
            in verdicts["rewards right answers"].advice
        )
    assert check_reward([strict_format_reward, correctness_reward], ROWS)


@pytest.mark.parametrize("value", [0.0, 1.0, -1, None])
def test_a_constant_fails(value):
    def constant(completions, **kwargs):
        return [value] * len(completions)

    verdicts = check_reward(constant, ROWS)
    assert failed(verdicts) == {"rewards right answers", "varies in a group"}


def test_what_the_published_five_parts_lose_over_several_lines():
    verdicts = check_reward(list(published.FIVE_PART_AS_PUBLISHED), ROWS)
    assert verdicts["rewards right answers"].passed, str(verdicts)
    # their format parts stop at the first line of the reasoning
    soft = check_reward(
        [
            published.published_correctness_reward,
            published.published_soft_format_reward,
        ],
        ROWS,
    )
    assert "gets 2, with one 2.5" in soft["rewards long reasoning"].seen


def test_a_function_that_trl_could_not_call_does_not_run():
    verdicts = check_reward(right_ones, ROWS)
    assert {"runs", "rewards right answers"} <= failed(verdicts)
    assert "unexpected keyword argument" in verdicts["runs"].seen
    assert "**kwargs" in verdicts["runs"].advice


def test_what_never_gave_a_score_is_not_praised(tmp_path):
    verdicts = check_reward(file(tmp_path, pay="1 / 0"), ROWS)
    assert failed(verdicts) == {
        "runs",
        "rewards right answers",
        "varies in a group",
    }
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
    assert {"runs", "rewards right answers"} <= failed(verdicts)
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
    assert "1.5 for a right answer" in verdicts["rewards right answers"].seen
    with pytest.raises(RewardError, match="list of"):
        check_reward([], ROWS)
    with pytest.raises(RewardError, match="list of"):
        check_reward(3, ROWS)


def test_a_sum_of_nothing_but_none_is_no_score():
    def right_or_none(completions, answer, **kwargs):
        return [s or None for s in right_ones(completions, answer)]

    verdicts = check_reward([right_or_none, right_or_none], ROWS)
    assert (
        "2 for a right answer, no score"
        in verdicts["rewards right answers"].seen
    )


def test_a_loaded_file_can_be_judged_and_used_further(tmp_path):
    with loaded(file(tmp_path)) as reward:
        assert check_reward(reward, ROWS).passed
        assert give(reward, TAGGED.format(18)) == [1.0]


# --- rows ----------------------------------------------------------------


def test_golds_that_cannot_be_read_are_counted():
    rows = [*ROWS, {"question": "Why?", "answer": "nobody could ever know it"}]
    verdicts = check_reward(list(FIVE_PART), rows)
    assert verdicts.passed
    assert verdicts["answers can be read"].passed is None
    assert verdicts["answers can be read"].seen.startswith("5 of 6")
    verdicts = check_reward(list(FIVE_PART), rows[-1:])
    assert failed(verdicts) == {"answers can be read"}
    assert verdicts["rewards right answers"].passed is None


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
            if probe.kind in ("empty", "tags only"):
                assert example.answer not in probe.text
            if probe.kind == "truncated":  # at most in the reasoning
                assert extract_answer(probe.text) != example.answer
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
    assert "rewards right answers: NO" in lines
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
    assert (status, err) == (0, "") and "rewards right answers" in out
    bad = file(tmp_path, pay="1.0", name="bad.py")
    status, out, _ = run(bad, "--data", data, "--rollouts", 10)
    assert status == 1 and "rewards right answers: NO" in out
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
