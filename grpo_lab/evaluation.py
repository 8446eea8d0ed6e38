"""Held-out accuracy: greedy answers, intervals, and paired comparisons.

Accuracy is not the training reward. It is measured on questions that no run
trained on, with the prompt of the training, decoding greedily, and it reads
the answer by the "flexible" policy of `rewards.answers`, before and after
training alike: a base model that answers rightly without tags gets its due,
so that a gain is a gain in solving and not only in writing tags. How many
answers are in the requested format is reported beside it.
"""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from scipy import stats
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json
from grpo_lab.prompts import TEMPLATE_VALUES
from grpo_lab.speed import decoding
from grpo_lab.speed.dequantised import generation_model
from rewards import (
    is_correct,
    is_equivalent,
    soft_format_reward,
    think_format_reward,
)

READING = "flexible"
"""How evaluation reads an answer; see `rewards.answers`."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Grader:
    """How an answer is judged.

    Attributes:
        correct: called with a completion, its gold and `READING`; True if
            the answer equals the gold, None if the gold can't be read.
        format_ok: the format reward of the tags that the prompt asks for.
        needs: what a gold must look like, and what to type to have such.
    """

    correct: Callable[[str, str, str], bool | None]
    format_ok: Callable[..., list[float]]
    needs: str


NUMBERS = Grader(
    is_correct,
    soft_format_reward,
    "It must hold a number, as GSM8K's do after '####'. "
    "Type DATA = 'gsm8k' or DATA = 'pocket'.",
)
"""For number golds and <reasoning> tags: the five-part rewards' pair."""

LATEX = Grader(
    is_equivalent,
    think_format_reward,
    "It must be maths, as NuminaMath's is in its \\boxed{}. "
    "Type DATA = 'numina_math_tir' or DATA = 'pocket_latex'.",
)
"""For any golds, LaTeX too, and <think> tags: the cookbook pair's."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer to one held-out question.

    Attributes:
        question, gold: the row.
        text: the completion, without special tokens.
        correct: its final answer equals the gold.
        format_ok: it has the asked-for tags, each once and in order.
        tokens: its length, the end-of-turn token included.
        truncated: it was cut at the length limit.
    """

    question: str
    gold: str
    text: str
    correct: bool
    format_ok: bool
    tokens: int
    truncated: bool


