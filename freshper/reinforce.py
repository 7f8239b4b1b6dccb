"""REINFORCE++: from rewards to returns, advantages and the clipped, IS-weighted policy loss.

Paper: eq. objective and the clipped ratios of section 3.1, eq. importance_ratio (rho), eq. weighted_loss,
appendix E (Config A). REINFORCE++ itself: Hu et al., arXiv 2501.03262, as implemented in OpenRLHF.

    r_t   turn reward on the last action token of its turn  -  kl_coef * k1_t
    G_t   = sum_{s >= t} r_s                       undiscounted (gamma = 1), over the whole conversation
    A_t   = (G_t - mean) / std,  clipped to +-eps_adv
    rho_t = pi_theta(a_t | s_t) / pi_mu(a_t | s_t)
    l_i   = -sum_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) / C
    L     = 1/B sum_i w_i l_i                      eq. weighted_loss

Everything works on [B, T] tensors with an action mask; environment tokens carry no reward and no loss,
but reward flows back across them, since all turns belong to one episode.

Where the paper is silent, and what we do:
- *Rewards stand at the end of their turn* and A_t looks forward only, as in the turn MDP of section 3.1.
  OpenRLHF puts the whole return on the last token; for a reward that comes only at the end it is the same.
- *Whitening* of a fresh batch is over all its action tokens (population variance), as in REINFORCE++.
- *The replay advantage* is undefined in the paper. A replay batch drawn by |r| + epsilon can hold nothing
  but successes; whitened over itself its advantage is zero and the replay gradient dies silently. The
  default `running` therefore measures against the returns that were *collected* lately, each episode counting
  once with the mean of its G_t. `recompute` (the authors' code) and `stored` are there to compare.
- *The KL penalty in the reward* is that of the policy that acted, recorded once at line 3: so both sides of a replay
  advantage, G_t and what it is measured against, hold the same r_t.
- *Dual clip* (Ye et al., AAAI 2020; ROLL, the paper's framework, has it too): where A_t < 0, rho_t A_t has no
  lower bound, and a stale failure whose tokens have become likely since rules the whole batch. Bounding it by
  `dual_clip` * A_t keeps replay stable; 0 leaves the loss as it is above.
- C does not depend on how a batch is split, so neither does the gradient (see `policy_loss`).

Exercise: set `--replay_advantage recompute` and watch `replay_success` and `replay_grad_norm`.
"""

from collections import deque

import torch

from freshper.episode import Batch, Episode, collate


def returns_to_go(rewards: torch.Tensor) -> torch.Tensor:
    """G_t = sum_{s >= t} r_s along the last axis. [B, T] -> [B, T]."""
    return rewards.flip(-1).cumsum(-1).flip(-1)


