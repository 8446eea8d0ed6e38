"""The arena in a terminal: python -m grpo_lab.arena GROUP VERB ...

The groups, verbs and options of AgileRL's command `arena`, each a thin layer
over `LocalArena`. What was asked for goes to stdout, as text or, with --json,
as one JSON value; what is said beside it goes to stderr.

Exit codes: 0 all is well; 1 it failed (an experiment that was watched, or no
data set of that name); 2 the input is wrong; 3 the experiment that was watched
was stopped or killed; 130 Ctrl-C.
"""

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from grpo_lab import environment
from grpo_lab.arena.client import HOME, HOME_VARIABLE, LocalArena
from grpo_lab.errors import LabError
from rewards import RewardError
from rewards.contract.verdicts import printable

COMMAND = "python -m grpo_lab.arena"

FAILED, WRONG_INPUT, STOPPED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes beside 0."""

ENDS = {"failed": FAILED, "stopped": STOPPED, "interrupted": STOPPED}
"""Exit codes of an experiment that was watched to an end other than done."""

VERBS = {
    "create_dataset": "datasets create",
    "list_datasets": "datasets list",
    "delete_dataset": "datasets delete",
    "create_project": "projects create",
    "list_projects": "projects list",
    "set_default_project": "projects set-default",
    "list_resources": "resources list",
    "submit_experiment": "experiments submit",
    "list_experiments": "experiments list",
    "watch_experiment": "experiments watch",
    "stop_experiment": "experiments stop",
    "resume_experiment": "experiments resume",
    "delete_experiment": "experiments delete",
    "list_checkpoints": "experiments checkpoints",
    "deploy_agent": "agent deploy",
    "list_inference_deployments": "agent list",
    "stop_deployment": "agent stop",
    "delete_deployment": "agent delete",
    "set_default_agent": "agent run",
}
"""What to type for the calls of `LocalArena` that its errors name."""

WIDTH = 79
"""Columns of running text."""

UNLIMITED = 100_000
"""Columns of a table that is read by a program: no value is folded."""


# --- What all verbs share ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Terminal:
    """What the options before the group say.

    Attributes:
        home: the arena's directory; None for the default.
        as_json: whether stdout gets one JSON value in place of text.
    """

    home: Path | None
    as_json: bool

    def arena(self) -> LocalArena:
        """The arena; made only now, so that --help touches no directory."""
        return LocalArena(self.home)

    def show(self, value: object, text: str) -> None:
        """Print what a verb has found out: the value, or the text for it."""
        typer.echo(_json(value) if self.as_json else text)

    def line(self, *words: str) -> str:
        """What to type for a verb of this arena."""
        place = []
        if self.home and str(self.home) != os.environ.get(HOME_VARIABLE):
            place = ["--home", str(self.home)]
        return f"{COMMAND} {shlex.join([*place, *words])}"

    def next(self, *words: str) -> str:
        """A line that says what to type next."""
        return f"Next: {self.line(*words)}"


class Arena(TyperGroup):
    """All groups; turns errors that a user can put right into exit codes."""

    def invoke(self, ctx: typer.Context) -> object:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except (LabError, RewardError) as error:
            # It may quote a log, with whatever codes that holds.
            _say(printable(_told(str(error), ctx.obj)))
            raise typer.Exit(WRONG_INPUT) from None
        except KeyboardInterrupt:
            _say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None


def _told(message: str, terminal: Terminal | None) -> str:
    """An error, and what to type for the calls that it names."""
    start = terminal.line().strip() if terminal else COMMAND
    named = re.findall(r"\w+", message)
    lines = [
        f"In a terminal {verb} is `{start} {VERBS[verb]}`."
        for verb in VERBS
        if verb in named
    ]
    return " ".join([message, *lines])


def _json(value: object) -> str:
    # NaN, which a reward may be, is no JSON: null stands for it.
    plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1, ensure_ascii=False)


def _say(text: str) -> None:
    """Tell something that is not what was asked for."""
    typer.echo(text, err=True)


@contextlib.contextmanager
def _training_libraries() -> Iterator[None]:
    """Have them quiet; whatever is printed all the same goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        environment.prepare()
        yield


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as plain text; rows are folded to fit a terminal, never cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1), show_edge=False)
    for heading in headings:
        table.add_column(Text(heading), overflow="fold")
    for row in rows:
        # Text is shown as it is; a plain str could hold Rich's markup.
        table.add_row(*(Text(_cell(value)) for value in row))
    width = UNLIMITED
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    paper = io.StringIO()
    Console(file=paper, width=width, color_system=None).print(table)
    lines = paper.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _records(found: Iterable[dict], *keys: str) -> str:
    """A table of some values of each record."""
    return _table(keys, ([one[key] for key in keys] for one in found))


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return printable(str(value)).replace("\n", " ")


