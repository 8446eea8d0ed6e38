"""Guards against libraries that train without an error and teach nothing.

`check` looks at a trainer before its training; the callbacks watch over it
meanwhile. Each says beside it which fault of TRL, transformers, PEFT or
bitsandbytes it is for.
"""

import math

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOTrainer

from grpo_lab.errors import LabError
from grpo_lab.prompts import longest_prompt
from grpo_lab.settings import RunSettings


def keep_sampling_ours(model: PreTrainedModel) -> None:
    """Forget the sampling values that a model brings along.

    `generate` fills every value that a caller leaves at its default from the
    model's own generation config, so that a temperature of 1.0 would quietly
    become the 0.7 of Qwen2.5. Only the token ids are kept.
    """
    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
    )


def prepare(trainer: GRPOTrainer) -> None:
    """Make a trainer that was built by hand safe to train.

    TRL casts the adapters of a quantised model to bfloat16. A rate of 5e-6
    then changes about one weight in seventy, the rest is rounded away, and
    with float16 the gradient scaler crashes; so they go back to float32.
    Also adds the guard that watches whether the adapters move, and after a
    resume the right order of questions and the right learning rate.
    """
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    trainer.add_callback(AdapterGuard())
    trainer.add_callback(QuestionOrder())
    trainer.add_callback(RateInForce())
    # It prints every metric of every step; `metrics.csv` has them all.
    trainer.remove_callback(PrinterCallback)


def check(trainer: GRPOTrainer, settings: RunSettings) -> None:
    """Refuse a trainer that would run without learning what it should.

    Args:
        trainer: from `training.build_trainer`, or by hand and then `prepare`d.
        settings: the run that the trainer is meant to be.

    Raises:
        LabError: names the first fault found, and what to change.
    """
    _check_trainable(trainer.model)
    _check_four_bit(trainer.model, settings)
    _check_sampling(trainer, settings)
    prompts = trainer.train_dataset["prompt"]
    longest = longest_prompt(trainer.processing_class, prompts)
    check_context(trainer.model, longest, settings.max_completion_length)
    if len(trainer.train_dataset) < settings.prompts_per_step:
        raise LabError(
            f"There are {len(trainer.train_dataset)} training questions, "
            f"but a step takes {settings.prompts_per_step} different ones "
            "(COMPLETIONS_PER_STEP / NUM_GENERATIONS), so no step could be "
            f"made. Type TRAIN_ROWS = {settings.prompts_per_step} or more."
        )
    if trainer.args.n_gpu > 1:
        raise LabError(
            f"This process sees {trainer.args.n_gpu} GPUs and would split "
            "each batch over them, which a 4-bit model can't do. Set the "
            "environment variable CUDA_VISIBLE_DEVICES=0 before you start."
        )
    if trainer.args.eval_strategy != "no":
        raise LabError(
            "This trainer would evaluate during training, but TRL evaluates "
            "by sampling at the training temperature, and that is no "
            "accuracy. Leave eval_strategy at 'no' and use "
            "grpo_lab.evaluation, which decodes greedily."
        )


def _check_trainable(model: PreTrainedModel) -> None:
    trainable = {
        name: parameter.dtype
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not trainable or any("lora_" not in name for name in trainable):
        raise LabError(
            f"This trainer would train {len(trainable)} tensors that are not "
            "all adapters. Give it peft_config=lora_config(settings) and a "
            "base model without adapters."
        )
    low = [n for n, dtype in trainable.items() if dtype != torch.float32]
    if low:
        raise LabError(
            f"{len(low)} adapter tensors are in 16 bit, where a small "
            "learning rate is rounded away. Call guards.prepare(trainer) "
            "after you have built the trainer and before train()."
        )


def _check_four_bit(model: PreTrainedModel, settings: RunSettings) -> None:
    quantised = [
        module
        for module in model.modules()
        if type(module).__name__ == "Linear4bit"
    ]
    if settings.load_in_4bit != bool(quantised):
        wanted = "in 4 bit" if settings.load_in_4bit else "unquantised"
        raise LabError(
            f"The settings ask for a base model {wanted}, but the one that "
            "was loaded is not. Load it with models.load_policy(name, "
            f"load_in_4bit={settings.load_in_4bit})."
        )
    # On such CPUs one forward pass in eval mode repacks the weights for
    # inference, and from then on no gradient passes through them.
    if any(
        getattr(module, "support_avx512bf16_for_cpu", False)
        for module in quantised
    ):
        raise LabError(
            "On this CPU a 4-bit layer stops passing gradients after its "
            "first forward pass in eval mode. Load the model with "
            "models.load_policy, which switches that off."
        )


def _check_sampling(trainer: GRPOTrainer, settings: RunSettings) -> None:
    in_force = trainer.generation_config
    expected = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_new_tokens": settings.max_completion_length,
        "do_sample": True,
    }
    own = trainer.model.generation_config.to_diff_dict()
    for name, value in expected.items():
        found = getattr(in_force, name)
        if found != value or (name in own and own[name] != value):
            raise LabError(
                f"The rollouts would use {name}={own.get(name, found)} "
                f"instead of {value}: the model's own generation config "
                "wins. Call guards.keep_sampling_ours(model) before you "
                "build the trainer."
            )


