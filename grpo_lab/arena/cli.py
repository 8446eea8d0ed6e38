"""The arena in a terminal: python -m grpo_lab.arena GROUP VERB ...

The groups, verbs and options of AgileRL's command `arena`, as a table over
the methods of `LocalArena`: an option has the name of a parameter, and its
help is what the method's docstring says of it. What was asked for goes to
stdout, as text or, with --json, as one JSON value; what is said beside it
goes to stderr.

Exit codes: 0 all is well; 1 it failed (an experiment that was watched, or no
data set of that name); 2 the input is wrong; 3 the experiment that was watched
was stopped or killed; 130 Ctrl-C.
"""

import argparse
import contextlib
import functools
import inspect
import json
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.arena.client import HOME, HOME_VARIABLE, LocalArena
from grpo_lab.cli import aligned, emit
from grpo_lab.errors import LabError
from rewards import RewardError
from rewards.contract.verdicts import printable

COMMAND = "python -m grpo_lab.arena"

FAILED, WRONG_INPUT, STOPPED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes beside 0."""

ENDS = {"done": 0, "failed": FAILED}
"""Exit codes of an experiment that was watched; others are `STOPPED`."""

ASK = "--prompt 'What is 12 times 7?'"


class Call:
    """A line that was typed.

    Attributes:
        home: what --home said.
        as_json: whether stdout gets one JSON value in place of text.
        given: the parameters that were typed, with their values.
        name: what the verb is about; "" where it has no NAME.
    """

    def __init__(self, home: Path | None, as_json: bool, given: dict) -> None:
        self.home = home
        self.as_json = as_json
        self.given = given
        keys = ("name", "experiment_name", "deployment_name")
        self.name = next((given[k] for k in keys if k in given), "")

    @functools.cached_property
    def arena(self) -> LocalArena:
        """The arena; made only now, so that --help touches no directory."""
        return LocalArena(self.home)

    def line(self, words: str) -> str:
        """What to type for a verb of this arena; {} stands for the name."""
        place = ""
        if self.home and str(self.home) != os.environ.get(HOME_VARIABLE):
            place = f" --home {shlex.quote(str(self.home))}"
        return f"{COMMAND}{place} {words.format(shlex.quote(self.name))}"

    def show(self, value: object, text: str, following: str = "") -> None:
        """Print what a verb has found, and what to type next."""
        if self.as_json:
            # NaN, which a reward may be, is no JSON: null stands for it.
            text = json.dumps(value)
            value = json.loads(text, parse_constant=lambda _: None)
            text = json.dumps(value, indent=1, ensure_ascii=False)
        elif following:
            text = f"{text}\nNext: {self.line(following)}".lstrip("\n")
        emit(text)


def say(text: str) -> None:
    """Print something that is not what was asked for."""
    print(printable(text), file=sys.stderr)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    return printable(str(value)).replace("\n", " ")


def table(rows: Sequence[Sequence[object]]) -> str:
    """A table as plain text, a line for each row."""
    return aligned([[_cell(one) for one in row] for row in rows])


# --- Verbs that are more than one method ------------------------------------


def submitted(call: Call, found) -> int:
    """Show what a submission has found and decided; follow it if asked to."""
    text = "\n\n".join(
        [
            _findings(found.findings),
            str(found.verdicts),
            f"The system prompt of every policy:\n{found.system_prompt}",
            table(list(found.plan.items())),
            f"Submitted {found.name}; the training goes on when this terminal "
            "is closed.",
        ]
    )
    value = asdict(found) | {"verdicts": found.verdicts.table()}
    call.name = found.name
    if call.given.get("watch"):
        if not call.as_json:
            emit(text)
        return watch(call, value)
    call.show(value, text, "experiments watch {}")
    return 0


def _findings(findings: Sequence) -> str:
    lines = [f"{one.level}: {printable(one.text)}" for one in findings]
    return "\n".join(lines) or "The manifest shows no faults."


def watch(call: Call, before: dict | None = None) -> int:
    """Follow an experiment until it ends.

    Ctrl-C leaves it alone. Exit code 0 if it is done, 1 if it failed, 3 if it
    was stopped or killed.
    """
    end: dict = {}
    try:
        for end in call.arena.watch_experiment(call.name):
            if not call.as_json:
                emit(_progress(end))
    except KeyboardInterrupt:
        again = call.line("experiments watch {}")
        say(f"\nThe training goes on. Watch it again with `{again}`.")
        return INTERRUPTED
    text = printable(end["reason"])
    if end["status"] == "failed":
        folder = call.arena.home / "experiments" / call.name
        text += f"\nThe whole error is in {folder / 'error.txt'}."
    verb = "checkpoints" if end["status"] == "done" else "resume"
    value = end if before is None else before | {"end": end}
    call.show(value, text, f"experiments {verb} {{}}")
    return ENDS.get(end["status"], STOPPED)


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


def generate(call: Call) -> None:
    """Ask an agent; the answer comes as the model writes it."""
    name = call.name or call.arena.default_agent()
    if name is None:
        raise LabError(
            "There is not exactly one agent, and none is the default. Look "
            f"at `{call.line('agent list')}`, then name one, or make it the "
            f"default with `{call.line('agent run NAME')}`."
        )
    prompt, limit = call.given["prompt"], call.given.get("max_new_tokens")
    with contextlib.redirect_stdout(sys.stderr):
        opened = call.arena.open_inference_agent(name, limit)
    with opened as agent:
        try:
            for piece in agent.generate_stream(prompt):
                if not call.as_json:
                    print(piece, end="", flush=True)
        finally:
            if not call.as_json:
                print()
        [answer] = agent.last.results
    if call.as_json:
        call.show({"name": name, "prompt": prompt} | asdict(answer), "")
    if answer.truncated:
        say(
            f"The answer was cut after {answer.tokens} tokens. Allow it more "
            "with --max-new-tokens, as far as the manifest's "
            "max_context_length has room."
        )


def validate_manifest(call: Call) -> None:
    """Check a manifest by itself; one that can't be run is refused.

    What depends on the data, the model and the reward file is checked when an
    experiment is submitted.
    """
    from grpo_lab.arena import lint, manifest

    form = manifest.load(call.given["file"])
    found = lint.lint(form)
    plan = {
        "members at a time": form.training.pop_size,
        "steps of each member": form.steps,
        "generations": form.generations,
        "completions per step and member": form.completions_per_step,
    }
    findings = [asdict(one) for one in found]
    value = {"findings": findings, "plan": plan}
    call.show(value, f"{_findings(found)}\n\n{table(list(plan.items()))}")


def example_manifest(call: Call) -> None:
    """Print a manifest for a machine without a GPU."""
    from grpo_lab.arena import manifest

    value = manifest.load(manifest.EXAMPLE).to_dict()
    call.show(value, manifest.EXAMPLE.rstrip())


# --- The table --------------------------------------------------------------


@dataclass(frozen=True)
class Verb:
    """A verb; its --help is the docstring of what it calls.

    Attributes:
        calls: a method of `LocalArena` by its name, or a function of a `Call`
            that returns the exit code, None for 0.
        shown: keys of what the method returns, in one text; `lr=learning_rate`
            shows one under another name. For a method that returns nothing,
            the word for what was done to the name.
        following: what to type next, {} for the name; where a list is
            shown, only if it is empty.
        examples: lines to type; by default its words with a name.
        options: for argparse, beside those of the method's parameters.
        show: shows in another way what the method returns; gives the exit
            code.
    """

    calls: str | Callable
    shown: str = ""
    following: str = ""
    examples: Sequence[str] = ()
    options: dict[str, dict] = field(default_factory=dict)
    show: Callable | None = None


GROUPS = {
    "datasets": "Register the data to train on.",
    "projects": "File experiments under projects.",
    "resources": "What this machine offers.",
    "experiments": "Train a population, and see what comes of it.",
    "agent": "Serve what was learned on this machine, and ask it.",
    "manifest": "Check what an experiment is described by.",
}
NEW_DATASET = """datasets create gsm8k --category reasoning \\
      --hf-dataset openai/gsm8k --hf-config main --hf-split train \\
      --column-mapping '{"question": "question", "answer": "answer"}'"""
SUBMIT = "experiments submit gsm8k_grpo.yaml --reward-file reward.py \\\n     "
STATUS = "status step steps member reward reason"
NAME = {"metavar": "NAME"}
MAY_BE_NAMED = {
    "metavar": "NAME",
    "nargs": "?",
    "help": "by default the default agent, or the only one",
}

# fmt: off
VERBS = {
    "datasets create": Verb(
        "create_dataset",
        "name rows source nulls unreadable repeated conflicting",
        "experiments submit --help", [NEW_DATASET],
    ),
    "datasets list": Verb(
        "list_datasets",
        "name category rows source description id downloads likes",
        "datasets create --help",
        ["datasets list", "datasets list --search gsm8k"],
    ),
    "datasets exists": Verb("dataset_exists"),
    "datasets delete": Verb("delete_dataset", "deleted"),
    "projects create": Verb(
        "create_project", "name description llm_based",
        "experiments submit --help",
        ["projects create 'GSM8K Tutorial' --llm-based"],
    ),
    "projects list": Verb(
        "list_projects", "name default llm_based description",
        "projects create --help",
    ),
    "projects set-default": Verb("set_default_project", "default"),
    "resources list": Verb(
        "list_resources", "id device nodes memory_gib free_disk_gib",
    ),
    "experiments submit": Verb(
        "submit_experiment", show=submitted,
        examples=[
            SUBMIT + "--project 'GSM8K Tutorial' --experiment-name gsm8k-v1",
            SUBMIT + "--engine ray --address auto --cpus 4 --gpus 1",
        ],
        options={
            "--watch": {"action": "store_true", "help": "until it ends"},
        },
    ),
    "experiments list": Verb(
        "list_experiments",
        "name status step steps dataset project control reason",
        "experiments submit --help",
    ),
    "experiments watch": Verb(watch, options={"name": NAME}),
    "experiments stop": Verb(
        "stop_experiment", STATUS, "experiments resume {}",
    ),
    "experiments resume": Verb(
        "resume_experiment", STATUS, "experiments watch {}",
        [
            "experiments resume gsm8k-v1",
            "experiments resume gsm8k-v1 --max-steps 6144 --engine process",
        ],
    ),
    "experiments metrics": Verb(
        "download_experiment_metrics",
        examples=["experiments metrics gsm8k-v1 --output-file metrics.csv"],
    ),
    "experiments checkpoints": Verb(
        "list_checkpoints",
        "name member completions accuracy low high reward=mean_reward size_mb",
        "experiments watch {}",
    ),
    "experiments lineage": Verb(
        "experiment_lineage",
        "step member parent change lr=learning_rate beta accuracy low high "
        "reward=mean_reward",
        "experiments watch {}",
    ),
    "experiments delete": Verb("delete_experiment", "deleted"),
    "agent deploy": Verb(
        "deploy_agent", "name checkpoint url agreement",
        f"agent generate {{}} {ASK}",
        ["agent deploy gsm8k-v1", "agent deploy gsm8k-v1 --port 8001"],
    ),
    "agent run": Verb(
        "set_default_agent", "default", f"agent generate {ASK}",
    ),
    "agent list": Verb(
        "list_inference_deployments",
        "name default checkpoint status url pid",
        "agent deploy --help",
    ),
    "agent stop": Verb("stop_deployment", "stopped"),
    "agent delete": Verb("delete_deployment", "deleted"),
    "agent generate": Verb(
        generate, examples=[f"agent generate gsm8k-v1 {ASK}"],
        options={
            "name": MAY_BE_NAMED,
            "--prompt": {"required": True, "help": "the question"},
            "--max-new-tokens": {"type": int, "help": "512 by default"},
        },
    ),
    "manifest validate": Verb(
        validate_manifest, examples=["manifest validate gsm8k_grpo.yaml"],
        options={"file": {"metavar": "FILE", "type": Path}},
    ),
    "manifest example": Verb(
        example_manifest, examples=["manifest example > mine.yaml"],
    ),
}
# fmt: on
"""What can be typed, by its words."""


# --- The command line -------------------------------------------------------

FLAGS = {"hf_dataset_name": "--hf-dataset", "output_path": "--output-file"}
"""Options that are not called as their parameter."""

SKIPPED = ("self", "resume", "exist_ok")
"""Parameters for programs that are run again."""

CLUSTER = {
    "address": (str, "of the Ray cluster, such as auto; or this machine"),
    "cpus": (float, "cores of each worker of it; by default 1"),
    "gpus": (float, "GPUs of each worker of it; by default 0"),
}
"""What `**cluster` may be."""


def method_options(method: Callable) -> Iterator[tuple[str, dict]]:
    """For argparse, an option for each parameter of a method.

    The first parameter without a default has no flag, others without one are
    required. An option that is not typed is not given to the method.
    """
    said = _arguments(_spoken(method))
    first = True
    for name, one in inspect.signature(method).parameters.items():
        if name in SKIPPED:
            continue
        if one.kind is one.VAR_KEYWORD:
            for word, (kind, text) in CLUSTER.items():
                yield f"--{word}", {"type": kind, "help": text}
            continue
        kinds = {one.annotation, *typing.get_args(one.annotation)}
        kind = next((k for k in (Path, int, float) if k in kinds), str)
        settings: dict[str, Any] = {"type": kind, "help": said.get(name)}
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        if one.default is not one.empty:
            if one.default is True:
                # It takes no type, since Python 3.14.
                settings = {
                    "action": argparse.BooleanOptionalAction,
                    "help": said.get(name),
                }
            elif one.default is False:
                settings = {"action": "store_true", "help": said.get(name)}
            yield flag, {"dest": name, **settings}
        elif first:
            short = "NAME" if name.endswith("name") else name.upper()
            yield name, {**settings, "metavar": short}
        else:
            yield flag, {"dest": name, "required": True, **settings}
        first = False


def _spoken(method: Callable) -> str:
    """A docstring that names verbs by what is typed for them."""
    text = inspect.getdoc(method) or ""
    for words, verb in VERBS.items():
        text = text.replace(f"`{verb.calls}`", f"`{words}`")
    return text


def _arguments(text: str) -> dict[str, str]:
    """What a docstring says of each argument."""
    _, _, rest = text.partition("Args:\n")
    rest = rest.partition("\n\n")[0]
    found = re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)", rest, re.M)
    return {
        name: " ".join(what.split()).replace("%", "%%")
        for names, what in found
        for name in names.split(", ")
    }


def parser() -> argparse.ArgumentParser:
    """The parser of every group and verb."""
    top = argparse.ArgumentParser(
        prog=COMMAND,
        **_help(
            "Register, submit, evolve, watch, deploy, ask: AgileRL's Arena, "
            "on this machine.",
            ["projects create mine", "--json experiments list"],
        ),
    )
    top.add_argument(
        "--home",
        type=Path,
        help=f"directory of the arena (default: ${HOME_VARIABLE} or {HOME})",
    )
    top.add_argument(
        "--json", action="store_true", help="print one JSON value"
    )
    top.set_defaults(parser=top)
    groups, verbs = top.add_subparsers(title="groups", metavar=""), {}
    for group, text in GROUPS.items():
        one = groups.add_parser(
            group, help=text, **_help(text, [f"{group} --help"])
        )
        one.set_defaults(parser=one)
        verbs[group] = one.add_subparsers(title="verbs", metavar="")
    for words, verb in VERBS.items():
        group, name = words.split()
        calls, options = verb.calls, verb.options
        if isinstance(calls, str):
            calls = getattr(LocalArena, calls)
            options = {**dict(method_options(calls)), **options}
        named = any(one.get("metavar") == "NAME" for one in options.values())
        lines = verb.examples or [f"{words} gsm8k-v1" if named else words]
        text = re.split(r"\n\n(?:Args|Returns):", _spoken(calls))[0]
        one = verbs[group].add_parser(
            name, help=text.partition("\n")[0], **_help(text, lines)
        )
        for flag, settings in options.items():
            one.add_argument(
                flag, **{"default": argparse.SUPPRESS, **settings}
            )
        one.set_defaults(words=words)
    return top


def _help(text: str, examples: Sequence[str]) -> dict:
    lines = "\n".join(f"  {COMMAND} {one}" for one in examples)
    return {
        "description": text,
        "epilog": f"Example:\n{lines}",
        # It wraps neither the text nor the examples.
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was typed; see the exit codes at the top."""
    given = vars(parser().parse_args(argv))
    asked, words = given.pop("parser"), given.pop("words", None)
    if words is None:
        asked.print_help(sys.stderr)
        return WRONG_INPUT
    call = Call(given.pop("home"), given.pop("json"), given)
    try:
        return _run(VERBS[words], call) or 0
    except (LabError, RewardError) as error:
        # It may quote a log, with whatever codes that holds.
        say(_with_verbs(str(error), call))
        return WRONG_INPUT
    except KeyboardInterrupt:
        say("Interrupted.")
        return INTERRUPTED


