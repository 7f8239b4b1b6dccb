"""`Episode`, the one data type of this project, and the padded batch that episodes become.

Paper: section 3.1 (states are conversations, actions are replies); appendix A.1 (what an entry of
the buffer holds).

    tokens             <prompt ......><reply><bridge ......><reply><bridge ......><reply>
    action_mask        0 0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 0 1 1 1
    behavior_logprobs  0 0 0 0 0 0 0 0 x x x 0 0 0 0 0 0 0 0 x x x 0 0 0 0 0 0 0 0 x x x
    turn_rewards                     r_0                 r_1                 r_2

Tokens are those the engine sampled, never re-encoded text. A mask marks positions, and
is never found by a pad or eos id.
"""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

PADDING = 0.15  # the largest share of padding in a micro-batch
# What `collate` pads. The last one is None without a KL term.
PER_TOKEN = "tokens action_mask behavior_logprobs rewards ref_logprobs".split()


@dataclass(eq=False)
class Episode:
    """One trajectory e_j of Algorithm 1: T tokens, some of them sampled in n turns."""

    tokens: np.ndarray  # int32 [T]: the whole conversation, image placeholders expanded
    action_mask: np.ndarray  # bool [T]: True if the policy sampled the token
    behavior_logprobs: np.ndarray  # float32 [T]: log pi_mu of the action tokens, 0 elsewhere
    reward: float  # r_i, the return: the sum of turn_rewards (gamma = 1)
    turn_rewards: np.ndarray  # float32 [n]
    images: list["AnyImage"] = field(default_factory=list)  # in the order of their placeholders
    step: int = 0  # t_i: the optimizer step at which it was collected
    seed: int = 0  # of the environment
    ref_logprobs: np.ndarray | None = None  # float32 [T]: log pi_ref, with a KL term
    # What is reported of it: columns of metrics.csv (freshper/report.py)
    outcome: dict[str, float] = field(default_factory=dict)

    def turn_ends(self) -> np.ndarray:
        """Return the position of the last action token of each turn, int64 [n].

        Bridges keep the turns apart."""
        next_sampled = np.append(self.action_mask[1:], False)
        return np.flatnonzero(self.action_mask & ~next_sampled)

    @property
    def rewards(self) -> np.ndarray:
        """Return each turn's reward on its last action token, 0 elsewhere, float32 [T].

        Raises ValueError unless there are as many rewards as turns."""
        ends = self.turn_ends()
        if len(ends) != len(self.turn_rewards):
            raise ValueError(
                f"the episode of seed {self.seed} has {len(ends)} turns, but not as many rewards"
            )

        rewards = np.zeros_like(self.behavior_logprobs)
        rewards[ends] = self.turn_rewards
        return rewards


class Batch(NamedTuple):
    """B episodes, padded with 0 or False on the right to T tokens.

    Under a causal mask no real token sees padding. `TorchTrainer.update` attaches advantages and
    weights."""

    tokens: Tensor  # int64 [B, T]
    action_mask: Tensor  # bool [B, T]
    behavior_logprobs: Tensor  # float32 [B, T]
    rewards: Tensor  # float32 [B, T]: each turn's reward on its last action token
    images: list[list["AnyImage"]]  # per episode
    lengths: list[int]  # tokens of each episode before padding
    seeds: list[int]  # of the episodes' environments, to name them in errors
    ref_logprobs: Tensor | None = None  # float32 [B, T], or None if an episode has none
    advantages: Tensor | None = None  # A_t, float32 [B, T]
    weights: Tensor | None = None  # w_i, float32 [B]

    def rows(self, indices: list[int]) -> "Batch":
        """Return these rows alone, trimmed to the longest of them: a micro-batch."""
        longest = max(self.lengths[i] for i in indices)
        parts: dict[str, Any] = {}
        for name, values in self._asdict().items():
            if isinstance(values, list):
                parts[name] = [values[i] for i in indices]
            elif values is not None:
                parts[name] = values[indices]
                if values.dim() == 2:
                    parts[name] = values[indices, :longest]
        return Batch(**parts)

    def micro_batches(self, max_rows: int) -> Iterator[tuple[list[int], "Batch"]]:
        """Yield (row numbers, batch of these rows) for each group of `group_by_length`."""
        for rows in group_by_length(self.lengths, max_rows):
            yield rows, self.rows(rows)


def group_by_length(lengths: list[int], max_rows: int) -> list[list[int]]:
    """Group row numbers by length, shortest first.

    A group has at most `max_rows` rows, and less than PADDING of it is padding."""
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = [[]]
    for row in longest_first:
        group = [row, *groups[0]]  # the last is the longest
        tokens = sum(lengths[k] for k in group)
        fewest_tokens = (1 - PADDING) * lengths[group[-1]] * len(group)

        if len(group) <= max_rows and tokens > fewest_tokens:
            groups[0] = group
        else:
            groups.insert(0, [row])
    return groups


def collate(episodes: list[Episode]) -> Batch:
    """Pad episodes into a batch. Raises ValueError if one has not as many rewards as turns."""
    padded: dict[str, Any] = {}
    for name in PER_TOKEN:
        arrays = [getattr(episode, name) for episode in episodes]
        if all(array is not None for array in arrays):
            tensors = [torch.from_numpy(array) for array in arrays]
            padded[name] = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    padded["tokens"] = padded["tokens"].long()

    return Batch(
        images=[episode.images for episode in episodes],
        lengths=[len(episode.tokens) for episode in episodes],
        seeds=[episode.seed for episode in episodes],
        **padded,
    )


# -- images in the buffer


@dataclass
class StoredImage:
    """An image of the buffer as PNG, in a few percent of its memory.

    `np.asarray` returns its pixels again."""

    key: bytes  # `image_key` of the pixels
    shape: tuple[int, ...]
    png: bytes

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(Image.open(io.BytesIO(self.png)), dtype)


AnyImage = np.ndarray | StoredImage  # uint8 [H, W, 3]


def image_key(image: AnyImage) -> bytes:
    """Return the SHA-256 of an image's shape and pixels: equal images have equal keys."""
    if isinstance(image, StoredImage):
        return image.key
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).digest()


def compressed(image: AnyImage) -> StoredImage:
    """Return an image as PNG."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(image)).save(file, "PNG")
    return StoredImage(image_key(image), image.shape, file.getvalue())
