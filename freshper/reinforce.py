"""REINFORCE++: the one path from episodes to the IS-weighted loss.

Paper: the clipped ratios of section 3.1, eq. 4 (rho), eq. 16 (weighted loss), appendix E (Config A). REINFORCE++
itself: Hu et al., arXiv 2501.03262, as in OpenRLHF.

    training_batch     r_t   turn reward on the last action token of its turn  -  kl_reward_coef * k1_t
                       G_t   = sum_{s >= t} r_s                  undiscounted (gamma = 1), over the whole conversation
                       A_t   = (G_t - mean) / std,  clipped to +-eps_clip of Table 3
    policy_loss        rho_t = pi_theta(a_t | s_t) / pi_mu(a_t | s_t)
                       l_i   = -sum_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) / C
                       L     = 1/B sum_i w_i l_i                 eq. 16

All tensors are [B, T]. Environment tokens carry no reward and no loss, but reward flows back across them, since all
turns belong to one episode. The paper is silent on these points (docs/differences.md):
- What a return is measured against, `--baseline`. `batch`: a fresh batch is whitened over all its action tokens, as in
  REINFORCE++. A replay batch can hold nothing but successes; whitened over itself its advantage would be zero, so it is
  measured against the last WINDOW episodes collected. `recompute`: it is whitened over itself (the authors' code).
- `turn`: as `batch`, but against the mean of the returns from the same turn on, which leaves the gradient unbiased. If
  turns have a cost, one mean for all pushes early replies down and late ones up, whatever they say, and replies lose
  their form. If all episodes have the same return after the KL term, such as failures, they are always measured so:
  against one mean for all they would have a gradient.
- The KL penalty in the reward is that of the policy that acted, on both sides of a replay advantage.
- If A_t < 0, one stale failure whose tokens have become likely since can dominate the batch: rho_t A_t has no lower
  bound. Dual clip (Ye et al., AAAI 2020) bounds it by `dual_clip` * A_t; 0 switches it off.
- C is the mean number of action tokens per episode of the whole batch. The authors' code has C = 1.

Exercise: set `--baseline recompute` and watch `replay_success` and `replay_grad_norm`.
"""

import numpy as np
import torch
from torch import Tensor

from freshper.config import Config
from freshper.episode import Batch, Episode, collate

WINDOW, EPS = 256, 1e-8  # episodes behind the running means; what is added to standard deviations
MAX_LOG_RATIO = 20.0  # exp overflows in float32 from 88.8 on and makes the gradient NaN; OpenRLHF and verl bound by 20