def check_context(
    model: PreTrainedModel, longest: int, max_completion_length: int
) -> None:
    """The longest prompt and a full completion must fit the context.

    Args:
        model: the policy or its base model.
        longest, max_completion_length: both in tokens.

    Raises:
        LabError: they don't; says how long a completion may be.
    """
    context = model.config.max_position_embeddings
    if longest + max_completion_length > context:
        raise LabError(
            f"The longest prompt has {longest} tokens, and with "
            f"MAX_COMPLETION_LENGTH = {max_completion_length} that "
            f"is more than the model's context of {context}. Type "
            f"MAX_COMPLETION_LENGTH = {max(1, context - longest)} or less."
        )


class AdapterGuard(TrainerCallback):
    """Stops a run whose adapters do not move although they should.

    A wrong dtype, a repacked 4-bit layer or a frozen tensor lets training go
    on without an error and without learning. At the first optimiser step
    that has a learning rate above 0 and a gradient that is finite and not
    all 0, every layer that carries an adapter must change.
    """

    def __init__(self) -> None:
        self.before: dict[str, list[torch.Tensor]] = {}
        self.done = False

    def on_pre_optimizer_step(
        self, args, state, control, model=None, optimizer=None, **kwargs
    ) -> None:
        """Remember the adapters, if this step ought to change them."""
        if self.done:
            return
        layers = adapter_layers(model)
        gradients = {
            name: [t.grad for t in tensors if t.grad is not None]
            for name, tensors in layers.items()
        }
        silent = [name for name, found in gradients.items() if not found]
        if silent:
            raise LabError(_not_learning("have no gradient", silent))
        has_rate = any(group["lr"] > 0 for group in optimizer.param_groups)
        every = [one for found in gradients.values() for one in found]
        # In float16 the scaler skips a step whose gradients overflow.
        finite = all(gradient.isfinite().all() for gradient in every)
        has_gradient = any(gradient.any() for gradient in every)
        if has_rate and finite and has_gradient:
            self.before = {
                name: [tensor.detach().clone() for tensor in tensors]
                for name, tensors in layers.items()
            }

    def on_optimizer_step(
        self, args, state, control, model=None, **kwargs
    ) -> None:
        """Compare with what was remembered."""
        if self.done or not self.before:
            return
        still = [
            name
            for name, tensors in adapter_layers(model).items()
            if all(
                torch.equal(old, new)
                for old, new in zip(self.before[name], tensors, strict=True)
            )
        ]
        if still:
            raise LabError(_not_learning("did not change", still))
        self.before, self.done = {}, True


def _not_learning(what: str, layers: list[str]) -> str:
    return (
        f"The adapters of {len(layers)} layers {what} in an optimiser step "
        f"that should have trained them ({layers[0]}, ...), so this run "
        "would learn nothing. Load the model with models.load_policy and "
        "build the trainer with training.build_trainer; if you did, see "
        "'The adapters do not change' in TROUBLESHOOTING.md."
    )


def stop_on_nan(row: dict, fp16: bool) -> None:
    """Stop a run whose step ended in something that is no number.

    Args:
        row: the step's metrics; see `training.METRICS`.
        fp16: whether it computes in float16, where a gradient may overflow
            without harm.

    Raises:
        LabError: says which of them, and the usual causes.
    """
    for name in ["reward", "loss"] + ([] if fp16 else ["grad_norm"]):
        value = row[name]
        if value is None or not math.isfinite(value):
            raise LabError(
                f"The {name} of step {row['step']} is {value}, so every "
                "later step would be lost. A learning rate that is too high "
                "is the usual cause, a reward function that returns no "
                "number the other: lower the rate, or test the reward on a "
                "few completions."
            )


def adapter_layers(model: PreTrainedModel) -> dict[str, list[torch.Tensor]]:
    """The trainable tensors of each layer that carries an adapter."""
    layers: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.split(".lora_")[0], []).append(parameter)
    return layers


class QuestionOrder(TrainerCallback):
    """Takes up the order of the questions where a checkpoint left it.

    TRL draws a new order for each pass over the data from one generator,
    which no checkpoint holds, so that a run resumed in its second pass would
    see the order of the first once more.
    """

    def on_train_begin(
        self, args, state, control, train_dataloader=None, **kwargs
    ) -> None:
        """Draw the orders of the passes that are over."""
        for _ in range(int(state.epoch)):
            next(iter(train_dataloader.batch_sampler.sampler))


class RateInForce(TrainerCallback):
    """Sees that the learning rate of the settings is the one that trains.

    A checkpoint brings its optimiser and its schedule along, and with them
    the rate of the run that wrote it, whatever the new settings say.
    """

    def on_train_begin(
        self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs
    ) -> None:
        """Set the rate in the optimiser and in the schedule."""
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)
        if not hasattr(schedule, "lr_lambdas"):
            return  # of a trainer built by hand: no course that is known
        count = len(schedule.base_lrs)
        schedule.base_lrs = [args.learning_rate] * count
        rates = [
            args.learning_rate * factor(schedule.last_epoch)
            for factor in schedule.lr_lambdas
        ]
        schedule._last_lr = rates
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["initial_lr"], group["lr"] = args.learning_rate, rate
