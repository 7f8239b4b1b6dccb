"""From episodes to the IS-weighted loss, against a slow float64 loop written from the equations."""

import dataclasses
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from conftest import make_episode

from freshper.config import Config
from freshper.episode import collate
from freshper.reinforce import (
    WINDOW,
    ReturnNormalizer,
    advantages,
    policy_loss,
    returns_to_go,
    whiten,
)


def normalizer_of(config):
    return ReturnNormalizer(config.baseline == "turn", config.kl_reward_coef)


def bounded(x, limit):
    return max(-limit, min(limit, x))


def slow_turns(episode):
    """The number of the turn of each action token."""
    actions = np.flatnonzero(episode.action_mask).tolist()
    ends = [t for t in actions if t + 1 not in actions]
    return [sum(end < t for end in ends) for t in actions]


def slow_returns(episode, kl_coef):
    """G_t of each action token: rewards of its turn and later ones, minus the KL penalty of this
    and later tokens."""
    actions = np.flatnonzero(episode.action_mask).tolist()
    returns = []
    for t, turn in zip(actions, slow_turns(episode), strict=True):
        total = sum(episode.turn_rewards[turn:].tolist())
        for s in actions:
            if kl_coef and s >= t:
                k1 = float(episode.behavior_logprobs[s]) - float(episode.ref_logprobs[s])
                total -= kl_coef * bounded(k1, 10)
        returns.append(total)
    return returns


def slow_statistics(collected, kl_coef, by_turn):
    """The mean of each turn (or of all) and the std of deviations from it, over action tokens."""
    returns = defaultdict(list)
    for e in collected:
        for turn, g in zip(slow_turns(e), slow_returns(e, kl_coef), strict=True):
            returns[turn if by_turn else 0].append(g)

    means = [np.mean(returns[turn]) for turn in range(len(returns))]
    squares = [(g - means[turn]) ** 2 for turn, values in returns.items() for g in values]
    return means, math.sqrt(np.mean(squares))


def slow_advantages(episodes, config, collected=None):
    """A_t of each action token of each episode against `collected`, or against these episodes. The
    mean of the last turn also counts for later ones."""
    kl_coef = config.kl_reward_coef
    means, std = slow_statistics(collected or episodes, kl_coef, config.baseline == "turn")
    advantages = []
    for e in episodes:
        row = []
        for turn, g in zip(slow_turns(e), slow_returns(e, kl_coef), strict=True):
            mean = means[min(turn, len(means) - 1)]
            row.append(bounded((g - mean) / (std + 1e-8), config.advantage_clip))
        advantages.append(row)
    return advantages


def slow_loss(episodes, advantages, logprobs, entropies, weights, config):
    """1/B sum_i w_i l_i of eq. 16, with l_i divided by the mean number of action tokens."""
    scale = sum(len(row) for row in advantages) / len(episodes)
    total = 0.0
    for n, e in enumerate(episodes):
        for a, t in zip(advantages[n], np.flatnonzero(e.action_mask), strict=True):
            rho = math.exp(bounded(logprobs[n][t] - float(e.behavior_logprobs[t]), 20))
            clipped = max(1 - CLIP, min(1 + CLIP, rho))
            objective = min(rho * a, clipped * a)
            if config.dual_clip and a < 0:
                objective = max(objective, config.dual_clip * a)

            loss = -objective - config.entropy_coef * entropies[n][t]
            if config.kl_loss_coef:
                log_ratio = bounded(float(e.ref_logprobs[t]) - logprobs[n][t], 20)
                loss += config.kl_loss_coef * min(10.0, math.exp(log_ratio) - log_ratio - 1)
            total += weights[n] * loss / scale
    return total / len(episodes)


CLIP = 0.15  # not the default
CASES = {
    "plain": {},
    "Config A": {"advantage_clip": 0.2},
    "dual clip": {"dual_clip": 1.5},
    "KL and entropy": {"kl_reward_coef": 0.1, "kl_loss_coef": 0.05, "entropy_coef": 0.01},
    "replayed": {},
    "baseline by turn": {"baseline": "turn"},
    "replayed, by turn": {"baseline": "turn", "kl_reward_coef": 0.1},
    "replayed, recomputed": {"baseline": "recompute", "kl_reward_coef": 0.1},
}


