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
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rewards.numbers import (
    QUANTITY,
    SUM_OF_NAMES,
    is_unit,
    parse_number,
)
from rewards.spelling import plain

MAX_CHARS = 1000  # math_verify refuses longer texts too
MAX_DEPTH = 20  # of brackets and braces in one another
MAX_EXPONENT = 9999  # 2^2006 is an honest answer
MAX_FACTORIAL = 9999
MAX_VALUES = 100  # in a list


class Unreadable(ValueError):
    """A text that is no mathematics, or too large to be computed."""


# --- From text to tokens -----------------------------------------------------

_SYMBOLS = str.maketrans(
    {
        "√": r"\sqrt ",
        "∛": r"\sqrt[3] ",
        "⌊": r"\lfloor ",
        "⌋": r"\rfloor ",
        "⌈": r"\lceil ",
        "⌉": r"\rceil ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "±": r"\pm ",
        "ℝ": r"\mathbb{R}",
    }
)
_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|"
    "max|min|gcd|lcm"
)
_DEGREE = r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"
_DOLLARS = re.compile(r"\\[()\[\]]|\\?\$")
# In this order: a rule may count on what the rules above it have done.
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}", r" \1 "),
        (r"\\math(?:it|bf)\s*\{\s*([A-Za-z])\s*\}", r" \1 "),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"(?<!\\)\\$", ""),
        (rf"\\(?:operatorname|mathrm|text)\s*\{{\s*({_FUNCTIONS})\s*\}}",
         r"\\\1 "),
        (r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|mbox|operatorname)"
         r"\s*(?=\{)", r"\\text"),
        # a value on each line
        (r"(?<=[0-9A-Za-z)])[ \t]*\n\s*(?=[A-Za-z]\s*=|-?[0-9])", " , "),
        (r"\\text\s*\{\s*(?:[,;]\s*(?:(?:and|or)\s*)?|(?:and|or)\s*)\}"
         r"|\b(?:and|or)\b|;", " , "),
        # a ratio, "3 to 2"
        (r"\\colon(?![A-Za-z])|\{:\}", ":"),
        (r"^\s*([0-9]+)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*([0-9]+)\s*$",
         r"\1:\2"),
        # the base of a number, and braces around the letter of "{a}_{n}"
        (r"_\s*\{\s*\\text\s*\{\s*([0-9]+)\s*\}\s*\}", r"_{\1}"),
        (r"(?<![A-Za-z0-9}])\(([0-9]+)\)\s*_", r"\1_"),
        (r"(?<![A-Za-z}\]])\{([A-Za-z])\}(?=\s*[_^])", r"\1"),
        (r"\\binom\s*([0-9A-Za-z])\s*([0-9A-Za-z])", r"\\binom{\1}{\2}"),
        (r"(?:\{|^)([^{}\\]*)\\choose(?![A-Za-z])([^{}\\]*)(?:\}|$)",
         r"\\binom{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
        (r"(?<![\\A-Za-z])sqrt(?![A-Za-z])", r"\\sqrt"),
        (r"\\sqrt\s*(\[[^][]*\])?\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z])",
         r"\\sqrt\1{\2}"),
        (r"\\sqrt\s*(\[[^][]*\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
        (r"\\log_\s*(?:e|\{e\})(?![A-Za-z])", r"\\ln "),
        (r"\\lg(?![A-Za-z])", r"\\log_{10} "),
        (r"\\log_\s*([0-9])\s*([0-9]+)", r"\\log_{\1}{\2}"),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"\\text\s*\{\s*infinity\s*\}|"
         r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\\(?:leqslant|leq)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:varnothing|\{\s*\\\})", r"\\emptyset "),
        (r"\\mathbb\s*(?:\{R\}|R)|\\R(?![A-Za-z])", r"(-\\infty,\\infty)"),
        (r"\\(?:ldots|dots|cdots)(?![A-Za-z])|\.\.\.|…", r"\\dots "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\*\*", "^"),
        # degrees are a unit, but not to a function
        (r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*(?:[0-9]|\{[^{}]*\}))?"
         rf"\s*[({{]?\s*)([0-9]+(?:\.[0-9]+)?)\s*{_DEGREE}",
         r"\1(\\frac{\2\\pi}{180})"),
        (_DEGREE, ""),
        # a time of day: "4:30 p.m." and "4:30 \text{ PM}"
        (r"(?<=:[0-9]{2})\s*\\text\s*\{\s*([AaPp])\.?[Mm]\.?\s*\}",
         r" \1m"),
        (r"(?<=:[0-9]{2})\s*(?:([Aa])|[Pp])\.?[Mm](?![A-Za-z])",
         lambda noon: " AM" if noon[1] else " PM"),
    )
]  # fmt: skip


