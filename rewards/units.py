"""Units: what may stand behind a number, and when two of them agree.

A unit that one text states and the other leaves out is left out of account.
Where both state one, they have to agree: "2 hours" is "120 minutes" and not
"2 minutes". Units are known by their dimensions (the SI, and what word
problems use beside it); any other word is a thing that is counted, and two
phrases agree when one says nothing that the other doesn't, as "red marbles"
and "marbles". Opposites never agree: "10% more" is not "10% less".
"""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_UNIT_WORDS = 8  # "miles per hour on the way back" is still a unit

Dimensions = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """A unit: value in base units = value * factor + offset.

    Attributes:
        dimensions: base units with their exponents, sorted; () for a count.
        factor, offset: to the base units.
        things: the words that are no known unit, in the singular.
        sense: the words of `_OPPOSITES` beside it.
    """

    dimensions: Dimensions = ()
    factor: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)
    things: frozenset[str] = frozenset()
    sense: frozenset[str] = frozenset()

    @property
    def is_known(self) -> bool:
        """Whether it says more than what is counted."""
        return bool(self.dimensions) or self.factor != 1


_INCH = Fraction(254, 10_000)
_POUND = Fraction(45_359_237, 100_000)
_GALLON = 231 * _INCH**3
_ROWS: tuple[tuple[str, Fraction | int, str], ...] = (
    # dimensions, factor to the base units, symbols and names
    ("length", 1, "m meter metre"),
    ("length", _INCH, "in inch ″"),
    ("length", 12 * _INCH, "ft foot"),
    ("length", 36 * _INCH, "yd yard"),
    ("length", 63_360 * _INCH, "mi mile"),
    ("mass", 1, "g gram gramme"),
    ("mass", _POUND, "lb pound £"),
    ("mass", _POUND / 16, "oz ounce"),
    ("time", 1, "s sec second"),
    ("time", 60, "min minute"),
    ("time", 3600, "h hr hour"),
    ("time", 86_400, "day"),
    ("time", 7 * 86_400, "wk week"),
    ("month", 1, "mo month"),
    ("month", 12, "yr year"),
    ("length^3", Fraction(1, 1000), "l liter litre"),
    ("length^3", _GALLON, "gal gallon"),
    ("length^3", _GALLON / 4, "qt quart"),
    ("length^3", _GALLON / 8, "pint"),
    ("length^3", _GALLON / 16, "cup"),
    ("length^3", _GALLON / 256, "tbsp tablespoon"),
    ("length^3", _GALLON / 768, "tsp teaspoon"),
    ("length time^-1", 63_360 * _INCH / 3600, "mph"),
    ("length time^-1", Fraction(1000, 3600), "kmh kph"),
    ("angle", 1, "° deg degree"),
    ("radian", 1, "rad radian"),
    ("temperature", 1, "K kelvin"),
    ("temperature", 1, "°C celsius"),
    ("temperature", Fraction(5, 9), "°F fahrenheit"),
    ("usd", 1, "$ dollar usd buck"),
    ("usd", Fraction(1, 100), "¢ cent penny ct"),
    ("eur", 1, "€ euro eur"),
    ("yen", 1, "¥ yen jpy 円"),
    ("yuan", 1, "yuan rmb cny 元"),
    ("rupee", 1, "₹ rupee inr rs"),
    ("", 12, "dozen"),
    # of whatever is measured: "12 square units"
    ("unit", 1, "unit"),
    ("current", 1, "A amp ampere"),
    ("amount", 1, "mol mole"),
    ("time^-1", 1, "Hz hertz"),
    ("length mass time^-2", 1000, "N newton"),
    ("length^2 mass time^-2", 1000, "J joule"),
    ("length^2 mass time^-2", 3_600_000, "Wh"),
    ("length^2 mass time^-3", 1000, "W watt"),
    ("length^-1 mass time^-2", 1000, "Pa pascal"),
    ("current^-1 length^2 mass time^-3", 1000, "V volt"),
    ("current^-2 length^2 mass time^-3", 1000, "Ω ohm"),
)
_OFFSETS = {
    **dict.fromkeys(("°C", "celsius"), Fraction(27_315, 100)),
    **dict.fromkeys(("°F", "fahrenheit"), Fraction(45_967, 100) * 5 / 9),
}


def _dimensions(text: str) -> Dimensions:
    pairs = (part.partition("^") for part in text.split())
    return tuple((name, int(power or 1)) for name, _, power in pairs)


