"""The embedded engine: batched sampling from a transformers model, with a KV cache across turns.

Paper: Algorithm 1 lines 2 and 12; appendix F (sampling). A turn costs its new tokens only. The
bridge is fed in one pass, and then one token at a time, all episodes together. Rows have different
lengths, so new tokens are padded on the left, and the cache has holes:

    slots    0 1 2 3 4 | 5 | 6 | 7 8 9 ...
    row 0    a b c d e | f | g | h i j          every row writes the same slots;
    row 1    . . k l m | n | . | . o p          "." is a hole that no other slot ever attends to

Positions count real tokens only, so a row computes the same numbers as it would alone. Trainer and
engine share one model object. After an update the engine already has the new weights, and `sync`
drops the cache. The cache also ends with the rollout, because training needs its memory.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from freshper.models import Policy
from freshper.rollout import Conversation, Reply

if TYPE_CHECKING:
    from freshper.trainer import TorchTrainer

HOLE = -1  # in place of a token


@dataclass
class Sampling:
    """How replies are drawn (appendix F). 0 switches top_k off, 1.0 switches top_p off."""

    temperature: float = 0.99
    top_k: int = 100
    top_p: float = 0.99


class KVCache:
    """Hold the keys and values of a batch. The model calls `update`, as it does on a transformers
    `Cache`."""

    def __init__(self, n: int, device: torch.device):
        # Of each layer: keys and values, [B, heads, capacity, head_dim].
        self.layers: list[list[Tensor]] = []
        self.visible = torch.zeros(n, 0, dtype=torch.bool, device=device)  # [B, slots]: not holes
        self.images_fed = torch.zeros(n, dtype=torch.long)  # [B]
        self.last_position = torch.full((n,), -1)  # [B]

    def add_slots(self, real: Tensor) -> Tensor:
        """Add a slot for each new token, real or hole [B, T], and return which slots each of them
        attends to, bool [B, 1, T, slots]."""
        self.visible = torch.cat([self.visible, real], dim=1)  # [B, slots]

        width = real.shape[1]
        slots = self.visible.shape[1]
        past = slots - width
        causal = real.new_ones(width, slots).tril(past)  # [T, slots]
        mask = self.visible[:, None, None] & causal  # [B, 1, T, slots]
        # A hole attends to itself, because a softmax over nothing is not a number.
        mask.diagonal(past, 2, 3).fill_(True)
        return mask

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Write [B, heads, T, head_dim] into a layer's newest slots, and return all its slots,
        [B, heads, slots, head_dim]."""
        if layer == len(self.layers):
            self.layers.append([keys, values])
        buffers = self.layers[layer]
        end = self.visible.shape[1]
        start = end - keys.shape[2]

        for k, new in enumerate((keys, values)):
            capacity = buffers[k].shape[2]
            if end > capacity:
                # Twice what is needed, so that not every token copies the cache.
                room = 2 * end - capacity
                buffers[k] = pad(buffers[k], (0, 0, 0, room))
            buffers[k][:, :, start:end] = new

        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.layers = [[keys[rows], values[rows]] for keys, values in self.layers]
        self.visible = self.visible[rows]
        self.images_fed = self.images_fed[rows]
        self.last_position = self.last_position[rows]


