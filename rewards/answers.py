r"""Take the answer out of a completion and compare it with the gold.

Where an answer may stand is a policy. Each policy reads all that the one
before it reads, and one thing more:

=============  ==========================================================
``"tagged"``   the last closed <answer> block after the reasoning
``"stated"``   else the last final statement: a box, ``#### 8``,
               "the answer is 8", ``**Answer:** (B)``
``"flexible"`` else the maths ``$...$`` or the number that stands last;
               all of the text, where it is no more than a line of maths
=============  ==========================================================

Training uses ``"tagged"``, the strictest. Evaluation may use another, to be
fair to a model that was never told of the tags, and says which one it used.

No policy reads past the first end-of-turn token, and none reads inside the
reasoning: only what follows the last reasoning tag counts, and where that tag
is an opening one, the completion was cut off and gave no answer. Tags are
read in any case and with attributes, as the meaning of ``<ANSWER id="1">`` is
clear; only the rewards for form ask for the exact spelling.

Every pattern here runs in linear time, whatever the text.
"""

import ast
import ctypes
import functools
import json
import math
import re
from fractions import Fraction
from typing import Any

from rewards.batch import RewardError
from rewards.health import Outcome
from rewards.numbers import (
    MAX_ANSWER_CHARS,
    Quantity,
    box_statement,
    boxes,
    has_percent,
    parse_number,
    parse_quantity,
    possible_values,
    readings,
)
from rewards.turns import after_reasoning, before_next_question, first_turn

POLICIES = ("tagged", "stated", "flexible")
MAX_STATEMENT_CHARS = 200  # a formula or a number with its unit fits
MAX_LABELS = 20  # of so many, one states something, or none does
MAX_WORDS = 3  # more than "the blue car" is prose

# GSM8K's notes to a calculator: "48/2 = <<48/2=24>>24 clips"
_CALCULATION = re.compile(r"<<[^<>\n]{1,200}>>")
_ANSWER_TAG = re.compile(r"<(/?)answer(?:\s[^<>]*)?>", re.IGNORECASE)
# An item of a list on a line of its own: its mark is no sign and no number.
_ITEM = re.compile(r"\n[ \t]*(?:[-*+•–]|[0-9]{1,2}[.)])[ \t]+(?=\S)")
MAX_ITEMS = 20
_LABEL = re.compile(
    r"####|(?<![A-Za-z])"
    r"(?:ans(?:wers?)?|(?:correct|right|best) (?:option|choice))"
    r"(?: to [^.:=\n]{1,60}?)?(?: \([^()\n]{1,40}\))?"
    r"[*_\s]*(?:(?:is|are|would be|will be|must be)\b|[:=])",
    re.IGNORECASE,
)
_LABEL_END = re.compile(
    r"(?:[\s*_:]+|(?:therefore|thus|then|hence|so|simply|just|exactly|indeed"
    r"|clearly|approximately|about|equal to|option|choice)\b)*",
    re.IGNORECASE,
)
# Where the sentence ends, or goes on: "72, in total", "72 because 3*24 = 72".
# A comma before a digit or an "and" stays: "3, 5" is not the number 3.
_STATEMENT_END = re.compile(
    r"\n|[.;?!](?=[\s*_]|$)|,\s+(?=[A-Za-z])(?!(?:and|or)\b)"
    r"|\s\(?(?=(?:because|since)\b)"
)
_BRACKETS = re.compile(r"\([^()\n]*\)|\[[^][\n]*\]|\{[^{}\n]*\}")
_MIXED_NUMBER = re.compile(r"[-\u2212+$(]*[0-9]+ (?:[0-9]+/|\\[dtc]?frac)\S+")

