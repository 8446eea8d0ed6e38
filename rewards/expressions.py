r"""Tell whether two mathematical texts mean the same.

`judge` compares the text of an answer with the text of a gold, as
`rewards.notation` reads them: value by value, with brackets and order where
they mean something. Single expressions go to the LaTeX parser of
math_verify, and count only when it took the whole text, so that nothing is
equal by having been parsed in part.

Two expressions are equal when they have the same value, to 40 digits,
wherever their variables are put: a test by random points (Schwartz, 1980)
decides in milliseconds what `simplify` may think about for minutes, and an
error relative to the size keeps 1/2^98 apart from 1/2^99. What is neither a
value nor a relation, such as a difference of sets, is left to
`math_verify.verify`.

Some texts make sympy compute for hours, so this module runs in processes
that can be killed, see `rewards.symbolic`. sympy is imported at the first
need.
"""

import functools
import random
import re
from fractions import Fraction
from typing import Any

from rewards.notation import (
    MAX_CHARS,
    Bracketed,
    Equation,
    Expression,
    Inequality,
    Number,
    Several,
    Unreadable,
    Words,
    clean,
    decimal_digits,
    letter_runs,
    option,
    read,
    squeezed,
    without_domain,
)
from rewards.numbers import has_percent, parse_number, readings

DIGITS = 50  # that every value is computed to
AGREEING = 40  # digits in which equal values agree
LONG_DECIMAL = 12  # significant digits that only a computer writes
MAX_TERMS = 100  # of a sum that is worked out here
MAX_DIGITS = 100_000  # of a value that is computed
EXACT_DIGITS = 500  # of one that is computed exactly, so that 0 is 0


# --- Comparing ---------------------------------------------------------------


def judge(gold: str, answer: str) -> str:
    r"""Say whether `answer` means what `gold` means; both are texts.

    Returns "right", "wrong", "unreadable" (the answer can't be read) or
    "no_gold" (the gold can't). Texts that are spelt
    alike are "right" whatever they say.

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
    return "right" if "right" in verdicts else verdicts[0]


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
    domains = {without_domain(clean(text))[1] for text in texts} - {""}
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
    return squeezed(clean(gold)) == squeezed(clean(answer)) != ""


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
    gold, answer = _unassigned(gold, answer)
    if _is_named(gold) != _is_named(answer):
        return _same_in_order(gold, answer)
    if isinstance(gold, Several) and isinstance(answer, Several):
        return _same_several(gold.values, answer.values)
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
    if isinstance(gold, Inequality):
        return _same_inequality(gold, answer)
    return _same_expression(gold, answer)


def _unassigned(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Take "x =" off the one that has it when the other has no equation."""
    if not isinstance(answer, Equation) and isinstance(gold, Equation):
        gold = gold.right if gold.assigns else gold
    elif not isinstance(gold, Equation) and isinstance(answer, Equation):
        answer = answer.right if answer.assigns else answer
    return gold, answer


def _is_named(value: Any) -> bool:
    """Tell whether a value is a list such as x = 1, y = 2."""
    return (
        isinstance(value, Several)
        and all(isinstance(v, Equation) and v.assigns for v in value.values)
        and len({squeezed(v.left) for v in value.values}) > 1
    )


def _same_in_order(gold: Any, answer: Any) -> bool:
    """Compare x = 1, y = 2 with 1, 2 or (1, 2): their order names them."""
    if not all(isinstance(v, Several | Bracketed) for v in (gold, answer)):
        return False
    return len(gold.values) == len(answer.values) and all(
        map(same, gold.values, answer.values)
    )


def _same_several(golds: Any, answers: Any) -> bool:
    """Each gold is among the answers and each answer among the golds."""
    return all(
        any(same(gold, answer) for answer in answers) for gold in golds
    ) and all(any(same(gold, answer) for gold in golds) for answer in answers)


def _same_sets(gold: Any, answer: Any) -> bool:
    """Compare what is written in two ways: "2x > 4" and "(2, oo)"."""
    sets = [_set_of(value) for value in (gold, answer)]
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
    values = [given, expected] if percents[0] else [expected, given]
    other, percent = values
    if not isinstance(percent, Number):
        return False
    return same(other, Number(percent.value / 100, percent.digits))