_UNITS = {
    name: Unit(
        _dimensions(text), Fraction(factor), _OFFSETS.get(name, Fraction(0))
    )
    for text, factor, names in _ROWS
    for name in names.split()
}
_PREFIXES = {
    "n": Fraction(1, 10**9),
    "µ": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "c": Fraction(1, 100),
    "d": Fraction(1, 10),
    "k": Fraction(1000),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
}
_PREFIX_NAMES = {
    "nano": "n", "micro": "µ", "milli": "m", "centi": "c", "deci": "d",
    "kilo": "k", "mega": "M", "giga": "G",
}  # fmt: skip
_SYMBOLS_WITH_PREFIX = frozenset(
    ("m", "g", "s", "l", "L", "A", "K", "mol", "Hz", "N", "J", "W", "Wh")
    + ("Pa", "V", "Ω")
)
_NAMES_WITH_PREFIX = frozenset(
    [
        "meter",
        "metre",
        "gram",
        "gramme",
        "second",
        "liter",
        "litre",
        "ampere",
        "kelvin",
        "mole",
        "hertz",
        "newton",
        "joule",
        "watt",
        "pascal",
        "volt",
        "ohm",
    ]
)
_OPPOSITES = {
    **dict.fromkeys(("more", "greater", "higher"), ("less", "fewer", "lower")),
    **dict.fromkeys(("less", "fewer", "lower"), ("more", "greater", "higher")),
    **{
        one: (other,)
        for pair in (
            "left right", "above below", "up down", "north south",
            "east west", "before after", "early late", "ahead behind",
            "increase decrease", "profit loss", "gain loss",
        )
        for one, other in (pair.split(), pair.split()[::-1])
    },
    "loss": ("profit", "gain"),
}  # fmt: skip
_IRREGULAR = {
    "people": "person", "men": "man", "women": "woman", "feet": "foot",
    "children": "child", "kids": "child", "inches": "inch", "pennies": "penny",
}  # fmt: skip

# of any script, but Greek, which names variables ("5θ" is a product), those
# of mathematics, and raised ones
_LETTER = (
    r"[^\W\d_\u0370-\u03ff\u02b0-\u02ff\u1d2c-\u1d6a\u2070-\u209f"
    r"\U0001d400-\U0001d7ff]"
)
_MARK = re.compile(r" ?[%°¢$€£¥₹]?[ /]*")
_WORD = re.compile(
    rf"(?:{_LETTER}|[°Ω$€£¥₹¢])+(?:[.'’-]{_LETTER}+)*\.?(?:\^?-?[1-9])?"
)
# "5 m" is five metres, "5x" is not 5
_LETTERS = frozenset("cfghlmsvwCFGHLMSVW")
# after a blank only: "5 N" is five newtons, and "5N" may be a product
_LETTERS_APART = frozenset("NJKATΩ")
# What may follow the digits without a space, besides words of four letters
# and more: "5km" is five kilometres, but "2ab" is a product.
SHORT = (
    "[mcdknuµ]?m|[mkµ]?g|[mcd]?l|ft|yd|mi|in|sq|lbs?|oz|st|ton|pt|qt|gal|"
    "[mnµ]?s|sec|min|hrs?|am|pm|days?|yrs?|wk|mo|mph|kph|kmh|rpm|bpm|fps|"
    "usd|eur|gbp|cad|aud|inr|jpy|cts|[kmgt]b|[kmg]?hz|[km]?w|k?wh|k?pa|atm|"
    "psi|[km]?ev|k?j|k?cal|mol|deg|rad|pcs?|pts|ppm|bps|px|nd|rd|th|"
    "[mkµ]?v|[mµ]a|[kmµ]?ω|kn|µf"
)
_IS_SHORT = re.compile(SHORT)
_NO_UNIT = re.compile(  # words that change the number before them
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    "(?:thir|four|fif|six|seven|eigh|nine)teen|"
    "(?:twen|thir|for|fif|six|seven|eigh|nine)ty|"
    "hundred|thousand|[mbt]r?illion|lakhs?|crores?|half|halves|thirds?|"
    "quarters?|"
    "(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]{3,6}teen|"
    "[a-z]{3,5}tie|hundred|thousand|[mbt]r?illion)ths?|"
    "plus|minus|or|not|over|divided|squared|cubed|factorial|choose|mod|pi|"
    "is|isn't|are|aren't|was|wasn't|wrong|incorrect|than|twice|thrice|"
    "sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|"
    # thousand and million elsewhere
    "mil|mille|millones|millón|milhão|milhões|tausend|millionen?|"
    "milliards?|milliarden?|тысяч[аи]?|миллион(?:а|ов)?|миллиард(?:а|ов)?|"
    "[百千万萬亿億兆]"
)
_PER = frozenset(("per", "a", "an", "each", "every"))
# After these only more words about the same thing follow.
_CUTS = frozenset(
    [
        "of",
        "for",
        "at",
        "from",
        "to",
        "with",
        "by",
        "that",
        "who",
        "which",
        "on",
        "since",
        "until",
        "as",
        "into",
        "during",
        "because",
        "when",
        "after",
        "before",
        "if",
        "and",
        "so",
        "old",
        "long",
        "tall",
        "high",
        "wide",
        "deep",
        "away",
        "apart",
        "thick",
        "sold",
        "left",
        "remaining",
    ]
)
# These say nothing of what is counted.
_EMPTY = frozenset(
    [
        "total",
        "altogether",
        "all",
        "more",
        "extra",
        "now",
        "only",
        "exactly",
        "together",
        "overall",
        "in",
        "the",
        "each",
        "st",
        "nd",
        "rd",
        "th",
    ]
)


