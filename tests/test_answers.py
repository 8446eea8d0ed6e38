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
from rewards.numbers import last_box

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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("+18", 18),
        ("-18", -18),
        ("\u221218", -18),
        ("- 18", -18),
        ("007", 7),
        ("18.50", Fraction(37, 2)),
        (".5", Fraction(1, 2)),
        ("18.", 18),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1{,}000", 1000),
        (r"1\,000", 1000),
        ("1\u202f000", 1000),
        ("$18", 18),
        ("-$18", -18),
        ("$-18", -18),
        ("US$ 1,000", 1000),
        ("500 USD", 500),
        ("€5", 5),
        ("5 €", 5),
        (r"\$18 per day", 18),
        ("$18/day", 18),
        ("50%", 50),
        (r"50\%", 50),
        ("50 percent of the eggs", 50),
        ("5 km/h", 5),
        ("5 cm^2", 5),
        ("5 m²", 5),
        (r"90^\circ", 90),
        (r"5\,\text{cm}", 5),
        ("72 clips sold in April and May", 72),
        ("5 million", 5_000_000),
        ("70k", 70_000),
        ("70 kg", 70),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("1.5/2", Fraction(3, 4)),
        ("71/6", Fraction(71, 6)),
        ("2 1/2", Fraction(5, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        ("2 and 1/2", Fraction(5, 2)),
        ("2½ cups", Fraction(5, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac34", Fraction(3, 4)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("1.2e3", 1200),
        ("1E-3", Fraction(1, 1000)),
        ("1.2 × 10^3", 1200),
        (r"3.0 \times 10^{-2}", Fraction(3, 100)),
        ("1e999", 10**999),
        (r"\boxed{18}", 18),
        (r"\fbox{18}", 18),
        (r"$\boxed{\boxed{18}}$.", 18),
        (r"\(18\)", 18),
        (r"\[ 18 \]", 18),
        ("**18**", 18),
        ("`$18$`", 18),
        ("x = 18", 18),
        # full-width and invisible characters, other digits
        ("\uff11\uff0c\uff10\uff10\uff10\uff0e\uff15", Fraction(2001, 2)),
        ("\uff04\uff11\uff18", 18),
        ("1\u200b8\ufeff", 18),
        ("\u200e\u221218", -18),
        ("\U0001d7cf\U0001d7d6", 18),
        ("⅝", Fraction(5, 8)),
        ("2⅓ cups", Fraction(7, 3)),
        ("6÷2", 3),
        ("1.2 × 10³", 1200),
        ("1.2×10⁻³", Fraction(3, 2500)),
        # units: glued ones that are known, any word after a space
        *(("5km", 5), ("5mL", 5), ("5kg", 5), ("5hr", 5), ("5min", 5)),
        *(("5USD", 5), ("5lb", 5), ("5oz", 5), ("5ft", 5), ("5mph", 5)),
        *(("5cm^2", 5), ("5m²", 5), ("5µm", 5), ("5kWh", 5), ("5th", 5)),
        *(("12pm", 12), ("5m", 5), ("5g", 5), ("5dollars", 5), ("5 xy", 5)),
        ("18 a day", 18),
        ("5 rooms of type B", 5),
        ("18 (dollars)", 18),
        (r"18\text{ yuan}", 18),
        (r"18\,\mathrm{cm}", 18),
        (r"\text{18}", 18),
        (r"\$18", 18),
        (r"\boxed{18.}", 18),
        ("negative 18", -18),
        ("Minus 1/2", Fraction(-1, 2)),
        (r"\dfrac12", Fraction(1, 2)),
        (r"\frac3{4}", Fraction(3, 4)),
        (r"-\frac{3}4", Fraction(-3, 4)),
        # what follows the last equals sign
        ("9 + 9 = 18", 18),
        ("= 18", 18),
        ("1/2 = 0.5", Fraction(1, 2)),
        ("x_1 = 5", 5),
        ("f(2) = 5", 5),
        ("AB = 5 cm", 5),
        (r"\theta = 30^\circ", 30),
        (r"\angle ABC = 30^\circ", 30),
        ("Total cost = $15.00", 15),
        ("Total = 5 * 3 = 15", 15),
        ("3 x 4 = 12", 12),
        ("$200,000 - $130,000 = $70,000.", 70000),
        ("3 boys + 4 girls = 7 children", 7),
        ("5cm + 3cm = 8cm", 8),
        (r"\frac{5 + 3}{2} = 4", 4),
        (r"16 \div 2 = 8", 8),
        (r"$3 \times 5 = 15 \text{ eggs}$", 15),
    ],
)
def test_a_number_is_read_exactly(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "-", "$", "%", ".", "e5", "1e", "nan", "inf", "None"),
        *("12,34", "1,23,456", "1234,567", "0,123", "1.2.3", "1_000"),
        *("--5", "+-5", "0x10", "5e5e5", "1e1000", "1e9999999"),
        *("1/0", r"\frac{1}{0}", "1/2/3", "4 10/3", "2 -1/2", "1/2 1/3"),
        *("3, 5", "3 or 4", "3-5", "(3, 4)", "12:00", "1 2 3"),
        *("5 ft 3 in", "3 hours 20 minutes", "18 not 17", "not 18"),
        *("5x", "2n", "5i", "14 - i", "5 pi", "5π", r"5\pi", "5²", "10⁵"),
        *("2ab", "3xy", "2xyz", "2AB", "2ab^2", "5x^2", "2m n", "3 sin x"),
        *("5 times x", "5 over x", "5 divided by x", "5 mod n", "5e"),
        *("2x = 18", "x + y = 5", "2ab = 5", "17 = 18", "x = 3 = 4", "y = 2x"),
        *("3x = 12", "3, 4 = 12", "x = 3, y = 5", "5 = x", "18 = 9 + 9"),
        *("72 minutes = 1.2 hours", "17 or maybe 1 = 18", "9 + 9 =", "="),
        *("5,00", "1.234,50", "1:30", "3:2", "2020-12-25", "12/25/2020"),
        *("18 (thousand)", "18 (19)", "18 (x)", "5 out of 7", "1 000"),
        r"\boxed{3}, \boxed{5}",
        *("5 and a half", "5 plus three", "5 squared", "5!", "5+3", "2^3"),
        *(r"\sqrt{4}", r"4\sqrt(2)", r"\frac{1 2}{3}", "five", "٣"),
        "5 long words that go on and on and on",
        *("__import__('os').getpid()", "9" * 1001),
    ],
)
def test_what_is_not_one_number_is_none(text):
    assert parse_number(text) is None


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
    assert last_box(text) == (30, "3")
    assert last_box(r"\boxed form") is None


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