@dataclass(frozen=True)
class Evaluation:
    """All answers of one model to the held-out questions, in their order."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def correct(self) -> int:
        """Number of right answers."""
        return sum(answer.correct for answer in self.answers)

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.correct / len(self.answers)

    @property
    def rank(self) -> tuple:
        """The better of two has the higher one.

        That with more right answers; between equals with more in the
        requested format, then with shorter ones.
        """
        return self.correct, self.format_ok_share, -self.mean_tokens

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy."""
        return wilson_interval(self.correct, len(self.answers))

    @property
    def format_ok_share(self) -> float:
        """Share of answers in the asked-for tags, 0 to 1."""
        return self._mean("format_ok")

    @property
    def clipped_ratio(self) -> float:
        """Share of answers cut at the length limit, 0 to 1."""
        return self._mean("truncated")

    @property
    def mean_tokens(self) -> float:
        """Mean length of an answer in tokens."""
        return self._mean("tokens")

    @property
    def seconds_per_answer(self) -> float:
        """Time of an answer, grading included; answers come in batches."""
        return self.seconds / len(self.answers)

    def _mean(self, name: str) -> float:
        values = [getattr(answer, name) for answer in self.answers]
        return sum(values) / len(values)

    def save(self, path: Path) -> None:
        """Write all answers as JSON, whole or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "Evaluation | None":
        """What `save` wrote; None if there is no such file."""
        saved = read_json(path)
        if saved is None:
            return None
        answers = tuple(Answer(**answer) for answer in saved["answers"])
        return cls(answers, saved["seconds"])


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    max_new_tokens: int,
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
    grader: Grader = NUMBERS,
    optimizations: Collection[str] = (),
) -> Evaluation:
    """Answer every held-out question greedily and grade the answers.

    Args:
        model: a base model or one with an adapter; left in the mode
            (training or not) that it came in.
        tokenizer: its tokenizer, padding on the left.
        rows: columns `prompt` (messages), `question`, `answer` (gold).
        max_new_tokens: the training's limit on completion tokens.
        batch_size: questions answered at once.
        progress: called with questions done and questions in all.
        grader: how answers are judged.
        optimizations: what makes it faster, from `memory.resolve`.

    Raises:
        LabError: a gold can't be read, so nothing can be graded.
    """
    started, answers = time.monotonic(), []
    was_training = model.training
    model.eval()
    writes = (
        generation_model(model, optimizations)
        if "decode_loop" in optimizations
        else model
    )
    for start in range(0, len(rows), batch_size):
        batch = rows.select(range(start, min(start + batch_size, len(rows))))
        completions = generate(
            writes,
            tokenizer,
            batch["prompt"],
            max_new_tokens,
            optimizations=optimizations,
        )
        answers += [
            grade(row["question"], row["answer"], *completion, grader)
            for row, completion in zip(batch, completions, strict=True)
        ]
        if progress:
            progress(len(answers), len(rows))
    model.train(was_training)
    return Evaluation(tuple(answers), round(time.monotonic() - started, 2))


def evaluate_snapshots(
    base: PreTrainedModel,
    snapshots: dict[int, Path],
    tokenizer: PreTrainedTokenizerBase,
    rows: Dataset,
    max_new_tokens: int,
    batch_size: int,
    grader: Grader = NUMBERS,
    optimizations: Collection[str] = (),
) -> dict[int, Evaluation]:
    """How good a policy was along its training.

    Args:
        base: the base model without an adapter; it comes back so.
        snapshots: folders of adapters by optimiser step, at least one; see
            `training.snapshots`.
        tokenizer, rows, max_new_tokens, batch_size, grader, optimizations: as
            for `evaluate`.

    Returns:
        An evaluation for each step, that of the base model at step 0 first.
    """
    values = (tokenizer, rows, max_new_tokens, batch_size)
    judging: dict[str, Any] = {
        "grader": grader,
        "optimizations": optimizations,
    }
    found = {0: evaluate(base, *values, **judging)}
    for step, folder in snapshots.items():
        policy = PeftModel.from_pretrained(base, folder)
        found[step] = evaluate(policy, *values, **judging)
        base = policy.unload()
    return found


def grade(
    question: str,
    gold: str,
    text: str,
    tokens: int,
    truncated: bool,
    grader: Grader = NUMBERS,
) -> Answer:
    """One completion as a graded `Answer`.

    Raises:
        LabError: the gold can't be read, so nothing can be graded.
    """
    correct = grader.correct(text, gold, READING)
    if correct is None:
        raise LabError(
            f"The gold {gold[-60:]!r} can't be compared with an answer. "
            f"{grader.needs}"
        )
    return Answer(
        question=question,
        gold=gold,
        text=text,
        correct=correct,
        format_ok=grader.format_ok([text])[0] > 0,
        tokens=tokens,
        truncated=truncated,
    )


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[dict]],
    max_new_tokens: int,
    temperature: float = 0.0,
    optimizations: Collection[str] = (),
) -> list[tuple[str, int, bool]]:
    """Completions of some conversations, through the chat template.

    Args:
        temperature: 0 for greedy decoding, else samples are drawn.
        optimizations: with "decode_loop" the loop of `speed.decoding` writes
            them, else transformers' `generate`. Greedy ones are the same.

    Returns:
        For each prompt the text, its length in tokens, and whether it was
        cut at the limit.
    """
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if _is_list(ends) else [ends])}
    template = {
        "add_generation_prompt": True,
        "return_dict": True,
        **TEMPLATE_VALUES,
    }
    if "decode_loop" in optimizations:
        new_tokens = decoding.decode(
            model,
            tokenizer.apply_chat_template(list(prompts), **template)[
                "input_ids"
            ],
            max_new_tokens,
            ends - {None},
            decoding.Sampling(temperature) if temperature else decoding.GREEDY,
            optimizations,
        ).ids
        return [_decode(ids, tokenizer, ends) for ids in new_tokens]
    inputs = tokenizer.apply_chat_template(
        list(prompts), padding=True, return_tensors="pt", **template
    ).to(model.device)
    # Set every sampling value, for a model brings its own along.
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": 1.0}
        if temperature
        else {"do_sample": False, "temperature": None, "top_p": None}
    )
    output = model.generate(
        **inputs,
        **sampling,
        top_k=0 if temperature else None,
        max_new_tokens=max_new_tokens,
        repetition_penalty=1.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    new_tokens = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [_decode(ids, tokenizer, ends) for ids in new_tokens]


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _decode(
    ids: list[int], tokenizer: PreTrainedTokenizerBase, ends: set[int]
) -> tuple[str, int, bool]:
    length = next(
        (at + 1 for at, token in enumerate(ids) if token in ends), None
    )
    kept = ids[:length]
    text = tokenizer.decode(kept, skip_special_tokens=True)
    return text, len(kept), length is None


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson, 1927, JASA 22, 209-212).

    Unlike plus or minus two standard errors it stays within 0 and 1 and
    keeps its coverage near both ends.
    """
    interval = stats.binomtest(successes, total).proportion_ci(
        confidence_level=CONFIDENCE, method="wilson"
    )
    return float(interval.low), float(interval.high)


