r"""Read mathematical notation: what kind of value does a text stand for?

`read` takes a text apart from the outside in: a list whose values are all
required, a pair or an interval with its brackets, an equation, an
inequality, words, a number. What is left at the bottom is an `Expression`,
whose text only a LaTeX parser can read; see `rewards.expressions`, which
compares what is read here. Nothing here needs that parser, and nothing is
ever evaluated as code.

A text is refused, by `Unreadable`, when its brackets don't match, when two
numbers stand side by side, or when its looks say that its value could not be
computed in a lifetime (9^9^9).
"""

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rewards.markup import (
    BRACKETS,
    MAX_CHARS,
    balanced,
    clean,
    comma,
    decimal_digits,
    depths,
    letter_runs,
    outer_braces_off,
    split,
    squeezed,
    too_large,
    without_domain,
)
from rewards.numbers import (
    QUANTITY,
    SUM_OF_NAMES,
    parse_number,
    parse_quantity,
)
from rewards.units import Unit, is_unit, read_unit

MAX_DEPTH = 20  # of brackets and braces in one another
MAX_VALUES = 100  # in a list


class Unreadable(ValueError):
    """A text that is no mathematics, or too large to be computed."""


# --- From tokens to values ---------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A number, exactly, and how many digits it has if it is a decimal."""

    value: Fraction
    digits: int = 0
    unit: Unit | None = None


@dataclass(frozen=True)
class Words:
    """What means the same only when it says the same: east, E, 12:30."""

    words: tuple


@dataclass(frozen=True)
class Expression:
    """A single expression, for the parser, and the unit after it."""

    text: str
    unit: Unit | None = None


@dataclass(frozen=True)
class Several:
    """Values of which all are required, in any order.

    One that is given twice counts twice, except in a set.
    """

    values: tuple
    is_set: bool = False


@dataclass(frozen=True)
class Bracketed:
    """A point, a tuple or an interval: the brackets and the order count."""

    opener: str
    values: tuple
    closer: str


@dataclass(frozen=True)
class Equation:
    """left = right; `assigns` if the left side is only a name."""

    left: object
    right: object
    assigns: bool


@dataclass(frozen=True)
class Inequality:
    """left > right, or left >= right, of two expressions."""

    left: str
    right: str
    strict: bool


@dataclass(frozen=True)
class Condition:
    """What a variable is one of, or is none of if `excluded`."""

    variable: str
    values: Any
    excluded: bool = False


@dataclass(frozen=True)
class Joint:
    """Conditions that hold together, and equations beside them.

    `certain` if a word says so: a comma may also list cases.
    """

    parts: tuple
    certain: bool = False


@dataclass(frozen=True)
class Either:
    """Conditions of which one holds."""

    parts: tuple