_SYSTEM = re.compile(
    r"(\\\{\s*)?\\begin\{(array|cases|aligned)\}(?:\{[lcr]*\})?"
    r"((?:(?!\\text|\\begin)(?:[^&]|&(?=\s*=)))*?)\\end\{\2\}"
    r"(?!\s*\\\})"
)
_PIECES = re.compile(
    r"\\begin\{cases\}((?:(?!\\begin|\\end\{).)*)\\end\{cases\}", re.DOTALL
)
_IF = re.compile(
    r"^\s*(?:\\text\s*\{\s*(?:if|for|when)\s*\}|(?:if|for|when)\b)"
)


def _as_list(system: re.Match[str]) -> str:
    """Write the rows of a system of equations as a list."""
    aligned = "&" in system[3]
    if not system[1] and system[2] != "cases" and not aligned:
        return system[0]
    return system[3].replace("&", "").replace(r"\\", ",")


def _as_pairs(pieces: re.Match[str]) -> str:
    """Write a function given in pieces as a set of (value ; condition)."""
    rows = [row.split("&") for row in pieces[1].split(r"\\") if row.strip()]
    if not all(len(row) == 2 for row in rows):
        return pieces[0]
    pairs = (
        f"({value.strip(' ,.;')} ; {_IF.sub('', condition).strip(' ,.;')})"
        for value, condition in rows
    )
    return rf"\{{{', '.join(pairs)}\}}"


@functools.lru_cache(maxsize=4096)
def clean(text: str) -> str:
    r"""Return `text` in one spelling: no dollars, one name for each symbol.

    >>> clean(r"$\left[2,\,\dfrac12\right)$.")
    '[2, \\frac{1}{2})'
    >>> clean("x ≥ sqrt(2) or x = −1")
    'x \\ge \\sqrt{2} , x = -1'
    """
    text = _DOLLARS.sub(" ", plain(text).translate(_SYMBOLS))
    if r"\begin" in text and len(text) <= MAX_CHARS:
        text = _PIECES.sub(_as_pairs, _SYSTEM.sub(_as_list, text))
    text = _outer_braces_off(text.strip(" \n.,:"))
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return " ".join(text.split()).strip(" .,:")


_DECIMAL = re.compile(
    r"[0-9]*\.[0-9]+(?![0-9]|\\(?:overline|dot|bar)(?![a-z]))"
)


def decimal_digits(text: str) -> int:
    """Count the significant digits of the longest decimal in `text`.

    >>> decimal_digits("0.0250 m"), decimal_digits("250")
    (3, 0)
    """
    decimals = _DECIMAL.findall(text)
    digits = [len(one.lstrip("0.").replace(".", "")) for one in decimals]
    return max(digits, default=0)