_RAISED = re.compile(r"\b([A-Za-z]{3,}) (squared|cubed)\b")


def _with_powers(text: str) -> str:
    """Write "second squared" as "second^2"; "5 squared" has no such word."""
    return _RAISED.sub(
        lambda found: (
            f"{found[1]}^{2 if found[2] == 'squared' else 3}"
            if _known(found[1])
            else found[0]
        ),
        text,
    )


def is_unit(text: str) -> bool:
    """Tell whether `text` leaves the number before it as it is.

    >>> [is_unit(text) for text in (" cm^2", " per day", " thousand", "x")]
    [True, True, False, False]
    >>> [is_unit(text) for text in (" N", "N", " m*s^-2", " 元")]
    [True, False, True, True]
    """
    glued = text[:1].isalpha() or text[:1] == "Ω"
    text = _with_powers(_MARK.sub("", text, count=1))
    if not text:
        return True
    words = re.split(r"[ /*]+", text)
    if len(words) > MAX_UNIT_WORDS or text[0] == "*":
        return False
    first = words[0].rstrip("^-123456789.")
    if len(first) == 1 and first.isascii() or first == "Ω":
        apart = first == "Ω" or (first in _LETTERS_APART and not glued)
        if first not in _LETTERS and not apart:
            return first == "a" and not glued and len(words) > 1  # "18 a day"
    short = glued and first.isascii() and 1 < len(first) < 4
    if short and not _IS_SHORT.fullmatch(first.lower()):
        return False
    # "5m people" may be five million; "5m long" is not
    if glued and len(first) == 1 and first.isascii() and len(words) > 1:
        follows = words[1].lower()
        if " " in text and follows not in _CUTS | _PER | _EMPTY:
            return False
    return all(map(_is_unit_word, words))


def _is_unit_word(word: str) -> bool:
    return (
        _WORD.fullmatch(word) is not None
        and not _NO_UNIT.fullmatch(word.lower())
        and ("µ" not in word or _known(_exponent(word)[0]) is not None)
        # "5 times x" is not 5, but "18 a day" and "5 of type B" are fine
        and not (len(word) == 1 and word in "bdeijknopqrtuxyz")
    )


