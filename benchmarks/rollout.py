"""How much time does a rollout save by keeping the KV cache from turn to turn?

    python benchmarks/rollout.py        a minute

Two engines play the same game through `freshper.rollout.rollout`: 16 FrozenLake conversations of 10
turns, with the prompts of pretrained models (350 tokens at turn 1, 1,600 at turn 10), the tiny
policy with random weights, one torch thread, replies of exactly 4 sampled tokens.

- `HFEngine` (ours) feeds a turn's new tokens only, and goes on from the cache of the turns before.
- `GenerateEngine` is what one writes first: at every turn it pads the whole conversations on the
  left and calls `model.generate` of transformers with the same sampling. That keeps a cache within
  the call, and the next turn starts at the first token again. It is spared the log-probs that ours
  returns.

No reply ends early (eos is suppressed), and the environment plays a legal move of its own instead
of reading the reply, until turn 10: both engines do the same work, and the lengths of all
conversations must agree. Seconds are medians over rounds in which the engines alternate, after an
untimed game of each, first with the environments, then without. "growth" is the mean of turns 8 to
10 over that of turns 2 to 4 (in ours only attention grows).
"""

import time
from typing import Any

import common
import numpy as np
import torch

from envs.frozenlake import FrozenLake
from freshper.engine_hf import HFEngine, Sampling
from freshper.models import Policy
from freshper.rollout import Conversation, Engine, Reply, rollout
from freshper.tiny import build_policy, keep_freed_memory

SEEDS = list(range(16))
TURNS = 10
REPLY = 4  # tokens
ROUNDS = 3
SPEEDUP = 4.0  # the target: at least


class EndlessLake(FrozenLake):
    """FrozenLake whose episodes take all turns. What it shows depends on the seed alone, not on the
    replies."""

    max_turns = TURNS

    def step(self, reply: str) -> tuple:
        observation, reward, _, truncated, info = super().step(self.random_reply(self.np_random))
        return observation, reward, False, truncated, info


class GenerateEngine:
    """Plain `model.generate` over the whole conversations, every turn."""

    def __init__(self, policy: Policy, sampling: Sampling):
        self.policy = policy
        self.sampling = sampling

    @torch.inference_mode()
    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        texts = [conversation.tokens for conversation in conversations]
        longest = max(map(len, texts))
        pad = self.policy.tokenizer.pad_token_id
        tokens = torch.tensor([[pad] * (longest - len(text)) + text for text in texts])
        lengths = torch.tensor([[len(text)] for text in texts])  # [B, 1]

        output = self.policy.model.eval().generate(
            input_ids=tokens,
            attention_mask=(torch.arange(longest) >= longest - lengths).long(),
            do_sample=True,
            max_new_tokens=max_new_tokens,
            suppress_tokens=self.policy.suppressed_ids,
            **vars(self.sampling),  # temperature, top_k, top_p
        )
        return [Reply(reply, [0.0] * len(reply)) for reply in output[:, longest:].tolist()]


class Game:
    """A game of an engine: `seconds` of the rollout, `turns`, the seconds of each `generate`
    [TURNS], and `lengths` of the conversations [TURNS, B]."""

    def __init__(self, policy: Policy, engine: Engine):
        self.policy = policy
        self.engine = engine
        self.turns: list[float] = []
        self.lengths: list[list[int]] = []
        envs: list[Any] = [EndlessLake(style="full") for _ in SEEDS]
        start = time.perf_counter()
        episodes = rollout(self, envs, SEEDS, max_tokens=4096, max_new_tokens=REPLY)
        self.seconds = time.perf_counter() - start
        assert all(episode.action_mask.sum() == TURNS * REPLY for episode in episodes)

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        self.lengths.append([len(conversation.tokens) for conversation in conversations])
        start = time.perf_counter()
        replies = self.engine.generate(conversations, max_new_tokens)
        self.turns.append(time.perf_counter() - start)
        return replies


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    policy = build_policy(FrozenLake())
    policy.suppressed_ids = [*policy.suppressed_ids, policy.eos_id]
    engines = (GenerateEngine(policy, Sampling()), HFEngine(policy, Sampling(), seed=0))
    rounds = []
    for _ in range(1 + ROUNDS):
        plain, ours = games = [Game(policy, engine) for engine in engines]
        assert plain.lengths == ours.lengths
        rounds.append(games)

    whole = []
    for engine, *games in zip(engines, *rounds[1:]):
        turns = np.median([game.turns for game in games], axis=0)
        whole.append(np.median([game.seconds for game in games]))
        growth = turns[7:10].mean() / turns[1:4].mean()
        name = type(engine).__name__
        print(f"{name:14} {whole[-1]:.2f} s, {turns.sum():.2f} s, growth {growth:.2f}")
    speedup = whole[0] / whole[1]
    common.print_verdict(speedup >= SPEEDUP, f"rollout {speedup:.1f}x >= {SPEEDUP:g}x")


if __name__ == "__main__":
    main()
