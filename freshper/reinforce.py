"""REINFORCE++: the one path from episodes to the IS-weighted loss.

Paper: the clipped ratios of section 3.1, eq. 4 (rho), eq. 16 (weighted loss), appendix E (Config A). REINFORCE++
itself: Hu et al., arXiv 2501.03262, as in OpenRLHF.

    training_batch     r_t   turn reward on the last action token of its turn  -  kl_reward_coef * k1_t
                       G_t   = sum_{s >= t} r_s                  undiscounted (gamma = 1), over the whole conversation
                       A_t   = (G_t - mean) / std,  clipped to +-eps_clip of Table 3
    policy_loss        rho_t = pi_theta(a_t | s_t) / pi_mu(a_t | s_t)
                       l_i   = -sum_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) / C
                       L     = 1/B sum_i w_i l_i                 eq. 16

All tensors are [B, T]. Environment tokens carry no reward and no loss, but reward flows back across
them, since all turns belong to one episode. The paper is silent on these points
(docs/differences.md):
- What a return is measured against, `--baseline`. Fresh and replayed episodes (lines 5 and 10) are
  measured alike, over action tokens. `batch`: against the newest collected batch, which whitens a
  fresh batch over its action tokens, as in REINFORCE++. A replay batch can hold nothing but
  successes; whitened over itself its advantage would be zero. `recompute` does that (the authors'
  code).
- `turn`: against the mean of the returns from the same turn on, over the last WINDOW collected
  episodes, which leaves the gradient unbiased. If turns have a cost, one mean for all pushes early
  replies down and late ones up, whatever they say, and replies lose their form.
- A batch of equal returns after the KL term, such as failures, has no spread. It is measured by
  turn, so that it has no gradient, and the std before it stays in force for replay.
- The KL penalty in the reward is that of the policy that acted, on both sides of a replay advantage.
- If A_t < 0, one stale failure whose tokens have become likely since can dominate the batch: rho_t A_t has no lower
  bound. Dual clip (Ye et al., AAAI 2020) bounds it by `dual_clip` * A_t; 0 switches it off.
- C is the mean number of action tokens per episode of the whole batch. The authors' code has C = 1.

Exercise: set `--baseline recompute` and watch `replay_success` and `replay_grad_norm`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from freshper.config import Config
from freshper.episode import Batch, Episode, collate

WINDOW = 256  # episodes behind the running means of `--baseline turn`
EPS = 1e-8  # added to standard deviations
# exp overflows in float32 from 88.8 on and makes the gradient NaN; OpenRLHF and verl bound by 20
MAX_LOG_RATIO = 20.0


def returns_to_go(rewards: Tensor) -> Tensor:
    """Return G_t = sum_{s >= t} r_s along the last axis. [B, T] -> [B, T]."""
    return rewards.flip(-1).cumsum(-1).flip(-1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (x - mean) / std over the masked entries, 0 elsewhere and if all are equal. [B, T] -> [B, T]."""
    selected = values[
        mask
    ].double()  # in float32 the mean of equal values can miss them by more than EPS
    mean = selected.mean()
    std = selected.std(correction=0)
    whitened = (values.double() - mean) / (std + EPS)
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the KL estimate log pi - log pi_ref, clamped to +-10. [B, T] -> [B, T]."""
    return (logprobs - ref_logprobs).clamp(-10.0, 10.0)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return pi_ref / pi - log(pi_ref / pi) - 1, never negative, with a usable gradient. [B, T] -> [B, T].

    At most 10, as in OpenRLHF and verl: at pi = e^-8 pi_ref one token would outweigh the batch, with a
    value near 3,000."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - log_ratio - 1.0).clamp(max=10.0)


def advantages(
    rewards: Tensor,
    action_mask: Tensor,
    clip: float,
    moments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return A_t from token rewards. [B, T], [B, T] -> [B, T], 0 off the mask.

    Measured against `moments`, a mean [B, T] and a std, or None: those of this batch over its action
    tokens. `clip` is eps_clip of Table 3."""
    returns = returns_to_go(rewards)  # [B, T]
    if moments is None:
        return whiten(returns, action_mask).clamp(-clip, clip)
    mean, std = moments
    measured = torch.where(action_mask, (returns.double() - mean) / (std + EPS), 0.0)
    return measured.to(returns.dtype).clamp(-clip, clip)


def shaped(batch: Batch, kl_reward_coef: float) -> Tensor:
    """Return r_t - kl_reward_coef * k1_t of the policy that acted, [B, T]."""
    if not kl_reward_coef:
        return batch.rewards
    assert batch.ref_logprobs is not None
    penalty = kl_k1(batch.behavior_logprobs, batch.ref_logprobs) * batch.action_mask
    return batch.rewards - kl_reward_coef * penalty


def turn_numbers(action_mask: Tensor) -> Tensor:
    """Return the number of each action token's turn, counted from 0. [B, T] -> int64 [B, T]."""
    starts_turn = action_mask & ~action_mask.roll(1, -1)
    return (starts_turn.cumsum(-1) - 1).clamp(min=0)


