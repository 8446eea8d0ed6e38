"""A population that trains: the elite, its copies, a kill, a stop."""

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import torch
from conftest import quick_settings
from safetensors.torch import load_file

from grpo_lab import training
from grpo_lab.arena import population, records
from grpo_lab.arena.evolution import Member, Rules
from grpo_lab.arena.population import Plan, Population, Stopped
from grpo_lab.data import load_splits

pytestmark = pytest.mark.numeric


def reward(completions, answer, **kwargs) -> list[float]:
    """Different characters, so that groups have a spread."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(set(text))) for text in texts]


@pytest.fixture(scope="module")
def splits():
    return load_splits("pocket", train_rows=12, eval_rows=8, seed=1)


def small_plan(model, max_steps: int) -> Plan:
    """Generations of two steps of two members."""
    settings = quick_settings(
        model,
        max_steps=max_steps,
        lr_scheduler="constant",
        warmup_share=0.0,
        beta=0.01,
    )
    ranges = {"lr": (1e-4, 1e-2), "beta": (1e-4, 1e-1)}
    rules = Rules(2, True, 1.0, ranges, seed=3)
    return Plan(settings, pop_size=2, evo_steps=2, rules=rules)


@pytest.fixture(scope="module")
def plan(tiny_qwen) -> Plan:
    """Three generations of two steps, and one of one step."""
    return small_plan(tiny_qwen, max_steps=7)


def of(plan, splits, directory, progress=None) -> Population:
    return Population(plan, splits, splits.eval, reward, directory, progress)


@pytest.fixture(scope="module")
def trained(plan, splits, tmp_path_factory):
    """The plan, trained to its end."""
    directory = tmp_path_factory.mktemp("population")
    of(plan, splits, directory).train()
    return plan, directory


def adapter(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def newest(directory, number: int) -> dict[str, torch.Tensor]:
    folder = records.member_folder(directory, number)
    return adapter(training.last_checkpoint(folder))


def test_the_lineage_tells_every_generation(trained):
    _, directory = trained
    rows = records.lineage(directory)
    assert rows["generation"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rows["step"].tolist() == [2, 2, 4, 4, 6, 6, 7, 7]
    assert set(rows["rank"]) == {1, 2}
    for generation in (1, 2, 3):
        now = rows[rows["generation"] == generation]
        before = rows[rows["generation"] == generation - 1]
        [elite] = before[before["rank"] == 1].to_dict("records")
        [kept] = now[now["member"] == elite["member"]].to_dict("records")
        for name in ("learning_rate", "beta", "born", "change"):
            assert kept[name] == elite[name]
        [copy] = now[now["born"] == generation].to_dict("records")
        assert copy["parent"] in before["member"].tolist()
        assert copy["change"]


def test_the_elite_goes_on_as_if_nothing_had_happened(
    trained, splits, tmp_path
):
    """Weights, optimiser, rate and random numbers: a run of its own."""
    the_plan, directory = trained
    rows = records.lineage(directory)
    lives = rows[rows["parent"].isna()].groupby("member")["step"].max()
    number, steps = lives.idxmax(), int(lives.max())
    assert steps > the_plan.evo_steps, "no first member outlived a generation"
    alone = replace(
        the_plan,
        settings=replace(
            the_plan.settings,
            seed=the_plan.settings_of(Member(int(number), 0.1, 0), 1).seed,
            max_steps=steps,
        ),
        pop_size=1,
        evo_steps=100,
    )
    of(alone, splits, tmp_path).train()
    expected, found = newest(tmp_path, 0), newest(directory, number)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_a_copy_begins_with_its_parent_and_its_own_rate(trained):
    """Its first step has the mutated rate, and its metrics begin there."""
    _, directory = trained
    rows = records.lineage(directory)
    steps = records.metrics(directory)
    for row in rows[rows["born"] > 0].to_dict("records"):
        own = steps[steps["member"] == row["member"]]
        assert own["step"].min() == 2 * row["born"] + 1
        assert set(own["learning_rate"]) == {row["learning_rate"]}
        assert set(own["beta"]) == {row["beta"]}


def test_the_dead_leave_no_checkpoints(trained):
    """Else a long evolution would fill the disk."""
    _, directory = trained
    rows = records.lineage(directory)
    last = rows[rows["generation"] == rows["generation"].max()]
    alive = set(last["member"])
    for number in set(rows["member"]):
        folder = records.member_folder(directory, number)
        left = list(folder.glob("checkpoint-*"))
        assert bool(left) == (number in alive), number
        assert number in alive or not (folder / "parent").exists()
        assert (folder / "metrics.csv").exists()


def test_metrics_have_their_columns_and_every_step_once(trained, splits):
    the_plan, directory = trained
    steps = records.metrics(directory)
    assert tuple(steps.columns) == records.COLUMNS
    assert steps.groupby("step").size().tolist() == [2] * 7
    assert not steps.duplicated(["step", "member"]).any()
    per_step = 2 * the_plan.settings.completions_per_step
    assert (steps["completions"] == steps["step"] * per_step).all()
    assert steps["generation"].tolist() == sorted([0, 1, 2] * 4 + [3] * 2)
    assert steps["kl"].notna().all()
    asked = set()
    for file in [directory / "base.json", *directory.rglob("fitness-*.json")]:
        found = json.loads(file.read_text())
        asked.add(tuple(answer["question"] for answer in found["answers"]))
    assert asked == {tuple(splits.eval["question"])}


def test_checkpoints_are_listed_best_first(trained, tmp_path):
    _, directory = trained
    found = records.checkpoints(directory)
    assert {one["step"] for one in found} == {2, 4, 6, 7}
    keys = [(one["accuracy"], one["mean_reward"]) for one in found]
    assert keys == sorted(keys, reverse=True)
    rows = records.lineage(directory)
    for one in found:
        [best] = rows[
            (rows["step"] == one["step"]) & (rows["rank"] == 1)
        ].to_dict("records")
        assert one["member"] == best["member"]
        assert one["low"] <= one["accuracy"] <= one["high"]
        assert one["size_mb"] > 0
    result = json.loads((directory / "result.json").read_text())
    assert result["best"] == found[0]["name"]
    # One that is being written, and one that is being deleted.
    folder = shutil.copytree(
        directory / "checkpoints", tmp_path / "checkpoints"
    )
    shutil.copytree(folder / "step_2", folder / ".part-step_9")
    (folder / "step_4" / "adapter_model.safetensors").unlink()
    steps = {one["step"] for one in records.checkpoints(tmp_path)}
    assert steps == {2, 6, 7}


def first_step(plan, splits, directory) -> tuple[int, int]:
    """Train to the end; which member made the first step, and which."""
    made = []
    of(
        plan, splits, directory,
        lambda member, step, row: made.append((member.number, step)),
    ).train()  # fmt: skip
    return made[0]


def assert_same_lineage(one, other) -> None:
    pd.testing.assert_frame_equal(records.lineage(one), records.lineage(other))


class Kill(Exception):
    """Ends the training where a kill would."""


def test_the_base_model_is_left_as_it_was(plan, splits, tmp_path, monkeypatch):
    """Members come and go on one base model; with their adapters go hooks.

    Of the checkpoints only the best and the newest stay.
    """
    monkeypatch.setattr(population, "KEPT_CHECKPOINTS", 1)
    settings = replace(plan.settings, gradient_checkpointing=True)
    one = of(replace(plan, settings=settings), splits, tmp_path)
    base, tokenizer = one.context.take_base(settings)
    one.context.leave_base(settings, (base, tokenizer))
    inputs = tokenizer.apply_chat_template(
        [splits.eval[0]["prompt"]], return_tensors="pt", return_dict=True
    )

    def seen():
        hooks = sum(len(m._forward_hooks) for m in base.modules())
        with torch.no_grad():
            return hooks, base.eval()(**inputs).logits

    hooks, logits = seen()
    one.train()
    assert seen()[0] == hooks and torch.equal(seen()[1], logits)
    assert not any("lora" in name for name, _ in base.named_modules())
    left = {one["step"] for one in records.checkpoints(tmp_path)}
    rows = records.lineage(tmp_path)
    first = rows[rows["rank"] == 1].sort_values(
        ["accuracy", "mean_reward"], ascending=False, kind="stable"
    )
    assert left == {first["step"].iloc[0], 7}


def test_a_finished_population_can_go_on(
    trained, splits, tmp_path, monkeypatch
):
    """Seven steps, then two more: as if nine had been asked for at once.

    Each copy has its parent's weights and optimiser before its first step.
    """
    the_plan, directory = trained
    longer = replace(
        the_plan, settings=replace(the_plan.settings, max_steps=9)
    )
    shutil.copytree(directory, tmp_path / "parts")
    of(longer, splits, tmp_path / "parts").train()
    inherited = []
    inherit = Population._inherit

    def watched(self, member, step):
        inherit(self, member, step)
        inherited.append(member.number)
        own, parents = (
            records.member_folder(self.directory, number)
            / folder
            / f"checkpoint-{step}"
            for number, folder in (
                (member.number, "parent"),
                (member.parent, ""),
            )
        )
        for file in ("adapter_model.safetensors", "optimizer.pt"):
            assert (own / file).read_bytes() == (parents / file).read_bytes()

    monkeypatch.setattr(Population, "_inherit", watched)
    of(longer, splits, tmp_path / "whole").train()
    assert inherited == [2, 3, 4, 5]
    assert_same_lineage(tmp_path / "parts", tmp_path / "whole")
    assert records.lineage(tmp_path / "parts")["step"].max() == 9


@pytest.mark.parametrize("at", [(1, 2), (3, 5)])
def test_a_kill_costs_one_step(trained, splits, tmp_path, at):
    """Then the lineage is that of the whole run: chance has a seed."""
    the_plan, directory = trained

    def kill(member, step, row):
        if (member.number, step) == at:
            raise Kill

    with pytest.raises(Kill):
        of(the_plan, splits, tmp_path, kill).train()
    assert first_step(the_plan, splits, tmp_path) == at
    assert_same_lineage(tmp_path, directory)
    same = ["step", "member", "reward", "loss", "kl", "learning_rate"]
    pd.testing.assert_frame_equal(
        records.metrics(tmp_path)[same], records.metrics(directory)[same]
    )


@pytest.mark.parametrize("write", ["_keep", "_inherit"])
def test_a_kill_between_generations_costs_nothing(
    trained, splits, tmp_path, monkeypatch, write
):
    """Before the new generation is noted, half of its files may be there."""
    the_plan, directory = trained
    done = getattr(Population, write)

    def killed(self, *values):
        done(self, *values)
        raise Kill

    monkeypatch.setattr(Population, write, killed)
    with pytest.raises(Kill):
        of(the_plan, splits, tmp_path).train()
    monkeypatch.undo()
    of(the_plan, splits, tmp_path).train()
    assert_same_lineage(tmp_path, directory)


def test_a_stop_saves_its_step_and_is_gone_on_from(trained, splits, tmp_path):
    the_plan, directory = trained

    def ask(member, step, row):
        if (member.number, step) == (1, 1):
            (tmp_path / "stop").touch()

    with pytest.raises(Stopped):
        of(the_plan, splits, tmp_path, ask).train()
    (tmp_path / "stop").unlink()
    # seen at the end of the next step, which is the last of its generation
    assert first_step(the_plan, splits, tmp_path) == (0, 3)
    assert_same_lineage(tmp_path, directory)
