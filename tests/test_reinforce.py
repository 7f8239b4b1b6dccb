"""From episodes to the IS-weighted loss, against a slow float64 loop written from the equations, token by token."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_episode
from hypothesis import given
from hypothesis import strategies as st

from freshper.config import Config
from freshper.episode import PADDING, alike, collate
from freshper.reinforce import WINDOW, ReplayBaseline, kl_k3, policy_loss, training_batch, whiten
from freshper.trainer import TorchTrainer


def bounded(x, limit):
    return max(-limit, min(limit, x))


def slow_returns(episode, kl_coef=0.0):
    """G_t of each action token: what its turn and later ones earn, minus the KL penalty of this and later tokens."""
    returns = []
    actions = np.flatnonzero(episode.action_mask).tolist()
    turn = {t: sum(1 for s in actions if s < t and s + 1 not in actions) for t in actions}
    for t in actions:
        total = sum(float(r) for r in episode.turn_rewards[turn[t] :])
        if kl_coef:
            difference = {s: float(episode.behavior_logprobs[s]) - float(episode.ref_logprobs[s]) for s in actions}
            total -= kl_coef * sum(bounded(difference[s], 10) for s in actions if s >= t)
        returns.append(total)
    return returns


def slow_moments(episodes, kl_coef, by_turn):
    """The mean of each turn (of all turns, every episode once) and the std of all deviations from it."""
    last = [[g for t, g in zip(np.flatnonzero(e.action_mask), slow_returns(e, kl_coef), strict=True)
             if t in e.turn_ends()] for e in episodes]  # fmt: skip
    if not by_turn:
        mean = np.mean([np.mean(row) for row in last])
        return [mean], math.sqrt(np.mean([np.mean([(g - mean) ** 2 for g in row]) for row in last]))
    means = [np.mean([row[k] for row in last if len(row) > k]) for k in range(max(map(len, last)))]
    return means, math.sqrt(np.mean([(g - means[k]) ** 2 for row in last for k, g in enumerate(row)]))


def slow_advantages(episodes, config, moments=None):
    """A_t of each action token of each episode. `moments`: the mean of each turn, the last one's also later; a std."""
    returns = [slow_returns(e, config.kl_reward_coef) for e in episodes]
    flat = sum(returns, [])
    if moments is None and config.baseline == "turn":
        moments = slow_moments(episodes, config.kl_reward_coef, by_turn=True)
    means, std = moments or ([sum(flat) / len(flat)], np.std(flat))
    found = []
    for row, e in zip(returns, episodes, strict=True):
        turns = [int((e.turn_ends() < t).sum()) for t in np.flatnonzero(e.action_mask)]
        g_and_mean = [(g, means[min(k, len(means) - 1)]) for g, k in zip(row, turns, strict=True)]
        found.append([bounded((g - mean) / (std + 1e-8), config.advantage_clip) for g, mean in g_and_mean])
        if e.engine_weights is not None:
            found[-1] = [a * float(w) for a, w in zip(found[-1], e.engine_weights[e.action_mask], strict=True)]
    return found


def slow_loss(episodes, logprobs, entropies, weights, config, moments=None):
    """1/B sum_i w_i l_i of eq. 16, with l_i divided by the mean number of action tokens."""
    scale = sum(int(e.action_mask.sum()) for e in episodes) / len(episodes)
    total = 0.0
    for n, (e, row) in enumerate(zip(episodes, slow_advantages(episodes, config, moments), strict=True)):
        for a, t in zip(row, np.flatnonzero(e.action_mask), strict=True):
            rho = math.exp(bounded(logprobs[n][t] - float(e.behavior_logprobs[t]), 20))
            objective = min(rho * a, max(1 - config.ratio_clip, min(1 + config.ratio_clip, rho)) * a)
            if config.dual_clip and a < 0:
                objective = max(objective, config.dual_clip * a)
            loss = -objective - config.entropy_coef * entropies[n][t]
            if config.kl_loss_coef:
                log_ratio = bounded(float(e.ref_logprobs[t]) - logprobs[n][t], 20)
                loss += config.kl_loss_coef * min(10.0, math.exp(log_ratio) - log_ratio - 1)
            total += weights[n] * loss / scale
    return total / len(episodes)


