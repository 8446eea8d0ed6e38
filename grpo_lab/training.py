"""One run: from settings to a checked `trl.GRPOTrainer`, and its training.

`build_trainer` is the only place in the package where a trainer is made, and
`train` does the steps: each writes completions, rewards them, takes one step
of the optimiser, is recorded and leaves a checkpoint to go on from. What
watches over it is in `guards`.
"""

import csv
import io
import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import psutil
import torch
from datasets import Dataset
from peft import LoraConfig, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import guards
from grpo_lab.errors import LabError
from grpo_lab.files import (
    read_json,
    read_metrics,
    write_json,
    write_whole,
)
from grpo_lab.memory import Resolved
from grpo_lab.models import compute_dtype, precision_flags
from grpo_lab.prompts import TEMPLATE_VALUES
from grpo_lab.settings import SCHEDULERS, RunSettings
from grpo_lab.speed import trainer as speed
from rewards.health import FAILURES, FailureLimit, Outcome

METRICS = {
    "reward": "reward",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "frac_reward_zero_std",
    "clipped_ratio": "completions/clipped_ratio",
    "mean_length": "completions/mean_length",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "kl": "kl",
}
"""Columns of `metrics.csv`, and TRL's names for them.

Beside them stand `step`, one column per reward function, `failed_share`,
`seconds` of the step and `memory_gib`. Rewards and lengths (tokens) are means
over the step's completions. `frac_reward_zero_std` is the share of groups in
which every completion earned the same, so that all advantages are 0 and
nothing is learned; `clipped_ratio` is the share of completions cut at the
limit; `failed_share` is that of completions that a reward could not grade, as
`rewards.health` counts it, empty if no reward says so. `entropy` is a mean
over all tokens of the completions; with the optimization `zero_advantage` and
without `decode_loop`, over those of completions that teach.
"""

WHAT_IS_LEARNED = (
    "num_generations", "max_completion_length", "temperature", "top_p",
    "top_k", "min_p", "repetition_penalty", "learning_rate",
    "lr_scheduler_type", "warmup_steps", "optim", "weight_decay",
    "max_grad_norm", "adam_beta1", "adam_beta2", "beta", "loss_type",
    "scale_rewards", "num_iterations", "max_steps",
    "per_device_train_batch_size", "gradient_accumulation_steps", "bf16",
    "fp16", "seed",
)  # fmt: skip
"""The settings of `GRPOConfig` that change what a run learns."""

SNAPSHOTS = "snapshots"
"""Folder of a run for the adapters that `Snapshots` keeps."""

COMPLETE = "complete"
"""Marker file of a checkpoint that was written to its end.

It holds `WHAT_IS_LEARNED` of the run, so that no other run goes on from it.
"""

Progress = Callable[[int, int, dict], None]
"""Called after each optimiser step with step, total steps, metrics row."""


# --- The run: rollout, reward, step, record ---------------------------------


