"""Successive halving: who goes on, and that going on changes nothing."""

import dataclasses
import json

import pandas as pd
import pytest
import torch
from conftest import quick_settings, resolved
from fake_grid import graded
from killed_grid import variety
from safetensors.torch import load_file

from grpo_lab import evaluation, grid, training
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import write_json
from grpo_lab.grid import Halving, halving
from grpo_lab.grid.halving import (
    PROMOTED,
    STOPPED,
    Rung,
    compare,
    note_rung,
    read_rungs,
    rung_path,
)
from grpo_lab.grid.plan import plan
from grpo_lab.grid.state import RunState
from grpo_lab.grid.train_run import GridTraining
from grpo_lab.models import load_policy

pytestmark = pytest.mark.numeric

CHANGING = ["seconds", "memory_gib"]


@pytest.mark.parametrize(
    ("first", "factor", "steps", "rungs"),
    [
        (8, 2, 32, [8, 16]),
        (8, 2, 33, [8, 16, 32]),
        (1, 3, 100, [1, 3, 9, 27, 81]),
        (5, 2, 5, []),
        (9, 4, 8, []),
    ],
)
def test_rungs(first, factor, steps, rungs):
    assert Halving(first, factor).rungs(steps) == rungs


@pytest.mark.parametrize(("first", "factor"), [(0, 2), (8, 1), (-1, 3)])
def test_what_halves_nothing_is_refused(first, factor):
    with pytest.raises(LabError, match="Type for example Halving"):
        Halving(first, factor)


def test_a_rung_that_nobody_reaches_is_refused(quick, task, tmp_path):
    with pytest.raises(LabError, match="no run has more than 3 steps"):
        grid.run([quick], task, tmp_path / "g", halving=Halving(3))
    assert not (tmp_path / "g").exists()


def accuracies(*counts: int) -> list[Evaluation]:
    return [graded("+" * n + "-" * (10 - n)) for n in counts]


def decisions(*counts: int, factor: int = 2) -> str:
    found = compare(4, accuracies(*counts), factor)
    return "".join("+" if r.decision == PROMOTED else "-" for r in found)


def test_the_better_half_goes_on():
    assert decisions(3, 9, 1, 5) == "-+-+"
    assert decisions(3, 9, 1) == "++-"  # rounded up
    assert decisions(3) == "+"
    assert decisions(1, 2, 3, 4, 5, 6, 7, factor=4) == "-----++"
    assert decisions(5, 5, 5, 5) == "++--"  # between equals the earlier ones


def test_between_equals_the_better_tagged_goes_on():
    found = [
        graded("+-+-", format_ok="----"),
        graded("+-+-", format_ok="+---"),
    ]
    first, second = compare(2, found, 2)
    assert (first.decision, second.decision) == (STOPPED, PROMOTED)
    assert (first.cutoff, first.compared) == (0.5, 2)


def test_decisions_are_kept_and_told(tmp_path):
    note_rung(tmp_path, Rung(4, 0.3, PROMOTED, None, 1))
    note_rung(tmp_path, Rung(8, 0.4, STOPPED, 0.5, 3))
    note_rung(tmp_path, Rung(8, 0.4, STOPPED, 0.5, 3))
    first, second = read_rungs(tmp_path)
    assert (first.step, second.step) == (4, 8)
    assert second.reason(32) == (
        "stopped by halving after step 8 of 32: 40.0% of the held-out "
        "questions right, where 50.0% were needed among 3 runs"
    )
    tied = Rung(8, 0.5, STOPPED, 0.5, 3)
    assert "50.0% and better form were needed" in tied.reason(32)


# --- With runs that train ---------------------------------------------------


@pytest.fixture(scope="module")
def three(tiny_qwen, tiny_llama):
    return [
        quick_settings(tiny_qwen, max_steps=6),
        quick_settings(tiny_llama, max_steps=6),
        quick_settings(tiny_qwen, learning_rate=2e-3, max_steps=6),
    ]


@pytest.fixture(scope="module")
def full(three, task, tmp_path_factory):
    """The same runs, none ever paused."""
    place = tmp_path_factory.mktemp("full")
    return grid.run(three, task, place)


@pytest.fixture
def judged(monkeypatch):
    """The tiny models never answer right, so accuracy is set by the run.

    The higher the rate the better, and the Llama is the worst.
    """
    load = Evaluation.load.__func__

    def better(cls, path):
        found = load(cls, path)
        if found is None or path.parent.name != "rungs":
            return found
        name = path.parent.parent.name
        right = 0 if "llama" in name else 4 if "lr0.002" in name else 2
        return dataclasses.replace(
            found,
            answers=tuple(
                dataclasses.replace(answer, correct=at < right)
                for at, answer in enumerate(found.answers)
            ),
        )

    monkeypatch.setattr(Evaluation, "load", classmethod(better))


