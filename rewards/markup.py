r"""One spelling for mathematics in LaTeX, and its brackets.

`clean` takes off what only sets a text and writes each symbol in one way;
`rewards.notation` reads what is left. In it a comma joins values that are all
required, `\\land` conditions that hold together, `\\lor` those of which one
does.
"""

import functools
import re
from collections.abc import Callable, Iterable

from rewards.spelling import plain

MAX_CHARS = 1000  # math_verify refuses longer texts too
MAX_EXPONENT = 9999  # 2^2006 is an honest answer
MAX_FACTORIAL = 9999

_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]+")
BRACKETS = re.compile(r"\\[{}]|[()\[\]{}]")
_OPENERS = ("(", "[", "{", r"\{")
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
        "∉": r"\notin ",
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
        # of which numbers something is true, in words
        (r"(?:\\text\s*\{\s*)?\bis (?:an? |any )?(positive |natural )?"
         r"(integer|whole number|natural number|real number)(?:\s*\})?",
         lambda kind: r" \in \mathbb{"
         + ("R}" if kind[2] == "real number"
            else "N}" if "natural" in kind[0] else "Z}")
         + ("^+" if kind[1] == "positive " else "")),
        # a value on each line
        (r"(?<=[0-9A-Za-z)])[ \t]*\n\s*(?=[A-Za-z]\s*=|-?[0-9])", " , "),
        (r"\\text\s*\{([^{}]*[A-Za-z])[\s,]+(and|or)\s*\}",
         r"\\text{\1} \2 "),
        (r"\\text\s*\{\s*,?\s*or\s*\}|\bor\b|\\vee(?![A-Za-z])", r" \\lor "),
        (r"\\text\s*\{\s*[,;]?\s*and\s*\}|\band\b|\\wedge(?![A-Za-z])",
         r" \\land "),
        (r"\\text\s*\{\s*[,;]\s*\}|;", " , "),
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
        (r"\\not\s*\\in(?![A-Za-z])", r"\\notin "),
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
    >>> clean("x ≥ sqrt(2) or x = −1"), clean("]2, 5[")
    ('x \\ge \\sqrt{2} \\lor x = -1', '(2, 5)')
    """
    text = _DOLLARS.sub(" ", plain(text).translate(_SYMBOLS))
    if r"\begin" in text and len(text) <= MAX_CHARS:
        text = _PIECES.sub(_as_pairs, _SYSTEM.sub(_as_list, text))
    text = text.strip(" \n.,:").removeprefix("=").lstrip()
    if _PLAIN_SET.fullmatch(text):
        text = rf"\{{{text[1:-1]}\}}"
    text = outer_braces_off(text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    if not balanced(text):
        text = _OUTWARD.sub(_inward, text)
    return " ".join(text.split()).strip(" .,:")


# {100,200} and {x | x > 2} are sets, whatever LaTeX makes of such braces
_PLAIN_SET = re.compile(
    r"\{(?:[^{}]*[0-9],[0-9]{3}(?![0-9])[^{}]*"
    r"|\s*[A-Za-z]\s*(?:\\in[^{}|:]*(?:\{[NZQR]\})?[^{}|:]*)?[|:].*)\}",
    re.DOTALL,
)
# intervals as in ISO 31-11 and in France: ]2, 5[ is (2, 5)
_OUTWARD = re.compile(
    r"(?P<low>[\]\[(])(?P<ends>[^][(),]+,[^][(),]*[^][(), ][^][(),]*)"
    r"(?P<high>[\[\])])"
)


def _inward(interval: re.Match[str]) -> str:
    low = "(" if interval["low"] == "]" else interval["low"]
    high = ")" if interval["high"] == "[" else interval["high"]
    return f"{low}{interval['ends']}{high}"


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
    rf"\s*(?:,?\s*{_FOR_ALL}\s*(?:{_IN}|[A-Za-z])|(?:,|\\land)\s*{_IN}"
    rf"|,?\s*\(\s*{_FOR_ALL}?\s*{_IN}\s*\))(?=(?:\s*\\\}})?$)"
)
_ANY_REAL = re.compile(
    rf"^[A-Za-z]\s*\\in\s*{_ALL_REAL}\s*,\s*(?=.*[<>]|.*\\[gln]e )"
)


_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")


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
    if _RELATION.search(text[: found.start()]) and "for" not in found[0]:
        return text, ""  # a condition of its own: 2 < x < 5, x in Z
    domain = "".join(filter(None, found.groups()))
    return text[: found.start()] + text[found.end() :], squeezed(domain)


def letter_runs(text: str) -> list[str]:
    r"""Return the commands and the runs of letters in `text`, in order.

    >>> letter_runs(r"2\sin x + ab")
    ['\\sin', 'x', 'ab']
    """
    return _LETTERS.findall(text)


# --- Brackets ----------------------------------------------------------------


def depths(text: str) -> list[int]:
    """Return how deep in brackets each character of `text` lies.

    >>> depths("a(b)")
    [0, 0, 1, 0]
    """
    found, depth, last = [], 0, 0
    for bracket in BRACKETS.finditer(text):
        found += [depth] * (bracket.start() - last)
        opens = bracket[0] in _OPENERS
        depth += 1 if opens else -1
        found += [depth - 1 if opens else depth] * len(bracket[0])
        last = bracket.end()
    return found + [depth] * (len(text) - last)


def balanced(text: str) -> bool:
    """Tell whether each bracket has its other half, of whatever kind.

    >>> balanced("[2, 5)"), balanced("2)(5")
    (True, False)
    """
    ends = text.count("(") + text.count("[") + text.count("{")
    starts = text.count(")") + text.count("]") + text.count("}")
    return ends == starts and min(depths(text), default=0) >= 0


def split(
    text: str,
    separator: Callable[[str], Iterable[re.Match[str]]],
    keep: bool = False,
) -> list[str]:
    """Split `text` where `separator` finds one outside of all brackets.

    With `keep`, the separators stand between the parts, as in "x", "<", "3".

    >>> split("(1,2),3", comma)
    ['(1,2)', '3']
    """
    deep, parts, start = depths(text), [], 0
    for found in separator(text):
        if deep[found.start()] == 0:
            parts.append(text[start : found.start()])
            parts += [found[0]] * keep
            start = found.end()
    return [*parts, text[start:]]


def comma(text: str) -> Iterable[re.Match[str]]:
    """Find commas with a space after them, else all: "1,000, 2,000" is two.

    >>> [found.start() for found in comma("1,000, 2,000")]
    [5]
    """
    spaced = list(re.finditer(r",(?=\s)", text))
    deep = depths(text)
    if any(deep[found.start()] == 0 for found in spaced):
        return spaced
    return re.finditer(",", text)


def outer_braces_off(text: str) -> str:
    """Return `text` without the braces that hold all of it.

    >>> outer_braces_off("{{3}}"), outer_braces_off("{a}{b}")
    ('3', '{a}{b}')
    """
    while text.startswith("{") and text.endswith("}"):
        if not balanced(text[1:-1]):
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


def too_large(text: str) -> bool:
    r"""Tell by the looks of a text that its value has too many digits.

    >>> too_large("2^{2006}"), too_large("2^{3^2}"), too_large("5!")
    (False, False, False)
    >>> too_large("9^{9^{9}}"), too_large("(3+4)^{99999}")
    (True, True)
    >>> too_large("99999!"), too_large(r"\binom{99999}{3}")
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
