"""Parameters: what stops a lesson, what is converted, what is remembered."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from grpo_lab.errors import LabError
from grpo_lab.parameters import check, convert, declared_names, resolve

CELL = """
# Sizes
PROFILE: str = "lite"  # a row of the table
MAX_STEPS: int = 0  # optimiser steps
LEARNING_RATES: list[float] = []  # empty: the profile's
BETA: float = 0.0  # weight of the KL term
QUICK: bool = False  # one run only
"""
DECLARED = {
    "PROFILE": "str",
    "MAX_STEPS": "int",
    "LEARNING_RATES": "list[float]",
    "BETA": "float",
    "QUICK": "bool",
}


def executed(*cells: str) -> dict:
    """The globals of a notebook after these cells, as IPython keeps them."""
    namespace: dict = {"In": [""]}
    for cell in cells:
        namespace["In"].append(cell)
        exec(cell, namespace)
    namespace["In"].append("check(globals())")
    return namespace


def test_declared_names_reads_names_and_types():
    assert declared_names(CELL) == DECLARED


@pytest.mark.parametrize(
    "source",
    ["x = 1", "rows: list = []", "HELP: str", "!pip list", "", "def f(:"],
)
def test_other_cells_declare_nothing(source):
    assert declared_names(source) == {}


def test_defaults_pass_unchanged():
    assert check(executed(CELL)) == {
        "PROFILE": "lite",
        "MAX_STEPS": 0,
        "LEARNING_RATES": [],
        "BETA": 0.0,
        "QUICK": False,
    }


def test_injected_values_win_and_are_converted():
    injected = (
        '# Parameters\nLEARNING_RATES = "[1e-3, 2]"\nBETA = 1\n'
        'MAX_STEPS = 1e2\nQUICK = "true"\n'
    )
    values = check(executed(CELL, injected))
    assert values["LEARNING_RATES"] == [1e-3, 2.0]
    assert values["BETA"] == 1.0 and type(values["BETA"]) is float
    assert values["MAX_STEPS"] == 100 and type(values["MAX_STEPS"]) is int
    assert values["QUICK"] is True


@pytest.mark.parametrize(
    "name, near",
    [("PROFLE", "PROFILE"), ("profile", "PROFILE"), ("max_step", "MAX_STEPS")],
)
def test_a_misspelt_injected_name_stops_with_the_nearest(name, near):
    injected = f'# Parameters\n{name} = "pocket"\n'
    with pytest.raises(LabError, match=rf"{name}\. Did you mean {near}\?"):
        check(executed(CELL, injected))


def test_a_name_like_no_other_lists_the_valid_ones():
    with pytest.raises(LabError) as error:
        check(executed(CELL, "# Parameters\nZZZ = 1\n"))
    assert "Did you mean" not in str(error.value)
    assert all(name in str(error.value) for name in DECLARED)


def test_a_reader_who_drops_the_type_and_misspells_is_stopped():
    with pytest.raises(LabError, match="Did you mean PROFILE"):
        check(executed(CELL + 'PROFLE = "pocket"\n'))


def test_every_problem_is_named_in_one_paragraph():
    injected = "# Parameters\nPROFLE = 1\nBETA = 'high'\n"
    with pytest.raises(LabError) as error:
        check(executed(CELL, injected))
    message = str(error.value)
    assert "PROFLE" in message and "BETA" in message and "\n" not in message


@pytest.mark.parametrize(
    "kind, value",
    [
        ("str", 3),
        ("str", None),
        ("int", "many"),
        ("int", 1.5),
        ("int", True),
        ("int", None),
        ("int", float("inf")),
        ("int", [1]),
        ("float", "fast"),
        ("float", False),
        ("float", float("nan")),
        ("float", "inf"),
        ("bool", 1),
        ("bool", "yes"),
        ("list[int]", "[1, 2.5]"),
        ("list[int]", "1, two"),
        ("list[int]", None),
        ("list[float]", [1e-3, "fast"]),
        ("list[str]", [1]),
    ],
)
def test_a_value_of_the_wrong_type_says_what_to_type(kind, value):
    with pytest.raises(LabError) as error:
        resolve({"X": kind}, {"X": value})
    message = str(error.value)
    assert repr(value) in message
    flag = "-r" if kind == "str" and isinstance(value, int) else "-p"
    assert f"X: {kind} = " in message and f"{flag} X " in message


@pytest.mark.parametrize(
    "kind, value, expected",
    [
        ("int", "7", 7),
        ("int", "1e3", 1000),
        ("float", "1e-3", 1e-3),
        ("float", 5, 5.0),
        ("bool", "False", False),
        ("list[int]", "[1, 2]", [1, 2]),
        ("list[int]", 4, [4]),
        ("list[float]", "1e-3", [1e-3]),
        ("list[float]", (1, 2), [1.0, 2.0]),
        ("list[float]", ["1e-3", 0.1], [1e-3, 0.1]),
        (
            "list[str]",
            "pocket-qwen,pocket-llama",
            ["pocket-qwen", "pocket-llama"],
        ),
        ("list[str]", '["a, b", "c"]', ["a, b", "c"]),
        ("list[str]", "['a', 'b']", ["a", "b"]),
        ("list[str]", "[a, b]", ["a", "b"]),
        ("list[str]", "Qwen/Qwen2.5-0.5B", ["Qwen/Qwen2.5-0.5B"]),
        ("list[str]", "7", ["7"]),
        ("list[str]", "", []),
        ("list[str]", "[]", []),
    ],
)
def test_harmless_values_are_converted(kind, value, expected):
    converted = convert(kind, value)
    assert converted == expected
    assert type(converted) is type(expected)


def test_a_type_that_no_parameter_may_have_is_named():
    with pytest.raises(LabError, match=r"int \| None.*one of str, int"):
        check(executed("STEPS: int | None = None"))


def test_a_plain_script_is_told_how_to_run():
    with pytest.raises(LabError, match=r"python -m grpo_lab\.runner"):
        check({"PROFILE": "lite"})


def test_a_list_is_a_copy_that_the_lesson_may_change():
    namespace = executed("RATES: list[float] = [1.0]")
    check(namespace)["RATES"].append(2.0)
    assert namespace["RATES"] == [1.0]


@pytest.fixture
def shell():
    shell = InteractiveShell.instance()
    shell.reset(new_session=True)
    yield shell
    InteractiveShell.clear_instance()


def run_check(shell):
    """Execute the lesson's check cell; its values, or its error."""
    cell = "from grpo_lab.parameters import check\nvalues = check(globals())"
    result = shell.run_cell(cell, store_history=True)
    return result.error_in_exec or shell.user_ns["values"]


