"""The parameters of a lesson: one cell, checked before anything runs.

A lesson declares its parameters in one cell of lines like

    MAX_STEPS: int = 0  # optimiser steps of each run

and papermill replaces values by injecting a cell of plain assignments below
it. Papermill only warns about a name that the lesson doesn't declare, and
hands every `-p NAME '[1, 2]'` over as text. `check` stops the first and
converts the second, whoever changed the values: papermill or a reader.
"""

import ast
import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictStr,
    TypeAdapter,
)

from grpo_lab.errors import LabError, nearest

INJECTED_CELL = "# Parameters"  # papermill's first line


def check(namespace: Mapping[str, Any]) -> dict[str, object]:
    """Check the parameters of the lesson that is running.

    Call it as `check(globals())` in the cell after the parameters cell.

    Args:
        namespace: the notebook's globals. IPython keeps the text of every
            executed cell there, as the list `In`.

    Returns:
        Every declared parameter with its value, converted to its type.

    Raises:
        LabError: a name was set that the lesson doesn't declare, or a value
            has the wrong type.
    """
    if "In" not in namespace:
        raise LabError(
            "A lesson runs in Jupyter or through `python -m grpo_lab.runner "
            "LESSON.ipynb`, not as a plain Python script."
        )
    declared, assigned = _last_parameters(namespace["In"])
    given = {name: namespace[name] for name in (*declared, *assigned)}
    return resolve(declared, given)


def declared_names(source: str) -> dict[str, str]:
    """The parameters that a cell declares, as name -> type.

    A parameter is an upper-case name with a type and a value; a lesson has
    such lines in its parameters cell only. Text that isn't Python (a cell
    that failed, a shell command) declares nothing.
    """
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in _statements(source)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id.isupper()
        and node.value is not None
    }


def resolve(
    declared: Mapping[str, str], given: Mapping[str, object]
) -> dict[str, object]:
    """Convert the given values to the declared types.

    Args:
        declared: name -> type, from `declared_names`.
        given: name -> value, of some or all parameters.

    Raises:
        LabError: naming every unknown name and every bad value at once.
    """
    values, problems = {}, []
    for name, value in given.items():
        if name not in declared:
            problems.append(_unknown(name, declared))
            continue
        try:
            values[name] = convert(declared[name], value)
        except ValueError:
            problems.append(_ill_typed(name, declared[name], value))
    if not str(values.get("OUTPUT_DIR", "runs")).strip():
        problems.append(
            "OUTPUT_DIR is empty, so that results would be written among the "
            "files of the working directory. Type a new directory such as "
            "OUTPUT_DIR = 'runs/mine'."
        )
    if problems:
        raise LabError(" ".join(problems))
    return values


def convert(kind: str, value: object) -> object:
    """`value` as `kind`, where that changes nothing that was meant.

    A whole number is a fine `float`; `"1e-3"` is one too, because YAML reads
    it as text. A list may come as JSON, as words between commas, or as one
    value that stands for itself. True and False are no numbers.

    Raises:
        ValueError: the value can't be read as `kind`.
    """
    if kind not in KINDS:
        raise ValueError(kind)
    return KINDS[kind].validate_python(value)


def _last_parameters(cells: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """What the latest parameters cell declares, and what was set besides.

    Only the latest cell of each kind counts: an older one was corrected and
    executed again.
    """
    declared, assigned = {}, []
    for source in cells:
        if source.lstrip().startswith(INJECTED_CELL):
            assigned = _assigned_names(source)
        elif names := declared_names(source):
            declared, assigned = names, _assigned_names(source)
    return declared, assigned


def _assigned_names(source: str) -> list[str]:
    return [
        target.id
        for node in _statements(source)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:
        return []


def _items(value: object) -> list:
    if not isinstance(value, str):
        return list(value) if isinstance(value, list | tuple) else [value]
    with contextlib.suppress(ValueError):
        parsed = json.loads(value)
        if isinstance(parsed, list):
            return parsed
    words = value.strip().removeprefix("[").removesuffix("]").split(",")
    words = [word.strip().strip("'\"") for word in words]
    return [word for word in words if word]


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        # Without the value: pydantic makes a text of it, and aliases of YAML
        # can make a list that has no end.
        raise ValueError("no number")
    # pydantic would not read "1e3" as a whole number.
    return float(value) if isinstance(value, str) else value


def _switch(value: object) -> object:
    # Papermill's command line knows `True`; people also type `true`.
    words = {"true": True, "false": False}
    return words.get(value.lower()) if isinstance(value, str) else value


_SCALARS: dict[str, Any] = {
    "str": StrictStr,
    "int": Annotated[int, BeforeValidator(_number)],
    "float": Annotated[
        float, BeforeValidator(_number), Field(allow_inf_nan=False)
    ],
    "bool": Annotated[StrictBool, BeforeValidator(_switch)],
}

KINDS: dict[str, TypeAdapter] = {
    name: TypeAdapter(kind) for name, kind in _SCALARS.items()
} | {
    f"list[{name}]": TypeAdapter(
        Annotated[list[_SCALARS[name]], BeforeValidator(_items)]  # type: ignore[arg-type, valid-type]
    )
    for name in ("str", "int", "float")
}
"""The types that a parameter may have, and what reads each."""

EXAMPLES = {
    "str": ("text", '"pocket"', "pocket"),
    "int": ("a whole number", "8", "8"),
    "float": ("a number", "0.001", "0.001"),
    "bool": ("True or False", "True", "True"),
    "list[str]": ("a list of texts", '["a", "b"]', '\'["a", "b"]\''),
    "list[int]": ("a list of whole numbers", "[1, 2]", "'[1, 2]'"),
    "list[float]": ("a list of numbers", "[0.001, 0.01]", "'[0.001, 0.01]'"),
}
"""For each of them what it is, and how it is typed in Python and with -p."""


def _unknown(name: str, declared: Mapping[str, str]) -> str:
    near = nearest(name, declared)
    guess = f" Did you mean {near}?" if near else ""
    return (
        f"This lesson has no parameter {name}.{guess} Its parameters are "
        f"{', '.join(declared) or 'none'}. Correct the name where you set "
        "it, and run again from the parameters cell on."
    )


def _ill_typed(name: str, kind: str, value: object) -> str:
    if kind not in KINDS:
        return (
            f"{name} is declared as {kind}, which is no type for a parameter: "
            f"give it one of {', '.join(KINDS)}."
        )
    spoken, literal, words = EXAMPLES[kind]
    if kind == "str" and isinstance(value, int | float):
        return (
            f"{name} must be text, and papermill has made the number "
            f"{value!r} of it. Type `-r {name} {value}`, which leaves a text "
            f'as it is; in the parameters cell `{name}: str = "{value}"`.'
        )
    return (
        f"{name} must be {spoken} ({kind}), and it is {value!r} "
        f"({type(value).__name__}). Write for example `{name}: {kind} = "
        f"{literal}` in the parameters cell, or `-p {name} {words}` on the "
        "command line."
    )
