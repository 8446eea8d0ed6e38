"""From an adapter to answers: merge it, check that, ask the server of it.

A server can't answer from an adapter alone, so `merge` writes the policy as
plain 16-bit weights and `check_merged` asks both the same questions. What
`deployments` serves, an `Agent` asks with the prompt of the training.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_lab.arena.deployments import AGAIN, check_model
from grpo_lab.errors import LabError, first_line
from grpo_lab.evaluation import (
    NUMBERS,
    Evaluation,
    Grader,
    compare,
    evaluate,
)
from grpo_lab.memory import free_memory
from grpo_lab.models import compute_dtype, load_policy
from grpo_lab.prompts import TEMPLATE_VALUES, messages

MAX_NEW_TOKENS = 512
"""Tokens of an answer, unless the caller or the context says less."""

ANSWER_SECONDS = 600
"""How long an agent waits for the next piece of an answer."""


# --- Merging ----------------------------------------------------------------


def merged_dtype() -> torch.dtype:
    """The 16-bit type that merged weights are stored in.

    Returns:
        bfloat16 on a GPU that computes in it, else float16.

    Measured with adapters of the pocket models: float16 stores a policy
    almost exactly (its rounding is 0.2 to 19 % of the update), bfloat16, with
    three bits less, misses 2 to 154 % of it. Through either, the number of
    right answers in 400 changed by one at most. A model that was made in
    bfloat16 may overflow in float16, however, and then answers nothing but
    "!", so what was trained in bfloat16 is stored in it.
    """
    dtype = compute_dtype()
    return torch.float16 if dtype == torch.float32 else dtype


def merge(model: str, adapter: Path, target: Path) -> None:
    """Write a policy as one folder of 16-bit weights that can be served.

    The adapter goes into the 16-bit base, not into the 4-bit one that it was
    trained on, whose rounding would stay in the weights; whether it still
    answers as it did is for `check_merged` to say.

    Args:
        model: the base model, as for `models.load_policy`.
        adapter: folder of the adapter.
        target: folder to write, whole or not at all; replaced if it exists.

    Raises:
        LabError: the base can't be loaded, the adapter is not one of it, or
            the disk is full.
    """
    adapter, target = Path(adapter), Path(target)
    if not (adapter / "adapter_config.json").is_file():
        raise LabError(
            f"{adapter} holds no adapter (adapter_config.json is missing). "
            "Choose another checkpoint to deploy."
        )
    base, tokenizer = load_policy(model, load_in_4bit=False)
    try:
        policy = PeftModel.from_pretrained(base, adapter)
        merged = policy.merge_and_unload(safe_merge=True)
    except torch.OutOfMemoryError as error:
        raise LabError(
            f"The GPU's memory is not enough to merge {adapter} into {model} "
            "in 16 bit. Stop what else uses the GPU, such as a training or "
            "another deployment, then deploy the agent again."
        ) from error
    except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise LabError(
            f"The adapter in {adapter} could not be merged into {model}: "
            f"{first_line(error)} It is broken, or was trained on another "
            "model. Choose another checkpoint, or that base model."
        ) from error
    merged.to(merged_dtype())
    merged.generation_config = greedy_defaults(merged, tokenizer)
    tokenizer.response_template = plain_text(tokenizer)
    _save(merged, tokenizer, target)


def greedy_defaults(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """A generation config without the sampling values of the base model.

    A server takes the values that a request leaves out from this file, and
    Qwen's, for example, holds a repetition penalty that no request names.
    """
    config = model.generation_config
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id or tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def plain_text(tokenizer: PreTrainedTokenizerBase) -> dict:
    """A response template by which an answer is text and nothing else.

    Left alone, `transformers serve` takes what a Qwen model writes between
    <think> and </think> out of the answer, and white space around it. The
    training and the evaluation see all of it but special tokens.
    """
    special = [
        str(token)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special
    ]
    text = {
        "content": "text",
        "content_args": {"strip": False},
        "close": special,
        "repeats": True,
        "join": "",
    }
    # The answer starts where the prompt ends.
    return {"start_anchor_pattern": r"\Z", "fields": {"content": text}}


def _save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path
) -> None:
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except (OSError, SafetensorError) as error:
        raise LabError(
            f"The merged model could not be written to {target}: "
            f"{first_line(error)} Free some space, then deploy again."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --- Checking ---------------------------------------------------------------


def check_merged(
    model: str,
    load_in_4bit: bool,
    adapter: Path,
    merged: Path,
    rows: Dataset,
    max_new_tokens: int,
    batch_size: int,
    grader: Grader = NUMBERS,
) -> dict:
    """Ask an adapter and the weights it was merged into the same questions.

    Args:
        model: the base model of the adapter.
        load_in_4bit: whether it was trained on that model in 4 bit.
        adapter: folder of the adapter.
        merged: folder that `merge` wrote.
        rows, max_new_tokens, batch_size, grader: as for
            `evaluation.evaluate`.

    Returns:
        The number of `questions`; how many of them were answered rightly
        before and after, `adapter_correct` and `merged_correct`; `same_text`,
        how many answers are the same word for word; and whether the merged
        weights are `worse` than chance explains (95 %).

    Raises:
        LabError: a model can't be loaded, or a gold can't be read.
    """

    def answers(policy, tokenizer) -> Evaluation:
        return evaluate(
            policy, tokenizer, rows, max_new_tokens, batch_size, grader=grader
        )

    base, tokenizer = load_policy(model, load_in_4bit)
    before = answers(PeftModel.from_pretrained(base, adapter), tokenizer)
    del base
    free_memory()
    # Computes as the server does, see `deployments.command`.
    after = answers(*load_policy(str(merged), load_in_4bit=False))
    free_memory()
    pair = compare(before, after)
    pairs = zip(before.answers, after.answers, strict=True)
    return {
        "questions": pair.total,
        "adapter_correct": before.correct,
        "merged_correct": after.correct,
        "same_text": sum(one.text == other.text for one, other in pairs),
        "worse": pair.interval[1] < 0,
    }


# --- Asking -----------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One answer.

    Attributes:
        completion: its text.
        truncated: it was cut at its limit; also said of an answer that ends
            with the very last token that it may have, which no server tells
            from one that goes on.
        tokens: its length.
    """

    completion: str
    truncated: bool
    tokens: int