_COMPARES = re.compile(
    r"\\(?:le|ge|ne|in|notin|approx|equiv)(?![A-Za-z])|[=<>]"
)
_MEMBERSHIP = [r"\in"], [r"\notin"]
_EXCEPT = re.compile(
    r"(?:\\text\s*\{\s*)?(?:all |any )?real numbers?,? "
    r"(?:except|other than|but)(?: for)?\s*\}?\s*(.+)",
    re.IGNORECASE,
)
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_VARIABLE = (
    r"[A-Za-z](?:_\{?\w+\}?|\^\{-1\})?'*"
    r"(?:\((?:[A-Za-z](?:,\s?[A-Za-z])*|[-+]?[0-9./]+)\))?|[A-Z]{2,4}"
    r"|(?:\\angle\s*[A-Z]{1,3}|\\[A-Za-z]+)"
)
_IS_VARIABLE = re.compile(_VARIABLE)
_NAME = re.compile(
    rf"{_VARIABLE}|\\text\s*\{{[^{{}}]*\}}"
    rf"|[A-Za-z]\((?:[^()=A-Za-z\\]|\\[A-Za-z]+)+\)|{QUANTITY}"
)
_SUCH_THAT = re.compile(
    r"\s*([A-Za-z]\s*(?:\\in\s*(?:\(-\\infty,\\infty\)"
    r"|\\mathbb\s*\{?[NZQ]\}?(?:\^?\{?[+*]\}?)?)\s*)?)"
    r"(?:\\mid(?![A-Za-z])|[|:])(?=.*[<>=]|.*\\[lgn]e )"
)
_OR = re.compile(r"\\lor(?![A-Za-z])")
_AND = re.compile(r"\\land(?![A-Za-z])")
# the roots of one unknown: x_1, x_{2}; other letters name other quantities
_ROOT = re.compile(r"([x-z])_\{?([0-9])\}?")
_SEPARATORS: dict[str, Callable[[str], Iterable[re.Match[str]]]] = {
    "or": _OR.finditer,
    "and": _AND.finditer,
    "comma": comma,
    "union": _UNION.finditer,
}
_ROOTS = re.compile(r"([x-z])_\{[0-9](?:\s*,\s*[0-9])+\}")
# What may follow a value as its unit: "2\sqrt{3}\text{ cm}^2", "2\pi cm"
_UNIT = re.compile(
    r"(?<=[0-9)}i])(?:\s*\\text\s*\{([^{}]*)\}|\s([A-Za-z][A-Za-z ]*))"
    r"(\s*\^\s*\{?[23]\}?)?$"
)
_INDEXED = r"[A-Za-z](?:_\{?[0-9]\}?)?"
_NAMES = re.compile(rf"\(\s*{_INDEXED}(?:\s*,\s*{_INDEXED})+\s*\)")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:text|begin|end)\s*\{[^{}]*\}")
_COLON = re.compile(r"\s*([0-9]+)\s*:\s*([0-9]+)\s*")
_COLONS = re.compile(r"\s*[0-9]+(?:\s*:\s*[0-9]+){2,}\s*")
_ONLY_LITERAL = re.compile(r"[0-9]\s*_|\\dots|:")
_BROKEN = re.compile(r"[0-9.]\s+[0-9]|[0-9]*\.[0-9]+\.|[0-9]\.[A-Za-z]")
_WORD_TEXT = re.compile(r"[A-Za-z][A-Za-z '’-]*")
_DAY = re.compile(r"[A-Za-z]{3,9} [0-9]{1,4}")  # "June 5", "Option 2"
_CHOICE = re.compile(r"\(?([A-Za-z])\)?")
_ALL_NUMBERS = r"-\infty", r"\infty"


@functools.lru_cache(maxsize=4096)
def read(text: str) -> Any:
    r"""Take a text apart into a value of the classes above.

    Raises Unreadable when the text is empty, not balanced, or too large.

    >>> read("1/2, 3.50").values[1]
    Number(value=Fraction(7, 2), digits=3, unit=None)
    >>> read("x > 2").values == read(r"(2, \infty)")
    True
    >>> read(r"\text{East}")
    Words(words=('east',))
    """
    if len(text) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    # "2 and 1/2" may be two values
    number = None if " and " in text else _number(text)
    if number:
        return number
    cleaned, _ = without_domain(clean(text))
    _check_brackets(cleaned)
    if too_large(cleaned):
        raise Unreadable("too large to be computed")
    return _value(cleaned)


def _value(text: str) -> Any:
    text = outer_braces_off(text.strip(" .,"))
    if not text:
        raise Unreadable("empty")
    number = _number(text)
    if number:
        return number
    inside = _TEXT.fullmatch(text)
    if inside and re.search(r"[,:]|\\l(?:and|or)\b", inside[1]):
        return _value(inside[1])
    words = _words(text)
    if words:
        return words
    if r"\dots" in text:
        return Words((squeezed(text),))
    if re.search(r"\\pm(?![A-Za-z])", text) and r"\mp" in text:
        return Several(tuple(map(_value, _both_signs(text))))
    pieces = split(text, _COMPARES.finditer, keep=True)
    for joined_by, separator in _SEPARATORS.items():
        if joined_by == "union" and pieces[1::2] in _MEMBERSHIP:
            break  # "x \in (1,2) \cup (3,4)"
        parts = split(text, separator)
        if len(parts) > 1:
            return _several(parts, joined_by)
    if exception := _EXCEPT.fullmatch(text):
        return Condition("", _value(exception[1]), excluded=True)
    if len(pieces) > 1:
        return _relation(pieces)
    return _bracketed(text) or _single(text)


def _both_signs(text: str) -> list[str]:
    r"""Return a text with the upper signs, and with the lower ones.

    >>> _both_signs(r"(\pm 1, \mp 2)")
    ['(+ 1, - 2)', '(- 1, + 2)']
    """
    swapped = text.replace(r"\pm", "\0").replace(r"\mp", r"\pm")
    both = text, swapped.replace("\0", r"\mp")
    return [t.replace(r"\pm", "+").replace(r"\mp", "-") for t in both]


