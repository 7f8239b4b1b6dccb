"""The trainer on plain torch: the log-prob pass and the policy update.

Paper: Algorithm 1 lines 3 (behavior log-probs, recorded before training), 5 and 10 (the two updates); Table 4 and
appendix F (cosine schedule, 10 warm-up steps, BF16). The paper names no optimizer; ours is AdamW without weight decay.

`step` counts optimizer steps, the clock of ages in the buffer (section 3.4). Log-probs are those of the softmax at the
sampling temperature, before top-k and top-p. Only action tokens become logits, so an update never holds [B, T,
vocabulary]; of many action tokens LOGITS_AT_ONCE numbers exist at a time, and the backward pass computes them again.
Micro-batches add up to exactly the gradient of the whole batch.

The engine's kernels are not the trainer's. The difference is logged as `mismatch`, and `truncated_is` corrects for it
(Yao et al. 2025, not in the paper). What is not finite raises NonFiniteError before a step.
"""

import copy
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from freshper.config import Config
from freshper.episode import Batch, Episode, collate
from freshper.errors import NonFiniteError
from freshper.models import Policy
from freshper.priority import advantage_priority, reward_priority
from freshper.reinforce import episode_advantages, policy_loss, training_batch

DRIFT = ("log_ratio", "ratio", "ratio_sq", "kl", "clipped")  # sums that `policy_loss` gives for each row
LOGITS_AT_ONCE = 2**27  # numbers: 0.5 GB in float32, 883 tokens with Qwen2.5's vocabulary of 151,936
WARMUP_STEPS, MAX_GRAD_NORM = 10, 1.0  # appendix F; Table 3


class Update(NamedTuple):
    """What one optimizer step did."""

    stats: dict[str, float]  # loss, grad_norm, clip_fraction, kl, nonzero_advantages, seconds
    drift: dict[str, np.ndarray]  # how far the policy has moved on each episode, [B]: DRIFT's sums, and tokens


