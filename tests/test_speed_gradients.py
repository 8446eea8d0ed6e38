"""Gradients: each optimisation alone has those of plain TRL."""

import dataclasses

import pytest
import torch
from speed_helpers import (
    FLOAT32,
    POCKET,
    assert_same_gradients,
    batch_of,
    built,
    distance,
    gradients,
    pocket_settings,
)

from grpo_lab import models, training
from grpo_lab.profiles import RunSettings
from grpo_lab.speed import optimizations
from grpo_lab.speed import trainer as speed

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    "chosen",
    [
        ("shared_prefix",),
        ("zero_advantage",),
        tuple(optimizations.OPTIMIZATIONS),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("model", POCKET)
@pytest.mark.check
def test_gradients_are_those_of_trl(model, chosen, questions, tmp_path):
    settings = pocket_settings(model, temperature=0.8)
    trainer = built(settings, questions.train, tmp_path)
    batch = batch_of(trainer, questions.train)
    trainer.optimizations = frozenset()
    loss, expected = gradients(trainer, batch)
    trainer.optimizations = frozenset(chosen)
    with_optimizations, found = gradients(trainer, batch)
    assert with_optimizations == pytest.approx(loss, abs=FLOAT32)
    assert_same_gradients(found, expected)


def test_with_dropout_each_completion_has_its_own(questions, tmp_path):
    settings = pocket_settings(lora_dropout=0.1)
    trainer = built(settings, questions.train, tmp_path)
    batch = batch_of(trainer, questions.train)
    trainer.optimizations = frozenset(["shared_prefix"])
    torch.manual_seed(0)
    _, found = gradients(trainer, batch)
    trainer.optimizations = frozenset()
    torch.manual_seed(0)
    _, expected = gradients(trainer, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_in_16_bit_a_run_works_and_nearly_agrees(
    questions, tmp_path, monkeypatch
):
    """What a GPU does, as far as a CPU can show it: autocast and bfloat16.

    How much 16 bit rounds away differs between CPUs, so ours is measured by
    TRL's own distance from the gradient in 32 bit.
    """
    settings = pocket_settings(max_steps=2)
    trainer = built(settings, questions.train, tmp_path / "32 bit")
    batch = batch_of(trainer, questions.train)
    trainer.optimizations = frozenset()
    _, exact = gradients(trainer, batch)
    adapter = weights_of(trainer)
    monkeypatch.setattr(models, "compute_dtype", lambda: torch.bfloat16)
    chosen = optimizations.without(["dequantised_copy"])
    settings = dataclasses.replace(settings, optimizations=chosen)
    trainer = built(settings, questions.train, tmp_path / "16 bit")
    assert trainer.args.bf16
    trainer.model.load_state_dict(adapter, strict=False)
    _, found = gradients(trainer, batch)
    trainer.optimizations = frozenset()
    _, expected = gradients(trainer, batch)
    assert 0 < distance(found, exact) < 2 * distance(expected, exact) + 0.01
    trainer.optimizations = frozenset(chosen)
    training.train(trainer)
    rows = training.read_metrics(tmp_path / "16 bit" / "metrics.csv")
    assert len(rows) == 2 and all(row["entropy"] > 0 for row in rows)


def tokens_read(trainer, batch) -> int:
    """Tokens that pass the first layer when a loss is computed."""
    count = []
    embeddings = trainer.model.get_base_model().get_input_embeddings()
    hook = embeddings.register_forward_hook(
        lambda module, inputs, output: count.append(inputs[0].numel())
    )
    gradients(trainer, batch)
    hook.remove()
    return sum(count)


def test_each_optimization_of_the_gradient_saves_work(questions, tmp_path):
    trainer = built(pocket_settings(), questions.train, tmp_path)
    batch = batch_of(trainer, questions.train)
    read = {}
    for chosen in ((), ("zero_advantage",), ("shared_prefix",)):
        trainer.optimizations = frozenset(chosen)
        read[chosen] = tokens_read(trainer, batch)
    assert read["zero_advantage",] <= read[()] / 2
    assert read["shared_prefix",] < 0.6 * read[()]


def test_where_nothing_teaches_the_gradients_are_zeros(questions, tmp_path):
    """No gradient at all would stop the optimiser's decay, and our guard."""
    trainer = built(pocket_settings(), questions.train, tmp_path)
    batch = batch_of(trainer, questions.train, teaches=[False] * 4)
    loss, found = gradients(trainer, batch)
    assert loss == 0
    assert found and not any(tensor.any() for tensor in found.values())
    trainer.optimizations = frozenset()
    plain_loss, plain = gradients(trainer, batch)
    assert plain_loss == 0
    assert not any(tensor.any() for tensor in plain.values())


def test_with_a_kl_penalty_every_completion_counts(questions, tmp_path):
    settings = pocket_settings(beta=0.04)
    trainer = built(settings, questions.train, tmp_path)
    # The settings have switched it off, so that it is forced here.
    trainer.optimizations = frozenset(["zero_advantage", "shared_prefix"])
    batch = batch_of(trainer, questions.train)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    with torch.no_grad(), trainer.model.disable_adapter():
        batch["ref_per_token_logps"] = (
            trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, width
            )[0]
        )
    _, found = gradients(trainer, batch)
    trainer.optimizations = frozenset()
    _, expected = gradients(trainer, batch)
    assert_same_gradients(found, expected)


def test_other_losses_keep_all_rows(questions, tmp_path):
    """Their divisor counts the rows that they see."""
    trainer = built(pocket_settings(), questions.train, tmp_path)
    batch = batch_of(trainer, questions.train)
    for kind in ("grpo", "bnpo", "dr_grpo"):
        trainer.loss_type = kind
        trainer.optimizations = frozenset(optimizations.OPTIMIZATIONS)
        _, found = gradients(trainer, batch)
        trainer.optimizations = frozenset()
        _, expected = gradients(trainer, batch)
        assert_same_gradients(found, expected)


# --- Every step, and the end of a run ----------------------------------------
# In float64, so that rounding can't hide a fault, and with plain gradient
# descent: AdamW turns an element whose gradient is near 0 into a step of the
# size of the rate, so that the rounding of one CPU or another decides it.

FLOAT64 = 1e-5
"""Most that two ways to the same float64 result may differ.

Measured, under four instruction sets: 1.2e-7 for the gradient of a step, 6e-7
for the end of a run; not 1e-15, since the models normalise in float32 all the
same. The faults below give 0.17 and more.
"""

BOTH = ("shared_prefix", "zero_advantage")


def exact_trainer(settings, rows, run_dir):
    """A trainer that computes in float64 all that the model lets it."""
    trainer = built(settings, rows, run_dir, moved=False)
    trainer.model.double()
    return trainer


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in trainer.model.named_parameters()
        if tensor.requires_grad
    }


