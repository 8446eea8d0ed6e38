"""Many runs: plan them, run them, survive a crash, compare them.

    output_dir/
      grid.json                 what all runs share: data, rewards, evaluation
      base/MODEL/evaluation.json    the base model, before any training
      runs/NAME/
        settings.json           everything that determined the run
        environment.json        versions, processor, times
        metrics.csv             a row for each optimiser step
        tensorboard/            the same, for TensorBoard
        completions/            what the policy wrote, with its rewards
        checkpoint-N/           to go on after a crash
        adapter/                the result, as safetensors
        evaluation.json         its answers to the held-out questions
        result.json             written last: done, or failed and why

A run's directory is named after its settings and a hash of everything that
determines it, so that a changed setting, data set or reward function is
another run and never reuses an old result. Running a grid again skips what
is done and goes on with what is not.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import filelock
import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab import environment, evaluation, models, training
from grpo_lab.data import Splits
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json, write_whole
from grpo_lab.profiles import RunSettings, run_names
from grpo_lab.speed.dequantised import writer
from rewards import RewardError, gold_number

LEADERBOARD = (
    "run", "model", "learning_rate",
    "before", "before_low", "before_high",
    "after", "after_low", "after_high",
    "gain", "gain_low", "gain_high", "p_value",
    "tagged_before", "tagged_after", "truncated_after", "tokens_after",
    "seconds", "peak_memory_gib",
)  # fmt: skip
"""Columns of `Grid.leaderboard`."""

SPARE_GIB = 0.5
"""Free disk space below which no run is started, beside its checkpoints."""

Progress = Callable[[RunSettings, int, int, dict], None]
"""Called after each step with the run, step, total steps, metrics row."""


def expand(base: RunSettings, **choices: Sequence) -> list[RunSettings]:
    """Every combination of some settings.

    Args:
        base: the values of all settings that are not varied.
        choices: a list of values for each varied field of `RunSettings`.

    Example:
        >>> base = RunSettings(model="pocket-qwen", learning_rate=1e-3)
        >>> runs = expand(base, learning_rate=[1e-3, 1e-4], beta=[0, 0.04])
        >>> [(run.learning_rate, run.beta) for run in runs]
        [(0.001, 0), (0.001, 0.04), (0.0001, 0), (0.0001, 0.04)]

    Raises:
        LabError: no such field, or a value that cannot train.
    """
    known = {field.name for field in fields(RunSettings)}
    for name in choices:
        if name not in known:
            raise LabError(
                f"A run has no setting {name!r}. Its settings are "
                f"{', '.join(sorted(known))}."
            )
    return [
        RunSettings(
            **{**base.to_dict(), **dict(zip(choices, values, strict=True))}
        )
        for values in itertools.product(*choices.values())
    ]


@dataclass(frozen=True)
class Run:
    """One run of a grid, as its directory tells it.

    Attributes:
        name: what a reader calls it, such as `pocket-qwen lr=0.001`.
        settings: everything that determines it.
        directory: where everything about it lies.
        status: "done", "failed" or "unfinished".
        reason: why it failed; else "".
    """

    name: str
    settings: RunSettings
    directory: Path
    status: str
    reason: str = ""

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row for each optimiser step; see `training.METRICS`."""
        path = self.directory / "metrics.csv"
        return pd.DataFrame(training.read_metrics(path))

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Its answers to the held-out questions; None if not done."""
        return Evaluation.load(self.directory / "evaluation.json")

    @cached_property
    def base(self) -> Evaluation | None:
        """The answers of its base model, before any training."""
        return Evaluation.load(_base_path(self.directory))

    @property
    def seconds(self) -> float:
        """Time of its optimiser steps, evaluation not counted."""
        return self.metrics["seconds"].sum()

    @property
    def peak_memory_gib(self) -> float:
        """Peak of GPU memory, or on a CPU of the process's memory."""
        return self.metrics["memory_gib"].max()

    @property
    def adapter(self) -> Path:
        """Folder of the trained adapter."""
        return self.directory / "adapter"


