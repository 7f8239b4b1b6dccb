"""The warm start of the tiny models: supervised learning in the place of pre-training.

Ours; the paper starts from Qwen2.5 instruct models (appendix D). The data are episodes of the random policy, never good
ones: they teach the form of a reply, what an action does and what an observation shows, and leave the success of the
random policy. A transcript is an episode, and then a user turn with the final observation and its caption:

    <user> the state <assistant> <answer>Up</answer> <user> ... <user> the last state ? X b3 G b2 O b3 c3 a4

Text models learn every token of it; image models learn replies and captions, which train the vision tower. A caption is
no reply: RL, which pushes down the replies of failed episodes, would drive the policy into captions.
"""

from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm
from transformers import get_scheduler

from envs.base import WARM_START_SEEDS, Observation, TextEnv
from freshper.episode import Episode, collate
from freshper.models import Policy
from freshper.rollout import Conversation, Reply, rollout

BATCH = 64  # episodes


class RandomEngine:
    """The random policy as an engine."""

    def __init__(self, policy: Policy, envs: list[TextEnv], seeds: list[int]):
        self.policy, self.rng = policy, np.random.default_rng(seeds[0])
        self.env_of = dict(zip(seeds, envs, strict=True))

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        texts = [self.env_of[conversation.seed].random_reply(self.rng) for conversation in conversations]
        encoded = [self.policy.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [Reply([*tokens, self.policy.eos_id], [0.0] * (len(tokens) + 1)) for tokens in encoded]


def transcripts(policy: Policy, envs: list[TextEnv], seeds: list[int]) -> list[Episode]:
    """Return an episode of the random policy in each environment, with one more turn: the final observation and its
    caption. The action mask covers replies and captions. Raises ValueError if a caption is empty."""
    episodes = rollout(RandomEngine(policy, envs, seeds), policy, envs, seeds, max_tokens=4096, max_new_tokens=8)
    for episode, env in zip(episodes, envs, strict=True):
        final, caption = env.observe(), env.caption()
        if not caption:
            raise ValueError(f"{type(env).__name__}.caption() is empty, but must say what the observation shows")
        turn = policy.bridge(Observation(f"{final.text}?{caption}", final.images), closed=True)
        _, suffix = policy._template(0, first=False)  # what the chat template puts after a user's text
        end = len(turn) - len(policy.tokenizer.encode(suffix, add_special_tokens=False))
        told = np.zeros(len(turn), dtype=bool)
        told[end - len(policy.tokenizer.encode(caption, add_special_tokens=False)) : end] = True
        episode.tokens = np.append(episode.tokens, turn).astype(np.int32)
        episode.action_mask = np.append(episode.action_mask, told)
        episode.behavior_logprobs = np.zeros(len(episode.tokens), dtype=np.float32)
        episode.turn_rewards = np.append(episode.turn_rewards, 0.0).astype(np.float32)
        episode.images = [*episode.images, *final.images]
    return episodes


def supervised_step(policy: Policy, episodes: list[Episode]) -> None:
    """Accumulate the gradient of the mean cross-entropy of all tokens (text) or replies and captions (images)."""
    images = policy.image_processor is not None
    n = sum(int(e.action_mask[1:].sum()) if images else len(e.tokens) - 1 for e in episodes)
    for _, part in collate(episodes).micro_batches(16):
        real = torch.arange(part.tokens.shape[1]) < torch.tensor(part.lengths)[:, None]
        mask = (part.action_mask if images else real)[:, 1:]
        logits = policy.model.lm_head(policy.batch_hidden(part)[:, :-1][mask])
        loss = torch.nn.functional.cross_entropy(logits, part.tokens[:, 1:][mask], reduction="sum") / n
        loss.backward()


def warm_start(policy: Policy, make_env: Callable[[], TextEnv], schedule: tuple[tuple[int, int], ...]) -> None:
    """Train the policy on fresh episodes of the random policy. `schedule`: (batches, turns of their episodes)."""
    envs = [make_env() for _ in range(BATCH)]
    turns_of_batches = [turns for batches, turns in schedule for _ in range(batches)]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=3e-3, weight_decay=0.0)
    rate = get_scheduler("cosine", optimizer, len(turns_of_batches) // 20, len(turns_of_batches))
    policy.model.train()
    for batch, turns in enumerate(tqdm(turns_of_batches, desc="warm start (once)", unit="batch")):
        for env in envs:
            env.max_turns = turns
        seeds = [WARM_START_SEEDS + batch * BATCH + k for k in range(BATCH)]
        optimizer.zero_grad()
        supervised_step(policy, transcripts(policy, envs, seeds))
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        rate.step()
