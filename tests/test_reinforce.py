"""REINFORCE++ against a slow float64 loop written from the equations, token by token."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import make_episode
from hypothesis import example, given, settings
from hypothesis import strategies as st

from freshper.config import parse_args
from freshper.episode import NonFiniteError, collate
from freshper.models import Policy
from freshper.reinforce import ReplayBaseline, advantages, kl_k1, kl_k3, policy_loss, returns_to_go, shaped, whiten
from freshper.trainer import TorchTrainer, action_logprobs


def slow_advantages(episodes, clip, moments=None, kl=None, kl_coef=0.0):
    """Per episode a list of A_t over its action tokens: rewards at turn ends, undiscounted, whitened, clipped."""
    returns = []
    for n, e in enumerate(episodes):
        ends = [t for t in range(len(e.tokens)) if e.action_mask[t] and not (list(e.action_mask) + [False])[t + 1]]
        rewards = {t: float(r) for t, r in zip(ends, e.turn_rewards, strict=True)}
        per_token = []
        for t in range(len(e.tokens)):
            if e.action_mask[t]:
                future = range(t, len(e.tokens))
                total = sum(
                    rewards.get(s, 0.0) - (kl_coef * kl[n][s] if kl and e.action_mask[s] else 0.0) for s in future
                )
                per_token.append(total)
        returns.append(per_token)
    flat = [g for per_token in returns for g in per_token]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((g - mean) ** 2 for g in flat) / len(flat))
    result = []
    for n, per_token in enumerate(returns):
        m, s = (mean, std) if moments is None else moments[n]
        result.append([max(-clip, min(clip, (g - m) / (s + 1e-8))) for g in per_token])
    return result


def slow_loss(episodes, logprobs, all_advantages, weights, eps, aggregation, dual=0.0):
    """1/B sum_i w_i l_i with Python floats."""
    tokens = sum(int(e.action_mask.sum()) for e in episodes)
    scale = tokens / len(episodes) if aggregation == "token_mean" else 1.0
    total = 0.0
    for n, e in enumerate(episodes):
        loss = 0.0
        for a, t in zip(all_advantages[n], np.flatnonzero(e.action_mask), strict=True):
            ratio = math.exp(logprobs[n][t] - float(e.behavior_logprobs[t]))
            objective = min(ratio * a, max(1 - eps, min(1 + eps, ratio)) * a)
            loss -= max(objective, dual * a) if dual and a < 0 else objective
        total += weights[n] * loss / scale
    return total / len(episodes)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), clip=st.sampled_from([0.2, 20.0]), fixed=st.booleans())
@example(seed=343, n=1, clip=0.2, fixed=False)  # three equal returns whose float32 mean is another number
def test_loss_matches_the_slow_loop(seed, n, clip, fixed):
    rng = np.random.default_rng(seed)
    episodes = [make_episode(rng, turns=int(rng.integers(1, 5))) for _ in range(n)]
    batch = collate(episodes)
    logprobs = torch.zeros(batch.tokens.shape)
    logprobs[batch.action_mask] = torch.tensor(-rng.random(int(batch.action_mask.sum())), dtype=torch.float32)
    weights = rng.random(n) + 0.1
    moments = [(rng.normal(), rng.random() + 0.5) for _ in range(n)] if fixed else None
    tensor = None if moments is None else torch.tensor(moments, dtype=torch.float64).T[..., None]
    found = advantages(batch.rewards, batch.action_mask, clip, tensor)
    expected = slow_advantages(episodes, clip, moments)
    np.testing.assert_allclose(found[batch.action_mask], sum(expected, []), rtol=2e-3, atol=2e-4)
    assert (found[~batch.action_mask] == 0).all()
    for aggregation, dual in (("token_mean", 0.0), ("token_sum", 0.0), ("token_mean", 1.5)):
        scale = int(batch.action_mask.sum()) / n if aggregation == "token_mean" else 1.0
        loss, _ = policy_loss(
            logprobs.double(),
            batch.behavior_logprobs.double(),
            advantages(batch.rewards.double(), batch.action_mask, clip, None if tensor is None else tensor.double()),
            batch.action_mask,
            torch.tensor(weights),
            scale=scale,
            dual_clip=dual,
        )
        reference = slow_loss(episodes, logprobs.tolist(), expected, weights, 0.2, aggregation, dual)
        assert loss.item() == pytest.approx(reference, rel=1e-6, abs=1e-9)


def test_returns_flow_back_across_turns_and_environment_tokens():
    rewards = torch.tensor([[0.0, 0.0, -0.15, 0.0, 0.0, 1.0, 0.0]])
    np.testing.assert_allclose(returns_to_go(rewards)[0], [0.85, 0.85, 0.85, 1, 1, 1, 0])


def test_whitening_has_zero_mean_and_unit_population_variance():
    values, mask = torch.randn(5, 9, dtype=torch.float64), torch.rand(5, 9) < 0.6
    selected = whiten(values, mask)[mask]
    assert selected.mean().item() == pytest.approx(0, abs=1e-12)
    assert (selected**2).mean().item() == pytest.approx(1)
    assert (whiten(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)) == 0).all()


def test_clip_stops_the_gradient_only_where_it_should():
    """A ratio beyond 1 +- eps has no gradient if the advantage pushes it further, and the full one otherwise."""
    behavior, mask = torch.zeros(4, 1), torch.ones(4, 1, dtype=torch.bool)
    logprobs = torch.tensor([[0.5], [0.5], [-0.5], [-0.5]], requires_grad=True)
    advantage = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    loss, stats = policy_loss(logprobs, behavior, advantage, mask)
    loss.backward()
    expected = [0.0, math.exp(0.5) / 4, -math.exp(-0.5) / 4, 0.0]
    np.testing.assert_allclose(logprobs.grad[:, 0], expected, rtol=1e-6)
    assert stats["clipped"].tolist() == [1, 0, 0, 1]


def test_kl_estimates_are_unbiased():
    """E_pi[k1] = E_pi[k3] = KL(pi || pi_ref), summed exactly over a small vocabulary."""
    p, q = torch.randn(2, 12).log_softmax(-1)
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum").item()
    assert (p.exp() * kl_k1(p, q)).sum().item() == pytest.approx(exact, rel=1e-5)
    assert (p.exp() * kl_k3(p, q)).sum().item() == pytest.approx(exact, rel=1e-5)
    assert (kl_k3(p, q) >= 0).all()


def test_entropy_and_kl_terms_enter_the_loss():
    mask, zero = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    loss, _ = policy_loss(zero, zero, zero, mask, entropies=torch.full((2, 3), 2.0), entropy_coef=0.01)
    assert loss.item() == pytest.approx(-0.01 * 2.0 * 3)
    loss, _ = policy_loss(zero, zero, zero, mask, ref_logprobs=zero - 1.0, kl_coef=0.05)
    assert loss.item() == pytest.approx(0.05 * (math.exp(-1) + 1 - 1) * 3)


def test_replay_baselines():
    rng = np.random.default_rng(0)
    old = [make_episode(rng) for _ in range(4)]
    new = [make_episode(rng) for _ in range(4)]
    running = ReplayBaseline("running", window=6)
    running.observe(old)
    running.observe(new)
    # each episode counts once, with the mean over its action tokens of what was still to come
    first, second = [], []
    for e in old[2:] + new:
        turn_of_token = np.repeat(np.arange(len(e.turn_rewards)), np.diff(np.append(-1, e.turn_ends())))
        to_go = [e.turn_rewards[n:].astype(float).sum() for n in turn_of_token[e.action_mask[: len(turn_of_token)]]]
        first.append(np.mean(to_go))
        second.append(np.mean(np.square(to_go)))
    mean, std = running.moments(old[:3])
    assert mean.shape == (3, 1)
    np.testing.assert_allclose(mean, np.mean(first), rtol=1e-5)
    np.testing.assert_allclose(std, np.sqrt(np.mean(second) - np.mean(first) ** 2), rtol=1e-5)
    assert ReplayBaseline("recompute", 6).moments(old) is None
    # `stored` replays exactly the advantages of collection, whatever the replay batch is made of
    stored = ReplayBaseline("stored", window=6)
    stored.observe(old)
    stored.observe(new)
    mixed = [old[1], new[3]]
    batch = collate(mixed)
    found = advantages(batch.rewards, batch.action_mask, 20.0, stored.moments(mixed))
    for row, (own, index) in enumerate(((old, 1), (new, 3))):
        expected = slow_advantages(own, 20.0)[index]
        np.testing.assert_allclose(found[row][batch.action_mask[row]], expected, rtol=1e-3, atol=1e-4)


def test_a_replay_batch_of_successes_only_keeps_its_gradient_with_running_and_loses_it_with_recompute():
    rng = np.random.default_rng(1)
    wins = [make_episode(rng, turns=1) for _ in range(4)]
    losses = [make_episode(rng, turns=1) for _ in range(4)]
    for e in wins + losses:
        e.reward = float(e in wins)
        e.turn_rewards = np.array([e.reward], dtype=np.float32)
    batch = collate(wins)
    for mode, alive in (("running", True), ("recompute", False)):
        baseline = ReplayBaseline(mode, 100)
        baseline.observe(wins + losses)
        found = advantages(batch.rewards, batch.action_mask, 20.0, baseline.moments(wins))
        assert bool((found[batch.action_mask] > 0.5).all()) is alive
        assert bool((found == 0).all()) is not alive


def test_rounding_is_not_an_advantage():
    """Failures of equal return, summed in another order, have no advantage against the running baseline."""
    rng = np.random.default_rng(0)
    episodes = [make_episode(rng, turns=1) for _ in range(64)]
    for n, e in enumerate(episodes):
        e.turn_rewards = np.float32([np.nextafter(np.float32(10.0), np.float32(11.0)) if n % 2 else 10.0])
    baseline = ReplayBaseline("running", 100)
    baseline.observe(episodes)
    batch = collate(episodes)
    assert advantages(batch.rewards, batch.action_mask, 20.0, baseline.moments(episodes)).abs().max() < 1e-2


@pytest.mark.parametrize("mode", ["running", "stored"])
def test_rewards_in_every_turn_leave_the_mean_advantage_of_what_was_collected_at_zero(mode):
    """-1 a turn: an early token has more of them to come than a late one. Against the returns of whole episodes nearly
    every token would look good."""
    rng = np.random.default_rng(0)
    episodes = [make_episode(rng, turns=8) for _ in range(32)]
    for e in episodes:
        e.turn_rewards = np.full(8, -1.0, dtype=np.float32)
    baseline = ReplayBaseline(mode, 100)
    baseline.observe(episodes)
    batch = collate(episodes)
    found = advantages(batch.rewards, batch.action_mask, 20.0, baseline.moments(episodes))[batch.action_mask]
    assert abs(found.mean()) < 0.1
    assert 0.9 < found.std() < 1.1


def config(**changes):
    tiny = parse_args(["--preset", "tiny", "--env", "frozenlake", "--out", "unused"])
    return dataclasses.replace(tiny, **changes)


def trainer_for(policy, **changes):
    import copy

    own = Policy(copy.deepcopy(policy.model), policy.tokenizer, policy.image_processor)
    return TorchTrainer(own, config(**changes), total_updates=10)


def episodes_for(policy, n, seed=0):
    rng = np.random.default_rng(seed)
    episodes = [make_episode(rng, turns=int(rng.integers(1, 5)), seed=k) for k in range(n)]
    speakable = np.setdiff1d(np.arange(len(policy.tokenizer)), policy.suppressed_ids)
    for e in episodes:
        e.tokens[e.action_mask] = rng.choice(speakable, e.action_mask.sum())
    return episodes


@pytest.mark.parametrize("terms", [{}, {"entropy_coef": 0.01, "kl_loss_coef": 0.05, "kl_reward_coef": 0.1}])
@pytest.mark.parametrize("aggregation", ["token_mean", "token_sum"])
def test_gradients_do_not_depend_on_micro_batches_or_padding(text_policy, aggregation, terms):
    """Micro-batches of 1 hold no padding at all, those of 8 pad to the longest."""
    gradients = []
    episodes = episodes_for(text_policy, 8)
    weights = np.linspace(0.2, 1.0, 8)
    for size in (1, 2, 8):
        trainer = trainer_for(text_policy, micro_batch_size=size, loss_aggregation=aggregation, **terms)
        trainer.record_behavior_logprobs(episodes)
        trainer.update(episodes, weights)
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.policy.model.parameters()]))
    assert gradients[0].abs().max() > 1e-4
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_chunks_of_logits_change_neither_numbers_nor_gradients(text_policy, monkeypatch):
    episodes, results = episodes_for(text_policy, 6), []
    for at_once in (2**27, 700, 1):  # one chunk, two tokens each, one token each
        monkeypatch.setattr("freshper.trainer.LOGITS_AT_ONCE", at_once)
        trainer = trainer_for(text_policy, entropy_coef=0.01)
        logprobs = trainer.logprobs(collate(episodes))
        trainer.update(episodes)
        results.append((logprobs, torch.cat([p.grad.flatten() for p in trainer.policy.model.parameters()])))
    assert results[0][1].abs().max() > 1e-4
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-6)


def test_entropy_of_what_can_be_sampled(text_policy):
    episodes = episodes_for(text_policy, 2)
    batch = collate(episodes)
    _, entropies = action_logprobs(text_policy, batch, 0.7, entropy=True)
    logits = text_policy.model(batch.tokens).logits.double() / 0.7
    logits[..., text_policy.suppressed_ids] = -torch.inf
    for row, t in batch.action_mask.nonzero().tolist():
        if t:
            expected = torch.distributions.Categorical(logits=logits[row, t - 1]).entropy().item()
            assert entropies[row, t].item() == pytest.approx(expected, abs=1e-4)


def test_trainer_computes_the_loss_of_the_equations(text_policy):
    """The whole path tokens -> log-probs -> loss, with the stock model's logits and Python floats."""
    trainer = trainer_for(text_policy, advantage_clip=0.7, loss_aggregation="token_sum")
    episodes = episodes_for(text_policy, 5)
    logprobs = []
    for e in episodes:
        tokens = torch.from_numpy(e.tokens.astype(np.int64))[None]
        logits = trainer.policy.model(tokens).logits[0].double() / 0.99
        logits[:, trainer.policy.suppressed_ids] = -torch.inf
        chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        logprobs.append([0.0, *chosen.tolist()])
        # near the policy, so that ratios fall inside and outside the clip
        noise = np.random.default_rng(e.seed).normal(0, 0.2, len(e.tokens))
        e.behavior_logprobs = np.where(e.action_mask, logprobs[-1] + noise, 0.0).astype(np.float32)
    weights = np.array([1.0, 0.5, 0.25, 0.8, 0.1])
    moments = [(0.1, 0.9)] * 5
    stats, _ = trainer.update(episodes, weights, torch.tensor(moments).T[..., None])
    expected = slow_loss(episodes, logprobs, slow_advantages(episodes, 0.7, moments), weights, 0.2, "token_sum")
    assert stats["loss"] == pytest.approx(expected, rel=1e-4)
    assert 0.0 < stats["clip_fraction"] < 1.0