class Baseline:
    """What a return is measured against, fresh or replayed: the mean of collected returns, of each
    turn or of all, and their std. `kind` is --baseline."""

    def __init__(self, kind: str, kl_reward_coef: float):
        self.kind = kind
        self.kl_reward_coef = kl_reward_coef
        self.window: list[Tensor] = []  # per episode, [2, n]: turn and G_t of its n action tokens
        self.means = torch.zeros(1, dtype=torch.float64)  # [K]: of each turn, or K = 1
        self.std = 1.0

    def observe(self, episodes: list[Episode]) -> None:
        """Take mean and std over freshly collected episodes; with `turn`, over the last WINDOW."""
        batch = collate(episodes)
        returns = returns_to_go(shaped(batch, self.kl_reward_coef))
        table = torch.stack([turn_numbers(batch.action_mask), returns]).double()  # [2, B, T]
        collected = [table[:, row, mask] for row, mask in enumerate(batch.action_mask)]
        if self.kind == "turn":
            kept = max(WINDOW, len(collected))
            self.window = [*self.window, *collected][-kept:]
        else:
            self.window = collected

        episode_returns = torch.stack([episode[1, 0] for episode in self.window])
        spread = episode_returns.max() - episode_returns.min()
        several = len(self.window) > 1
        equal = several and bool(spread <= 1e-5 * episode_returns.abs().max())  # up to rounding

        turns, returns = torch.cat(self.window, dim=1)  # [action tokens of all]
        turns = turns.long() if self.kind == "turn" or equal else torch.zeros_like(turns).long()
        self.means = torch.bincount(turns, returns) / torch.bincount(turns)
        if not equal:
            self.std = (returns - self.means[turns]).square().mean().sqrt().item()

    def measured(self, episodes: list[Episode]) -> Tensor:
        """Return A_t against the collected episodes, before any clip, float32 [B, T]."""
        batch = collate(episodes)
        turns = turn_numbers(batch.action_mask).clamp(max=len(self.means) - 1)
        moments = self.means[turns], torch.tensor(self.std)
        return advantages(shaped(batch, self.kl_reward_coef), batch.action_mask, torch.inf, moments)

    def advantages(self, episodes: list[Episode]) -> Tensor:
        """Return A_t of line 5 or 10, before any clip, float32 [B, T]: `measured`, or against these
        episodes themselves with `recompute`."""
        if self.kind == "recompute":
            return own_advantages(episodes, self.kl_reward_coef)
        return self.measured(episodes)

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window, "means": self.means, "std": self.std}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window, self.means, self.std = state["window"], state["means"], state["std"]


def own_advantages(episodes: list[Episode], kl_reward_coef: float) -> Tensor:
    """Return A_t against these very episodes, before any clip, float32 [B, T]."""
    baseline = Baseline("batch", kl_reward_coef)
    baseline.observe(episodes)
    return baseline.measured(episodes)


def training_batch(
    episodes: list[Episode],
    config: Config,
    advantages: Tensor | None = None,
    weights: np.ndarray | None = None,
) -> Batch:
    """Return the padded batch with A_t and w_i: all that the loss needs but log pi_theta.

    `advantages` [B, T]: those of `Baseline` (None: of this batch against itself), clipped here.
    `weights` [B]: IS weights (None: all 1)."""
    batch = collate(episodes)
    if advantages is None:
        advantages = own_advantages(episodes, config.kl_reward_coef)
    advantages = advantages.clamp(-config.advantage_clip, config.advantage_clip)
    if batch.engine_weights is not None:
        # a token's objective is proportional to A_t, so this weighs its policy gradient
        advantages = advantages * batch.engine_weights
    if weights is None:
        weights = np.ones(len(episodes))
    return batch._replace(
        advantages=advantages, weights=torch.as_tensor(weights, dtype=torch.float32)
    )


def policy_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    weights: Tensor | None = None,
    *,
    ratio_clip: float = 0.2,
    dual_clip: float = 0.0,
    entropies: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    batch_size: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return L = 1/B sum_i w_i l_i (eq. 16), and sums over the action tokens of each row, [B]: of
    log rho_t, rho_t, rho_t^2, k3 of pi_mu against pi_theta, clipped tokens.

    Tensors are [B, T] but `weights` [B] (None: all 1). `scale` is C. The losses of micro-batches add up
    to that of the whole batch if B = `batch_size` and C are the whole's."""
    log_ratio = torch.where(action_mask, logprobs - behavior_logprobs, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # rho_t [B, T]
    clipped_ratio = ratio.clamp(1.0 - ratio_clip, 1.0 + ratio_clip)

    unclipped = ratio * advantages
    objective = torch.minimum(unclipped, clipped_ratio * advantages)  # [B, T]
    if dual_clip:
        bounded = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)

    token_loss = -objective
    if entropies is not None:
        token_loss = token_loss - entropy_coef * entropies
    if ref_logprobs is not None:
        token_loss = token_loss + kl_coef * kl_k3(logprobs, ref_logprobs)

    sample_loss = torch.where(action_mask, token_loss, 0.0).sum(-1) / scale  # l_i [B]
    if weights is not None:
        sample_loss = weights * sample_loss
    loss = sample_loss.sum() / (batch_size or len(logprobs))

    with torch.no_grad():
        stats = {
            "log_ratio": log_ratio.sum(-1),
            "ratio": (ratio * action_mask).sum(-1),
            "ratio_sq": (ratio.square() * action_mask).sum(-1),
            "kl": (ratio - log_ratio - 1.0).sum(-1),
            "clipped": ((objective != unclipped) & action_mask).sum(-1),
        }
    return loss, stats