def assert_same_so_far(run: grid.Run, whole: grid.Run) -> None:
    """Every step that was made is that of a run that was never paused."""
    steps = run.steps
    pd.testing.assert_frame_equal(
        run.metrics.drop(columns=CHANGING),
        whole.metrics.drop(columns=CHANGING)[:steps],
        check_exact=True,
    )


def test_halving_here(full, three, task, tmp_path, judged):
    """3 runs to step 2, the best 2 to step 4, the best to the end."""
    found = grid.run(three, task, tmp_path, halving=Halving(2))
    assert [run.status for run in found.runs] == ["stopped", "stopped", "done"]
    assert [run.steps for run in found.runs] == [4, 2, 6]
    for run, whole in zip(found.runs, full.runs, strict=True):
        assert_same_so_far(run, whole)
    winner, whole = found.runs[2], full.runs[2]
    ours, theirs = (
        load_file(one.adapter / "adapter_model.safetensors")
        for one in (winner, whole)
    )
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert winner.evaluation.answers == whole.evaluation.answers
    rates = winner.metrics["learning_rate"]
    assert rates.nunique() == 6  # linear: another one at each step
    assert found.failed == [] and found.done == [winner]
    found.raise_failures()
    assert [run.steps for run in found.stopped] == [4, 2]
    board = found.leaderboard()
    assert list(board["steps"]) == [6, 4, 2]
    assert list(board["stopped"].str.slice(0, 35)) == [
        "",
        "stopped by halving after step 4 of ",
        "stopped by halving after step 2 of ",
    ]
    assert list(board["completions"]) == [24, 16, 8]
    assert list(board["completions_planned"]) == [24, 24, 24]
    assert found.verdict().endswith(
        "2 of 3 runs were stopped early: 48 of 72 completions were written."
    )
    assert "stopped early" not in full.verdict()
    json.dumps(found.summary(), allow_nan=False)
    saved = found.savings(full)
    assert (saved["completions"], saved["of"]) == (4 * 12, 4 * 18)
    assert saved["winner"] == winner.name
    assert saved["full_winner"] == full.best.name
    assert saved["same_winner"] == (winner.name == full.best.name)
    assert full.savings(full)["share"] == 1


@pytest.mark.slow
def test_a_second_start_changes_nothing(
    three, task, tmp_path, judged, monkeypatch
):
    """What was stopped stays so, and nothing is trained or measured twice."""
    first = grid.run(three, task, tmp_path, halving=Halving(2))
    monkeypatch.setattr(GridTraining, "run", None)
    again = grid.run(three, task, tmp_path, halving=Halving(2))
    pd.testing.assert_frame_equal(first.leaderboard(), again.leaderboard())


def test_a_kill_between_two_decisions(
    three, task, tmp_path, judged, monkeypatch
):
    """Half of a rung's decisions are written: the rest comes out the same,
    and what was to be stopped does not go on."""
    note = halving.note_rung

    def killed(directory, rung):
        note(directory, rung)
        if rung.decision == STOPPED:
            raise KeyboardInterrupt

    monkeypatch.setattr(halving, "note_rung", killed)
    with pytest.raises(KeyboardInterrupt):
        grid.run(three, task, tmp_path, halving=Halving(2))
    monkeypatch.setattr(halving, "note_rung", note)
    found = grid.run(three, task, tmp_path, halving=Halving(2))
    assert [run.steps for run in found.runs] == [4, 2, 6]


def test_evaluation_at_a_rung_leaves_the_policy_as_it_was(
    quick, tiny_splits, tmp_path
):
    """Paused after a checkpoint, in the same process and with its trainer
    gone, a run finds weights, optimiser, schedule and random state."""
    parts = []
    for place, stops in (("a", [1, 2]), ("b", [])):
        for until in (*stops, 3):
            model, tokenizer = load_policy(quick.model, quick.load_in_4bit)
            trainer = training.build_trainer(
                resolved(quick, tokenizer, tiny_splits.train),
                tiny_splits.train, [variety], tmp_path / place, model,
                tokenizer,
            )  # fmt: skip
            assert training.train(trainer, until=until) == until
            evaluation.evaluate(
                trainer.model, tokenizer, tiny_splits.eval, 8, 3,
                optimizations=quick.optimizations,
            )  # fmt: skip
        weights = load_file(
            tmp_path / place / "checkpoint-3" / "adapter_model.safetensors"
        )
        state = torch.load(
            tmp_path / place / "checkpoint-3" / "optimizer.pt",
            weights_only=True,
        )["state"]
        parts.append((weights, state))
    (ours, our_state), (theirs, their_state) = parts
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for key, values in their_state.items():
        assert torch.equal(our_state[key]["exp_avg"], values["exp_avg"])


