"""Build: stable bytes, two editions, outputs that are fit to publish."""

import json
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_output

from grpo_lab.errors import LabError
from tools import build

SOURCE = """\
# %% [markdown]
# # A tiny lesson
#
# What you will learn: nothing.

# %% tags=["parameters"]
PROFILE: str = "lite"  # a row of the table
OUTPUT_DIR: str = "runs/tiny"  # where results go

# %% [markdown]
# ## One

# %%
print("one")

# %% tags=["solution"]
1 + 1
"""
LABEL = "pocket profile, 2 CPU cores, no GPU"
PNG = "iVBORw0KGgoAAAANSUhEUg/tmp/AAAAB"


@pytest.fixture
def root(tmp_path):
    """A repository with one source and its two built editions."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "01_tiny.py").write_text(SOURCE)
    list(build.write(tmp_path))
    return tmp_path


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def stream(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def executed(root, *outputs):
    """A run of the lite edition as papermill leaves it."""
    notebook = read(root / "lite" / "01_tiny.ipynb")
    for count, cell in enumerate(code(notebook), start=1):
        cell.execution_count = count + 1
        cell.metadata["papermill"] = {"duration": 1.0, "status": "completed"}
        cell.metadata["execution"] = {"iopub.execute_input": "2025-01-01"}
    code(notebook)[1].outputs = list(outputs)
    injected = new_code_cell("# Parameters\nPROFILE = 'pocket'")
    injected.metadata["tags"] = ["injected-parameters"]
    notebook.cells.insert(2, injected)
    notebook.metadata["papermill"] = {"exception": None, "duration": 9.0}
    notebook.metadata["widgets"] = {"state": {}}
    path = root / "executed.ipynb"
    nbformat.write(notebook, path)
    return path


def test_both_editions_are_built_and_stable(root):
    paths = [root / "notebooks/01_tiny.ipynb", root / "lite/01_tiny.ipynb"]
    first = [path.read_bytes() for path in paths]
    assert list(build.write(root)) == []
    for path in paths:
        path.unlink()
    assert [path for path, _ in build.write(root)] == paths
    assert [path.read_bytes() for path in paths] == first
    assert all(text.endswith(b"}\n") for text in first)


def test_a_lesson_for_any_machine_says_so(root):
    source = root / "sources" / "01_tiny.py"
    tags = '[markdown] tags=["any-machine"]\n# # A'
    source.write_text(SOURCE.replace("[markdown]\n# # A", tags))
    for edition in build.EDITIONS:
        title = build.build(source, edition).cells[0].source
        assert build.ANY_MACHINE_BANNER in title
        assert "GB" not in title


def test_editions_differ_in_banner_and_profile_only(root):
    full = read(root / "notebooks/01_tiny.ipynb")
    lite = read(root / "lite/01_tiny.ipynb")
    assert full.metadata == lite.metadata == build.METADATA
    pairs = zip(full.cells, lite.cells, strict=True)
    assert [a != b for a, b in pairs] == [True, True, False, False, False]
    assert 'PROFILE: str = "full"  # a row' in full.cells[1].source
    full.cells[1].source = full.cells[1].source.replace('"full"', '"lite"')
    assert full.cells[1] == lite.cells[1]
    for notebook, folder, other in (
        (full, "notebooks", "lite"),
        (lite, "lite", "notebooks"),
    ):
        title, badge, banner, rest = notebook.cells[0].source.split("\n\n")
        assert title == "# A tiny lesson"
        here = f"github/{build.REPOSITORY}/blob/main/{folder}/01_tiny.ipynb)"
        assert badge.endswith(here)
        assert f"(../{other}/01_tiny.ipynb)" in banner
        assert rest == "What you will learn: nothing."
        ids = [cell.id for cell in notebook.cells]
        assert ids == [f"01-tiny-{index:03d}" for index in range(5)]
        tags = [cell.metadata for cell in notebook.cells if cell.metadata]
        assert tags == [{"tags": ["parameters"]}, {"tags": ["solution"]}]


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("# # A tiny lesson", "# A tiny lesson", "first line is the title"),
        ("# %% [markdown]\n# # A", "# %%\n# # A", "first line is the title"),
        ("PROFILE", "PROFIL", "PROFILE: str"),
        (' tags=["parameters"]', "", "PROFILE: str"),
    ],
)
def test_a_source_without_title_or_profile_is_refused(root, old, new, message):
    source = root / "sources" / "01_tiny.py"
    source.write_text(SOURCE.replace(old, new, 1))
    with pytest.raises(LabError, match=message):
        build.build(source, build.EDITIONS[0])


def test_check_finds_what_the_sources_do_not_give(root):
    build.check(root)
    path = root / "lite/01_tiny.ipynb"
    text = path.read_text()
    path.write_text(text.replace("one", "two"))
    with pytest.raises(LabError, match=r"lite/01_tiny\.ipynb"):
        build.check(root)
    path.rename(root / "lite/02_gone.ipynb")
    with pytest.raises(LabError) as error:
        build.check(root)
    assert "lite/01_tiny.ipynb, lite/02_gone.ipynb" in str(error.value)


def test_embedding_keeps_what_a_reader_needs_and_nothing_else(root):
    target = root / "lite/01_tiny.ipynb"
    bare = read(target)
    figure = {"image/png": PNG, "text/plain": "<Figure>"}
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}}
    run = executed(
        root,
        stream("on"),
        stream("e\n"),
        stream("\r  0%|   | 0/9\r100%|###| 9/9 [00:01, 9.0it/s]\n", "stderr"),
        stream("UserWarning: look here\n", "stderr"),
        new_output("display_data", data=figure),
        new_output("display_data", data=widget),
        new_output(
            "execute_result", data={"text/plain": "2"}, execution_count=9
        ),
    )
    build.embed(run, target, LABEL)

    notebook = read(target)
    shown = code(notebook)[1].outputs
    assert [output.output_type for output in shown] == [
        "stream",
        "stream",
        "display_data",
        "execute_result",
    ]
    assert shown[0].text == "one\n"
    assert shown[1].text == "UserWarning: look here\n"
    assert shown[2].data == figure
    assert shown[3].execution_count == 2
    assert [cell.execution_count for cell in code(notebook)] == [1, 2, 3]
    assert notebook.metadata == bare.metadata
    assert [c.metadata for c in notebook.cells] == [
        c.metadata for c in bare.cells
    ]
    assert "PROFILE = 'pocket'" not in target.read_text()
    title = notebook.cells[0].source.split("\n\n")
    assert title[3] == f"*Outputs: {LABEL}.*"
    assert title[4] == "What you will learn: nothing."


def test_outputs_survive_a_build_until_the_code_changes(root):
    target = root / "lite/01_tiny.ipynb"
    build.embed(executed(root, stream("one\n")), target, LABEL)
    embedded = target.read_bytes()
    build.check(root)
    assert list(build.write(root)) == []
    assert target.read_bytes() == embedded

    # Embedding again replaces outputs and label.
    build.embed(executed(root, stream("one\n")), target, "one T4")
    text = target.read_text()
    assert text.count("*Outputs: ") == 1 and "one T4" in text

    source = root / "sources/01_tiny.py"
    source.write_text(SOURCE.replace("## One", "## First"))
    assert (target, False) in list(build.write(root))
    assert "*Outputs: " in target.read_text()
    assert code(read(target))[1].outputs[0].text == "one\n"

    source.write_text(SOURCE.replace('print("one")', 'print("two")'))
    with pytest.raises(LabError):
        build.check(root)
    assert (target, True) in list(build.write(root))
    assert "*Outputs: " not in target.read_text()
    assert code(read(target))[1].outputs == []


def refused(root, run, match):
    target = root / "lite/01_tiny.ipynb"
    before = target.read_bytes()
    with pytest.raises(LabError, match=match):
        build.embed(run, target, LABEL)
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    "path",
    ["/home/me/x", "file:///root/x", "('/tmp/a.py')", "/work/main/runs"],
)
def test_a_machine_path_in_an_output_is_refused(root, path):
    run = executed(root, stream(f"saved to {path}\n"))
    refused(root, run, "path '/")


@pytest.mark.parametrize(
    "text", ["https://example.org/home/x", "runs/tmp/x", "~/home/", "../tmp/x"]
)
def test_other_paths_may_be_shown(text):
    assert build.machine_path(text) is None


def test_the_repository_itself_is_a_machine_path():
    assert build.machine_path(f"in {build.ROOT}") is not None


def with_exception(text: str) -> str:
    notebook = json.loads(text)
    notebook["metadata"]["papermill"]["exception"] = True
    return json.dumps(notebook)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("uno", "x" * 600_000), r"60\d KB"),
        (lambda text: text.replace("print(", "exit("), "other code"),
        (with_exception, "failed"),
    ],
)
def test_a_run_that_is_not_fit_to_be_shown(root, change, message):
    run = executed(root, stream("uno\n"))
    run.write_text(change(run.read_text()))
    refused(root, run, message)


def test_a_run_by_papermill_can_be_embedded(root):
    target = root / "lite/01_tiny.ipynb"
    run = root / "run.ipynb"
    subprocess.run(
        [sys.executable, "-m", "papermill", target, run]
        + ["-k", "python3", "-p", "PROFILE", "pocket"],
        check=True,
        capture_output=True,
    )
    build.embed(run, target, LABEL)
    build.check(root)
    cells = code(read(target))
    assert cells[1].outputs[0].text == "one\n"
    assert cells[2].outputs[0].data["text/plain"] == "2"


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    with pytest.raises(SystemExit):
        build.main(["--embed", "run.ipynb", "lite/01_tiny.ipynb"])
    assert "--label" in capsys.readouterr().err
    missing = str(tmp_path / "none.ipynb")
    assert build.main(["--embed", missing, missing, "--label", LABEL]) == 1
    assert "none.ipynb" in capsys.readouterr().err
