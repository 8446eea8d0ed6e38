"""Stop, resume and clone runs of a grid, while it trains or afterwards.

What is asked for is written into the grid's directory, from any process that
sees it; whoever runs the grid looks there after each step and before
each run. If none runs, it is done when the grid is run the next time.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from grpo_lab import models, training
from grpo_lab.errors import LabError, nearest
from grpo_lab.files import read_json, write_json
from grpo_lab.grid.fingerprint import file_fingerprint
from grpo_lab.grid.plan import run_name
from grpo_lab.grid.results import Grid, Run, load
from grpo_lab.grid.state import PARENT, RunState
from grpo_lab.grid.storage import Mirror
from grpo_lab.grid.train_run import REWARD_FILES
from grpo_lab.parameters import EXAMPLES, convert
from grpo_lab.settings import NAMES, RunSettings, kind_of
from rewards.contract import load_reward

WARM = (
    "learning_rate", "lr_scheduler", "warmup_share", "max_steps", "beta",
    "temperature", "top_p", "top_k", "max_completion_length",
    "max_grad_norm", "max_failed_share", "seed",
)  # fmt: skip
"""What a warm clone may change.

Anything else is part of the adapter or of the optimiser's state, which it
takes from its parent.
"""


def table(output_dir: Path | str) -> pd.DataFrame:
    """The runs of a grid, as they stand now.

    Returns:
        A row for each: its number, its name, its state ("waiting",
        "training", "done", "stopped" or "failed"), the steps made and those
        of the whole run, the reward of the last step, the held-out accuracy
        if it was measured, the parent of a clone, and why it was stopped or
        has failed.
    """
    grid = _open(output_dir)
    return pd.DataFrame(
        [
            {
                "number": number,
                "run": run.name,
                "state": _state(run),
                "steps": run.steps,
                "of": RunState(run.directory).steps,
                "reward": _last(run, "reward"),
                "accuracy": run.evaluation and run.evaluation.accuracy,
                "parent": run.clone["parent"] if run.clone else "",
                "why": run.reason,
            }
            for number, run in enumerate(grid.runs, start=1)
        ]
    )


def find(output_dir: Path | str, text: str) -> Run:
    """The run that somebody means.

    Args:
        output_dir: the grid's directory.
        text: its number in `table`, its name, or any part of the name or of
            its directory's that no other run has.

    Raises:
        LabError: no run or several are meant.
    """
    runs = _open(output_dir).runs
    names = [(run.name, run.directory.name) for run in runs]
    if text.isdecimal():
        found = [r for n, r in enumerate(runs, start=1) if n == int(text)]
    else:
        found = [
            run for run, one in zip(runs, names, strict=True) if text in one
        ] or [
            run
            for run, (name, folder) in zip(runs, names, strict=True)
            if text in name or text in folder
        ]
    if len(found) != 1:
        which = ", ".join(run.name for run in found) or "none"
        raise LabError(
            f"{text!r} should mean one run, but it means {which}. Give its "
            "number or a part of its name that no other run has; type "
            "`python -m grpo_lab.grid runs list` to see them."
        )
    return found[0]


def stop(run: Run) -> None:
    """Ask for the end of a run; it saves the step that it is making.

    Raises:
        LabError: it has ended already.
    """
    if run.status != "unfinished":
        raise LabError(
            f"{run.name} is {run.status} already, so there is nothing to stop."
        )
    (run.directory / "stop").touch()


def resume(run: Run) -> None:
    """Let a run go on that was stopped or has failed, or withdraw a stop.

    Halving leaves it alone from then on.

    Raises:
        LabError: it is done.
    """
    if run.status == "done":
        raise LabError(
            f"{run.name} is done. To train it further clone it with more "
            "steps: --warm --set max_steps=..."
        )
    (run.directory / "exempt").touch()
    (run.directory / "stop").unlink(missing_ok=True)
    (run.directory / "result.json").unlink(missing_ok=True)


def clone(
    run: Run,
    changes: dict[str, object],
    warm: bool = False,
    rewards: Sequence[str] = (),
    storage: str = "",
) -> Path:
    """Add a run to a grid that differs from one of its runs.

    Args:
        run: the parent; it goes on as before.
        changes: new values by field name of `RunSettings`.
        warm: start from the parent's last checkpoint: its adapter, the state
            of its optimiser and its step, with rate, course and everything
            else as changed. Else from the base model.
        rewards: what it is paid by, in place of the grid's rewards: some of
            these by name, or paths of reward files, see
            `rewards.contract.load_reward`.
        storage: where the checkpoints are, if the grid's workers keep them in
            an object store; as for `grid.run`.

    Returns:
        The clone's directory.

    Raises:
        LabError: nothing or something impossible would change, the parent
            has no checkpoint yet, or there is such a clone.
        RewardError: a reward file can't be used.
    """
    settings = RunSettings(**run.settings.to_dict() | changes)
    if settings == run.settings and not rewards and not warm:
        raise LabError(
            "A clone that starts afresh and changes nothing would do what "
            f"{run.name} does. Add --set learning_rate=..., or --warm."
        )
    if warm:
        _refuse_cold(changes)
    rewards = rewards or _inherited(run)
    files = [Path(one) for one in rewards if one.endswith(".py")]
    names = [_reward_name(one) for one in rewards]
    _refuse_unknown_rewards(run, names, files)
    with tempfile.TemporaryDirectory() as fetched:
        source = run.directory
        if storage and warm:
            source = Path(fetched)
            mirror = Mirror(storage, run.directory.parent.parent)
            mirror.fetch_checkpoints(run.directory, source)
        checkpoint = _last_checkpoint(run, source) if warm else None
        return _cloned(run, settings, names, files, checkpoint)


def _inherited(run: Run) -> list[str]:
    """The rewards of a clone's parent that is a clone itself."""
    folder = run.directory / REWARD_FILES
    own = {_reward_name(str(file)): str(file) for file in folder.glob("*.py")}
    names = (run.clone or {}).get("rewards", [])
    return [own.get(name, name) for name in names]


