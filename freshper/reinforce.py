"""REINFORCE++: the one path from episodes to the IS-weighted loss.

Paper: the clipped ratios of section 3.1, eq. 4 (rho), eq. 16 (weighted loss), appendix E (Config
A). REINFORCE++ itself: Hu et al., arXiv 2501.03262, as in OpenRLHF.

    advantages       r_t   the turn's reward, on its last action token, - kl_reward_coef * k1_t
                     G_t   = sum_{s >= t} r_s     undiscounted (gamma = 1), to the episode's end
                     A_t   = (G_t - mean) / std, clipped by the trainer to +-advantage_clip
    policy_loss      rho_t = pi_theta(a_t | s_t) / pi_mu(a_t | s_t)
                     l_i   = -sum_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) / C
                             + sum_t (kl_loss_coef * k3_t - entropy_coef * H_t) / C
                     L     = 1/B sum_i w_i l_i    eq. 16: w_i scales all of l_i

Here t counts tokens, and eps is `ratio_clip`. Tensors are [B, T] unless another shape is given.
Environment tokens carry no reward and no loss, but reward flows back across them, since all turns
belong to one episode. The paper is silent on these points (docs/differences.md):
- `--baseline` chooses which mean and std measure a return. Fresh and replayed episodes (lines 5 and
  10) are measured alike, over action tokens. `batch`: mean and std of the newest collected
  batch. A fresh batch is then whitened over its action tokens, as in REINFORCE++. A replay batch is
  not whitened over itself: it can consist of successes only, and its advantages would all be 0.
  `recompute` does so nevertheless (the authors' code).
- `turn` measures G_t against the mean G_t of the tokens with the same turn number, over the last
  WINDOW collected episodes. If turns have a cost, one mean for all turns pushes early replies down
  and late ones up, whatever they say, and replies lose their form.
- If all returns are equal after the KL term (all failures, say), each turn is measured alone, with
  the std of the batch before (1 in the first one, and with `recompute`). If the rewards also fall
  in the same turns, all advantages are 0.
- The KL penalty in the reward is that of the policy that acted, also in replay.
- If A_t < 0, rho_t A_t has no lower bound: one stale failure whose tokens have become likely since
  can dominate the batch. Dual clip (Ye et al., AAAI 2020) bounds it by `dual_clip` * A_t, and 0
  switches it off.
- C is the mean number of action tokens per episode of the whole batch. The authors' code has C = 1.

Exercise 5 of docs/exercises.md is about this.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from freshper.episode import Batch

if TYPE_CHECKING:
    from freshper.config import Config

WINDOW = 256  # episodes behind the running means of `--baseline turn`
RATIO_CLIP = 0.2  # epsilon of the PPO ratio clip (section 4.1)
SMALL = 1e-8  # added to standard deviations
# From 88.8 on, exp overflows in float32 and the gradient is NaN. OpenRLHF and verl bound by 20.
MAX_LOG_RATIO = 20.0

Moments = tuple[Tensor, Tensor]  # mean and std that returns are measured against


def returns_to_go(rewards: Tensor) -> Tensor:
    """Return G_t = sum_{s >= t} r_s along the last axis. [B, T] -> [B, T]."""
    return rewards.flip(-1).cumsum(-1).flip(-1)


def whiten(values: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """Return (x - mean) / std of the masked entries, 0 elsewhere. [B, T] -> [B, T].

    If `moments` is None, mean and std are those of the masked entries, and equal ones become 0."""
    if moments is None:
        # In float32, the mean of equal values can differ from them by more than SMALL.
        selected = values[mask].double()
        moments = selected.mean(), selected.std(correction=0)

    mean, std = moments
    whitened = (values.double() - mean) / (std + SMALL)
    return torch.where(mask, whitened, 0.0).to(values.dtype)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the KL estimate log pi - log pi_ref, clamped to +-10. [B, T] -> [B, T]."""
    return (logprobs - ref_logprobs).clamp(-10.0, 10.0)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the KL estimate pi_ref / pi - log(pi_ref / pi) - 1, at most 10. [B, T] -> [B, T].

    It is never negative. On tokens sampled from pi, its value is KL(pi || pi_ref) in expectation,
    its gradient that of KL(pi_ref || pi). The bound is that of OpenRLHF and verl. Without
    it, one token at pi = e^-8 pi_ref would have a value near 3,000 and outweigh the batch."""
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    k3 = log_ratio.exp() - log_ratio - 1.0
    return k3.clamp(max=10.0)


def penalized_rewards(batch: Batch, kl_reward_coef: float) -> Tensor:
    """Return r_t - kl_reward_coef * k1_t of the policy that acted, float32 [B, T]."""
    if not kl_reward_coef:
        return batch.rewards
    assert batch.ref_logprobs is not None
    k1 = kl_k1(batch.behavior_logprobs, batch.ref_logprobs)
    return batch.rewards - kl_reward_coef * k1


def turn_numbers(action_mask: Tensor) -> Tensor:
    """Return the number of each action token's turn, counted from 0. [B, T] -> int64 [B, T]."""
    # The first token is a prompt's, so nothing is rolled in from the end of the row.
    starts_turn = action_mask & ~action_mask.roll(1, 1)
    turns = starts_turn.cumsum(1) - 1
    return turns.clamp(min=0)