CASES = {
    "plain": {},
    "Config A": {"advantage_clip": 0.2},
    "dual clip": {"dual_clip": 1.5},
    "KL and entropy": {"kl_reward_coef": 0.1, "kl_loss_coef": 0.05, "entropy_coef": 0.01},
    "running baseline": {"moments": ([0.3], 0.7)},
    "baseline by turn": {"baseline": "turn"},
    "running baseline by turn": {"baseline": "turn", "moments": ([0.3, -0.2, 0.1], 0.7), "kl_reward_coef": 0.1},
    "truncated IS": {"engine": True, "ratio_clip": 0.1},
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_slow_loop(case, seed):
    """The gradient against central differences of the slow loop; whole, and in micro-batches that add up."""
    settings = CASES[case].copy()
    moments, engine = settings.pop("moments", None), settings.pop("engine", False)
    config = Config(**{"advantage_clip": 20.0} | settings)
    rng = np.random.default_rng(seed)
    episodes = [make_episode(rng, turns=int(rng.integers(2, 5))) for _ in range(1 + seed % 6)]
    for e in episodes:
        away = rng.standard_cauchy(len(e.tokens)) * e.action_mask / 3
        e.ref_logprobs = (e.behavior_logprobs + away).astype(np.float32)
        e.engine_weights = (2 * rng.random(len(e.tokens))).astype(np.float32) if engine else None
    weights = rng.random(len(episodes)) + 0.1
    tensor = torch.tensor([moments[0], [moments[1]] * len(moments[0])]) if moments else None
    batch = training_batch(episodes, config, weights, tensor)
    expected = slow_advantages(episodes, config, moments)
    np.testing.assert_allclose(batch.advantages[batch.action_mask], sum(expected, []), rtol=1e-4, atol=1e-4)
    assert (batch.advantages[~batch.action_mask] == 0).all()
    logprobs = batch.behavior_logprobs.double() + torch.from_numpy(rng.normal(0, 0.3, batch.tokens.shape))
    logprobs.requires_grad_()
    entropies, total, counted = torch.from_numpy(rng.random(batch.tokens.shape)), 0.0, 0
    for rows, part in batch.micro_batches(1 + seed % 3):
        width = part.tokens.shape[1]
        loss, stats = policy_loss(
            logprobs[rows, :width], part.behavior_logprobs, part.advantages, part.action_mask, part.weights,
            ratio_clip=config.ratio_clip, dual_clip=config.dual_clip, entropies=entropies[rows, :width],
            entropy_coef=config.entropy_coef, ref_logprobs=part.ref_logprobs, kl_coef=config.kl_loss_coef,
            batch_size=len(episodes), scale=int(batch.action_mask.sum()) / len(episodes),
        )  # fmt: skip
        total, counted = total + loss, counted + len(rows)
        for row, n in enumerate(rows):  # the statistics: sums over the action tokens of a row
            log_rho = (logprobs - batch.behavior_logprobs)[n][batch.action_mask[n]].detach().numpy()
            rho, a = np.exp(log_rho), batch.advantages[n][batch.action_mask[n]].numpy()
            least, most = 1 - config.ratio_clip, config.dual_clip or np.inf
            clipped = np.where(a > 0, rho > 1 + config.ratio_clip, (rho < least) | (rho > most)) & (a != 0)
            sums = {"log_ratio": log_rho, "ratio": rho, "ratio_sq": rho**2, "kl": rho - 1 - log_rho, "clipped": clipped}
            found = {name: value[row].item() for name, value in stats.items()}
            assert found == pytest.approx({name: value.sum() for name, value in sums.items()})
    total.backward()

    def slow(values):
        return slow_loss(episodes, values.tolist(), entropies.tolist(), weights, config, moments)

    assert counted == len(episodes)
    assert total.item() == pytest.approx(slow(logprobs), rel=1e-4, abs=1e-5)
    for n, t in batch.action_mask.nonzero().tolist()[:: 1 + seed]:
        step = torch.zeros_like(logprobs)
        step[n, t] = 1e-5
        difference = (slow(logprobs + step) - slow(logprobs - step)) / 2e-5
        assert logprobs.grad[n, t].item() == pytest.approx(difference, rel=1e-3, abs=1e-5)
    assert (logprobs.grad[~batch.action_mask] == 0).all()


@pytest.mark.parametrize("log_ratio", [88.8, 1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_leave_loss_and_gradient_finite(log_ratio, advantage):
    """From 88.8 on exp overflows in float32, and 0 times infinity is NaN. The log ratio is bounded by 20."""
    logprobs, one = torch.full((1, 1), log_ratio, requires_grad=True), torch.ones(1, 1)
    loss, stats = policy_loss(logprobs, torch.zeros(1, 1), advantage * one, one.bool())
    loss.backward()
    rho = math.exp(bounded(log_ratio, 20.0))
    assert loss.item() == pytest.approx(-min(rho * advantage, max(0.8, min(1.2, rho)) * advantage))
    assert logprobs.grad.item() == 0.0
    assert stats["log_ratio"].item() == pytest.approx(log_ratio)  # of the trajectory, for the diagnostics


@pytest.mark.parametrize("x", [-100.0, -3.0, 0.0, 0.5, 2.0, 8.0, 100.0])
def test_k3_and_its_gradient_are_bounded(x):
    """e^x - x - 1 with x = log pi_ref - log pi, and its derivative, or 10 and 0 where that is larger."""
    logprob = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    k3 = kl_k3(logprob, torch.full((1,), x))
    k3.backward()
    exact = math.exp(x) - x - 1
    assert (k3.item(), logprob.grad.item()) == pytest.approx((exact, 1 - math.exp(x)) if exact < 10 else (10.0, 0.0))


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["batch", "turn"])
def test_the_running_baseline_is_of_the_window(kind, kl_coef):
    rng = np.random.default_rng(0)
    collected = [make_episode(rng, turns=1 + k % 4) for k in range(WINDOW + 44)]
    for e in collected:
        e.ref_logprobs = (e.behavior_logprobs - rng.random(len(e.tokens)) * e.action_mask).astype(np.float32)
    config = Config(kl_reward_coef=kl_coef, baseline=kind)
    baseline, restored = ReplayBaseline(config), ReplayBaseline(config)
    for k in range(0, len(collected), 100):
        baseline.observe(collected[k : k + 100])
    means, std = slow_moments(collected[-WINDOW:], kl_coef, kind == "turn")
    np.testing.assert_allclose(baseline.moments(), [means, [std] * len(means)], rtol=1e-4, atol=1e-6)
    restored.load_state_dict(baseline.state_dict())
    assert torch.equal(restored.moments(), baseline.moments())


@pytest.mark.parametrize("kind", ["batch", "turn", "recompute"])
def test_what_each_baseline_makes_of_equal_failures_successes_and_rounding(kind):
    config = Config(baseline=kind, advantage_clip=20.0)

    def advantages(observed, drawn):
        """Of the action tokens of a fresh batch and of a replay batch."""
        (baseline := ReplayBaseline(config)).observe(observed)
        batches = [training_batch(drawn, config, moments=moments) for moments in (None, baseline.moments())]
        return [batch.advantages[batch.action_mask] for batch in batches]

    def episodes(turn_rewards, n):
        rewards = np.asarray(turn_rewards, dtype=np.float32)
        made = [make_episode(np.random.default_rng(k), turns=len(rewards)) for k in range(n)]
        return [dataclasses.replace(e, turn_rewards=rewards) for e in made]

    failures = episodes(4 * [-0.1], 6)  # returns-to-go differ by turn alone, and that is no reason to train
    assert all((found == 0).all() for found in advantages(failures, failures))
    _, replayed = advantages(episodes([1.0], 4) + episodes([0.0], 4), episodes([1.0], 4))
    assert (replayed == 0).all() if kind == "recompute" else (replayed > 0.5).all()
    rounded = episodes([10.0], 32) + episodes([np.nextafter(np.float32(10.0), np.float32(11.0))], 32)
    if kind != "recompute":  # equal returns, summed in another order
        assert advantages(rounded, rounded)[1].abs().max() < 1e-2


@pytest.mark.parametrize("equal", [1.0, 0.1, -0.85])
def test_equal_values_are_whitened_to_zero(equal):
    """The float32 mean of three times 0.1 is another number."""
    assert (whiten(torch.full((1, 3), equal), torch.ones(1, 3, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("moments", [None, ([0.2], 0.8)])
def test_a_base_priority_is_of_the_return_or_of_the_mean_advantage_of_the_tokens(moments):
    episodes = [make_episode(np.random.default_rng(k), turns=1 + k) for k in range(4)]
    config, tensor = Config(advantage_clip=1.0, epsilon=0.1), torch.tensor([[0.2], [0.8]]) if moments else None
    means = np.array([np.mean(row) for row in slow_advantages(episodes, config, moments)])
    for kind, expected in (("advantage", means), ("reward", [e.reward for e in episodes])):
        trainer = SimpleNamespace(config=dataclasses.replace(config, base_priority=kind))
        found = TorchTrainer.base_priorities(trainer, episodes, tensor)
        np.testing.assert_allclose(found, np.abs(expected) + 0.1, rtol=1e-4)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.integers(1, 40))
def test_rows_stand_once_in_groups_of_little_padding(lengths, most):
    groups = alike(lengths, most)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[row] for row in group]
        assert own == sorted(own)
        assert len(own) <= most
        assert sum(own) > (1 - PADDING) * max(own) * len(own)
    assert [len(group) for group in alike([7] * 10, 4)] == [2, 4, 4]  # equal lengths fill every group but one


def test_an_episode_whose_fields_do_not_fit_together_is_refused():
    episode = make_episode(np.random.default_rng(0), seed=7)
    episode.turn_rewards = episode.turn_rewards[:-1]
    with pytest.raises(ValueError, match="episode of seed 7"):
        collate([episode])
