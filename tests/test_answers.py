"""Reading numbers and answers: exact, by named policies, in linear time."""

import json
import signal
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards.answers
import rewards.numbers
from rewards import (
    POLICIES,
    RewardError,
    accuracy_reward,
    extract_answer,
    gold_number,
    is_correct,
    parse_number,
)
from rewards.answers import gold_answer

CALM = settings(deadline=None, derandomize=True, database=None)

HERE = Path(__file__).parent
SHARED = HERE.parents[1] / "shared"
GSM8K = SHARED / "data" / "gsm8k"


def read_rows(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


# `right_from` is the strictest policy that finds the right answer; "never":
# no policy does; "no gold": the gold can't be read, so the verdict is None.
CASES = read_rows(HERE / "data" / "reward_cases.jsonl")
# Golds that are no numbers: they wait for the symbolic part.
SYMBOLIC = read_rows(HERE / "data" / "reward_cases_symbolic.jsonl")
CONTRACT_CASES = {"T05", "T06", "T07", "T08", "T10", "T11"}


def by_id(case):
    return case["id"]


def verdicts_wanted(right_from):
    if right_from == "no gold":
        return [None] * len(POLICIES)
    if right_from == "never":
        return [False] * len(POLICIES)
    first = POLICIES.index(right_from)
    return [i >= first for i in range(len(POLICIES))]


# --- numbers -------------------------------------------------------------


@pytest.mark.parametrize("row", read_rows(HERE / "data" / "numbers.jsonl"))
def test_a_number_is_read_exactly_or_not_at_all(row):
    value = row["value"] and Fraction(row["value"])
    assert parse_number(row["text"]) == value


@CALM
@given(st.fractions())
def test_a_fraction_is_read_in_all_its_spellings(value):
    sign = "-" if value < 0 else ""
    top, bottom = abs(value.numerator), value.denominator
    whole, rest = divmod(top, bottom)
    for text in (
        f"{sign}{top}/{bottom}",
        f"\u2212{top}/{bottom}" if sign else f"+{top}/{bottom}",
        rf"${sign}\frac{{{top}}}{{{bottom}}}$",
        rf"\boxed{{{sign}\dfrac{{{top}}}{{{bottom}}}}}",
        f"{sign}{whole} {rest}/{bottom}",
    ):
        assert parse_number(text) == value, text


@CALM
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_a_decimal_is_read_in_all_its_spellings(value):
    expected = Fraction(value)
    for text in (f"{value}", f"{value:,}", f"${value:,}0", f"{value:e} km"):
        assert parse_number(text) == expected, text


@CALM
@given(st.text() | st.text("0123456789.,/e-+ $%\\{}frac^"))
def test_any_text_is_a_number_or_none(text):
    assert isinstance(parse_number(text), Fraction | None)


def test_only_the_outermost_boxes_count():
    text = r"\boxed{\fbox{1}, \boxed{2}} { \fbox{3} \boxed{4"
    assert rewards.numbers.boxes(text) == [
        (0, 27, r"\fbox{1}, \boxed{2}"),
        (30, 38, "3"),
    ]


# --- answers -------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_public_case(case):
    verdicts = [
        is_correct(case["input"], case["gold"], policy) for policy in POLICIES
    ]
    assert verdicts == verdicts_wanted(case["right_from"]), case["expected"]


@pytest.mark.parametrize("case", SYMBOLIC, ids=by_id)
def test_a_case_left_to_the_symbolic_part_never_pays(case):
    for policy in POLICIES:
        assert not is_correct(case["input"], case["gold"], policy)


def test_no_public_case_is_forgotten():
    path = SHARED / "cases" / "reward_cases.jsonl"
    if not path.exists():
        pytest.skip(f"the shared list of cases is not here: {path}")
    here = {case["id"] for case in CASES + SYMBOLIC} | CONTRACT_CASES
    assert here == {case["id"] for case in read_rows(path)}


@pytest.mark.parametrize("row", read_rows(HERE / "data" / "extraction.jsonl"))
def test_each_policy_reads_what_it_says(row):
    """A policy that a row does not name may say anything."""
    for policy in row.keys() & set(POLICIES):
        assert extract_answer(row["completion"], policy) == row[policy]


def test_an_unknown_policy_is_refused():
    with pytest.raises(RewardError, match="'tagged', 'stated', 'flexible'"):
        extract_answer("18", "strict")


@CALM
@given(st.text(), st.integers())
def test_nothing_is_read_from_a_reasoning_that_never_closed(text, number):
    for tag in ("<reasoning>", "<think>"):
        for policy in POLICIES:
            cut_off = f"{tag}<answer>{number}</answer> {number}"
            assert extract_answer(cut_off, policy) is None


@pytest.mark.parametrize(
    ("gold", "value"),
    [
        ("9 + 9 = <<9+9=18>>18 clips\n#### 18", 18),
        ("#### 1\n#### 70,000", 70000),
        ("#### -3", -3),
        ("033", 33),
        (18, 18),
        (2.5, Fraction(5, 2)),
        (r"\dfrac{9}{7}", Fraction(9, 7)),
        ("the answer is 5\n#### five", None),
        ("I count 5 apples", None),
        ("1331 and 1728", None),
        ("$1,2$", None),
        (None, None),
        (float("nan"), None),
        ("", None),
    ],
)
def test_a_gold_is_one_number_or_none(gold, value):
    assert gold_number(gold) == value


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("9 + 9 = <<9+9=18>>18 clips\n#### 18", "18"),
        ("the answer is 5\n#### five", "five"),
        ("#### \\boxed{5}", "5"),
        ("#### $18$", "18"),
        (r"So $x = \boxed{E}$", "E"),
        (r"Both \boxed{3} and \boxed{5}.", "3, 5"),
        ("It takes $5 + 3$ days. Therefore, the answer is: 180.", "180"),
        (r"\dfrac{9}{7}", r"\dfrac{9}{7}"),
        (r"1 - \sqrt{2}", r"1 - \sqrt{2}"),
        (
            r"\left( 3, \frac{\pi}{2} \right)",
            r"\left( 3, \frac{\pi}{2} \right)",
        ),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", ...),
        (r"$0.06 \text{ yuan}$", r"0.06 \text{ yuan}"),
        ("$a=1 \\text{ or } a=-2$", r"a=1 \text{ or } a=-2"),
        ("$$x^2$$", "x^2"),
        ("We get $x=5$ in the end for both of them.", "x=5"),
        ("$3$ and $5$", "$3$ and $5$"),
        ("x is any real number greater than 3", ...),
        *(("E", ...), ("east", ...), ("no solution", ...), ("1:30", ...)),
        *(("1331 and 1728", ...), ("033", ...), ("$200", ...)),
        ("72 clips sold in April and May", ...),
        (["3", 5], "3, 5"),
        *((18, "18"), (2.5, "2.5"), (-1, "-1")),
        *((None, None), ("None", None), ("N/A", None), ("nan", None)),
        *((float("nan"), None), ("null", None), ("", None), (" ", None)),
        *(("#### ", None), ("#### none", None), ("$None$", None), ("?", None)),
        ("no marker in this gold", None),
        ("We have $x=5$ and $y=3$ which is what was asked.", None),
        ("She sold 24 clips in May. That makes 72 in all.", None),
    ],
)
def test_the_answer_that_a_gold_states(gold, answer):
    if answer is ...:  # all of it
        answer = gold
    assert gold_answer(gold) == answer
    assert gold_number(gold) == parse_number(answer or "")