def _number(text: str) -> Number | None:
    found = None if "=" in text else parse_quantity(text, variables=True)
    if found is None:
        return None
    return Number(found.value, decimal_digits(text), found.unit)


def _words(text: str) -> Any:
    """Words in \\text{}, or bare ones; letters that may be a product are not.

    "AB" and "xyz" may be products, "east" and "Evelyn" are not.
    """
    inside = _TEXT.fullmatch(text)
    bare = (inside[1] if inside else text).strip(" .\"'“”")
    choice = _CHOICE.fullmatch(bare)
    if choice:
        return Words((choice[1].lower(),))
    words = tuple(bare.lower().split())
    if len(words) > 1 and words[0] in ("a", "an", "the"):
        words = words[1:]
    if words[:1] == ("there",):
        words = words[2:]  # "There are no solutions"
    if " ".join(words) in _PHRASES:
        return _PHRASES[" ".join(words)]
    if _DAY.fullmatch(bare) or (inside and re.search("[A-Za-z]", bare)):
        return Words(words)
    if not _WORD_TEXT.fullmatch(bare):
        return None
    if any(len(word) > 3 for word in words) or words[0] in _SHORT:
        return Words(words)
    return None


_PHRASES = {
    **dict.fromkeys(
        (
            "no solution",
            "no solutions",
            "no real solution",
            "no real solutions",
            "no roots",
            "no real roots",
        ),
        Expression(r"\emptyset"),
    ),
    **dict.fromkeys(
        ("all real numbers", "all reals", "any real number"),
        Bracketed("(", (Expression(r"-\infty"), Expression(r"\infty")), ")"),
    ),
}
_OPTION = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice) )?"
    r"(?:\(([A-J])\)|([A-J])[).:](?=\s)|([A-J])(?=[).]?$))\s*(?!\\l(?:and|or)\b)([^\s,/&+].*)?"
)


def option(text: str) -> tuple[str, str]:
    r"""Return the letter of a multiple choice and the value after it.

    The value is "" if the letter stands alone; both are "" if `text` is
    neither.

    >>> option("(C) 15"), option(r"\text{C: red}"), option("B."), option("2C")
    (('C', '15'), ('C', 'red'), ('B', ''), ('', ''))
    """
    match = _OPTION.fullmatch(" ".join(_TEXT.sub(r"\1", clean(text)).split()))
    value = (match[4] or "").strip(" .") if match else ""
    if match is None or _OPTION.match(value):
        return "", ""  # "(A) (B)" and "A. B. C." are several
    return match[1] or match[2] or match[3], value


_SHORT = ("yes", "no", "odd", "red", "one", "two", "six", "ten")


def _several(parts: list[str], joined_by: str = "comma") -> Any:
    """A list; or conditions, if there is one among its values."""
    parts = [part for part in parts if part.strip(" .,")]
    if len(parts) > MAX_VALUES:
        raise Unreadable("too many values")
    values = [_value(part) for part in parts]
    if not values:
        raise Unreadable("separators, and nothing between them")
    if len(values) == 1:
        return values[0]
    if any(isinstance(v, Condition | Inequality | Joint) for v in values):
        return _conditions(values, joined_by)
    return _list_of(values)


def _conditions(values: list[Any], joined_by: str) -> Any:
    first, *others = values
    if joined_by in ("or", "union"):
        return Either(tuple(values))
    plain = all(
        isinstance(v, Number)
        or (isinstance(v, Expression) and not _has_variable(v.text))
        for v in others
    )
    if isinstance(first, Condition) and first.excluded and plain:
        # "x \ne 2, -2"
        return replace(first, values=Several((first.values, *others)))
    flat: list[Any] = []
    certain = joined_by == "and"
    for value in values:
        inside = isinstance(value, Joint)
        flat += value.parts if inside else [value]
        certain = certain or (inside and value.certain)
    return Joint(tuple(flat), certain)


def _list_of(values: list[Any]) -> Any:
    """A list without lists in it, but for sets and for named values."""
    flat: list[Any] = []
    for value in values:
        nested = isinstance(value, Several) and not value.is_set
        flat += value.values if nested and not named(value) else [value]
    return _sum_of_parts(flat) or Several(tuple(_by_root(flat)))


