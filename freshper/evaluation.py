"""Play held-out episodes, and average success, reward and metrics. Paper: Table 1, Fig. 3 to 7.

An evaluation leaves training as it is: it restores the state of the engine's random numbers, and
keeps image features of its own.
"""

from typing import Any

import numpy as np

from envs.base import EVAL_SEEDS, TextEnv
from freshper.config import Config
from freshper.episode import Episode
from freshper.models import Policy
from freshper.rollout import Engine, rollout

Row = dict[str, Any]  # numbers by the name of their column


def evaluate(
    engine: Engine,
    policy: Policy,
    envs: list[TextEnv],
    config: Config,
    features: dict,
) -> list[Episode]:
    """Play one episode on each held-out seed and return them.

    `features` holds the features of held-out images, by key. It is used, and completed, instead of
    the policy's."""
    seeds = [EVAL_SEEDS + k for k in range(config.eval_episodes)]
    engine_state = engine.state_dict()
    training_features = policy.features

    policy.features = features
    episodes = rollout(engine, policy, envs, seeds, config.max_tokens, config.max_new_tokens)

    policy.features = training_features
    engine.load_state_dict(engine_state)
    return episodes


def means(rows: list[Row]) -> Row:
    """Return the mean of each column over the rows of a table."""
    result = {}
    for name in rows[0]:
        result[name] = np.mean([row[name] for row in rows])
    return result


def summarize(episodes: list[Episode]) -> Row:
    """Return means over episodes, with the environment's own metrics.

    `turns`: replies per episode. `invalid` and `cut`: shares of all replies."""
    rows = []
    for episode in episodes:
        row = {
            "success": episode.success,
            "reward": episode.reward,
            "truncated": episode.truncated,
            "turns": len(episode.turn_rewards),
            "invalid": episode.invalid,
            "cut": episode.cut,
        }
        rows.append(row | episode.metrics)

    summary = means(rows)
    summary["invalid"] /= summary["turns"]
    summary["cut"] /= summary["turns"]
    return summary


def baselines(env: TextEnv, episodes: int) -> Row:
    """Return mean success on the held-out seeds: of the `random` policy, and of the `optimal` one
    if it is known."""
    return means([env.baselines(EVAL_SEEDS + k) for k in range(episodes)])
