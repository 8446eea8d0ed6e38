r"""Tell whether two mathematical texts mean the same.

`judge` compares the text of an answer with the text of a gold, as
`rewards.notation` reads them: value by value, with brackets and order where
they mean something. Single expressions go to `rewards.values`, conditions to
`rewards.conditions`. What is neither a value nor a relation, such as a
difference of sets, is left to `math_verify.verify`.
"""

import re
from fractions import Fraction
from typing import Any

from rewards.conditions import KINDS, is_domain, same_conditions, set_of
from rewards.markup import MAX_CHARS, clean, squeezed, without_domain
from rewards.notation import (
    Bracketed,
    Condition,
    Either,
    Equation,
    Expression,
    Inequality,
    Joint,
    Number,
    Several,
    Unreadable,
    Words,
    named,
    option,
    read,
)
from rewards.numbers import (
    has_percent,
    parse_quantity,
    possible_values,
    readings,
)
from rewards.units import convert
from rewards.values import (
    difference_of,
    is_written_out,
    parsed,
    ratio_of,
    same_everywhere,
    sympy_of,
    tolerance,
)

# --- Comparing ---------------------------------------------------------------


def judge(gold: str, answer: str) -> str:
    r"""Say whether `answer` means what `gold` means; both are texts.

    Returns "right", "wrong", "unreadable" (the answer can't be read),
    "undecided" (it may be right) or "no_gold" (the gold can't be read). Texts
    that are spelt alike are "right" whatever they say. If `answer` is right
    for `gold`, `gold` is for `answer`, with one exception: "70k" answers
    70000, but as a gold it may be a product.

    >>> judge(r"\frac{1}{2}", "0.5"), judge("1,-2", "-2, 1")
    ('right', 'right')
    >>> judge(r"(1, 2)", "(2, 1)"), judge(r"1331 \text{ and } 1728", "1728")
    ('wrong', 'wrong')
    >>> judge("3", "three plus 2"), judge("|||", "3")
    ('unreadable', 'no_gold')
    """
    verdicts = [
        _verdict(one, other)
        for one in readings(gold)
        for other in readings(answer)
    ]
    if "right" in verdicts:
        return "right"
    if _may_be(gold, answer):
        return "no_gold"
    return "undecided" if _may_be(answer, gold) else verdicts[0]


def _may_be(text: str, number: str) -> bool:
    """Tell whether "3k" is 3000, if its letter is no variable and no unit."""
    if parse_quantity(text, variables=True) is not None:
        return False
    found = parse_quantity(number)
    return found is not None and found.value in possible_values(text)


def _verdict(gold: str, answer: str) -> str:
    if alike(gold, answer):
        return "right"
    gold, answer = _without_option(gold, answer)
    if _same_as_numbers(gold, answer):
        return "right"
    answer = _with_the_letter_of(gold, answer)
    try:
        expected = read(gold)
        _check_parses(expected)
    except Unreadable:
        return "no_gold"
    try:
        given = read(answer)
        if _domains_differ(gold, answer):
            return "wrong"
        if _either_percent(gold, answer, expected, given):
            return "right"
        return "right" if same(expected, given) else "wrong"
    except Unreadable:
        return "unreadable"


_VARIABLE = re.compile(
    r"^\s*\$?\s*[A-Za-z]\(([A-Za-z])\)\s*=|([A-Za-z])\s*\\in\s*\\mathbb"
)


def _with_the_letter_of(gold: str, answer: str) -> str:
    """Write k for n in an answer if both name the variable they speak of.

    f(n) = 2n is the function f(x) = 2x.
    """
    in_gold, in_answer = map(_VARIABLE.search, (gold, answer))
    if in_gold is None or in_answer is None:
        return answer
    new, old = (found[1] or found[2] for found in (in_gold, in_answer))
    if re.search(rf"(?<![A-Za-z\\]){new}(?![A-Za-z])", answer):
        return answer
    return re.sub(rf"(?<![A-Za-z\\]){old}(?![A-Za-z])", new, answer)


