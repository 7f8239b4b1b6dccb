"""The buffer in TRL's trainer (examples/trl_grpo.py)."""

import torch
from transformers import HfArgumentParser

from examples import trl_grpo

COLUMNS = """prompt_ids completion_ids prompt_mask completion_mask advantages
old_per_token_logps""".split()
# The temperature makes replies of different lengths.
FLAGS = """--num_iterations 2 --max_steps 6 --gradient_accumulation_steps 2 --learning_rate 1e-3
--temperature 1.5 --max_completion_length 6 --bf16 False""".split()


def test_replayed_rollouts_have_the_log_probs_of_when_they_were_sampled(tmp_path, monkeypatch):
    sampled = {}  # by tokens and advantage
    errors = []
    compute_loss = trl_grpo.GRPOTrainer._compute_loss

    def watch(self, model, inputs):
        for *ids, in_prompt, in_reply, advantage, old in zip(*map(inputs.get, COLUMNS)):
            tokens = torch.cat(ids)[torch.cat([in_prompt, in_reply]) == 1]  # without padding
            n = in_reply.sum()
            logits = model(tokens[None]).logits[0, -n - 1 : -1] / self.temperature
            now = logits.log_softmax(-1)[range(n), tokens[-n:]]
            past = sampled.setdefault((*tokens.tolist(), advantage.item()), [])
            if self.state.global_step % 2 == 0:
                past.append(now)
            errors.append(min((old[:n] - then).abs().max() for then in past))
        return compute_loss(self, model, inputs)

    monkeypatch.setattr(trl_grpo.GRPOTrainer, "_compute_loss", watch)
    parser = HfArgumentParser(trl_grpo.GRPOConfig)
    flags = [*FLAGS, "--output_dir", str(tmp_path)]
    trainer = trl_grpo.make_trainer(*parser.parse_args_into_dataclasses(flags))
    trainer.train()
    assert max(errors) < 1e-4
    assert trainer.buffer.now == 5
