"""The errors that a learner sees."""


class LabError(Exception):
    """Something a learner can put right.

    The message is one paragraph: what happened, why, and what to type next.
    Every error that this package raises on purpose is one of these, so a
    caller can tell "your input" from "our bug".
    """
