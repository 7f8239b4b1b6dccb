"""How much does keeping the KV cache across the turns of a conversation save in a rollout?

Two engines play the same game through `freshper.rollout.rollout`: 64 FrozenLake conversations of 10 turns with
the tiny policy (random weights, one torch thread), replies of exactly 4 sampled tokens.

- `HFEngine` (ours) feeds a turn's new tokens only and goes on from the cache of the turns before.
- `GenerateEngine` is what one writes first: at every turn it pads the whole conversations on the left and calls
  `model.generate` of transformers with the same sampling. Within a call that keeps a cache too; the next turn
  begins at the first token again. It is spared the log-probs that ours returns and, with --images, making pixel
  values twice: each picture is preprocessed once and kept, only the vision tower sees it again every turn.

So that both do the same work whatever random weights sample, no reply can end early (eos is suppressed), and the
environment plays its own legal move instead of reading the reply and never ends before turn 10. The lengths of
all conversations are compared at every turn.

Read it so: "seconds" is the whole rollout, environments included, the median over alternating rounds after an
untimed warm-up game of each engine; "turn k" is the median time of the engine's k-th `generate`. "growth" is
the mean of turns 8 to 10 over that of turns 2 to 4: near 1 where a turn costs its new tokens only.

    python benchmarks/rollout.py [--images]
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs.frozenlake import FrozenLake
from freshper.rollout import Reply, rollout

EPISODES, TURNS, REPLY, ROUNDS = 64, 10, 4, 5
SPEEDUP, GROWTH = 4.0, 1.5  # the targets: at least, at most


class EndlessLake(FrozenLake):
    """FrozenLake where every episode takes `max_turns` turns and every seed shows the same observations."""

    def step(self, reply):
        legal = self.random_reply(self.np_random)
        observation, reward, _, truncated, info = super().step(legal)
        return observation, reward, False, truncated, info


class GenerateEngine:
    """Plain `model.generate` over the whole conversations, every turn."""

    def __init__(self, policy, sampling):
        self.policy, self.sampling = policy, sampling
        self.pixels = {}  # id of a picture -> its pixel values and grid

    @torch.inference_mode()
    def generate(self, conversations, max_new_tokens):
        self.policy.model.eval()
        longest = max(len(c.tokens) for c in conversations)
        tokens = torch.full((len(conversations), longest), self.policy.tokenizer.pad_token_id)
        mask = torch.zeros_like(tokens)
        for row, c in enumerate(conversations):
            tokens[row, -len(c.tokens) :] = torch.tensor(c.tokens)
            mask[row, -len(c.tokens) :] = 1
        out = self.policy.model.generate(
            input_ids=tokens,
            attention_mask=mask,
            **self.vision(tokens, [image for c in conversations for image in c.images]),
            do_sample=True,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            max_new_tokens=max_new_tokens,
            suppress_tokens=self.policy.suppressed_ids,
        )
        return [Reply(reply, [0.0] * len(reply)) for reply in out[:, longest:].tolist()]

    def vision(self, tokens, images):
        """What Qwen2.5-VL wants to know of pictures. They stand in the order of their placeholders."""
        if not images:
            return {}
        for image in images:
            if id(image) not in self.pixels:
                inputs = self.policy.image_processor(images=[Image.fromarray(image)], return_tensors="pt")
                self.pixels[id(image)] = (inputs["pixel_values"], inputs["image_grid_thw"])
        values, grids = zip(*(self.pixels[id(image)] for image in images), strict=True)
        return {
            "pixel_values": torch.cat(values),
            "image_grid_thw": torch.cat(grids),
            "mm_token_type_ids": (tokens == self.policy.image_token_id).int(),
        }


class Timed:
    """An engine that notes the seconds of every `generate` and the lengths of the conversations it was given."""

    def __init__(self, engine):
        self.engine, self.seconds, self.lengths = engine, [], []

    def generate(self, conversations, max_new_tokens):
        self.lengths.append([len(c.tokens) for c in conversations])
        start = time.perf_counter()
        replies = self.engine.generate(conversations, max_new_tokens)
        self.seconds.append(time.perf_counter() - start)
        return replies


def play(policy, make_engine, images):
    """One game: seconds of the rollout, seconds of each turn [TURNS], lengths of the conversations [TURNS, EPISODES]."""
    envs, engine = [EndlessLake(image=images) for _ in range(EPISODES)], Timed(make_engine())
    start = time.perf_counter()
    episodes = rollout(engine, policy, envs, list(range(EPISODES)), max_tokens=4096, max_new_tokens=REPLY)
    seconds = time.perf_counter() - start
    assert all(len(e.turn_rewards) == TURNS and e.action_mask.sum() == TURNS * REPLY for e in episodes)
    return seconds, engine.seconds, np.array(engine.lengths)