_UNSPACED = re.compile(
    "[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff01-\uff0f\uff1a-\uff5e]+"
)
_MATHS_DELIMITER = re.compile(r"\\[\\()\[\]$]|\$\$?")
_CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_LATEX_WORDS = re.compile(
    r"\\(?:text[a-z]*|mbox|hbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}"
    r"|\\[A-Za-z]+"
)
# of any script but Greek, whose letters are variables
_WORD = re.compile(r"[A-Za-z]+'?[A-Za-z]+|[^\W\d_A-Za-z\u0370-\u03ff]{2,}")
_JOINS = frozenset({"and", "or"})
_MATHS_WORDS = _JOINS | {"sin", "cos", "tan", "log", "mod", "max", "min"}
_NUMERAL_OR_SIGN = re.compile(r"[0-9\\^=<>+*/∞π√]")
_OPTION_LETTER = re.compile(r"^\s*\(?[A-J][).:]\s+(?=\S)")
_OPTION = re.compile(r"\(?[A-Za-z]\)?\.?")
# A short statement with one of these is prose about an answer, not one.
_PROSE = frozenset(
    re.split(
        r"\s+",
        """we let us you it its this that these those which what how why when
        where who not now then thus so hence therefore because since if as
        is are was were be been being has have had do does did can could
        should will would may might must to of for from with by at on in into
        out there here above below follows following found given shown
        computed calculated obtained obvious obviously clear clearly simple
        simply easy easily correct incorrect right wrong valid unclear unknown
        sure same still already also only just probably maybe perhaps step
        steps solution number total sum value amount difference product
        quotient result cost price answer question problem need want she he
        they his her their my our your i'm let's wait first next finally
        check see add subtract multiply divide consider note using use""",
    )
)
# NuminaMath writes "proof" and "notfound" where a task has no final answer.
_NO_GOLD = frozenset(
    {"", "none", "null", "nan", "n/a", "<na>", "proof", "notfound"}
)


def extract_answer(completion: str, policy: str = "tagged") -> str | None:
    r"""Return the answer that `completion` gives, as text, or None.

    `completion` is a string, `policy` one of POLICIES (see the head of this
    module). Inside the tags, a box or a final statement is unwrapped; several
    boxes in a row are one answer, "3, 5, 7". An empty answer block gives "".
    Raises RewardError for an unknown policy.

    >>> extract_answer("<reasoning>9+9</reasoning><answer>\n18\n</answer>")
    '18'
    >>> extract_answer("<think>So</think><answer>$\\boxed{18}$</answer>")
    '18'
    >>> text = "She sold 9 and 9. The answer is **18**, in all. Fine by 2?"
    >>> [extract_answer(text, policy) for policy in POLICIES]
    [None, '18', '18']
    >>> extract_answer("9 + 9 makes 18.", "flexible")
    '18'
    >>> extract_answer(r"Hence $y = \frac{1}{2}x + 3$.", "flexible")
    'y = \\frac{1}{2}x + 3'
    >>> extract_answer("<reasoning>9 + 9 makes 18", "flexible") is None
    True

    Source: a strict and a flexible reading, as the GSM8K task of lm-
    evaluation-harness has them, and the last box of MATH (Hendrycks et al.,
    2021, arXiv:2103.03874).
    """
    return answer_in_turn(first_turn(completion), policy)


def answer_in_turn(turn: str, policy: str = "tagged") -> str | None:
    """Return what `extract_answer` does for a turn as `read_turns` gives it.

    >>> answer_in_turn("<answer>18</answer>")
    '18'
    """
    if policy not in POLICIES:
        raise RewardError(
            f"There is no policy {policy!r:.60} for reading an answer. Choose "
            f"one of {', '.join(map(repr, POLICIES))}."
        )
    text = after_reasoning(turn)
    if "<<" in text:
        text = _CALCULATION.sub("", text)
    tagged = _last_closed_answer(text)
    if tagged is None or text.count("nswer>") > 2:  # not just one block
        text = before_next_question(text, _has_answer)
        tagged = _last_closed_answer(text)
    if tagged is not None:
        return _final_statement(tagged) or tagged.strip()
    # An <answer> that was never closed was cut off: "7" may stand for "72".
    if policy == "tagged" or _ANSWER_TAG.search(text):
        return None
    stated = _final_statement(text)
    if stated or policy == "stated":
        return stated
    return _what_stands_last(text)


