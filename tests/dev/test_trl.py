"""The buffer in TRL's trainer (examples/trl_grpo.py)."""

import torch

from examples import trl_grpo


def test_trl_replays_what_it_stored(tmp_path):
    """While the weights stand still, the log-probs of a replayed batch are those of collection,
    token for token."""
    replays = []
    differences = []

    class Watching(trl_grpo.ReplayGRPOTrainer):
        def _compute_loss(self, model, inputs):
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            length = inputs["completion_ids"].shape[1]
            with torch.no_grad():
                now, *_ = self._get_per_token_logps_and_entropies(model, tokens, mask, length)

            sampled = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
            difference = (now - inputs["old_per_token_logps"])[sampled]
            replays.append("tool_mask" in inputs)
            differences.append(difference.abs().max().item())
            return super()._compute_loss(model, inputs)

    trainer = trl_grpo.make_trainer(
        Watching,
        max_steps=4,
        learning_rate=0.0,
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer.train()

    assert replays == [False, True, False, True]
    assert max(differences) < 1e-4
    assert len(trainer.buffer) == 2 * 8
