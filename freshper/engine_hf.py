"""The embedded engine: batched sampling from a transformers model, with the KV cache kept across turns.

Paper: Algorithm 1 lines 2 and 12; appendix F (sampling). A turn costs its new tokens only: the bridge is fed in one
pass, then one token at a time, all episodes together. Rows are ragged, so the cache has holes from left padding:

    slots    0 1 2 3 4 | 5 | 6 | 7 8 9 ...
    row 0    a b c d e | f | g | h i j          every row writes the same slots;
    row 1    . . k l m | n | . | . o p          "." is a hole that no other slot ever attends to

Positions count real tokens only, so a row computes the same numbers as it would alone. Trainer and engine share one
model object: after an update the engine already has the new weights, and `sync` drops the cache. So does the end of
the rollout: the training that follows needs the memory.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from freshper.episode import AnyImage
from freshper.models import Policy
from freshper.rollout import Conversation, Reply


@dataclass
class Sampling:
    """How replies are drawn. 0 switches top_k off, 1.0 switches top_p off."""

    temperature: float = 0.99
    top_k: int = 100
    top_p: float = 0.99


class KVCache:
    """Keys and values of a batch: a transformers `Cache` whose buffers double, and are not copied every token."""

    def __init__(self, n: int, device: torch.device):
        self.layers: list[
            list[Tensor]
        ] = []  # per layer: keys, values [B, heads, capacity, head_dim]
        self.length = 0  # slots written by all layers
        self.visible = torch.zeros(
            n, 0, dtype=torch.bool, device=device
        )  # [B, slots]: False in the holes
        self.images_fed = np.zeros(n, dtype=np.int64)  # [B]
        self.position = np.zeros(n, dtype=np.int64)  # [B]: the next position id

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Append [B, heads, T, head_dim] and return all that this layer holds, [B, heads, length + T, head_dim]."""
        end = self.length + keys.shape[2]
        if layer == len(self.layers):
            self.layers.append([keys[:, :, :0], values[:, :, :0]])
        buffers = self.layers[layer]
        for k, new in enumerate((keys, values)):
            if end > (capacity := buffers[k].shape[2]):
                room = new.new_empty(*new.shape[:2], max(128, 2 * end) - capacity, new.shape[3])
                buffers[k] = torch.cat([buffers[k], room], dim=2)
            buffers[k][:, :, self.length : end] = new
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.layers = [[x[rows] for x in layer] for layer in self.layers]
        self.visible = self.visible[rows]
        self.images_fed, self.position = self.images_fed[rows], self.position[rows]


