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
time limit was reached.
"""

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import nbformat
import papermill
import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbclient.exceptions import CellTimeoutError
from nbconvert import HTMLExporter
from nbformat import NotebookNode

from grpo_lab.errors import LabError
from grpo_lab.files import readable
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
MARK = "GRPO_LAB_RUN"  # in the environment of every process of a run


class LessonFailed(LabError):
    """A cell raised, or the kernel died."""


class TimeIsUp(LabError):
    """The lesson, or one of its cells, took longer than it may."""


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
        output: a new or empty directory; by default the next number below
            runs/. The executed notebook and its HTML go there, and
            OUTPUT_DIR is `run` inside it unless it is given.
        resume: go on in a directory that a run of this lesson left; by
            default the latest below runs/.
        time_limit: seconds for everything.
        cell_time_limit: seconds for each cell.

    Returns:
        The path of the executed notebook.

    Raises:
        LabError: wrong input; nothing was started.
        LessonFailed, TimeIsUp: the executed part is on disk.
    """
    declared = declared_in(read(lesson))
    values = resolve(declared, given)
    folder = _folder(lesson, output, resume)
    if "OUTPUT_DIR" in declared:
        values.setdefault("OUTPUT_DIR", str(folder / "run"))
    folder.mkdir(parents=True, exist_ok=True)
    executed = folder / lesson.name
    _execute(lesson, executed, values, time_limit, cell_time_limit)
    page, _ = HTMLExporter().from_filename(str(executed))
    executed.with_suffix(".html").write_text(page, encoding="utf-8")
    return executed


