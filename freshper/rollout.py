"""The multi-turn rollout: environments and policy take turns until every episode has ended.

Paper: Algorithm 1 line 2 ("roll out pi_mu in E to collect episodes"); section 3.1 (s_{t+1} = s_t + a_t + o_t).

    conversation   <prompt o_0> | <reply a_0> | <bridge o_1> | <reply a_1> | ...
                                  \\_ sampled _/               \\_ sampled _/

A conversation is a growing list of token ids. The engine appends a reply, the environment reads it as text
and answers with an observation, whose tokens are appended; nothing is ever decoded and encoded again, so
what is trained on is exactly what was sampled. All live episodes advance together, a turn at a time.

An episode ends when the environment says so, or as truncated when the next turn would not fit `max_tokens`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from envs.base import TextEnv
from freshper.episode import Episode, NonFiniteError
from freshper.models import Policy
from freshper.time_limit import limited


def training_seeds(seed: int, start: int, n: int) -> list[int]:
    """Environment seeds of the training episodes number start..start+n-1 of the run with this seed."""
    return [(seed % 900) * 1_000_000 + (start + k) % 1_000_000 for k in range(n)]


@dataclass(eq=False)
class Conversation:
    """What an engine sees of one live episode. Engines read it, only the rollout appends to it."""

    tokens: list[int]
    images: list[np.ndarray] = field(default_factory=list)
    seed: int = 0  # of the environment, to name the episode in errors


class Reply(NamedTuple):
    """What an engine sampled in one turn, a_t of section 3.1."""

    tokens: list[int]  # at least one; ends with eos unless cut by the limit
    logprobs: list[float]  # of each token at the sampling temperature, before top-k and top-p


class Engine(Protocol):
    """Generation. A conversation keeps its identity from turn to turn, so that caches can be kept by it."""

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]: ...


class RandomEngine:
    """The uniformly random player as an engine: its transcripts warm up the tiny models (freshper/tiny.py)."""

    def __init__(self, policy: Policy, envs: list[TextEnv], seed: int):
        self.policy, self.envs, self.rng = policy, envs, np.random.default_rng(seed)
        self.players: dict[int, TextEnv] = {}

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        if not self.players:
            self.players = {id(c): env for c, env in zip(conversations, self.envs, strict=True)}
        replies = []
        for conversation in conversations:
            text = self.players[id(conversation)].random_reply(self.rng)
            tokens = [*self.policy.tokenizer.encode(text, add_special_tokens=False), self.policy.eos_id]
            replies.append(Reply(tokens, [0.0] * len(tokens)))
        return replies


def rollout(
    engine: Engine,
    policy: Policy,
    envs: list[TextEnv],
    seeds: list[int],
    max_tokens: int,
    max_new_tokens: int,
    step: int = 0,
    name: str = "",
    env_timeout: float = 0.0,
) -> list[Episode]:
    """Play one episode in each environment, reset with its seed. Returns them in that order.

    `behavior_logprobs` are the engine's; line 3 of Algorithm 1 replaces them by the trainer's. Raises
    OSError where not even the first turn of an episode fits `max_tokens`, and TimeoutError, which is one too, where an
    environment takes more than `env_timeout` seconds to start or to answer (0: no limit).
    """
    observations = []
    for env, seed in zip(envs, seeds, strict=True):
        try:
            observations.append(limited(env_timeout, env.reset, seed=seed)[0])
        except Exception as error:
            error.add_note(f"in environment {name}, episode seed {seed}, reset")
            raise
    opened = zip(observations, seeds, strict=True)
    conversations = [Conversation(policy.first_prompt(o), list(o.images), seed) for o, seed in opened]
    longest = max(conversations, key=lambda c: len(c.tokens))
    needed = len(longest.tokens) + max_new_tokens
    if needed > max_tokens:  # of a later batch: freshper/load.py has looked at the first one
        raise OSError(
            f"--max_tokens is {max_tokens}, but must be at least {needed}: the first turn of episode seed "
            f"{longest.seed} takes a prompt of {len(longest.tokens)} and --max_new_tokens {max_new_tokens}"
        )
    replies: list[list[tuple[int, Reply]]] = [[] for _ in envs]  # per episode: (position, reply)
    rewards: list[list[float]] = [[] for _ in envs]
    infos: list[dict] = [{"success": False, "invalid": 0} for _ in envs]

    live = list(range(len(envs)))
    while live:
        answers = engine.generate([conversations[i] for i in live], max_new_tokens)
        lengths = [len(reply.tokens) for reply in answers]
        if len(answers) != len(live) or not 1 <= min(lengths) <= max(lengths) <= max_new_tokens:
            raise RuntimeError(
                f"the engine returned {len(answers)} replies of {lengths} tokens to {len(live)} conversations, "
                f"but must return one to each, of 1 to {max_new_tokens} tokens"
            )
        texts = [policy.reply_text(reply.tokens) for reply in answers]
        steps = _steps([envs[i] for i in live], texts)
        still_live = []
        for i, reply in zip(live, answers, strict=True):
            conversation = conversations[i]
            replies[i].append((len(conversation.tokens), reply))
            conversation.tokens += reply.tokens
            try:
                observation, reward, terminated, truncated, info = limited(env_timeout, next, steps)
            except Exception as error:
                error.add_note(f"in environment {name}, episode seed {seeds[i]}, turn {len(replies[i])}")
                raise
            rewards[i].append(reward)
            if not np.isfinite([reward, *reply.logprobs]).all():
                raise NonFiniteError(
                    f"the rollout met a reward {reward} and log-probs {reply.logprobs}, which must be finite; "
                    f"episode seed {seeds[i]}, turn {len(replies[i])}"
                )
            infos[i]["success"] = bool(info["success"])
            infos[i]["invalid"] += not info.get("valid", True)
            infos[i] |= info.get("metrics", {})
            if terminated or truncated:
                continue
            bridge = policy.bridge(observation, closed=reply.tokens[-1] == policy.eos_id)
            if len(conversation.tokens) + len(bridge) + max_new_tokens > max_tokens:
                infos[i]["truncated"] = True
                continue
            conversation.tokens += bridge
            conversation.images += observation.images
            still_live.append(i)
        live = still_live

    episodes = []
    for i, conversation in enumerate(conversations):
        tokens = np.array(conversation.tokens, dtype=np.int32)
        mask, logprobs = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=np.float32)
        for position, reply in replies[i]:
            mask[position : position + len(reply.tokens)] = True
            logprobs[position : position + len(reply.tokens)] = reply.logprobs
        turn_rewards = np.array(rewards[i], dtype=np.float32)
        total = float(turn_rewards.sum())
        episodes.append(
            Episode(tokens, mask, logprobs, total, turn_rewards, conversation.images, step, name, seeds[i], infos[i])
        )
    return episodes


def _steps(envs: list[TextEnv], texts: list[str]) -> Iterator[tuple]:
    """What the environments answer, asked when the first answer is: also those that answer all at once are
    asked inside the time limit."""
    yield from type(envs[0]).step_many(envs, texts)


def summarize(episodes: list[Episode], metrics: tuple[str, ...] = ()) -> dict[str, float]:
    """Success rate, mean return, turns an episode, the share of replies that could not be read, and means of the
    environment's own `metrics`."""
    turns = sum(len(e.turn_rewards) for e in episodes)
    return {
        "success": sum(e.info["success"] for e in episodes) / len(episodes),
        "reward": sum(e.reward for e in episodes) / len(episodes),
        "turns": turns / len(episodes),
        "invalid": sum(e.info["invalid"] for e in episodes) / turns,
        **{name: sum(e.info[name] for e in episodes) / len(episodes) for name in metrics},
    }
