"""The trainer on plain torch: the log-prob pass and the policy update.

Paper: Algorithm 1 lines 3 (behavior log-probs, recorded before training), 5 and 10 (the two updates); Table 4 and
appendix F (cosine schedule, 10 warm-up steps, BF16). The paper names no optimizer; ours is AdamW without weight decay.

`step` counts optimizer steps, the clock of ages in the buffer (section 3.4). Log-probs are those of the softmax at the
sampling temperature, before top-k and top-p. Only action tokens become logits, LOGITS_AT_ONCE numbers at a time, which
the backward pass computes again. Micro-batches add up to exactly the gradient of the whole batch. `mismatch` is the
engine's difference, which `truncated_is` corrects for (Yao et al. 2025, not in the paper).
"""

import copy
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freshper.config import Config
from freshper.episode import Batch, Episode, collate
from freshper.errors import NonFiniteError
from freshper.models import Policy
from freshper.priority import advantage_priority, reward_priority
from freshper.reinforce import Baseline, policy_loss, training_batch

DRIFT = ("log_ratio", "ratio", "ratio_sq", "kl", "clipped")  # sums of each row from `policy_loss`
ACTIVATIONS = 5 * 2**30  # bytes kept for the backward pass; if there may be more, it computes each layer again
LOGITS_AT_ONCE = 2**27  # numbers: 0.5 GB in float32, 883 tokens with Qwen2.5's vocabulary of 151,936
WARMUP_STEPS, MAX_GRAD_NORM = 10, 1.0  # appendix F; Table 3


class Update(NamedTuple):
    """What one optimizer step did."""

    stats: dict[str, float]  # loss, grad_norm, clip_fraction, kl, nonzero_advantages, seconds
    drift: dict[str, np.ndarray]  # how far the policy has moved on each episode, [B]: DRIFT's sums, and tokens