def test_what_the_engine_sampled_otherwise_is_logged_and_weighed(text_policy):
    """Log-probs of an engine that is off by known amounts: the logged numbers, and the loss with capped weights."""
    trainer = trainer_for(text_policy, truncated_is=2.0, loss_aggregation="token_sum", advantage_clip=20.0)
    episodes = episodes_for(text_policy, 5)
    right = trainer.logprobs(collate(episodes)).numpy()
    off = []
    for e, row in zip(episodes, right, strict=True):
        off.append(
            np.random.default_rng(e.seed).normal(0, 0.7, len(e.tokens)) * e.action_mask
        )  # log pi_trainer/pi_engine
        e.behavior_logprobs = (row[: len(e.tokens)] - off[-1]).astype(np.float32)
    of_actions = np.concatenate([d[e.action_mask] for d, e in zip(off, episodes, strict=True)])
    stats = trainer.record_behavior_logprobs(episodes)
    assert stats["mismatch"] == pytest.approx(np.abs(of_actions).mean(), rel=1e-4)
    ratios = np.sort(np.exp(of_actions))
    for name, share in (("mismatch_p01", 0.01), ("mismatch_p99", 0.99)):
        at = share * (len(ratios) - 1)
        assert ratios[int(at)] * 0.999 <= stats[name] <= ratios[int(at) + 1] * 1.001
    assert (ratios > 2).any()
    # at the start rho = 1, so the loss is - 1/B sum min(ratio, 2) A
    everyone = slow_advantages(episodes, 20.0)
    loss = 0.0
    for e, d, a in zip(episodes, off, everyone, strict=True):
        capped = [min(math.exp(x), 2.0) for x in d[e.action_mask]]
        loss -= sum(c * y for c, y in zip(capped, a, strict=True)) / len(episodes)
    assert trainer.update(episodes)[0]["loss"] == pytest.approx(loss, rel=1e-3, abs=1e-5)