def random_episodes(rng, case, seed):
    """Episodes to train on, and the collected ones, which are the same unless they are replayed."""
    episodes = [make_episode(rng, turns=int(rng.integers(2, 5))) for _ in range(1 + seed % 6)]
    collected = episodes
    if "replayed" in case:
        collected = [make_episode(rng, turns=int(rng.integers(1, 4))) for _ in range(5)]
    for e in {id(e): e for e in episodes + collected}.values():
        away = rng.standard_cauchy(len(e.tokens)) * e.action_mask / 3
        e.ref_logprobs = (e.behavior_logprobs + away).astype(np.float32)
    return episodes, collected


def slow_sums(log_rho, advantages, config):
    """The statistics of a row: sums over its action tokens."""
    rho = np.exp(log_rho)
    most = config.dual_clip or np.inf
    too_high = rho > 1 + CLIP
    too_low = (rho < 1 - CLIP) | (rho > most)
    clipped = np.where(advantages > 0, too_high, too_low) & (advantages != 0)
    return {
        "log_ratio": log_rho.sum(),
        "ratio": rho.sum(),
        "ratio_sq": (rho**2).sum(),
        "kl": (rho - 1 - log_rho).sum(),
        "clipped": clipped.sum(),
    }


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_slow_loop(case, seed):
    """Micro-batches add up to the whole. The slow gradient comes from central differences."""
    config = Config(**{"advantage_clip": 20.0} | CASES[case])
    rng = np.random.default_rng(seed)
    episodes, collected = random_episodes(rng, case, seed)
    weights = rng.random(len(episodes)) + 0.1

    normalizer = normalizer_of(config)
    normalizer.observe(collate(collected))
    batch = collate(episodes)
    measured = advantages(batch, normalizer, config)
    clipped = measured.clamp(-config.advantage_clip, config.advantage_clip)
    batch = batch._replace(advantages=clipped, weights=torch.tensor(weights))
    mask = batch.action_mask
    recomputed = config.baseline == "recompute"
    expected = slow_advantages(episodes, config, episodes if recomputed else collected)
    np.testing.assert_allclose(batch.advantages[mask], sum(expected, []), rtol=1e-4, atol=1e-4)
    assert (batch.advantages[~mask] == 0).all()
    if case == "plain":  # REINFORCE++'s own measure
        torch.testing.assert_close(measured, whiten(returns_to_go(batch.rewards), mask))

    noise = torch.from_numpy(rng.normal(0, 0.3, mask.shape))
    logprobs = (batch.behavior_logprobs.double() + noise).requires_grad_()
    log_rho = (logprobs - batch.behavior_logprobs).detach()
    entropies = torch.from_numpy(rng.random(mask.shape))
    total = 0.0
    for rows, part in batch.micro_batches(1 + seed % 3):
        width = part.tokens.shape[1]
        loss, stats = policy_loss(
            logprobs[rows, :width],
            part.behavior_logprobs,
            part.advantages,
            part.action_mask,
            part.weights,
            ratio_clip=CLIP,
            dual_clip=config.dual_clip,
            entropies=entropies[rows, :width],
            entropy_coef=config.entropy_coef,
            ref_logprobs=part.ref_logprobs,
            kl_coef=config.kl_loss_coef,
            batch_size=len(episodes),
            scale=int(mask.sum()) / len(episodes),
        )
        total += loss
        for k, n in enumerate(rows):
            a = batch.advantages[n][mask[n]].numpy()
            sums = slow_sums(log_rho[n][mask[n]].numpy(), a, config)
            assert {name: x[k].item() for name, x in stats.items()} == pytest.approx(sums)
    total.backward()

    def slow(values):
        return slow_loss(episodes, expected, values.tolist(), entropies.tolist(), weights, config)

    assert total.item() == pytest.approx(slow(logprobs), rel=1e-4, abs=1e-5)
    for n, t in mask.nonzero().tolist()[:: 1 + seed]:
        step = torch.zeros_like(logprobs)
        step[n, t] = 1e-5
        difference = (slow(logprobs + step) - slow(logprobs - step)) / 2e-5
        assert logprobs.grad[n, t].item() == pytest.approx(difference, rel=1e-3, abs=1e-5)
    assert (logprobs.grad[~mask] == 0).all()


