"""`Episode`, the one data type of this project, and the padded batch that a list of episodes becomes.

Paper: section 3.1 (states are conversations, actions are replies); appendix A.1 (what an entry of the buffer holds).

    tokens             <prompt ......><reply><bridge ......><reply><bridge ......><reply>
    action_mask        0 0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 0 1 1 1 0 0 0 0 0 0 0 0 1 1 1
    behavior_logprobs  0 0 0 0 0 0 0 0 x x x 0 0 0 0 0 0 0 0 x x x 0 0 0 0 0 0 0 0 x x x
    turn_rewards                     r_1                 r_2                 r_3

Tokens are those the engine sampled, never re-encoded text. Masks are positions, never comparisons with a pad or eos id.
"""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

PADDING = 0.15  # the largest share of padding in a micro-batch


@dataclass(eq=False)
class StoredImage:
    """An image of the buffer as PNG, in a few percent of its memory. `np.asarray` returns its pixels again."""

    key: bytes  # `image_key` of the pixels
    shape: tuple[int, ...]
    png: bytes

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(Image.open(io.BytesIO(self.png)), dtype)


AnyImage = Any  # uint8 [H, W, 3]: an array, or a StoredImage


@dataclass(eq=False)
class Episode:
    """One trajectory e_j of Algorithm 1: T tokens, of which the action tokens were sampled in n turns."""

    tokens: np.ndarray  # int32 [T]: the whole conversation, image placeholders expanded
    action_mask: np.ndarray  # bool [T]: True if the policy sampled the token
    behavior_logprobs: np.ndarray  # float32 [T]: log pi_mu of the action tokens, 0 elsewhere
    reward: float  # r_i, the return: the sum of turn_rewards (gamma = 1)
    turn_rewards: np.ndarray  # float32 [n]
    images: list[AnyImage] = field(default_factory=list)  # in the order of their placeholders
    step: int = 0  # t_i: the optimizer step at which it was collected
    seed: int = 0  # of the environment
    success: bool = False
    invalid: int = 0  # replies that the environment could not read
    cut: int = 0  # replies that --max_new_tokens ended
    truncated: bool = False  # ended because the next turn would not fit max_tokens
    metrics: dict[str, float] = field(
        default_factory=dict
    )  # the environment's own, of the last turn
    ref_logprobs: np.ndarray | None = None  # float32 [T]: log pi_ref, with a KL term
    engine_weights: np.ndarray | None = (
        None  # float32 [T]: min(pi_trainer / pi_engine, cap), with --truncated_is
    )

    def turn_ends(self) -> np.ndarray:
        """Return the position of the last action token of each turn, int64 [n]. Bridges keep the turns apart."""
        return np.flatnonzero(self.action_mask & ~np.append(self.action_mask[1:], False))

    def token_rewards(self) -> np.ndarray:
        """Return each turn's reward on its last action token, 0 elsewhere, float32 [T]."""
        ends, n = self.turn_ends(), len(self.tokens)
        if not len(self.action_mask) == len(self.behavior_logprobs) == n or len(ends) != len(
            self.turn_rewards
        ):
            raise ValueError(
                f"the fields of the episode of seed {self.seed} have different lengths"
            )
        rewards = np.zeros(n, dtype=np.float32)
        rewards[ends] = self.turn_rewards
        return rewards


def image_key(image: AnyImage) -> bytes:
    """Return the SHA-256 of an image's shape and pixels: equal images have equal keys."""
    if isinstance(image, StoredImage):
        return image.key
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).digest()


def compressed(image: AnyImage) -> StoredImage:
    """Return an image as PNG."""
    Image.fromarray(np.asarray(image)).save(png := io.BytesIO(), "PNG")
    return StoredImage(image_key(image), image.shape, png.getvalue())


class Batch(NamedTuple):
    """B episodes padded with 0 or False on the right, to T tokens: under a causal mask no real token sees padding."""

    tokens: torch.Tensor  # int64 [B, T]
    action_mask: torch.Tensor  # bool [B, T]
    behavior_logprobs: torch.Tensor  # float32 [B, T]
    rewards: torch.Tensor  # float32 [B, T]: each turn's reward on its last action token
    images: list[list[AnyImage]]  # per episode
    lengths: list[int]  # tokens of each episode before padding
    ref_logprobs: Any = None  # float32 [B, T], or None if not needed
    engine_weights: Any = None  # the same
    advantages: Any = (
        None  # A_t, float32 [B, T]: like weights from `training_batch` (freshper/reinforce.py)
    )
    weights: Any = None  # w_i, float32 [B]

    def rows(self, indices: list[int]) -> "Batch":
        """Return these rows alone, trimmed to the longest of them: a micro-batch."""
        lengths = [self.lengths[i] for i in indices]
        tensors = {
            name: x[indices] for name, x in self._asdict().items() if isinstance(x, torch.Tensor)
        }
        trimmed = {name: x[:, : max(lengths)] if x.dim() == 2 else x for name, x in tensors.items()}
        return self._replace(images=[self.images[i] for i in indices], lengths=lengths, **trimmed)

    def micro_batches(self, most: int) -> Iterator[tuple[list[int], "Batch"]]:
        """Yield (row numbers, batch of these rows) for the groups of `alike`."""
        return ((rows, self.rows(rows)) for rows in alike(self.lengths, most))


def alike(lengths: list[int], most: int) -> list[list[int]]:
    """Group row numbers by length: groups of at most `most`, each with less than PADDING of padding, shortest first."""
    groups: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        joined = [*groups[-1], row]
        if len(joined) <= most and sum(lengths[k] for k in joined) > (1 - PADDING) * lengths[
            joined[0]
        ] * len(joined):
            groups[-1] = joined
        else:
            groups.append([row])
    return [group[::-1] for group in groups[::-1]]


def collate(episodes: list[Episode]) -> Batch:
    """Pad episodes into a batch. Raises ValueError if an episode's fields do not fit together."""
    fields = ("tokens", "action_mask", "behavior_logprobs", "ref_logprobs", "engine_weights")
    columns = {name: [getattr(e, name) for e in episodes] for name in fields}
    columns["rewards"] = [e.token_rewards() for e in episodes]
    padded: dict[str, Any] = {
        name: torch.nn.utils.rnn.pad_sequence(list(map(torch.from_numpy, column)), batch_first=True)
        for name, column in columns.items()
        if all(x is not None for x in column)
    }
    padded["tokens"] = padded["tokens"].long()
    return Batch(
        **padded, images=[e.images for e in episodes], lengths=[len(e.tokens) for e in episodes]
    )