def test_another_halving_is_refused(three, task, tmp_path, judged):
    """Its rungs lie where these runs were not compared."""
    grid.run(three, task, tmp_path, halving=Halving(4))
    for other in (None, Halving(2), Halving(4, 3)):
        with pytest.raises(LabError, match="was begun with halving=Halving"):
            grid.run(three, task, tmp_path, halving=other)
        with pytest.raises(LabError, match="was begun with halving=Halving"):
            grid.check(three, task, tmp_path, halving=other)


def test_runs_that_fail_drop_out_of_the_comparison(
    three, task, tmp_path, judged, monkeypatch
):
    """The Llama would be the worst; with it gone one of two goes on."""
    build = training.build_trainer

    def broken(resolved, *args, **kwargs):
        if "llama" in resolved.settings.model:
            raise MemoryError("for once")
        return build(resolved, *args, **kwargs)

    monkeypatch.setattr(training, "build_trainer", broken)
    found = grid.run(three, task, tmp_path, halving=Halving(2))
    assert [run.status for run in found.runs] == ["stopped", "failed", "done"]
    assert [run.steps for run in found.runs] == [2, 0, 6]


# --- Decided on arrival -----------------------------------------------------


@pytest.fixture
def planned(tiny_qwen, task, tmp_path):
    """Four runs of eight steps that nobody has trained."""
    settings = [
        quick_settings(tiny_qwen, learning_rate=rate, max_steps=8)
        for rate in (1e-3, 2e-3, 3e-3, 4e-3)
    ]
    records = plan(settings, task, tmp_path)
    for directory, record in records.items():
        write_json(directory / "settings.json", record)
    return [RunState(directory) for directory in records]


def arrive(run: RunState, step: int, right: int) -> None:
    """A run is measured at a rung, with so many of ten answers right."""
    pattern = "+" * right + "-" * (10 - right)
    graded(pattern).save(rung_path(run.directory, step))


def targets(halving: Halving, runs: list[RunState]) -> list[int | None]:
    """The step that each run trains to next; None if it is over."""
    found = {run.directory: step for run, step in halving.decide(runs)}
    return [found.get(run.directory) for run in runs]


def test_a_run_is_decided_when_it_arrives(planned):
    """It goes on if it is as good as the median of those before it."""
    asynchronous = Halving(2, asynchronous=True)
    assert targets(asynchronous, planned) == [2, 2, 2, 2]
    arrive(planned[0], 2, 4)
    assert targets(asynchronous, planned) == [4, 2, 2, 2]
    arrive(planned[1], 2, 3)
    assert targets(asynchronous, planned) == [4, None, 2, 2]
    arrive(planned[2], 2, 5)
    assert targets(asynchronous, planned) == [4, None, 4, 2]
    arrive(planned[3], 2, 3)
    assert targets(asynchronous, planned) == [4, None, 4, None]
    arrive(planned[2], 4, 5)
    # What was decided outlives the driver: it is read from the directories.
    again = [RunState(run.directory) for run in planned]
    assert targets(asynchronous, again) == [4, None, 8, None]
    arrive(planned[0], 4, 2)
    assert targets(asynchronous, planned) == [None, None, 8, None]
    assert planned[1].result["reason"] == (
        "stopped by halving after step 2 of 8: 30.0% of the held-out "
        "questions right, where 40.0% were needed among 2 runs"
    )


def test_a_rung_is_decided_when_all_have_reached_it(planned):
    """Whichever is the fastest, and what is resumed by hand is left alone."""
    halving = Halving(2)
    arrive(planned[0], 2, 4)
    assert targets(halving, planned) == [None, 2, 2, 2]
    assert read_rungs(planned[0].directory) == []
    for run, right in zip(planned[1:], (3, 5, 9), strict=True):
        arrive(run, 2, right)
    (planned[1].directory / "exempt").touch()
    assert targets(halving, planned) == [None, 8, 4, 4]
    assert [run.is_open for run in planned] == [False, True, True, True]
    assert read_rungs(planned[1].directory) == []
