"""The replay buffer in someone else's trainer: TRL's GRPO, every second update of which replays.

TRL can make `num_iterations` updates on the completions it has just generated; here only the first is on those. The
others draw theirs from the buffer by |A_i| (section 3.4) and freshness, and keep the log pi_mu of collection.
The task is one move on a frozen lake, to a goal next to the player: a random one finds it one time in four."""

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
    def _prepare_inputs(self, generation_batch: list[dict]) -> dict[str, torch.Tensor]:
        batch = super()._prepare_inputs(generation_batch)
        if self._step % self.num_iterations == 0:  # `_step` counts updates: the clock of age
            rows = [episode({k: v[i] for k, v in batch.items() if v.ndim}) for i in range(len(batch["advantages"]))]
            self.buffer.add(rows, advantage_priority(batch["advantages"], epsilon=0.01), self._step)
            return batch
        self.buffer.refresh(self._step)
        tokens, action_mask, logprobs, *_ = collate(drawn := self.buffer.sample(len(batch["advantages"])).episodes)
        ids, there = {"prompt_ids": tokens[:, :1], "completion_ids": tokens[:, 1:]}, torch.ones_like(tokens)
        masks = {"prompt_mask": there[:, :1], "completion_mask": there[:, 1:], "tool_mask": action_mask[:, 1:]}
        advantages = torch.tensor([e.reward for e in drawn])
        return ids | masks | {"old_per_token_logps": logprobs[:, 1:], "advantages": advantages}


def episode(row: dict[str, torch.Tensor]) -> Episode:
    """A row of TRL's batch without its padding; the place of the reward has the advantage that TRL made of it."""
    said, a = row["completion_mask"] == 1, row["advantages"].numpy()
    prompt, reply = row["prompt_ids"][row["prompt_mask"] == 1].numpy(), row["completion_ids"][said].numpy()
    logprobs = np.append(np.zeros(len(prompt)), row["old_per_token_logps"][said].numpy())
    return Episode(np.append(prompt, reply), np.arange(len(logprobs)) >= len(prompt), logprobs, float(a), a[None])


def reward(completions: list[list[dict]], seed: list[int], **_: object) -> list[float]:
    return [(LAKE.reset(seed=s), LAKE.step(c[0]["content"])[1])[1] for c, s in zip(completions, seed, strict=True)]


def make_trainer(kind: type[GRPOTrainer] = ReplayGRPOTrainer, **settings: object) -> GRPOTrainer:
    seeds = [s for s in range(4000) if LAKE.baselines(s)["optimal"] == 1.0]
    data = {"seed": seeds, "prompt": [[{"role": "user", "content": LAKE.reset(seed=s)[0].text}] for s in seeds]}
    fixed = {"num_iterations": 2, "loss_type": "grpo", "max_completion_length": 6, "bf16": False, "use_cpu": True}
    config = GRPOConfig(**fixed, **settings, generation_kwargs={"suppress_tokens": list(range(256))})  # bytes
    trainer = kind(str(tiny_model("frozenlake")), reward, config, Dataset.from_dict(data))
    trainer.buffer = ReplayBuffer(10_000, alpha=0.6, decay=lambda age: exponential_decay(age, tau=20.0))
    return trainer


if __name__ == "__main__":
    make_trainer(max_steps=400, learning_rate=1e-3, per_device_train_batch_size=32, output_dir="out/trl").train()