@dataclass(frozen=True)
class Grid:
    """All runs of a grid, in the order in which they were planned."""

    output_dir: Path
    runs: tuple[Run, ...]

    @property
    def done(self) -> list[Run]:
        """Finished runs, the best held-out accuracy first.

        Between equal accuracies the one with more well-tagged answers, then
        the shorter answers, come first.
        """
        finished = [run for run in self.runs if run.status == "done"]
        return sorted(
            finished,
            key=lambda run: (
                run.evaluation.correct,
                run.evaluation.tagged_share,
                -run.evaluation.mean_tokens,
            ),
            reverse=True,
        )

    @property
    def failed(self) -> list[Run]:
        """Runs that did not get to their end, mostly with an error."""
        return [run for run in self.runs if run.status != "done"]

    @property
    def best(self) -> Run:
        """The finished run with the highest held-out accuracy.

        Raises:
            LabError: no run finished; says why.
        """
        if not self.done:
            self.raise_failures()
        return self.done[0]

    def raise_failures(self) -> None:
        """Fail loudly, so that a headless notebook exits non-zero.

        Raises:
            LabError: at least one run failed; says which and why.
        """
        if self.failed:
            told = " ".join(f"{run.name}: {run.reason}" for run in self.failed)
            raise LabError(
                f"{len(self.failed)} of {len(self.runs)} runs failed. {told} "
                "Put it right and run this again with the same OUTPUT_DIR: "
                "finished runs are kept."
            )

    def leaderboard(self) -> pd.DataFrame:
        """One row for each finished run, the best first.

        Shares are 0 to 1; `*_low` and `*_high` bound 95 % intervals; `gain` is
        the paired difference to the run's own base model, `p_value` from
        the exact McNemar test; times in seconds, memory in GiB.
        """
        entries = [self._entry(run) for run in self.done]
        return pd.DataFrame(entries, columns=LEADERBOARD)

    def _entry(self, run: Run) -> dict:
        base, after = run.base, run.evaluation
        gain = evaluation.compare(base, after)
        return {
            "run": run.name,
            "model": run.settings.model,
            "learning_rate": run.settings.learning_rate,
            "before": base.accuracy,
            "before_low": base.interval[0],
            "before_high": base.interval[1],
            "after": after.accuracy,
            "after_low": after.interval[0],
            "after_high": after.interval[1],
            "gain": gain.difference,
            "gain_low": gain.interval[0],
            "gain_high": gain.interval[1],
            "p_value": gain.p_value,
            "tagged_before": base.tagged_share,
            "tagged_after": after.tagged_share,
            "truncated_after": after.truncated_share,
            "tokens_after": after.mean_tokens,
            "seconds": run.seconds,
            "peak_memory_gib": run.peak_memory_gib,
        }

    def verdict(self) -> str:
        """One honest sentence on whether the best run is really the best."""
        if not self.done:
            return "No run finished, so there is nothing to compare."
        if len(self.done) == 1:
            return "Only one run finished, so there is nothing to compare."
        best, second = self.done[:2]
        pair = evaluation.compare(second.evaluation, best.evaluation)
        names = f"{best.name} and {second.name}"
        if pair.p_value >= 1 - evaluation.CONFIDENCE:
            return (
                f"The best two, {names}, can't be told apart on these "
                f"questions: {pair}. Take either, or ask more questions."
            )
        return f"Of the best two, {names}, the first is better: {pair}."

    def summary(self) -> dict:
        """Everything that counts, in plain values, for `results.json`."""
        return {
            "runs": [
                {
                    "name": run.name,
                    "status": run.status,
                    "reason": run.reason,
                    "directory": run.directory.name,
                    "settings": run.settings.to_dict(),
                    "last_step": _last_step(run.metrics),
                }
                for run in self.runs
            ],
            "leaderboard": self.leaderboard().to_dict("records"),
            "verdict": self.verdict(),
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        """What a reader should know before trusting a number."""
        told = []
        for run in self.done:
            name, metrics = run.name, run.metrics
            cut = metrics["truncated_share"].mean()
            if cut > 0.2:
                told.append(
                    f"{name}: {cut:.0%} of its completions were cut at "
                    f"{run.settings.max_completion_length} tokens and "
                    "earned little; raise MAX_COMPLETION_LENGTH."
                )
            idle = metrics["zero_spread_share"].mean()
            if idle > 0.8:
                told.append(
                    f"{name}: in {idle:.0%} of its groups every completion "
                    "earned the same, so they taught nothing; raise "
                    "NUM_GENERATIONS or take easier or harder questions."
                )
            # None in every row if no reward says what it could not grade
            failed = metrics["failed_share"].astype(float).mean()
            if failed > 0.1:
                told.append(
                    f"{name}: {failed:.0%} of its completions could not be "
                    "graded and earned nothing; the folder completions of "
                    "the run says why, in the columns .../outcome."
                )
        return told


def check(
    settings: Sequence[RunSettings],
    splits: Splits,
    rewards: Sequence[Callable],
    output_dir: Path | str,
) -> None:
    """Refuse a grid that can't run, before anything is loaded or written.

    Args:
        settings, splits, rewards, output_dir: as for `run`.

    Raises:
        LabError: two runs are the same, the directory belongs to another
            grid, or the disk is full.
    """
    _plan(settings, splits, rewards, Path(output_dir))


def _last_step(metrics: pd.DataFrame) -> dict:
    """The last row of metrics as plain JSON: no NaN, no infinity."""
    if metrics.empty:
        return {}
    row = metrics.iloc[-1].astype(float)
    return row[np.isfinite(row)].to_dict()


def run(
    settings: Sequence[RunSettings],
    splits: Splits,
    rewards: Sequence[Callable],
    output_dir: Path | str,
    eval_batch_size: int = 50,
    progress: Progress | None = None,
) -> Grid:
    """Run a grid; skip what is done, go on with what was interrupted.

    A run that fails is recorded with its reason and the others go on. See
    `Grid.raise_failures`.

    Args:
        settings: the runs; equal ones are refused.
        splits: training and held-out questions; see `grpo_lab.data`.
        rewards: reward functions with TRL's signature.
        output_dir: the grid's directory; made if missing.
        eval_batch_size: held-out questions answered at once.
        progress: called after each optimiser step.

    Raises:
        LabError: before anything is trained, if the directory belongs to
            another grid or is in use, or the disk is full.
    """
    output_dir = Path(output_dir)
    records = _plan(settings, splits, rewards, output_dir)
    shared = next(iter(records.values()))["grid"]
    work = _Work(splits, rewards, eval_batch_size, progress)
    with _claim(output_dir, shared), work:
        for one, (directory, record) in zip(
            settings, records.items(), strict=True
        ):
            if _status(directory)["status"] == "done":
                _tell_done(one, directory, progress)
                continue
            write_json(directory / "settings.json", record)
            _run_one(one, directory, work)
            models.free_memory()
    return load(output_dir, list(records))


def load(
    output_dir: Path | str, directories: Sequence[Path] | None = None
) -> Grid:
    """Read a grid back from its directory, without running anything.

    Args:
        output_dir: the grid's directory.
        directories: the runs to read, in order; all of them by default.
    """
    output_dir = Path(output_dir)
    if directories is None:
        found = sorted((output_dir / "runs").glob("*/settings.json"))
        directories = [file.parent for file in found]
    settings = [_settings(folder) for folder in directories]
    runs = tuple(
        Run(name, one, folder, **_status(folder))
        for name, one, folder in zip(
            run_names(settings), settings, directories, strict=True
        )
    )
    return Grid(output_dir, runs)


def open_run(
    settings: RunSettings,
    splits: Splits,
    rewards: Sequence[Callable],
    directory: Path | str,
) -> Run:
    """Take a directory for one run outside of a grid.

    Notes in it what determines the run, and holds it for this process until
    the process ends. Whoever opens the same run there again goes on with it.

    Args:
        settings, splits, rewards: what will be trained, on what.
        directory: the run's own; made if missing.

    Raises:
        LabError: it holds another run or other files, is in use or can't be
            written to, or the disk is full.
    """
    directory = Path(directory)
    shared = _shared(splits, rewards)
    record = _record(settings, shared)
    _refuse_full_disk(directory)
    _refuse_other_run(directory, record)
    lock = _lock(directory, "run.lock", is_singleton=True)
    _HELD[directory.resolve()] = lock
    write_json(directory / "settings.json", record)
    _note_environment(directory, settings)
    return Run(settings.short_model, settings, directory, "unfinished")


_OPENED = {"run.lock", "settings.json", "environment.json"}
"""What `open_run` writes: a directory with nothing else is free to take."""

_HELD: dict[Path, filelock.BaseFileLock] = {}
"""Locks of `open_run`, which last as long as the process."""


STEP_BY_ROLLOUTS = 2.5
"""Time of a step by that of its rollouts; 2.6 in the pocket grid on a CPU."""


@dataclass(frozen=True)
class Pace:
    """How long a step's rollouts take, measured once on one policy.

    Attributes:
        seconds: of sampling one step's completions.
        layers: of the model that was measured.
    """

    seconds: float
    layers: int


def measure_pace(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RunSettings,
    splits: Splits,
) -> Pace:
    """Sample the completions of one optimiser step and take the time."""
    endless = itertools.cycle(splits.train["prompt"])
    groups = itertools.islice(endless, settings.prompts_per_step)
    prompts = [one for one in groups for _ in range(settings.num_generations)]
    limit = settings.max_completion_length
    started = time.monotonic()
    levers = models.levers_in_force(settings)
    evaluation.generate(
        writer(policy, levers),
        tokenizer,
        prompts,
        limit,
        temperature=settings.temperature,
        levers=levers,
    )
    seconds = time.monotonic() - started
    return Pace(seconds, policy.config.num_hidden_layers)


def estimates(
    settings: Sequence[RunSettings],
    train_rows: int,
    prompt_tokens: int,
    pace: Pace,
) -> pd.DataFrame:
    """What each run will take, before it starts.

    A step is taken to last `STEP_BY_ROLLOUTS` times as long as its rollouts,
    and to grow with the number of layers: a guess of the right size, no
    promise.

    Args:
        settings: the runs.
        train_rows: questions in the training set.
        prompt_tokens: length of the longest prompt.
        pace: from `measure_pace`.

    Returns:
        A row for each run: optimiser steps, completions per step and in all,
        the memory it needs and the memory there is, both in GiB, and the
        minutes of its training.
    """
    device = models.device_memory()

    def minutes(one: RunSettings) -> float:
        layers = models.entry(one.model).num_layers / pace.layers
        step = STEP_BY_ROLLOUTS * pace.seconds * layers
        return one.steps(train_rows) * step / 60

    return pd.DataFrame(
        [
            {
                "run": name,
                "steps": one.steps(train_rows),
                "prompts per step": one.prompts_per_step,
                "completions per step": one.completions_per_step,
                "completions": one.steps(train_rows)
                * one.completions_per_step,
                "needs GiB": models.memory_in_all(one, prompt_tokens),
                "there are GiB": device.memory,
                "minutes, about": minutes(one),
            }
            for name, one in zip(run_names(settings), settings, strict=True)
        ]
    )


def check_memory(settings: Sequence[RunSettings], prompt_tokens: int) -> None:
    """Refuse runs that would end out of memory; see `models.check_fits`.

    Raises:
        LabError: says by how much, and what to lower first.
    """
    for one in settings:
        models.check_fits(_memory(one, prompt_tokens), one)


def _memory(
    settings: RunSettings, prompt_tokens: int
) -> models.MemoryEstimate:
    shape = models.entry(settings.model)
    return models.estimate_memory(shape, settings, prompt_tokens)


def reward_fingerprint(rewards: Sequence[Callable]) -> str:
    """Hash of the rewards' source, and of the package that grades answers.

    A function from a package counts with every module of that package,
    since its helpers decide what it pays; one from a notebook with its own
    text, that of the notebook's functions that it calls, and the plain
    values that it reads. Options that were set count too.
    """
    digest = hashlib.sha256()
    for reward in [*rewards, evaluation.is_correct]:
        function, layers = _unwrapped(reward)
        digest.update(f"{function.__module__}.{function.__name__}".encode())
        digest.update(repr(layers).encode())
        # a reward file is no module that is imported: its text and deadline
        for name in ("source", "seconds"):
            digest.update(str(getattr(function, name, "")).encode())
        for text in _sources(function):
            digest.update(text.encode())
    return digest.hexdigest()


def _unwrapped(reward: Callable) -> tuple[Callable, list]:
    """A reward's function, and what was bound to it, the outermost first.

    That is what `rewards.with_options` and `rewards.reward_set` set.
    """
    layers = []
    while isinstance(reward, functools.partial):
        values = [value for value in reward.args if not callable(value)]
        layers.append((values, sorted(reward.keywords.items())))
        reward = getattr(reward, "__wrapped__", reward.func)
    return reward, layers


def _sources(function: Callable) -> list[str]:
    file = getattr(inspect.getmodule(function), "__file__", None)
    if file is not None and "." in function.__module__:
        modules = sorted(Path(file).parent.glob("*.py"))
        return [path.read_text(encoding="utf-8") for path in modules]
    texts, waiting, seen = [], [function], {function}
    while waiting:
        one = waiting.pop()
        # of its code: else a decorated function would give what is inside
        texts.append(inspect.getsource(one.__code__))
        for name, value in sorted(_used(one).items()):
            if isinstance(value, str | int | float | re.Pattern):
                texts.append(f"{name} = {value!r}")
            elif (
                inspect.isfunction(value)
                and value.__module__ == function.__module__
                and value not in seen
            ):
                waiting.append(value)
                seen.add(value)
    return texts


def _used(function: Callable) -> dict[str, object]:
    """The values outside a function that it, or a part of it, names."""
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [c for c in code.co_consts if inspect.iscode(c)]
    found = {n: v for n, v in function.__globals__.items() if n in names}
    return found | dict(inspect.getclosurevars(function).nonlocals)


def _plan(
    settings: Sequence[RunSettings],
    splits: Splits,
    rewards: Sequence[Callable],
    output_dir: Path,
) -> dict[Path, dict]:
    """Each run's directory, and the record of all that determines the run.

    Raises:
        LabError: see `check`.
    """
    _refuse_unreadable(splits)
    grid = _shared(splits, rewards)
    if not settings:
        raise LabError(
            "This grid has no runs. Name at least one model and one learning "
            "rate, such as MODELS = ['pocket-qwen'], LEARNING_RATES = [1e-3]."
        )
    records = {}
    for one in settings:
        record = _record(one, grid)
        name = f"{one.short_model}_lr{one.learning_rate:g}_{_hash(record)}"
        records[output_dir / "runs" / name] = record
    if len(records) < len(settings):
        raise LabError(
            "Two runs of this grid have the same settings, so one of them "
            "would learn nothing new. Name each model and learning rate "
            "once."
        )
    _refuse_strange(output_dir, grid, list(records))
    _refuse_full_disk(output_dir)
    return records


def _shared(splits: Splits, rewards: Sequence[Callable]) -> dict:
    """What all runs of a grid have in common: data, rewards, evaluation."""
    return {
        "data": splits.source,
        "data_fingerprint": splits.fingerprint,
        "train_rows": len(splits.train),
        "eval_rows": len(splits.eval),
        "rewards": [reward.__name__ for reward in rewards],
        "reward_fingerprint": reward_fingerprint(rewards),
        "reading": evaluation.READING,
    }


def _record(settings: RunSettings, shared: dict) -> dict:
    """Everything that determines one run."""
    weights = models.fingerprint(settings.model)
    return {"settings": settings.to_dict(), "weights": weights, "grid": shared}


def _refuse_unreadable(splits: Splits) -> None:
    """The rewards and the evaluation of a grid read golds as numbers."""
    unread = [
        gold
        for gold in [*splits.train["answer"], *splits.eval["answer"]]
        if gold_number(gold) is None
    ]
    if unread:
        raise LabError(
            f"{len(unread)} golds hold no number that an answer could be "
            f"compared with, the first {unread[0][-60:]!r}. A grid grades "
            "numbers, as GSM8K has them after '####'. Type DATA = 'gsm8k' "
            "or DATA = 'pocket'."
        )


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _settings(directory: Path) -> RunSettings:
    record = read_json(directory / "settings.json")
    # A run from before there were levers had none.
    return RunSettings(**{"levers": ()} | record["settings"])


def _base_path(directory: Path) -> Path:
    """Where the evaluation of a run's base model is kept.

    Runs with one base model, in one precision and with one limit on the
    length of answers, share it; data and reading are the grid's.
    """
    record = read_json(directory / "settings.json")
    settings = RunSettings(**record["settings"])
    code = _hash(
        [
            record["weights"],
            settings.load_in_4bit,
            settings.max_completion_length,
        ]
    )
    base = directory.parent.parent / "base"
    return base / f"{settings.short_model}_{code}" / "evaluation.json"


@contextlib.contextmanager
def _claim(output_dir: Path, shared: dict) -> Iterator[None]:
    """Hold a grid's directory for one process at a time."""
    lock = _lock(output_dir, "grid.lock")
    try:
        write_json(output_dir / "grid.json", shared)
        yield
    finally:
        lock.release()


def _lock(
    directory: Path, name: str, is_singleton: bool = False
) -> filelock.BaseFileLock:
    """Make a directory, and lock it for this process, or refuse it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(
            directory / name, timeout=0, is_singleton=is_singleton
        )
        lock.acquire()
    except filelock.Timeout:
        raise LabError(
            f"Another process is training in {directory} right now, and two "
            "would write over each other. Wait for it, stop it, or choose "
            "another OUTPUT_DIR."
        ) from None
    except OSError as error:
        raise LabError(
            f"Nothing can be written to {directory}: {error.strerror}. "
            "Choose another OUTPUT_DIR, one that you may write to."
        ) from error
    return lock


def _refuse_other_run(directory: Path, record: dict) -> None:
    _refuse_file(directory)
    found = read_json(directory / "settings.json")
    if found == record:
        return
    there = directory.iterdir() if directory.exists() else []
    # a kill may leave a file half written
    names = {re.sub(r"([.]\d+)?[.]part$", "", path.name) for path in there}
    begun = names - _OPENED
    ours = isinstance(found, dict) and found.keys() == record.keys()
    if not begun and (ours or found is None):
        return
    if not ours:
        raise LabError(
            f"{directory} holds files that are not of a run, and nothing is "
            "written among them. Choose another OUTPUT_DIR, an empty or a "
            "new one."
        )
    before, now = (
        {"weights": one["weights"], **one["settings"], **one["grid"]}
        for one in (found, record)
    )
    differs = sorted(key for key in now if before.get(key) != now[key])
    raise LabError(
        f"{directory} holds another run: it differs in {', '.join(differs)}. "
        "Its results are left alone. Choose another OUTPUT_DIR, or set those "
        "values back to go on with it."
    )


def _refuse_file(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise LabError(
            f"{directory} is a file, but results need a directory. Choose "
            "another OUTPUT_DIR."
        )


def _refuse_strange(
    output_dir: Path, shared: dict, directories: Sequence[Path]
) -> None:
    _refuse_file(output_dir)
    found = read_json(output_dir / "grid.json")
    if found is None:
        inside = output_dir.iterdir() if output_dir.exists() else []
        if any(not path.name.startswith("grid.") for path in inside):
            raise LabError(
                f"{output_dir} holds files that are not of a grid, and "
                "nothing is written among them. Choose another OUTPUT_DIR, "
                "an empty or a new one."
            )
        return
    differs = sorted(key for key in shared if found.get(key) != shared[key])
    if differs:
        raise LabError(
            f"{output_dir} belongs to another grid: it differs in "
            f"{', '.join(differs)}. Its results are left alone. Choose "
            "another OUTPUT_DIR, or set those values back to go on with it."
        )
    there = list((output_dir / "runs").glob("*"))
    if there and not set(there) & set(directories):
        names = ", ".join(path.name for path in there)
        raise LabError(
            f"{output_dir} belongs to another grid: none of its runs "
            f"({names}) has the settings of this one. Its results are left "
            "alone. Choose another OUTPUT_DIR, or set the parameters back "
            "to go on with it."
        )


def _refuse_full_disk(output_dir: Path) -> None:
    existing = next(
        path
        for path in (output_dir, *output_dir.absolute().parents)
        if path.exists()
    )
    free = shutil.disk_usage(existing).free / 2**30
    if free < SPARE_GIB:
        raise LabError(
            f"There are {free:.2f} GiB left on the disk of {output_dir}, "
            f"but checkpoints need at least {SPARE_GIB} GiB. Free some "
            "space or choose another OUTPUT_DIR."
        )


def _status(directory: Path) -> dict:
    found = read_json(directory / "result.json")
    return found or {"status": "unfinished"}


def _tell_done(
    settings: RunSettings, directory: Path, progress: Progress | None
) -> None:
    """Show the last step of a run that had finished before."""
    rows = training.read_metrics(directory / "metrics.csv")
    if progress and rows:
        progress(settings, rows[-1]["step"], rows[-1]["step"], rows[-1])


@dataclass
class _Work:
    """What the runs of one call share.

    Attributes:
        splits, rewards, eval_batch_size, progress: as for `run`.
        loaded: the base model and tokenizer that the last run has left, and
            what they are; None if there are none.
    """

    splits: Splits
    rewards: Sequence[Callable]
    eval_batch_size: int
    progress: Progress | None
    loaded: tuple | None = None

    def __enter__(self) -> "_Work":
        return self

    def __exit__(self, *error) -> None:
        """Free the memory of the last base model."""
        self.loaded = None
        models.free_memory()

    def take_base(
        self, settings: RunSettings
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A run's base model, loaded if the last one left another."""
        found, self.loaded = self.loaded, None
        wanted = settings.model, settings.load_in_4bit
        if found and found[0] == wanted and "one_base" in settings.levers:
            return found[1:]
        del found  # its memory, before the next one is loaded
        models.free_memory()
        return models.load_policy(*wanted)

    def leave_base(
        self,
        settings: RunSettings,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Leave the base model of a run that is done for the next one."""
        if "one_base" in settings.levers:
            wanted = settings.model, settings.load_in_4bit
            self.loaded = wanted, model, tokenizer


def _run_one(settings: RunSettings, directory: Path, work: _Work) -> None:
    """One run from start to result, or to the reason why it failed."""
    for old in ("result.json", "error.txt"):
        (directory / old).unlink(missing_ok=True)
    result = {"status": "done"}
    try:
        _note_environment(directory, settings)
        _train_and_evaluate(settings, directory, work)
    except Exception as error:
        result = {"status": "failed", "reason": reason(error)}
        with contextlib.suppress(LabError):  # a full disk takes no text
            write_whole(directory / "error.txt", traceback.format_exc())
    write_json(directory / "result.json", result)


def _train_and_evaluate(
    settings: RunSettings,
    directory: Path,
    work: _Work,
) -> None:
    _refuse_full_disk(directory)
    model, tokenizer = work.take_base(settings)
    levers = models.levers_in_force(settings)

    def evaluate(policy: torch.nn.Module, path: Path) -> None:
        evaluation.evaluate(
            policy, tokenizer, work.splits.eval,
            settings.max_completion_length, work.eval_batch_size,
            levers=levers,
        ).save(path)  # fmt: skip

    base_path = _base_path(directory)
    if not base_path.exists():
        evaluate(model, base_path)
    trainer = training.build_trainer(
        settings, work.splits.train, work.rewards, directory, model, tokenizer,
        work.progress and functools.partial(work.progress, settings),
    )  # fmt: skip
    training.train(trainer)
    trainer.model.save_pretrained(directory / "adapter")
    evaluate(trainer.model, directory / "evaluation.json")
    work.leave_base(settings, training.release(trainer), tokenizer)


def _note_environment(directory: Path, settings: RunSettings) -> None:
    """Add this start of a run to the list in `environment.json`."""
    levers = ()
    with contextlib.suppress(LabError):  # no such model: loading it will tell
        levers = models.levers_in_force(settings)
    starts = read_json(directory / "environment.json") or []
    starts.append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": environment.versions(),
            "device": models.device_memory().name,
            "threads": torch.get_num_threads(),
            "levers": list(levers),
        }
    )
    write_json(directory / "environment.json", starts)


def reason(error: Exception) -> str:
    """One paragraph for a learner; the traceback is in `error.txt`."""
    if isinstance(error, LabError | RewardError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "The GPU's memory was not enough. Lower MICRO_BATCH first, then "
            "MAX_COMPLETION_LENGTH, then take a smaller model."
        )
    text = str(error)
    # torch.save only says that the file ended where it should not.
    if "No space left" in text or "unexpected pos" in text:
        return (
            "The disk is full. Free some space and run this again with the "
            "same OUTPUT_DIR: it goes on from its last checkpoint."
        )
    first_line = text.splitlines()[0] if text else "no message"
    return (
        f"{type(error).__name__}: {first_line}. The full traceback is in "
        "error.txt in the run's directory."
    )
