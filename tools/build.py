"""From sources/NN_topic.py to notebooks/ and lite/, byte for byte.

    python -m tools.build                 # write both editions
    python -m tools.build --check         # fail if a committed one differs
    python -m tools.build --embed RUN.ipynb lite/NN_topic.ipynb \\
        --label "pocket profile, 2 CPU cores, no GPU"

A source is py:percent text (jupytext). The two editions of a lesson differ
in the banner below the title and in the default of PROFILE, nothing else.
Outputs of a real run may be embedded; a later build keeps them as long as no
code cell has changed.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat
from nbformat import NotebookNode

from grpo_lab.errors import LabError

REPOSITORY = "grpo-lab/grpo-lab"  # on GitHub: badges, Colab's installation
ROOT = Path(__file__).resolve().parent.parent
SIZE_LIMIT = 500_000  # bytes of a committed notebook

PROFILE_LINE = re.compile(r'^(PROFILE: str = )"\w*"', re.MULTILINE)
LABEL = re.compile(r"\*Outputs: .*\*")
MACHINE_PATH = re.compile(
    r"(?<![\w.~-])/(?:work|root|home|tmp|Users)/[\w./-]*"
)
PROGRESS_BAR = re.compile(r"\r|\d%\||[\d?](?:it/s|s/it)")

KERNEL = {
    "display_name": "Python 3", "language": "python", "name": "python3",
}  # fmt: skip
METADATA = {
    # Colab attaches a GPU when it opens the notebook; Jupyter ignores it.
    "accelerator": "GPU",
    "kernelspec": KERNEL,
    "language_info": {"name": "python"},
}


class Edition(NamedTuple):
    """One of the forms that a lesson is published in."""

    folder: str
    profile: str  # the default of PROFILE
    banner: str
    other: str  # folder of the sibling that the banner points to


EDITIONS = (
    Edition(
        folder="notebooks",
        profile="full",
        banner="**Full edition**: one GPU with at least 80 GB of memory. "
        "With a smaller one, or none, take the [lite edition]({other}).",
        other="lite",
    ),
    Edition(
        folder="lite",
        profile="lite",
        banner="**Lite edition**: a GPU with 15 to 80 GB of memory, or "
        "no GPU at all: then the embedded pocket models run on two CPU "
        "cores. For 80 GB and more take the [full edition]({other}).",
        other="notebooks",
    ),
)

ANY_MACHINE = "any-machine"
"""Tag of the title cell of a lesson that asks for no GPU in any edition."""

ANY_MACHINE_BANNER = (
    "**Any machine**: this lesson needs no GPU, and is the same in the full "
    "and in the lite edition."
)


def build(source: Path, edition: Edition) -> NotebookNode:
    """The notebook of one lesson in one edition, without outputs.

    Raises:
        LabError: the source has no title or no parameters cell.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    lesson = source.stem
    _add_banner(notebook.cells, lesson, edition)
    _set_profile(notebook.cells, lesson, edition.profile)
    for index, cell in enumerate(notebook.cells):
        # Jupytext draws random ids, and no build would equal the last one.
        cell.id = f"{lesson.replace('_', '-')}-{index:03d}"
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def render(notebook: NotebookNode) -> str:
    """The text of a notebook file; the same notebook gives the same text."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def built_files(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Every notebook that belongs below `root`, as (path, text).

    The outputs and the label of the file that is there now are kept if its
    code is the code of the source.
    """
    for source in sorted((root / "sources").glob("*.py")):
        for edition in EDITIONS:
            path = root / edition.folder / f"{source.stem}.ipynb"
            notebook = build(source, edition)
            if path.exists():
                _keep_outputs(notebook, nbformat.read(path, as_version=4))
            yield path, render(notebook)


def write(root: Path = ROOT) -> Iterator[tuple[Path, bool]]:
    """Write every notebook whose text has changed.

    Yields:
        The path, and whether outputs were dropped because the code changed.
    """
    for path, text in built_files(root):
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if text != old:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            yield path, '"output_type"' in old and '"output_type"' not in text