_ALL_REAL = r"\(-\\infty,\\infty\)"
_IN = (
    r"[A-Za-z]\s*(?:\\in\s*"
    rf"(\\mathbb\s*\{{?[NZQC]\}}?|{_ALL_REAL})(?:\^?\{{?[+*]\}}?)?"
    r"|\\text\s*\{\s*is\s+an?\s+[a-z ]{3,30}\})"
)
_FOR_ALL = (
    r"(?:\\forall|\\text\s*\{\s*"
    r"(?:where|for(?:\s+(?:all|any|every|each|some))?)"
    r"(?:\s+[a-z ]{3,20})?\s*\})"
)
_DOMAIN = re.compile(
    rf"\s*(?:,?\s*{_FOR_ALL}\s*(?:{_IN}|[A-Za-z])|,\s*{_IN}"
    rf"|,?\s*\(\s*{_FOR_ALL}?\s*{_IN}\s*\))(?=(?:\s*\\\}})?$)"
)
_ANY_REAL = re.compile(
    rf"^[A-Za-z]\s*\\in\s*{_ALL_REAL}\s*,\s*(?=.*[<>]|.*\\[gln]e )"
)


def without_domain(text: str) -> tuple[str, str]:
    r"""Return a clean text without what its variable runs over, and that.

    >>> without_domain(r"2k\pi , k \in \mathbb{Z}")
    ('2k\\pi', '\\mathbb{Z}')
    >>> without_domain(r"f(x)=x \text{ for all } x"), without_domain("5")
    (('f(x)=x', ''), ('5', ''))
    """
    text = _ANY_REAL.sub("", text)
    found = _DOMAIN.search(text)
    if not found or not found.start():
        return text, ""
    domain = "".join(filter(None, found.groups()))
    return text[: found.start()] + text[found.end() :], squeezed(domain)


# --- From tokens to values ---------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A number, exactly, and how many digits it has if it is a decimal."""

    value: Fraction
    digits: int = 0


@dataclass(frozen=True)
class Words:
    """What means the same only when it says the same: east, E, 12:30."""

    words: tuple


@dataclass(frozen=True)
class Expression:
    """A single expression, for the parser."""

    text: str


@dataclass(frozen=True)
class Several:
    """Values of which all are required, in any order."""

    values: tuple


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


_BRACKETS = re.compile(r"\\[{}]|[()\[\]{}]")
_OPENERS = ("(", "[", "{", r"\{")
_COMPARES = re.compile(r"\\(?:le|ge|ne|in|approx|equiv)(?![A-Za-z])|[=<>]")
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
    r"\s*[A-Za-z]\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?"
    r"(?:\\mid(?![A-Za-z])|[|:])(?=.*[<>=]|.*\\[lgn]e )"
)
# What may follow a value as its unit: "2\sqrt{3}\text{ cm}^2", "2\pi cm"
_UNIT = re.compile(
    r"(?<=[0-9)}i])(?:\s*\\text\s*\{([^{}]*)\}|\s([A-Za-z][A-Za-z ]*))"
    r"(\s*\^\s*\{?[23]\}?)?$"
)
_NAMES = re.compile(r"\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)")
_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]+")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:text|begin|end)\s*\{[^{}]*\}")
_COLON = re.compile(r"\s*([0-9]+)\s*:\s*([0-9]+)\s*")
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
    Number(value=Fraction(7, 2), digits=3)
    >>> read("x > 2") == read(r"(2, \infty)")
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
    if _too_large(cleaned):
        raise Unreadable("too large to be computed")
    return _value(cleaned)


def _value(text: str) -> Any:
    text = _outer_braces_off(text.strip(" .,"))
    if not text:
        raise Unreadable("empty")
    number = _number(text)
    if number:
        return number
    inside = _TEXT.fullmatch(text)
    if inside and re.search("[,:]", inside[1]):
        return _value(inside[1])
    words = _words(text)
    if words:
        return words
    if r"\dots" in text:
        return Words((squeezed(text),))
    parts = _split(text, _comma)
    if len(parts) > 1:
        return _several(parts)
    parts = _split(text, _UNION.finditer)
    if len(parts) > 1:
        return _several(parts)
    pieces = _split(text, _COMPARES.finditer, keep=True)
    if len(pieces) > 1:
        return _relation(pieces)
    return _bracketed(text) or _single(text)


def _number(text: str) -> Number | None:
    value = None if "=" in text else parse_number(text)
    return None if value is None else Number(value, decimal_digits(text))


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
    r"(?:\(([A-J])\)|([A-J])[).:](?=\s)|([A-J])(?=[).]?$))\s*([^\s,/&+].*)?"
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