def _run(verb: Verb, call: Call) -> int | None:
    if not isinstance(verb.calls, str):
        return verb.calls(call)
    method = getattr(call.arena, verb.calls)
    values = {k: v for k, v in call.given.items() if k != "watch"}
    # Whatever libraries print goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        found = method(**values)
    return (verb.show or functools.partial(_show, verb))(call, found)


def _show(verb: Verb, call: Call, found: object) -> int:
    """Print what a method has returned, as its verb's row says."""
    if found is None:
        text = f"{verb.shown}: {call.name}"
        call.show({verb.shown: call.name}, text, verb.following)
        return 0
    if hasattr(found, "to_json"):  # a frame
        text = found.to_json(orient="records", double_precision=15)
        found = json.loads(text)
    if not isinstance(found, list | dict):
        found = found if isinstance(found, bool) else str(found)
        call.show(found, _cell(found))
        return FAILED if found is False else 0
    pairs = [
        (head, key)
        for head, _, key in (w.rpartition("=") for w in verb.shown.split())
    ]
    if isinstance(found, dict):
        rows = [(head or k, found[k]) for head, k in pairs if k in found]
        call.show(found, table(rows), verb.following)
        return 0
    # Of the columns those that there are, as of the Hub's data sets.
    pairs = [(h or k, k) for h, k in pairs if not found or k in found[0]]
    cells = [[one[key] for _, key in pairs] for one in found]
    call.show(found, table([[head for head, _ in pairs], *cells]))
    if not found:
        say(f"None yet. Next: {call.line(verb.following)}")
    return 0


def _with_verbs(message: str, call: Call) -> str:
    """An error, and what to type for the calls that it names."""
    named = re.findall(r"\w+", message)
    lines = [
        f"In a terminal {verb.calls} is `{call.line(words)}`."
        for words, verb in VERBS.items()
        if verb.calls in named
    ]
    return " ".join([message, *lines])