def _has_answer(text: str) -> bool:
    return (_last_closed_answer(text) or _final_statement(text)) is not None


def gold_answer(gold: Any) -> str | None:
    r"""Return the answer that a gold states, as text, or None.

    `gold` is a number, a solution that ends with GSM8K's ``#### N``, one that
    states its answer in a box or in words, or the bare answer: a number, a
    formula with or without its dollar signs, a few words. A list of values,
    in JSON too, is one answer of several values. What numpy and torch hold is
    read as what it holds. None means that there is no answer in it: it is
    empty, None, "N/A", "proof" or the like, a record, or it is prose that
    states nothing.

    >>> gold_answer("9 + 9 = 18 clips.\n#### 18")
    '18'
    >>> gold_answer(r"Hence the answer is $\boxed{\frac{9}{7}}$.")
    '\\frac{9}{7}'
    >>> gold_answer("$x^2$"), gold_answer(" 1331 and 1728"), gold_answer("E")
    ('x^2', '1331 and 1728', 'E')
    >>> print(gold_answer("no number in here"), gold_answer(None))
    None None

    Source: the marker #### of GSM8K (Cobbe et al., 2021, arXiv:2110.14168) and
    the box of MATH (Hendrycks et al., 2021, arXiv:2103.03874).
    """
    if hasattr(gold, "tolist"):
        gold = gold.tolist()  # a number or an array of numpy or torch
    if isinstance(gold, str) and gold.startswith(('["', "['")):
        gold = _written_list(gold)
    if isinstance(gold, dict | bytes | bool | complex):
        return None
    if isinstance(gold, int) and abs(gold) >= 10**MAX_ANSWER_CHARS:
        return None  # Python would not even write it
    if isinstance(gold, list | tuple):
        gold = ", ".join(map(_as_typed, gold))
    return _gold_text(gold if isinstance(gold, str) else _as_typed(gold))


def gold_number(gold: Any) -> Fraction | None:
    r"""Return the number in a gold answer as a Fraction, or None.

    `gold` is what `gold_answer` takes. None means that its answer can't be
    read as one number.

    >>> gold_number("9 + 9 = 18 clips.\n#### 18")
    Fraction(18, 1)
    >>> gold_number(r"Hence the answer is $\boxed{\frac{9}{7}}$.")
    Fraction(9, 7)
    >>> gold_number(-2.5)
    Fraction(-5, 2)
    >>> print(gold_number("no number in here"), gold_number(None))
    None None

    Source: as for `gold_answer`.
    """
    quantity = _gold_value(gold_answer(gold) or "")
    return None if quantity is None else quantity.value


def is_correct(
    completion: str, gold: Any, policy: str = "tagged"
) -> bool | None:
    """Tell whether the answer in `completion` equals the gold number.

    Returns True, False, or None when the gold can't be read: then nobody
    knows, and a reward must neither pay nor punish.

    >>> is_correct("<answer>1,000.0</answer>", "#### 1000")
    True
    >>> is_correct("That makes 1000.", "#### 1000")
    False
    >>> is_correct("That makes 1000.", "#### 1000", policy="flexible")
    True
    >>> is_correct("<answer>None</answer>", "no number in here") is None
    True

    Source: the exact match of GSM8K (Cobbe et al., 2021, arXiv:2110.14168), by
    value instead of by text.
    """
    outcome = compare_numbers(extract_answer(completion, policy), gold)
    return None if outcome is Outcome.NO_GOLD else outcome is Outcome.RIGHT