def _several(parts: list[str]) -> Several:
    parts = [part for part in parts if part.strip(" .,")]
    if len(parts) > MAX_VALUES:
        raise Unreadable("too many values")
    flat: list[Any] = []
    for part in parts:
        value, is_set = _value(part), part.strip().startswith(r"\{")
        inside = isinstance(value, Several) and not is_set
        flat += value.values if inside else [value]
    if not flat:
        raise Unreadable("separators, and nothing between them")
    return Several(tuple(flat)) if len(flat) > 1 else flat[0]


def _bracketed(text: str) -> Bracketed | Several | None:
    """A point, an interval or a set, if one pair of brackets holds it all."""
    brackets = list(_BRACKETS.finditer(text))
    if not brackets or brackets[0].start() or brackets[-1].end() < len(text):
        return None
    opener, closer = brackets[0], brackets[-1]
    inside = text[opener.end() : closer.start()]
    if _depths(text)[opener.start()] or not _balanced(inside):
        return None
    parts = _split(inside, _comma)
    if opener[0] == r"\{" and (condition := _SUCH_THAT.match(inside)):
        return _value(inside[condition.end() :])
    if opener[0] == r"\{":
        return _several(parts)
    if len(parts) < 2 or opener[0] == "{":
        return None
    return Bracketed(opener[0], tuple(map(_value, parts)), closer[0])


def _relation(pieces: list[str]) -> Any:
    """An equation, or the values that an inequality leaves."""
    signs = pieces[1::2]
    sides = [_outer_braces_off(side.strip()) for side in pieces[::2]]
    if not all(sides):
        raise Unreadable("a side of a relation is empty")
    if signs == [r"\in"]:
        return _value(sides[1])
    if set(signs) <= {"=", r"\approx", r"\equiv"}:
        return _equation(sides)
    if signs == [r"\ne"] and _IS_VARIABLE.fullmatch(sides[0]):
        low = _interval("(", _ALL_NUMBERS[0], sides[1], ")")
        return Several((low, _interval("(", sides[1], _ALL_NUMBERS[1], ")")))
    return _inequality(sides, signs)


def _equation(sides: list[str]) -> Any:
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


def letter_runs(text: str) -> list[str]:
    r"""Return the commands and the runs of letters in `text`, in order.

    >>> letter_runs(r"2\sin x + ab")
    ['\\sin', 'x', 'ab']
    """
    return _LETTERS.findall(text)


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
        return _interval(opener, sides[0], sides[2], closer)
    if _IS_VARIABLE.fullmatch(sides[0]) and not _has_variable(sides[1]):
        return _interval("(", _ALL_NUMBERS[0], sides[1], closer)
    if _IS_VARIABLE.fullmatch(sides[1]) and not _has_variable(sides[0]):
        return _interval(opener, sides[0], _ALL_NUMBERS[1], ")")
    return Inequality(sides[1], sides[0], signs[0] in "<>")


def _interval(opener: str, low: str, high: str, closer: str) -> Bracketed:
    return Bracketed(opener, (_value(low), _value(high)), closer)


def _single(text: str) -> Any:
    if _ONLY_LITERAL.search(text):
        return _ratio(text) or Words((squeezed(text),))
    unit = _UNIT.search(text)
    if unit and _is_unit_after(text[: unit.start()], unit):
        return _value(text[: unit.start()])
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


def _ratio(text: str) -> Number | None:
    """The value of a ratio 3:2. A time, 12:30, has two digits at its end."""
    colon = _COLON.fullmatch(text)
    if colon is None or len(colon[2]) == 2 or not int(colon[2]):
        return None
    return Number(Fraction(int(colon[1]), int(colon[2])))


# --- Brackets ----------------------------------------------------------------