def _same_as_numbers(gold: Any, answer: Any) -> bool | None:
    """Tell whether two texts are one number, as `rewards.numbers` has it.

    It knows more names than `read`, as in "Total cost = 15", and takes
    "2 and 1/2" for 2 1/2, not for two values.
    """
    if "=" in gold:
        return False  # x = 5 is not y = 5
    number = parse_number(gold)
    return number is not None and number == parse_number(answer)


# --- Expressions, with sympy -------------------------------------------------


def _check_parses(value: Any) -> None:
    """Raise Unreadable if something in a gold can't be parsed."""
    if isinstance(value, Expression):
        _parsed(value.text)
    elif isinstance(value, Several | Bracketed):
        for part in value.values:
            _check_parses(part)
    elif isinstance(value, Equation):
        _check_parses(value.right)
        if not value.assigns:
            _parsed(value.left)
    elif isinstance(value, Inequality):
        _difference(value)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """Return what a single expression is to sympy, evaluated exactly.

    Raises Unreadable when the parser does not take the whole text (it would
    return the part that it understood), or when the value is too large.
    """
    import sympy

    text, letters = _for_the_parser(text)
    try:
        parsed = _parse(text, letters)
    except RecursionError:
        raise Unreadable("too deep") from None
    except Exception as error:  # the parser raises bare Exceptions
        raise Unreadable(f"no mathematics: {text[:80]}") from error
    if _digits_at_most(parsed) > MAX_DIGITS:
        raise Unreadable(f"a value of too many digits: {text[:80]}")
    if _is_work_left(parsed):
        raise Unreadable(f"a task, not its result: {text[:80]}")
    exact = {f: sympy.Rational(str(f)) for f in parsed.atoms(sympy.Float)}
    if "i" in letters and r"\sum" not in text and r"\prod" not in text:
        exact |= {s: sympy.I for s in parsed.free_symbols if s.name == "i"}
    return parsed.xreplace(exact).doit()


def _for_the_parser(text: str) -> tuple[str, set[str]]:
    from latex2sympy2_extended import NormalizationConfig
    from latex2sympy2_extended.math_normalization import normalize_latex

    text = re.sub(r"([0-9])i\b", r"\1 i", text)
    text = normalize_latex(text, NormalizationConfig(malformed_operators=True))
    return text, set(letter_runs(text))


def _parse(text: str, letters: Any) -> Any:
    from antlr4 import Token
    from latex2sympy2_extended.latex2sympy2 import (
        ConversionConfig,
        _Latex2Sympy,
    )

    variables = set("".join(r for r in letters if not r.startswith("\\")))
    both_cases = any(one.swapcase() in variables for one in variables)
    converter = _Latex2Sympy(
        is_real="i" not in letters,
        config=ConversionConfig(lowercase_symbols=not both_cases),
    )
    parser = converter.create_parser(text)
    # It makes a parser of its own, and tells nobody where it stopped.
    converter.create_parser = lambda _: parser
    parsed = converter.parse(text)
    if parser.getTokenStream().LA(1) != Token.EOF:
        raise Unreadable(f"parsed only in part: {text[:80]}")
    return parsed


def _digits_at_most(parsed: Any, variable: float = 0.7) -> float:
    """Return about how many digits a value has, before it is computed.

    `variable` is how many a variable has: 0.7 for numbers below 5.
    """
    import sympy

    if isinstance(parsed, sympy.MatrixBase):
        inside = [_digits_at_most(part, variable) for part in parsed.flat()]
        return max(inside, default=0)
    if parsed.is_Rational:
        return max(abs(parsed.p), parsed.q).bit_length() * 0.302
    inside = [_digits_at_most(part, variable) for part in parsed.args]
    most = max(inside, default=variable)
    if most > MAX_DIGITS:
        return most
    if parsed.is_Mul:
        return sum(inside)
    if parsed.is_Pow:
        return inside[0] * 10 ** min(inside[1], 9)
    if isinstance(parsed, sympy.exp):
        return 10 ** min(most, 9) / 2
    if isinstance(parsed, sympy.factorial | sympy.gamma | sympy.binomial):
        return most * 10 ** min(most, 9)
    return most + 1