@pytest.mark.parametrize("log_ratio", [88.8, 1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_leave_loss_and_gradient_finite(log_ratio, advantage):
    """From 88.8 on exp overflows in float32, and 0 times infinity is NaN. The bound of the log
    ratio is 20, that of the KL estimate 10."""
    logprobs = torch.full((1, 1), log_ratio, requires_grad=True)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    terms = {"ref_logprobs": zero, "kl_coef": 1.0}
    loss, stats = policy_loss(logprobs, zero, advantage * one, one.bool(), **terms)
    loss.backward()
    rho = math.exp(bounded(log_ratio, 20.0))
    clipped = max(0.8, min(1.2, rho))
    assert loss.item() == pytest.approx(10.0 - min(rho * advantage, clipped * advantage))
    assert logprobs.grad.item() == 0.0
    # The diagnostics get the log ratio of the trajectory without a bound.
    assert stats["log_ratio"].item() == pytest.approx(log_ratio)


@pytest.mark.parametrize(("size", "kl_coef"), [(100, 0.0), (100, 0.1), (300, 0.1)])
@pytest.mark.parametrize("kind", ["batch", "turn"])
def test_the_measure_is_of_the_newest_batch_or_of_the_window(kind, size, kl_coef):
    """A batch above the window is measured whole."""
    assert WINDOW == 256
    rng = np.random.default_rng(0)
    collected = [make_episode(rng, turns=1 + k % 4) for k in range(WINDOW + 44)]
    for e in collected:
        away = rng.random(len(e.tokens)) * e.action_mask
        e.ref_logprobs = (e.behavior_logprobs - away).astype(np.float32)
    config = Config(kl_reward_coef=kl_coef, baseline=kind, advantage_clip=1e9)
    normalizer = normalizer_of(config)
    for k in range(0, len(collected), size):
        normalizer.observe(collate(collected[k : k + size]))

    latest = collected[-max(WINDOW, size) :] if kind == "turn" else collected[-size:]
    drawn = collected[:9]
    batch = collate(drawn)
    mask = batch.action_mask
    expected = sum(slow_advantages(drawn, config, latest), [])
    measured = advantages(batch, normalizer, config)
    np.testing.assert_allclose(measured[mask], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["batch", "turn", "recompute"])
def test_equal_failures_successes_and_rounding_under_each_baseline(kind):
    config = Config(baseline=kind)
    normalizer = normalizer_of(config)

    def observe(episodes):
        normalizer.observe(collate(episodes))

    def of_actions(episodes):
        batch = collate(episodes)
        return advantages(batch, normalizer, config)[batch.action_mask]

    def episodes(turn_rewards, n):
        rewards = np.float32(turn_rewards)
        made = [make_episode(np.random.default_rng(k), turns=len(rewards)) for k in range(n)]
        return [dataclasses.replace(e, turn_rewards=rewards) for e in made]

    failures = episodes(4 * [-0.1], 6)
    successes = episodes([1.0], 4)
    observe(failures)
    if kind != "recompute":  # returns-to-go differ by turn alone, and that is no reason to train
        assert of_actions(failures).abs().max() < 1e-6

    observe(successes + episodes([0.0], 4))
    replayed = of_actions(successes)
    assert (replayed == 0).all() if kind == "recompute" else (replayed > 0.5).all()

    # A single collected episode has no spread, so the std before it stays, 1.
    mixed, normalizer = normalizer, normalizer_of(config)
    observe(episodes([0.0], 1))
    measured = of_actions(successes[:1])
    normalizer = mixed
    assert measured.tolist() == pytest.approx([0.0 if kind == "recompute" else 1.0] * len(measured))

    if kind == "batch":
        # A fresh batch of successes only has no gradient. Replay after it has one.
        observe(successes)
        assert of_actions(successes).abs().max() < 1e-6
        # The newest batch has no spread: the std before it stays.
        observe(failures)
        replayed = of_actions(successes)
        assert ((replayed > 0.5) & (replayed < 5.0)).all()
        # Equal returns, summed in another order.
        above = np.nextafter(np.float32(10.0), np.float32(11.0))
        rounded = episodes([10.0], 32) + episodes([above], 32)
        observe(rounded)
        assert of_actions(rounded).abs().max() < 1e-2


@pytest.mark.parametrize("equal", [1.0, 0.1, -0.85])
def test_equal_values_are_whitened_to_zero(equal):
    """The float32 mean of three times 0.1 is another number."""
    assert (whiten(torch.full((1, 3), equal), torch.ones(1, 3, dtype=torch.bool)) == 0).all()
