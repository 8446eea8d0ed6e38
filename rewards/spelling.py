r"""One spelling for the characters and the typesetting of mathematics.

`rewards.numbers` and `rewards.notation` both start from what is left here:
ASCII and LaTeX, without the commands that only place or size what they hold.
"""

import html
import re
import unicodedata

_TABLE = str.maketrans({
    # full-width forms, and the digits of mathematical alphabets
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **{
        letter: unicodedata.normalize("NFKC", letter)
        for letter in map(chr, range(0x1D400, 0x1D800))
        if unicodedata.normalize("NFKC", letter).isascii()
    },
    **{
        half: r"\frac{{{}}}{{{}}}".format(
            *unicodedata.normalize("NFKC", half).split("\u2044")
        )
        for half in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    },
    **{digit: f"_{{{i}}}" for i, digit in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014", "-"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("“”„‟«»", '"'),
    **dict.fromkeys("‘’‚‛", "'"),
    **dict(zip("٪٫٬", "%.,", strict=True)),
    **dict.fromkeys("\u00b7\u22c5", r"\cdot "),
    **dict.fromkeys("°\u2218\u00ba\u02da", r"^\circ "),
    **dict(zip("。、×÷π∞≈", (
        ".", ",", r"\times ", r"\div ", r"\pi ", r"\infty ", r"\approx ",
    ), strict=True)),
})  # fmt: skip
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
_ENTITY = re.compile(r"&(?:lt|gt|le|ge|ne|nbsp|quot|#39|amp);")
_PLUS_MINUS = re.compile(r"\+/-(?=\s*[0-9A-Za-z\\(])")
_TYPESET = re.compile(r"[^\x00-\x7f]|[\\~{]")
_POWER = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_ORDINALS = {"ˢᵗ": "st", "ⁿᵈ": "nd", "ʳᵈ": "rd", "ᵗʰ": "th"}
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_GROUP = r"(?:\{,\}|,?\\,|,?\\!\s?|[\u00a0\u2009\u202f])[0-9]{3}"
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # a command whose backslash was escaped twice
        (
            r"(?<!\\)\\\\(?=(?:[dt]?frac|sqrt|text|pi|left|right|infty|pm)"
            r"(?![A-Za-z]))",
            r"\\",
        ),
        (r"^\s*\\(?:therefore|implies|Rightarrow)(?![A-Za-z])", ""),
        (
            r"\\(?:left|right)\s*\.(?![0-9])|\\(?:left|right|displaystyle|big"
            r"|Big|bigg|Bigg|underline|bf|rm|it)(?![A-Za-z])",
            "",
        ),
        (r"\\(?:hspace\*?|color)\s*\{[^{}]*\}", " "),
        # groups of thousands: 1{,}000 or 1\,000 or a thin space
        (
            rf"(?<![0-9.])[1-9][0-9]{{0,2}}(?:{_GROUP})+(?![0-9])",
            lambda number: re.sub("[^0-9]", "", number[0]),
        ),
        (r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1"),
    )
]


def plain(text: str) -> str:
    r"""Return `text` in ASCII and LaTeX, without what only places or sizes.

    >>> plain("½ × 10⁻³"), plain(r"\left(1{,}000\right)")
    ('\\frac{1}{2} \\times  10^{-3}', '(1000)')
    """
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    text = _PLUS_MINUS.sub(r"\\pm ", text)
    if not text.isascii():
        text = _INVISIBLE.sub("", text.translate(_TABLE))
        text = "".join(
            str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text
        )
        for raised, letters in _ORDINALS.items():
            text = text.replace(raised, letters)
        text = _POWER.sub(
            lambda power: f"^{{{power[0].translate(_SUPERSCRIPTS)}}}", text
        )
    if not _TYPESET.search(text):
        return text
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