def check(root: Path = ROOT) -> None:
    """Make sure that the committed notebooks are what the sources give.

    Raises:
        LabError: naming the notebooks that differ or have no source.
    """
    built = dict(built_files(root))
    present = {
        path: path.read_text(encoding="utf-8")
        for edition in EDITIONS
        for path in (root / edition.folder).glob("*.ipynb")
    }
    # Two dictionaries' items: the text differs, or one side lacks the file.
    wrong = {path for path, _ in built.items() ^ present.items()}
    if wrong:
        names = ", ".join(str(p.relative_to(root)) for p in sorted(wrong))
        raise LabError(
            f"These notebooks are not what sources/ gives: {names}. Change "
            "the source, not the notebook, and run `make notebooks`; remove "
            "a notebook whose source is gone."
        )


def embed(executed: Path, target: Path, label: str) -> None:
    """Copy the outputs of a run into a built notebook.

    The `results.json` of the run goes to `results/` beside the notebook, so
    that tests can hold the prose against it.

    Args:
        executed: what grpo_lab.runner (or papermill) wrote.
        target: the built notebook of the same lesson; rewritten.
        label: what it ran on, shown below the banner, for example
            "pocket profile, 2 CPU cores, no GPU".

    Raises:
        LabError: the run failed or has other code, an output holds a path of
            this machine, or the result is too large to commit.
    """
    run = nbformat.read(executed, as_version=4)
    notebook = nbformat.read(target, as_version=4)
    if run.metadata.get("papermill", {}).get("exception"):
        raise LabError(f"{executed} is a run that failed: nothing to show.")
    ran = [c for c in _code(run) if "injected-parameters" not in _tags(c)]
    cells = _code(notebook)
    if [cell.source for cell in ran] != [cell.source for cell in cells]:
        raise LabError(
            f"{executed} ran other code than {target} holds: run `make "
            "notebooks`, run the lesson again and embed that."
        )
    _set_label(notebook, f"*Outputs: {label}.*")
    for count, (cell, source) in enumerate(zip(cells, ran, strict=True), 1):
        cell.execution_count = count
        cell.outputs = _clean_outputs(source.outputs, count)
        if path := machine_path(output_text(cell)):
            raise LabError(
                f"{executed} shows the path {path!r} of this machine, in "
                f"the cell that begins {cell.source.splitlines()[0]!r}. Run "
                "it from the repository's root without --output, so that its "
                "paths are relative."
            )
    text = render(notebook)
    if (size := len(text.encode())) > SIZE_LIMIT:
        raise LabError(
            f"With its outputs {target} takes {size / 1e3:.0f} KB and may "
            f"take {SIZE_LIMIT / 1e3:.0f}: show fewer or smaller figures."
        )
    target.write_text(text, encoding="utf-8")
    results = executed.parent / "run" / "results.json"
    if results.exists():
        place = target.parent / "results" / f"{target.stem}.json"
        place.parent.mkdir(exist_ok=True)
        shutil.copy(results, place)


def machine_path(text: str) -> str | None:
    """The first path in a text that only this machine has, if any."""
    if found := MACHINE_PATH.search(text):
        return found[0]
    return str(ROOT) if str(ROOT) in text else None


def output_text(cell: NotebookNode) -> str:
    """Everything that a code cell shows as text, images left out."""
    parts = []
    for output in cell.outputs:
        parts += [output.get("text", ""), *output.get("traceback", [])]
        parts += [
            value
            for mime, value in output.get("data", {}).items()
            if isinstance(value, str) and not mime.startswith("image/png")
        ]
    return "\n".join(parts)


