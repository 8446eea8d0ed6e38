"""Reward files, and rows, for the tests of rewards.contract."""

import contextlib
import textwrap

from rewards.contract import load_reward

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