def action_logprobs(
    policy: Policy, batch: Batch, temperature: float, entropy: bool = False, most: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log pi(token | all before it) of the action tokens, float32 [B, T], 0 off the mask; and, if asked for, the
    entropy of their distributions. `most`: action tokens of the rank that has most, for equal numbers of chunks."""
    tokens, mask = batch.tokens.to(policy.device), batch.action_mask.to(policy.device)
    hidden = policy.batch_hidden(batch)  # [B, T, H]
    selected, chosen = hidden[:, :-1][mask[:, 1:]], tokens[mask]  # [n, H], [n]: before each action token, and itself
    vocabulary = policy.model.config.get_text_config().vocab_size
    chunks = -(-max(1, most, len(chosen)) * vocabulary // LOGITS_AT_ONCE)
    if chunks == 1:
        scores = _score(policy, selected, chosen, temperature, entropy)
    else:
        parts = zip(selected.tensor_split(chunks), chosen.tensor_split(chunks), strict=True)
        again = partial(checkpoint, _score, policy, use_reentrant=False, preserve_rng_state=False)
        scores = torch.cat([again(*part, temperature, entropy) for part in parts])
    zeros = torch.zeros(tokens.shape, device=policy.device)
    logprobs, *entropies = (zeros.masked_scatter(mask, column) for column in scores.T)
    return logprobs, entropies[0] if entropy else None


def _score(
    policy: Policy, hidden: torch.Tensor, chosen: torch.Tensor, temperature: float, entropy: bool
) -> torch.Tensor:
    """Return the log-prob of each chosen token and, if asked for, the entropy: [n, 1] or [n, 2] from [n, H] and [n]."""
    distribution = (policy.logits(hidden) / temperature).log_softmax(-1)  # [n, V]
    logprobs = distribution.gather(1, chosen[:, None])
    if not entropy:
        return logprobs
    finite = distribution.masked_fill(distribution == -torch.inf, 0.0)  # 0 log 0 = 0 for ids that are never sampled
    return torch.cat([logprobs, -(distribution.exp() * finite).sum(-1, keepdim=True)], dim=1)


class TorchTrainer:
    """One process, one device. `total_updates` is the length of the learning rate schedule."""

    def __init__(self, policy: Policy, config: Config, total_updates: int):
        self.policy, self.config, self.total_updates, self.step = policy, config, total_updates, 0
        trainable = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=config.lr, weight_decay=0.0)
        self.reference = None  # pi_ref, for KL terms only
        if config.kl_reward_coef or config.kl_loss_coef:
            self.reference = copy.copy(policy)
            self.reference.model = copy.deepcopy(policy.model).requires_grad_(False)

    # -- line 3 ------------------------------------------------------------------------------------------------

    def record_behavior_logprobs(self, episodes: list[Episode]) -> dict[str, float]:
        """Write log pi_mu(e_j) of every action token into the episodes, and log pi_ref if there is a KL term. Returns
        the engine's mismatch (mean |log-prob difference|, quantiles of pi_trainer / pi_engine) and the seconds."""
        began, batch = time.perf_counter(), collate(episodes)
        logprobs = self.logprobs(batch)
        for episode, finite in zip(episodes, torch.isfinite(logprobs).all(-1).tolist(), strict=True):
            if not finite:
                raise NonFiniteError(f"line 3 met a log-prob that is not finite; episode seed {episode.seed}")
        differences = []
        for episode, row in zip(episodes, logprobs.numpy(), strict=True):
            recorded = row[: len(episode.tokens)].copy()
            difference = recorded - episode.behavior_logprobs  # 0 off the mask
            differences.append(difference[episode.action_mask])
            if self.config.truncated_is:
                episode.engine_weights = np.minimum(np.exp(difference), self.config.truncated_is)
            episode.behavior_logprobs = recorded
        if self.reference:
            for episode, row in zip(episodes, self.logprobs(batch, reference=True).numpy(), strict=True):
                episode.ref_logprobs = row[: len(episode.tokens)].copy()
        all_differences = np.concatenate(differences)
        low, high = np.exp(np.quantile(all_differences, (0.01, 0.99))).tolist()
        mismatch = {"mismatch": float(np.abs(all_differences).mean()), "mismatch_p01": low, "mismatch_p99": high}
        return mismatch | {"logprobs_s": time.perf_counter() - began}

    @torch.no_grad()
    def logprobs(self, batch: Batch, reference: bool = False) -> torch.Tensor:
        """Return log pi_theta (or log pi_ref, of the initial policy) of the action tokens, float32 [B, T]."""
        self.policy.model.eval()
        out = torch.zeros(batch.tokens.shape)
        for rows, part in self._shares(batch):
            if reference and self.reference:
                logprobs = action_logprobs(self.reference, part, self.config.temperature)[0]
            else:
                logprobs = self._forward(part)[0]
            out[rows, : part.tokens.shape[1]] += logprobs.cpu()
        return self._sum(out)

    # -- lines 5 and 10 ----------------------------------------------------------------------------------------

    def update(
        self, episodes: list[Episode], weights: np.ndarray | None = None, moments: torch.Tensor | None = None
    ) -> Update:
        """Make one optimizer step: line 5 (fresh, whitened) or 10 (replayed, with w_i [B] and the moments [2, 1, 1] of
        `ReplayBaseline`)."""
        began, config = time.perf_counter(), self.config
        phase = "the on-policy update" if weights is None else "the replay update"
        batch = training_batch(episodes, config, weights, moments)
        tokens = int(batch.action_mask.sum())
        self.policy.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        drift = torch.zeros(len(DRIFT), len(episodes), dtype=torch.float64)
        total_loss = torch.zeros(1, dtype=torch.float64)
        shares = list(self._shares(batch))
        for number, (rows, part) in enumerate(shares, 1):
            logprobs, entropies = self._forward(part, config.entropy_coef > 0)
            part = part.to(logprobs.device)
            loss, stats = policy_loss(
                logprobs, part.behavior_logprobs, part.advantages, part.action_mask, part.weights, entropies=entropies,
                ref_logprobs=part.ref_logprobs if config.kl_loss_coef else None, kl_coef=config.kl_loss_coef,
                ratio_clip=config.ratio_clip, dual_clip=config.dual_clip, entropy_coef=config.entropy_coef,
                batch_size=len(episodes), scale=tokens / len(episodes),
            )  # fmt: skip
            self._backward(loss, last=number == len(shares))
            total_loss += loss.item()
            drift[:, rows] += torch.stack([stats[name].double().cpu() for name in DRIFT])
        summed_loss = self._sum(total_loss).item()
        moved = dict(zip(DRIFT, self._sum(drift).numpy(), strict=True))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        norm = self._clip_and_step() if np.isfinite(summed_loss) else float("nan")
        if not np.isfinite(norm):
            broken = [e.seed for e, x in zip(episodes, moved["log_ratio"], strict=True) if not np.isfinite(x)]
            seeds = broken or [e.seed for e in episodes[:8]]
            raise NonFiniteError(f"{phase} has loss {summed_loss} and gradient norm {norm}; episode seeds {seeds}")
        self.step += 1
        summary = {
            "loss": summed_loss,
            "grad_norm": norm,
            "clip_fraction": float(moved["clipped"].sum()) / tokens,
            "kl": float(moved["kl"].sum()) / tokens,
            "nonzero_advantages": float(batch.advantages.count_nonzero()) / tokens,
            "seconds": time.perf_counter() - began,
        }
        return Update(summary, moved | {"tokens": batch.action_mask.sum(-1).numpy().astype(np.float64)})

    def learning_rate(self) -> float:
        """Return the rate of the next step: linear warm-up, then a cosine to 0 over `total_updates` (appendix F)."""
        progress = (self.step - WARMUP_STEPS) / max(1, self.total_updates - WARMUP_STEPS)
        cosine = max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        return self.config.lr * (cosine if self.step >= WARMUP_STEPS else self.step / WARMUP_STEPS)

    def base_priorities(self, episodes: list[Episode], moments: torch.Tensor | None) -> np.ndarray:
        """Return p_i^base, float64 [n]: |r_i| + epsilon or |A_i| + epsilon (section 3.4)."""
        if self.config.base_priority == "advantage":
            return advantage_priority(episode_advantages(episodes, self.config, moments), self.config.epsilon)
        return reward_priority(np.array([e.reward for e in episodes]), self.config.epsilon)

    # -- state and weights -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the weights of the policy, which is saved as a model."""
        reference = dict(self.reference.model.named_parameters()) if self.reference else {}
        return {"step": self.step, "optimizer": self._optimizer_state(), "reference": reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. The learning rate goes on at its step, with the rate and length of the config."""
        self.step = state["step"]
        self._load_optimizer(state["optimizer"])
        with torch.no_grad():
            for name, parameter in self.reference.model.named_parameters() if self.reference else ():
                parameter.copy_(state["reference"][name])

    def whole_policy(self) -> Policy:
        """Return the policy with all of its weights in this process, for a checkpoint."""
        return self.policy

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every whole parameter; an output layer tied to the embedding is written out too."""
        yield from ((name, parameter.data) for name, parameter in self._named().items())

    def _named(self) -> dict[str, torch.nn.Parameter]:
        named = dict(self.policy.model.named_parameters())
        named.setdefault("lm_head.weight", self.policy.model.get_input_embeddings().weight)
        return named

    def close(self) -> None:
        """End the run: nothing to do for one process."""

    # -- hooks overridden for multi-rank training (freshper/trainer_deepspeed.py) --------------------------------

    def _shares(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """Yield this process's micro-batches: (row numbers, batch of these rows)."""
        return batch.micro_batches(self.config.micro_batch_size)

    def _forward(self, part: Batch, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        return action_logprobs(self.policy, part, self.config.temperature, entropy)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes."""
        return values

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()

    def _clip_and_step(self) -> float:
        """Clip the gradient and step, unless its norm is not finite. Returns the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), MAX_GRAD_NORM).item()
        if np.isfinite(norm):
            self.optimizer.step()
        return norm

    def _optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
