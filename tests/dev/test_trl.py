"""The buffer in TRL's trainer (examples/trl_grpo.py)."""

import torch
from trl import GRPOConfig

from examples import trl_grpo


def test_replayed_rollouts_have_the_log_probs_of_when_they_were_sampled(tmp_path, monkeypatch):
    sampled = {}  # by tokens and advantage
    errors = []

    class Watching(trl_grpo.ReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            for advantage, prompt, in_prompt, reply, in_reply, old in zip(
                inputs["advantages"].flatten().tolist(),
                *(inputs[name] for name in "prompt_ids prompt_mask completion_ids".split()),
                *(inputs[name] for name in "completion_mask old_per_token_logps".split()),
            ):
                tokens = torch.cat([prompt[in_prompt == 1], reply[in_reply == 1]])
                n = in_reply.sum()
                with torch.no_grad():
                    logits = model(tokens[None]).logits[0, -n - 1 : -1] / self.temperature
                now = logits.log_softmax(-1).gather(1, tokens[-n:, None])[:, 0]

                past = sampled.setdefault((*tokens.tolist(), advantage), [])
                if self.state.global_step % 2 == 0:
                    past.append(now)
                errors.append(min((old[:n] - then).abs().max() for then in past))
            return super()._compute_loss(model, inputs)

    monkeypatch.setattr(trl_grpo, "ReplayGRPOTrainer", Watching)
    trainer = trl_grpo.make_trainer(
        GRPOConfig(
            str(tmp_path),
            num_iterations=2,
            max_steps=6,
            learning_rate=1e-3,
            gradient_accumulation_steps=2,
            temperature=1.5,  # replies of different lengths
            max_completion_length=6,
            bf16=False,
        )
    )
    trainer.train()
    assert len(errors) == 6 * 16
    assert max(errors) < 1e-4
    assert trainer.buffer.now == 5
