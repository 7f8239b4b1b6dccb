"""`Episode`, the one data type of this project, and the padded batch that a list of episodes becomes.

Paper: section 3.1 (states are conversations, actions are replies); appendix A.1 (what an entry of the buffer holds).

    tokens             <prompt ......><reply><bridge ......><reply><bridge ......><reply>
    action_mask        0 0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 0 1 1 1
    behavior_logprobs  0 0 0 0 0 0 0 0 x x x 0 0 0 0 0 0 0 0 x x x 0 0 0 0 0 0 0 0 x x x
    turn_rewards                     r_1                 r_2                 r_3

Tokens are those the engine sampled, never re-encoded text. Masks are positions, never comparisons with a pad or eos id.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

PADDING = 0.15  # the largest share of padding in a micro-batch


@dataclass(eq=False)
class Episode:
    """One trajectory e_j of Algorithm 1: T tokens, of which the action tokens were sampled in n turns."""

    tokens: np.ndarray  # int32 [T]: the whole conversation, image placeholders expanded
    action_mask: np.ndarray  # bool [T]: True if the policy sampled the token
    behavior_logprobs: np.ndarray  # float32 [T]: log pi_mu of the action tokens, 0 elsewhere
    reward: float  # r_i, the return: the sum of turn_rewards (gamma = 1)
    turn_rewards: np.ndarray  # float32 [n]
    images: list[np.ndarray] = field(default_factory=list)  # uint8 [H, W, 3], in the order of their placeholders
    step: int = 0  # t_i: the optimizer step at which it was collected
    seed: int = 0  # of the environment
    success: bool = False
    invalid: int = 0  # replies that the environment could not read
    cut: int = 0  # replies that --max_new_tokens ended
    truncated: bool = False  # ended because the next turn would not fit max_tokens
    metrics: dict[str, float] = field(default_factory=dict)  # the environment's own, of the last turn
    ref_logprobs: np.ndarray | None = None  # float32 [T]: log pi_ref, with a KL term
    engine_weights: np.ndarray | None = None  # float32 [T]: min(pi_trainer / pi_engine, cap), with --truncated_is

    def turn_ends(self) -> np.ndarray:
        """Return the position of the last action token of each turn, int64 [n]. Bridges keep the turns apart."""
        return np.flatnonzero(self.action_mask & ~np.append(self.action_mask[1:], False))


def image_key(image: np.ndarray) -> bytes:
    """Return the SHA-256 of an image's shape and pixels: equal images have equal keys."""
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).digest()


class Batch(NamedTuple):
    """B episodes padded on the right to T tokens, with 0 or False. That needs no attention mask: under a causal mask no
    real token attends to what comes after it."""

    tokens: torch.Tensor  # int64 [B, T]
    action_mask: torch.Tensor  # bool [B, T]
    behavior_logprobs: torch.Tensor  # float32 [B, T]
    rewards: torch.Tensor  # float32 [B, T]: each turn's reward on its last action token
    images: list[list[np.ndarray]]  # per episode
    lengths: list[int]  # tokens of each episode before padding
    ref_logprobs: Any = None  # float32 [B, T], or None if not needed
    engine_weights: Any = None  # the same
    advantages: Any = None  # A_t, float32 [B, T]: like weights from `training_batch` (freshper/reinforce.py)
    weights: Any = None  # w_i, float32 [B]

    def rows(self, indices: list[int]) -> "Batch":
        """Return these rows alone, trimmed to the longest of them: a micro-batch."""
        lengths = [self.lengths[i] for i in indices]
        cut = self._with_tensors(lambda x: x[indices, : max(lengths)] if x.dim() == 2 else x[indices])
        return cut._replace(images=[self.images[i] for i in indices], lengths=lengths)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        return self._with_tensors(lambda x: x.to(device))

    def _with_tensors(self, change: Callable[[torch.Tensor], Any]) -> "Batch":
        return self._replace(**{k: change(x) for k, x in self._asdict().items() if isinstance(x, torch.Tensor)})

    def micro_batches(self, most: int) -> Iterator[tuple[list[int], "Batch"]]:
        """Yield (row numbers, batch of these rows) for the groups of `alike`."""
        return ((rows, self.rows(rows)) for rows in alike(self.lengths, most))


def alike(lengths: list[int], most: int) -> list[list[int]]:
    """Group row numbers by length: groups of at most `most`, each with less than PADDING of padding, shortest first."""
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        group = groups[-1] if groups else []
        tokens = sum(lengths[k] for k in group) + lengths[row]
        if group and len(group) < most and tokens > (1 - PADDING) * lengths[group[0]] * (len(group) + 1):
            group.append(row)
        else:
            groups.append([row])
    return [group[::-1] for group in groups[::-1]]


def collate(episodes: list[Episode]) -> Batch:
    """Pad episodes into a batch. Raises ValueError if an episode's fields do not fit together."""
    rewards = [np.zeros(len(e.tokens), dtype=np.float32) for e in episodes]
    for e, row in zip(episodes, rewards, strict=True):
        ends = e.turn_ends()
        if not len(e.action_mask) == len(e.behavior_logprobs) == len(row) or len(ends) != len(e.turn_rewards):
            raise ValueError(f"the fields of the episode of seed {e.seed} have different lengths")
        row[ends] = e.turn_rewards
    fields = ("tokens", "action_mask", "behavior_logprobs", "ref_logprobs", "engine_weights")
    columns = {name: [getattr(e, name) for e in episodes] for name in fields} | {"rewards": rewards}
    padded: dict[str, Any] = {
        name: torch.nn.utils.rnn.pad_sequence(list(map(torch.from_numpy, column)), batch_first=True)
        for name, column in columns.items()
        if all(x is not None for x in column)
    }
    padded["tokens"] = padded["tokens"].long()
    return Batch(**padded, images=[e.images for e in episodes], lengths=[len(e.tokens) for e in episodes])
