"""Completions from any causal language model of transformers.

`generate` of transformers serves every model and every way of decoding, and
pays for it at each token. Here is the plain loop of a rollout: one prefill for
a prompt however many completions it gets, a buffer for keys and values that
is made once, and a batch that shrinks as completions end.

The tokens are those of `generate` where nothing is drawn, that is with
`top_k=1`; else they have the same distribution.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation import (
    LogitsProcessorList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_lab.errors import LabError
from grpo_lab.speed.optimizations import OPTIMIZATIONS

SHRINK_AT = 1 / 8
"""Share of finished rows at which they leave the batch.

Leaving means to copy the keys and values of those that stay.
"""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the defaults draw from the policy itself."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


GREEDY = Sampling(top_k=1)


@dataclass(frozen=True)
class Decoded:
    """Completions, in the order of their prompts.

    Attributes:
        ids: the tokens of each, the one that ended it included.
        entropy: mean over all tokens of the entropy, in nats, of the
            distribution at the temperature, before top_p and top_k; None
            where nothing was drawn.
    """

    ids: list[list[int]]
    entropy: float | None


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Collection[int],
    sampling: Sampling = GREEDY,
    optimizations: Collection[str] = tuple(OPTIMIZATIONS),
) -> Decoded:
    """A completion for each prompt.

    Args:
        model: in evaluation mode; else dropout would stay active.
        prompts: token ids, at least one each. Equal ones may stand anywhere.
        max_new_tokens: of a completion, at least 1.
        eos_token_ids: each of them ends a completion.
        sampling: how tokens are drawn.
        optimizations: "shared_prefill" reads equal prompts once,
            "finished_rows" lets completions that have ended leave the batch.

    Raises:
        LabError: the model's output is not a number.
    """
    share = "shared_prefill" in optimizations
    state = _prefill(model, prompts, max_new_tokens, share)
    device = model.device
    written = torch.zeros(
        len(prompts), max_new_tokens, dtype=torch.long, device=device
    )
    lengths = torch.full((len(prompts),), max_new_tokens, device=device)
    alive = torch.ones_like(lengths, dtype=torch.bool)
    eos = torch.tensor(sorted(eos_token_ids), device=device)
    entropies = []
    for step in range(max_new_tokens):
        scores = state.logits.float() / sampling.temperature
        _refuse_no_numbers(scores)
        if sampling.top_k != 1:
            entropies.append(_entropy(scores)[alive])
        tokens = draw(scores, sampling)
        written[state.rows, step] = tokens
        ended = alive & torch.isin(tokens, eos)
        lengths[state.rows[ended]] = step + 1
        alive = alive & ~ended
        left = int(alive.sum())
        if not left or step + 1 == max_new_tokens:
            break
        can_shrink = left <= (1 - SHRINK_AT) * len(alive)
        if can_shrink and "finished_rows" in optimizations:
            state.keep(alive)
            tokens, alive = tokens[alive], alive[alive]
        state.advance(model, tokens)
    ids = [row[:n].tolist() for row, n in zip(written, lengths, strict=True)]
    entropy = float(torch.cat(entropies).mean()) if entropies else None
    return Decoded(ids, entropy)


def draw(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One token for each row of scores, which the temperature has divided.

    A uniform number is looked up in the cumulated probabilities, where
    `torch.multinomial` would draw one for each entry of the vocabulary. In
    64 bit, since in 32 the sum over a large vocabulary would swallow its
    unlikely entries.

    Args:
        scores: rows x vocabulary.

    Returns:
        Token ids, one for each row.
    """
    if sampling.top_k == 1:
        return scores.argmax(-1)
    processors = LogitsProcessorList()
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    shares = processors(None, scores).softmax(-1)
    cumulated = shares.cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:].contiguous()
    chosen = torch.rand_like(total) * total
    # The first entry above the number: one of probability 0 is never it.
    found = torch.searchsorted(cumulated, chosen, right=True)
    # A product may round up to the total: then the last that counts.
    last = torch.searchsorted(cumulated, total)
    return torch.minimum(found, last).squeeze(1)


