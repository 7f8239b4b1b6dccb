"""The trainer: the log-prob pass and the policy update, on plain torch.

Paper: Algorithm 1 line 3 (behaviour log-probs, recorded before training), lines 5 and 10 (the two updates);
appendix D, "Common Settings" (AdamW, cosine schedule with 10 warm-up steps) and Table training_config.

`step` counts optimizer steps and is the clock by which the buffer measures age (section 3.4).

Log-probs are those of the sampling distribution: logits are divided by the temperature before the softmax.
Only action tokens are ever turned into logits: hidden states are selected first, so an update never holds
[B, T, vocabulary]. Micro-batches add up to exactly the gradient of the whole batch, because the loss divides
by constants of the whole batch (freshper/reinforce.py).

A log-prob, loss or gradient that is not finite raises NonFiniteError, before the weights are touched.
"""

import copy
import ctypes
import sys
from typing import Any

import numpy as np
import torch
from transformers import get_scheduler

from freshper.config import Config
from freshper.episode import Batch, Episode, NonFiniteError, collate
from freshper.models import Policy
from freshper.priority import reward_priority
from freshper.reinforce import advantages, kl_k1, policy_loss


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what is freed: activations come and go at every step, and giving them back to
    the kernel each time halves the training speed on a CPU. Does nothing on other C libraries."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        for parameter, value in ((trim_threshold, 2**31 - 1), (top_pad, 2**28), (mmap_threshold, 2**30)):
            mallopt(parameter, value)