def compare_numbers(answer: str | None, gold: Any) -> Outcome:
    """Return what became of an answer, as a `health.Outcome`.

    `answer` is the text that `extract_answer` gives, `gold` what
    `gold_number` takes.

    >>> [str(compare_numbers(a, "#### 1000")) for a in ("1,000.0", "999")]
    ['right', 'wrong']
    >>> [str(compare_numbers(a, "#### 1000")) for a in ("many", None)]
    ['unreadable', 'no_answer']
    """
    text = gold_answer(gold) or ""
    expected = _gold_value(text)
    if expected is None:
        return Outcome.NO_GOLD
    if not answer:
        return Outcome.NO_ANSWER
    if answer == text:
        return Outcome.RIGHT
    quantity = parse_quantity(answer)
    found = [quantity] if quantity is not None else _readings(answer)
    for one in found:
        if expected.equals(one):
            return Outcome.RIGHT
    if expected.value in ([] if found else possible_values(answer)):
        return Outcome.UNDECIDED
    if not found:
        return Outcome.UNREADABLE
    if _percent(answer, text, found[0].value, expected.value):
        return Outcome.RIGHT
    return Outcome.WRONG


def _readings(answer: str) -> list[Quantity]:
    """Return the numbers that stand around a sign or behind a letter."""
    answer = _OPTION_LETTER.sub("", answer, count=1)
    found = map(parse_quantity, readings(answer))
    return [quantity for quantity in found if quantity is not None]


def _percent(
    answer: str, gold: str, number: Fraction, expected: Fraction
) -> bool:
    """50% is 50 on some pages and 0.5 on others: either is right."""
    if has_percent(answer):
        return not has_percent(gold) and number == 100 * expected
    return has_percent(gold) and expected == 100 * number


def _last_closed_answer(text: str) -> str | None:
    """Return what is in the last <answer> directly followed by </answer>."""
    answer = opener = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            opener = tag
        elif opener:
            answer, opener = text[opener.end() : tag.start()], None
    return answer


# --- Final statements -------------------------------------------------------


def _final_statement(text: str) -> str | None:
    """Return the box or the labelled statement that stands last, or None."""
    box = box_statement(text)
    label = _last_labelled(text)
    if box and label:
        return max(box, label)[1]  # both are (position, text)
    return (box or label or (0, None))[1]


def _last_labelled(text: str) -> tuple[int, str | None] | None:
    """Return (position, text) of the last label that a statement follows.

    A label without one ("Answer: let us see", a heading "#### Step") states
    nothing.
    """
    labels = list(_LABEL.finditer(text))[-MAX_LABELS:]
    inside = [(start, end) for start, end, _ in boxes(text)] if labels else []
    for label in reversed(labels):
        if any(start < label.start() < end for start, end in inside):
            continue  # the box is the statement
        if listed := _listed(text, label.end()):
            return label.start(), listed
        end_of_label = _LABEL_END.match(text, label.end())
        assert end_of_label  # it matches nothing, too
        start = end_of_label.end()
        statement, end = _sentence(text, start)
        if parse_number(statement) is not None or _is_maths(statement):
            return label.start(), statement
        same_line = "\n" not in text[label.end() : start]
        if (
            label[0] != "####"
            and (same_line or not text[end:].strip(" \n*_`."))
            and _is_short(statement)
        ):
            return label.start(), statement
    return None


def _listed(text: str, start: int) -> str:
    r"""Return the values of the list that begins at `start`, or "".

    >>> _listed("**Answer:**\n\n- 18\n- $20", 9), _listed("Answer: - 18", 7)
    ('18, $20', '')
    """
    values: list[str] = []
    blank = re.compile(r"[\s*_]*(?=\n)").match(text, start)
    at = blank.end() if blank else start
    while (item := _ITEM.match(text, at)) and len(values) < MAX_ITEMS:
        end = text.find("\n", item.end())
        at = len(text) if end < 0 else end
        values.append(text[item.end() : at].strip(" *_`."))
        while text.startswith("\n\n", at):
            at += 1
    whole = all(parse_number(v) is not None or _is_maths(v) for v in values)
    return ", ".join(values) if whole else ""