def read(lesson: Path) -> NotebookNode:
    """The notebook of a lesson.

    Raises:
        LabError: there is none, or the file is no notebook.
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
    return notebook


def declared_in(notebook: NotebookNode) -> dict[str, str]:
    """The parameters of a lesson, as name -> type."""
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            return declared_names(cell.source)
    return {}


def _folder(lesson: Path, output: Path | None, resume: bool) -> Path:
    """The directory to run in: new or empty, or this lesson's own."""
    folder = output or numbered(lesson.stem, resume)
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise LabError(f"{folder} is a file: give --output a directory.")
    present = sorted(folder.iterdir())
    others = [p for p in present if p.suffix == ".ipynb"]
    others = [p.name for p in others if p.name != lesson.name]
    if others:
        raise LabError(
            f"{folder} belongs to another lesson ({others[0]}): give "
            f"{lesson.name} a directory of its own with --output."
        )
    if present and not resume:
        raise LabError(
            f"{folder} holds an earlier run. Add --resume to go on there, or "
            "give --output a new directory."
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
    mark = uuid.uuid4().hex
    finished, expired = threading.Event(), threading.Event()

    def watch() -> None:
        if not finished.wait(time_limit):
            expired.set()
            _end_processes(mark)
            # A process may have been about to start others, or the kernel
            # about to start: make sure until papermill has noticed.
            while not finished.wait(0.5):
                _end_processes(mark)

    threading.Thread(target=watch, daemon=True).start()
    so_far = f"The notebook as far as it got is {executed}"
    try:
        papermill.execute_notebook(
            _escaped(lesson),
            _escaped(executed),
            parameters=values,
            kernel_name="python3",
            language="python",
            kernel_manager_class=_kernel_manager({**ENVIRONMENT, MARK: mark}),
            cwd=Path.cwd(),
            progress_bar=False,
            execution_timeout=cell_time_limit,
            # Else each piece of a streamed answer would be a line of its own.
            coalesce_streams=True,
            on_cell_start=_announcer(),
        )
    except papermill.PapermillExecutionError as error:
        raise LessonFailed(
            f"{lesson} stopped in cell [{error.exec_count}] with "
            f"{error.ename}: {error.evalue}\n{so_far}."
        ) from error
    except CellTimeoutError as error:
        raise TimeIsUp(
            f"{lesson} was stopped: a cell took longer than the limit of "
            f"{cell_time_limit:g} s. {so_far}; raise --cell-time-limit or "
            "choose a smaller profile."
        ) from error
    except RuntimeError as error:  # nbclient's word for a dead kernel
        if expired.is_set():
            raise TimeIsUp(
                f"{lesson} was stopped: it took longer than the limit of "
                f"{time_limit:g} s. {so_far}; raise --time-limit, and add "
                "--resume to keep what is done."
            ) from error
        raise LessonFailed(
            f"{lesson}: its Python process ended without a word ({error}), "
            f"as a rule because the memory was full. {so_far}; choose a "
            "smaller profile, or fewer completions per step."
        ) from error
    finally:
        finished.set()
        _end_processes(mark)


def _escaped(path: Path) -> str:
    """Papermill formats paths with `str.format`, so braces are doubled."""
    text = str(path.absolute())
    return text.replace("{", "{{").replace("}", "}}")


def _kernel_manager(environment: dict[str, str]) -> type[AsyncKernelManager]:
    """A manager whose kernel is this interpreter.

    A kernel called `python3` that was installed for the user may belong to
    another environment, and its environment variables aren't ours.
    """
    spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher"]
        # Without its word about unencrypted sockets: they are local.
        + ["--log-level=ERROR", "-f", "{connection_file}"],
        display_name="Python 3",
        language="python",
        env=environment,
    )

    class ThisPython(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            return spec

    class LessonKernel(AsyncKernelManager):
        def __init__(self, **settings):
            super().__init__(kernel_spec_manager=ThisPython(), **settings)

    return LessonKernel


def _end_processes(mark: str) -> None:
    """Kill the kernel and whatever it started, in any session or group."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
        except psutil.Error:  # gone meanwhile, or another user's
            continue


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
    parameters = nbformat.read(executed, as_version=4).metadata.papermill
    folder = Path(parameters["parameters"].get("OUTPUT_DIR", executed.parent))
    lines = []
    results = folder / "results.json"
    if results.exists():
        text = json.loads(results.read_text()).get("leaderboard_text")
        lines += [text, ""] if text else []
    lines += [
        f"Notebook:    {executed}",
        f"HTML:        {executed.with_suffix('.html')}",
    ]
    if any(folder.rglob("events.out.tfevents.*")):
        tool = readable(Path(sys.executable).with_name("tensorboard"))
        lines.append(f"TensorBoard: {tool} --logdir {folder}")
    return "\n".join(lines)


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the kernel is ended as well.

    The caller's handler comes back: a process that is forked later would
    inherit ours, and one that is about to wait in C code may never run it.
    """
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(signal_number: int, frame: object) -> None:
    sys.exit(128 + signal_number)


def positive_seconds(text: str) -> float:
    """What argparse makes of a time limit."""
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError("a time limit is more than 0 s")
    return seconds


def parser_of(
    prog: str, description: str, parameter: str, resume: str
) -> argparse.ArgumentParser:
    """What a run and a sweep of a lesson have in common on a command line.

    Args:
        prog: what is typed before the options.
        description: what it does, in a sentence.
        parameter: what -p is for.
        resume: what --resume is for.

    Returns:
        A parser of `lesson`, `parameters` (name and text of each), `output`
        and `resume`; the caller adds its own options.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("lesson", type=Path, help="the notebook to run")
    parser.add_argument(
        "-p",
        dest="parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help=f"{parameter}; a list is written '[1, 2]' or a,b",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="a new directory (default: the next number below runs/)",
    )
    parser.add_argument("--resume", action="store_true", help=resume)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "python -m grpo_lab.runner",
        "Run a lesson headless, with its parameters checked.",
        "set a parameter",
        "go on in the output directory of an earlier run",
    )
    parser.epilog = (
        "`%(prog)s sweep LESSON --vary NAME VALUE ...` runs it once for each "
        "combination of values: see `%(prog)s sweep --help`."
    )
    parser.add_argument(
        "--time-limit",
        type=positive_seconds,
        default=DAY,
        metavar="S",
        help="seconds for the whole lesson (default: a day)",
    )
    parser.add_argument(
        "--cell-time-limit",
        type=positive_seconds,
        metavar="S",
        help="seconds for each cell (default: none)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line; see the exit codes at the top."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["sweep"]:
        from grpo_lab import sweep  # which imports this module

        return sweep.main(argv[1:])
    arguments = _parser().parse_args(argv)
    try:
        with _termination_as_exit():
            executed = run(
                arguments.lesson,
                dict(arguments.parameters),
                arguments.output,
                arguments.resume,
                arguments.time_limit,
                arguments.cell_time_limit,
            )
    except TimeIsUp as error:
        print(f"\n{error}", file=sys.stderr)
        return 124
    except LessonFailed as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; --resume goes on from here.", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"\n{_report(executed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
