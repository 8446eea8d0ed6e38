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
        rungs/, rungs.json      with halving: answers on the way, decisions
        worker.log              what its worker printed, if it had one
        adapter/                the result, as safetensors
        evaluation.json         its answers to the held-out questions
        result.json             written last: done, stopped or failed, and why

A run's directory is named after its settings and a hash of everything that
determines it, so that a changed setting, data set or reward function is
another run and never reuses an old result. Running a grid again skips what
is done and goes on with what is not.

    plan          which runs, where, and may they run there
    state         a run's directory, and the state that its files show
    halving       which runs go on
    train_run     a run, or its part up to a rung, in this process
    pool          this process, or workers of this machine or on Ray (`on_ray`)
    execute       the loop: ask what goes on, give it to the pool, take answers
    control       stop, resume and clone runs while others train
    results       the runs, compared
"""

from grpo_lab.grid.estimates import (
    Pace,
    check_memory,
    estimates,
    measure_pace,
)
from grpo_lab.grid.execute import ENGINES, Progress, check, run
from grpo_lab.grid.fingerprint import reward_fingerprint
from grpo_lab.grid.halving import Halving
from grpo_lab.grid.plan import expand, log_uniform, open_run, sample
from grpo_lab.grid.results import Grid, Run, load
from grpo_lab.grid.train_run import reason
from grpo_lab.task import Task

__all__ = [
    "ENGINES",
    "Grid",
    "Halving",
    "Pace",
    "Progress",
    "Run",
    "Task",
    "check",
    "check_memory",
    "estimates",
    "expand",
    "load",
    "log_uniform",
    "measure_pace",
    "open_run",
    "reason",
    "reward_fingerprint",
    "run",
    "sample",
]
