"""Read a number exactly, however it is written.

`parse_number` turns the short text of an answer into a `fractions.Fraction`:
no float, no rounding, and nothing is ever evaluated as code. A text that is
not one whole, unambiguous number is None rather than a guess.

It takes three steps: `_plain` rewrites Unicode and LaTeX spellings as ASCII
ones and takes the wrapping off; `_NUMBER` splits the rest into a number and a
unit; `_value` computes the fraction, provided that `_is_unit` accepts the
unit.
"""

import re
from fractions import Fraction

MAX_ANSWER_CHARS = 1000  # no honest number is longer
MAX_UNIT_WORDS = 8  # "miles per hour on the way back" is still a unit

_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"  # 1,234 or 1234
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)\ ?
    (?:
        (?:(?P<whole>[0-9]+)\ (?:and\ )?)?
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

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\uff0d", "-"),
        **dict.fromkeys("\u00d7\u00b7\u22c5", "*"),
        "\u2044": "/",  # the fraction slash
        "½": " 1/2",
        "⅓": " 1/3",
        "⅔": " 2/3",
        "¼": " 1/4",
        "¾": " 3/4",
    }
)
# In this order: a rule may count on what the rules above it have done.
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\([$%])", r"\1"),
        (r"\\[()\[\]]|\\left\b|\\right\b", ""),
        # a thousands separator: 1{,}000 or 1\,000 or a thin space
        (
            r"(?<=[0-9])(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])"
            r"(?=[0-9]{3}(?![0-9]))",
            ",",
        ),
        (r"\\[,;:! ]|\\q?quad\b|~", " "),
        (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*(?:\\circ\b|\{\s*\\circ\s*\})|\\degree\b", "°"),
        (r"\\(?:times|cdot)\b", "*"),
        (r"\^\s*\{\s*([-+]?[0-9]+)\s*\}", r"^\1"),
        (
            r"\\[dtc]?frac\s*\{\s*([-+]?[0-9.,]+)\s*\}"
            r"\s*\{\s*([0-9.,]+)\s*\}",
            r" \1/\2",
        ),
        (r"\\[dtc]?frac\s*([0-9])\s*([0-9])", r" \1/\2"),
    )
]
# What may stand before the digits: "x = 5", "-$5", "US$ 5", "USD 5".
_PREFIX = re.compile(
    r"(?:[A-Za-z]? ?= ?)?([-+]?) ?"
    r"(?:(?:[A-Z]{2,3} ?)?[$€£¥₹]|(?:USD|EUR|GBP|Rs\.?)(?= ?[0-9]))? ?"
)

_LETTER = r"[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]"
_UNIT_MARK = re.compile(r" ?[%°¢$€£¥₹]?[ /]*")
_UNIT_WORD = re.compile(
    rf"{_LETTER}+(?:[.'’-]{_LETTER}+)*\.?(?:\^?[23]|[²³])?"
)
_UNIT_LETTERS = frozenset("cfghlmsvw")  # "5 m" is five metres, "5x" is not 5
_NOT_A_UNIT = re.compile(  # words that change the number before them
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    "(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|"
    "hundred|thousand|[mbt]r?illion|half|halves|thirds?|quarter|"
    "plus|minus|or|not|squared|cubed|factorial|pi"
)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\?[{}]")


def parse_number(text):
    r"""Return the number that `text` says, as a Fraction, or None.

    Understood: a sign (the Unicode minus too), thousands groups, decimals,
    fractions, mixed numbers, scientific notation with an exponent of up to
    three digits, currency, percent (the sign is a unit: GSM8K stores 50 for
    50%), units in words, a box and LaTeX around it all. Not understood, hence
    None: anything else, two numbers, wrong thousands groups, a zero
    denominator, more than MAX_ANSWER_CHARS characters.

    >>> parse_number("-1,234.50")
    Fraction(-2469, 2)
    >>> parse_number("$18 per day") == parse_number(r"\boxed{18.0}") == 18
    True
    >>> parse_number("2 1/2") == parse_number(r"2\frac{1}{2}") == 2.5
    True
    >>> parse_number("1.2e3") == parse_number(r"1.2 \times 10^{3}") == 1200
    True
    >>> [parse_number(text) for text in ("12,34", "3 or 4", "1/0", "5x", "")]
    [None, None, None, None, None]
    """
    text = text.strip()
    if len(text) > MAX_ANSWER_CHARS:
        return None
    number = _NUMBER.fullmatch(_plain(_unboxed(text)))
    if number is None or not _is_unit(number["unit"]):
        return None
    return _value(number)


def last_box(text):
    r"""Return (start, content) of the last well-formed box, or None.

    A box is \boxed{...} or \fbox{...} with balanced braces. Of nested boxes
    the outermost counts. Takes one pass over the text.

    >>> last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}} in a \boxed form")
    (22, '\\frac{1}{2}')
    """
    open_braces = []  # for each open brace: where a box begins, or None
    last = None
    for brace in _BRACE.finditer(text):
        if brace[0] == "}" and open_braces:
            opener = open_braces.pop()
            if opener:
                last = opener, brace
        elif brace[0] == "{":
            open_braces.append(None)
        elif brace[0][:2] in (r"\b", r"\f"):
            open_braces.append(brace)
    if last is None:
        return None
    opener, closer = last
    return opener.start(), text[opener.end() : closer.start()]


def _unboxed(text):
    while box := last_box(text):
        text = box[1]
    return text


def _plain(text):
    """Return `text` in ASCII spelling, without wrapping around the number."""
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = " ".join(text.translate(_CHARACTERS).split())
    text = text.lstrip(" *_`\"'$").rstrip(" *_`\"'$.,;:")
    return _PREFIX.sub(r"\1", text, count=1)


def _is_unit(text):
    """Tell whether `text` leaves the number before it as it is."""
    text = _UNIT_MARK.sub("", text, count=1)
    if not text:
        return True
    words = re.split(r"[ /]+", text.lower())
    if len(words) > MAX_UNIT_WORDS:
        return False
    if len(words[0]) == 1 and words[0] not in _UNIT_LETTERS:
        return False
    return all(map(_is_unit_word, words))


def _is_unit_word(word):
    return _UNIT_WORD.fullmatch(word) and not _NOT_A_UNIT.fullmatch(word)


def _value(number):
    """Return the value of a match of _NUMBER, or None if it has none."""
    if number["decimal"]:
        value = _decimal(number["decimal"])
        value *= Fraction(10) ** int(number["exponent"] or 0)
    else:
        value = _fraction(number)
    if value is None:
        return None
    value *= _SCALES.get((number["scale"] or "").lower(), 1)
    return -value if number["sign"] == "-" else value


def _decimal(digits):
    return Fraction(digits.replace(",", ""))


def _fraction(number):
    numerator = _decimal(number["numerator"])
    denominator = _decimal(number["denominator"])
    if denominator == 0:
        return None
    if number["whole"] is None:
        return numerator / denominator
    # "4 10/3" is no mixed number, so it has no value that can be trusted
    if numerator >= denominator:
        return None
    return int(number["whole"]) + numerator / denominator