def sum_of_gradients(trainer, batches) -> dict[str, torch.Tensor]:
    """The gradient of a step that takes its batch in several parts."""
    parts = [gradients(trainer, batch)[1] for batch in batches]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


@dataclasses.dataclass
class PlainRun:
    """A run by plain TRL: what each step began with, and how it ended."""

    settings: RunSettings
    rows: object
    weights: list[dict]
    batches: list[list[dict]]
    end: dict
    rewards: list[float]

    def moved(self, end: dict) -> dict:
        """How far a run that began like this one has moved its weights."""
        return {name: end[name] - self.weights[0][name] for name in end}


@pytest.fixture(scope="module", params=[16, 4], ids="micro_batch={}".format)
def plain_run(request, questions, tmp_path_factory) -> PlainRun:
    """Three steps of plain TRL, all that it hands to its loss recorded."""
    settings = pocket_settings(
        micro_batch=request.param, optimizations=(), load_in_4bit=False,
        optimizer="sgd", lr_scheduler="constant", max_grad_norm=1.0,
    )  # fmt: skip
    settings = dataclasses.replace(settings, learning_rate=0.3)
    place = tmp_path_factory.mktemp("plain")
    trainer = exact_trainer(settings, questions.train, place)
    run = PlainRun(settings, questions.train, [], [], {}, [])
    compute = trainer.compute_loss

    def record(model, inputs, *args, **kwargs):
        parts = settings.accumulation_steps
        if not run.batches or len(run.batches[-1]) == parts:
            run.weights.append(weights_of(trainer))
            run.batches.append([])
        run.batches[-1].append(
            {
                name: value.clone() if torch.is_tensor(value) else value
                for name, value in inputs.items()
            }
        )
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = record
    run.rewards = trained(trainer)
    run.end = weights_of(trainer)
    assert len(run.batches) == 3
    # Else a step would show nothing: every group earned the same.
    assert all(
        any(batch["advantages"].any() for batch in batches)
        for batches in run.batches
    )
    return run


