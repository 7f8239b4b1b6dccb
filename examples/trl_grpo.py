"""The replay buffer in someone else's trainer: TRL's GRPO, every second update of which replays.

    python -m examples.trl_grpo

TRL can make `num_iterations` updates on the completions it has just generated. Here only the first
is on those. The others draw theirs from the buffer by |A_i| (section 3.4) and freshness (eq. 14),
and keep the log pi_mu of collection. The task is one move on a frozen lake to a goal next to the
start: the random policy finds it one time in four.
"""

from functools import partial

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from envs.frozenlake import FrozenLake
from freshper.buffer import ReplayBuffer
from freshper.episode import Episode, collate
from freshper.priority import advantage_priority, exponential_decay
from freshper.tiny import tiny_model

LAKE = FrozenLake(max_turns=1)


class ReplayGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose updates are fresh and replayed in turn."""

    buffer: ReplayBuffer

    def _prepare_inputs(self, generation_batch: list[dict]) -> dict[str, torch.Tensor]:
        batch = super()._prepare_inputs(generation_batch)
        size = len(batch["advantages"])
        step = self.state.global_step  # counts updates: the clock of age
        # `_step` counts micro-batches. A generation is used `num_iterations` times.
        generation = self.args.steps_per_generation
        if self._step % (generation * self.num_iterations) < generation:
            episodes = [to_episode(batch, k) for k in range(size)]
            priorities = advantage_priority(batch["advantages"], epsilon=0.01)
            self.buffer.add(episodes, priorities, step)
            return batch

        self.buffer.refresh(step)
        drawn = self.buffer.sample(size, step).episodes
        replay = collate(drawn)
        ones = torch.ones_like(replay.tokens)

        # The first token is the prompt. `tool_mask` limits the loss to what was sampled.
        return {
            "prompt_ids": replay.tokens[:, :1],
            "prompt_mask": ones[:, :1],
            "completion_ids": replay.tokens[:, 1:],
            "completion_mask": ones[:, 1:],
            "tool_mask": replay.action_mask[:, 1:],
            "old_per_token_logps": replay.behavior_logprobs[:, 1:],
            "advantages": torch.tensor([episode.reward for episode in drawn]),
        }


def to_episode(batch: dict[str, torch.Tensor], row: int) -> Episode:
    """Return a row of TRL's batch without its padding. Its reward is the advantage that TRL has
    computed."""
    prompt_mask = batch["prompt_mask"][row] == 1
    completion_mask = batch["completion_mask"][row] == 1
    prompt = batch["prompt_ids"][row][prompt_mask].numpy()
    completion = batch["completion_ids"][row][completion_mask].numpy()
    logprobs = batch["old_per_token_logps"][row][completion_mask].numpy()
    advantage = batch["advantages"][row].numpy()

    return Episode(
        tokens=np.append(prompt, completion),
        action_mask=np.append(np.zeros(len(prompt), bool), np.ones(len(completion), bool)),
        behavior_logprobs=np.append(np.zeros(len(prompt), np.float32), logprobs),
        reward=float(advantage),
        turn_rewards=advantage[None],
    )


def reward(completions: list[list[dict]], seed: list[int], **_: object) -> list[float]:
    """Return the reward of each completion: one step on the lake of its seed."""
    rewards = []
    for completion, lake_seed in zip(completions, seed, strict=True):
        LAKE.reset(seed=lake_seed)
        rewards.append(LAKE.step(completion[0]["content"])[1])
    return rewards


def make_trainer(kind: type[GRPOTrainer] = ReplayGRPOTrainer, **settings: object) -> GRPOTrainer:
    """Return a trainer of the tiny FrozenLake model on maps whose goal is one move away."""
    seeds = [seed for seed in range(4000) if LAKE.baselines(seed)["optimal"] == 1.0]
    prompts = [[{"role": "user", "content": LAKE.reset(seed=seed)[0].text}] for seed in seeds]
    data = Dataset.from_dict({"seed": seeds, "prompt": prompts})

    config = GRPOConfig(
        num_iterations=2,
        loss_type="grpo",
        max_completion_length=6,
        bf16=False,
        use_cpu=True,
        # The tokens of single bytes.
        generation_kwargs={"suppress_tokens": list(range(256))},
        **settings,
    )
    trainer = kind(str(tiny_model("frozenlake")), reward, config, data)
    decay = partial(exponential_decay, tau=20.0)
    trainer.buffer = ReplayBuffer(10_000, alpha=0.6, decay=decay)
    return trainer


if __name__ == "__main__":
    trainer = make_trainer(
        max_steps=400, learning_rate=1e-3, per_device_train_batch_size=32, output_dir="out/trl"
    )
    trainer.train()