@dataclass(frozen=True)
class Comparison:
    """Two models on the same questions.

    Attributes:
        gained: questions that only the second answered rightly.
        lost: questions that only the first answered rightly.
        total: questions in all.

    What "rightly" means is what `compare` was asked to compare.
    """

    gained: int
    lost: int
    total: int

    @property
    def difference(self) -> float:
        """Share of the second minus that of the first, -1 to 1."""
        return (self.gained - self.lost) / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the paired difference.

        The adjusted Wald interval for paired proportions of Bonett and Price
        (2012, J. Educ. Behav. Stat. 37, 479-488): one is added to each of
        the two counts that differ.
        """
        total = self.total + 2
        gained, lost = (self.gained + 1) / total, (self.lost + 1) / total
        middle = gained - lost
        variance = (gained + lost - middle**2) / total
        half = stats.norm.ppf(0.5 + CONFIDENCE / 2) * math.sqrt(variance)
        return float(middle - half), float(middle + half)

    @property
    def p_value(self) -> float:
        """Exact McNemar test (1947): can chance explain the difference?

        Under no difference, a question answered differently is as likely a
        gain as a loss, so the gains are binomial.
        """
        differing = self.gained + self.lost
        if not differing:
            return 1.0
        return float(stats.binomtest(self.gained, differing).pvalue)

    def __str__(self) -> str:
        """The counts and the test in words, for a sentence."""
        return (
            f"they answer {self.gained + self.lost} of {self.total} "
            f"questions differently, {self.gained} to {self.lost} "
            f"(exact McNemar p = {self.p_value:.2g})"
        )


def compare(
    first: Evaluation, second: Evaluation, by: str = "correct"
) -> Comparison:
    """Pair two evaluations question by question.

    Args:
        by: what counts, "correct", or "format_ok" for the form.

    Raises:
        ValueError: they are not about the same questions in one order.
    """
    pairs = list(zip(first.answers, second.answers, strict=True))
    if any(one.question != two.question for one, two in pairs):
        raise ValueError("The two evaluations are about other questions.")
    marks = [(getattr(one, by), getattr(two, by)) for one, two in pairs]
    return Comparison(
        gained=sum(two > one for one, two in marks),
        lost=sum(one > two for one, two in marks),
        total=len(marks),
    )
