"""Read a number exactly, however it is written.

`parse_number` turns the short text of an answer into a `fractions.Fraction`:
no float, no rounding, and nothing is ever evaluated as code. A text that is
not one whole, unambiguous number is None rather than a guess.

It takes four steps: `_plain` rewrites Unicode and LaTeX spellings as ASCII
ones and takes the wrapping off; what follows the last equals sign is left,
if what stands before it may lead to it; `_NUMBER` splits that into a number
and a unit; `_value` computes the fraction, provided that `units.is_unit`
accepts the unit.
"""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from rewards.spelling import plain
from rewards.units import SHORT, Unit, convert, is_unit, read_unit

MAX_ANSWER_CHARS = 1000  # no honest number is longer

_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"  # 1,234 or 1234
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)\ ?
    (?:
        (?:(?P<whole>[0-9]+)\ (?P<and>and\ )?)?
        (?P<numerator>{_DECIMAL})\ ?/\ ?(?P<denominator>{_DECIMAL})
    |
        (?P<decimal>{_DECIMAL})
        (?:(?:e|\ ?[*x]\ ?10\ ?\^)\ ?(?P<exponent>[-+]?[0-9]{{1,3}}))?
    )
    (?:\ ?(?P<scale>(?:hundred|thousand|million|billion|trillion|lakhs?
        |crores?)\b|[百千万萬亿億]))?
    (?P<unit>(?![0-9.,]).*)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "lakh": 10**5,
    "million": 10**6,
    "crore": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
    **dict.fromkeys("百", 10**2),
    **dict.fromkeys("千", 10**3),
    **dict.fromkeys("万萬", 10**4),
    **dict.fromkeys("亿億", 10**8),
}
# "$2.5M" is millions, "5 m" metres and "3k" may be a product: what stands
# with the letter decides.
_SHORTHAND = re.compile(
    r"([-+]?[0-9][0-9,.]*)( ?)([kKmMbBtT]|bn|mn)(?![\w^])(.*)"
)
_LETTER_SCALES = {
    "k": 10**3, "m": 10**6, "mn": 10**6, "b": 10**9, "bn": 10**9, "t": 10**12,
}  # fmt: skip
_MONEY = re.compile(
    r" ?(?:[$€£¥₹]|(?:dollars?|bucks|euros?|pounds|USD|EUR|GBP)\b)"
)
_COUNTED = re.compile(r" (?!of\b|per\b|long\b|tall\b)[a-z]{4,}")
# groups of thousands that can be nothing else
_GROUPS = re.compile(
    r"(?<![0-9.,/])(?:[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}"
    r"|[1-9][0-9]{0,2}(?: [0-9]{3})+|[1-9][0-9]{0,2}(?:'[0-9]{3})+"
    r"|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,})(?![0-9,'/]|[ .][0-9])"
)
_NUMERALS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = [
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
]

_DIGITS = re.compile(r"-?[0-9]+")  # most answers are no more than this


def _repeating(whole: str, once: str, again: str) -> str:
    """Return the fraction that 0.1666..., given as "0", "1", "6", is."""
    difference = int(whole + once + again) - int(whole + once or 0)
    return f" {difference}/{(10 ** len(again) - 1) * 10 ** len(once)}"