def test_kl_in_the_loss(text_policy):
    """It adds coef / B sum_i w_i sum_t k3, of log pi_ref as it was noted at line 3."""
    episodes, weights = episodes_for(text_policy, 4), np.array([1.0, 0.5, 0.25, 0.1])
    losses, noted = {}, None
    for coef in (0.0, 0.1):
        trainer = trainer_for(text_policy, kl_loss_coef=coef, loss_aggregation="token_sum")
        if coef:
            with torch.no_grad():  # pi_ref differs from pi_theta
                for weight in trainer.reference.model.parameters():
                    weight.mul_(1.3)
        trainer.record_behavior_logprobs(episodes)
        theta = trainer.logprobs(collate(episodes)).double().numpy()
        if coef:
            noted = trainer.logprobs(collate(episodes), reference=True).double().numpy()
            trainer.reference = None  # not asked again
        losses[coef] = trainer.update(episodes, weights)[0]["loss"]
    added = 0.0
    for i, e in enumerate(episodes):
        for t in np.flatnonzero(e.action_mask):
            log_ratio = noted[i, t] - theta[i, t]
            added += 0.1 / 4 * weights[i] * (math.exp(log_ratio) - log_ratio - 1)
    assert added > 0.01
    assert losses[0.1] - losses[0.0] == pytest.approx(added, rel=1e-3)


