"""Run a lesson headless: papermill, and the guards that it lacks.

    python -m grpo_lab.runner lite/03_grid_search.ipynb
    python -m grpo_lab.runner lite/03_grid_search.ipynb --output out \\
        -p PROFILE pocket -p LEARNING_RATES '[1e-3, 2e-3]' --time-limit 1800
    python -m grpo_lab.runner sweep lite/03_grid_search.ipynb \\
        -p PROFILE pocket --vary SEED 1 2 3

Parameters are checked before a kernel starts. The kernel is `python3` of the
interpreter that runs this, in the directory where the command was typed. A
time limit ends the kernel and everything that it started. Whatever happens,
the notebook as far as it got is on disk.

`sweep` as the first word runs a lesson once for each combination of values;
see `grpo_lab.sweep`. A notebook of that name is `./sweep`.

Exit codes: 0 all is well, 1 the lesson failed, 2 the input is wrong, 124 a
time limit was reached, 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import nbformat
import papermill
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient.exceptions import CellTimeoutError
from nbconvert import HTMLExporter
from nbformat import NotebookNode

from grpo_lab import processes
from grpo_lab.errors import LabError
from grpo_lab.files import LOCK, hold, read_json, readable, write_whole
from grpo_lab.parameters import declared_names, resolve

RUNS = Path("runs")  # below the working directory
DAY = 24 * 60 * 60  # seconds

# No progress bars in a file that is read later, no telemetry, and figures in
# the notebook even where MPLBACKEND is set for scripts.
ENVIRONMENT = {
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}


class LessonFailed(LabError):
    """A cell raised, or the kernel died."""

    exit_code = 1


class TimeIsUp(LabError):
    """The lesson, or one of its cells, took longer than it may."""

    exit_code = 124


def run(
    lesson: Path,
    given: Mapping[str, object],
    output: Path | None = None,
    resume: bool = False,
    time_limit: float = DAY,
    cell_time_limit: float | None = None,
) -> Path:
    """Execute a lesson and write its HTML.

    Args:
        lesson: the notebook.
        given: parameters, as values or as text; see parameters.convert.
        output: a new or empty directory for the notebook and its HTML; by
            default the next number below runs/. OUTPUT_DIR is `run` in it.
        resume: go on in the directory of an earlier run of this lesson; by
            default the latest below runs/.
        time_limit, cell_time_limit: seconds for everything, and a cell.

    Returns:
        The path of the executed notebook.

    Raises:
        LabError: wrong input; nothing was started.
        LessonFailed, TimeIsUp: the executed part is on disk.
    """
    if not (time_limit > 0 and (cell_time_limit or 1) > 0):
        raise LabError("A time limit is a number of seconds, more than 0.")
    declared = declared_in(lesson)
    values = resolve(declared, given)
    folder = _folder(lesson, output, resume)
    if "OUTPUT_DIR" in declared:
        values.setdefault("OUTPUT_DIR", str(folder / "run"))
    executed = folder / lesson.name
    page = executed.with_suffix(".html")
    with hold(folder):
        page.unlink(missing_ok=True)  # it says that the run has ended well
        _execute(lesson, executed, values, time_limit, cell_time_limit)
        write_whole(page, HTMLExporter().from_filename(str(executed))[0])
    return executed


def declared_in(lesson: Path) -> dict[str, str]:
    """The parameters of a lesson, as name -> type.

    Raises:
        LabError: there is no such file, or it is no notebook.
    """
    if not lesson.is_file():
        raise LabError(
            f"There is no notebook {lesson} below {Path.cwd()}. The lessons "
            "are in lite/ and notebooks/ of the repository."
        )
    try:
        notebook = nbformat.read(lesson, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:
        raise LabError(
            f"{lesson} is no Jupyter notebook ({type(error).__name__}). Give "
            "a file such as lite/03_grid_search.ipynb."
        ) from error
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            return declared_names(cell.source)
    return {}


def _folder(lesson: Path, output: Path | None, resume: bool) -> Path:
    """The directory to run in: new or empty, or this lesson's own."""
    folder = output or numbered(lesson.stem, resume)
    if folder.is_file():
        raise LabError(f"{folder} is a file: give --output a directory.")
    names = {path.name for path in folder.glob("*")} - {LOCK}
    others = [n for n in names if n.endswith(".ipynb") and n != lesson.name]
    if others or (names and not resume):
        raise LabError(
            f"{folder} holds {', '.join(others) or 'an earlier run'}. Give "
            "--output a new directory, or add --resume to go on in that of "
            f"an earlier run of {lesson.name}."
        )
    return folder


def numbered(stem: str, resume: bool) -> Path:
    """The next directory of that name below runs/, or the latest."""
    taken = [path.name for path in RUNS.glob(f"{stem}-*")]
    tails = [name.removeprefix(f"{stem}-") for name in taken]
    last = max((int(tail) for tail in tails if tail.isdecimal()), default=0)
    number = max(last, 1) if resume else last + 1
    return RUNS / f"{stem}-{number:03d}"


