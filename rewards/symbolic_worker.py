"""What runs in the processes of `rewards.symbolic`: the parser, warmed up.

The process that imports this module forks one that does the work, and forks
another when that one is killed; so all that is slow is done here, once.
"""

import logging
from collections.abc import Callable

import math_verify  # noqa: F401  imported for what it imports: sympy and all

from rewards import expressions

# It warns that we keep the deadlines ourselves.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# The parser learns its grammar as it reads, ten times slower than later.
for _text in (
    r"\frac{1}{2}",
    r"2\sqrt{3}-x^2",
    r"\sin x + \ln(3)",
    r"(a+b)^{10}",
    r"\pi",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
):
    expressions.judge(_text, _text + "+1")


def handler() -> Callable[[list[str]], bool | str]:
    """Return what answers a request, [gold] or [gold, answer].

    [gold] asks whether the gold can be compared with anything, and gets true
    or false; [gold, answer] gets what `expressions.judge` says.
    """
    return _answer


def _answer(request: list[str]) -> bool | str:
    if len(request) == 1:
        return expressions.is_readable(*request)
    return expressions.judge(*request)