def _filled(text: str, first: str = "", rest: str = "") -> str:
    """Running text, with what its first and its other lines begin with."""
    return textwrap.fill(
        printable(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _example(*commands: str) -> str:
    """The end of a --help: commands to type, which are not wrapped.

    A command of several lines ends each but the last in a backslash.
    """
    typed = [f"{COMMAND} {one}" for one in commands]
    lines = "\n".join(typed).replace("\n", "\n  ")
    return f"\b\nExample:\n  {lines}"


def _group(text: str, *example: str) -> typer.Typer:
    return typer.Typer(
        help=text,
        epilog=_example(*example),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
    )


Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]

app = typer.Typer(
    cls=Arena,
    help=(
        "Register, submit, evolve, watch, deploy, ask: AgileRL's Arena, on "
        "this machine."
    ),
    epilog=_example("projects create mine", "--json experiments list"),
    no_args_is_help=True,
    add_completion=False,
    # Their frames would not fit the examples, nor a pipe.
    rich_markup_mode=None,
    # They print the values of variables, among them prompts and tokens.
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    context: typer.Context,
    home: Annotated[
        Path | None,
        typer.Option(
            envvar=HOME_VARIABLE,
            help=f"Directory of the arena; by default {HOME}.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON value and nothing else."),
    ] = False,
) -> None:
    context.obj = Terminal(home, as_json)


# --- Data sets --------------------------------------------------------------

datasets = _group("Register the data to train on.", "datasets list")
app.add_typer(datasets, name="datasets")


@datasets.command(
    "create",
    epilog=_example(
        "datasets create gsm8k --category reasoning \\\n"
        "    --hf-dataset openai/gsm8k --hf-config main --hf-split train \\\n"
        "    --column-mapping '"
        '{"question": "question", "answer": "answer"}'
        "'"
    ),
)
def _create_dataset(
    context: typer.Context,
    name: Name,
    category: Annotated[
        str, typer.Option(help="reasoning, preference or sft.")
    ],
    column_mapping: Annotated[
        str,
        typer.Option(help="For each key of the category its column, as JSON."),
    ],
    file: Annotated[
        Path | None, typer.Option(help="A CSV, parquet or JSONL file.")
    ] = None,
    hf_dataset: Annotated[
        str | None, typer.Option(help="In place of a file: one of the Hub.")
    ] = None,
    hf_config: Annotated[
        str | None, typer.Option(help="Its configuration.")
    ] = None,
    hf_split: Annotated[
        str | None, typer.Option(help="Its split; by default train.")
    ] = None,
    description: Annotated[str, typer.Option(help="Your own words.")] = "",
) -> None:
    """Register a data set; its usable rows are copied into the arena."""
    terminal = context.obj
    arena = terminal.arena()
    with _training_libraries():
        found = arena.create_dataset(
            name,
            category,
            column_mapping=column_mapping,
            file=file,
            hf_dataset_name=hf_dataset,
            hf_config=hf_config,
            hf_split=hf_split,
            description=description,
        )
    text = (
        f"Registered the data set {name}: {found['rows']} rows of "
        f"{found['source']}. Left out: {found['nulls']} with an empty value, "
        f"{found['unreadable']} that can't be read, {found['repeated']} "
        "that came before."
    )
    step = ("projects", "create", "my project")
    if arena.list_projects():
        step = ("experiments", "submit", "--help")
    terminal.show(found, f"{_filled(text)}\n{terminal.next(*step)}")


@datasets.command(
    "list", epilog=_example("datasets list", "datasets list --search gsm8k")
)
def _list_datasets(
    context: typer.Context,
    search: Annotated[
        str | None,
        typer.Option(help="Words to look for in the names on the Hub."),
    ] = None,
) -> None:
    """Show the registered data sets, or search those of the Hub."""
    terminal = context.obj
    if search is not None:
        with _training_libraries():
            found = terminal.arena().list_datasets(search)
        terminal.show(found, _records(found, "id", "downloads", "likes"))
        return
    found = terminal.arena().list_datasets()
    keys = ("name", "category", "rows", "source", "description")
    terminal.show(found, _records(found, *keys))
    if not found:
        _say(f"None yet. {terminal.next('datasets', 'create', '--help')}")


@datasets.command("exists", epilog=_example("datasets exists gsm8k"))
def _dataset_exists(context: typer.Context, name: Name) -> None:
    """Say whether a data set is there; exit code 1 if not."""
    found = context.obj.arena().dataset_exists(name)
    context.obj.show(found, "yes" if found else "no")
    if not found:
        raise typer.Exit(FAILED)


@datasets.command("delete", epilog=_example("datasets delete gsm8k"))
def _delete_dataset(context: typer.Context, name: Name) -> None:
    """Forget a data set and delete the arena's copy of it."""
    context.obj.arena().delete_dataset(name)
    context.obj.show({"deleted": name}, f"Deleted the data set {name}.")


# --- Projects and resources -------------------------------------------------

projects = _group(
    "File experiments under projects.",
    "projects create 'GSM8K Tutorial' --llm-based",
)
app.add_typer(projects, name="projects")


@projects.command(
    "create", epilog=_example("projects create 'GSM8K Tutorial' --llm-based")
)
def _create_project(
    context: typer.Context,
    name: Name,
    description: Annotated[
        str | None, typer.Option(help="Your own words.")
    ] = None,
    llm_based: Annotated[
        bool,
        typer.Option(help="Whether its experiments train language models."),
    ] = True,
) -> None:
    """Register a project; the first one is the default."""
    terminal = context.obj
    found = terminal.arena().create_project(name, description, llm_based)
    step = terminal.next("experiments", "submit", "--help")
    terminal.show(found, f"Registered the project {name}.\n{step}")


@projects.command("list", epilog=_example("projects list"))
def _list_projects(context: typer.Context) -> None:
    """Show the registered projects."""
    terminal = context.obj
    found = terminal.arena().list_projects()
    keys = ("name", "default", "llm_based", "description")
    terminal.show(found, _records(found, *keys))
    if not found:
        _say(f"None yet. {terminal.next('projects', 'create', '--help')}")


@projects.command(
    "set-default", epilog=_example("projects set-default 'GSM8K Tutorial'")
)
def _set_default_project(context: typer.Context, name: Name) -> None:
    """File experiments under this project where none is named."""
    context.obj.arena().set_default_project(name)
    context.obj.show({"default": name}, f"{name} is the default project.")


resources = _group("What this machine offers.", "resources list")
app.add_typer(resources, name="resources")


@resources.command("list", epilog=_example("resources list"))
def _list_resources(context: typer.Context) -> None:
    """Show what there is to train on."""
    with _training_libraries():
        found = context.obj.arena().list_resources()
    keys = ("id", "device", "nodes", "memory_gib", "free_disk_gib")
    context.obj.show(found, _records(found, *keys))


# --- Experiments ------------------------------------------------------------

experiments = _group(
    "Train a population, and see what comes of it.",
    "experiments watch gsm8k-grpo-v1",
)
app.add_typer(experiments, name="experiments")


Engine = Annotated[
    str | None,
    typer.Option(
        help="process for one member after the other, ray for members in "
        "parallel on the workers of a Ray cluster.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Of the Ray cluster, such as auto; by default this machine.",
    ),
]
Cpus = Annotated[
    float | None, typer.Option(help="CPU cores of each worker; by default 1.")
]
Gpus = Annotated[
    float | None, typer.Option(help="GPUs of each worker; by default 0.")
]


def _workers(**options: object) -> dict:
    """What was typed of the options that say where members train."""
    return {k: v for k, v in options.items() if v is not None}


@experiments.command(
    "submit",
    epilog=_example(
        "experiments submit gsm8k_grpo.yaml \\\n"
        "    --reward-file reward.py --project 'GSM8K Tutorial' \\\n"
        "    --experiment-name gsm8k-grpo-v1",
        "experiments submit gsm8k_grpo.yaml \\\n"
        "    --reward-file reward.py \\\n"
        "    --engine ray --address auto --cpus 4 --gpus 1",
    ),
)
def _submit_experiment(
    context: typer.Context,
    manifest: Annotated[
        Path,
        typer.Argument(
            metavar="MANIFEST",
            help="A YAML file; `manifest example` prints one.",
            show_default=False,
        ),
    ],
    reward_file: Annotated[
        Path,
        typer.Option(help="Has reward(question, answer, completion)."),
    ],
    resource_id: Annotated[
        str | None, typer.Option(help="One of `resources list`.")
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option(help="This machine is 1.")
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="By default the default project.")
    ] = None,
    experiment_name: Annotated[
        str | None,
        typer.Option(help="By default the data set's name and a number."),
    ] = None,
    completion: Annotated[
        str | None,
        typer.Option(help="One that the reward must be able to score."),
    ] = None,
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="The same budget for one policy, without evolution.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Although the reward file was found wanting."
        ),
    ] = False,
    engine: Engine = None,
    address: Address = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow it until it ends.")
    ] = False,
) -> None:
    """Check a manifest and a reward file, and start their training.

    The training goes on when this terminal is closed.
    """
    terminal = context.obj
    arena = terminal.arena()
    _say("Checking the manifest, the data, the reward file and the memory.")
    with _training_libraries():
        found = arena.submit_experiment(
            manifest,
            reward_file,
            resource_id=resource_id,
            num_nodes=num_nodes,
            project=project,
            experiment_name=experiment_name,
            completion=completion,
            control=control,
            force=force,
            engine=engine,
            **_workers(address=address, cpus=cpus, gpus=gpus),
        )
    value = {
        "name": found.name,
        "findings": [dataclasses.asdict(one) for one in found.findings],
        "verdicts": found.verdicts.table(),
        "system_prompt": found.system_prompt,
        "plan": found.plan,
    }
    if not watch:
        step = terminal.next("experiments", "watch", found.name)
        terminal.show(value, f"{_submitted(found)}\n{step}")
        return
    if not terminal.as_json:
        typer.echo(_submitted(found))
    end = _follow(terminal, arena, found.name)
    _show_end(terminal, arena, found.name, value | {"end": end}, end)