def named(value: Any) -> bool:
    """Tell whether a value is a list such as x = 1, y = 2.

    >>> named(read("x = 1, y = 2")), named(read("x = 1, x = 2"))
    (True, False)
    """
    return (
        isinstance(value, Several)
        and all(isinstance(v, Equation) and v.assigns for v in value.values)
        and len({squeezed(v.left) for v in value.values}) > 1
    )


def _by_root(values: list[Any]) -> list[Any]:
    """Read x_1 = 5, x_2 = 6 as two values of x, with y_1 and y_2 as pairs."""
    if not all(isinstance(v, Equation) and v.assigns for v in values):
        return values
    found = [_ROOT.fullmatch(squeezed(v.left)) for v in values]
    roots = [match for match in found if match]
    if len(roots) < len(values):
        return values
    letters = sorted({match[1] for match in roots})
    indices = sorted({match[2] for match in roots})
    if len(roots) != len(letters) * len(indices) or len(indices) < 2:
        return values
    by_name = {(m[1], m[2]): v for m, v in zip(roots, values, strict=True)}
    if len(by_name) < len(values):
        return values
    if len(letters) == 1:
        return [replace(v, left=letters[0]) for v in values]
    return [
        Several(
            tuple(
                replace(by_name[letter, index], left=letter)
                for letter in letters
            )
        )
        for index in indices
    ]


def _sum_of_parts(values: list[Any]) -> Number | None:
    """Read "2 hours and 30 minutes" as one length of time."""
    units = [v.unit for v in values if isinstance(v, Number) and v.unit]
    if len(units) < len(values) or not units[0].dimensions:
        return None
    pairs = zip(units, units[1:], strict=False)
    if not all(
        one.dimensions == other.dimensions and one.factor > other.factor
        for one, other in pairs
    ):
        return None
    total = sum(v.value * v.unit.factor for v in values)
    return Number(total / units[0].factor, 0, units[0])


def _bracketed(text: str) -> Any:
    """A point, an interval or a set, if one pair of brackets holds it all."""
    brackets = list(BRACKETS.finditer(text))
    if not brackets or brackets[0].start() or brackets[-1].end() < len(text):
        return None
    opener, closer = brackets[0], brackets[-1]
    inside = text[opener.end() : closer.start()]
    if depths(text)[opener.start()] or not balanced(inside):
        return None
    parts = split(inside, comma)
    if opener[0] == r"\{" and (condition := _SUCH_THAT.match(inside)):
        domain = condition[1] if r"\in" in condition[1] else ""
        return _value(
            ", ".join(filter(None, (domain, inside[condition.end() :])))
        )
    if opener[0] == r"\{":
        found = _several(parts)
        return (
            replace(found, is_set=True)
            if isinstance(found, Several)
            else found
        )
    if len(parts) < 2 or opener[0] == "{":
        return None
    return Bracketed(opener[0], tuple(map(_value, parts)), closer[0])


def _relation(pieces: list[str]) -> Any:
    """An equation, or the values that an inequality leaves."""
    signs = pieces[1::2]
    sides = [outer_braces_off(side.strip()) for side in pieces[::2]]
    if not all(sides):
        raise Unreadable("a side of a relation is empty")
    is_name = _IS_VARIABLE.fullmatch(sides[0]) is not None
    if signs == [r"\in"]:
        values = _value(sides[1])
        return Condition(squeezed(sides[0]), values) if is_name else values
    if set(signs) <= {"=", r"\approx", r"\equiv"}:
        return _equation(sides)
    if signs in ([r"\ne"], [r"\notin"]) and is_name:
        return Condition(squeezed(sides[0]), _value(sides[1]), excluded=True)
    return _inequality(sides, signs)


def _equation(sides: list[str]) -> Any:
    sides = [_ROOTS.sub(r"\1", side) for side in sides]
    if _NAME.fullmatch(sides[-1]) and not _NAME.fullmatch(sides[0]):
        sides = sides[::-1]  # "5 = x"
    name = _NAME.fullmatch(sides[0]) is not None
    computed = sides
    if len(sides) > 2 and SUM_OF_NAMES.fullmatch(sides[0]):
        computed = sides[1:]  # "m + n = 256 + 37 = 293" says 293
    if not name and not any(map(_has_variable, computed)):
        if len({*map(parse_number, computed)} - {None}) > 1:
            raise Unreadable("two numbers that are said to be one")
        return _value(sides[-1])  # "2 + 3 = 5" says 5
    if _NAMES.fullmatch(sides[0]):
        return _value(sides[-1])
    return Equation(sides[0], _value(sides[-1]), name)