class HFEngine:
    """Generate replies with the trainer's own model."""

    def __init__(self, policy: Policy, sampling: Sampling, seed: int):
        self.policy, self.sampling = policy, sampling
        self.generator = torch.Generator(policy.device).manual_seed(seed)
        self.sync()

    def sync(self, trainer: object | None = None) -> dict[str, float]:
        """Drop every key and value that older weights computed (line 12, pi_mu <- pi_theta)."""
        # {conversation: (its cache, its row)} of the last call; a cache is freed with the last of its conversations
        self.rows: WeakKeyDictionary[Conversation, tuple[KVCache, int]] = WeakKeyDictionary()
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])

    @torch.no_grad()
    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        """Return one reply to each conversation. Those seen in the last call go on from the cache."""
        self.policy.model.eval()
        cache = self._cache(conversations)
        replies = [Reply([], []) for _ in conversations]
        chunks = [
            c.tokens[n:] for c, n in zip(conversations, cache.visible.sum(1).tolist(), strict=True)
        ]
        images = [c.images[n:] for c, n in zip(conversations, cache.images_fed, strict=True)]
        active = set(range(len(conversations)))

        with self.policy.precision():  # one for all tokens, so that the weights are cast once
            while active:
                tokens, logprobs = self._sample(self._feed(cache, chunks, images))
                for i in active:
                    replies[i].tokens.append(tokens[i])
                    replies[i].logprobs.append(logprobs[i])
                open_rows = {i for i in active if tokens[i] != self.policy.eos_id}
                active = {i for i in open_rows if len(replies[i].tokens) < max_new_tokens}
                # a reply's last token is fed with the next turn
                chunks, images = (
                    [[t] if i in active else [] for i, t in enumerate(tokens)],
                    [[]] * len(replies),
                )
        return replies

    @torch.no_grad()
    def logits(self, conversation: Conversation) -> Tensor:
        """Return the next-token logits of one conversation, [V], read in two chunks: the second uses the cache."""
        cache, cut = self._cache([conversation]), len(conversation.tokens) - 3
        self._feed(cache, [conversation.tokens[:cut]], [[]])
        return self._feed(cache, [conversation.tokens[cut:]], [[]])[0]

    def _cache(self, conversations: list[Conversation]) -> KVCache:
        """Return the last call's cache without the episodes that have ended, or a new one if any is not in it."""
        if all(conversation in self.rows for conversation in conversations):
            cache, _ = self.rows[conversations[0]]
            rows = [self.rows[conversation][1] for conversation in conversations]
            if rows != list(range(len(cache.visible))):
                cache.keep(rows)
        else:
            cache = KVCache(len(conversations), self.policy.device)
        self.rows = WeakKeyDictionary(
            {conversation: (cache, k) for k, conversation in enumerate(conversations)}
        )
        return cache

    def _feed(
        self, cache: KVCache, chunks: list[list[int]], images: list[list[AnyImage]]
    ) -> Tensor:
        """Feed new tokens, or a hole to a row without any, and return the logits after each row's last one, [B, V]."""
        lengths, device = np.array([len(chunk) for chunk in chunks]), self.policy.device
        width = lengths.max()
        real = np.arange(width) >= width - lengths[:, None]  # [B, width]: False in the holes
        tokens = np.zeros((len(chunks), width), dtype=np.int64)
        tokens[real] = np.concatenate(chunks)

        positions = np.repeat(
            (cache.position[:, None] + real.cumsum(1) - 1)[None], 3, axis=0
        )  # [3, B, width]: of text
        for row, shown in enumerate(images):
            if shown:
                positions[:, row, real[row]] = self.policy.positions(
                    np.array(chunks[row]), shown, cache.position[row]
                )
        cache.position = positions.max((0, 2)) + 1
        cache.images_fed += [len(shown) for shown in images]

        cache.visible = torch.cat(
            [cache.visible, torch.from_numpy(real).to(device)], dim=1
        )  # [B, slots]
        mask = cache.visible[:, None].repeat(
            1, width, 1
        )  # [B, width, slots]: True if a query looks at a slot
        mask[:, :, -width:] &= torch.ones(width, width, dtype=torch.bool, device=device).tril()
        mask.diagonal(mask.shape[2] - width, 1, 2).fill_(
            True
        )  # a hole sees itself: no row of the softmax is empty

        ids = torch.from_numpy(tokens), torch.from_numpy(positions)
        hidden = self.policy.hidden(*ids, sum(images, []), mask[:, None], cache)
        cache.length += width
        return self.policy.logits(hidden[:, -1])

    def _sample(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw one token per row; its log-prob is at the sampling temperature, before truncation."""
        logprobs = (logits / self.sampling.temperature).log_softmax(-1)
        probabilities = truncated(logprobs.exp(), self.sampling.top_k, self.sampling.top_p)
        # the smallest token whose cumulative probability exceeds a uniform draw; in float64 it cannot miss the last
        cumulative = probabilities.double().cumsum(-1)
        masses = torch.rand(
            len(logits), 1, generator=self.generator, dtype=torch.float64, device=logits.device
        )
        tokens = torch.searchsorted(cumulative, masses * cumulative[:, -1:], right=True)  # [B, 1]
        tokens.clamp_max_(
            logits.shape[1] - 1
        )  # without effect on numbers; NaN must not end as an index out of range
        return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()


def truncated(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the top_k most probable entries, and of them the fewest with a share top_p, as vLLM does; zero the rest.
    [B, V] -> [B, V], not normalized."""
    vocabulary = probabilities.shape[-1]
    largest, ids = probabilities.topk(min(top_k or vocabulary, vocabulary))
    if top_p < 1.0:
        before = largest.cumsum(-1) - largest  # the mass of everything more probable
        largest = torch.where(before < top_p * largest.sum(-1, keepdim=True), largest, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, ids, largest)