def _submitted(found) -> str:
    """All that a submission has found, decided and planned."""
    prompt = _filled(found.system_prompt, "  ", "  ")
    return "\n\n".join(
        [
            _findings(found.findings),
            str(found.verdicts),
            f"Every policy is told:\n{prompt}",
            _table(("plan", ""), found.plan.items()),
            f"Submitted {found.name}; the training goes on when this terminal "
            "is closed.",
        ]
    )


def _findings(findings: Sequence) -> str:
    lines = [
        _filled(f"{one.level}: {one.text}", rest="  ") for one in findings
    ]
    return "\n".join(lines) or "The manifest shows no faults."


@experiments.command("list", epilog=_example("experiments list"))
def _list_experiments(context: typer.Context) -> None:
    """Show every experiment and how it stands."""
    terminal = context.obj
    found = terminal.arena().list_experiments()
    rows = [
        [
            one["name"],
            one["status"],
            f"{one['step']}/{one['steps']}",
            one["dataset"],
            one["project"],
            one["control"],
        ]
        for one in found
    ]
    headings = ("name", "status", "step", "data set", "project", "control")
    reasons = [
        _filled(f"{one['name']} {one['status']}: {one['reason']}", rest="  ")
        for one in found
        if one["reason"]
    ]
    terminal.show(found, "\n".join([_table(headings, rows), *reasons]))
    if not found:
        _say(f"None yet. {terminal.next('experiments', 'submit', '--help')}")