def test_kl_in_the_reward(text_policy):
    """At the start pi = pi_ref, so k1 = log pi_mu - log pi_ref is whatever the stored log-probs say."""
    trainer = trainer_for(text_policy, kl_reward_coef=0.1)
    episodes = episodes_for(text_policy, 3)
    batch = collate(episodes)
    ref, _ = action_logprobs(trainer.reference, batch, 0.99)
    kl = [(row - ref[n]).clamp(-10, 10).tolist() for n, row in enumerate(batch.behavior_logprobs)]
    expected = sum(slow_advantages(episodes, 20.0, kl=kl, kl_coef=0.1), [])
    rewards = batch.rewards - 0.1 * kl_k1(batch.behavior_logprobs, ref.detach()) * batch.action_mask
    found = advantages(rewards, batch.action_mask, 20.0)
    np.testing.assert_allclose(found[batch.action_mask], expected, rtol=1e-3, atol=1e-3)
    assert trainer_for(text_policy).reference is None
    # noted at line 3; a batch of the same kind, replayed, is measured against returns that hold the same penalty
    trainer.record_behavior_logprobs(episodes)
    with torch.no_grad():  # pi_ref differs from pi_mu
        for weight in trainer.reference.model.parameters():
            weight.mul_(1.3)
    trainer.record_behavior_logprobs(episodes)
    with_penalty = shaped(collate(episodes), episodes)
    assert (with_penalty.rewards - batch.rewards).abs().sum() > 0.1
    for mode in ("running", "stored"):
        baseline = ReplayBaseline(mode, 100)
        baseline.observe(episodes)
        found = advantages(with_penalty.rewards, batch.action_mask, 20.0, baseline.moments(episodes))
        assert abs(found[batch.action_mask].mean()) < 0.2