def _is_work_left(parsed: Any) -> bool:
    """Tell whether something is a task, and one that may never end.

    An integral, a limit or an endless sum as an answer repeats the question.
    """
    import sympy

    if isinstance(parsed, sympy.MatrixBase):
        return any(map(_is_work_left, parsed.flat()))
    sums = parsed.atoms(sympy.Sum, sympy.Product)
    ends = [end for one in sums for end in one.limits[0][1:]]
    return parsed.has(sympy.Integral, sympy.Limit, sympy.Derivative) or any(
        end.is_infinite or (end.is_number and abs(end) > MAX_TERMS)
        for end in ends
    )


def _tolerance(*digits: int) -> Any:
    """Return the relative error allowed, for the digits of the decimals.

    A decimal of 12 digits or more was written by a computer and stands for
    the number that it was rounded from; a shorter one says what it means.
    """
    return 10.0 ** (1 - max(digits)) if max(digits) >= LONG_DECIMAL else 0


def _written_out(value: Any) -> str:
    """Tell whether a rational number is a short decimal: nothing to round."""
    return (value * 10**LONG_DECIMAL).denominator == 1


def _same_number(gold: Any, answer: Any) -> bool:
    difference = abs(gold.value - answer.value)
    if gold.digits and answer.digits:
        return difference == 0
    exact = answer if gold.digits else gold
    if _written_out(exact.value):
        return difference == 0
    allowed = Fraction(_tolerance(gold.digits, answer.digits))
    return difference <= allowed * abs(gold.value)


def _sympy_of(value: Any) -> Any:
    """Return (what sympy makes of a single value, digits of its decimals)."""
    import sympy

    if isinstance(value, Number):
        return sympy.Rational(value.value), value.digits
    text = value.words[0] if isinstance(value, Words) else value.text
    return _parsed(text), decimal_digits(text)


def _same_expression(gold: Any, answer: Any) -> bool:
    """Tell whether two single values are the same, whatever they are."""
    import sympy
    from math_verify import verify

    (expected, *digits), (given, *more) = map(_sympy_of, (gold, answer))
    tolerance = _tolerance(*digits, *more)
    sides = expected, given
    if all(isinstance(side, sympy.MatrixBase) for side in sides):
        return expected.shape == given.shape and all(
            _same_everywhere(one, other, tolerance)
            for one, other in zip(expected.flat(), given.flat(), strict=True)
        )
    if all(isinstance(side, sympy.Expr) for side in sides):
        return _same_everywhere(expected, given, tolerance)
    return verify(expected, given, timeout_seconds=None)


def _set_of(value: Any) -> Any:
    """Return the set of real numbers that a value stands for, or None."""
    import sympy

    if isinstance(value, Several):
        sets = [_set_of(part) for part in value.values]
        return None if None in sets else sympy.Union(*sets)
    if isinstance(value, Bracketed) and len(value.values) == 2:
        if not _is_valued(*value.values):
            return None
        low, high = (_sympy_of(end)[0] for end in value.values)
        if (low - high).is_positive:
            return None  # a point: as an interval, it would be empty
        is_open = value.opener == "(", value.closer == ")"
        return sympy.Interval(low, high, *is_open)
    if isinstance(value, Inequality):
        kind = sympy.StrictGreaterThan if value.strict else sympy.GreaterThan
        relation = kind(_difference(value), 0)
        one_variable = len(relation.free_symbols) == 1
        try:
            return relation.as_set() if one_variable else None
        except NotImplementedError:  # sympy solves cos x > 1/2 for no set
            return None
    if isinstance(value, Number):
        return sympy.FiniteSet(_sympy_of(value)[0])
    if isinstance(value, Expression):
        parsed = _parsed(value.text)
        return parsed if isinstance(parsed, sympy.Set) else None
    return None


def _same_everywhere(gold: Any, answer: Any, tolerance: Any = 0) -> bool:
    if gold == answer:
        return True
    if gold.is_infinite or answer.is_infinite:
        return False
    if gold.is_Rational and _written_out(Fraction(gold.p, gold.q)):
        tolerance = 0
    if not tolerance and (gold - answer).is_Rational:
        return gold - answer == 0  # 6^92 and 6^92 - 1 agree in 70 digits
    pairs = _at_random_points(gold, answer)
    return all(_close(one, other, tolerance) for one, other in pairs)


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
    return _ratio_of(_difference(gold), _difference(answer)) is not None