@functools.lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit | None:
    """Return the unit that `text` states, or None if it states none.

    `text` is one that `is_unit` has accepted. Percent is none, and so is a
    word that only says that all were counted.

    >>> read_unit(" per day").dimensions, read_unit(" in total")
    ((('time', -1),), None)
    >>> read_unit(" red marbles").things == {"red", "marble"}
    True
    >>> read_unit(" km/h") == read_unit(" kilometers per hour")
    True
    """
    text = _with_powers(text)
    text = re.sub(r"\bdegrees? (?=[CF]\b|celsius|fahrenheit)", "", text)
    text = re.sub(r"° ?(?=[CF]\b)", "°", text)
    text = re.sub(r"[()%]|\bper ?cent\b|\bpct\b", " ", text)
    text = text.replace("/", " per ")
    words = text.replace("*", " ").split()
    if words[:1] == ["in"] and len(words) > 1:  # "72 in total"
        return None
    powers: dict[str, int] = {}
    factor, offset = Fraction(1), Fraction(0)
    things: set[str] = set()
    sense = frozenset(_OPPOSITES).intersection(map(str.lower, words))
    sign, power = 1, 1
    for word in words:
        bare, exponent = _exponent(word)
        lower = bare.lower()
        if lower in _PER and (word != words[-1] or lower == "per"):
            sign = -1
        elif lower in ("square", "sq", "cubic", "cu"):
            power = 3 if lower.startswith("cu") else 2
        elif lower in _CUTS or (lower == "in" and things):
            break  # "marbles in the bag"; "5 in" are inches
        elif known := _known(bare):
            exponent *= sign * power
            power = 1
            for base, own in known.dimensions:
                powers[base] = powers.get(base, 0) + own * exponent
            factor *= known.factor**exponent
            offset = known.offset
        elif not {lower, _singular(lower)} & (_EMPTY | sense):
            things.add(_singular(lower))
    dimensions = tuple(sorted((b, n) for b, n in powers.items() if n))
    if len(dimensions) > 1:  # "5 units per day" are 5 per day
        dimensions = tuple(pair for pair in dimensions if pair[0] != "unit")
    if not (dimensions or things or factor != 1 or sense):
        return None
    return Unit(dimensions, factor, offset, frozenset(things), sense)


def convert(value: Fraction, unit: Unit, to: Unit) -> Fraction | None:
    """Return a value in another unit, or None where the two don't agree.

    >>> hours, minutes = read_unit(" hours"), read_unit(" minutes")
    >>> convert(Fraction(2), hours, minutes)
    Fraction(120, 1)
    >>> print(convert(Fraction(2), hours, read_unit(" eggs")))
    None
    """
    if not _agree(unit, to):
        return None
    if _rate_left_out(unit, to) or "unit" in (_base(unit), _base(to)):
        return value
    return (value * unit.factor + unit.offset - to.offset) / to.factor


def _agree(one: Unit, other: Unit) -> bool:
    if any(one.sense.intersection(_OPPOSITES[word]) for word in other.sense):
        return False
    if not all(unit.is_known or unit.things for unit in (one, other)):
        return True  # one says no more than "5 more"
    if "unit" in (_base(one), _base(other)):
        return _power(one) == _power(other)
    if one.dimensions != other.dimensions and not _rate_left_out(one, other):
        return False
    if one.things and other.things:
        return one.things <= other.things or other.things <= one.things
    return one.is_known and other.is_known


def _base(unit: Unit) -> str:
    """Return what a unit is a power of, "" for a count or a composed one."""
    return unit.dimensions[0][0] if len(unit.dimensions) == 1 else ""


def _power(unit: Unit) -> int:
    """Return 2 for an area, 3 for a volume, 1 for all else."""
    is_length = _base(unit) in ("unit", "length")
    return unit.dimensions[0][1] if is_length else 1


def _rate_left_out(one: Unit, other: Unit) -> bool:
    """Tell whether "$18 per day" stands beside "$18": the day is implied."""
    above = [
        tuple((base, n) for base, n in unit.dimensions if n > 0)
        for unit in (one, other)
    ]
    below = [
        tuple((base, n) for base, n in unit.dimensions if n < 0)
        for unit in (one, other)
    ]
    of_money = all(base in _MONEY for base, _ in above[0])
    return above[0] == above[1] and of_money and below.count(()) == 1


_MONEY = frozenset(("usd", "eur", "yen", "yuan", "rupee"))


def _exponent(word: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*?)\.?(?:\^?(-?[1-9]))?", word)
    assert found
    return found[1], int(found[2] or 1)


def _known(word: str) -> Unit | None:
    """Return the unit of that symbol or name; its case tells symbols apart."""
    for name in (word, word.lower(), _singular(word.lower())):
        if name in _UNITS:
            return _UNITS[name]
    base = word[1:]
    if word[:1] in _PREFIXES and base in _SYMBOLS_WITH_PREFIX:
        return _scaled(_UNITS[base if base != "L" else "l"], word[0])
    name = _singular(word.lower())
    for prefix, letter in _PREFIX_NAMES.items():
        if name.removeprefix(prefix) in _NAMES_WITH_PREFIX and (
            name.startswith(prefix)
        ):
            return _scaled(_UNITS[name.removeprefix(prefix)], letter)
    return None


def _scaled(unit: Unit, prefix: str) -> Unit:
    return Unit(unit.dimensions, unit.factor * _PREFIXES[prefix])


def _singular(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ses", "xes", "ches", "shes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and len(word) > 2 else word