def _sentence(text: str, start: int) -> tuple[str, int]:
    """Return the sentence at `start` without its marks, and where it ends.

    What is in brackets or between dollar signs belongs together. A sentence
    that is too long for a statement gives "".
    """
    rest = text[start : start + MAX_STATEMENT_CHARS]
    together = [(s, e) for s, e, _ in _maths_segments(rest)]
    together += [match.span() for match in _BRACKETS.finditer(rest)]
    for end in _STATEMENT_END.finditer(rest):
        if not any(s < end.start() < e - 1 for s, e in together):
            return rest[: end.start()].strip(" *_`"), start + end.start()
    if len(text) > start + MAX_STATEMENT_CHARS:
        return "", start
    return rest.strip(" *_`"), len(text)


def _is_maths(text: str) -> bool:
    """Tell whether a sentence is maths, or the letter of an option."""
    return bool(not _words(text) and _NUMERAL_OR_SIGN.search(text)) or bool(
        _OPTION.fullmatch(text)
    )


def _is_short(text: str) -> bool:
    """Tell whether a sentence is a few words that can be an answer."""
    words = _words(text)
    return (
        bool(re.search(r"\w", text))
        and len(words) <= MAX_WORDS
        and (
            not _PROSE.intersection(map(str.lower, words))
            or text.lower() in ("no solution", "no solutions")
        )
    )


def _words(text: str) -> list[str]:
    """Return the plain words in a text: no LaTeX and nothing in `$...$`."""
    for start, end, _ in reversed(_maths_segments(text)):
        text = f"{text[:start]} $ {text[end:]}"
    words = _WORD.findall(_LATEX_WORDS.sub(" ", text))
    return [word for word in words if word.lower() not in _MATHS_WORDS]


# --- Maths in a text --------------------------------------------------------


def _maths_segments(text: str) -> list[tuple[int, int, str]]:
    r"""Return (start, end, content) of each `$...$`, `\(...\)` and the like.

    >>> _maths_segments(r"so $x = 5$ and \(y\), but $5, $6 or $7-$8")
    [(3, 10, 'x = 5'), (15, 20, 'y')]
    """
    segments, opener = [], None
    for mark in _MATHS_DELIMITER.finditer(text):
        if opener and mark[0] == _CLOSING[opener[0]]:
            content = text[opener.end() : mark.start()]
            after = text[mark.end() : mark.end() + 2]
            if mark[0] != "$" or _between_dollars(content, after):
                segments.append((opener.start(), mark.end(), content.strip()))
                opener = None
                continue
        if mark[0] in _CLOSING:
            opener = mark
    return segments


def _between_dollars(content: str, after: str) -> bool:
    """Tell whether two dollar signs enclose maths, and are no two prices."""
    inner = content.strip()
    return (
        bool(inner)
        and "\n" not in content
        and content[0].isspace() == content[-1].isspace()
        and not after.strip()[:1].isdigit()
        and inner[-1] not in "-+*/=,(<"
        and not re.search(r"\b(?:and|or)$", inner)
        and not re.search(r"[a-z]{4,}", _LATEX_WORDS.sub(" ", inner))
    )


def _bare(text: str) -> str:
    """Return `text` without dollar signs that enclose all of it."""
    text = text.strip()
    segments = _maths_segments(text)
    if len(segments) == 1 and segments[0][:2] == (0, len(text.rstrip("."))):
        return segments[0][2]
    return text