@experiments.command("watch", epilog=_example("experiments watch gsm8k-v1"))
def _watch_experiment(context: typer.Context, name: Name) -> None:
    """Follow an experiment until it ends.

    Ctrl-C leaves it alone. Exit code 0 if it is done, 1 if it failed, 3 if it
    was stopped or killed.
    """
    arena = context.obj.arena()
    end = _follow(context.obj, arena, name)
    _show_end(context.obj, arena, name, end, end)


def _follow(terminal: Terminal, arena: LocalArena, name: str) -> dict:
    """Print a line whenever something has changed.

    Returns:
        How the experiment stood at its end.
    """
    now: dict = {}
    try:
        for now in arena.watch_experiment(name):
            if not terminal.as_json:
                typer.echo(_progress(now))
    except KeyboardInterrupt:
        _say(
            f"\nThe training of {name} goes on. Watch it again with "
            f"`{terminal.line('experiments', 'watch', name)}`."
        )
        raise typer.Exit(INTERRUPTED) from None
    return now


def _progress(now: dict) -> str:
    parts = [f"step {now['step']} of {now['steps']}"]
    if "member" in now:
        parts = [f"member {now['member']}", *parts]
    if now.get("reward") is not None:
        parts.append(f"reward {now['reward']:.3f}")
    if now.get("seconds_per_step"):
        parts.append(f"{now['seconds_per_step']:.1f} s")
    note = f" ({now['warning']})" if now.get("warning") else ""
    return f"{now['status']}: {', '.join(parts)}{note}"