def test_an_update_moves_log_probs_with_the_advantage(text_policy):
    trainer = trainer_for(text_policy, warmup_steps=0, lr=1e-3)
    episodes = episodes_for(text_policy, 8)
    trainer.record_behavior_logprobs(episodes)
    batch = collate(episodes)
    advantage = advantages(batch.rewards, batch.action_mask, 20.0)
    trainer.update(episodes)
    trainer.record_behavior_logprobs(episodes)
    change = collate(episodes).behavior_logprobs - batch.behavior_logprobs
    assert (change * advantage).sum() > 0.1
    assert trainer.step == 1


@pytest.mark.parametrize("phase", ["record", "update"])
def test_log_probs_that_are_not_finite_name_the_episode_and_touch_no_weight(text_policy, phase):
    trainer = trainer_for(text_policy)
    episodes = episodes_for(text_policy, 4)
    poisoned = int(episodes[2].tokens[0])
    for e in episodes:  # only episode 2 contains the poisoned token
        e.tokens = np.where(e.tokens == poisoned, (poisoned + 1) % 200, e.tokens).astype(np.int32)
    episodes[2].tokens[0] = poisoned
    with torch.no_grad():
        trainer.policy.model.model.embed_tokens.weight[poisoned] = torch.nan
    before = [p.clone() for p in trainer.policy.model.parameters()]
    with pytest.raises(NonFiniteError, match="episode seed 2"):
        trainer.record_behavior_logprobs(episodes) if phase == "record" else trainer.update(episodes)
    for p, old in zip(trainer.policy.model.parameters(), before, strict=True):
        assert torch.equal(p.nan_to_num(), old.nan_to_num())
