r"""The multi-turn rollout: policy and environments take turns until every episode has ended.

Paper: Algorithm 1 line 2 ("roll out pi_mu in E to collect episodes"); section 3.1
(s_{t+1} = s_t + a_t + o_t); held-out play for Table 1 and Fig. 3 to 7.

    conversation   <prompt> | <reply a_0> | <bridge o_0> | <reply a_1> | ...
                             \_ sampled _/                \_ sampled _/

A bridge closes a reply, holds the user turn o_t, and opens the next reply. A conversation is a
growing list of token ids. Nothing is decoded and encoded again: training uses the very tokens that
were sampled. The environment reads text. If the limit cut a reply, its text ends in "…", so that
no number that may lack digits is graded. All live episodes advance together. An episode ends when
the environment says so, or when its next turn would not fit `max_tokens` (truncated).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from envs.base import EVAL_SEEDS, Observation, TextEnv, UserError
from freshper.episode import AnyImage, Episode
from freshper.errors import NonFiniteError

if TYPE_CHECKING:
    from freshper.config import Config
    from freshper.models import Policy
    from freshper.trainer import TorchTrainer


@dataclass(eq=False)
class Conversation:
    """What an engine reads of one live episode. Between two calls it grows by the last reply and a
    bridge, so engines can keep caches."""

    tokens: list[int]
    images: list[AnyImage] = field(default_factory=list)
    seed: int = 0  # of the environment, to name the episode in errors


class Reply(NamedTuple):
    """What an engine sampled in one turn, a_t of section 3.1."""

    tokens: list[int]  # at least one; ends with eos unless cut by the limit
    logprobs: list[float]  # of each token at the sampling temperature, before top-k and top-p


class ReplyGenerator(Protocol):
    """What `rollout` needs of an engine."""

    policy: "Policy"

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        """Return one sampled reply to each conversation."""


class Engine(ReplyGenerator, Protocol):
    """What training needs of an engine: freshper/engine_hf.py, freshper/engine_vllm.py."""

    def sync(self, trainer: "TorchTrainer") -> dict[str, float]:
        """Use the trainer's parameters from now on (line 12). Returns numbers for metrics.csv."""

    def state_dict(self) -> dict:
        """Return the state of its random numbers, for a checkpoint."""

    def load_state_dict(self, state: dict) -> None:
        """Restore the state of its random numbers."""


class LiveEpisode:
    """An episode while it is played. `len` counts the tokens of its conversation."""

    def __init__(self, policy: "Policy", env: TextEnv, seed: int):
        observation, _ = env.reset(seed=seed)
        prompt = policy.user_turn(observation)
        self.policy = policy
        self.env = env
        self.conversation = Conversation(prompt, list(observation.images), seed)
        self.action_mask = [False] * len(prompt)
        self.logprobs = [0.0] * len(prompt)
        self.turn_rewards: list[float] = []
        self.info: dict = {}  # the environment's, of the last turn
        self.closed = False  # whether the last reply ended with a sampled eos
        self.truncated = False
        self.invalid = 0
        self.cut = 0

    def __len__(self) -> int:
        return len(self.conversation.tokens)

    def append_reply(self, reply: Reply, reward: float, info: dict) -> None:
        """Append a sampled reply a_t, the reward of its turn, and the environment's info."""
        logprob = sum(reply.logprobs)
        if not (np.isfinite(reward) and np.isfinite(logprob)):
            raise NonFiniteError(
                f"the rollout met a reward {reward} and a reply of log-prob {logprob}, which must "
                f"be finite; episode seed {self.conversation.seed}, "
                f"turn {len(self.turn_rewards) + 1}"
            )

        self.conversation.tokens += reply.tokens
        self.action_mask += [True] * len(reply.tokens)
        self.logprobs += reply.logprobs
        self.turn_rewards.append(reward)

        self.info = info
        self.closed = reply.tokens[-1] == self.policy.eos_id
        self.cut += not self.closed
        self.invalid += not info.get("valid", True)

    def append_bridge(self, observation: Observation, room: int) -> bool:
        """Append the next user turn o_t if a conversation of `room` tokens can hold it.

        Returns whether it can. If not, the episode is truncated."""
        bridge = self.policy.bridge(observation, self.closed)
        self.truncated = len(self) + len(bridge) > room
        if self.truncated:
            return False

        self.conversation.tokens += bridge
        self.conversation.images += observation.images
        self.action_mask += [False] * len(bridge)
        self.logprobs += [0.0] * len(bridge)
        return True

    def finish(self) -> Episode:
        """Return what the buffer and the loss need of this episode."""
        turn_rewards = np.array(self.turn_rewards, np.float32)
        outcome = self.info.get("metrics", {}) | {
            "success": bool(self.info["success"]),
            "truncated": self.truncated,
            "turns": len(turn_rewards),
            "invalid": self.invalid,
            "cut": self.cut,
        }
        return Episode(
            tokens=np.array(self.conversation.tokens, np.int32),
            action_mask=np.array(self.action_mask),
            behavior_logprobs=np.array(self.logprobs, np.float32),
            reward=float(turn_rewards.sum()),
            turn_rewards=turn_rewards,
            images=self.conversation.images,
            seed=self.conversation.seed,
            outcome={name: float(x) for name, x in outcome.items()},
        )


