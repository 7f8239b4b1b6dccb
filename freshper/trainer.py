"""The trainer: the log-prob pass and the policy update, on plain torch.

Paper: Algorithm 1 line 3 (behaviour log-probs, recorded before training), lines 5 and 10 (the two updates);
appendix F, "Common Settings" (cosine schedule with 10 warm-up steps) and Table training_config. The paper does not
name the optimizer; ours is AdamW without weight decay.

`step` counts optimizer steps and is the clock by which the buffer measures age (section 3.4). Log-probs are those of
the sampling distribution: logits are divided by the temperature before the softmax. Only action tokens are ever turned
into logits: hidden states are selected first, so an update never holds [B, T, vocabulary]. Of many action tokens only
LOGITS_AT_ONCE numbers exist at a time; the backward pass computes them again (`benchmarks/update.py`). Micro-batches
add up to exactly the gradient of the whole batch, because the loss divides by constants of it (freshper/reinforce.py).

The engine's kernels are not the trainer's. How far off it samples is logged, and `truncated_is` corrects for it (Yao et
al. 2025, not in the paper). A log-prob, loss or gradient that is not finite raises NonFiniteError, before any step.
"""

import copy
import ctypes
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import get_scheduler

from freshper.config import Config
from freshper.episode import Batch, Episode, NonFiniteError, collate
from freshper.models import Policy
from freshper.priority import reward_priority
from freshper.reinforce import advantages, kl_k1, padded, policy_loss, shaped

DRIFT = ("log_ratio", "ratio", "ratio_sq", "kl", "clipped")  # sums that `policy_loss` gives for each row
LOGITS_AT_ONCE = 2**27  # numbers: 0.5 GB in float32, 883 tokens with Qwen2.5's vocabulary of 151,936


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what is freed: activations come and go at every step, and giving them back to
    the kernel each time halves the training speed on a CPU. Does nothing on other C libraries."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        for parameter, value in ((trim_threshold, 2**31 - 1), (top_pad, 2**28), (mmap_threshold, 2**30)):
            mallopt(parameter, value)


