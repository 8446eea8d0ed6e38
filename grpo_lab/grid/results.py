"""What a grid has found, as its directory tells it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from grpo_lab import evaluation, training
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.grid.halving import read_rungs, rung_path
from grpo_lab.grid.state import RunState
from grpo_lab.settings import RunSettings, run_names

LEADERBOARD = (
    "run", "model", "learning_rate", "steps", "parent", "stopped",
    "completions", "completions_planned",
    "before", "before_low", "before_high",
    "after", "after_low", "after_high",
    "gain", "gain_low", "gain_high", "p_value",
    "format_ok_before", "format_ok_after", "truncated_after", "tokens_after",
    "seconds", "peak_memory_gib",
)  # fmt: skip
"""Columns of `Grid.leaderboard`."""


@dataclass(frozen=True)
class Run:
    """One run of a grid, as its directory tells it.

    Attributes:
        name: what a reader calls it, such as `pocket-qwen lr=0.001`.
        settings: everything that determines it.
        directory: where everything about it lies.
        status: "done", "stopped", "failed" or "unfinished".
        reason: why it was stopped or failed; else "".
        clone: of a clone its origin, see `control.clone`; else None.
    """

    name: str
    settings: RunSettings
    directory: Path
    status: str
    reason: str = ""
    clone: dict | None = None

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row for each optimiser step; see `training.METRICS`."""
        path = self.directory / "metrics.csv"
        return pd.DataFrame(training.read_metrics(path))

    @property
    def answers(self) -> Evaluation:
        """`evaluation` of a run that has one."""
        assert self.evaluation is not None
        return self.evaluation

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """Its answers to the held-out questions; None if never asked.

        Of a run that was stopped the ones at its last rung.
        """
        steps = [rung.step for rung in read_rungs(self.directory)]
        rungs = [rung_path(self.directory, step) for step in reversed(steps)]
        paths = (self.directory / "evaluation.json", *rungs)
        found = (Evaluation.load(path) for path in paths if path.exists())
        return next(found, None)

    @cached_property
    def base(self) -> Evaluation | None:
        """The answers of its base model, before any training."""
        return Evaluation.load(RunState(self.directory).base)

    @property
    def steps(self) -> int:
        """The optimiser step that it has reached."""
        return 0 if self.metrics.empty else int(self.metrics["step"].max())

    @property
    def completions(self) -> int:
        """Completions that it has written; a warm clone's own ones only."""
        return len(self.metrics) * self.settings.completions_per_step

    @property
    def completions_planned(self) -> int:
        """Those that it writes if nothing stops it."""
        steps = RunState(self.directory).steps
        begun = self.clone["step"] if self.clone else 0
        return (steps - begun) * self.settings.completions_per_step

    @property
    def seconds(self) -> float:
        """Time of its optimiser steps, evaluation not counted."""
        return 0.0 if self.metrics.empty else self.metrics["seconds"].sum()

    @property
    def peak_memory_gib(self) -> float:
        """Peak of GPU memory, or on a CPU of the process's memory."""
        return 0.0 if self.metrics.empty else self.metrics["memory_gib"].max()

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
        """Finished runs, the best first; see `Evaluation.rank`."""
        finished = [run for run in self.runs if run.status == "done"]
        return sorted(finished, key=lambda run: run.answers.rank, reverse=True)

    @property
    def stopped(self) -> list[Run]:
        """Runs that were ended early on purpose, the furthest first."""
        found = [run for run in self.runs if run.status == "stopped"]
        return sorted(
            found,
            key=lambda run: (
                run.steps,
                run.evaluation.rank if run.evaluation else (-1,),
            ),
            reverse=True,
        )

    @property
    def failed(self) -> list[Run]:
        """Runs that did not get to their end, mostly with an error."""
        ends = ("done", "stopped")
        return [run for run in self.runs if run.status not in ends]

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
        """One row for each run that was not lost, the best first.

        Runs that were stopped come after those that finished, with what they
        had reached at their last rung, if any. `steps` are the optimiser
        steps made, `parent` is the run that a clone comes from, `stopped`
        says when and why, and `completions` are those written, of
        `completions_planned` if nothing had stopped the run. Shares are 0 to
        1; `*_low` and `*_high` bound 95 % intervals; `gain` is the paired
        difference to the run's own base model, `p_value` from the exact
        McNemar test; times in seconds, memory in GiB.
        """
        entries = [self._entry(run) for run in (*self.done, *self.stopped)]
        return pd.DataFrame(entries, columns=LEADERBOARD)

    def _entry(self, run: Run) -> dict:
        told = {
            "run": run.name,
            "model": run.settings.model,
            "learning_rate": run.settings.learning_rate,
            "steps": run.steps,
            "parent": self._parent(run),
            "stopped": run.reason,
            "completions": run.completions,
            "completions_planned": run.completions_planned,
            "seconds": run.seconds,
            "peak_memory_gib": run.peak_memory_gib,
        }
        return told | self._measured(run)

    def _parent(self, run: Run) -> str:
        if run.clone is None:
            return ""
        names = {one.directory.name: one.name for one in self.runs}
        parent = run.clone["parent"]
        return names.get(parent, parent)

    def _measured(self, run: Run) -> dict:
        base, after = run.base, run.evaluation
        if base is None or after is None:
            # Stopped before it was asked, or before its base model was, whose
            # worker was lost.
            return {}
        gain = evaluation.compare(base, after)
        return {
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
            "format_ok_before": base.format_ok_share,
            "format_ok_after": after.format_ok_share,
            "truncated_after": after.clipped_ratio,
            "tokens_after": after.mean_tokens,
        }

    def savings(self, full: "Grid") -> dict:
        """What stopping runs early has saved, and whether it cost the winner.

        Args:
            full: the same runs, none of them stopped.

        Returns:
            `completions` written here, those `of` the full grid, the `share`
            that they are, the `winner` here and the `full_winner` by name,
            whether they are the `same_winner`, and the paired comparison of
            the two in words, `verdict`.
        """
        made, all_of_it = (
            sum(run.completions for run in one.runs) for one in (self, full)
        )
        ours, theirs = self.best, full.best
        pair = evaluation.compare(theirs.answers, ours.answers)
        return {
            "completions": made,
            "of": all_of_it,
            "share": made / all_of_it,
            "winner": ours.name,
            "full_winner": theirs.name,
            "same_winner": ours.settings == theirs.settings,
            "verdict": str(pair),
        }

    def verdict(self) -> str:
        """Honest words on whether the best run is really the best.

        Where runs were stopped also what that has saved: whether it has cost
        the winner only the whole grid can tell, see `savings`.
        """
        return " ".join([self._comparison(), *self._left_out()])

    def _left_out(self) -> list[str]:
        if not self.stopped:
            return []
        made = sum(run.completions for run in self.runs)
        planned = sum(run.completions_planned for run in self.runs)
        return [
            f"{len(self.stopped)} of {len(self.runs)} runs were stopped early:"
            f" {made:,} of {planned:,} completions were written."
        ]

    def _comparison(self) -> str:
        if not self.done:
            return "No run finished, so there is nothing to compare."
        if len(self.done) == 1:
            return "Only one run finished, so there is nothing to compare."
        best, second = self.done[:2]
        pair = evaluation.compare(second.answers, best.answers)
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
                    "completions": run.completions,
                    "clone": run.clone,
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
            cut = metrics["clipped_ratio"].mean()
            if cut > 0.2:
                told.append(
                    f"{name}: {cut:.0%} of its completions were cut at "
                    f"{run.settings.max_completion_length} tokens and "
                    "earned little; raise MAX_COMPLETION_LENGTH."
                )
            idle = metrics["frac_reward_zero_std"].mean()
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


def _last_step(metrics: pd.DataFrame) -> dict:
    """The last row of metrics as plain JSON: no NaN, no infinity."""
    if metrics.empty:
        return {}
    row = metrics.iloc[-1].astype(float)
    return row[np.isfinite(row)].to_dict()


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
        found = (output_dir / "runs").glob("*/settings.json")
        directories = sorted((file.parent for file in found), key=_age)
    states = [RunState(folder) for folder in directories]
    names = run_names([one.settings for one in states])
    runs = tuple(
        Run(
            name + _clone_note(one.clone),
            one.settings,
            one.directory,
            **one.result,
            clone=one.clone,
        )
        for name, one in zip(names, states, strict=True)
    )
    return Grid(output_dir, runs)


def _age(directory: Path) -> tuple:
    """The runs of a plan by name, then the clones in the order of birth."""
    if RunState(directory).clone is None:
        return False, directory.name
    return True, (directory / "settings.json").stat().st_mtime_ns


def _clone_note(clone: dict | None) -> str:
    """What sets a clone apart from a run with its settings."""
    if clone is None:
        return ""
    rewards = f", {clone['rewards']}" if clone["rewards"] else ""
    return f" (clone from step {clone['step']}{rewards})"