def whiten(values: torch.Tensor, mask: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """(x - mean) / std over the masked entries of the whole batch, 0 elsewhere. [B, T] -> [B, T].

    Population variance. Where all entries are equal the result is zero, not noise.
    """
    selected = values[mask].double()  # in float32 the mean of equal values can miss them by more than eps
    mean, std = selected.mean(), selected.std(correction=0)
    return torch.where(mask, (values.double() - mean) / (std + eps), 0.0).to(values.dtype)


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """The estimate log pi - log pi_ref of the KL divergence, clamped to +-10. [B, T] -> [B, T]."""
    return (logprobs - ref_logprobs).clamp(-10.0, 10.0)


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """pi_ref / pi - log(pi_ref / pi) - 1: never negative, and its gradient is usable as a loss. [B, T] -> [B, T]."""
    log_ratio = (ref_logprobs - logprobs).clamp(-10.0, 10.0)
    return log_ratio.exp() - log_ratio - 1.0


def padded(episodes: list[Episode], name: str) -> torch.Tensor:
    """What the trainer noted in `info` of each token, float32 [B, T], 0 where padded."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(e.info[name]) for e in episodes], batch_first=True)


def shaped(batch: Batch, episodes: list[Episode]) -> Batch:
    """The batch with r_t - kl_coef * k1_t for rewards, where line 3 has noted that penalty (`kl_penalty`)."""
    if "kl_penalty" not in episodes[0].info:
        return batch
    return batch._replace(rewards=batch.rewards - padded(episodes, "kl_penalty"))


class ReplayBaseline:
    """What the advantage of a replayed episode is measured against: decisions of ours, see the module's head.

    `running`: mean and std of G_t over the last `window` collected episodes.
    `stored`: those of the action tokens of the batch the episode was collected with.
    `recompute`: those of the replay batch itself.
    """

    def __init__(self, mode: str, window: int):
        self.mode = mode
        self.returns: deque[list[float]] = deque(maxlen=window)  # an episode's means of G_t and of G_t^2

    def observe(self, episodes: list[Episode]) -> None:
        """Take note of freshly collected episodes, before they are stored."""
        batch = shaped(collate(episodes), episodes)
        returns = returns_to_go(batch.rewards).double()  # [B, T]
        if self.mode == "stored":
            collected = returns[batch.action_mask]
            for episode in episodes:
                episode.info["moments"] = (collected.mean().item(), collected.std(correction=0).item())
        tokens = batch.action_mask.sum(-1)
        powers = [torch.where(batch.action_mask, returns**k, 0.0).sum(-1) / tokens for k in (1, 2)]
        self.returns.extend(torch.stack(powers, dim=1).tolist())

    def state_dict(self) -> dict[str, list[list[float]]]:
        """The window; the moments of `stored` travel with the episodes."""
        return {"returns": list(self.returns)}

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        self.returns.clear()
        self.returns.extend(state["returns"])

    def moments(self, episodes: list[Episode]) -> torch.Tensor | None:
        """(mean, std) for each episode, [2, B, 1], or None for the batch's own."""
        if self.mode == "recompute":
            return None
        if self.mode == "stored":
            return torch.tensor([e.info["moments"] for e in episodes]).T[..., None]
        mean, square = torch.tensor(self.returns, dtype=torch.float64).mean(0)
        # returns that differ by rounding alone (ten times -0.1 in another order) must not become advantages
        std = (square - mean**2).clamp_min(1e-6).sqrt()
        return torch.stack([mean, std]).float()[:, None, None].expand(2, len(episodes), 1)


def advantages(
    rewards: torch.Tensor,
    action_mask: torch.Tensor,
    clip: float,
    moments: torch.Tensor | None = None,
    eps: float = 1e-8,
) -> torch.Tensor:
    """A_t from token rewards. [B, T], [B, T] -> [B, T], 0 off the mask.

    `moments` None: whitened over this batch (REINFORCE++). Otherwise (mean, std), each
    [B, 1], to measure against (`ReplayBaseline`).
    `clip` is eps_clip of Table config_comparison: 20 disables it in practice, Config A has 0.2.
    """
    returns = returns_to_go(rewards)  # [B, T]
    if moments is None:
        normalized = whiten(returns, action_mask, eps)
    else:
        mean, std = moments
        normalized = torch.where(action_mask, (returns - mean) / (std + eps), 0.0)
    return normalized.clamp(-clip, clip)


def policy_loss(
    logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    action_mask: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    ratio_clip: float = 0.2,
    dual_clip: float = 0.0,
    entropies: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
    ref_logprobs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    batch_size: int | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L = 1/B sum_i w_i l_i (eq. weighted_loss), with l_i = (sum over the action tokens of i) / C.

    All tensors [B, T] but `weights` [B] (None: all 1). `scale` is C: 1 for token sums as in the authors'
    code, the batch's mean number of action tokens an episode for a token mean. When these rows are a
    micro-batch, B = `batch_size` and C are those of the whole batch, and the losses of the parts add up
    to the loss of the whole. KL and entropy terms belong to l_i and are weighted with it.

    Returns the loss and, for the log, sums over the action tokens of each row [B]: `log_ratio` (log rho of the whole
    trajectory), `ratio` and `ratio_sq` (rho_t, rho_t^2), `kl` (k3 of pi_mu against pi_theta), `clipped`.
    """
    zero = torch.zeros_like(logprobs)
    log_ratio = torch.where(action_mask, logprobs - behavior_logprobs, zero)
    ratio = log_ratio.exp()  # rho_t [B, T]
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - ratio_clip, 1.0 + ratio_clip) * advantages
    objective = torch.minimum(unclipped, clipped)  # [B, T]
    if dual_clip:
        # rho A is unbounded where A < 0: one token that has become likely since would rule the whole batch
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    token_loss = -objective  # [B, T]
    if entropies is not None:
        token_loss = token_loss - entropy_coef * entropies
    if ref_logprobs is not None:
        token_loss = token_loss + kl_coef * kl_k3(logprobs, ref_logprobs)
    sample_loss = torch.where(action_mask, token_loss, zero).sum(-1) / scale  # l_i [B]
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
