"""The embedded engine: batched sampling from a transformers model, with the KV cache kept across turns.

Paper: Algorithm 1 lines 2 and 12; appendix F (sampling). It replaces vLLM on a CPU or on one GPU.

A turn costs its new tokens only: the bridge is fed in one pass, then one token at a time, all episodes together. Rows
of a batch are ragged, so a chunk is padded on the left and the cache has holes:

    slots    0 1 2 3 4 | 5 | 6 | 7 8 9 ...
    row 0    a b c d e | f | g | h i j          every row writes the same slots;
    row 1    . . k l m | n | . | . o p          "." is a hole that no other slot ever attends to

Positions count real tokens only, so a row computes the same numbers as it would alone. Trainer and engine share one
model object: after an update the engine already has the new weights, and `sync` drops the cache.
"""

from dataclasses import dataclass

import numpy as np
import torch

from freshper.errors import NonFiniteError
from freshper.models import Policy
from freshper.rollout import Conversation, Reply


@dataclass
class Sampling:
    """How replies are drawn. 0 switches top_k off, 1.0 switches top_p off."""

    temperature: float = 0.99
    top_k: int = 100
    top_p: float = 0.99


class KVCache:
    """Keys and values of all layers, in buffers that grow by doubling instead of being copied every token. Replaces a
    transformers `Cache`: attention layers call `update` and nothing else."""

    def __init__(self) -> None:
        self.layers: list[list[torch.Tensor]] = []  # per layer: keys, values [B, heads, capacity, head_dim]
        self.length = 0  # slots written by all layers

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_, **__
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, heads, T, head_dim] and return all that this layer holds, [B, heads, length + T, head_dim]."""
        end = self.length + keys.shape[2]
        if layer == len(self.layers):
            self.layers.append([x.new_empty(*x.shape[:2], max(128, 2 * end), x.shape[3]) for x in (keys, values)])
        buffers = self.layers[layer]
        for k, new in enumerate((keys, values)):
            if end > (capacity := buffers[k].shape[2]):  # a chunk may be longer than what doubling gives
                grown = buffers[k].new_empty(*new.shape[:2], max(capacity, end - capacity), new.shape[3])
                buffers[k] = torch.cat([buffers[k], grown], dim=2)
            buffers[k][:, :, self.length : end] = new
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.layers = [[x[rows] for x in layer] for layer in self.layers]


class HFEngine:
    """`generate` continues conversations; `sync` makes the next one start from the trainer's weights."""

    def __init__(self, policy: Policy, sampling: Sampling, seed: int):
        self.policy, self.sampling = policy, sampling
        self.generator = torch.Generator(policy.device).manual_seed(seed)
        self.sync()

    def sync(self, trainer: object | None = None) -> dict[str, float]:
        """Drop every key and value that older weights computed (line 12, pi_mu <- pi_theta)."""
        self._start([])
        return {}

    def _start(self, conversations: list[Conversation]) -> None:
        n, device = len(conversations), self.policy.device
        self.rows, self.cache = list(conversations), KVCache()
        self.visible = torch.zeros(n, 0, dtype=torch.bool, device=device)  # [B, slots]: False in the holes
        # [B]: tokens and images of each conversation that the cache holds, and its next position id
        self.fed, self.images_fed, self.position = np.zeros((3, n), dtype=np.int64)

    def close(self) -> None:
        """End the run: nothing to do for an engine in this process."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what shapes future replies: the random generator."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the generator. Conversations are read again from their start."""
        self.generator.set_state(state["generator"])
        self.sync()

    @torch.inference_mode()
    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        """Return one reply to each conversation. Those seen in the last call go on from the cache."""
        self.policy.model.eval()
        self._keep(conversations)
        replies = [Reply([], []) for _ in conversations]
        chunks = [c.tokens[n:] for c, n in zip(conversations, self.fed, strict=True)]
        images = [c.images[n:] for c, n in zip(conversations, self.images_fed, strict=True)]
        active = list(range(len(conversations)))
        while True:
            logits = self._feed(chunks, images)  # [B, V]
            finite = torch.isfinite(logits.logsumexp(-1)).tolist()
            if not all(finite[i] for i in active):
                seed = next(conversations[i].seed for i in active if not finite[i])
                raise NonFiniteError(f"the rollout met logits that are not finite; episode seed {seed}")
            tokens, logprobs = self._sample(logits)
            for i in active:
                replies[i].tokens.append(tokens[i])
                replies[i].logprobs.append(logprobs[i])
            active = [i for i in active if tokens[i] != self.policy.eos_id and len(replies[i].tokens) < max_new_tokens]
            if not active:
                return replies  # the last token of a reply is fed with the next turn
            chunks = [[]] * len(replies)
            for i in active:
                chunks[i] = [tokens[i]]
            images = [[]] * len(replies)

    @torch.inference_mode()
    def logits(self, conversation: Conversation) -> torch.Tensor:
        """Return the next-token logits of one conversation, [V], read in two chunks: the second uses the cache."""
        self._keep([conversation])
        cut = len(conversation.tokens) - 3
        self._feed([conversation.tokens[:cut]], [[]])
        return self._feed([conversation.tokens[cut:]], [[]])[0]

    def _keep(self, conversations: list[Conversation]) -> None:
        """Drop the rows of episodes that have ended; start anew if a conversation is not in the cache."""
        known = {id(c): row for row, c in enumerate(self.rows)}
        rows = [known[id(c)] for c in conversations if id(c) in known]
        if len(rows) < len(conversations):
            self._start(conversations)
        elif rows != list(range(len(self.rows))):
            self.cache.select(rows)
            self.rows, self.visible, self.fed = list(conversations), self.visible[rows], self.fed[rows]
            self.images_fed, self.position = self.images_fed[rows], self.position[rows]

    def _feed(self, chunks: list[list[int]], images: list[list[np.ndarray]]) -> torch.Tensor:
        """Run new tokens through the model and return the logits after the last one of each row, [B, V]. A row without
        new tokens gets a hole, and a meaningless row of logits."""
        lengths = np.array([len(chunk) for chunk in chunks])
        width = lengths.max()
        real = np.arange(width) >= width - lengths[:, None]  # [B, width]: False in the holes
        tokens = np.zeros((len(chunks), width), dtype=np.int64)
        tokens[real] = np.concatenate(chunks)
        positions = np.repeat((self.position[:, None] + real.cumsum(1) - 1)[None], 3, axis=0)  # [3, B, width]: of text
        for row, new_images in enumerate(images):
            if new_images:
                found = self.policy.positions(np.array(chunks[row]), new_images, self.position[row])
                positions[:, row, -lengths[row] :] = found
        self.position = np.where(lengths > 0, positions.max((0, 2)) + 1, self.position)
        self.fed += lengths
        self.images_fed += [len(new_images) for new_images in images]
        device = self.policy.device
        self.visible = torch.cat([self.visible, torch.from_numpy(real).to(device)], dim=1)  # [B, slots]
        # what is added to the attention scores, [B, width, slots]: -inf where a query must not look
        bias = torch.zeros(self.visible.shape, dtype=self.policy.model.dtype, device=device)
        mask = bias.masked_fill(~self.visible, -torch.inf)[:, None].repeat(1, width, 1)
        mask[:, :, -width:] += torch.full((width, width), -torch.inf, device=device).triu(1)
        # a hole may see itself, so that no row of the softmax is empty
        mask.diagonal(mask.shape[2] - width, 1, 2).zero_()
        hidden = self.policy.hidden(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(positions).to(device),
            [image for new_images in images for image in new_images],
            mask[:, None],
            self.cache,
        )
        self.cache.length += width
        return self.policy.logits(hidden[:, -1])

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Draw one token per row; its log-prob is at the sampling temperature, before truncation."""
        logprobs = (logits / self.sampling.temperature).log_softmax(-1)
        probabilities = truncated(logprobs.exp(), self.sampling.top_k, self.sampling.top_p)
        # the smallest token whose cumulative probability exceeds a uniform draw; in float64 it cannot miss the last
        cumulative = probabilities.double().cumsum(-1)
        masses = torch.rand(len(logits), 1, generator=self.generator, dtype=torch.float64, device=logits.device)
        tokens = torch.searchsorted(cumulative, masses * cumulative[:, -1:], right=True)  # [B, 1]
        return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()


def truncated(probabilities: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Zero all but the top_k most probable entries, then all but the fewest that hold a share top_p of what top-k left,
    as vLLM does. [B, V] -> [B, V], not normalized."""
    if top_p == 1.0 and not 0 < top_k < probabilities.shape[-1]:
        return probabilities
    largest, ids = probabilities.topk(top_k if 0 < top_k < probabilities.shape[-1] else probabilities.shape[-1])
    if top_p < 1.0:
        before = largest.cumsum(-1) - largest  # the mass of everything more probable
        largest = torch.where(before < top_p * largest.sum(-1, keepdim=True), largest, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, ids, largest)