def action_logprobs(
    policy: Policy, batch: Batch, temperature: float, entropy: bool = False, most: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return log pi(token | all before it) of the action tokens, float32 [B, T] on the CPU, 0 off the mask; and, if
    asked for, the entropy of their distributions. `most`: action tokens of the rank that has most, for equal chunks."""

    def score(hidden: Tensor, chosen: Tensor) -> Tensor:
        """From [n, H] and [n] return log-probs and, if asked for, entropies: [n, 1] or [n, 2]."""
        distribution = (policy.logits(hidden) / temperature).log_softmax(-1)  # [n, V]
        scores = [distribution.gather(1, chosen[:, None])]
        if entropy:  # 0 log 0 = 0, for ids that are never sampled
            scores += [-(distribution.exp() * distribution.clamp_min(-1e9)).sum(-1, keepdim=True)]
        return torch.cat(scores, dim=1)

    mask, chosen = batch.action_mask, batch.tokens[batch.action_mask].to(policy.device)  # [B, T], [n]
    hidden = policy.batch_hidden(batch)[:, :-1][mask[:, 1:]]  # [n, H]: before each action token
    vocabulary = policy.model.config.get_text_config().vocab_size
    chunks = -(-max(1, most, len(chosen)) * vocabulary // LOGITS_AT_ONCE)
    again = partial(torch.utils.checkpoint.checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    parts = zip(hidden.tensor_split(chunks), chosen.tensor_split(chunks), strict=True)
    scores = torch.cat([(score if chunks == 1 else again)(*part) for part in parts])
    found = [torch.zeros(mask.shape).masked_scatter(mask, column) for column in scores.cpu().T]
    return found[0], found[1] if entropy else None


class TorchTrainer:
    """One process, one device. `total_updates` is the length of the learning rate schedule."""

    def __init__(self, policy: Policy, config: Config, total_updates: int):
        self.policy, self.config, self.total_updates, self.step = policy, config, total_updates, 0
        text = policy.model.config.get_text_config()
        units = config.micro_batch_size * config.max_tokens * text.num_hidden_layers * text.hidden_size
        if 34 * units > ACTIVATIONS:  # bytes: Korthikanti et al., arXiv 2205.05198, without the attention's
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainable = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=config.lr, weight_decay=0.0)
        self.reference: Any = copy.deepcopy(policy) if config.kl_reward_coef or config.kl_loss_coef else None  # pi_ref

    def record_behavior_logprobs(self, episodes: list[Episode]) -> dict[str, float]:
        """Line 3: write log pi_mu of the action tokens into the episodes, and log pi_ref if there is a KL term. Returns
        the mismatch (mean |trainer - engine log-prob|, quantiles of pi_trainer / pi_engine) and the seconds."""
        began, batch = time.perf_counter(), collate(episodes)
        found = {"behavior_logprobs": self.logprobs(batch).numpy()}  # [B, T]
        difference = found["behavior_logprobs"] - batch.behavior_logprobs.numpy()  # 0 off the mask
        if self.reference:
            found["ref_logprobs"] = self.logprobs(batch, reference=True).numpy()
        if self.config.truncated_is:
            found["engine_weights"] = np.minimum(np.exp(difference), self.config.truncated_is)
        for row, (episode, n) in enumerate(zip(episodes, batch.lengths, strict=True)):
            if not np.isfinite(difference[row]).all():
                raise NonFiniteError(f"line 3 met a log-prob that is not finite; episode seed {episode.seed}")
            for name, values in found.items():
                setattr(episode, name, values[row, :n].copy())  # a view would keep the whole batch
        of_actions = difference[batch.action_mask.numpy()]
        low, high = np.exp(np.quantile(of_actions, (0.01, 0.99))).tolist()
        mismatch = {"mismatch": float(np.abs(of_actions).mean()), "mismatch_p01": low, "mismatch_p99": high}
        return mismatch | {"logprobs_s": time.perf_counter() - began}

    @torch.no_grad()
    def logprobs(self, batch: Batch, reference: bool = False) -> Tensor:
        """Return log pi_theta (or log pi_ref, of the initial policy) of the action tokens, float32 [B, T]."""
        self.policy.model.eval()
        out, temperature = torch.zeros(batch.tokens.shape), self.config.temperature
        for rows, part in self._shares(batch):
            found, _ = action_logprobs(self.reference, part, temperature) if reference else self._forward(part)
            out[rows, : found.shape[1]] += found
        return self._sum(out)

    def update(
        self, episodes: list[Episode], advantages: Tensor | None = None, weights: np.ndarray | None = None
    ) -> Update:
        """Make an optimizer step: line 5, or line 10 with w_i [B]. `advantages` [B, T]: those of `Baseline` (None:
        whitened over this batch). Raises NonFiniteError, without a step, if the loss or the gradient is not finite."""
        began, config = time.perf_counter(), self.config
        batch = training_batch(episodes, config, advantages, weights)
        tokens = batch.action_mask.sum(-1).double()  # [B]
        self.policy.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        drift, total_loss = torch.zeros(len(DRIFT), len(episodes)).double(), torch.zeros(1).double()
        for rows, part in self._shares(batch):
            logprobs, entropies = self._forward(part, config.entropy_coef > 0)
            loss, sums = policy_loss(
                logprobs, part.behavior_logprobs, part.advantages, part.action_mask, part.weights, entropies=entropies,
                entropy_coef=config.entropy_coef, ref_logprobs=part.ref_logprobs, kl_coef=config.kl_loss_coef,
                ratio_clip=config.ratio_clip, dual_clip=config.dual_clip, batch_size=len(episodes),
                scale=tokens.mean().item(),
            )  # fmt: skip
            self._backward(loss)
            total_loss += loss.item()
            drift[:, rows] += torch.stack([sums[name].double() for name in DRIFT])
        mean_loss = self._sum(total_loss).item()
        moved = dict(zip(DRIFT, self._sum(drift).numpy(), strict=True), tokens=tokens.numpy())
        progress = (self.step - WARMUP_STEPS) / max(1, self.total_updates - WARMUP_STEPS)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))  # to 0, after a linear warm-up
        self.optimizer.param_groups[0]["lr"] = config.lr * min(self.step / WARMUP_STEPS, cosine)
        norm = self._clip_and_step() if np.isfinite(mean_loss) else float("nan")
        if not np.isfinite(norm):
            phase = "the on-policy update" if weights is None else "the replay update"
            seeds = [e.seed for e, x in zip(episodes, moved["log_ratio"], strict=True) if not np.isfinite(x)]
            found = f"loss {mean_loss}, gradient norm {norm}, and such log-probs in episode seeds {seeds or 'none'}"
            raise NonFiniteError(f"{phase} met numbers that are not finite: {found}")
        self.step += 1
        counts = {"clip_fraction": moved["clipped"], "kl": moved["kl"], "nonzero_advantages": batch.advantages != 0}
        stats = {name: float(count.sum() / tokens.sum()) for name, count in counts.items()}
        return Update(stats | {"loss": mean_loss, "grad_norm": norm, "seconds": time.perf_counter() - began}, moved)

    def base_priorities(self, episodes: list[Episode], baseline: Baseline) -> np.ndarray:
        """Return p_i^base, float64 [n]: |r_i| + epsilon, or |A_i| + epsilon with A_i the mean A_t of its action tokens
        (section 3.4). A_t is unclipped: under Config A's clip of 0.2 all priorities would be equal."""
        if self.config.base_priority == "reward":
            return reward_priority(np.array([e.reward for e in episodes]), self.config.epsilon)
        tokens = np.array([e.action_mask.sum() for e in episodes])
        totals = baseline.measured(episodes).double().sum(-1).numpy()
        return advantage_priority(totals / tokens, self.config.epsilon)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the weights of the policy, which is saved as a model."""
        reference = self.reference.model.state_dict() if self.reference else {}
        return {"step": self.step, "optimizer": self._optimizer_state(), "reference": reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. The learning rate goes on at its step, with the rate and length of the config."""
        self.step = state["step"]
        self._load_optimizer(state["optimizer"])
        if self.reference:
            self.reference.model.load_state_dict(state["reference"])

    def save(self, folder: str) -> None:
        """Write the policy in the Hugging Face format, its whole weights by way of the CPU."""
        names = dict(self.policy.model.named_parameters())  # without an output layer that is tied
        self.policy.save(folder, {name: w.detach().cpu() for name, w in self.weights() if name in names})

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every whole parameter; an output layer tied to the embedding is written out too."""
        tied = {"lm_head.weight": self.policy.model.get_input_embeddings().weight}
        yield from (tied | dict(self.policy.model.named_parameters())).items()

    # hooks overridden for multi-rank training (freshper/trainer_deepspeed.py)
    def close(self) -> None:
        """End the other processes."""

    def _shares(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """Yield this process's micro-batches: (row numbers, batch of these rows)."""
        return batch.micro_batches(self.config.micro_batch_size)

    def _forward(self, part: Batch, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        return action_logprobs(self.policy, part, self.config.temperature, entropy)

    def _sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return values

    def _backward(self, loss: Tensor) -> None:
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