def _cloned(
    run: Run,
    settings: RunSettings,
    names: list[str],
    files: list[Path],
    checkpoint: Path | None,
) -> Path:
    step = training.step_of(checkpoint) if checkpoint else 0
    record = read_json(run.directory / "settings.json")
    _refuse_finished(settings, record, step, run)
    record |= {
        "settings": settings.to_dict(),
        "weights": models.fingerprint(settings.model),
        "clone": {
            "parent": run.directory.name,
            "step": step,
            "rewards": names,
            "reward_files": [file_fingerprint(file) for file in files],
        },
    }
    folder = run.directory.parent / run_name(settings, record)
    if (folder / "settings.json").exists():
        raise LabError(
            f"There is a clone of {run.name} with these settings already: "
            f"{folder.name}. Change something else, or look at that one."
        )
    _make(folder, record, checkpoint, files)
    return folder


def _open(output_dir: Path | str) -> Grid:
    if not (Path(output_dir) / "grid.json").is_file():
        raise LabError(
            f"There is no grid in {output_dir}. Give the directory that "
            "holds grid.json, such as --grid runs/03_grid_search-001/run/grid."
        )
    return load(output_dir)


def _state(run: Run) -> str:
    if run.status != "unfinished":
        return run.status
    return "training" if RunState(run.directory).is_held else "waiting"


def _last(run: Run, column: str) -> float | None:
    return None if run.metrics.empty else run.metrics[column].iloc[-1]


def read_changes(texts: Sequence[str]) -> dict[str, object]:
    """What `--set name=value` means, as `-p NAME value` of a lesson does.

    Raises:
        LabError: a text has another form, or its value another type.
    """
    found = {}
    for text in texts:
        name, sign, value = (part.strip() for part in text.partition("="))
        if not sign:
            raise LabError(
                f"--set {text} has no value. Type for example "
                "--set learning_rate=5e-4."
            )
        if name not in NAMES:
            near = nearest(name, NAMES)
            hint = f" Did you mean {near}?" if near else ""
            raise LabError(
                f"A run has no setting {name!r}.{hint} It has "
                f"{', '.join(NAMES)}."
            )
        kind = kind_of(name)
        try:
            found[name] = convert(kind, value)
        except ValueError:
            spoken, _, words = EXAMPLES[kind]
            raise LabError(
                f"--set {text} does not say what {name} is to be: it must be "
                f"{spoken}. Type for example --set {name}={words}."
            ) from None
    return found


def _refuse_cold(changes: dict) -> None:
    cold = sorted(set(changes) - set(WARM))
    if cold:
        raise LabError(
            f"A warm clone can't change {', '.join(cold)}, which is part of "
            "what it takes from its parent. Leave --warm out, so that it "
            f"starts afresh, or change only {', '.join(WARM)}."
        )


def _reward_name(text: str) -> str:
    return load_reward(text).__name__ if text.endswith(".py") else text


def _refuse_unknown_rewards(
    run: Run, names: Sequence[str], files: Sequence[Path]
) -> None:
    known = read_json(run.directory / "settings.json")["grid"]["rewards"]
    own = {_reward_name(str(file)) for file in files}
    unknown = [name for name in names if name not in {*known, *own}]
    if unknown or len(set(names)) < len(names):
        which = unknown[0] if unknown else "one of them twice"
        raise LabError(
            f"The rewards of a clone can't be {which!r}. Those of this grid "
            f"are {', '.join(known)}; name some of them once each, or give "
            "the path of a reward file that ends in .py."
        )


def _last_checkpoint(run: Run, directory: Path) -> Path:
    checkpoint = training.last_checkpoint(directory)
    if checkpoint is None:
        raise LabError(
            f"{run.name} has no checkpoint here, so no clone can start from "
            "one. Wait for its first step; or leave --warm out; or, if the "
            "grid keeps its runs in an object store, name it with --storage."
        )
    return checkpoint


def _refuse_finished(
    settings: RunSettings, record: dict, step: int, run: Run
) -> None:
    steps = settings.steps(record["grid"]["train_rows"])
    if step >= steps:
        raise LabError(
            f"The last checkpoint of {run.name} is of step {step}, and the "
            f"clone would have {steps} steps, so nothing would be left to "
            f"train. Add --set max_steps={2 * step}."
        )


def _make(
    folder: Path,
    record: dict,
    checkpoint: Path | None,
    files: Sequence[Path],
) -> None:
    """Write a clone's directory; its record comes last and makes it one."""
    shutil.rmtree(folder, ignore_errors=True)  # what a kill may have left
    for file in files:
        (folder / REWARD_FILES).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, folder / REWARD_FILES / file.name)
    if checkpoint is not None:
        _copy(checkpoint, folder / PARENT / checkpoint.name)
    write_json(folder / "settings.json", record)


def _copy(checkpoint: Path, target: Path) -> None:
    with contextlib.suppress(OSError, shutil.Error):
        shutil.copytree(checkpoint, target)
    if training.last_checkpoint(target.parent) is None:
        shutil.rmtree(target.parent.parent, ignore_errors=True)
        raise LabError(
            f"{checkpoint} could not be copied, as a rule because its run "
            "went on and deleted it. Clone again."
        )