_ARGUMENT = r"\s*(?:\{{\s*({}[0-9.,]+)\s*\}}|([0-9]))"
# In this order: a rule may count on what the rules above it have done.
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\([$%])", r"\1"),
        (r"\\[()\[\]]", ""),
        (
            r"\\(?:text[a-z]*|math[a-z]+|[mh]box|emph|operatorname)"
            r"\s*\{([^{}]*)\}",
            r" \1 ",
        ),
        (r"(?<!\s)\s+\^", "^"),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree\b", "°"),
        (
            r"(?<![0-9])([0-9]*)\.([0-9]*)"
            r"\\(?:overline|dot|bar)\s*(?:\{([0-9]+)\}|([0-9]))",
            lambda m: _repeating(m[1], m[2], m[3] or m[4]),
        ),
        (r"\^\s*\{?\s*(st|nd|rd|th)\s*\}?(?![A-Za-z])", r"\1"),
        (r"\\(?:Omega|ohm)(?![A-Za-z])", "Ω"),
        (
            r"(?<=[0-9 ])(?:\\mu|μ)\s*"
            r"(?=(?:[mgslLAVWFNJHΩ]|Pa|mol)(?![A-Za-z]))",
            " µ",
        ),
        (r"\\(?:times|cdot)\b", "*"),
        (r"\\div\b", "/"),
        (r"\^\s*\{\s*([-+]?[0-9]+)\s*\}", r"^\1"),
        (
            r"\\frac" + _ARGUMENT.format("[-+]?") + _ARGUMENT.format(""),
            r" \1\2/\3\4",
        ),
    )
]
_HAS_LATEX = re.compile(r"[\\^μ]")
_IN_BRACKETS = re.compile(r"\\?[({\[]([^(){}\[\]]*)\\?[)}\]]")
# What may stand before the digits: "-$5", "US$ 5", "USD 5", "negative 5".
_PREFIX = re.compile(
    r"([-+]?) ?"
    r"((?:[A-Z]{2,3} ?)?[$€£¥₹]|(?:USD|EUR|GBP|Rs\.?)(?= ?[0-9]))? ?"
)
_MINUS = re.compile(r"^(?:minus|negative) (?=[0-9$])", re.IGNORECASE)
_ASIDE = re.compile(  # "18 (dollars)", but not "18 (thousand)"
    r" \((?![^()]*(?:hundred|thousand|illion))([A-Za-z][A-Za-z ,.'-]{2,})\)$"
)
_IN_WORDS = re.compile(r"([A-Za-z][A-Za-z -]*) \(([^()]+)\)")
_IN_DOLLARS = re.compile(r"\$([^$]+)\$(?![0-9])(.*)")

# What is named by more than a letter: S_{ABC}, |AB|, \overline{AB}, \cos A.
QUANTITY = (
    r"[A-Za-z]_\{[^{}=]*\}|\|[^|=<>x]+\|"
    r"|\\(?:overline|overrightarrow|vec|widehat|hat|bar) ?\{[^{}=]*\}"
    r"|\\(?:sin|cos|tan|cot|sec|csc|det|gcd|lcm) ?"
    r"(?:\\angle ?[A-Z]{1,3}|[A-Z]{1,3}|\\[a-z]+|\([^()x=]*\))"
)
# What may stand before an equals sign: a name, such as "x", "x_1", "f(2)",
# "AB" or "\theta", or a calculation with numbers and words.
_NAME = re.compile(
    r"(?:\\angle ?|\\triangle ?)?"
    r"(?:\\?[A-Za-z](?:_[A-Za-z0-9{}]{1,6}|'|\([^()=]{1,20}\))?"
    rf"|\\[a-z]+|[A-Z]{{2,4}}|{QUANTITY})"
)
_TERM = re.compile(
    r"[0-9]+(?:[.,][0-9]+)*%?|\.[0-9]+|[-+*/^!()\[\]{}$€£¥₹ ]"
    r"|(?<![0-9A-Za-z])x(?= ?[0-9$(])"
    r"|\\(?:frac|sqrt)(?![a-z])"
    r"|(?<![0-9A-Za-z\\])[A-Za-z'’-]{3,}:?"
    rf"|(?<=[0-9]) ?(?:{SHORT})(?![A-Za-z])"
    r"|(?<![0-9A-Za-z\\])(?:of|in|to|at|by|an?)(?![A-Za-z])"
)
_APPROXIMATELY = re.compile(
    r"\\approx(?![A-Za-z])|≈"
    r"|^\s*(?:about|approximately|approx\.?|roughly|around|circa|ca\.)\s",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"%|per ?cent|\bpct\b", re.IGNORECASE)