def _execute(
    lesson: Path,
    executed: Path,
    values: dict[str, object],
    time_limit: float,
    cell_time_limit: float | None,
) -> None:
    place = [executed.parent]
    finished, expired = threading.Event(), threading.Event()

    def watch() -> None:
        if not finished.wait(time_limit):
            expired.set()
            # More than once: the kernel may be about to start.
            processes.end_marked(place)
            while not finished.wait(0.5):
                processes.end_marked(place)

    processes.end_marked(place)  # what a run that was killed has left
    threading.Thread(target=watch, daemon=True).start()
    so_far = f"The notebook as far as it got is {executed}"
    try:
        papermill.execute_notebook(
            _escaped(lesson),
            _escaped(executed),
            parameters=values,
            kernel_name="python3",
            language="python",
            kernel_manager_class=_kernel_manager(executed.parent),
            cwd=Path.cwd(),
            progress_bar=False,
            execution_timeout=cell_time_limit,
            # Else each piece of a streamed answer would be a line of its own.
            coalesce_streams=True,
            on_cell_start=_announcer(),
        )
    except papermill.PapermillExecutionError as error:
        raise LessonFailed(
            f"{so_far}.\n{lesson} stopped in cell [{error.exec_count}] with "
            f"{error.ename}: {error.evalue}"
        ) from error
    except (CellTimeoutError, RuntimeError) as error:
        # RuntimeError is nbclient's word for a dead kernel.
        cell = isinstance(error, CellTimeoutError)
        if not cell and not expired.is_set():
            raise LessonFailed(
                f"{lesson}: its Python process died ({error}), as a rule "
                f"because the memory was full. {so_far}; choose a smaller "
                "profile, or fewer completions per step."
            ) from error
        limit = cell_time_limit if cell else time_limit
        option = "--cell-time-limit" if cell else "--time-limit"
        raise TimeIsUp(
            f"{lesson} was stopped: it took longer than the {option} of "
            f"{limit:g} s. {so_far}; raise {option}, and add --resume to keep "
            "what is done."
        ) from error
    finally:
        finished.set()
        processes.end_marked(place)


def _escaped(path: Path) -> str:
    """Papermill formats paths with `str.format`, so braces are doubled."""
    text = str(path.absolute())
    return text.replace("{", "{{").replace("}", "}}")


def _kernel_manager(folder: Path) -> type[AsyncKernelManager]:
    """A manager whose kernel is this interpreter, for a run in a folder.

    A kernel called `python3` that was installed for the user may belong to
    another environment, and its environment variables aren't ours.
    """
    spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher"]
        # Its own log only: what a cell raises is in the notebook. Sockets
        # are local, and on a busy machine the interrupt that begins every
        # shutdown may reach a kernel between two messages.
        + ["--log-level=CRITICAL", "-f", "{connection_file}"],
        display_name="Python 3",
        language="python",
        env={**ENVIRONMENT, processes.MARK: str(folder.resolve())},
    )

    class ThisPython(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return spec

    class LessonKernel(AsyncKernelManager):
        def __init__(self, **settings):
            super().__init__(kernel_spec_manager=ThisPython(), **settings)

    return LessonKernel


def _announcer() -> Callable[..., None]:
    """A papermill hook that prints each heading when its turn comes."""
    start = time.monotonic()

    def announce(cell: NotebookNode, cell_index: int) -> None:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            heading = cell.source.splitlines()[0].lstrip("# ")
            print(f"[{time.monotonic() - start:5.0f} s] {heading}", flush=True)

    return announce


def _report(executed: Path) -> str:
    """What a finished lesson says: its leaderboard, and where things are."""
    metadata = nbformat.read(executed, as_version=4).metadata.papermill
    folder = Path(metadata["parameters"].get("OUTPUT_DIR", executed.parent))
    results = read_json(folder / "results.json") or {}
    board = results.get("leaderboard_text")
    lines = [f"{board}\n"] if board else []
    lines.append(f"Notebook:    {executed}")
    lines.append(f"HTML:        {executed.with_suffix('.html')}")
    if any(folder.rglob("events.out.tfevents.*")):
        tool = readable(Path(sys.executable).with_name("tensorboard"))
        lines.append(f"TensorBoard: {tool} --logdir {folder}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that a run and a sweep of a lesson have in common."""
    add = parser.add_argument
    add("lesson", type=Path, help="the notebook to run")
    add(
        "-p",
        dest="parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a parameter; a list is written '[1, 2]' or a,b",
    )
    add(
        "--output",
        type=Path,
        help="a new directory (default: the next number below runs/)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on in the output directory of an earlier run",
    )
    add("--time-limit", type=float, default=DAY, metavar="S",
        help="seconds for a whole lesson (default: a day)")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command line; see the exit codes at the top."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_lab.runner",
        description="Run a lesson headless, with its parameters checked.",
        epilog="`%(prog)s sweep LESSON --vary NAME VALUE ...` runs it once "
        "for each combination of values: see `%(prog)s sweep --help`.",
    )
    add_options(parser)
    parser.add_argument(
        "--cell-time-limit",
        type=float,
        metavar="S",
        help="seconds for each cell (default: none)",
    )
    arguments = parser.parse_args(argv)
    try:
        # SystemExit, so that the kernel is ended as well.
        with processes.on_signals(
            processes.ENDING, lambda number: sys.exit(128 + number)
        ):
            processes.end_with_parent()
            executed = run(
                arguments.lesson,
                dict(arguments.parameters),
                arguments.output,
                arguments.resume,
                arguments.time_limit,
                arguments.cell_time_limit,
            )
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nInterrupted; --resume goes on from here.", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"\n{_report(executed)}")
    return 0


if __name__ == "__main__":
    from grpo_lab.cli import main as choose

    first = [] if sys.argv[1:2] == ["sweep"] else ["run"]
    sys.exit(choose([*first, *sys.argv[1:]]))