def _has_variable(text: str) -> bool:
    return any(not run.startswith("\\") for run in letter_runs(text))


def _inequality(sides: list[str], signs: list[str]) -> Any:
    """x > 2 and 1 < x <= 3 as intervals; all others as left > right."""
    if not set(signs) <= {"<", ">", r"\le", r"\ge"} or len(sides) > 3:
        raise Unreadable("relations of several kinds")
    if signs[0] in (">", r"\ge"):
        sides, signs = sides[::-1], signs[::-1]
    if not set(signs) <= {"<", r"\le"} and not set(signs) <= {">", r"\ge"}:
        raise Unreadable("an inequality that turns round")
    opener = "(" if signs[0] in "<>" else "["
    closer = ")" if signs[-1] in "<>" else "]"
    if len(sides) == 3:
        if not _IS_VARIABLE.fullmatch(sides[1]):
            raise Unreadable("an inequality without a variable in the middle")
        return _between(sides[1], opener, sides[0], sides[2], closer)
    if _IS_VARIABLE.fullmatch(sides[0]) and not _has_variable(sides[1]):
        return _between(sides[0], "(", _ALL_NUMBERS[0], sides[1], closer)
    if _IS_VARIABLE.fullmatch(sides[1]) and not _has_variable(sides[0]):
        return _between(sides[1], opener, sides[0], _ALL_NUMBERS[1], ")")
    return Inequality(sides[1], sides[0], signs[0] in "<>")


def _between(
    name: str, opener: str, low: str, high: str, closer: str
) -> Condition:
    interval = Bracketed(opener, (_value(low), _value(high)), closer)
    return Condition(squeezed(name), interval)


def _single(text: str) -> Any:
    if _ONLY_LITERAL.search(text):
        return _ratio(text) or Words((squeezed(text),))
    unit = _UNIT.search(text)
    if unit and _is_unit_after(text[: unit.start()], unit):
        return _with_unit(_value(text[: unit.start()]), unit)
    if _BROKEN.search(text):
        raise Unreadable("two numbers without a sign between them")
    for run in letter_runs(_LAYOUT.sub("", text)):
        if len(run) > 3 and not run.startswith("\\"):
            raise Unreadable(f"the word {run!r}")
    if r"\pm" not in text:
        text = re.sub(r"\\mp(?![A-Za-z])", r"\\pm", text)
    if text.count(r"\pm") == 1 and r"\mp" not in text:
        return _several([text.replace(r"\pm", sign) for sign in "+-"])
    return Expression(text)


def _with_unit(value: Any, unit: re.Match[str]) -> Any:
    if not isinstance(value, Number | Expression) or value.unit:
        return value
    power = (unit[3] or "").replace("{", "").replace("}", "").replace(" ", "")
    words = (unit[1] or unit[2]).strip()
    return replace(value, unit=read_unit(f" {words}{power}"))


def _is_unit_after(value: str, unit: re.Match[str]) -> bool:
    r"""Tell whether a match of _UNIT is a unit, and no factor of the value.

    The h of "\pi r^2 h" is a factor, and so may be "2\pi m" beside letters.
    """
    if unit[2] is None:
        return is_unit(f" {unit[1].strip()}")
    words = unit[2].split()
    return is_unit(" ".join(words)) and (
        len(words[0]) > 3
        or not _has_variable(value)
        and (len(words[0]) > 1 or words[0] in "gm")
    )


def _ratio(text: str) -> Number | Words | None:
    """The value of a ratio 3:2. A time, 12:30, has two digits at its end."""
    if _COLONS.fullmatch(text):
        parts = [int(part) for part in text.split(":")]
        common = math.gcd(*parts) or 1
        is_time = all(len(part.strip()) == 2 for part in text.split(":")[1:])
        return Words(tuple(parts if is_time else [n // common for n in parts]))
    colon = _COLON.fullmatch(text)
    if colon is None or len(colon[2]) == 2 or not int(colon[2]):
        return None
    return Number(Fraction(int(colon[1]), int(colon[2])))


def _check_brackets(text: str) -> None:
    """Intervals such as [2, 5) are balanced; any opener fits any closer."""
    if not balanced(text):
        raise Unreadable("brackets that do not match")
    if max(depths(text), default=0) > MAX_DEPTH:
        raise Unreadable("too many brackets in one another")
