"""The static gate: every committed notebook, without running it.

Each check takes a notebook and gives the problems that it finds. Below them,
every check is tried on a notebook that is made wrong on purpose.
"""

import ast
import copy
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from grpo_lab.parameters import KINDS, declared_names
from tools import build

ROOT = build.ROOT
SOURCES = sorted((ROOT / "sources").glob("*.py"))
NOTEBOOKS = [
    ROOT / edition.folder / f"{source.stem}.ipynb"
    for source in SOURCES
    for edition in build.EDITIONS
]
# The lessons that have to be there, so that an empty folder can't pass.
LESSONS = [
    "01_rewards",
    "02_first_grpo_run",
    "03_grid_search",
    "04_evolve_and_deploy",
    "05_scale_out",
]

SECRET = re.compile(
    r"hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|gh[oprsu]_[A-Za-z0-9]{30,}"
    r"|github_pat_\w{30,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abp]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def tagged(notebook, tag):
    return [c for c in notebook.cells if tag in c.metadata.get("tags", ())]


def python(cell):
    """The cell with magics and shell commands turned into calls."""
    return TransformerManager().transform_cell(cell.source)


def text(notebook):
    """All that a reader sees: every cell, and every output but images."""
    outputs = [build.output_text(cell) for cell in code(notebook)]
    return "\n".join([cell.source for cell in notebook.cells] + outputs)


def is_valid(notebook):
    if not nbformat.validator.isvalid(notebook):
        yield "no valid notebook"


def is_not_too_large(notebook):
    size = len(build.render(notebook).encode())
    if size > build.SIZE_LIMIT:
        yield f"{size} bytes"


def has_our_metadata_only(notebook):
    if notebook.metadata != build.METADATA:
        yield f"metadata {notebook.metadata}"
    for cell in notebook.cells:
        if set(cell.metadata) - {"tags"}:
            yield f"cell metadata {cell.metadata}"


def has_one_parameters_cell(notebook):
    found = tagged(notebook, "parameters")
    if len(found) != 1:
        yield f"{len(found)} parameters cells"
    if tagged(notebook, "injected-parameters"):
        yield "a cell that papermill injected"


def declares_literals_with_a_type_and_a_help(notebook):
    (cell,) = tagged(notebook, "parameters")
    declared = declared_names(cell.source)
    lines = [x for x in cell.source.splitlines() if not x.startswith("#")]
    for line in filter(None, lines):
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*: .+ = .+  # .+", line):
            yield f"no `NAME: type = value  # help`: {line}"
    for node in ast.parse(cell.source).body:
        try:
            ast.literal_eval(node.value)
        except ValueError:
            yield f"no literal: {ast.unparse(node)}"
    yield from (f"{n}: {k}" for n, k in declared.items() if k not in KINDS)


def checks_its_parameters_in_the_next_code_cell(notebook):
    (cell,) = tagged(notebook, "parameters")
    cells = code(notebook)
    following = cells[cells.index(cell) + 1]
    if not re.search(r"\bcheck\(globals\(\)\)", following.source):
        yield "check(globals()) isn't called right after the parameters"


def uses_every_parameter(notebook):
    (cell,) = tagged(notebook, "parameters")
    cells = code(notebook)
    used = set()
    for later in cells[cells.index(cell) + 1 :]:
        for node in ast.walk(ast.parse(python(later))):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Constant):
                used.add(node.value)
    unused = [name for name in declared_names(cell.source) if name not in used]
    yield from (f"{name} is never used" for name in unused)


def declares_parameters_nowhere_else(notebook):
    for cell in code(notebook):
        if cell not in tagged(notebook, "parameters"):
            yield from declared_names(python(cell))


def compiles(notebook):
    for cell in code(notebook):
        try:
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compile(python(cell), cell.id, "exec", flags)
        except SyntaxError as error:
            yield f"{cell.id}: {error}"


def has_short_cells(notebook):
    for cell in code(notebook):
        lines = cell.source.splitlines()
        if len(lines) > 40:
            yield f"{cell.id}: {len(lines)} lines"
        yield from (f"too wide: {line}" for line in lines if len(line) > 79)


def has_no_empty_cell(notebook):
    yield from (c.id for c in notebook.cells if not c.source.strip())


def explains_at_least_as_often_as_it_computes(notebook):
    if len(prose(notebook)) < len(code(notebook)):
        yield f"{len(prose(notebook))} cells of prose"


def holds_no_secret(notebook):
    yield from SECRET.findall(text(notebook))


def holds_no_machine_path(notebook):
    if path := build.machine_path(text(notebook)):
        yield path


def shows_no_error(notebook):
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    yield from (o.ename for o in outputs if o.output_type == "error")


def is_labelled_if_it_has_outputs(notebook):
    has_outputs = any(cell.outputs for cell in code(notebook))
    labelled = build.LABEL.search(notebook.cells[0].source) is not None
    if has_outputs != labelled:
        yield f"outputs: {has_outputs}, label: {labelled}"


def read(path):
    return nbformat.read(path, as_version=4)


def short(path):
    return f"{path.parent.name}/{path.stem}"


def local_links(path, notebook):
    for cell in prose(notebook):
        for link in LINK.findall(cell.source):
            if "://" not in link and not link.startswith("mailto:"):
                yield path.parent / link


def test_the_lessons_are_the_expected_ones():
    stems = [source.stem for source in SOURCES]
    assert stems == LESSONS
    for edition in build.EDITIONS:
        present = sorted((ROOT / edition.folder).glob("*.ipynb"))
        assert [path.stem for path in present] == stems


