"""The replay buffer in someone else's trainer: TRL's GRPO, every second update of which replays.

    python -m examples.trl_grpo --num_iterations 2 ...     the flags of GRPOConfig

TRL makes `num_iterations` updates with each batch of completions. Here the first is with those
completions, the others are with rollouts from the buffer. docs/your_trainer.md explains places 1 to
4. The task is one move on a frozen lake, to a goal next to the start: one move in four is right.
"""

from functools import partial
from types import SimpleNamespace

from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

from envs.frozenlake import FrozenLake
from freshper.buffer import ReplayBuffer
from freshper.priority import advantage_priority, exponential_decay

LAKE = FrozenLake(max_turns=1)


class ReplayGRPOTrainer(GRPOTrainer):
    """GRPO that replays in all but the first of `num_iterations` updates."""

    def _prepare_inputs(self, prompts: list[dict]) -> dict:
        batch = super()._prepare_inputs(prompts)
        if not self.model.training:
            return batch

        advantages = batch["advantages"]  # [B]
        step = self.state.global_step  # of the optimizer: the clock of age
        fresh = self.args.steps_per_generation  # micro-batches
        if self._step % (fresh * self.num_iterations) < fresh:
            # Place 1: TRL has taken log-probs before the update, because `num_iterations` is not 1.
            # Advantages are stored, too, because their groups are not drawn whole.
            columns = batch | {"advantages": advantages[:, None]}
            del columns["num_items_in_batch"]  # has no rows
            rows = range(len(advantages))
            rollouts = [SimpleNamespace(columns=columns, row=row, images=[]) for row in rows]

            # Place 2: where the advantage is 0 there is no gradient, whatever the return.
            priorities = advantage_priority(advantages.tolist(), epsilon=0.01)
            self.buffer.add(rollouts, priorities, step)
            return batch

        # Place 3
        self.buffer.refresh(step)
        drawn = self.buffer.sample(len(advantages)).episodes

        # Place 4: TRL clips the ratio against `old_per_token_logps`, now the stored ones. The
        # number of tokens that its loss is divided by stays that of the fresh batch.
        replay = {}
        for name in drawn[0].columns:
            side = "left" if "prompt" in name else "right"  # where rows are padded
            column = [rollout.columns[name][rollout.row] for rollout in drawn]
            replay[name] = pad_sequence(column, True, padding_side=side)
        return batch | replay


def reward(completions: list, best: list, **_: object) -> list[float]:
    """Return 1 for each reply that moves onto the goal, else 0."""
    return [float(reply[0]["content"] == move) for reply, move in zip(completions, best)]


def make_trainer(config: GRPOConfig) -> GRPOTrainer:
    """Return a trainer of the tiny FrozenLake model on lakes whose goal is next to the start."""
    rows = []
    for seed in range(2000):
        if LAKE.policy_levels(seed)["optimal"] == 1.0:
            text = LAKE.reset(seed=seed)[0].text
            prompt = [{"role": "user", "content": text}]
            rows.append({"prompt": prompt, "best": LAKE.optimal_reply()})

    data = Dataset.from_list(rows)
    trainer = ReplayGRPOTrainer("freshper/weights/frozenlake", reward, config, data)
    trainer.buffer = ReplayBuffer(10_000, 0.6, partial(exponential_decay, tau=20.0))
    return trainer


if __name__ == "__main__":
    trainer = make_trainer(*HfArgumentParser(GRPOConfig).parse_args_into_dataclasses())
    trainer.train()
    trainer.save_state()