class ReturnNormalizer:
    """Mean and std of the collected returns, against which returns are measured.

    The mean is one for all turns, or one per turn."""

    def __init__(self, per_turn: bool, kl_reward_coef: float):
        self.per_turn = per_turn
        self.kl_reward_coef = kl_reward_coef
        self.window: list[Tensor] = []  # per episode, [2, n]: turn and G_t of its n action tokens
        self.means = torch.zeros(1)  # [M]: one per turn, or M = 1
        self.std = torch.tensor(1.0)

    def returns(self, batch: Batch) -> Tensor:
        """Return G_t of a batch, after the KL term, float32 [B, T]."""
        return returns_to_go(penalized_rewards(batch, self.kl_reward_coef))

    def observe(self, batch: Batch) -> None:
        """Take mean and std of freshly collected episodes; if per turn, of the last WINDOW."""
        turns = turn_numbers(batch.action_mask)
        turn_and_return = torch.stack([turns, self.returns(batch)]).double()  # [2, B, T]
        if not self.per_turn:
            self.window = []
        for row, mask in enumerate(batch.action_mask):
            self.window.append(turn_and_return[:, row, mask])  # [2, n]
        del self.window[: -max(WINDOW, len(batch.tokens))]

        turns, returns = torch.cat(self.window, dim=1)  # of all action tokens
        turns = turns.long()
        differ = returns_differ(self.window)
        if differ and not self.per_turn:
            turns.zero_()
        self.means = torch.bincount(turns, returns) / torch.bincount(turns)
        if differ:
            self.std = (returns - self.means[turns]).square().mean().sqrt().float()

    def advantages(self, batch: Batch) -> Tensor:
        """Return A_t against the collected episodes, before any clip, float32 [B, T]."""
        # The mean of the last turn also counts for later ones.
        turns = turn_numbers(batch.action_mask).clamp(max=len(self.means) - 1)
        moments = self.means[turns], self.std
        return whiten(self.returns(batch), batch.action_mask, moments)

    def state_dict(self) -> dict:
        return {"window": self.window, "means": self.means, "std": self.std}

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)


def returns_differ(window: list[Tensor]) -> bool:
    """Return whether returns differ, up to rounding: G_0 of the episodes, or G_t of a single one.

    `window` has [2, n] per episode, as in `ReturnNormalizer`."""
    first = torch.stack([returns[0] for _, returns in window])
    if len(first) == 1:
        first = window[0][1]
    return not torch.allclose(first, first[0])


def advantages(batch: Batch, normalizer: ReturnNormalizer, config: "Config") -> Tensor:
    """Return A_t of line 5 or 10, before any clip, float32 [B, T].

    With --baseline recompute they are measured against these very episodes."""
    if config.baseline == "recompute":
        normalizer = ReturnNormalizer(False, normalizer.kl_reward_coef)
        normalizer.observe(batch)
    return normalizer.advantages(batch)


def policy_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    weights: Tensor | None = None,
    *,
    ratio_clip: float = RATIO_CLIP,
    dual_clip: float = 0.0,
    entropies: Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    batch_size: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return L = 1/B sum_i w_i l_i (eq. 16), and sums over the action tokens of each row, [B].

    The sums are of log rho_t, rho_t, rho_t^2, k3 of pi_mu against pi_theta, and clipped tokens.
    Tensors are [B, T], only `weights` is [B] (None: all 1). `scale` is C. The losses of
    micro-batches add up to that of the whole batch if `batch_size` and C are the whole batch's."""
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

    token_loss = torch.where(action_mask, token_loss, 0.0)
    episode_loss = token_loss.sum(1) / scale  # l_i [B]
    if weights is not None:
        episode_loss = weights * episode_loss  # w_i l_i
    loss = episode_loss.sum() / (batch_size or len(logprobs))  # L

    with torch.no_grad():
        per_token = {
            "log_ratio": log_ratio,
            "ratio": ratio,
            "ratio_sq": ratio.square(),
            "kl": ratio - log_ratio - 1.0,
            "clipped": objective != unclipped,
        }
        sums = {name: (values * action_mask).sum(1) for name, values in per_token.items()}
    return loss, sums
