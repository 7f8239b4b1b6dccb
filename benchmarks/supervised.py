"""How well does the tiny model of a task play when it is shown good play? A ceiling beside what RL
reaches.

The model that FreshPER starts from learns, by supervision, the replies of a player that is optimal
but for `--mistakes` of its replies, which are random: so it also sees how to go on from states off
the best path. It learns from the successful episodes alone, fresh ones in every batch. Then it
plays the held-out episodes, sampling as RL does. If RL has more than this, the model binds, or what
the warm start taught it; if less, exploration or credit.

    python benchmarks/supervised.py --env frozenlake                half an hour on one core
"""

import time

import common
import numpy as np
import torch

from envs import ENVS
from envs.base import EVAL_SEEDS
from freshper.engine_hf import HFEngine, Sampling
from freshper.evaluation import baselines
from freshper.flags import parse_args
from freshper.models import load_policy
from freshper.rollout import Conversation, Reply, rollout
from freshper.tiny import BATCH, RandomEngine, keep_freed_memory, supervised_step, tiny_model


class NearOptimalEngine(RandomEngine):
    """A player as an engine: optimal, but for a share of `mistakes`."""

    mistakes = 0.15

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        replies = super().generate(conversations, max_new_tokens)
        for k, conversation in enumerate(conversations):
            if self.rng.random() >= self.mistakes:
                replies[k] = self.reply(self.env_of[conversation.seed].optimal_reply())
        return replies


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--env", choices=list(ENVS), default="frozenlake")
    parser.add_argument("--batches", type=int, default=800, help=f"of {BATCH} episodes")
    parser.add_argument("--mistakes", type=float, default=NearOptimalEngine.mistakes)
    args = parser.parse_args()
    NearOptimalEngine.mistakes = args.mistakes
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    config = parse_args(["--env", args.env, "--model", "tiny"]).config
    lengths = (config.max_tokens, config.max_new_tokens)
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    # As in reinforcement learning, the vision tower is not trained.
    policy = load_policy(str(tiny_model(args.env)), "cpu", torch.float32, freeze_vision=True)
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)
    envs = [config.make_env() for _ in range(max(2 * BATCH, config.eval_episodes))]
    held_out = [EVAL_SEEDS + k for k in range(config.eval_episodes)]

    bounds = {}
    for name, value in baselines(envs[0], config.eval_episodes).items():
        bounds[name] = round(value, 3)
    print(f"{config.task()}: {bounds}")
    print("| batches | held-out success | seconds |\n|---|---|---|", flush=True)
    start = time.perf_counter()
    seed = 0
    for batch in range(args.batches + 1):
        if batch % 100 == 0:
            policy.model.eval()
            engine = HFEngine(policy, sampling, seed=batch)
            played = rollout(engine, policy, envs, held_out, *lengths)
            success = np.mean([episode.success for episode in played])
            print(f"| {batch} | {success:.3f} | {time.perf_counter() - start:.0f} |", flush=True)
        if batch == args.batches:
            break

        good = []
        while len(good) < BATCH:
            seeds = list(range(seed, seed + BATCH))
            seed += BATCH
            player = NearOptimalEngine(policy, envs[:BATCH], seeds)
            episodes = rollout(player, policy, envs, seeds, *lengths)
            good += [episode for episode in episodes if episode.success]

        policy.model.train()
        optimizer.zero_grad()
        supervised_step(policy, good[:BATCH])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