def build_trainer(
    resolved: Resolved,
    train_dataset: Dataset,
    rewards: Sequence[Callable],
    run_dir: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> GRPOTrainer:
    """A trainer for one run, checked and ready for `train`.

    Args:
        resolved: the run, from `memory.resolve`.
        train_dataset: rows with `prompt` (messages) and what the reward
            functions ask for; see `grpo_lab.data`.
        rewards: reward functions with TRL's signature.
        run_dir: the run's own directory; every write goes below it.
        model: the base model, from `models.load_policy`; it is given an
            adapter, and until `detach_adapter` it is this run's.
        tokenizer: its tokenizer.
        progress: called after each optimiser step.
        callbacks: further ones, such as `Snapshots`.

    Raises:
        LabError: the settings would train without learning; see
            `guards.check`.
    """
    settings, optimizations = resolved.settings, resolved.optimizations
    _refuse_one_name_twice(rewards)
    guards.keep_sampling_ours(model)
    options = {
        "model": model,
        "reward_funcs": list(rewards),
        "args": grpo_config(resolved, run_dir, len(train_dataset)),
        "train_dataset": train_dataset,
        "processing_class": tokenizer,
        "peft_config": lora_config(settings),
    }
    if optimizations:
        trainer = speed.FastTrainer(optimizations=optimizations, **options)
    else:
        trainer = GRPOTrainer(**options)
    guards.prepare(trainer)
    for callback in callbacks:
        trainer.add_callback(callback)
    # Last, for it marks a checkpoint as complete, after which nothing of its
    # step is done again.
    limit = FailureLimit(settings.max_failed_share)
    trainer.add_callback(Recorder(run_dir, rewards, progress, limit))
    guards.check(trainer, settings)
    return trainer


def train(trainer: GRPOTrainer, until: int | None = None) -> int:
    """Train to the end, going on from the last whole checkpoint if any.

    On a CPU the weights and metrics are bit for bit those of a run that was
    never interrupted: a checkpoint holds adapter, optimiser, learning-rate
    schedule and random state, and stands where new rollouts begin.

    Args:
        trainer: from `build_trainer`, with the same settings as before.
        until: the optimiser step after which to stop for now; by default the
            last one. The course of the learning rate is that of all steps.

    Returns:
        The step that was reached; a `StopWhen` may have ended it earlier.

    Raises:
        LabError: the checkpoint is of a run with other settings; or the run
            can't go on, see `Recorder` and `guards.AdapterGuard`.
    """
    until = until or trainer.args.max_steps
    checkpoint = last_checkpoint(trainer.args.output_dir)
    if checkpoint:
        _refuse_other_settings(checkpoint, trainer.args)
        if step_of(checkpoint) >= until:
            # The library would do one more step.
            weights = load_file(checkpoint / "adapter_model.safetensors")
            set_peft_model_state_dict(trainer.model, weights)
            return step_of(checkpoint)
    if until < trainer.args.max_steps:
        trainer.add_callback(_StopAt(lambda step: step >= until))
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer.state.global_step


# --- What it is made of ------------------------------------------------------


def lora_config(settings: RunSettings) -> LoraConfig:
    """The adapter of a run (Hu et al., 2021, arXiv:2106.09685)."""
    return LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=list(settings.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )


def grpo_config(
    resolved: Resolved, run_dir: Path, train_rows: int
) -> GRPOConfig:
    """TRL's configuration of a run, with every value that matters set.

    Args:
        resolved: the run, from `memory.resolve`.
        run_dir: where checkpoints and completions go.
        train_rows: questions in the training set; it gives the steps.
    """
    settings = resolved.settings
    steps = settings.steps(train_rows)
    return GRPOConfig(
        output_dir=str(run_dir),
        # What is rolled out
        num_generations=settings.num_generations,
        max_completion_length=settings.max_completion_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        chat_template_kwargs=dict(TEMPLATE_VALUES),
        min_p=None,
        repetition_penalty=1.0,
        # What is learned from it
        learning_rate=settings.learning_rate,
        lr_scheduler_type=SCHEDULERS[settings.lr_scheduler],
        warmup_steps=round(settings.warmup_share * steps),
        optim=settings.optimizer,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        beta=settings.beta,
        loss_type="dapo",
        scale_rewards="group",
        num_iterations=1,
        # Sizes: TRL's batch counts completions, not prompts
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.accumulation_steps,
        max_steps=steps,
        gradient_checkpointing=resolved.gradient_checkpointing,
        **precision_flags(),
        use_cpu=not torch.cuda.is_available(),
        # What is kept
        logging_steps=1,
        # Else a loss of NaN would be logged as 0.
        logging_nan_inf_filter=False,
        log_completions=True,
        num_completions_to_print=0,
        save_strategy="steps",
        save_steps=settings.save_steps,
        save_total_limit=2,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=settings.seed,
    )


def _refuse_one_name_twice(rewards: Sequence[Callable]) -> None:
    names = [reward.__name__ for reward in rewards]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LabError(
            f"Two rewards have the name {twice[0]}, and everything about a "
            "reward is logged under its name. Give one of them another: "
            "other_name = with_options(reward); other_name.__name__ = "
            "'other_name'. Of two reward files, rename one."
        )


def values_in_force(arguments: GRPOConfig) -> pd.DataFrame:
    """The settings that change what a run learns, with their values."""
    values = _learned(arguments)
    return pd.DataFrame(list(values.items()), columns=["setting", "value"])


def facts(trainer: GRPOTrainer) -> pd.DataFrame:
    """What a trainer will train, and how, read off the trainer itself."""
    model = trainer.model
    trainable = [p for p in model.parameters() if p.requires_grad]
    frozen = {str(p.dtype) for p in model.parameters() if not p.requires_grad}
    count = sum(p.numel() for p in trainable)
    total = model.get_base_model().num_parameters()
    arguments = trainer.args
    completions = arguments.generation_batch_size
    rows = {
        "parameters of the base model": f"{total - count:,}",
        "trainable parameters": f"{count:,}",
        "layers with an adapter": len(guards.adapter_layers(model)),
        "stored as, base (uint8 holds two 4-bit weights)": _types(frozen),
        "stored as, adapters": _types({str(p.dtype) for p in trainable}),
        "computed in": _types({str(compute_dtype())}),
        "prompts per optimiser step": completions // arguments.num_generations,
        "completions per prompt (the group)": arguments.num_generations,
        "completions per optimiser step": completions,
        "completions per forward pass": arguments.per_device_train_batch_size,
        "optimiser steps": arguments.max_steps,
        "peak learning rate": f"{arguments.learning_rate:g}",
        "sampling temperature": trainer.generation_config.temperature,
    }
    return pd.DataFrame(
        {"what": list(rows), "value": [str(v) for v in rows.values()]}
    )


def _types(names: set[str]) -> str:
    return ", ".join(sorted(name.removeprefix("torch.") for name in names))


# --- What is recorded --------------------------------------------------------


class Recorder(TrainerCallback):
    """Writes each step to `metrics.csv` and TensorBoard, and stops on NaN.

    Also stops a run in which too much can't be graded, see `rewards.health`.
    Also marks each checkpoint that was written to its end, so that a resume
    never starts from half of one.
    """

    def __init__(
        self,
        run_dir: Path,
        rewards: Sequence[Callable],
        progress: Progress | None,
        limit: FailureLimit,
    ) -> None:
        self.limit, self.progress = limit, progress
        self.path = Path(run_dir) / "metrics.csv"
        self.board_dir = Path(run_dir) / "tensorboard"
        own = {f.__name__: f"rewards/{f.__name__}/mean" for f in rewards}
        self.names = METRICS | own
        self.columns = [
            "step", *self.names, "failed_share", "seconds", "memory_gib",
        ]  # fmt: skip
        self.started = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Start the files, or go on where the checkpoint left off."""
        # A killed run may have logged a step that no checkpoint holds: it
        # will be done again, so its row must not stand twice.
        kept = [
            row
            for row in read_metrics(self.path)
            if row["step"] <= state.global_step
        ]
        text = io.StringIO()
        table = csv.DictWriter(text, self.columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(kept)
        write_whole(self.path, text.getvalue())
        if torch.cuda.is_available():  # forget the base model's evaluation
            torch.cuda.reset_peak_memory_stats()
        self.board = SummaryWriter(
            str(self.board_dir), purge_step=state.global_step + 1
        )

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """Start the clock of the step."""
        self.started = time.monotonic()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Write one row; the summary at the end of training is no row."""
        if "reward" not in logs:
            return
        outcomes = _outcome_shares(logs)
        failed = [v for k, v in outcomes.items() if k.endswith("/failed")]
        row = {
            "step": state.global_step,
            **{name: logs.get(key) for name, key in self.names.items()},
            "failed_share": max(failed, default=None),
            "seconds": round(time.monotonic() - self.started, 3),
            "memory_gib": round(memory_in_use(), 3),
        }
        row["entropy"] = logs.get(speed.ENTROPY, row["entropy"])
        guards.stop_on_nan(row, args.fp16)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)
        for name, value in (row | outcomes).items():
            if value is not None:
                self.board.add_scalar(f"train/{name}", value, row["step"])
        # Else a kill would take up to two minutes of values with it.
        self.board.flush()
        self.limit.add(logs, args.generation_batch_size)
        if self.progress:
            self.progress(state.global_step, state.max_steps, row)

    def on_save(self, args, state, control, **kwargs) -> None:
        """Mark the checkpoint that has just been written."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        write_json(folder / COMPLETE, _learned(args))

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Close TensorBoard's file."""
        self.board.close()