def test_in_ipython_a_corrected_cell_is_not_blamed_for_the_old_one(shell):
    shell.run_cell(CELL, store_history=True)
    shell.run_cell('# Parameters\nPROFLE = "pocket"', store_history=True)
    assert isinstance(run_check(shell), LabError)

    shell.run_cell('# Parameters\nPROFILE = "pocket"', store_history=True)
    assert run_check(shell)["PROFILE"] == "pocket"
    assert run_check(shell)["PROFILE"] == "pocket"


def test_in_ipython_the_parameters_cell_alone_can_be_run_again(shell):
    shell.run_cell(CELL, store_history=True)
    shell.run_cell('# Parameters\nPROFLE = "pocket"', store_history=True)
    shell.run_cell(CELL.replace("lite", "full"), store_history=True)
    assert run_check(shell)["PROFILE"] == "full"


def test_in_ipython_later_cells_are_no_parameters(shell):
    shell.run_cell(CELL, store_history=True)
    shell.run_cell("rows: list[dict] = []\nprofile = 3", store_history=True)
    shell.run_cell("!true", store_history=True)
    assert run_check(shell)["PROFILE"] == "lite"


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_output_directory_is_refused(empty):
    """It would be the working directory, with the user's own files."""
    with pytest.raises(LabError, match="OUTPUT_DIR is empty"):
        resolve({"OUTPUT_DIR": "str"}, {"OUTPUT_DIR": empty})
    assert resolve({"OUTPUT_DIR": "str"}, {}) == {}
