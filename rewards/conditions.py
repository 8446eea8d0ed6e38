r"""Conditions on variables: which numbers satisfy them, and which two agree.

Conditions that hold together leave what all of them leave, those of which one
holds what any of them leaves; each keeps its variable. What is compared are
the sets of real numbers, for each variable and each case.
"""

import re
from collections.abc import Callable
from typing import Any

from rewards.markup import squeezed
from rewards.notation import (
    Bracketed,
    Condition,
    Either,
    Equation,
    Expression,
    Inequality,
    Joint,
    Number,
    Several,
    Words,
)
from rewards.values import difference_of, parsed, sympy_of

KINDS = Condition | Joint | Either | Inequality

Same = Callable[[Any, Any], bool]
# a case: the set of each variable, and what is no set, such as y = 2x
Case = tuple[dict[str, Any], list[Any]]


def same_conditions(gold: Any, answer: Any, same: Same) -> bool:
    """Tell whether two values, at least one of them of KINDS, agree.

    `same` compares what is in them.

    >>> from rewards.notation import read
    >>> one, other = read("x > 1 and x < 3"), read("x > 1")
    >>> same_conditions(one, read("(1, 3)"), lambda a, b: a == b)
    True
    >>> same_conditions(one, other, lambda a, b: a == b)
    False
    """
    if _same_in_form(gold, answer, same):
        return True
    try:
        golds, answers = _cases(gold), _cases(answer)
        if golds is None or answers is None:
            return False
        return _same_cases(golds, answers, same)
    except (NotImplementedError, TypeError, ValueError):
        return False  # sympy has no answer


def is_domain(value: Any) -> bool:
    r"""Tell whether a value is Z, N or the like.

    >>> is_domain(Expression(r"\mathbb{Z}")), is_domain(Expression("x"))
    (True, False)
    """
    return isinstance(value, Expression) and _domain(value.text) is not None


def _same_in_form(gold: Any, answer: Any, same: Same) -> bool:
    """Tell whether two are written in the same way, part by part."""
    if isinstance(gold, Condition) and isinstance(answer, Condition):
        return (
            gold.variable == answer.variable
            and gold.excluded == answer.excluded
            and same(gold.values, answer.values)
        )
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Condition) and not isinstance(other, KINDS):
            return not one.excluded and same(one.values, other)
    if type(gold) is type(answer) and isinstance(gold, Joint | Either):
        return _matched(list(gold.parts), list(answer.parts), same)
    return False


def _matched(golds: list[Any], answers: list[Any], same: Same) -> bool:
    """Tell whether each of the golds is one of the answers, none left over."""
    if len(golds) != len(answers):
        return False
    for one in golds:
        at = next((i for i, a in enumerate(answers) if same(one, a)), None)
        if at is None:
            return False
        answers = answers[:at] + answers[at + 1 :]
    return True


def _cases(value: Any) -> list[Case] | None:
    """Return the cases that a value leaves, or None if it is no condition."""
    if isinstance(value, Joint):
        return _joint(value)
    if isinstance(value, Either):
        found = [_cases(part) for part in value.parts]
        if None in found:
            return None
        return _merged([case for cases in found for case in cases or ()])
    if isinstance(value, Condition):
        found_set = set_of(value.values)
        if found_set is None:
            return None
        if value.excluded:
            found_set = _reals() - found_set
        return [({value.variable: found_set}, [])]
    if isinstance(value, Inequality):
        return _solved(value)
    if isinstance(value, Equation):
        own = set_of(value.right) if value.assigns else None
        if own is None or getattr(own, "free_symbols", None):
            return [({}, [value])]
        return [({squeezed(str(value.left)): own}, [])]
    if isinstance(value, Several):
        parts = [_cases(part) for part in value.values]
        if any(isinstance(part, Equation) for part in value.values):
            if None in parts:
                return None
            return _merged([case for cases in parts for case in cases or ()])
    own = set_of(value)
    return None if own is None else [({"": own}, [])]


def _joint(value: Joint) -> list[Case] | None:
    """Return the cases in which all parts hold."""
    found: list[Case] = [({}, [])]
    for part in value.parts:
        cases = _cases(part)
        if cases is None:
            return None
        found = [_both(one, other) for one in found for other in cases]
    empty = all(any(map(_is_empty, sets.values())) for sets, _ in found)
    if empty and not value.certain:
        # "x < -2, x > 2" lists two cases: nobody states nothing so
        return _cases(Either(value.parts))
    return found