def trained(trainer) -> list[float]:
    """Train; the mean reward of each step."""
    training.train(trainer)
    path = f"{trainer.args.output_dir}/metrics.csv"
    return [row["reward"] for row in training.read_metrics(path)]


def largest_step_distance(plain: PlainRun, chosen, run_dir) -> float:
    """Of the gradient of any step from TRL's, from the same weights."""
    settings = dataclasses.replace(plain.settings, optimizations=chosen)
    trainer = exact_trainer(settings, plain.rows, run_dir)
    distances = []
    for weights, batches in zip(plain.weights, plain.batches, strict=True):
        trainer.model.load_state_dict(weights, strict=False)
        trainer.optimizations = frozenset()
        expected = sum_of_gradients(trainer, batches)
        trainer.optimizations = frozenset(chosen)
        found = sum_of_gradients(trainer, batches)
        distances.append(distance(found, expected))
    return max(distances)


def distance_at_the_end(plain: PlainRun, chosen, run_dir) -> float:
    """Of a run's change of the weights from that of TRL's run."""
    settings = dataclasses.replace(plain.settings, optimizations=chosen)
    trainer = exact_trainer(settings, plain.rows, run_dir)
    rewards = trained(trainer)
    found = plain.moved(weights_of(trainer))
    if distance(found, plain.moved(plain.end)) < FLOAT64:
        assert rewards == plain.rewards
    return distance(found, plain.moved(plain.end))


@pytest.mark.parametrize("chosen", [BOTH[:1], BOTH[1:], BOTH], ids="+".join)
def test_every_step_has_trl_s_gradient(plain_run, chosen, tmp_path):
    assert largest_step_distance(plain_run, chosen, tmp_path) < FLOAT64


def test_a_whole_run_ends_where_trl_s_does(plain_run, tmp_path):
    assert distance_at_the_end(plain_run, BOTH, tmp_path) < FLOAT64


def masked_token(scored):
    """The first token of each completion is taken for padding."""

    def broken(model, ids, mask, unique, prompt_index):
        mask = mask.clone()
        mask[:, unique.shape[1]] = 0
        return scored(model, ids, mask, unique, prompt_index)

    return "_scored", broken


def other_prompts(scored):
    """Each completion is scored behind the prompt of another one."""

    def broken(model, ids, mask, unique, prompt_index):
        return scored(model, ids, mask, unique, prompt_index.roll(1))

    return "_scored", broken


def row_too_many(rows):
    """One row more is left out than have an advantage of 0."""

    def broken(inputs, which):
        which = which.clone()
        which[which.nonzero()[0]] = False
        return rows(inputs, which)

    return "_rows", broken


def swapped_advantages(rows):
    """Each completion has the advantage of another one."""

    def broken(inputs, which):
        found = rows(inputs, which)
        return found | {"advantages": found["advantages"].roll(1)}

    return "_rows", broken


FAULTS = {
    masked_token: speed._scored,
    other_prompts: speed._scored,
    row_too_many: speed._rows,
    swapped_advantages: speed._rows,
}
"""Ways to break an optimisation, and what each of them breaks."""


@pytest.fixture(params=FAULTS, ids=lambda fault: fault.__name__)
def fault(request, monkeypatch):
    """The optimisations, broken on purpose."""
    name, broken = request.param(FAULTS[request.param])
    monkeypatch.setattr(speed, name, broken)


@pytest.mark.parametrize("plain_run", [16], indirect=True)
def test_a_fault_shows_in_a_step_and_at_the_end(plain_run, fault, tmp_path):
    """Even float32's tolerance would see it."""
    in_a_step = largest_step_distance(plain_run, BOTH, tmp_path / "steps")
    at_the_end = distance_at_the_end(plain_run, BOTH, tmp_path / "end")
    assert min(in_a_step, at_the_end) > 100 * FLOAT32
