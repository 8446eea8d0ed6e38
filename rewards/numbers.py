"""Read a number exactly, however it is written.

`parse_number` turns the short text of an answer into a `fractions.Fraction`:
no float, no rounding, and nothing is ever evaluated as code. A text that is
not one whole, unambiguous number is None rather than a guess.

It takes four steps: `_plain` rewrites Unicode and LaTeX spellings as ASCII
ones and takes the wrapping off; what follows the last equals sign is left,
if what stands before it may lead to it; `_NUMBER` splits that into a number
and a unit; `_value` computes the fraction, provided that `is_unit` accepts
the unit.
"""

import re
from fractions import Fraction

from rewards.spelling import plain

MAX_ANSWER_CHARS = 1000  # no honest number is longer
MAX_UNIT_WORDS = 8  # "miles per hour on the way back" is still a unit

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
    (?:\ ?(?P<scale>k|hundred|thousand|million|billion|trillion)\b)?
    (?P<unit>(?![0-9.,]).*)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SCALES = {
    "k": 10**3,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}

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
        (r"\\(?:times|cdot)\b", "*"),
        (r"\\div\b", "/"),
        (r"\^\s*\{\s*([-+]?[0-9]+)\s*\}", r"^\1"),
        (
            r"\\frac" + _ARGUMENT.format("[-+]?") + _ARGUMENT.format(""),
            r" \1\2/\3\4",
        ),
    )
]
_IN_BRACKETS = re.compile(r"\\?[({]([^(){}]*)\\?[)}]")
# What may stand before the digits: "-$5", "US$ 5", "USD 5", "negative 5".
_PREFIX = re.compile(
    r"([-+]?) ?"
    r"(?:(?:[A-Z]{2,3} ?)?[$€£¥₹]|(?:USD|EUR|GBP|Rs\.?)(?= ?[0-9]))? ?"
)
_MINUS = re.compile(r"^(?:minus|negative) (?=[0-9$])", re.IGNORECASE)
_ASIDE = re.compile(  # "18 (dollars)", but not "18 (thousand)"
    r" \((?![^()]*(?:hundred|thousand|illion))[A-Za-z][A-Za-z ,.'-]{2,}\)$"
)

_LETTER = r"[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]"
_UNIT_MARK = re.compile(r" ?[%°¢$€£¥₹]?[ /]*")
_UNIT_WORD = re.compile(rf"{_LETTER}+(?:[.'’-]{_LETTER}+)*\.?(?:\^?[23])?")
_UNIT_LETTERS = frozenset("cfghlmsvw")  # "5 m" is five metres, "5x" is not 5
# What may follow the digits without a space, besides words of four letters
# and more: "5km" is five kilometres, but "2ab" is a product.
_SHORT_UNIT = (
    "[mcdknuµ]?m|[mkµ]?g|[mcd]?l|ft|yd|mi|in|sq|lbs?|oz|st|ton|pt|qt|gal|"
    "[mnµ]?s|sec|min|hrs?|am|pm|days?|yrs?|wk|mo|mph|kph|kmh|rpm|bpm|fps|"
    "usd|eur|gbp|cad|aud|inr|jpy|cts|[kmgt]b|[kmg]?hz|[km]?w|k?wh|k?pa|atm|"
    "psi|[km]?ev|k?j|k?cal|mol|deg|rad|pcs?|pts|ppm|bps|px|nd|rd|th"
)
_IS_SHORT_UNIT = re.compile(_SHORT_UNIT)
_NOT_A_UNIT = re.compile(  # words that change the number before them
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    "(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|"
    "hundred|thousand|[mbt]r?illion|half|halves|thirds?|quarters?|"
    "(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]{3,6}teen|"
    "[a-z]{3,5}tie|hundred|thousand|[mbt]r?illion)ths?|"
    "plus|minus|or|not|over|divided|squared|cubed|factorial|choose|mod|pi|"
    "is|isn't|are|aren't|was|wasn't|wrong|incorrect|than|twice|thrice|"
    "sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt"
)
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
    rf"|(?<=[0-9]) ?(?:{_SHORT_UNIT})(?![A-Za-z])"
    r"|(?<![0-9A-Za-z\\])(?:of|in|to|at|by|an?)(?![A-Za-z])"
)
_APPROXIMATELY = re.compile(
    r"\\approx(?![A-Za-z])|≈|^\s*(?:about|approximately|roughly)\s",
    re.IGNORECASE,
)
_DECIMALS = re.compile(r"\.([0-9]{1,20})")
SUM_OF_NAMES = re.compile(r"[A-Za-z](?: ?\+ ?[A-Za-z])+")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s,;$&]|\\[,;:()\[\] ]|\\q?quad|and\b|or\b"
    r"|\\text\s?\{[\s,]*(?:and|or)[\s,]*\})*"
)
# Policies misspell the command, and "\b" in a string that was meant to be raw
# is a backspace. "\boxed 42" needs no braces.
_BRACE = re.compile(
    r"(?:\\(?:boxed|f?box)|\x08oxed|(?<![\\A-Za-z])boxed)\s*\{|\\?[{}]"
    r"|\\boxed\s*(?P<bare>[-+]?[0-9](?:[0-9.,/]*[0-9])?)"
)