class HFEngine:
    """Generate replies with the trainer's own model."""

    def __init__(self, policy: Policy, sampling: Sampling, seed: int):
        self.policy = policy
        self.sampling = sampling
        # It stays on the CPU, so that a run can be resumed on another device.
        self.generator = torch.Generator().manual_seed(seed)
        # The cache and the row of each conversation of the last call. A cache is freed with the
        # last of its conversations.
        self.rows: WeakKeyDictionary[Conversation, tuple[KVCache, int]] = WeakKeyDictionary()

    def sync(self, trainer: "TorchTrainer") -> dict[str, float]:
        """Drop every key and value that older weights computed (line 12, pi_mu <- pi_theta)."""
        self.rows.clear()
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])

    @torch.no_grad()
    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        """Return one reply to each conversation. Those of the last call go on from their cache."""
        self.policy.model.eval()
        cache = self.cache_of(conversations)
        replies = [Reply([], []) for _ in conversations]
        tokens_fed = cache.visible.sum(1).tolist()  # [B]
        chunks = [c.tokens[n:] for c, n in zip(conversations, tokens_fed)]
        if not all(chunks):
            # One has not grown, and the cache also holds the last reply to it.
            self.rows.clear()
            return self.generate(conversations, max_new_tokens)

        # One context for all tokens, so that mixed precision casts the weights once.
        with self.policy.precision():
            while any(chunks):
                logits = self.feed(cache, conversations, chunks)
                tokens, logprobs = self.sample(logits)

                for row, reply in enumerate(replies):
                    if chunks[row]:
                        reply.tokens.append(tokens[row])
                        reply.logprobs.append(logprobs[row])
                        closed = tokens[row] == self.policy.eos_id
                        ended = closed or len(reply.tokens) == max_new_tokens
                        # The last token of a reply is fed with the next turn.
                        chunks[row] = [] if ended else [tokens[row]]
        return replies

    def cache_of(self, conversations: list[Conversation]) -> KVCache:
        """Return the last call's cache without the episodes that have ended, or a new one if any
        conversation is not in it."""
        if all(conversation in self.rows for conversation in conversations):
            cache, _ = self.rows[conversations[0]]
            rows = [self.rows[conversation][1] for conversation in conversations]
            # `keep` copies the cache.
            if rows != list(range(len(cache.visible))):
                cache.keep(rows)
        else:
            cache = KVCache(len(conversations), self.policy.device)

        self.rows.clear()
        for row, conversation in enumerate(conversations):
            self.rows[conversation] = cache, row
        return cache

    def feed(
        self, cache: KVCache, conversations: list[Conversation], chunks: list[list[int]]
    ) -> Tensor:
        """Feed each row its new tokens, or a hole if it has none, and return the logits after each
        row's last token, [B, V]. T is the length of the longest chunk."""
        policy = self.policy
        width = max(len(chunk) for chunk in chunks)
        padded = [[HOLE] * (width - len(chunk)) + chunk for chunk in chunks]
        tokens = torch.tensor(padded)  # [B, T]
        real = tokens != HOLE  # [B, T]

        text_positions = cache.last_position[:, None] + real.cumsum(1)  # [B, T]
        positions = text_positions.repeat(3, 1, 1)  # [3, B, T]
        new_images = []
        for row, conversation in enumerate(conversations):
            images = conversation.images[cache.images_fed[row] :]
            if images:
                start = int(cache.last_position[row]) + 1
                positions[:, row, real[row]] = policy.positions(chunks[row], images, start)
                cache.images_fed[row] += len(images)
                new_images += images
        cache.last_position = positions.amax((0, 2))

        mask = cache.add_slots(real.to(policy.device))  # [B, 1, T, slots]
        tokens[~real] = 0
        hidden = policy.hidden(tokens, positions, new_images, mask, cache)  # [B, T, hidden]
        return policy.logits(hidden[:, -1])

    def sample(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw one token per row of [B, V], and return the tokens and their log-probs, which are at
        the sampling temperature, before truncation."""
        sampling = self.sampling
        logprobs = (logits / sampling.temperature).log_softmax(-1)  # [B, V]
        probabilities = top_k_top_p(logprobs.exp(), sampling.top_k, sampling.top_p)

        # The smallest token whose cumulative probability exceeds a uniform draw. In float64 the
        # draw cannot miss the last token.
        cumulative = probabilities.double().cumsum(-1)  # [B, V]
        total = cumulative[:, -1:]  # [B, 1]
        draws = torch.rand(total.shape, dtype=total.dtype, generator=self.generator)
        masses = draws.to(total.device) * total  # [B, 1]
        tokens = torch.searchsorted(cumulative, masses, right=True)  # [B, 1]
        # Only a row of NaN reaches V. Its log-prob is NaN, which is reported later.
        tokens.clamp_max_(logits.shape[1] - 1)

        chosen = logprobs.gather(1, tokens)  # [B, 1]
        return tokens.flatten().tolist(), chosen.flatten().tolist()


def top_k_top_p(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the top_k most probable entries, then the fewest of them with a share top_p of their
    mass, as vLLM does. Zero the rest. [B, V] -> [B, V], not normalized."""
    vocabulary = probabilities.shape[-1]
    k = min(top_k or vocabulary, vocabulary)
    largest, ids = probabilities.topk(k)  # [B, k]
    if top_p < 1.0:
        before = largest.cumsum(-1) - largest  # [B, k]: the mass of everything more probable
        share = top_p * largest.sum(-1, keepdim=True)  # [B, 1]
        largest = torch.where(before < share, largest, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, ids, largest)
