"""The trainer against transformers' own forward pass: log-probs, gradient, schedule, steps."""

import numpy as np
import pytest
import torch
from conftest import copy_of, speakable_episodes, stock_logits, stock_logprobs, whitened
from torch.nn.utils.rnn import pad_sequence

from freshper.config import Config
from freshper.episode import collate
from freshper.errors import NonFiniteError
from freshper.reinforce import policy_loss
from freshper.trainer import TorchTrainer


def trainer_for(policy, **changes):
    settings = {"advantage_clip": 20.0, "micro_batch_size": 4, "lr": 1e-3} | changes
    return TorchTrainer(copy_of(policy), Config(**settings), total_updates=14)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


TERMS = {"advantage_clip": 0.2, "entropy_coef": 0.01, "kl_loss_coef": 0.05, "kl_reward_coef": 0.1}


# All logits in one piece, and two tokens at a time.
@pytest.mark.parametrize("at_once", [2**27, 700])
@pytest.mark.parametrize("terms", [{}, TERMS])
def test_the_gradient_is_that_of_the_stock_pass_whatever_the_micro_batches(
    text_policy, monkeypatch, terms, at_once
):
    """Reference: one unpadded episode after the other through transformers' own forward pass."""
    monkeypatch.setattr("freshper.trainer.MAX_GRAD_NORM", 1e9)
    monkeypatch.setattr("freshper.trainer.LOGITS_AT_ONCE", at_once)
    episodes = speakable_episodes(text_policy, 8)
    weights = np.linspace(0.2, 1.0, 8)
    reference = trainer_for(text_policy, **terms)
    noise = np.random.default_rng(0)
    reference.record_behavior_logprobs(episodes)
    for e in episodes:  # off-policy, and away from pi_ref
        for values in (e.behavior_logprobs, e.ref_logprobs) if terms else (e.behavior_logprobs,):
            values += (noise.normal(0, 0.2, len(e.tokens)) * e.action_mask).astype(np.float32)

    clip = reference.config.advantage_clip
    batch = collate(episodes)
    advantages = whitened(batch, reference.config.kl_reward_coef)
    logprobs = []
    entropies = []
    for e in episodes:
        logprobs.append(stock_logprobs(reference.policy, e))
        logits = stock_logits(reference.policy, e)
        entropies.append(torch.distributions.Categorical(logits=logits).entropy().roll(1))
    loss, _ = policy_loss(
        pad_sequence(logprobs, batch_first=True),
        batch.behavior_logprobs,
        advantages.clamp(-clip, clip),
        batch.action_mask,
        torch.from_numpy(weights).float(),
        entropies=pad_sequence(entropies, batch_first=True),
        entropy_coef=terms.get("entropy_coef", 0.0),
        ref_logprobs=batch.ref_logprobs,
        kl_coef=terms.get("kl_loss_coef", 0.0),
        scale=int(batch.action_mask.sum()) / 8,
    )
    loss.backward()
    expected = gradient(reference.policy.model)
    assert expected.abs().max() > 1e-3

    for size in (1, 3, 8):
        trainer = trainer_for(text_policy, micro_batch_size=size, **terms)
        assert all(len(rows) <= size for rows, _ in trainer.shard(batch))
        stats = trainer.update(batch, advantages, weights).stats
        assert stats["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert stats["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
        torch.testing.assert_close(gradient(trainer.policy.model), expected, rtol=1e-3, atol=1e-5)
        assert 0.0 < stats["clip_fraction"] < 1.0


def test_updates_follow_the_schedule_and_move_log_probs_with_the_advantage(text_policy):
    """Ten warm-up steps to --lr, then a cosine to 0 (appendix F). log rho of the drift is the whole
    trajectory's."""
    trainer = trainer_for(text_policy, kl_loss_coef=1e-9)
    episodes = speakable_episodes(text_policy, 8)
    trainer.record_behavior_logprobs(episodes)
    batch = collate(episodes)
    advantages = whitened(batch)
    for k in range(14):
        trainer.update(batch, advantages)
        expected = k / 10 if k < 10 else 0.5 * (1 + np.cos(np.pi * (k - 10) / 4))
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * expected)
    assert trainer.step == 14
    change = trainer.logprobs(batch) - batch.behavior_logprobs
    assert (change * advantages).sum() > 1.0
    drift = trainer.update(batch, advantages).drift
    np.testing.assert_allclose(drift["log_ratio"], change.sum(-1), atol=1e-3)

    trainer.record_behavior_logprobs(episodes)
    with torch.no_grad():  # pi_ref is still the initial policy
        initial = stock_logprobs(text_policy, episodes[0])
    np.testing.assert_allclose(episodes[0].ref_logprobs, initial, atol=1e-4)


def test_a_step_clips_the_gradient_and_decays_no_weight(text_policy):
    trainer = trainer_for(text_policy)
    trainer.step = 10  # the whole rate
    batch = collate(speakable_episodes(text_policy, 8))
    before = [p.clone() for p in trainer.policy.model.parameters()]
    trainer.update(batch, torch.zeros(batch.tokens.shape))
    assert all(map(torch.equal, before, trainer.policy.model.parameters()))
    stats = trainer.update(batch, torch.full(batch.tokens.shape, 20.0)).stats
    assert stats["grad_norm"] > 1.0
    assert gradient(trainer.policy.model).norm().item() == pytest.approx(1.0, rel=1e-4)


def test_what_the_engine_sampled_otherwise_is_logged(text_policy):
    """An engine that is off by known amounts."""
    trainer = trainer_for(text_policy)
    episodes = speakable_episodes(text_policy, 5)
    batch = collate(episodes)
    right = trainer.logprobs(batch)
    off = 0.7 * torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
    for e, row in zip(episodes, right - off * batch.action_mask, strict=True):
        e.behavior_logprobs = row[: len(e.tokens)].numpy()
    stats = trainer.record_behavior_logprobs(episodes)

    of_actions = off[batch.action_mask].numpy()
    assert stats["mismatch"] == pytest.approx(np.abs(of_actions).mean(), rel=1e-4)


def test_numbers_that_are_not_finite_name_an_episode_and_touch_no_weight(text_policy):
    trainer = trainer_for(text_policy)
    episodes = speakable_episodes(text_policy, 4)
    trainer.record_behavior_logprobs(episodes)
    episodes[2].tokens[0] = 250  # in no other episode: it cannot be sampled
    with torch.no_grad():
        trainer.policy.model.model.embed_tokens.weight[250] = torch.nan
    before = [p.clone() for p in trainer.policy.model.parameters()]
    batch = collate(episodes)
    names_seed_2 = pytest.raises(NonFiniteError, match=r"not finite.* episode seeds? \[?2\b")
    with names_seed_2:
        trainer.record_behavior_logprobs(episodes)
    with names_seed_2:
        trainer.update(batch, whitened(batch))
    assert trainer.step == 0
    for p, old in zip(trainer.policy.model.parameters(), before, strict=True):
        assert torch.equal(p.nan_to_num(), old.nan_to_num())