def _refuse_no_numbers(scores: torch.Tensor) -> None:
    """Else such a policy would write the same for ever, and earn nothing."""
    if not scores.amax(-1).isfinite().all():
        raise LabError(
            "The output of the model is no number any more, so it can't "
            "write completions. After some training the usual cause is a "
            "learning rate that is too high: lower it and start a new run. "
            "A model that was not trained yet overflows in 16 bit: choose "
            "another one."
        )


def _entropy(scores: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(scores.softmax(-1)).sum(-1)


@dataclass
class _State:
    """Where a batch stands: what is read, and what comes next.

    Attributes:
        cache: keys and values of all tokens so far.
        mask: rows x tokens at full length; 0 is padding.
        length: tokens so far, padding included.
        positions: of each row's last token.
        logits: of each row's next token.
        rows: which completion each row of the batch is.
    """

    cache: Cache
    mask: torch.Tensor
    length: int
    positions: torch.Tensor
    logits: torch.Tensor
    rows: torch.Tensor

    def keep(self, which: torch.Tensor) -> None:
        """Only some rows stay in the batch."""
        self.select(which.nonzero().squeeze(1))
        self.rows = self.rows[which]

    def select(self, indices: torch.Tensor) -> None:
        """Take rows by index; a row may be taken more than once."""
        self.cache.batch_select_indices(indices)
        self.mask = self.mask[indices]
        self.positions = self.positions[indices]
        self.logits = self.logits[indices]

    def advance(self, model: PreTrainedModel, tokens: torch.Tensor) -> None:
        """Read one more token of each row."""
        self.length += 1
        self.positions = self.positions + 1
        output = model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=self.mask[:, : self.length],
            position_ids=self.positions,
            cache=self.cache,
            use_cache=True,
        )
        self.logits = output.logits[:, -1]


def _prefill(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    share: bool,
) -> _State:
    """Read the prompts, padded on the left, each different one once."""
    prompts = [tuple(prompt) for prompt in prompts]
    unique = list(dict.fromkeys(prompts)) if share else prompts
    longest = max(len(prompt) for prompt in unique)
    padded = [[0] * (longest - len(one)) + list(one) for one in unique]
    ids = torch.tensor(padded, device=model.device)
    mask = torch.ones(
        len(unique),
        longest + max_new_tokens,
        dtype=torch.long,
        device=model.device,
    )
    for row, prompt in zip(mask, unique, strict=True):
        row[: longest - len(prompt)] = 0
    positions = (mask[:, :longest].cumsum(-1) - 1).clamp(min=0)
    cache = _cache(model, max_new_tokens)
    logits = model(
        input_ids=ids,
        attention_mask=mask[:, :longest],
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    rows = torch.arange(len(prompts), device=model.device)
    state = _State(cache, mask, longest, positions[:, -1:], logits, rows)
    if len(unique) < len(prompts):
        place = {prompt: index for index, prompt in enumerate(unique)}
        indices = torch.tensor([place[prompt] for prompt in prompts])
        state.select(indices.to(model.device))
    return state


def _cache(model: PreTrainedModel, max_new_tokens: int) -> Cache:
    """A cache with room for a completion, if every layer sees all tokens."""
    config = model.config.get_text_config(decoder=True)
    plain = DynamicCache(config=config)
    if any(type(layer) is not DynamicLayer for layer in plain.layers):
        return plain
    count = config.num_hidden_layers
    return Cache(layers=[_RoomyLayer(max_new_tokens) for _ in range(count)])


class _RoomyLayer(DynamicLayer):
    """Keys and values of one layer, in a buffer with room for a completion.

    The layer of transformers copies all it has for each new token.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kw
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens behind the others; all of them come back."""
        new = key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [
                states.new_empty(
                    *states.shape[:-2], new + self.room, states.shape[-1]
                )
                for states in (key_states, value_states)
            ]
        end = self.length + new
        self.buffers[0][..., self.length : end, :] = key_states
        self.buffers[1][..., self.length : end, :] = value_states
        self.length = end
        self._refresh_views()
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Take rows by index."""
        self.buffers = [buffer[indices] for buffer in self.buffers]
        self._refresh_views()

    def _refresh_views(self) -> None:
        self.keys, self.values = (
            buffer[..., : self.length, :] for buffer in self.buffers
        )
