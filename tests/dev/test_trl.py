"""The buffer in TRL's trainer (examples/trl_grpo.py)."""

import re
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import HfArgumentParser

from examples import trl_grpo

COLUMNS = """prompt_ids completion_ids prompt_mask completion_mask advantages
old_per_token_logps""".split()
FLAGS = """--num_iterations 2 --max_steps 8 --gradient_accumulation_steps 2 --learning_rate 0
--temperature 1.2 --max_completion_length 20 --bf16 False --output_dir""".split()


def test_while_weights_stand_still_trl_finds_the_stored_log_probs_again(tmp_path, monkeypatch):
    errors, sampled = [], set()
    compute_loss = trl_grpo.GRPOTrainer._compute_loss

    def watch(self, model, inputs):
        prompt, reply, in_prompt, in_reply, advantages, old = map(inputs.get, COLUMNS)
        tokens, mask = torch.cat([prompt, reply], 1), torch.cat([in_prompt, in_reply], 1)
        length = reply.shape[1]
        now = self._get_per_token_logps_and_entropies(model, tokens, mask, length)[0]
        errors.append(((now - old) * in_reply).abs().max())

        # What is replayed was sampled, and has the advantage that it had.
        rows = zip(tokens, mask == 1, advantages.flatten())
        rollouts = {(*row[real].tolist(), advantage.item()) for row, real, advantage in rows}
        if self.state.global_step % 2 == 0:
            sampled.update(rollouts)
        assert rollouts <= sampled
        return compute_loss(self, model, inputs)

    monkeypatch.setattr(trl_grpo.GRPOTrainer, "_compute_loss", watch)
    parser = HfArgumentParser(trl_grpo.GRPOConfig)
    config = parser.parse_args_into_dataclasses([*FLAGS, str(tmp_path)])
    trainer = trl_grpo.make_trainer(*config)
    # "Up" makes the prompt once as long, "Right" four times; the temperature varies the replies.
    data = trainer.train_dataset
    longer = [(len(best) - 18) * prompt for best, prompt in zip(data["best"], data["prompt"])]
    trainer.train_dataset = data.remove_columns("prompt").add_column("prompt", longer)
    trainer.train()
    assert max(errors) < 1e-4
    assert (len(trainer.buffer), trainer.buffer.now) == (64, 7)


def test_the_loop_of_the_page_replays_what_was_played():
    page = (Path(__file__).parents[2] / "docs/your_trainer.md").read_text(encoding="utf-8")
    played, updates = [], []

    def play(n):
        played.append([SimpleNamespace(reward=float(k % 2), images=[]) for k in range(n)])
        return played[-1]

    given = {"play": play, "update": updates.append, "iterations": 3}
    exec(re.search("```python\n(.*?)```", page, re.DOTALL)[1], given)
    for k, fresh in enumerate(played):
        update, *replays = updates[3 * k : 3 * k + 3]
        assert update is fresh and {e.step for e in fresh} == {3 * k}
        assert all(
            {*map(id, drawn)} <= {id(e) for batch in played[: k + 1] for e in batch}
            for drawn in replays
        )
    assert (len(given["buffer"]), given["buffer"].now) == (96, 8)