@dataclass(frozen=True)
class Reply:
    """What an agent says to one prompt; `results` holds one answer."""

    prompt: str
    results: tuple[Result, ...]

    @property
    def truncated(self) -> bool:
        """Whether the answer was cut at its limit."""
        return self.results[0].truncated


class Agent:
    """Asks a served policy as it was trained: same prompt, greedy answers.

    Args:
        url: `Server.url`.
        model: folder that is served, `Server.folder`.
        system_prompt: the one that the policy was trained with.
        context: tokens that a prompt and its answer may have together; the
            model's own limit counts where it is less.
        max_new_tokens: tokens that an answer may have, at least 1.

    Raises:
        LabError: the folder is gone.

    Attributes:
        last: the latest `Reply`, also of a stream that came to its end.

    Example:
        >>> with Agent(server.url, server.folder, PROMPT, 512) as agent:
        ...     reply = agent.generate("What is 2 + 3?")
        >>> reply.results[0].completion
    """

    def __init__(
        self,
        url: str,
        model: str,
        system_prompt: str,
        context: int,
        max_new_tokens: int = MAX_NEW_TOKENS,
    ) -> None:
        check_model(Path(model))
        limit = AutoConfig.from_pretrained(model).max_position_embeddings
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.url = url
        self.model = str(model)
        self.system_prompt = system_prompt
        self.context = min(context, limit)
        self.max_new_tokens = max_new_tokens
        self.last: Reply | None = None
        self._client = openai.OpenAI(
            base_url=url,
            api_key="not-needed",
            max_retries=0,
            timeout=ANSWER_SECONDS,
            # A proxy must not catch what stays on this machine.
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def __enter__(self) -> "Agent":
        """The agent itself; its connections close with the block."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the connections; the server goes on."""
        self._client.close()

    def generate(
        self, prompt: str, max_new_tokens: int | None = None
    ) -> Reply:
        """The whole answer to a question.

        Args:
            prompt: the question, as text.
            max_new_tokens: in place of the agent's own limit.

        Raises:
            LabError: the question is empty or too long, the limit is below
                1, or the server does not answer.
        """
        for _ in self.generate_stream(prompt, max_new_tokens):
            pass
        assert self.last is not None
        return self.last

    def generate_stream(
        self, prompt: str, max_new_tokens: int | None = None
    ) -> Iterator[str]:
        """The answer in pieces, as the model writes them.

        Whether it was cut at its limit stands in `last.truncated` when the
        last piece has come. To leave off early ends it on the server too.

        Args, Raises: as for `generate`; a server that is gone raises where
            the next piece is taken.
        """
        self.last = None
        return self._pieces(prompt, self._request(prompt, max_new_tokens))

    def _request(self, prompt: str, max_new_tokens: int | None) -> dict:
        limit = self.max_new_tokens
        if max_new_tokens is not None:
            limit = max_new_tokens
        if limit < 1:
            raise LabError(
                f"max_new_tokens is {limit}, but an answer needs at least 1 "
                f"token. Type for example max_new_tokens={MAX_NEW_TOKENS}."
            )
        if not prompt.strip():
            raise LabError(
                "The prompt is empty, so there is nothing to answer. Type a "
                "question such as 'What is 12 times 7?'."
            )
        chat = messages(prompt, self.system_prompt)
        rendered = self.tokenizer.apply_chat_template(
            chat,
            add_generation_prompt=True,
            return_dict=True,
            **TEMPLATE_VALUES,
        )
        room = self.context - len(rendered["input_ids"])
        if room < 1:
            raise LabError(
                f"The prompt has {len(rendered['input_ids'])} tokens with its "
                f"template, and the context of the model holds {self.context}"
                ": no room for an answer. Type a shorter prompt."
            )
        return {
            "model": self.model,
            "messages": chat,
            "temperature": 0,
            "max_tokens": min(limit, room),
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {"chat_template_kwargs": TEMPLATE_VALUES},
        }

    def _pieces(self, prompt: str, request: dict) -> Iterator[str]:
        pieces, finish, tokens = [], None, 0
        try:
            with self._client.chat.completions.create(**request) as stream:
                for chunk in stream:
                    if chunk.usage:  # vLLM counts in a chunk without a choice
                        tokens = chunk.usage.completion_tokens
                    for choice in chunk.choices:
                        finish = choice.finish_reason or finish
                        if choice.delta.content:
                            pieces.append(choice.delta.content)
                            yield choice.delta.content
        except openai.APIStatusError as error:
            raise self._no_answer(error.response.text[:300]) from error
        except (openai.OpenAIError, httpx.HTTPError) as error:
            raise self._no_answer(first_line(error)) from error
        if finish is None:
            raise self._no_answer("It broke off in the middle.")
        result = Result("".join(pieces), finish == "length", tokens)
        self.last = Reply(prompt, (result,))

    def _no_answer(self, said: str) -> LabError:
        return LabError(f"The server at {self.url} failed: {said} {AGAIN}")
