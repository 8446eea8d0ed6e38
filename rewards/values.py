r"""What expressions are worth: parsed by math_verify, computed by sympy.

Two expressions are equal when they have the same value, to 40 digits,
wherever their variables are put: a test by random points (Schwartz, 1980)
decides in milliseconds what `simplify` may think about for minutes, and an
error relative to the size keeps 1/2^98 apart from 1/2^99. A text counts only
when the parser took all of it.

Some texts make sympy compute for hours, so this module runs in processes
that can be killed, see `rewards.symbolic`. sympy is imported at the first
need.
"""

import functools
import random
import re
from fractions import Fraction
from typing import Any

from rewards.markup import decimal_digits, letter_runs
from rewards.notation import Number, Unreadable, Words

DIGITS = 50  # that every value is computed to
AGREEING = 40  # digits in which equal values agree
LONG_DECIMAL = 12  # significant digits that only a computer writes
MAX_TERMS = 100  # of a sum that is worked out here
MAX_DIGITS = 100_000  # of a value that is computed
EXACT_DIGITS = 500  # of one that is computed exactly, so that 0 is 0


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """Return what a single expression is to sympy, evaluated exactly.

    Raises Unreadable when the parser does not take the whole text (it would
    return the part that it understood), or when the value is too large.

    >>> parsed("x+x")
    2*x
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

    converter = _Latex2Sympy(
        is_real="i" not in letters,
        # R and r are two radii
        config=ConversionConfig(lowercase_symbols=False),
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


def sympy_of(value: Any) -> Any:
    """Return (what sympy makes of a single value, digits of its decimals).

    >>> sympy_of(Number(Fraction(1, 2), 2))
    (1/2, 2)
    """
    import sympy

    if isinstance(value, Number):
        return sympy.Rational(value.value), value.digits
    text = value.words[0] if isinstance(value, Words) else value.text
    return parsed(text), decimal_digits(text)


def difference_of(relation: Any) -> Any:
    """Return left - right of a relation, as sympy has it.

    >>> from rewards.notation import read
    >>> difference_of(read("2x > y"))
    2*x - y
    """
    left, right = relation.left, relation.right
    left = parsed(left)
    right = parsed(right) if isinstance(right, str) else sympy_of(right)[0]
    try:
        return left - right
    except TypeError:
        raise Unreadable("a relation between things, not values") from None


def tolerance(*digits: int) -> Any:
    """Return the relative error allowed, for the digits of the decimals.

    A decimal of 12 digits or more was written by a computer and stands for
    the number that it was rounded from; a shorter one says what it means.

    >>> tolerance(3), tolerance(12, 5)
    (0, 1e-11)
    """
    return 10.0 ** (1 - max(digits)) if max(digits) >= LONG_DECIMAL else 0


def is_written_out(value: Any) -> str:
    """Tell whether a rational number is a short decimal: nothing to round.

    >>> is_written_out(Fraction(1, 4)), is_written_out(Fraction(1, 3))
    (True, False)
    """
    return (value * 10**LONG_DECIMAL).denominator == 1


def same_everywhere(gold: Any, answer: Any, tolerance: Any = 0) -> bool:
    """Tell whether two expressions are equal wherever both have a value.

    >>> same_everywhere(parsed("(x+1)^2"), parsed("x^2+2x+1"))
    True
    """
    if gold == answer:
        return True
    if gold.is_infinite or answer.is_infinite:
        return False
    if gold.is_Rational and is_written_out(Fraction(gold.p, gold.q)):
        tolerance = 0
    if not tolerance and (gold - answer).is_Rational:
        return gold - answer == 0  # 6^92 and 6^92 - 1 agree in 70 digits
    pairs = _at_random_points(gold, answer)
    return all(_close(one, other, tolerance) for one, other in pairs)


def ratio_of(gold: Any, answer: Any) -> Any:
    """Return answer / gold if it is one real number everywhere, else None.

    >>> float(ratio_of(parsed("x+1"), parsed("2x+2")))
    2.0
    """
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
    # Exactly, but for a power such as a^n, of which sympy would take roots.
    powers = expression.atoms(sympy.Pow)
    if _digits_at_most(expression) < EXACT_DIGITS and not any(
        power.exp.free_symbols for power in powers
    ):
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