def _domains_differ(*texts: str) -> bool:
    """Tell whether both say of which numbers they speak, and not the same."""
    found = (without_domain(clean(text))[1] for text in texts)
    domains = {re.sub(r"[{}\s]", "", domain) for domain in found} - {""}
    return len(domains) > 1


def _without_option(gold: str, answer: str) -> tuple[str, str]:
    """Read "(C) 15" as C beside the letter of an option, else as 15."""
    (gold_letter, gold_value), (letter, value) = option(gold), option(answer)
    same_letter = gold_letter == letter
    if gold_letter and letter and not (same_letter and gold_value and value):
        return gold_letter, letter
    return gold_value or gold, value or answer


def alike(gold: str, answer: str) -> bool:
    r"""Tell whether two texts are the same but for the way they are set.

    >>> alike(r"$\left[2,5\right)$", "[2, 5)"), alike("", "$")
    (True, False)
    """
    if max(len(gold), len(answer)) > MAX_CHARS:
        return False
    gold, answer = clean(gold), clean(answer)
    if squeezed(gold) == squeezed(answer) != "":
        return True
    return _TEXT in gold + answer and _flat(gold) == _flat(answer) != ""


_TEXT = r"\text"


def _flat(text: str) -> str:
    """Return a clean text with its words outside of \\text{}."""
    return " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split())


def is_clearly_right(gold: str, answer: str) -> bool | None:
    """Tell whether no parser is needed to say that an answer is right.

    >>> is_clearly_right("18", "= 18"), is_clearly_right("x", "x ")
    (True, True)
    """
    return alike(gold, answer) or _same_as_numbers(gold, answer)


def is_plain(*texts: str) -> bool:
    r"""Tell whether texts can be compared without a LaTeX parser.

    They can when each is a number, words, or a list of these. Raises
    Unreadable when one of them can't be read.

    >>> is_plain("1, 2", "2"), is_plain(r"\sqrt{4}", "2")
    (True, False)
    """
    return all(map(_is_plain, map(_read_first, texts)))


def _read_first(text: str) -> Any:
    """Read a text as `judge` does, without what stands around its value."""
    text = readings(text)[0]
    letter, value = option(text)
    try:
        return read(value or text)
    except Unreadable:
        if not letter:
            raise
    return Words((letter.lower(),))


def _is_plain(value: Any) -> bool:
    if isinstance(value, Several | Bracketed):
        return all(map(_is_plain, value.values))
    return isinstance(value, Number | Words)


def is_readable(gold: str) -> bool:
    r"""Tell whether a gold's text means something that can be compared.

    >>> is_readable(r"\sqrt{2}"), is_readable("|||"), is_readable("(1, 2")
    (True, False, False)
    """
    try:
        _check_parses(_read_first(gold))
    except Unreadable:
        return False
    return True


def same(gold: Any, answer: Any) -> bool:
    """Tell whether two values, as `read` returns them, are the same.

    Raises Unreadable when an expression in `answer` can't be parsed.

    >>> same(read("1, 2"), read("2, 1")), same(read("(1, 2)"), read("(2, 1)"))
    (True, False)
    """
    both = isinstance(gold, Inequality) and isinstance(answer, Inequality)
    if both and _same_inequality(gold, answer):
        return True
    if isinstance(gold, KINDS) or isinstance(answer, KINDS):
        return same_conditions(gold, answer, _same_part)
    gold, answer = _unassigned(_alone(gold), _alone(answer))
    if named(gold) != named(answer):
        return _same_in_order(gold, answer)
    if isinstance(gold, Several) and isinstance(answer, Several):
        return _same_several(gold, answer)
    if isinstance(gold, MEASURED) and isinstance(answer, MEASURED):
        answer = _in_the_unit_of(gold, answer)
        if answer is None:
            return False
    if type(gold) is not type(answer):
        if _letters(gold) == _letters(answer) != "":
            return True
        if _is_plain(gold) and _is_plain(answer):
            return False
        if _is_valued(gold, answer):
            return _same_expression(gold, answer)
        return _same_sets(gold, answer)
    if isinstance(gold, Number):
        return _same_number(gold, answer)
    if isinstance(gold, Words):
        return gold == answer
    if isinstance(gold, Bracketed):
        return _same_bracketed(gold, answer)
    if isinstance(gold, Equation):
        return _same_equation(gold, answer)
    return _same_expression(gold, answer)