def _show_end(
    terminal: Terminal, arena: LocalArena, name: str, value: dict, end: dict
) -> None:
    """Say how an experiment has ended, also by the exit code."""
    advice = {
        "done": terminal.next("experiments", "checkpoints", name),
        "failed": "The whole error is in "
        f"{arena.home / 'experiments' / name / 'error.txt'}.",
    }.get(end["status"], terminal.next("experiments", "resume", name))
    reason = [_filled(end["reason"])] if end["reason"] else []
    terminal.show(value, "\n".join([*reason, advice]))
    if end["status"] in ENDS:
        raise typer.Exit(ENDS[end["status"]])


@experiments.command("stop", epilog=_example("experiments stop gsm8k-v1"))
def _stop_experiment(context: typer.Context, name: Name) -> None:
    """Stop an experiment after its current step."""
    terminal = context.obj
    arena = terminal.arena()
    _say("Waiting for the current step to end.")
    found = arena.stop_experiment(name)
    step = terminal.next("experiments", "resume", name)
    terminal.show(found, f"{_progress(found)}\n{step}")


@experiments.command(
    "resume",
    epilog=_example(
        "experiments resume gsm8k-v1",
        "experiments resume gsm8k-v1 --max-steps 6144",
        "experiments resume gsm8k-v1 --engine process",
    ),
)
def _resume_experiment(
    context: typer.Context,
    name: Name,
    max_steps: Annotated[
        int | None,
        typer.Option(
            help="Completions of the whole population from its start; more "
            "than before.",
        ),
    ] = None,
    engine: Engine = None,
    address: Address = None,
    cpus: Cpus = None,
    gpus: Gpus = None,
) -> None:
    """Go on where an experiment has ended."""
    terminal = context.obj
    found = terminal.arena().resume_experiment(
        name,
        max_steps,
        engine,
        **_workers(address=address, cpus=cpus, gpus=gpus),
    )
    step = terminal.next("experiments", "watch", name)
    terminal.show(found, f"{_progress(found)}\n{step}")


@experiments.command(
    "metrics",
    epilog=_example("experiments metrics gsm8k-v1 --output-file metrics.csv"),
)
def _metrics(
    context: typer.Context,
    name: Name,
    output_file: Annotated[
        Path | None,
        typer.Option(help="By default metrics.csv of the experiment."),
    ] = None,
) -> None:
    """Write the metrics of every step so far as CSV."""
    with _training_libraries():
        path = context.obj.arena().download_experiment_metrics(
            name, output_file
        )
    context.obj.show({"file": str(path)}, f"The metrics are in {path}.")


@experiments.command(
    "checkpoints", epilog=_example("experiments checkpoints gsm8k-v1")
)
def _checkpoints(context: typer.Context, name: Name) -> None:
    """Show the checkpoints, the best first."""
    terminal = context.obj
    with _training_libraries():
        found = terminal.arena().list_checkpoints(name)
    rows = [
        [
            one["name"],
            one["member"],
            one["completions"],
            _accuracy(one),
            _score(one["mean_reward"]),
            one["size_mb"],
        ]
        for one in found
    ]
    headings = (
        "name", "member", "completions", "accuracy (95 %)", "reward", "MB",
    )  # fmt: skip
    text = _table(headings, rows)
    step = terminal.next("agent", "deploy", name)
    terminal.show(found, f"{text}\n{step}" if found else text)
    if not found:
        _say("None yet: the first is written after the first generation.")