def _outcome_shares(logs: dict) -> dict[str, float]:
    """What the rewards say about their grading, among all that TRL logs."""
    kinds = ("failed", Outcome.NO_ANSWER, *FAILURES)
    return {k: v for k, v in logs.items() if k.rpartition("/")[2] in kinds}


def memory_in_use() -> float:
    """GiB: the GPU's peak so far, or what this process holds on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return psutil.Process().memory_info().rss / 2**30


class Snapshots(TrainerCallback):
    """Keeps the adapter of every n-th step, so that it can be judged later.

    Checkpoints are there to go on from, and only the last two are kept.

    Args:
        every: optimiser steps between two snapshots.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_save(self, args, state, control, model=None, **kwargs) -> None:
        """Keep the adapter, whole or not at all."""
        if state.global_step % self.every:
            return
        folder = Path(args.output_dir) / SNAPSHOTS / str(state.global_step)
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)


def snapshots(run_dir: Path) -> dict[int, Path]:
    """The adapters that `Snapshots` kept, by optimiser step, in order."""
    folders = (Path(run_dir) / SNAPSHOTS).glob("*")
    steps = sorted(int(f.name) for f in folders if f.name.isdecimal())
    return {step: Path(run_dir) / SNAPSHOTS / str(step) for step in steps}


# --- Where it begins and ends ------------------------------------------------