def _what_stands_last(text: str) -> str | None:
    """Return the maths or the number that stands last in a text, or None."""
    line = text.strip()
    if "\n" not in line and len(line) <= MAX_STATEMENT_CHARS:
        line = line.strip("*_`")
        if _is_maths(line):
            return _bare(line)
    position, number = _last_number(text)
    segments = _maths_segments(text)
    if number is not None:
        segments = [s for s in segments if not s[2].isalpha()]
    if segments and position < segments[-1][1]:
        return segments[-1][2]
    return number


def _last_number(text: str) -> tuple[int, str | None]:
    """Return (position, word) of the last word with a digit, or (-1, None).

    The whole word, so that "5x+3" does not pass for 3, but only what follows
    an equals sign, and with the integer before it when it is a mixed number.
    """
    # No blanks set words apart in these scripts.
    text = _UNSPACED.sub(lambda run: " " * len(run[0]), text)
    words = list(re.finditer(r"\S+", text))
    while words and not re.search(r"\d", words[-1][0]):
        words.pop()
    if not words:
        return -1, None
    number = words[-1][0].rpartition("=")[2]
    pair = " ".join(word[0] for word in words[-2:]).rpartition("=")[2].strip()
    if _MIXED_NUMBER.fullmatch(pair):
        number = pair
    return words[-1].start(), number.strip("()*_`").rstrip("()*_`.,;:!?")


# --- Golds ------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _gold_value(text: str) -> Quantity | None:
    """Return the quantity of a gold; "3k" may be thousands or a product."""
    quantity = parse_quantity(text)
    if "k" in text and parse_quantity(text, variables=True) is None:
        return None
    return quantity


@functools.lru_cache(maxsize=4096)  # each gold is asked for once a completion
def _gold_text(text: str) -> str | None:
    _, marker, after = text.rpartition("####")
    answer = _final_statement(after if marker else text)
    if answer is None:
        answer = after if marker else _bare_gold(text)
    answer = _bare(answer)
    if "." in answer:
        answer = _as_typed(answer)
    return None if answer.lower() in _NO_GOLD else answer


def _written_list(text: str) -> Any:
    """Return the list that a text is in JSON, in Python or of numpy."""
    if re.fullmatch(r"\[(?:'[^']*'\s+)+'[^']*'\]", text):  # of numpy
        return re.findall(r"'([^']*)'", text)
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


_FLOAT = re.compile(r"[-+]?[0-9]*\.[0-9]{10,}(?:e[-+]?[0-9]+)?")


def _as_typed(value: Any) -> str:
    """Return a value as text, without the rounding of a binary fraction.

    0.7000000000000001 is 0.7 after a calculation in 64 bit, and
    2.700000047683716 is 2.7 after it was kept in 32.

    >>> _as_typed(0.1 + 0.2), _as_typed("2.700000047683716"), _as_typed(1 / 3)
    ('0.3', '2.7', '0.3333333333333333')
    """
    text = str(value)
    if not _FLOAT.fullmatch(text):
        return text
    number = float(text)
    if not math.isfinite(number):
        return text
    candidates = [f"{number:.15g}"]
    if _in_32_bit(number) == number:
        candidates += [f"{number:.{n}g}" for n in range(1, 7)]
    for short in candidates:
        same = float(short) == number or _in_32_bit(float(short)) == number
        near = abs(float(short) - number) <= 1e-15 * abs(number)
        digits = len(re.sub("[^0-9]", "", short))
        if (same or near) and digits <= 12 and "e" not in short:
            return short
    return text


def _in_32_bit(number: float) -> float:
    return ctypes.c_float(number).value


def _bare_gold(text: str) -> str:
    """Return the answer in a gold that marks none, or ""."""
    text = text.strip()
    if parse_number(text) is not None or len(_words(text)) <= MAX_WORDS:
        return text if re.search(r"\w", text) else ""
    if segments := _maths_segments(text):
        return segments[0][2] if len(segments) == 1 else ""
    one_line = not _STATEMENT_END.search(text.rstrip("."))
    return text if one_line and _NUMERAL_OR_SIGN.search(text) else ""