def returns_to_go(rewards: Tensor) -> Tensor:
    """Return G_t = sum_{s >= t} r_s along the last axis. [B, T] -> [B, T]."""
    return rewards.flip(-1).cumsum(-1).flip(-1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (x - mean) / std over the masked entries, 0 elsewhere and if all are equal. [B, T] -> [B, T]."""
    selected = values[mask].double()  # in float32 the mean of equal values can miss them by more than EPS
    mean, std = selected.mean(), selected.std(correction=0)
    return torch.where(mask, (values.double() - mean) / (std + EPS), 0.0).to(values.dtype)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the KL estimate log pi - log pi_ref, clamped to +-10. [B, T] -> [B, T]."""
    return (logprobs - ref_logprobs).clamp(-10.0, 10.0)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return pi_ref / pi - log(pi_ref / pi) - 1, never negative, with a usable gradient. [B, T] -> [B, T]. At most
    10, as in OpenRLHF and verl: at pi = e^-8 pi_ref one token would outweigh the batch, with a value near 3,000."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1.0).clamp(max=10.0)


def advantages(rewards: Tensor, action_mask: Tensor, clip: float, moments: Tensor | None = None) -> Tensor:
    """Return A_t from token rewards. [B, T], [B, T] -> [B, T], 0 off the mask. Measured against `moments`, a mean and
    a std [2, B, T] or broadcast to it, or None: those of this batch. `clip` is eps_clip of Table 3."""
    returns = returns_to_go(rewards)  # [B, T]
    if moments is None:
        return whiten(returns, action_mask).clamp(-clip, clip)
    mean, std = moments
    return torch.where(action_mask, (returns - mean) / (std + EPS), 0.0).clamp(-clip, clip)


def shaped(batch: Batch, kl_reward_coef: float) -> Tensor:
    """Return r_t - kl_reward_coef * k1_t of the policy that acted, [B, T]."""
    if not kl_reward_coef:
        return batch.rewards
    return batch.rewards - kl_reward_coef * kl_k1(batch.behavior_logprobs, batch.ref_logprobs) * batch.action_mask


def turn_returns(episodes: list[Episode], rewards: Tensor) -> list[list[float]]:
    """Return G_t at the last token of each turn, for each of the B episodes, from token rewards [B, T]."""
    return [row[e.turn_ends()].tolist() for e, row in zip(episodes, returns_to_go(rewards), strict=True)]


def equal_returns(returns: list[list[float]]) -> bool:
    """Return whether all episodes, of several, have the same return up to rounding: then nothing tells them apart."""
    first = [row[0] for row in returns]
    return len(first) > 1 and bool(np.ptp(first) <= 1e-5 * np.abs(first).max())


def moments_of(returns: list[list[float]], by_turn: bool) -> Tensor:
    """Return mean and std of the returns of episodes [n] as float32 [2, K]: for each turn up to the longest episode's,
    or (K = 1) for all turns, in which every episode counts once. The std is one for all turns."""
    by_turn = by_turn or equal_returns(returns)
    g = np.concatenate(returns)  # [turns of all]
    turn = np.concatenate([np.arange(len(row)) * by_turn for row in returns])
    weight = np.concatenate([np.full(len(row), 1.0 if by_turn else 1.0 / len(row)) for row in returns])
    mean = np.bincount(turn, weight * g) / np.bincount(turn, weight)  # [K]
    variance = np.average((g - mean[turn]) ** 2, weights=weight)
    # returns that differ by rounding alone (ten times -0.1 in another order) must not become advantages
    return torch.tensor(np.stack([mean, np.full(len(mean), max(variance, 1e-6) ** 0.5)]), dtype=torch.float32)


class ReplayBaseline:
    """What a replayed return is measured against."""

    def __init__(self, config: Config):
        self.config, self.returns = config, list[list[float]]()  # of each turn of the last WINDOW episodes

    def observe(self, episodes: list[Episode]) -> None:
        """Add the returns of freshly collected episodes."""
        rewards = shaped(collate(episodes), self.config.kl_reward_coef)
        self.returns = [*self.returns, *turn_returns(episodes, rewards)][-WINDOW:]

    def moments(self) -> Tensor | None:
        """Return those of `moments_of`, [2, K], or None: those of the replay batch itself."""
        kind = self.config.baseline
        return None if kind == "recompute" else moments_of(self.returns, by_turn=kind == "turn")

    def state_dict(self) -> dict[str, list[list[float]]]:
        return {"returns": self.returns}

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        self.returns = state["returns"]


def training_batch(
    episodes: list[Episode], config: Config, weights: np.ndarray | None = None, moments: Tensor | None = None
) -> Batch:
    """Return the padded batch with A_t and w_i: all that the loss needs but log pi_theta. `weights` [B]: IS weights
    (None: 1); `moments` [2, K]: those of `ReplayBaseline`, or [2, B, T] (None: the batch's own)."""
    batch = collate(episodes)
    mask, rewards = batch.action_mask, shaped(batch, config.kl_reward_coef)
    if moments is None:
        returns = turn_returns(episodes, rewards)
        if config.baseline == "turn" or equal_returns(returns):
            moments = moments_of(returns, by_turn=True)
    if moments is not None and moments.dim() == 2:
        turn = (mask & ~mask.roll(1, -1)).cumsum(-1) - 1  # number of each action token's turn, [B, T]
        moments = moments[:, turn.clamp(0, moments.shape[1] - 1)]  # [2, B, T]
    found = advantages(rewards, mask, config.advantage_clip, moments)
    if batch.engine_weights is not None:  # weighs the policy gradient of a token: its objective is proportional to A_t
        found = found * batch.engine_weights
    w = torch.ones(len(episodes)) if weights is None else torch.as_tensor(weights, dtype=torch.float32)
    return batch._replace(advantages=found, weights=w)


def policy_loss(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, action_mask: Tensor, weights: Tensor | None = None,
    *, ratio_clip: float = 0.2, dual_clip: float = 0.0, entropies: Tensor | None = None, entropy_coef: float = 0.0,
    ref_logprobs: Tensor | None = None, kl_coef: float = 0.0, batch_size: int | None = None, scale: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Return L = 1/B sum_i w_i l_i (eq. 16), and sums over the action tokens of each row, [B]: of log rho_t, rho_t,
    rho_t^2, k3 of pi_mu against pi_theta, clipped tokens. Tensors are [B, T] but `weights` [B] (None: all 1); `scale`
    is C. The losses of micro-batches add up to that of the whole batch if B = `batch_size` and C are the whole's."""
    log_ratio = torch.where(action_mask, logprobs - behavior_logprobs, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # rho_t [B, T]
    unclipped = ratio * advantages
    objective = torch.minimum(unclipped, ratio.clamp(1.0 - ratio_clip, 1.0 + ratio_clip) * advantages)  # [B, T]
    if dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    token_loss = -objective
    if entropies is not None:
        token_loss = token_loss - entropy_coef * entropies
    if ref_logprobs is not None:
        token_loss = token_loss + kl_coef * kl_k3(logprobs, ref_logprobs)
    sample_loss = torch.where(action_mask, token_loss, 0.0).sum(-1) / scale  # l_i [B]
    loss = (sample_loss if weights is None else weights * sample_loss).sum() / (batch_size or len(logprobs))
    with torch.no_grad():
        stats = {
            "log_ratio": log_ratio.sum(-1),
            "ratio": (ratio * action_mask).sum(-1),
            "ratio_sq": (ratio.square() * action_mask).sum(-1),
            "kl": (ratio - log_ratio - 1.0).sum(-1),
            "clipped": ((objective != unclipped) & action_mask).sum(-1),
        }
    return loss, stats