def test_the_callers_alarm_survives():
    signal.alarm(60)
    is_correct(r"\boxed{9^{9^{9^{9}}}}", "7", "flexible")
    assert 0 < signal.alarm(0) <= 60


@pytest.mark.parametrize(
    "unit",
    [
        *(r"\boxed{", "<answer>", "<reasoning></reasoning>", "answer is 5 "),
        *("answer", "#### ", "1 ", "1,", "9", "{", "=", "\n", "a ", "$", "$1"),
        *(
            r"\(",
            r"\[ ",
            "<answer ",
            "<think ",
            "answer to ",
            "answer: (",
            "(",
        ),
        *("answer: $a ", "x=", "\u200b", "answer is so ", "$x$ ", "\\text{"),
    ],
)
def test_time_grows_no_faster_than_the_text(unit):
    def seconds(length):
        text = unit * (length // len(unit))
        starts = [time.process_time()]
        for _ in range(3):
            is_correct(text, "7", "flexible")
            is_correct(f"<answer>{text}</answer>", "7")
            starts.append(time.process_time())
        return min(b - a for a, b in zip(starts, starts[1:], strict=False))

    # 16 times the text: 16 times the time if linear, 256 if quadratic.
    assert seconds(128_000) < 80 * seconds(8_000)


# --- the grader on real data ---------------------------------------------


@pytest.fixture(scope="module")
def golds():
    """All rows where there is a copy of GSM8K, else the 60 that we ship.

    They are the first of its test split (MIT licence, OpenAI,
    https://github.com/openai/grade-school-math).
    """
    files = list(GSM8K.glob("*.jsonl")) or [HERE / "data/gsm8k_rows.jsonl"]
    rows = [row for path in files for row in read_rows(path)]
    assert len(rows) >= 60
    return [row["answer"] for row in rows]


def spellings(n):
    """Return the integer n in all the forms that a policy may write."""
    sign, size = ("-", -n) if n < 0 else ("", n)
    mantissa = f"{n}"[: len(sign) + 1] + "." + (f"{size}"[1:] or "0")
    exponent = len(f"{size}") - 1
    return [
        *(f"{n}", f"{n}.0", f"{n:,}", f"{n:,}.00", f"{n}.", f"0{n}"[n < 0 :]),
        *(f"{sign}${size}", f"${n}", f"{sign}${size:,}.00", rf"\${n}"),
        *(f"{n} dollars", f"{n}%", rf"{n}\%", f"{n}kg", f"{n} km/h"),
        *(rf"{n}\text{{ clips}}", f"{n} of the eggs"),
        *(f"{n}e0", f"{mantissa}e{exponent}", f"{mantissa}E+{exponent}"),
        rf"{mantissa} \times 10^{{{exponent}}}",
        f"{mantissa} × 10^{exponent}",
        *(f"{2 * n}/2", f"{n}/1", rf"\frac{{{2 * n}}}{{2}}"),
        *(f"= {n}", f"x = {n}", f"{n - 1} + 1 = {n}", f"Total = {n} eggs"),
        *(f"\n{n}\n", f"**{n}**", f"`{n}`", f"${n}$", rf"\({n}\)"),
        *(rf"\boxed{{{n}}}", rf"\fbox{{{n}}}", rf"$\boxed{{\text{{{n}}}}}$"),
        f"{n}".replace("-", "\u2212"),
        f"\u200b{n}\ufeff",
        f"{n}".translate({48 + i: 0xFF10 + i for i in range(10)}),
    ]


STATEMENTS = [
    "#### {}",
    r"\boxed{{{}}}",
    "**Answer:** {}",
    "The answer is {}.",
]


def test_every_gold_is_right_in_every_spelling(golds):
    for gold in golds:
        number = gold_number(gold)
        for text in spellings(int(number)):
            assert parse_number(text) == number, (gold, text)
        assert is_correct(f"<answer>{number}</answer>", gold)
        assert is_correct(gold, gold, "stated")
        for statement in STATEMENTS:
            assert is_correct(statement.format(number), gold, "stated")


@CALM
@given(st.integers(-(10**15), 10**15), st.sampled_from(POLICIES))
def test_any_integer_is_right_against_itself_alone(number, policy):
    for text in spellings(number):
        block = f"<answer>{text}</answer>"
        for gold in (number, f"#### {number:,}", f"${number}$"):
            assert is_correct(block, gold, policy), (text, gold)
        assert not is_correct(block, number + 1, policy), text


def wrongs(gold):
    """Return answers that are wrong whatever the question was."""
    number = int(gold_number(gold))
    zero = ["0"] if number else []
    return [
        *(f"{number + 1}", f"{number}1", f"{number}.5", f"1{number:,}"),
        *(f"-{number}" if number > 0 else "1", f"{number}/3 + 1", *zero),
        *([f"{number / 100}", f"{number * 100}"] if number else []),
        *(f"{number} or {number + 1}", f"{number}, {number + 1}"),
        *("", " ", "None", "nan", "inf", "null", "N/A", "####", "-987654321"),
        *("True", "answer", "<answer>", "{answer}", "your answer here", "$"),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_constant_wrong_answer_is_wrong_everywhere(golds, policy):
    for gold in golds:
        for wrong in wrongs(gold):
            text = f"<answer>{wrong}</answer>"
            assert is_correct(text, gold, policy) is False, (wrong, gold)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wrong_statement_is_wrong_everywhere(golds, policy):
    for gold in golds[::10]:
        for wrong in wrongs(gold):
            for statement in STATEMENTS:
                text = statement.format(wrong)
                assert not is_correct(text, gold, policy), (text, gold)


def test_the_symbolic_grader_says_the_same_of_real_rows(golds):
    """It compares numbers too, and no row may start a process for that."""
    for gold in golds[:100]:
        number = int(gold_number(gold))
        texts = [f"<answer>{t}</answer>" for t in spellings(number)]
        assert set(accuracy_reward(texts, [gold] * len(texts))) == {1.0}, gold
        texts = [f"<answer>{t}</answer>" for t in wrongs(gold)]
        assert set(accuracy_reward(texts, [gold] * len(texts))) == {0.0}, gold
