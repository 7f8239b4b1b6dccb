"""examples/trl_grpo.py: the buffer in TRL's GRPO trainer, through TRL's own training loop."""

from pathlib import Path

import pytest
import torch

from examples import trl_grpo

ROOT = Path(__file__).parent.parent


class Watching(trl_grpo.ReplayGRPOTrainer):
    """Notes what every update was given, and its log-probs before it."""

    def _compute_loss(self, model, inputs):
        with torch.no_grad():
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            told = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            now, *_ = self._get_per_token_logps_and_entropies(model, tokens, told, inputs["completion_ids"].shape[1])
        mask = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        self.seen.append((self._step, (now - inputs["old_per_token_logps"])[mask].abs().max().item(), inputs, mask))
        return super()._compute_loss(model, inputs)


@pytest.fixture
def make(tmp_path, monkeypatch):
    weights = next((ROOT / "freshper/weights").glob("frozenlake-*"))
    monkeypatch.setattr(trl_grpo, "tiny_model", lambda _: weights)

    def make(**settings):
        known = {"output_dir": str(tmp_path), "per_device_train_batch_size": 16, "save_strategy": "no"}
        trainer = trl_grpo.make_trainer(Watching, **known, disable_tqdm=True, **settings)
        trainer.seen = []
        return trainer

    return make


def test_the_example_is_short():
    assert len((ROOT / "examples/trl_grpo.py").read_text().splitlines()) < 60


def test_replayed_completions_are_those_that_trl_stored(make):
    """While the weights stand still, the log-probs of the replayed layout are those of collection, token for token."""
    trainer = make(max_steps=6, learning_rate=0.0)
    trainer.train()
    assert [step for step, *_ in trainer.seen] == list(range(6))
    assert len(trainer.buffer) == 3 * 16
    for step, difference, inputs, mask in trainer.seen:
        assert difference < 1e-4, step
        assert ("tool_mask" in inputs) == (step % 2 == 1)  # every second update is a replay
        if step % 2:
            replies = {tuple(row[m].tolist()) for row, m in zip(inputs["completion_ids"], mask, strict=True)}
            assert replies <= {tuple(e.tokens[e.action_mask].tolist()) for e in trainer.buffer.episodes}


def test_it_trains_on_what_was_collected_earlier(make):
    trainer = make(max_steps=40, learning_rate=1e-3)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    fresh = max(difference for step, difference, *_ in trainer.seen if step % 2 == 0)
    replayed = max(difference for step, difference, *_ in trainer.seen if step % 2)
    assert fresh < 1e-4 < 0.1 < replayed  # the policy has moved on since
    assert len(trainer.buffer) == 20 * 16
    assert trainer.buffer.now == 39
    drawn = trainer.buffer.sample(200).ages
    assert drawn.max() > 10
    assert drawn.mean() < trainer.buffer.ages().mean()  # fresher than the buffer