def _same_name(one: Any, other: Any) -> bool:
    """Tell whether two names are one: y = 2x and f(x) = 2x name a function."""
    names = {one, other}
    return len(names) == 1 or (
        "y" in names and any(name.endswith("(x)") for name in names)
    )


def _same_inequality(gold: Any, answer: Any) -> bool:
    ratio = _ratio_of(_difference(gold), _difference(answer))
    return gold.strict == answer.strict and ratio is not None and ratio > 0


def _difference(relation: Any) -> Any:
    """Return left - right of a relation, as sympy has it."""
    left, right = relation.left, relation.right
    left = _parsed(left)
    right = _parsed(right) if isinstance(right, str) else _sympy_of(right)[0]
    try:
        return left - right
    except TypeError:
        raise Unreadable("a relation between things, not values") from None


def _ratio_of(gold: Any, answer: Any) -> Any:
    """Return answer / gold if it is one real number everywhere, else None."""
    import mpmath
    import sympy

    numerators = [sympy.fraction(sympy.together(d))[0] for d in (gold, answer)]
    pairs = _at_random_points(*numerators)
    if any(one == 0 or other == 0 for one, other in pairs):
        return None
    with mpmath.workdps(DIGITS):
        first, *others = [other / one for one, other in pairs]
    if first.imag or not all(_close(first, ratio, 0) for ratio in others):
        return None
    return first.real


def _at_random_points(gold: Any, answer: Any) -> Any:
    """Return the values of two expressions at the same points, in pairs.

    Points where the two are not both real numbers are left out, if there are
    others: log x^2 and 2 log x are the same where both are defined. Raises
    Unreadable when the two can't be computed anywhere.
    """
    names = sorted({s.name for s in gold.free_symbols | answer.free_symbols})
    pairs = []
    for point in _points(names, gold, answer):
        one, other = (_value_at(side, point) for side in (gold, answer))
        if one is None or other is None:
            continue
        if not names or bool(one.imag) == bool(other.imag):
            pairs.append((one, other))
    if not pairs:
        raise Unreadable("it has no value")
    return [pair for pair in pairs if not pair[0].imag] or pairs


def _points(names: Any, *expressions: Any) -> Any:
    """Yield {name: value}: near 1 with every mix of signs, then far from it.

    Far from 1 only where that does not make a value too large.
    """
    source = random.Random(0)  # the same points, hence the same reward
    tame = all(
        _digits_at_most(e, variable=3) < EXACT_DIGITS for e in expressions
    )
    for index in range((6 if tame else 4) if names else 1):
        size = 10**5 if index < 4 else 10**7
        yield {
            name: Fraction(
                source.randint(size, 5 * size)
                * (-1 if index >> (at % 2) & 1 else 1),
                10**5 + 3,
            )
            for at, name in enumerate(names)
        }


def _value_at(expression: Any, point: Any) -> Any:
    """Return the value with DIGITS digits as an mpmath number, or None.

    What shrinks when it is computed with more digits is 0: the rest of terms
    that cancel out.
    """
    import mpmath
    import sympy

    put_in = {
        symbol: sympy.Rational(point[symbol.name])
        for symbol in expression.free_symbols
    }
    if _digits_at_most(expression) < EXACT_DIGITS:
        expression, put_in = expression.subs(put_in), {}
    value = _as_mpmath(expression.evalf(DIGITS, subs=put_in))
    if value and abs(value) < mpmath.mpf(10) ** -AGREEING:
        more = expression.evalf(3 * DIGITS, subs=put_in, maxn=9 * DIGITS)
        if abs(_as_mpmath(more)) < abs(value) * mpmath.mpf(10) ** -AGREEING:
            return mpmath.mpc(0)
    return value


def _as_mpmath(value: Any) -> Any:
    import mpmath
    import sympy

    parts = value.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    with mpmath.workdps(DIGITS):
        numbers = [sympy.Float(part, DIGITS)._mpf_ for part in parts]
        return mpmath.mpc(*map(mpmath.mpf, numbers))


def _close(one: Any, other: Any, tolerance: Any) -> bool:
    import mpmath

    with mpmath.workdps(DIGITS):
        allowed = max(tolerance, mpmath.mpf(10) ** -AGREEING)
        return abs(one - other) <= allowed * max(abs(one), abs(other))