def _alone(value: Any) -> Any:
    """Take the value out of a set of one, also of one that repeats it."""
    if not isinstance(value, Several) or not value.is_set:
        return value
    values = _values_of(value)
    return values[0] if len(values) == 1 else value


def _unassigned(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Take "x =" off the one that has it when the other has no equation."""
    if not isinstance(answer, Equation) and isinstance(gold, Equation):
        gold = gold.right if gold.assigns else gold
    elif not isinstance(gold, Equation) and isinstance(answer, Equation):
        answer = answer.right if answer.assigns else answer
    return gold, answer


MEASURED = Number | Expression


def _same_part(gold: Any, answer: Any) -> bool:
    """Compare parts of conditions; inequalities by their form."""
    if isinstance(gold, Inequality) and isinstance(answer, Inequality):
        return _same_inequality(gold, answer)
    return same(gold, answer)


def _in_the_unit_of(gold: Any, answer: Any) -> Any:
    """Return an answer in the unit of the gold, or None if that can't be.

    A unit that only one of the two states is left out of account.
    """
    if gold.unit is None or answer.unit is None or gold.unit == answer.unit:
        return answer
    if isinstance(answer, Number):
        value = convert(answer.value, answer.unit, gold.unit)
        return None if value is None else Number(value, answer.digits)
    factor = convert(Fraction(1), answer.unit, gold.unit)
    if factor is None or answer.unit.offset != gold.unit.offset:
        return None
    return Expression(f"({answer.text})*{factor}")


def _same_in_order(gold: Any, answer: Any) -> bool:
    """Compare x = 1, y = 2 with 1, 2 or (1, 2): their order names them."""
    if not all(isinstance(v, Several | Bracketed) for v in (gold, answer)):
        return False
    return len(gold.values) == len(answer.values) and all(
        map(same, gold.values, answer.values)
    )


def _same_several(gold: Several, answer: Several) -> bool:
    """Each gold is one of the answers, and none is left over."""
    golds, answers = map(_values_of, (gold, answer))
    if len(golds) != len(answers):
        return False
    for one in golds:
        at = next((i for i, a in enumerate(answers) if same(one, a)), None)
        if at is None:
            return False
        del answers[at]
    return True


def _values_of(several: Several) -> list[Any]:
    """Return the values of a list; of a set each of them once."""
    if not several.is_set:
        return list(several.values)
    found: list[Any] = []
    for value in several.values:
        if not any(same(value, other) for other in found):
            found.append(value)
    return found


def _same_sets(gold: Any, answer: Any) -> bool:
    """Compare what is written in two ways: "2x > 4" and "(2, oo)"."""
    sets = [set_of(value) for value in (gold, answer)]
    return None not in sets and sets[0] == sets[1]


def _same_bracketed(gold: Any, answer: Any) -> bool:
    return (
        (gold.opener, gold.closer) == (answer.opener, answer.closer)
        and len(gold.values) == len(answer.values)
        and all(map(same, gold.values, answer.values))
    )


def _letters(value: Any) -> str:
    """Return the letters of a word, or of what may be a product: Bob, ABD."""
    if isinstance(value, Words):
        return "".join(value.words)
    is_text = isinstance(value, Expression) and value.text.isalpha()
    return value.text.lower() if is_text else ""


def _is_valued(*values: Any) -> bool:
    """A single letter may be a choice or a variable; a point is no value."""
    kinds = Number | Expression | Words
    return all(
        isinstance(value, kinds)
        and (not isinstance(value, Words) or len("".join(value.words)) == 1)
        for value in values
    )


def _either_percent(gold: str, answer: str, expected: Any, given: Any) -> bool:
    r"""50\% is 50 on some pages and 0.5 on others: either is right."""
    percents = has_percent(gold), has_percent(answer)
    if percents[0] == percents[1]:
        return False
    other, percent = (given, expected) if percents[0] else (expected, given)
    if not isinstance(percent, Number):
        return False
    return same(other, Number(percent.value / 100, percent.digits))


def _same_as_numbers(gold: Any, answer: Any) -> bool | None:
    """Tell whether two texts are one number, as `rewards.numbers` has it.

    It knows more names than `read`, as in "Total cost = 15", and takes
    "2 and 1/2" for 2 1/2, not for two values.
    """
    if "=" in gold and "=" in answer:
        return False  # x = 5 is not y = 5
    expected = parse_quantity(gold, variables=True)
    given = parse_quantity(answer) if expected else None
    return bool(expected and given and expected.equals(given))


# --- One kind of value -------------------------------------------------------


def _check_parses(value: Any) -> None:
    """Raise Unreadable if something in a gold can't be parsed."""
    if isinstance(value, Expression):
        parsed(value.text)
    elif isinstance(value, Several | Bracketed):
        for part in value.values:
            _check_parses(part)
    elif isinstance(value, Joint | Either):
        for part in value.parts:
            _check_parses(part)
    elif isinstance(value, Condition) and not is_domain(value.values):
        _check_parses(value.values)
    elif isinstance(value, Equation):
        _check_parses(value.right)
        if not value.assigns:
            parsed(value.left)
    elif isinstance(value, Inequality):
        difference_of(value)


def _same_number(gold: Any, answer: Any) -> bool:
    difference = abs(gold.value - answer.value)
    if gold.digits and answer.digits:
        return difference == 0
    exact = answer if gold.digits else gold
    if is_written_out(exact.value):
        return difference == 0
    allowed = Fraction(tolerance(gold.digits, answer.digits))
    return difference <= allowed * abs(gold.value)


def _same_expression(gold: Any, answer: Any) -> bool:
    """Tell whether two single values are the same, whatever they are."""
    import sympy
    from math_verify import verify

    (expected, *digits), (given, *more) = map(sympy_of, (gold, answer))
    allowed = tolerance(*digits, *more)
    sides = expected, given
    if all(isinstance(side, sympy.MatrixBase) for side in sides):
        return expected.shape == given.shape and all(
            same_everywhere(one, other, allowed)
            for one, other in zip(expected.flat(), given.flat(), strict=True)
        )
    if all(isinstance(side, sympy.Expr) for side in sides):
        return same_everywhere(expected, given, allowed)
    return verify(expected, given, timeout_seconds=None)


def _same_equation(gold: Any, answer: Any) -> bool:
    """The same name and value, or the same curve.

    Two curves are the same when the differences of their sides, without
    denominators, are in one ratio everywhere.
    """
    names = squeezed(gold.left), squeezed(answer.left)
    if gold.assigns and answer.assigns and _same_name(*names):
        return same(gold.right, answer.right)
    kinds = Number, Expression, Words
    if not all(isinstance(e.right, kinds) for e in (gold, answer)):
        return False
    return ratio_of(difference_of(gold), difference_of(answer)) is not None


def _same_name(one: Any, other: Any) -> bool:
    """Tell whether two names are one: y = 2x and f(x) = 2x name a function."""
    names = {one, other}
    return one.lower() == other.lower() or (
        "y" in names and any(name.endswith("(x)") for name in names)
    )


def _same_inequality(gold: Any, answer: Any) -> bool:
    ratio = ratio_of(difference_of(gold), difference_of(answer))
    return gold.strict == answer.strict and ratio is not None and ratio > 0