_DECIMALS = re.compile(r"\.([0-9]{1,20})")
SUM_OF_NAMES = re.compile(r"[A-Za-z](?: ?\+ ?[A-Za-z])+")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s,;$&]|\\[,;:()\[\] ]|\\q?quad|and\b|or\b"
    r"|\\text\s?\{[\s,]*(?:and|or)[\s,]*\})*"
)
_BOX_LABEL = re.compile(
    r"(?:\\text[a-z]*\s*\{\s*)?(?:the |my )?(?:final |correct )?"
    r"ans(?:wer)?(?:\s+is\b|\s*[:=])\s*:?\s*(?P<in>[^{}]*)",
    re.IGNORECASE,
)
# Policies misspell the command, and "\b" in a string that was meant to be raw
# is a backspace. "\boxed 42" needs no braces.
_BRACE = re.compile(
    r"(?:\\(?:boxed|f?box)|\x08oxed|(?<![\\A-Za-z])boxed)\s*\{|\\?[{}]"
    r"|\\boxed\s*(?P<bare>[-+]?[0-9](?:[0-9.,/]*[0-9])?)"
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, exactly, and the unit that is stated with it, if any."""

    value: Fraction
    unit: Unit | None = None

    def equals(self, other: "Quantity") -> bool:
        """Whether both are the same; a unit that one leaves out is ignored."""
        if self.unit is None or other.unit is None:
            return self.value == other.value
        return self.value == convert(other.value, other.unit, self.unit)


def parse_number(text: str) -> Fraction | None:
    r"""Return the number that `text` says, as a Fraction, or None.

    Understood: a sign (the Unicode minus too), thousands groups (also Indian
    ones, and those that blanks or apostrophes set apart), decimals, fractions,
    mixed numbers, scientific notation with an exponent of up to three digits,
    repeating decimals, currency, percent (the sign is a unit: GSM8K stores 50
    for 50%), units in words, the end of a calculation ("9 + 9 = 18"),
    brackets and quotes around it, the digits of any script, a box and LaTeX
    around it all. Not understood, hence None: anything else, two numbers,
    wrong thousands groups, a zero denominator, a product of variables, a
    letter that may be a scale or a unit ("500K"), more than MAX_ANSWER_CHARS
    characters.

    >>> parse_number("-1,234.50")
    Fraction(-2469, 2)
    >>> parse_number("$18 per day") == parse_number(r"\boxed{18.0}") == 18
    True
    >>> parse_number("2 1/2") == parse_number(r"2\frac{1}{2}") == 2.5
    True
    >>> parse_number("1.2e3") == parse_number(r"1.2 \times 10^{3}") == 1200
    True
    >>> parse_number("x = 18") == parse_number("2 * 9 = 18 eggs") == 18
    True
    >>> [parse_number(text) for text in ("12,34", "3 or 4", "1/0", "2ab", "")]
    [None, None, None, None, None]

    Source: exact fractions, as in Python's `fractions`.
    """
    quantity = parse_quantity(text)
    return None if quantity is None else quantity.value


def parse_quantity(text: str, variables: bool = False) -> Quantity | None:
    """Return the number and the unit that `text` says, or None.

    As `parse_number`; with `variables` the k of "3k" is one, no thousand.

    >>> parse_quantity("$2.5M").value, parse_quantity("500 K").value
    (Fraction(2500000, 1), Fraction(500, 1))
    >>> parse_quantity("2 hours").equals(parse_quantity("120 minutes"))
    True
    >>> print(parse_quantity("3k", variables=True), parse_quantity("n=3k"))
    None None
    """
    text = text.strip()
    if len(text) > MAX_ANSWER_CHARS:
        return None
    if _DIGITS.fullmatch(text):
        return Quantity(Fraction(int(text)))
    return _read(text, variables)


@functools.lru_cache(maxsize=4096)
def _read(text: str, variables: bool) -> Quantity | None:
    *left, right = _plain(_unboxed(text)).split("=")
    if len(left) > 1 and SUM_OF_NAMES.fullmatch(left[0].strip()):
        del left[0]  # "m + n = 256 + 37 = 293" computes what was asked for
    variables = variables or any(map(_is_variable, left))
    quantity = _quantity(right, variables)
    if quantity is None or not all(_leads_to(quantity, side) for side in left):
        return None
    return quantity


def possible_values(text: str) -> list[Fraction]:
    """Return what a letter behind the digits may make of them.

    For texts that `parse_quantity` leaves undecided, else [].

    >>> possible_values("500K"), possible_values("3k"), possible_values("5")
    ([Fraction(500000, 1), Fraction(500, 1)], [Fraction(3000, 1)], [])
    """
    if len(text) > MAX_ANSWER_CHARS:
        return []
    found = _SHORTHAND.fullmatch(_plain(_unboxed(text.strip())))
    number = parse_quantity(found[1]) if found and not found[4] else None
    if found is None or number is None:
        return []
    scaled = number.value * _LETTER_SCALES[found[3].lower()]
    return [scaled, number.value] if found[3] in "KMT" else [scaled]


def spelled_out(words: str) -> int | None:
    """Return the whole number that words say, below a million, or None.

    >>> spelled_out("eighteen"), spelled_out("one hundred and twenty-five")
    (18, 125)
    >>> print(spelled_out("blue"))
    None
    """
    total = part = 0
    for word in words.lower().replace("-", " ").split():
        if word in _NUMERALS:
            part += _NUMERALS.index(word)
        elif word in _TENS:
            part += 10 * (_TENS.index(word) + 2)
        elif word == "hundred":
            part *= 100
        elif word == "thousand":
            total, part = total + 1000 * part, 0
        elif word != "and":
            return None
    return total + part


def readings(text: str) -> list[str]:
    r"""Return the texts that `text` may be compared as, in their order.

    "65/3 ≈ 21.67" is the exact value, and the rounded one too if that
    is what the exact one rounds to. Any other text is compared as it is.

    >>> readings("65/3 ≈ 21.67"), readings(r"\pi \approx 3"), readings("5")
    (['65/3 ', ' 21.67'], ['\\pi '], ['5'])
    """
    exact, *rounded = _APPROXIMATELY.split(text)
    if len(rounded) != 1:
        return [text]
    name = exact.strip(" $")
    if not name or (name != r"\pi" and _NAME.fullmatch(name)):
        return rounded
    value, other = parse_number(exact), parse_number(rounded[0])
    decimals = _DECIMALS.search(rounded[0])
    half = Fraction(1, 2) / 10 ** (len(decimals[1]) if decimals else 0)
    if value is None or other is None or abs(value - other) > half:
        return [exact]
    return [exact, *rounded]


def has_percent(text: str) -> bool:
    """Tell whether a text names a percentage.

    >>> [has_percent(text) for text in (r"50\\%", "5 per cent", "５％", "5")]
    [True, True, True, False]
    """
    plainly = text if text.isascii() else plain(text)
    return _PERCENT.search(plainly) is not None


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return (start, end, content) of each well-formed box, in order.

    A box is \boxed{...} or \fbox{...} with balanced braces, also as \box{...}
    and boxed{...}, or a \boxed before a number. Of nested boxes only the
    outermost counts. Takes one pass over the text.

    >>> boxes(r"\boxed{1}, then \boxed{\frac{1}{2}} in a \boxed form")
    [(0, 9, '1'), (16, 35, '\\frac{1}{2}')]
    """
    if "box" not in text and "oxed" not in text:
        return []
    # For each open brace: the match that begins a box, or None.
    open_braces: list[re.Match[str] | None] = []
    found: list[tuple[int, int, str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "}" and open_braces:
            opener = open_braces.pop()
            if opener:
                content = text[opener.end() : brace.start()]
                while found and found[-1][0] > opener.start():
                    start, end, inner = found.pop()  # it stands in this one
                    if text[start:end] == content.strip():
                        content = inner
                found.append((opener.start(), brace.end(), content))
        elif brace["bare"]:
            found.append((brace.start(), brace.end(), brace["bare"]))
        elif brace[0].endswith("{") and brace[0] != r"\{":
            open_braces.append(brace if len(brace[0]) > 1 else None)
    return found


def box_statement(text: str) -> tuple[int, str] | None:
    r"""Return (start, content) of what the last boxes say, or None.

    Boxes with nothing but a comma, "and" or "or" between them are one
    statement of several values; with words between them, the last replaces
    those before it. One that is repeated with nothing between counts once, and
    a label such as "Answer:" inside a box is left out.

    >>> box_statement(r"So \boxed{3}, \boxed{5} and $\boxed{7}$.")
    (3, '3, 5, 7')
    >>> box_statement(r"First \boxed{12}. Wait, that is \boxed{10}.")
    (32, '10')
    """
    found = boxes(text)
    if not found:
        return None
    start, _, content = found.pop()
    contents = [_without_label(content)]
    while found and _BETWEEN_BOXES.fullmatch(text, found[-1][1], start):
        again = text[found[-1][1] : start].strip(" \n$") == ""
        start, _, content = found.pop()
        if not again or _without_label(content) != contents[-1]:
            contents.append(_without_label(content))
    return start, ", ".join(reversed(contents))


def _without_label(content: str) -> str:
    label = _BOX_LABEL.match(content.strip())
    if label is None:
        return content.strip()
    rest = content.strip()[label.end() :].removeprefix("}")
    return (label["in"] + rest).strip() or content.strip()


def _unboxed(text: str) -> str:
    while box := box_statement(text):
        text = box[1]
    return text


def _plain(text: str) -> str:
    """Return `text` in ASCII spelling, without wrapping around the number."""
    text = plain(text)
    if _HAS_LATEX.search(text):
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    text = _bare(" ".join(text.split()))
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = _bare(text[1:-1])
    if maths := _IN_DOLLARS.fullmatch(text):
        text = _bare(f"{maths[1]} {maths[2]}")
    return text


def _bare(text: str) -> str:
    return text.lstrip(" *_`\"'").rstrip(" *_`\"'.,;:")


def _quantity(text: str, variables: bool) -> Quantity | None:
    """Return the quantity that a plain text is, or None."""
    text = _bare(text)
    if brackets := _IN_BRACKETS.fullmatch(text):
        text = brackets[1].strip(" $\\")
        if "," in text:
            return None  # a set, a point or an interval
    if total := _sum_of_units(text):  # "1 hour 30 minutes"
        return total
    if words := _IN_WORDS.fullmatch(text):  # "eighteen (18)"
        inside = _quantity(words[2], variables)
        same = inside is not None and inside.value == spelled_out(words[1])
        return inside if same else None
    text = _MINUS.sub("-", text)
    prefix = _PREFIX.match(text)
    assert prefix
    currency, text = prefix[2] or "", prefix[1] + text[prefix.end() :]
    currency = currency[-1:] if currency[-1:] in "$€£¥₹" else currency
    text = _GROUPS.sub(lambda m: re.sub("[^0-9]", "", m[0]), text)
    if aside := _ASIDE.search(text):
        text = text[: aside.start()]
    scale, text = _shorthand(text, bool(currency), variables)
    number = _NUMBER.fullmatch(text)
    if number is None or not is_unit(number["unit"]):
        return None
    value = _value(number)
    if value is None or (aside and spelled_out(aside[1]) not in (None, value)):
        return None
    unit = read_unit(f"{currency} {number['unit']}")
    return Quantity(value * scale, unit)


_TWO_UNITS = re.compile(r"([0-9.]+ ?[a-z]+\.?)(?:,? and|,)? (?=[0-9])")


def _sum_of_units(text: str) -> Quantity | None:
    """Return what "1 hour 30 minutes" or "5 ft 6 in" is in the first unit."""
    parts = [
        part.strip() for part in _TWO_UNITS.sub(r"\1\n", text).split("\n")
    ]
    if len(parts) < 2:
        return None
    found = [_quantity(part, False) for part in parts]
    units = [one.unit for one in found if one and one.unit]
    if len(units) < len(parts) or not units[0].dimensions:
        return None
    if any(
        one.dimensions != other.dimensions or one.factor <= other.factor
        for one, other in zip(units, units[1:], strict=False)
    ):
        return None
    total = sum(one.value * one.unit.factor for one in found)  # type: ignore
    return Quantity(total / units[0].factor, units[0])


def _shorthand(text: str, money: bool, variables: bool) -> tuple[int, str]:
    """Return the factor that a letter behind the digits is, and the rest."""
    found = _SHORTHAND.fullmatch(text)
    if found is None:
        return 1, text
    digits, blank, letter, rest = found.groups()
    money = money or _MONEY.match(rest) is not None
    counted = not blank and letter in "kKMB" and _COUNTED.match(rest)
    thousands = letter == "k" and not (blank or rest or variables)
    if money or counted or thousands:
        return _LETTER_SCALES[letter.lower()], digits + rest
    if letter in "kMBbtT" or (letter == "K" and not blank):
        return 1, ""  # a product, or nobody knows
    return 1, text


def _is_variable(side: str) -> bool:
    """Tell whether the left side of an equation is a name: n, not "Total"."""
    return _NAME.fullmatch(side.strip(" *_:$")) is not None


def _leads_to(result: Quantity, side: str) -> bool:
    """Tell whether `side` may stand before an equals sign and a result.

    "2x = 18" says what 2x is, not what x is, and "17 = 18" says two things.
    """
    side = side.strip(" *_:")
    if _is_variable(side):
        return True
    quantity = _quantity(side, False)
    return (quantity is not None and quantity.equals(result)) or (
        quantity is None and not _TERM.sub("", side).strip()
    )


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the value of a match of _NUMBER, or None if it has none."""
    if number["decimal"]:
        power = Fraction(10) ** int(number["exponent"] or 0)
        value = _decimal(number["decimal"]) * power
    else:
        part, parts = map(_decimal, number.group("numerator", "denominator"))
        whole = int(number["whole"] or 0)
        # "4 10/3" is no mixed number, and "0 and 1/2" are two numbers
        if not parts or (number["whole"] and part >= parts):
            return None
        if number["and"] and not whole:
            return None
        value = whole + part / parts
    value *= _SCALES.get((number["scale"] or "").lower().rstrip("s"), 1)
    return -value if number["sign"] == "-" else value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