@pytest.mark.parametrize(
    ("completion", "answers"),
    [
        ("<answer>\n18\n</answer>", ["18"] * 3),
        ("<answer>1</answer> or <answer>2</answer>", ["2"] * 3),
        ("<answer>1</answer> then <answer>2", ["1"] * 3),
        ("<answer>1</answer> then </answer>", ["1"] * 3),
        ("<answer>The answer is 18.</answer>", ["18"] * 3),
        ("<answer></answer> The answer is 18.", [""] * 3),
        ("<answer>18</answer><|im_end|><answer>5</answer>", ["18"] * 3),
        ("<answer>18<|eot_id|></answer>", [None] * 3),
        ("<reasoning><answer>18</answer>", [None] * 3),
        ("<reasoning><answer>18</answer></reasoning>", [None] * 3),
        ("<answer>18</answer><think>but if", [None] * 3),
        ("So it is 18.\n<answer>1", [None] * 3),
        ("#### 18", [None, "18", "18"]),
        ("#### 18\n#### Check the result", [None, "18", "18"]),
        ("The answer is 5. No, the answer is 6.", [None, "6", "6"]),
        (r"\boxed{5}. Hence the answer is 6.", [None, "6", "6"]),
        (r"The answer is 6. So \boxed{5x}", [None, "5x", "5x"]),
        (r"\boxed{\{1, 2\}} and \boxed{3", [None, r"\{1, 2\}", r"\{1, 2\}"]),
        (r"{ \boxed{\{} and \{ 2", [None, r"\{", r"\{"]),
        ("The answer is 3, 5 and 7.", [None, "3, 5 and 7", "3, 5 and 7"]),
        ("**Final Answer**: **73**", [None, "73", "73"]),
        ("Answer:\n\n$18$", [None, "$18$", "$18$"]),
        ("Answer: we add. 9+9=18.", [None, None, "18"]),
        ("It follows that y = 5x+3", [None, None, "5x+3"]),
        ("The board is 2 1/2 feet long", [None, None, "2 1/2"]),
        ("so x=2 1/2.", [None, None, "2 1/2"]),
        ("so 2 = 4/2", [None, None, "4/2"]),
        ("No idea.", [None, None, None]),
    ],
)
def test_each_policy_reads_what_it_says(completion, answers):
    assert [extract_answer(completion, p) for p in POLICIES] == answers


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<ANSWER>18</ANSWER>", "18"),
        ('<answer type="int" id=1>18</answer >', "18"),
        ("<answer><answer>18</answer></answer>", "18"),
        ("**<answer>**18**</answer>**", "**18**"),
        ("<answers>18</answers>", None),
        ("<answer/>18</answer>", None),
        ("<answer>18</ANSWER> or <Answer>1", "18"),
        ("<Think><answer>18</answer>", None),
        ('<THINK a="b">so</THINK><answer>18</answer>', "18"),
        ("<answer>18</answer><REASONING>", None),
        ("<answer>18</answer><\uff5cend\u2581of\u2581sentence\uff5c>5", "18"),
        (r"<answer>\boxed{3}, \boxed{5}</answer>", "3, 5"),
        ("<answer>Answer: east</answer>", "east"),
    ],
)
def test_the_tags_that_are_read(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        # boxes in a row are one statement, a later box is a correction
        (r"\boxed{3}, \boxed{5}, \boxed{7}", "3, 5, 7"),
        (r"\boxed{3} and $\boxed{5}$; \(\boxed{7}\)", "3, 5, 7"),
        ("\\boxed{3} or\n\\boxed{5}", "3, 5"),
        (r"\boxed{3},\ \boxed{5} \text{ and } \boxed{7}", "3, 5, 7"),
        (r"\boxed{3} \boxed{3}", "3"),
        (r"\boxed{3}, so \boxed{5}", "5"),
        (r"\boxed{1}, \boxed{2}. No: \boxed{3}, \boxed{4}", "3, 4"),
        (r"\boxed{\boxed{3}, \boxed{5}}", r"\boxed{3}, \boxed{5}"),
        # words and formulas after a label
        ("Answer: E", "E"),
        ("**Answer:** east", "east"),
        ("**Answer: B**", "B"),
        ("The answer is (B).", "(B)"),
        ("The correct answer is option C.", "C"),
        ("The correct choice is **C**.", "C"),
        ("The answer is yes.", "yes"),
        ("The answer is no.", "no"),
        ("Answer: the blue car", "the blue car"),
        ("The answer is Monday, as was said.", "Monday"),
        ("Answer: no solution", "no solution"),
        ("Answer:\neast", "east"),
        ("Answer: (3, 4)", "(3, 4)"),
        ("The answer is (a, b), as shown.", "(a, b)"),
        ("The answer is $x = 3, y = 4$.", "$x = 3, y = 4$"),
        ("The answer is x = 5 or x = -2.", "x = 5 or x = -2"),
        ("The answer is $x \\in (0, 1)$.", r"$x \in (0, 1)$"),
        ("The answer is\n\\[\\frac{a}{b}\\]", r"\[\frac{a}{b}\]"),
        ("The answer is 5:30 pm.", "5:30 pm"),
        ("#### \\frac{1}{2}", r"\frac{1}{2}"),
        ("#### B", "B"),
        # numbers in more sentences
        ("The answer is therefore 5.", "5"),
        ("The answer to the second problem is 18.", "18"),
        ("Answer (in dollars): 5", "5"),
        ("Ans: 5", "5"),
        ("The answer is 72!", "72"),
        ("The answer is 72 because she sold 24.", "72"),
        ("Answer: 18 (since 9 + 9 = 18)", "18"),
        ("The answer is $5. Then we pay $6.", "$5"),
        ("Answer: 9 + 9 = 18", "9 + 9 = 18"),
        ("The answer is 5 or 6.", "5 or 6"),
        # prose about an answer is none
        ("the answer is obviously what we computed above, so", None),
        ("The answer is correct.", None),
        ("The answer is simple: we add.", None),
        ("The answer is as follows:", None),
        ("The answer is the total cost, $18.", None),
        ("Answer: let us see", None),
        ("Answer: James has apples.", None),
        ("Answer:\nStep 1: add. Then stop.", None),
        ("Answer:\nRed apples\nGreen pears", None),
        ("The answer is not 5.", None),
        ("The answer isn't 5.", None),
        ("What is the answer? Five.", None),
        ("#### Step\n#### Conclusion", None),
        ("The answer is " + "1 + " * 60 + "1", None),  # too long
    ],
)
def test_a_final_statement(completion, answer):
    assert extract_answer(completion, "stated") == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (
            r"$y = -\frac{1}{2}x + \frac{3}{4}$",
            r"y = -\frac{1}{2}x + \frac{3}{4}",
        ),
        (r"It is $y = \frac{3}{4}$.", r"y = \frac{3}{4}"),
        ("so x lies in $[2,5)$", "[2,5)"),
        (r"$a=-2 \text{ or } a=1$", r"a=-2 \text{ or } a=1"),
        ("We get\n$$\nx = 5\n$$\nas wanted", "x = 5"),
        (r"We get \(x = 5\) here", "x = 5"),
        ("So $5 + 3 = 8$ eggs", "5 + 3 = 8"),
        (r"Hence \[x^2\]", "x^2"),
        ("so it is $E$", "E"),
        ("18 is the value of $x$.", "18"),
        (r"The total is \(5\) and 6 more", "6"),
        # two prices are no maths
        ("It gains $200,000 - $130,000 = $70,000.", "$70,000"),
        ("It costs $5 or $6.", "$6"),
        ("It costs US$ 5 and US$ 6", "6"),
        ("It costs $5\u2013$6", "$5\u2013$6"),
        ("It costs 5$ or 6$", "6$"),
        ("He pays $5-$6 (or $7)", "$7"),
        ("He pays $5.\nThen he pays $6", "$6"),
        # a line of maths, and nothing else
        ("14 - i", "14 - i"),
        ("1331 and 1728", "1331 and 1728"),
        ("4.123105625617661", "4.123105625617661"),
        ("11 5/6", "11 5/6"),
        ("**2x + 3**", "2x + 3"),
        ("72 cm", "72"),
        ("E", "E"),
        ("(B)", "(B)"),
        ("Yes, 18", "18"),
        ("18, then 19", "19"),
        *(("I don't know.", None), ("-", None), ("$$", None), ("", None)),
    ],
)
def test_what_stands_last(completion, answer):
    assert extract_answer(completion, "stated") is None
    assert extract_answer(completion, "flexible") == answer


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