def _both(one: Case, other: Case) -> Case:
    sets = dict(one[0])
    for name, own in other[0].items():
        sets[name] = _finite(sets[name] & own) if name in sets else own
    return sets, [*one[1], *other[1]]


def _merged(cases: list[Case]) -> list[Case]:
    """Join the cases that speak of one variable alone."""
    found: list[Case] = []
    for sets, others in cases:
        for at, (known, more) in enumerate(found):
            alone = not others and not more and len(sets) == 1
            if alone and sets.keys() == known.keys():
                [name] = sets
                found[at] = ({name: known[name] | sets[name]}, [])
                break
        else:
            found.append((sets, others))
    return found


def _same_cases(golds: Any, answers: Any, same: Same) -> bool:
    names = [
        sorted({name for sets, _ in cases for name in sets})
        for cases in (golds, answers)
    ]
    # A set without a variable may be that of the only one.
    if [""] in names and all(len(one) == 1 for one in names):
        golds, answers = map(_unnamed, (golds, answers))

    def equal(gold: Case, answer: Case) -> bool:
        return (
            gold[0].keys() == answer[0].keys()
            and all(own == answer[0][name] for name, own in gold[0].items())
            and _matched(gold[1], answer[1], same)
        )

    return _matched(golds, answers, equal)


def _unnamed(cases: list[Case]) -> list[Case]:
    return [({"": next(iter(sets.values()))}, more) for sets, more in cases]


def _solved(value: Inequality) -> list[Case]:
    """Return the solutions of an inequality with one variable."""
    import sympy

    kind = sympy.StrictGreaterThan if value.strict else sympy.GreaterThan
    relation = kind(difference_of(value), 0)
    symbols = relation.free_symbols
    if len(symbols) != 1:
        return [({}, [value])]
    return [({str(*symbols): relation.as_set()}, [])]


def set_of(value: Any) -> Any:
    """Return the set of real numbers that a value stands for, or None.

    >>> from rewards.notation import read
    >>> set_of(read("x > 1 and x < 3"))
    Interval.open(1, 3)
    """
    import sympy

    if isinstance(value, Several):
        sets = [set_of(part) for part in value.values]
        return None if None in sets else sympy.Union(*sets)
    if isinstance(value, Bracketed) and len(value.values) == 2:
        ends = Number | Expression | Words
        if not all(isinstance(end, ends) for end in value.values):
            return None
        low, high = (sympy_of(end)[0] for end in value.values)
        if (low - high).is_positive:
            return None  # a point: as an interval, it would be empty
        is_open = value.opener == "(", value.closer == ")"
        return sympy.Interval(low, high, *is_open)
    if isinstance(value, Number):
        return sympy.FiniteSet(sympy_of(value)[0])
    if isinstance(value, Condition | Joint | Either | Inequality):
        cases = _cases(value)
        if cases is None or len(cases) != 1 or len(cases[0][0]) != 1:
            return None
        return None if cases[0][1] else next(iter(cases[0][0].values()))
    if isinstance(value, Expression):
        domain = _domain(value.text)
        found = parsed(value.text) if domain is None else domain
        if isinstance(found, sympy.Set):
            return found
        is_value = isinstance(found, sympy.Expr) and found.is_number
        return sympy.FiniteSet(found) if is_value else None
    return None


def _domain(text: str) -> Any:
    import sympy

    name = re.sub(r"[{}\s]", "", squeezed(text)).removeprefix(r"\mathbb")
    return {
        "Z": sympy.S.Integers,
        "Z^+": sympy.S.Naturals,
        "Z+": sympy.S.Naturals,
        "N": sympy.S.Naturals0,
        "N^*": sympy.S.Naturals,
        "N^+": sympy.S.Naturals,
        "Q": sympy.S.Rationals,
        "C": sympy.S.Complexes,
    }.get(name if r"\mathbb" in text else "")


def _reals() -> Any:
    import sympy

    return sympy.S.Reals


def _finite(found: Any) -> Any:
    """Return a range of a few integers as the set of them."""
    import sympy

    if isinstance(found, sympy.Range) and found.size.is_finite:
        return sympy.FiniteSet(*found) if found.size <= 1000 else found
    return found


def _is_empty(found: Any) -> bool:
    return found.is_empty is True
