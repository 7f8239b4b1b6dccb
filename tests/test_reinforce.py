"""From episodes to the IS-weighted loss, against a slow float64 loop written from the equations, token by token."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import make_episode
from hypothesis import given
from hypothesis import strategies as st

from freshper.config import Config
from freshper.episode import PADDING, collate, group_by_length
from freshper.priority import base_priorities
from freshper.reinforce import WINDOW, Baseline, kl_k3, policy_loss, training_batch, whiten


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
            difference = {
                s: float(episode.behavior_logprobs[s]) - float(episode.ref_logprobs[s])
                for s in actions
            }
            total -= kl_coef * sum(bounded(difference[s], 10) for s in actions if s >= t)
        returns.append(total)
    return returns


def turns_of(episode):
    """The number of the turn of each action token."""
    return [int((episode.turn_ends() < t).sum()) for t in np.flatnonzero(episode.action_mask)]


def slow_statistics(collected, kl_coef, by_turn):
    """The mean of each turn (or of all turns) and the std of all deviations from it, over action tokens."""
    table = [(turn if by_turn else 0, g) for e in collected
             for turn, g in zip(turns_of(e), slow_returns(e, kl_coef), strict=True)]  # fmt: skip
    means = [
        np.mean([g for t, g in table if t == turn]) for turn in range(1 + max(t for t, _ in table))
    ]
    return means, math.sqrt(np.mean([(g - means[t]) ** 2 for t, g in table]))


def slow_advantages(episodes, config, collected=None):
    """A_t of each action token of each episode against `collected`, or against these episodes; the mean of the last
    turn also counts for later ones."""
    kl_coef = config.kl_reward_coef
    means, std = slow_statistics(collected or episodes, kl_coef, config.baseline == "turn")
    found = []
    for e in episodes:
        expected = [means[min(turn, len(means) - 1)] for turn in turns_of(e)]
        row = [
            (g - mean) / (std + 1e-8)
            for g, mean in zip(slow_returns(e, kl_coef), expected, strict=True)
        ]
        found.append([bounded(a, config.advantage_clip) for a in row])
        if e.engine_weights is not None:
            found[-1] = [
                a * float(w)
                for a, w in zip(found[-1], e.engine_weights[e.action_mask], strict=True)
            ]
    return found


def slow_loss(episodes, logprobs, entropies, weights, config, collected=None):
    """1/B sum_i w_i l_i of eq. 16, with l_i divided by the mean number of action tokens."""
    scale = sum(int(e.action_mask.sum()) for e in episodes) / len(episodes)
    total = 0.0
    for n, (e, row) in enumerate(
        zip(episodes, slow_advantages(episodes, config, collected), strict=True)
    ):
        for a, t in zip(row, np.flatnonzero(e.action_mask), strict=True):
            rho = math.exp(bounded(logprobs[n][t] - float(e.behavior_logprobs[t]), 20))
            objective = min(
                rho * a, max(1 - config.ratio_clip, min(1 + config.ratio_clip, rho)) * a
            )
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
    "replayed": {"replayed": True},
    "baseline by turn": {"baseline": "turn"},
    "replayed, by turn": {"baseline": "turn", "replayed": True, "kl_reward_coef": 0.1},
    "replayed, recomputed": {"baseline": "recompute", "replayed": True},
    "truncated IS": {"engine": True, "ratio_clip": 0.1},
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_slow_loop(case, seed):
    """The gradient against central differences of the slow loop; whole, and in micro-batches that add up."""
    settings = CASES[case].copy()
    replayed, engine = settings.pop("replayed", False), settings.pop("engine", False)
    config = Config(**{"advantage_clip": 20.0} | settings)
    rng = np.random.default_rng(seed)
    episodes = [make_episode(rng, turns=int(rng.integers(2, 5))) for _ in range(1 + seed % 6)]
    collected = (
        [make_episode(rng, turns=int(rng.integers(1, 4))) for _ in range(5)]
        if replayed
        else episodes
    )
    for e in {id(e): e for e in episodes + collected}.values():
        away = rng.standard_cauchy(len(e.tokens)) * e.action_mask / 3
        e.ref_logprobs = (e.behavior_logprobs + away).astype(np.float32)
        e.engine_weights = (2 * rng.random(len(e.tokens))).astype(np.float32) if engine else None
    weights = rng.random(len(episodes)) + 0.1
    (baseline := Baseline(config.baseline, config.kl_reward_coef)).observe(collected)
    collected = episodes if config.baseline == "recompute" else collected
    batch = training_batch(episodes, config, baseline.advantages(episodes), weights)
    expected = slow_advantages(episodes, config, collected)
    np.testing.assert_allclose(
        batch.advantages[batch.action_mask], sum(expected, []), rtol=1e-4, atol=1e-4
    )
    assert (batch.advantages[~batch.action_mask] == 0).all()
    logprobs = batch.behavior_logprobs.double() + torch.from_numpy(
        rng.normal(0, 0.3, batch.tokens.shape)
    )
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
            clipped = np.where(a > 0, rho > 1 + config.ratio_clip, (rho < least) | (rho > most)) & (
                a != 0
            )
            sums = {
                "log_ratio": log_rho,
                "ratio": rho,
                "ratio_sq": rho**2,
                "kl": rho - 1 - log_rho,
                "clipped": clipped,
            }
            found = {name: value[row].item() for name, value in stats.items()}
            assert found == pytest.approx({name: value.sum() for name, value in sums.items()})
    total.backward()

    def slow(values):
        return slow_loss(episodes, values.tolist(), entropies.tolist(), weights, config, collected)

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
    assert stats["log_ratio"].item() == pytest.approx(
        log_ratio
    )  # of the trajectory, for the diagnostics


@pytest.mark.parametrize("x", [-100.0, -3.0, 0.0, 0.5, 2.0, 8.0, 100.0])
def test_k3_and_its_gradient_are_bounded(x):
    """e^x - x - 1 with x = log pi_ref - log pi, and its derivative, or 10 and 0 where that is larger."""
    logprob = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    k3 = kl_k3(logprob, torch.full((1,), x))
    k3.backward()
    exact = math.exp(x) - x - 1
    assert (k3.item(), logprob.grad.item()) == pytest.approx(
        (exact, 1 - math.exp(x)) if exact < 10 else (10.0, 0.0)
    )


@pytest.mark.parametrize("kind", ["batch", "turn", "recompute"])
def test_a_fresh_and_a_replayed_episode_have_one_measure(kind):
    """Lines 5 and 10: equal statistics give an episode equal A_t, whatever stands beside it in the batch. One-turn
    successes and three-turn failures, half and half, were +1.73 and -0.58 in line 5 and +1 and -1 in line 10."""
    episodes = [make_episode(np.random.default_rng(k), turns=1 + 2 * (k % 2)) for k in range(8)]
    for k, e in enumerate(episodes):
        e.turn_rewards = np.array([0.0, 0.0, 0.0] if k % 2 else [1.0], dtype=np.float32)
    (baseline := Baseline(kind, 0.0)).observe(episodes)
    fresh = baseline.advantages(episodes)
    drawn = episodes if kind == "recompute" else episodes[3:6]
    replayed = baseline.advantages(drawn)
    for e, row in zip(drawn, replayed, strict=True):
        np.testing.assert_array_equal(
            row[: len(e.tokens)], fresh[episodes.index(e), : len(e.tokens)]
        )
    if kind != "turn":  # REINFORCE++'s own measure
        torch.testing.assert_close(
            fresh, training_batch(episodes, Config(advantage_clip=20.0)).advantages
        )


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["batch", "turn"])
def test_the_baseline_is_of_the_newest_batch_or_of_the_window(kind, kl_coef):
    rng = np.random.default_rng(0)
    collected = [make_episode(rng, turns=1 + k % 4) for k in range(WINDOW + 44)]
    for e in collected:
        e.ref_logprobs = (e.behavior_logprobs - rng.random(len(e.tokens)) * e.action_mask).astype(
            np.float32
        )
    baseline, restored = Baseline(kind, kl_coef), Baseline(kind, kl_coef)
    for k in range(0, len(collected), 100):
        baseline.observe(collected[k : k + 100])
    latest = collected[-WINDOW:] if kind == "turn" else collected[-100:]
    config = Config(kl_reward_coef=kl_coef, baseline=kind, advantage_clip=1e9)
    restored.load_state_dict(baseline.state_dict())
    expected = sum(slow_advantages(collected[:9], config, latest), [])
    for each in (baseline, restored):
        batch = training_batch(collected[:9], config, each.advantages(collected[:9]))
        np.testing.assert_allclose(
            batch.advantages[batch.action_mask], expected, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["batch", "turn", "recompute"])
def test_equal_failures_successes_and_rounding_under_each_baseline(kind):
    baseline = Baseline(kind, 0.0)

    def advantages(collected, drawn):
        """Of the action tokens of a fresh batch, and of a replay batch after it."""
        baseline.observe(collected)
        return [
            baseline.advantages(batch)[collate(batch).action_mask] for batch in (collected, drawn)
        ]

    def episodes(turn_rewards, n):
        rewards = np.asarray(turn_rewards, dtype=np.float32)
        made = [make_episode(np.random.default_rng(k), turns=len(rewards)) for k in range(n)]
        return [dataclasses.replace(e, turn_rewards=rewards) for e in made]

    failures, successes = episodes(4 * [-0.1], 6), episodes([1.0], 4)
    fresh, replayed = advantages(failures, successes)
    if kind != "recompute":  # returns-to-go differ by turn alone, and that is no reason to train
        assert fresh.abs().max() < 1e-6
    _, replayed = advantages(successes + episodes([0.0], 4), successes)
    assert (replayed == 0).all() if kind == "recompute" else (replayed > 0.5).all()
    if kind == "batch":  # the newest batch has no spread: the std before it stays
        _, replayed = advantages(failures, successes)
        assert ((replayed > 0.5) & (replayed < 5.0)).all()
    rounded = episodes([10.0], 32) + episodes(
        [np.nextafter(np.float32(10.0), np.float32(11.0))], 32
    )
    if kind == "batch":  # equal returns, summed in another order
        assert max(found.abs().max() for found in advantages(rounded, rounded)) < 1e-2


@pytest.mark.parametrize("equal", [1.0, 0.1, -0.85])
def test_equal_values_are_whitened_to_zero(equal):
    """The float32 mean of three times 0.1 is another number."""
    assert (whiten(torch.full((1, 3), equal), torch.ones(1, 3, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("kind", ["batch", "turn", "recompute"])
def test_a_base_priority_is_of_the_return_or_of_the_unclipped_advantage(kind):
    """Never against the replay batch: four successes would then have the priority epsilon."""
    episodes = [make_episode(np.random.default_rng(k), turns=1 + k % 3) for k in range(8)]
    config = Config(advantage_clip=0.2, epsilon=0.1, baseline=kind)
    unclipped = dataclasses.replace(config, advantage_clip=1e9)
    (baseline := Baseline(kind, 0.0)).observe(episodes)
    for drawn in (episodes, episodes[:2], episodes[:1]):
        means = [np.mean(row) for row in slow_advantages(drawn, unclipped, episodes)]
        for source, expected in (("advantage", means), ("reward", [e.reward for e in drawn])):
            priorities = base_priorities(drawn, baseline, source, epsilon=0.1)
            np.testing.assert_allclose(priorities, np.abs(expected) + 0.1, rtol=1e-4)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.integers(1, 40))
def test_rows_stand_once_in_groups_of_little_padding(lengths, most):
    groups = group_by_length(lengths, most)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[row] for row in group]
        assert own == sorted(own)
        assert len(own) <= most
        assert sum(own) > (1 - PADDING) * max(own) * len(own)
    assert [len(group) for group in group_by_length([7] * 10, 4)] == [
        2,
        4,
        4,
    ]  # equal lengths fill every group but one


def test_an_episode_whose_fields_do_not_fit_together_is_refused():
    episode = make_episode(np.random.default_rng(0), seed=7)
    episode.turn_rewards = episode.turn_rewards[:-1]
    with pytest.raises(ValueError, match="episode of seed 7"):
        collate([episode])