def rollout(
    engine: ReplyGenerator,
    envs: list[TextEnv],
    seeds: list[int],
    max_tokens: int,
    max_new_tokens: int,
) -> list[Episode]:
    """Play one episode per seed, all of them turn by turn, and return them in the seeds' order.

    Each seed has an environment of its own, and `envs` may hold more. `behavior_logprobs` are the
    engine's. Line 3 of Algorithm 1 replaces them by the trainer's. Raises UserError if the first
    turn of an episode does not fit `max_tokens`, NonFiniteError if a reward or log-prob is not
    finite."""
    episodes = [LiveEpisode(engine.policy, env, seed) for env, seed in zip(envs, seeds)]

    # Generated tasks are measured here, rows of --data when they are loaded.
    longest = max(episodes, key=len)
    needed = len(longest) + max_new_tokens
    if needed > max_tokens:
        raise UserError(
            f"--max_tokens is {max_tokens}, but must be at least {needed} "
            f"for the first turn of seed {longest.conversation.seed}"
        )

    live = episodes
    while live:
        conversations = [episode.conversation for episode in live]
        replies = engine.generate(conversations, max_new_tokens)
        texts = [e.policy.read(r.tokens, not e.turn_rewards) for e, r in zip(live, replies)]
        steps = type(envs[0]).step_many([episode.env for episode in live], texts)

        still_live = []
        for episode, reply, step in zip(live, replies, steps, strict=True):
            observation, reward, terminated, truncated, info = step
            episode.append_reply(reply, reward, info)
            ended = terminated or truncated
            if not ended and episode.append_bridge(observation, max_tokens - max_new_tokens):
                still_live.append(episode)
        live = still_live

    return [episode.finish() for episode in episodes]


def evaluate(engine: Engine, envs: list[TextEnv], config: "Config") -> list[Episode]:
    """Play an episode on each of the first --eval_episodes held-out seeds.

    Training stays as it is: the engine's random numbers are restored, and features of held-out
    images are kept apart, because their last bit depends on the images beside them."""
    policy = engine.policy
    seeds = [EVAL_SEEDS + k for k in range(config.eval_episodes)]
    random_state = engine.state_dict()
    training_features = policy.features

    policy.features = policy.held_out_features
    episodes = rollout(engine, envs, seeds, config.max_tokens, config.max_new_tokens)

    policy.features = training_features
    engine.load_state_dict(random_state)
    return episodes


# 0.618 EVAL_SEEDS. The two share no divisor, so seeds below EVAL_SEEDS start apart.
GOLDEN_RATIO = 618_033_989


def training_seeds(config: "Config", iteration: int) -> list[int]:
    """Return the environment seeds of an iteration, counted from 1, [rollout_batch_size].

    A run counts upwards from a start that follows from its --seed, so that it goes through all rows
    of a data set. The golden ratio keeps the starts of runs with neighbouring seeds apart: those of
    N consecutive seeds are at least 0.38 EVAL_SEEDS / N apart."""
    n = config.rollout_batch_size
    first = config.seed * GOLDEN_RATIO + (iteration - 1) * n
    return [(first + k) % EVAL_SEEDS for k in range(n)]