def action_logprobs(
    policy: Policy, batch: Batch, temperature: float, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log pi(token | everything before it) of the action tokens, float32 [B, T], 0 off the mask; and, where
    asked for, the entropy of the distribution each was drawn from, [B, T]."""
    tokens, mask = batch.tokens.to(policy.device), batch.action_mask.to(policy.device)
    hidden = policy.batch_hidden(batch)  # [B, T, H]
    selected = hidden[:, :-1][mask[:, 1:]]  # [n, H]: the state before each of the n action tokens
    logits = policy.logits(selected) / temperature  # [n, V]
    chosen = logits.log_softmax(-1).gather(1, tokens[mask][:, None])[:, 0]  # [n]
    zeros = torch.zeros(tokens.shape, device=policy.device)
    entropies = torch.distributions.Categorical(logits=logits).entropy() if entropy else None
    return zeros.masked_scatter(mask, chosen), None if entropies is None else zeros.masked_scatter(mask, entropies)


class TorchTrainer:
    """One process, one device. `total_updates` is the length of the learning rate schedule."""

    def __init__(self, policy: Policy, config: Config, total_updates: int):
        self.policy, self.config, self.step = policy, config, 0
        trainable = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=config.lr, weight_decay=0.0)
        self.scheduler = get_scheduler("cosine", self.optimizer, config.warmup_steps, total_updates)
        self.reference = None  # pi_ref, for KL terms only
        if config.kl_reward_coef or config.kl_loss_coef:
            self.reference = copy.copy(policy)
            self.reference.model = copy.deepcopy(policy.model).requires_grad_(False)

    @torch.no_grad()
    def record_behavior_logprobs(self, episodes: list[Episode]) -> dict[str, float]:
        """Line 3: log pi_mu(e_j) of every action token, written into the episodes.

        Returns how far the engine's own log-probs were off (`mismatch`: mean |difference| over action tokens).
        """
        self.policy.model.eval()
        difference = tokens = 0.0
        for rows, batch in collate(episodes).micro_batches(self.config.micro_batch_size):
            logprobs, _ = action_logprobs(self.policy, batch, self.config.temperature)
            self._check("the behaviour log-probs", logprobs, [episodes[i] for i in rows])
            for i, row in zip(rows, logprobs.cpu().numpy(), strict=True):
                episode = episodes[i]
                recorded = row[: len(episode.tokens)]
                difference += float(np.abs(recorded - episode.behavior_logprobs).sum())
                tokens += int(episode.action_mask.sum())
                if self.config.behavior_logprobs == "trainer":
                    episode.behavior_logprobs = recorded.copy()
        return {"mismatch": difference / tokens}

    def update(
        self, episodes: list[Episode], weights: np.ndarray | None = None, moments: torch.Tensor | None = None
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """One optimizer step on these episodes: lines 5 (fresh, whitened) and 10 (replayed, IS-weighted).

        `weights` [B] are w_i; `moments` are what replay advantages are measured against, [2, B, 1].
        Returns loss, gradient norm, clip fraction, KL and the share of advantages that are not zero; and how far the
        policy has moved on each episode, [B] (the sums of `policy_loss`, and `tokens`).
        """
        config, batch = self.config, collate(episodes)
        ref_logprobs = self._ref_logprobs(batch) if self.reference else None
        if config.kl_reward_coef:
            kl = kl_k1(batch.behavior_logprobs, ref_logprobs) * batch.action_mask
            batch = batch._replace(rewards=batch.rewards - config.kl_reward_coef * kl)
        all_advantages = self.advantages(batch, moments)  # [B, T]
        all_weights = torch.ones(len(episodes)) if weights is None else torch.as_tensor(weights, dtype=torch.float32)
        tokens = int(batch.action_mask.sum())
        scale = tokens / len(episodes) if config.loss_aggregation == "token_mean" else 1.0

        phase = "the on-policy update" if weights is None else "the replay update"
        self.policy.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total_loss, drift = 0.0, {"tokens": batch.action_mask.sum(-1).numpy().astype(np.float64)}
        for rows, part in batch.micro_batches(self.config.micro_batch_size):
            width, device = part.tokens.shape[1], self.policy.device
            logprobs, entropies = action_logprobs(self.policy, part, config.temperature, config.entropy_coef > 0)
            loss, stats = policy_loss(
                logprobs,
                part.behavior_logprobs.to(device),
                all_advantages[rows, :width].to(device),
                part.action_mask.to(device),
                all_weights[rows].to(device),
                ratio_clip=config.ratio_clip,
                dual_clip=config.dual_clip,
                entropies=entropies,
                entropy_coef=config.entropy_coef,
                ref_logprobs=None if ref_logprobs is None else ref_logprobs[rows, :width].to(device),
                kl_coef=config.kl_loss_coef,
                batch_size=len(episodes),
                scale=scale,
            )
            self._check(phase, logprobs, [episodes[i] for i in rows])
            loss.backward()
            total_loss += loss.item()
            for name, sums in stats.items():
                drift.setdefault(name, np.zeros(len(episodes)))[rows] = sums.double().cpu().numpy()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), config.max_grad_norm).item()
        if not np.isfinite([norm, total_loss]).all():
            seeds = ", ".join(str(e.seed) for e in episodes[:8])
            raise NonFiniteError(f"{phase} has loss {total_loss} and gradient norm {norm}; episode seeds {seeds}")
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        stats = {
            "loss": total_loss,
            "grad_norm": norm,
            "clip_fraction": float(drift["clipped"].sum()) / tokens,
            "kl": float(drift["kl"].sum()) / tokens,
            "nonzero_advantages": float((all_advantages != 0).sum()) / tokens,
        }
        return stats, drift

    def advantages(self, batch: Batch, moments: torch.Tensor | None) -> torch.Tensor:
        """A_t of every action token, [B, T], 0 off the mask: REINFORCE++'s. An algorithm with a critic has its own."""
        return advantages(batch.rewards, batch.action_mask, self.config.advantage_clip, moments)

    def base_priorities(self, episodes: list[Episode]) -> np.ndarray:
        """p_i^base = |r_i| + epsilon (section 3.4), [n]: the same whenever it is asked for. What depends on the policy,
        |A_i| or |delta_i|, follows it here, since this is asked for again after each replay update (section 3.5)."""
        return reward_priority([e.reward for e in episodes], self.config.epsilon)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights of the policy, which is saved as a model."""
        reference = dict(self.reference.model.named_parameters()) if self.reference else None
        return {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "reference": reference,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. The schedule goes on at its step, with the learning rate and the length of the config."""
        self.step = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"] | {"base_lrs": self.scheduler.base_lrs})
        factors = [factor(self.scheduler.last_epoch) for factor in self.scheduler.lr_lambdas]
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            group["initial_lr"], group["lr"] = self.config.lr, self.config.lr * factor
        with torch.no_grad():
            for name, parameter in self.reference.model.named_parameters() if self.reference else ():
                parameter.copy_(state["reference"][name])

    @torch.no_grad()
    def _ref_logprobs(self, batch: Batch) -> torch.Tensor:
        """log pi_ref, [B, T] on the CPU, from the frozen copy of the policy as it was at the start."""
        out = torch.zeros(batch.tokens.shape)
        for rows, part in batch.micro_batches(self.config.micro_batch_size):
            out[rows, : part.tokens.shape[1]] = action_logprobs(self.reference, part, self.config.temperature)[0].cpu()
        return out

    @staticmethod
    def _check(phase: str, logprobs: torch.Tensor, episodes: list[Episode]) -> None:
        bad = (~torch.isfinite(logprobs)).any(-1).tolist()
        if any(bad):
            raise NonFiniteError(
                f"{phase} met a log-prob that is not finite; episode seed {episodes[bad.index(True)].seed}"
            )