def _score(value: float | None) -> str | None:
    """A reward; a mean of none is NaN, which JSON has no number for."""
    return None if value is None else f"{value:.3f}"


def _accuracy(row: dict) -> str:
    return f"{row['accuracy']:.3f} ({row['low']:.2f}-{row['high']:.2f})"


@experiments.command(
    "lineage", epilog=_example("experiments lineage gsm8k-v1")
)
def _lineage(context: typer.Context, name: Name) -> None:
    """Show who descends from whom, and how good it was.

    The best member of each step comes first.
    """
    with _training_libraries():
        frame = context.obj.arena().experiment_lineage(name)
    found = json.loads(frame.to_json(orient="records", double_precision=15))
    rows = [
        [
            one["step"],
            one["member"],
            one["parent"],
            one["change"],
            f"{one['learning_rate']:.3g}",
            f"{one['beta']:.3g}",
            _accuracy(one),
            _score(one["mean_reward"]),
        ]
        for one in found
    ]
    headings = (
        "step", "member", "parent", "change", "lr", "beta",
        "accuracy (95 %)", "reward",
    )  # fmt: skip
    context.obj.show(found, _table(headings, rows))
    if not found:
        _say("Nothing yet: the first rows come with the first generation.")


@experiments.command("delete", epilog=_example("experiments delete gsm8k-v1"))
def _delete_experiment(context: typer.Context, name: Name) -> None:
    """Delete an experiment with all that it has learned."""
    context.obj.arena().delete_experiment(name)
    context.obj.show({"deleted": name}, f"Deleted the experiment {name}.")


# --- Deployed agents --------------------------------------------------------

agent = _group(
    "Serve what was learned on this machine, and ask it.",
    "agent generate --prompt 'What is 12 times 7?'",
)
app.add_typer(agent, name="agent")


@agent.command(
    "deploy",
    epilog=_example(
        "agent deploy gsm8k-v1",
        "agent deploy gsm8k-v1 --checkpoint step_10 --port 8001",
    ),
)
def _deploy_agent(
    context: typer.Context,
    name: Name,
    checkpoint: Annotated[
        str | None, typer.Option(help="By default the best.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="By default a free one."),
    ] = None,
) -> None:
    """Merge a checkpoint of an experiment and serve it."""
    terminal = context.obj
    with _training_libraries():
        arena = terminal.arena()
        _say("Merging, comparing with the adapter, starting the server.")
        found = arena.deploy_agent(name, checkpoint, port)
    pair = found["agreement"]
    text = (
        f"{name} serves {found['checkpoint']} at {found['url']}. Of "
        f"{pair['questions']} questions the adapter answered "
        f"{pair['adapter_correct']} rightly and the merged weights "
        f"{pair['merged_correct']}; {pair['same_text']} answers are the same "
        "word for word."
    )
    step = terminal.next(
        "agent", "generate", name, "--prompt", "What is 12 times 7?"
    )
    terminal.show(found, f"{_filled(text)}\n{step}")


@agent.command("run", epilog=_example("agent run gsm8k-v1"))
def _run_agent(context: typer.Context, name: Name) -> None:
    """Ask this agent where none is named."""
    terminal = context.obj
    terminal.arena().set_default_agent(name)
    step = terminal.next(
        "agent", "generate", "--prompt", "What is 12 times 7?"
    )
    terminal.show({"default": name}, f"{name} is the default agent.\n{step}")


@agent.command("list", epilog=_example("agent list"))
def _list_agents(context: typer.Context) -> None:
    """Show the deployed agents, and whether they are up."""
    terminal = context.obj
    arena = terminal.arena()
    with _training_libraries():
        deployed = arena.list_inference_deployments()
    default = _default_agent(arena)
    found = [one | {"default": one["name"] == default} for one in deployed]
    keys = ("name", "default", "checkpoint", "status", "url", "pid")
    terminal.show(found, _records(found, *keys))
    if not found:
        _say(f"None yet. {terminal.next('agent', 'deploy', '--help')}")


@agent.command("stop", epilog=_example("agent stop gsm8k-v1"))
def _stop_agent(context: typer.Context, name: Name) -> None:
    """Stop an agent's server; `generate` starts it again."""
    with _training_libraries():
        context.obj.arena().stop_deployment(name)
    context.obj.show({"stopped": name}, f"Stopped the server of {name}.")


@agent.command("delete", epilog=_example("agent delete gsm8k-v1"))
def _delete_agent(context: typer.Context, name: Name) -> None:
    """Stop an agent's server and delete its merged weights."""
    with _training_libraries():
        context.obj.arena().delete_deployment(name)
    context.obj.show({"deleted": name}, f"Deleted the agent {name}.")


@agent.command(
    "generate",
    epilog=_example("agent generate gsm8k-v1 --prompt 'What is 12 times 7?'"),
)
def _generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Option(help="The question.")],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="By default the default agent, or the only one.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that the answer may have; by default 512."
        ),
    ] = None,
) -> None:
    """Ask an agent; the answer comes as the model writes it."""
    terminal = context.obj
    with _training_libraries():
        arena = terminal.arena()
        chosen = name or _chosen_agent(terminal, arena)
        opened = arena.open_inference_agent(chosen, max_new_tokens)
    with opened as asked:
        pieces = asked.generate_stream(prompt)
        if terminal.as_json:
            list(pieces)
        else:
            _stream(pieces)
        [answer] = asked.last.results
    if terminal.as_json:
        value = dataclasses.asdict(answer)
        typer.echo(_json({"name": chosen, "prompt": prompt} | value))
    if answer.truncated:
        _say(
            f"The answer was cut after {answer.tokens} tokens. Allow it more "
            "with --max-new-tokens, as far as the manifest's "
            "max_context_length has room."
        )