def test_what_is_committed_is_what_the_sources_give():
    build.check()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=short)
def test_notebook(path):
    notebook = read(path)
    found = {check.__name__: list(check(notebook)) for check in CHECKS}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    links = list(local_links(path, notebook))
    assert links  # at least to the other edition
    assert [link for link in links if not link.exists()] == []
    targets = re.findall(
        r"colab\.research\.google\.com/github/(\S+?)\)", text(notebook)
    )
    here = path.relative_to(ROOT)
    assert targets == [f"{build.REPOSITORY}/blob/main/{here}"]
    if path.parent.name == "notebooks":
        cells = code(notebook)
        assert not any(c.outputs or c.execution_count for c in cells)


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_a_lesson_file_has_a_plain_name_and_colab_installs_from_here(source):
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", source.stem)
    names = re.findall(
        r"github\.com/([\w.-]+/[\w-]+)(?:\.git)?@", source.read_text()
    )
    assert set(names) == {build.REPOSITORY}


GOOD = """\
# %% [markdown]
# # A lesson

# %% tags=["parameters"]
PROFILE: str = "lite"  # a row of the table
RATES: list[float] = []  # learning rates

# %% [markdown]
# The check.

# %%
from grpo_lab.parameters import check

settings = check(globals())
print(settings["PROFILE"])

# %% [markdown]
# The end.

# %%
RATES
"""


@pytest.fixture
def good(tmp_path):
    source = tmp_path / "01_good.py"
    source.write_text(GOOD)
    return build.build(source, build.EDITIONS[1])


def with_cell(index, old, new):
    def change(notebook):
        cell = notebook.cells[index]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)

    return change


def with_output(value, name="stdout"):
    output = nbformat.v4.new_output("stream", name=name, text=value)

    def change(notebook):
        notebook.cells[3].outputs = [output]

    return change


def with_error(notebook):
    notebook.cells[3].outputs = [
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    ]


def with_papermill(notebook):
    notebook.cells[3].metadata["papermill"] = {"duration": 1.0}


def with_other_kernel(notebook):
    notebook.metadata["kernelspec"]["name"] = "my-venv"


def with_second_parameters_cell(notebook):
    notebook.cells[3].metadata["tags"] = ["parameters"]


def without_prose(notebook):
    del notebook.cells[2]
    del notebook.cells[3]


LONG = "\n".join(["1"] * 41)
TOKEN = "hf_" + 34 * "x"

# Each check, and something wrong that it has to find.
WRONG = [
    (is_valid, lambda nb: nb.cells[0].pop("source")),
    (is_not_too_large, with_output("x" * 600_000)),
    (has_our_metadata_only, with_papermill),
    (has_our_metadata_only, with_other_kernel),
    (has_one_parameters_cell, with_second_parameters_cell),
    (has_one_parameters_cell, lambda nb: nb.cells.pop(1)),
    *(
        (declares_literals_with_a_type_and_a_help, with_cell(1, *change))
        for change in (
            ("= []", "= [1e-3 * 2]"),
            ("RATES: list[float]", "RATES"),
            ("list[float]", "list[float] | None"),
            ("  # learning rates", ""),
        )
    ),
    (
        checks_its_parameters_in_the_next_code_cell,
        with_cell(3, "check(globals())", "{}"),
    ),
    (uses_every_parameter, with_cell(5, "RATES", "1")),
    (uses_every_parameter, with_cell(3, '"PROFILE"', '"PROF"')),
    (declares_parameters_nowhere_else, with_cell(5, "RATES", "A: int = 1")),
    (compiles, with_cell(5, "RATES", "RATES = ")),
    (has_short_cells, with_cell(5, "RATES", LONG)),
    (has_short_cells, with_cell(5, "RATES", "RATES" * 16)),
    (has_no_empty_cell, with_cell(5, "RATES", "")),
    (explains_at_least_as_often_as_it_computes, without_prose),
    (holds_no_secret, with_cell(5, "RATES", f"TOKEN = '{TOKEN}'")),
    (holds_no_secret, with_output(f"logged in with {TOKEN}")),
    (holds_no_machine_path, with_output("saved in /home/me/runs")),
    (holds_no_machine_path, with_cell(2, "check", "file /root/x")),
    (shows_no_error, with_error),
    (is_labelled_if_it_has_outputs, with_output("1")),
]


CHECKS = list(dict.fromkeys(check for check, _ in WRONG))


def test_a_good_notebook_passes_every_check(good):
    assert [list(check(good)) for check in CHECKS] == [[] for _ in CHECKS]


@pytest.mark.parametrize("check, change", WRONG)
def test_each_check_finds_what_it_is_for(good, check, change):
    wrong = copy.deepcopy(good)
    change(wrong)
    assert list(check(wrong)) != []


def test_magics_compile_but_nonsense_does_not(good):
    with_cell(5, "RATES", "%matplotlib inline\n!pip list\nawait x()")(good)
    assert list(compiles(good)) == []


def test_links_are_found_and_followed(good, tmp_path):
    with_cell(2, "The check.", "[a](no.md#x) [b](https://x.y/z.md)")(good)
    links = list(local_links(tmp_path / "lite" / "01_good.ipynb", good))
    assert [link.exists() for link in links] == [False, False]
    assert links[1] == Path(tmp_path / "lite" / "no.md")
