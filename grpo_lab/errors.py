"""The errors that a learner sees, and what their messages are made of."""

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """Something a learner can put right.

    The message is one paragraph: what happened, why, and what to type next.
    Every error that this package raises on purpose is one of these, so a
    caller can tell "your input" from "our bug".

    Attributes:
        exit_code: of a command that ends with it.
    """

    exit_code = 2


def first_line(error: Exception) -> str:
    """The first line of an error's message as a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".: ") + "."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like a misspelt one, in any case; None if none."""
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.4)
    return lower[found[0]] if found else None