def _depths(text: str) -> list[int]:
    """Return how deep in brackets each character of `text` lies."""
    depths, depth, last = [], 0, 0
    for bracket in _BRACKETS.finditer(text):
        depths += [depth] * (bracket.start() - last)
        opens = bracket[0] in _OPENERS
        depth += 1 if opens else -1
        depths += [depth - 1 if opens else depth] * len(bracket[0])
        last = bracket.end()
    return depths + [depth] * (len(text) - last)


def _balanced(text: str) -> bool:
    depths = _depths(text)
    ends = text.count("(") + text.count("[") + text.count("{")
    starts = text.count(")") + text.count("]") + text.count("}")
    return ends == starts and min(depths, default=0) >= 0


def _check_brackets(text: str) -> None:
    """Intervals such as [2, 5) are balanced; any opener fits any closer."""
    if not _balanced(text):
        raise Unreadable("brackets that do not match")
    if max(_depths(text), default=0) > MAX_DEPTH:
        raise Unreadable("too many brackets in one another")


def _split(
    text: str,
    separator: Callable[[str], Iterable[re.Match[str]]],
    keep: bool = False,
) -> list[str]:
    """Split `text` where `separator` finds one outside of all brackets.

    With `keep`, the separators stand between the parts, as in "x", "<", "3".
    """
    depths, parts, start = _depths(text), [], 0
    for found in separator(text):
        if depths[found.start()] == 0:
            parts.append(text[start : found.start()])
            parts += [found[0]] * keep
            start = found.end()
    return [*parts, text[start:]]


def _comma(text: str) -> Iterable[re.Match[str]]:
    """A comma with a space after it, else any: "1,000, 2,000" is two."""
    spaced = list(re.finditer(r",(?=\s)", text))
    depths = _depths(text)
    if any(depths[comma.start()] == 0 for comma in spaced):
        return spaced
    return re.finditer(",", text)


def _outer_braces_off(text: str) -> str:
    while text.startswith("{") and text.endswith("}"):
        if not _balanced(text[1:-1]):
            break
        text = text[1:-1].strip()
    return text


def squeezed(text: str) -> str:
    r"""Return `text` without the blanks and braces that mean nothing.

    Those between two letters or digits do: 1/23 is not 12/3.

    >>> squeezed("x^{2} + 1"), squeezed(r"\frac{1}{23}"), squeezed("1 2")
    ('x^2+1', '\\frac{1}{23}', '1 2')
    """
    text = re.sub(r"([_^])\s*\{\s*([A-Za-z0-9])\s*\}", r"\1\2", text)
    words = " ".join(text.split())
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", words)


# --- What would take for ever ------------------------------------------------

_TOWER = re.compile(r"[0-9.]+(?:\^-?[0-9]+)+")
_FACTORIAL = re.compile(r"([0-9]+)\)*!")


def _too_large(text: str) -> bool:
    r"""Tell by the looks of a text that its value has too many digits.

    >>> _too_large("2^{2006}"), _too_large("2^{3^2}"), _too_large("5!")
    (False, False, False)
    >>> _too_large("9^{9^{9}}"), _too_large("(3+4)^{99999}")
    (True, True)
    >>> _too_large("99999!"), _too_large(r"\binom{99999}{3}")
    (True, True)
    """
    if re.search(r"\\binom\s*\{\s*[0-9]{5}", text):
        return True
    text = re.sub(r"[\s{}]", "", re.sub(r"\}\s*\{", ";", text))
    for factorial in _FACTORIAL.finditer(text):
        if _above(factorial[1], MAX_FACTORIAL):
            return True
    if re.search(r"\^[-+(]*[0-9]{5,}", text):
        return True
    return any(map(_tower_too_high, _TOWER.findall(text)))


def _tower_too_high(tower: str) -> bool:
    _, *exponents = tower.replace("-", "").split("^")
    height = 1
    for exponent in reversed(exponents):
        if _above(exponent, MAX_EXPONENT) or height > 20:
            return True
        height = int(exponent) ** height
    return height > MAX_EXPONENT


def _above(digits: str, limit: int) -> bool:
    return len(digits) > len(str(limit)) or int(digits) > limit
