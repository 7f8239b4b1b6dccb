"""`Episode`, the one data type of this project, and how a list of them becomes a padded batch.

Paper: section 3.1 (states are conversations, actions are assistant turns), appendix A.1 (an entry of the
buffer is a complete episode with its behaviour log-probs, reward and collection step t_i).

    tokens             <prompt ......><reply><bridge ......><reply><bridge ......><reply>
    action_mask        0 0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 0 1 1 1
    behavior_logprobs  0 0 0 0 0 0 0 0 x x x 0 0 0 0 0 0 0 0 x x x 0 0 0 0 0 0 0 0 x x x
    turn_rewards                     r_1                 r_2                 r_3

Tokens are those the engine sampled, never re-encoded text: token in, token out. Masks are positions,
never comparisons with a pad or eos id. Storage is compact: no padding, one uint8 copy of each picture
(freshper/buffer.py shares equal ones), and pixel values are made again when a batch needs them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

PADDING = 0.15  # a batch of episodes alike in length has less than this share of padding


class NonFiniteError(ArithmeticError):
    """A log-prob, loss or gradient stopped being a number. Names the phase and the seed of the episode."""


@dataclass(eq=False)
class Episode:
    """One trajectory e_j of Algorithm 1. T tokens, of which the action tokens were sampled in n turns."""

    tokens: np.ndarray  # int32 [T]: the whole conversation, image placeholders expanded
    action_mask: np.ndarray  # bool [T]: True where the policy sampled the token
    behavior_logprobs: np.ndarray  # float32 [T]: log pi_mu of the action tokens, 0 elsewhere
    reward: float  # the episode's return, the sum of turn_rewards (gamma = 1)
    turn_rewards: np.ndarray  # float32 [n]
    images: list[np.ndarray] = field(default_factory=list)  # uint8 [H, W, 3], in the order of their placeholders
    step: int = 0  # t_i: when it was collected, in optimizer steps (or iterations, --age_unit)
    env: str = ""
    seed: int = 0  # what the environment was reset with
    info: dict = field(default_factory=dict)  # success, invalid replies, replies as text, ...

    def turn_ends(self) -> np.ndarray:
        """Positions of the last action token of each turn, int64 [n]. Bridges keep the turns apart."""
        following = np.append(self.action_mask[1:], False)
        return np.flatnonzero(self.action_mask & ~following)


def picture_key(image: np.ndarray) -> bytes:
    """What equal pictures have in common: SHA-256 of shape and content."""
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).digest()


class Batch(NamedTuple):
    """B episodes padded on the right to T tokens. Right padding needs no attention mask: under a causal
    mask no real token ever sees what comes after it."""

    tokens: torch.Tensor  # int64 [B, T], 0 where padded
    action_mask: torch.Tensor  # bool [B, T], False where padded
    behavior_logprobs: torch.Tensor  # float32 [B, T]
    rewards: torch.Tensor  # float32 [B, T]: each turn's reward on its last action token
    images: list[list[np.ndarray]]  # per episode
    lengths: list[int]  # tokens of each episode before padding

    def rows(self, indices: list[int]) -> "Batch":
        """The batch of these rows alone, trimmed to the longest of them (a micro-batch)."""
        lengths = [self.lengths[i] for i in indices]
        tokens, mask, logprobs, rewards = (tensor[indices, : max(lengths)] for tensor in self[:4])
        return Batch(tokens, mask, logprobs, rewards, [self.images[i] for i in indices], lengths)

    def micro_batches(self, most: int) -> Iterator[tuple[list[int], "Batch"]]:
        """(row numbers, batch of these rows) for the groups of `alike`."""
        return ((rows, self.rows(rows)) for rows in alike(self.lengths, most))


def alike(lengths: list[int], most: int) -> list[list[int]]:
    """Row numbers in groups of at most `most` that are alike in length, the shortest first: less than PADDING of the
    tokens of each are padding. A game may end after one turn or after ten; the gradient does not depend on groups.

    >>> alike([9, 2, 10, 10, 2], most=4)
    [[4, 1], [0, 3, 2]]
    """
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
    """Pad episodes into a batch. Raises ValueError where an episode's fields do not fit together."""
    lengths = [len(e.tokens) for e in episodes]
    shape = (len(episodes), max(lengths))
    batch = Batch(
        torch.zeros(shape, dtype=torch.long),
        torch.zeros(shape, dtype=torch.bool),
        torch.zeros(shape),
        torch.zeros(shape),
        [e.images for e in episodes],
        lengths,
    )
    for row, (e, n) in enumerate(zip(episodes, lengths, strict=True)):
        ends = e.turn_ends()
        if not len(e.action_mask) == len(e.behavior_logprobs) == n or len(ends) != len(e.turn_rewards):
            raise ValueError(
                f"episode of seed {e.seed}: {n} tokens, {len(e.action_mask)} mask entries, "
                f"{len(e.behavior_logprobs)} log-probs, {len(ends)} turns, {len(e.turn_rewards)} rewards"
            )
        batch.tokens[row, :n] = torch.from_numpy(e.tokens.astype(np.int64))
        batch.action_mask[row, :n] = torch.from_numpy(e.action_mask)
        batch.behavior_logprobs[row, :n] = torch.from_numpy(e.behavior_logprobs)
        batch.rewards[row, ends] = torch.from_numpy(e.turn_rewards)
    return batch