def _stream(pieces: Iterable[str]) -> None:
    """Print the pieces as they come, and the end of the line at the end."""
    try:
        for piece in pieces:
            typer.echo(piece, nl=False)  # flushes
    finally:
        typer.echo()


def _default_agent(arena: LocalArena) -> str | None:
    """The agent that was made the default, or the only one."""
    every = arena.store.all("deployment")
    marked = [one["name"] for one in every if one.get("default")]
    names = marked or [one["name"] for one in every]
    return names[0] if len(names) == 1 else None


def _chosen_agent(terminal: Terminal, arena: LocalArena) -> str:
    """The agent to ask where none is named.

    Raises:
        LabError: there is none, or several and none is the default.
    """
    default = _default_agent(arena)
    if default:
        return default
    names = [one["name"] for one in arena.store.all("deployment")]
    if not names:
        raise LabError(
            "No agent is deployed, so there is nobody to ask. Deploy what an "
            "experiment has learned with "
            f"`{terminal.line('agent', 'deploy', 'NAME')}`."
        )
    raise LabError(
        f"Several agents are deployed ({', '.join(names)}) and none of them "
        "is the default, so it is not clear which one to ask. Name one of "
        "them, or make it the default with "
        f"`{terminal.line('agent', 'run', names[0])}`."
    )


# --- Manifests --------------------------------------------------------------

manifests = _group(
    "Check what an experiment is described by.", "manifest validate mine.yaml"
)
app.add_typer(manifests, name="manifest")


@manifests.command(
    "validate", epilog=_example("manifest validate gsm8k_grpo.yaml")
)
def _validate_manifest(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
) -> None:
    """Check a manifest by itself.

    Exit code 2 if it can't be run. What depends on the data, the model and
    the reward file is checked when an experiment is submitted.
    """
    from grpo_lab.arena import lint, manifest

    form = manifest.load(file)
    found = lint.lint(form)
    sizes = {
        "members at a time": form.training.pop_size,
        "steps of each member": form.steps,
        "generations": form.generations,
        "completions per step and member": form.completions_per_step,
    }
    usable = not any(one.level == "error" for one in found)
    value = {
        "usable": usable,
        "findings": [dataclasses.asdict(one) for one in found],
        "plan": sizes,
    }
    text = f"{_findings(found)}\n\n{_table(('plan', ''), sizes.items())}"
    context.obj.show(value, text)
    if not usable:
        raise typer.Exit(WRONG_INPUT)


@manifests.command("example", epilog=_example("manifest example > mine.yaml"))
def _example_manifest(context: typer.Context) -> None:
    """Print a manifest for a machine without a GPU."""
    from grpo_lab.arena import manifest

    value = manifest.load(manifest.EXAMPLE).to_dict()
    context.obj.show(value, manifest.EXAMPLE.rstrip())


def main() -> None:
    """Run what was typed, and exit."""
    app(prog_name=COMMAND)