def parse_number(text: str) -> Fraction | None:
    r"""Return the number that `text` says, as a Fraction, or None.

    Understood: a sign (the Unicode minus too), thousands groups, decimals,
    fractions, mixed numbers, scientific notation with an exponent of up to
    three digits, repeating decimals, currency, percent (the sign is a unit:
    GSM8K stores 50 for 50%), units in words, the end of a calculation
    ("9 + 9 = 18"), brackets around it, full-width and invisible characters,
    a box and LaTeX around it all. Not understood,
    hence None: anything else, two numbers, wrong thousands groups, a zero
    denominator, a product of variables, more than MAX_ANSWER_CHARS
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
    text = text.strip()
    if len(text) > MAX_ANSWER_CHARS:
        return None
    if _DIGITS.fullmatch(text):
        return Fraction(int(text))
    *left, right = _plain(_unboxed(text)).split("=")
    if len(left) > 1 and SUM_OF_NAMES.fullmatch(left[0].strip()):
        del left[0]  # "m + n = 256 + 37 = 293" computes what was asked for
    value = _quantity(right)
    if value is None or not all(_leads_to(value, side) for side in left):
        return None
    return value


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

    >>> has_percent(r"50\\%"), has_percent("50 percent"), has_percent("0.5")
    (True, True, False)
    """
    return "%" in text or "percent" in text or "Percent" in text


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return (start, end, content) of each well-formed box, in order.

    A box is \boxed{...} or \fbox{...} with balanced braces, also as \box{...}
    and boxed{...}, or a \boxed before a number. Of nested boxes only the
    outermost counts. Takes one pass over the text.

    >>> boxes(r"\boxed{1}, then \boxed{\frac{1}{2}} in a \boxed form")
    [(0, 9, '1'), (16, 35, '\\frac{1}{2}')]
    """
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
    those before it. A value that is repeated counts once.

    >>> box_statement(r"So \boxed{3}, \boxed{5} and $\boxed{7}$.")
    (3, '3, 5, 7')
    >>> box_statement(r"First \boxed{12}. Wait, that is \boxed{10}.")
    (32, '10')
    """
    found = boxes(text)
    if not found:
        return None
    start, _, content = found.pop()
    contents = [content.strip()]
    while found and _BETWEEN_BOXES.fullmatch(text, found[-1][1], start):
        start, _, content = found.pop()
        contents.append(content.strip())
    return start, ", ".join(dict.fromkeys(reversed(contents)))


def _unboxed(text: str) -> str:
    while box := box_statement(text):
        text = box[1]
    return text


def _plain(text: str) -> str:
    """Return `text` in ASCII spelling, without wrapping around the number."""
    text = plain(text)
    if "\\" in text or "^" in text:
        for pattern, replacement in _LATEX:
            text = pattern.sub(replacement, text)
    return " ".join(text.split())


def _quantity(text: str) -> Fraction | None:
    """Return the number in a plain text of a number and its unit, or None."""
    text = text.lstrip(" *_`\"'$").rstrip(" *_`\"'$.,;:")
    if brackets := _IN_BRACKETS.fullmatch(text):
        text = brackets[1].strip(" $\\")
    text = _PREFIX.sub(r"\1", _MINUS.sub("-", text), count=1)
    number = _NUMBER.fullmatch(_ASIDE.sub("", text))
    if number is None or not is_unit(number["unit"]):
        return None
    return _value(number)


def _leads_to(value: Fraction, side: str) -> bool:
    """Tell whether `side` may stand before an equals sign and `value`.

    "2x = 18" says what 2x is, not what x is, and "17 = 18" says two things.
    """
    side = side.strip(" *_:")
    if _NAME.fullmatch(side):
        return True
    quantity = _quantity(side)
    return quantity == value or (
        quantity is None and not _TERM.sub("", side).strip()
    )


def is_unit(text: str) -> bool:
    """Tell whether `text` leaves the number before it as it is.

    >>> [is_unit(text) for text in (" cm^2", " per day", " thousand", "x")]
    [True, True, False, False]
    """
    glued = text[:1].isalpha()
    text = _UNIT_MARK.sub("", text, count=1)
    if not text:
        return True
    words = re.split(r"[ /]+", text)
    if len(words) > MAX_UNIT_WORDS:
        return False
    first = words[0].lower().rstrip("^23.")
    if len(first) == 1 and first not in _UNIT_LETTERS:
        return first == "a" and not glued and len(words) > 1  # "18 a day"
    if glued and 1 < len(first) < 4 and not _IS_SHORT_UNIT.fullmatch(first):
        return False
    return all(map(_is_unit_word, words))


def _is_unit_word(word: str) -> bool:
    return (
        _UNIT_WORD.fullmatch(word) is not None
        and not _NOT_A_UNIT.fullmatch(word.lower())
        # "5 times x" is not 5, but "18 a day" and "5 of type B" are fine
        and not (len(word) == 1 and word in "bdeijknopqrtuxyz")
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
    value *= _SCALES.get((number["scale"] or "").lower(), 1)
    return -value if number["sign"] == "-" else value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