class StopWhen(TrainerCallback):
    """Ends the training after a step, when something has become true.

    What was learned is saved as after any step, so that `train` goes on from
    there as if it had never stopped.

    Args:
        is_time: asked after each optimiser step, with its number.
    """

    def __init__(self, is_time: Callable[[int], bool]) -> None:
        self.is_time = is_time

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Ask."""
        if self.is_time(state.global_step):
            control.should_training_stop = control.should_save = True


class _StopAt(StopWhen):
    """One more, of a type of its own, as transformers wants it."""


def detach_adapter(trainer: GRPOTrainer) -> PreTrainedModel:
    """The base model of a trainer that is done, for the next run.

    Without adapter, hooks, checkpointing and TRL's output layer; its mode
    (training or not) is that of the policy.
    """
    base = trainer.model.unload()
    base.activation_checkpointing_disable()
    # With gradient checkpointing each run leaves hooks behind, and
    # transformers' own way to remove them knows the last one only.
    base.get_input_embeddings()._forward_hooks.clear()
    # TRL's output layer, which would go one inside the other.
    base.__dict__.pop("forward", None)
    return base


def warm_start(checkpoint: Path, arguments: GRPOConfig) -> None:
    """Let a new run begin where a checkpoint of another one stands.

    It gets that run's adapter, the moments of its optimiser and its step.
    Its learning rate, its beta and its seed are its own; the random state is
    left behind, so that the two runs do not write the same completions.

    Args:
        checkpoint: of a run with adapters of the same shape. It is copied,
            for that run may go on and keep the last two only.
        arguments: the new run's, from `grpo_config`; its `train` goes on
            from the copy.
    """
    folder = Path(arguments.output_dir) / checkpoint.name
    if (folder / COMPLETE).exists():
        return
    part = folder.with_name(f"part-{checkpoint.name}")
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    without = shutil.ignore_patterns("rng_state*.pth", COMPLETE)
    shutil.copytree(checkpoint, part, ignore=without)
    write_json(part / COMPLETE, _learned(arguments))
    part.rename(folder)


def extend(trainer: GRPOTrainer) -> None:
    """Let a run go on for more steps than it was meant to have.

    Args:
        trainer: from `build_trainer`, with the settings of the run but for
            `max_steps`, and a rate that does not depend on these.

    Raises:
        LabError: the learning rate depends on the number of steps.
    """
    checkpoint = last_checkpoint(trainer.args.output_dir)
    if checkpoint is None:
        return
    if trainer.args.lr_scheduler_type != SCHEDULERS["constant"]:
        raise LabError(
            "Only a run with a constant learning rate can be extended: "
            f"with {trainer.args.lr_scheduler_type} every step so far had "
            "the rate of a shorter run. Start a new run with more steps."
        )
    mark = read_json(checkpoint / COMPLETE)
    steps = {"max_steps": str(trainer.args.max_steps)}
    if mark | steps != mark:
        write_json(checkpoint / COMPLETE, mark | steps)


def _learned(arguments: GRPOConfig) -> dict[str, str]:
    return {name: str(getattr(arguments, name)) for name in WHAT_IS_LEARNED}


def _refuse_other_settings(checkpoint: Path, arguments: GRPOConfig) -> None:
    """A resumed optimiser would quietly keep, say, the old learning rate."""
    before, now = read_json(checkpoint / COMPLETE), _learned(arguments)
    differs = [
        f"{name} was {before[name]} and is now {now[name]}"
        for name in now
        if before[name] != now[name]
    ]
    if differs:
        raise LabError(
            f"{checkpoint.parent} holds a run with other settings: "
            f"{', '.join(differs)}. Going on from it would mix the two. "
            "Choose another directory for the new run, or set the values "
            "back to go on with the old one."
        )


def step_of(checkpoint: Path) -> int:
    """The optimiser step after which a checkpoint was written."""
    return int(checkpoint.name.split("-")[1])


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint that was written to its end, if any."""
    complete = [
        folder
        for folder in Path(run_dir).glob("checkpoint-*")
        if (folder / COMPLETE).exists() and not _is_broken(folder)
    ]
    return max(complete, key=step_of, default=None)


def _is_broken(checkpoint: Path) -> bool:
    """Whether files of a checkpoint were cut or removed since it was written.

    An older one is gone on from then, which costs a step.
    """
    try:
        with safe_open(
            checkpoint / "adapter_model.safetensors", "pt"
        ) as weights:
            weights.keys()
        state = read_json(checkpoint / "trainer_state.json")
    except (OSError, SafetensorError, LabError):
        return True
    # What torch writes is a zip archive, whose index stands at its end. The
    # random state is left out where a warm clone begins.
    files = [checkpoint / name for name in ("optimizer.pt", "scheduler.pt")]
    files += checkpoint.glob("rng_state*.pth")
    return state is None or not all(map(zipfile.is_zipfile, files))