def _add_banner(cells: list[NotebookNode], lesson: str, edition: Edition):
    title = cells[0].source if cells else ""
    if not title.startswith("# ") or cells[0].cell_type != "markdown":
        raise LabError(
            f"sources/{lesson}.py must begin with a markdown cell whose first "
            "line is the title, as in `# # Title`."
        )
    path = f"{edition.folder}/{lesson}.ipynb"
    badge = (
        "[![Open in Colab](https://colab.research.google.com/assets/"
        "colab-badge.svg)](https://colab.research.google.com/github/"
        f"{REPOSITORY}/blob/main/{path})"
    )
    banner = edition.banner.format(other=f"../{edition.other}/{lesson}.ipynb")
    if ANY_MACHINE in _tags(cells[0]):
        banner = ANY_MACHINE_BANNER
    heading, _, rest = title.partition("\n")
    blocks = (heading, badge, banner, rest.strip())
    cells[0].source = "\n\n".join(block for block in blocks if block)


def _set_profile(cells: list[NotebookNode], lesson: str, profile: str):
    for cell in cells:
        if "parameters" in _tags(cell):
            line = rf'\g<1>"{profile}"'
            cell.source, found = PROFILE_LINE.subn(line, cell.source)
            if found:
                return
    raise LabError(
        f'sources/{lesson}.py needs one cell tagged "parameters" with the '
        'line `PROFILE: str = "lite"`.'
    )


def _keep_outputs(notebook: NotebookNode, committed: NotebookNode) -> None:
    old, new = _code(committed), _code(notebook)
    if [cell.source for cell in old] != [cell.source for cell in new]:
        return
    for cell, before in zip(new, old, strict=True):
        cell.outputs = before.outputs
        cell.execution_count = before.execution_count
    if label := LABEL.search(committed.cells[0].source):
        _set_label(notebook, label[0])


def _set_label(notebook: NotebookNode, label: str) -> None:
    """Put the label below the banner, in place of an older one."""
    blocks = notebook.cells[0].source.split("\n\n")
    blocks = [block for block in blocks if not LABEL.fullmatch(block)]
    blocks.insert(3, label)  # after the title, the badge and the banner
    notebook.cells[0].source = "\n\n".join(blocks)


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def _clean_outputs(
    outputs: list[NotebookNode], count: int
) -> list[NotebookNode]:
    """The outputs that a reader needs: no widgets, no progress bars."""
    clean: list[NotebookNode] = []
    for output in map(nbformat.from_dict, outputs):
        if output.get("name") == "stderr":
            lines = output.text.splitlines(keepends=True)
            kept = [x for x in lines if not PROGRESS_BAR.search(x)]
            output.text = "".join(kept)
        if "data" in output:
            output.data = {
                mime: value
                for mime, value in output.data.items()
                if "widget" not in mime and mime != "application/javascript"
            }
        if output.output_type == "execute_result":
            output.execution_count = count
        before = clean[-1] if clean else {}
        # A stream comes in pieces, cut where a buffer was sent.
        if "name" in output and output.name == before.get("name"):
            clean[-1].text += output.text
        elif output.get("data") or output.get("text"):
            clean.append(output)
    return clean


def main(argv: list[str] | None = None) -> int:
    """The command line; 0 when all is well, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.build",
        description="Build notebooks/ and lite/ from sources/.",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true")
    action.add_argument(
        "--embed", nargs=2, type=Path, metavar=("EXECUTED", "NOTEBOOK")
    )
    parser.add_argument("--label", help="what the embedded run ran on")
    arguments = parser.parse_args(argv)
    if arguments.embed and not arguments.label:
        parser.error("--embed needs --label, as the run's own words say it")
    try:
        if arguments.check:
            check()
        elif arguments.embed:
            executed, notebook = arguments.embed
            embed(executed, notebook, arguments.label)
        else:
            for path, dropped in write():
                print(f"wrote {path.relative_to(ROOT)}")
                if dropped:
                    print(
                        "  without outputs: its code has changed. Run it "
                        "and use --embed."
                    )
    except (LabError, OSError) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
