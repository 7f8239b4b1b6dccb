"""The multi-turn rollout: policy and environments take turns until every episode has ended.

Paper: Algorithm 1 line 2 ("roll out pi_mu in E to collect episodes"); section 3.1 (s_{t+1} = s_t + a_t + o_t).

    conversation   <prompt o_0> | <reply a_0> | <bridge o_1> | <reply a_1> | ...
                                  \\_ sampled _/               \\_ sampled _/

A conversation is a growing list of token ids. Nothing is decoded and encoded again: what was sampled is trained on. The
environment reads text. If the limit cut a reply, its text ends in "…": the last number may lack digits. All
live episodes advance together, until the environment ends one or its next turn would not fit `max_tokens` (truncated).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from envs.base import EVAL_SEEDS, TextEnv
from freshper.config import Config
from freshper.episode import Episode
from freshper.errors import NonFiniteError
from freshper.models import Policy

GOLDEN_RATIO = 618_033_989  # 0.618 EVAL_SEEDS, without a common divisor: every seed has its own start


def training_seeds(config: Config, iteration: int) -> list[int]:
    """Return the environment seeds of an iteration, [rollout_batch_size]: each comes `group_size` times.

    A run counts upwards from a start of its own, so that it goes through all rows of a data set. The
    golden ratio keeps the starts of different runs apart: N runs are at least 0.38 EVAL_SEEDS / N apart.
    """
    n = config.rollout_batch_size // config.group_size
    first = config.seed * GOLDEN_RATIO + iteration * n
    return [(first + k) % EVAL_SEEDS for k in range(n) for _ in range(config.group_size)]


@dataclass(eq=False)
class Conversation:
    """What an engine reads of one live episode. The rollout appends to it, so that engines can keep caches by it."""

    tokens: list[int]
    images: list[np.ndarray] = field(default_factory=list)
    seed: int = 0  # of the environment, to name the episode in errors


class Reply(NamedTuple):
    """What an engine sampled in one turn, a_t of section 3.1."""

    tokens: list[int]  # at least one; ends with eos unless cut by the limit
    logprobs: list[float]  # of each token at the sampling temperature, before top-k and top-p


def rollout(
    engine: Any, policy: Policy, envs: list[TextEnv], seeds: list[int], max_tokens: int, max_new_tokens: int
) -> list[Episode]:
    """Play an episode on each seed, in an environment of its own, and return them in that order. `envs` may be more.
    `behavior_logprobs` are the engine's; line 3 of Algorithm 1 replaces them by the trainer's. Raises OSError if the
    first turn of an episode does not fit `max_tokens`, NonFiniteError if a reward or log-prob is not finite."""
    opened = [(env.reset(seed=seed)[0], seed) for env, seed in zip(envs, seeds, strict=False)]
    conversations = [Conversation(policy.user_turn(o), list(o.images), seed) for o, seed in opened]
    logprobs = [[np.nan] * len(c.tokens) for c in conversations]  # NaN: not sampled
    rewards: list[list[float]] = [[] for _ in seeds]
    endings: list[dict] = [{"invalid": 0, "cut": 0} for _ in seeds]  # fields of each episode as of its last turn
    needed, seed = max((len(c.tokens) + max_new_tokens, c.seed) for c in conversations)
    if needed > max_tokens:  # of a later batch: `load` has checked the first one
        raise OSError(f"--max_tokens is {max_tokens}, but must be at least {needed} for the first turn of seed {seed}")
    live = list(range(len(seeds)))
    while live:
        replies = engine.generate([conversations[i] for i in live], max_new_tokens)
        texts = [policy.tokenizer.decode([t for t in reply.tokens if t != policy.eos_id]) for reply in replies]
        texts = [text + "…" * (reply.tokens[-1] != policy.eos_id) for text, reply in zip(texts, replies, strict=True)]
        steps = type(envs[0]).step_many([envs[i] for i in live], texts)
        still_live = []
        for i, reply, (observation, reward, terminated, truncated, info) in zip(live, replies, steps, strict=True):
            conversation, ending = conversations[i], endings[i]
            closed, reply_logprob = reply.tokens[-1] == policy.eos_id, sum(reply.logprobs)
            if not np.isfinite(reward + reply_logprob):
                found = f"a reward {reward} and a reply of log-prob {reply_logprob}, which must be finite"
                raise NonFiniteError(f"the rollout met {found}; episode seed {seeds[i]}, turn {len(rewards[i]) + 1}")
            conversation.tokens += reply.tokens
            logprobs[i] += reply.logprobs
            rewards[i].append(reward)
            ending |= {"success": bool(info["success"]), "metrics": info.get("metrics", {})}
            ending["invalid"] += not info.get("valid", True)
            ending["cut"] += not closed
            if terminated or truncated:
                continue
            bridge = policy.bridge(observation, closed)
            ending["truncated"] = len(conversation.tokens) + len(bridge) + max_new_tokens > max_tokens
            if not ending["truncated"]:
                conversation.tokens += bridge
                conversation.images += observation.images
                logprobs[i] += [np.nan] * len(bridge)
                still_live.append(i)
        live = still_live
    episodes = []
    for i, c in enumerate(conversations):
        sampled, turn_rewards = np.array(logprobs[i], dtype=np.float32), np.array(rewards[i], dtype=np.float32)
        arrays = np.array(c.tokens, dtype=np.int32), ~np.isnan(sampled), np.nan_to_num(sampled)
        episodes.append(Episode(*arrays, float(turn_rewards.sum()), turn_rewards, c.images, seed=c.seed, **endings[i]))
    return episodes