def action_logprobs(
    policy: Policy, batch: Batch, temperature: float, entropy: bool = False, most: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log pi(token | everything before it) of the action tokens, float32 [B, T], 0 off the mask; and, where
    asked for, the entropy of the distribution each was drawn from, [B, T].

    `most`: cut into as many chunks as so many action tokens would be (ranks must agree, see trainer_deepspeed.py).
    """
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
    """Log-prob of each chosen token and, where asked for, the entropy: [n, 1] or [n, 2] from [n, H] and [n]."""
    distribution = (policy.logits(hidden) / temperature).log_softmax(-1)  # [n, V]
    logprobs = distribution.gather(1, chosen[:, None])
    if not entropy:
        return logprobs
    # 0 log 0 = 0 for the ids that are never sampled
    finite = distribution.masked_fill(distribution == -torch.inf, 0.0)
    return torch.cat([logprobs, -(distribution.exp() * finite).sum(-1, keepdim=True)], dim=1)


class TorchTrainer:
    """One process, one device. `total_updates` is the length of the learning rate schedule."""

    def __init__(self, policy: Policy, config: Config, total_updates: int):
        self.policy, self.config, self.step = policy, config, 0
        trainable = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=config.lr, weight_decay=0.0)
        self.scheduler = get_scheduler("cosine", self.optimizer, config.warmup_steps, total_updates)
        self.make_room = lambda: None  # called before memory is needed: an engine on the same GPU goes to sleep
        self.reference = None  # pi_ref, for KL terms only
        if config.kl_reward_coef or config.kl_loss_coef:
            self.reference = copy.copy(policy)
            self.reference.model = copy.deepcopy(policy.model).requires_grad_(False)

    def record_behavior_logprobs(self, episodes: list[Episode]) -> dict[str, float]:
        """Line 3: log pi_mu(e_j) of every action token, written into the episodes.

        Returns how far the engine's own log-probs were off: the mean |difference| over action tokens, and quantiles
        of the ratio pi_trainer / pi_engine. Episodes keep what later updates need: with `truncated_is` that ratio,
        capped; with a KL term the penalty of the reward and log pi_ref, since pi_ref never changes.
        """
        self.make_room()
        batch = collate(episodes)
        logprobs = self.logprobs(batch)
        self._check("the behaviour log-probs", torch.isfinite(logprobs).all(-1), episodes)
        differences = []
        for episode, row in zip(episodes, logprobs.numpy(), strict=True):
            recorded = row[: len(episode.tokens)]
            difference = recorded - episode.behavior_logprobs  # 0 off the mask
            differences.append(difference[episode.action_mask])
            if self.config.truncated_is:
                episode.info["truncated_is"] = np.minimum(np.exp(difference), self.config.truncated_is)
            if self.config.behavior_logprobs == "trainer":
                episode.behavior_logprobs = recorded.copy()
        if self.reference:
            batch, reference = collate(episodes), self.logprobs(batch, reference=True)
            penalty = self.config.kl_reward_coef * kl_k1(batch.behavior_logprobs, reference) * batch.action_mask
            for name, noted in (("kl_penalty", penalty), ("ref_logprobs", reference)):
                for episode, row in zip(episodes, noted.numpy(), strict=True):
                    episode.info[name] = row[: len(episode.tokens)].copy()
        all_differences = np.concatenate(differences)
        low, high = np.exp(np.quantile(all_differences, (0.01, 0.99))).tolist()
        return {"mismatch": float(np.abs(all_differences).mean()), "mismatch_p01": low, "mismatch_p99": high}

    def logprobs(self, batch: Batch, reference: bool = False) -> torch.Tensor:
        """log pi_theta of the action tokens at the sampling temperature, float32 [B, T] on the CPU, 0 off the mask;
        or log pi_ref, of the policy as it was at the start."""
        return self._logprobs(batch, reference)

    def update(
        self, episodes: list[Episode], weights: np.ndarray | None = None, moments: torch.Tensor | None = None
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """One optimizer step on these episodes: lines 5 (fresh, whitened) and 10 (replayed, IS-weighted).

        `weights` [B] are w_i; `moments` are what replay advantages are measured against, [2, B, 1].
        Returns loss, gradient norm, clip fraction, KL and the share of advantages that are not zero; and how far the
        policy has moved on each episode, [B] (the sums of `policy_loss`, and `tokens`).
        """
        self.make_room()
        config, batch = self.config, shaped(collate(episodes), episodes)
        ref_logprobs = padded(episodes, "ref_logprobs") if config.kl_loss_coef else None  # [B, T]
        all_advantages = self.advantages(batch, moments)  # [B, T]
        if config.truncated_is:  # weighs the policy gradient of a token: its objective is proportional to A_t
            all_advantages = all_advantages * padded(episodes, "truncated_is")
        all_weights = torch.ones(len(episodes)) if weights is None else torch.as_tensor(weights, dtype=torch.float32)
        tokens = int(batch.action_mask.sum())
        scale = tokens / len(episodes) if config.loss_aggregation == "token_mean" else 1.0

        phase = "the on-policy update" if weights is None else "the replay update"
        self.policy.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        drift = torch.zeros(len(DRIFT), len(episodes), dtype=torch.float64)
        total_loss = torch.zeros(1, dtype=torch.float64)
        broken = torch.zeros(len(episodes))  # above 0 where a row has a log-prob that is not finite
        parts = list(self._shares(batch))
        for number, (rows, part) in enumerate(parts, 1):
            width, device = part.tokens.shape[1], self.policy.device
            logprobs, entropies = self._forward(part, config.entropy_coef > 0)
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
            broken[rows] += (~torch.isfinite(logprobs)).any(-1).float().cpu()
            self._backward(loss, last=number == len(parts))
            total_loss += loss.item()
            drift[:, rows] += torch.stack([stats[name].double().cpu() for name in DRIFT])
        self._check(phase, self._sum(broken) == 0, episodes)
        summed_loss = self._sum(total_loss).item()
        moved = dict(zip(DRIFT, self._sum(drift).numpy(), strict=True))
        norm = self._clip_and_step() if np.isfinite(summed_loss) else float("nan")
        if not np.isfinite(norm):
            seeds = ", ".join(str(e.seed) for e in episodes[:8])
            raise NonFiniteError(f"{phase} has loss {summed_loss} and gradient norm {norm}; episode seeds {seeds}")
        self.scheduler.step()
        self.step += 1
        summary = {
            "loss": summed_loss,
            "grad_norm": norm,
            "clip_fraction": float(moved["clipped"].sum()) / tokens,
            "kl": float(moved["kl"].sum()) / tokens,
            "nonzero_advantages": float((all_advantages != 0).sum()) / tokens,
        }
        return summary, moved | {"tokens": batch.action_mask.sum(-1).numpy().astype(np.float64)}

    def advantages(self, batch: Batch, moments: torch.Tensor | None) -> torch.Tensor:
        """A_t of every action token, [B, T], 0 off the mask: REINFORCE++'s. An algorithm with a critic has its own."""
        return advantages(batch.rewards, batch.action_mask, self.config.advantage_clip, moments)

    def base_priorities(self, episodes: list[Episode]) -> np.ndarray:
        """p_i^base = |r_i| + epsilon, [n]. |A_i| or |delta_i| would follow the policy: asked for again after replay."""
        return reward_priority(np.array([e.reward for e in episodes]), self.config.epsilon)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights of the policy, which is saved as a model."""
        reference = dict(self.reference.model.named_parameters()) if self.reference else {}
        return {
            "step": self.step,
            "optimizer": self._optimizer_state(),
            "scheduler": self.scheduler.state_dict(),
            "reference": reference,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. The schedule goes on at its step, with the learning rate and the length of the config."""
        self.step = state["step"]
        self._load_optimizer(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"] | {"base_lrs": self.scheduler.base_lrs})
        factors = [factor(self.scheduler.last_epoch) for factor in self.scheduler.lr_lambdas]
        for group, factor in zip(self.optimizer.param_groups, factors, strict=True):
            group["initial_lr"], group["lr"] = self.config.lr, self.config.lr * factor
        with torch.no_grad():
            for name, parameter in self.reference.model.named_parameters() if self.reference else ():
                parameter.copy_(self.shared(state["reference"].get(name), parameter.shape))

    def whole_policy(self) -> Policy:
        """The policy with all of its weights in this process, for a checkpoint."""
        return self.policy

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter with its name, whole; an output layer tied to the embedding is written out as well."""
        yield from ((name, parameter.data) for name, parameter in self._named().items())

    def shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and shape of what `weights` yields, in its order."""
        return [(name, p.dtype, tuple(getattr(p, "ds_shape", p.shape))) for name, p in self._named().items()]

    def _named(self) -> dict[str, torch.nn.Parameter]:
        named = dict(self.policy.model.named_parameters())
        named.setdefault("lm_head.weight", self.policy.model.get_input_embeddings().weight)
        return named

    def close(self) -> None:
        """The end of the run: nothing to do for one process."""

    @torch.no_grad()
    def _logprobs(self, batch: Batch, reference: bool) -> torch.Tensor:
        self.policy.model.eval()
        out = torch.zeros(batch.tokens.shape)
        for rows, part in self._shares(batch):
            if reference and self.reference:
                logprobs = action_logprobs(self.reference, part, self.config.temperature)[0]
            else:
                logprobs = self._forward(part)[0]
            out[rows, : part.tokens.shape[1]] += logprobs.cpu()
        return self._sum(out)

    @staticmethod
    def _check(phase: str, finite: torch.Tensor, episodes: list[Episode]) -> None:
        """`finite`: bool [B]. Raises NonFiniteError that names the phase and the first broken episode's seed."""
        for episode, good in zip(episodes, finite.tolist(), strict=True):
            if not good:
                raise NonFiniteError(f"{phase} met a log-prob that is not finite; episode seed {episode.seed}")

    # -- what another number of processes does differently (freshper/trainer_deepspeed.py) ---------------------

    def _shares(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """This process's micro-batches: (row numbers, batch of these rows)."""
        return batch.micro_batches(self.config.micro_batch_size)

    def _forward(self, part: Batch, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        return action_logprobs(self.policy, part, self.config.temperature, entropy)

    def shared(self, value: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor that rank 0 alone has, on all ranks."""
        return value

    def _optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return values

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()

    def _clip_and_step(self) -> float:
        """Clip the gradient and step, or leave the weights alone where its norm is not finite. Returns the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.config.max_grad_norm).item()
        if np.isfinite(norm):
            self.optimizer.step()
        return norm
