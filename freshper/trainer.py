"""The trainer: the log-prob pass and the policy update.

Paper: Algorithm 1 lines 3 (behavior log-probs, recorded before training), 5 and 10 (the two updates);
Table 4 and appendix F (cosine schedule, 10 warm-up steps, BF16). The paper names no optimizer; ours is
AdamW without weight decay.

`step` counts optimizer steps, the clock of ages in the buffer (section 3.4). Log-probs are those of the
softmax at the sampling temperature, before top-k and top-p. Only action tokens become logits,
LOGITS_AT_ONCE numbers at a time, which the backward pass computes again. Micro-batches add up to exactly
the gradient of the whole batch. `mismatch` is the engine's difference, which `truncated_is` corrects for
(Yao et al. 2025, not in the paper).

`OneProcess` computes an update in this process, and `DeepSpeedRanks` (freshper/trainer_deepspeed.py) on
several. The trainer itself does not know which one it uses.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from freshper.config import Config
from freshper.episode import Batch, Episode, collate
from freshper.errors import NonFiniteError
from freshper.models import Policy
from freshper.reinforce import policy_loss, training_batch

DRIFT = ("log_ratio", "ratio", "ratio_sq", "kl", "clipped")  # sums of each row from `policy_loss`
ACTIVATIONS = 5 * 2**30  # bytes kept for the backward pass; beyond, it computes each layer again
LOGITS_AT_ONCE = (
    2**27
)  # numbers: 0.5 GB in float32, 883 tokens with Qwen2.5's vocabulary of 151,936
WARMUP_STEPS = 10  # appendix F
MAX_GRAD_NORM = 1.0  # Table 3


class Update(NamedTuple):
    """What one optimizer step did."""

    stats: dict[str, float]  # loss, grad_norm, clip_fraction, kl, nonzero_advantages, seconds
    drift: dict[str, np.ndarray]  # per episode, [B]: DRIFT's sums, and tokens


def scores_of(
    policy: Policy, hidden: Tensor, chosen: Tensor, temperature: float, entropy: bool
) -> Tensor:
    """Return the log-probs of chosen tokens [n] after hidden states [n, H], float32 [n, 1]; with
    `entropy` also the entropies of their distributions, [n, 2]."""
    distribution = (policy.logits(hidden) / temperature).log_softmax(-1)  # [n, V]
    logprobs = distribution.gather(1, chosen[:, None])  # [n, 1]
    if not entropy:
        return logprobs
    finite = distribution.clamp_min(-1e9)  # 0 log 0 = 0, for ids that are never sampled
    entropies = -(distribution.exp() * finite).sum(-1, keepdim=True)  # [n, 1]
    return torch.cat([logprobs, entropies], dim=1)


def action_logprobs(
    policy: Policy, batch: Batch, temperature: float, entropy: bool = False, most: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return log pi(token | all before it) of the action tokens, float32 [B, T] on the CPU, 0 off the
    mask; and, with `entropy`, the entropy of their distributions. `most`: action tokens of the rank
    that has most, so that all ranks compute the same number of chunks."""
    mask = batch.action_mask  # [B, T]
    chosen = batch.tokens[mask].to(policy.device)  # [n]
    hidden = policy.batch_hidden(batch)[:, :-1][mask[:, 1:]]  # [n, H]: before each action token

    vocabulary = policy.model.config.get_text_config().vocab_size
    chunks = math.ceil(max(1, most, len(chosen)) * vocabulary / LOGITS_AT_ONCE)
    scores = []
    for chunk in zip(hidden.tensor_split(chunks), chosen.tensor_split(chunks), strict=True):
        if chunks == 1:
            scores.append(scores_of(policy, *chunk, temperature, entropy))
        else:  # the backward pass computes the logits of a chunk again
            scores.append(
                torch.utils.checkpoint.checkpoint(
                    scores_of, policy, *chunk, temperature, entropy,
                    use_reentrant=False, preserve_rng_state=False,
                )
            )  # fmt: skip

    columns = torch.cat(scores).cpu().T  # [1 or 2, n]
    padded = [torch.zeros(mask.shape).masked_scatter(mask, column) for column in columns]
    return padded[0], padded[1] if entropy else None


class OneProcess:
    """An update's computation in one process, on one device."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, config: Config):
        self.policy = policy
        self.optimizer = optimizer
        self.micro_batch_size = config.micro_batch_size

    def shard(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """Yield the micro-batches of this process: (row numbers, batch of these rows)."""
        return batch.micro_batches(self.micro_batch_size)

    def forward(
        self, part: Batch, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return `action_logprobs` of a micro-batch."""
        return action_logprobs(self.policy, part, temperature, entropy)

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return values

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of the loss to those of all processes."""
        loss.backward()

    def step(self) -> float:
        """Clip the gradient and step, unless its norm is not finite. Returns the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), MAX_GRAD_NORM).item()
        if math.isfinite(norm):
            self.optimizer.step()
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every whole parameter; an output layer that is tied to the embedding
        is written out, too."""
        yield "lm_head.weight", self.policy.model.get_output_embeddings().weight
        for name, parameter in self.policy.model.named_parameters():
            if name != "lm_head.weight":
                yield name, parameter

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class TorchTrainer:
    """Make the passes and updates of Algorithm 1. `total_updates` is the length of the learning rate
    schedule, and `processes` says where an update is computed."""

    def __init__(
        self,
        policy: Policy,
        config: Config,
        total_updates: int,
        processes: Callable[[Policy, torch.optim.Optimizer, Config], Any] = OneProcess,
    ):
        self.policy = policy
        self.config = config
        self.total_updates = total_updates
        self.step = 0

        text = policy.model.config.get_text_config()
        tokens = config.micro_batch_size * config.max_tokens
        # bytes: Korthikanti et al., arXiv 2205.05198, without the attention's
        activations = 34 * tokens * text.num_hidden_layers * text.hidden_size
        if activations > ACTIVATIONS:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})

        self.reference: Policy | None = None  # pi_ref, the initial policy
        if config.kl_reward_coef or config.kl_loss_coef:
            self.reference = copy.deepcopy(policy)
        trainable = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=config.lr, weight_decay=0.0)
        self.processes = processes(policy, self.optimizer, config)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return self.optimizer.param_groups[0]["lr"]

    def record_behavior_logprobs(self, episodes: list[Episode]) -> dict[str, float]:
        """Line 3: write log pi_mu of the action tokens into the episodes, and log pi_ref if there is a
        KL term. Returns the mismatch (mean |trainer - engine log-prob|, quantiles of
        pi_trainer / pi_engine) and the seconds."""
        began = time.perf_counter()
        batch = collate(episodes)
        per_token = {"behavior_logprobs": self.logprobs(batch).numpy()}  # [B, T]
        difference = (
            per_token["behavior_logprobs"] - batch.behavior_logprobs.numpy()
        )  # 0 off the mask
        if self.reference:
            per_token["ref_logprobs"] = self.logprobs(batch, reference=True).numpy()
        if self.config.truncated_is:
            per_token["engine_weights"] = np.minimum(np.exp(difference), self.config.truncated_is)

        for row, (episode, n) in enumerate(zip(episodes, batch.lengths, strict=True)):
            if not np.isfinite(difference[row]).all():
                seed = episode.seed
                raise NonFiniteError(
                    f"line 3 met a log-prob that is not finite; episode seed {seed}"
                )
            for name, values in per_token.items():
                setattr(episode, name, values[row, :n].copy())  # a view would keep the whole batch

        of_actions = difference[batch.action_mask.numpy()]
        low, high = np.exp(np.quantile(of_actions, (0.01, 0.99))).tolist()
        return {
            "mismatch": float(np.abs(of_actions).mean()),
            "mismatch_p01": low,
            "mismatch_p99": high,
            "logprobs_s": time.perf_counter() - began,
        }

    @torch.no_grad()
    def logprobs(self, batch: Batch, reference: bool = False) -> Tensor:
        """Return log pi_theta (or log pi_ref) of the action tokens, float32 [B, T]."""
        self.policy.model.eval()
        temperature = self.config.temperature
        logprobs = torch.zeros(batch.tokens.shape)
        for rows, part in self.processes.shard(batch):
            if reference and self.reference:
                of_part, _ = action_logprobs(self.reference, part, temperature)
            else:
                of_part, _ = self.processes.forward(part, temperature, entropy=False)
            logprobs[rows, : of_part.shape[1]] += of_part
        return self.processes.reduce(logprobs)

    def update(
        self,
        episodes: list[Episode],
        advantages: Tensor | None = None,
        weights: np.ndarray | None = None,
    ) -> Update:
        """Make an optimizer step: line 5, or line 10 with the IS weights w_i [B].

        `advantages` [B, T]: those of `Baseline` (None: of this batch against itself). Raises
        NonFiniteError, without a step, if the loss or the gradient is not finite."""
        began = time.perf_counter()
        batch = training_batch(episodes, self.config, advantages, weights)
        tokens = batch.action_mask.sum(-1).double()  # [B]

        self.policy.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss, drift = self._accumulate_gradient(batch, scale=tokens.mean().item())
        drift["tokens"] = tokens.numpy()

        self.optimizer.param_groups[0]["lr"] = self._scheduled_lr()
        norm = self.processes.step() if math.isfinite(loss) else math.nan
        if not math.isfinite(norm):
            phase = "the on-policy update" if weights is None else "the replay update"
            finite = np.isfinite(drift["log_ratio"])
            seeds = [e.seed for e, is_finite in zip(episodes, finite, strict=True) if not is_finite]
            numbers = f"loss {loss}, gradient norm {norm}"
            where = f"such log-probs in episode seeds {seeds or 'none'}"
            raise NonFiniteError(f"{phase} met numbers that are not finite: {numbers}, and {where}")
        self.step += 1

        n = tokens.sum().item()
        assert batch.advantages is not None
        stats = {
            "clip_fraction": float(drift["clipped"].sum() / n),
            "kl": float(drift["kl"].sum() / n),
            "nonzero_advantages": (batch.advantages != 0).sum().item() / n,
            "loss": loss,
            "grad_norm": norm,
            "seconds": time.perf_counter() - began,
        }
        return Update(stats, drift)

    def _accumulate_gradient(
        self, batch: Batch, scale: float
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Compute the loss of eq. 16 and its gradient, a micro-batch at a time. Returns the loss, and
        the sums DRIFT of each row, [B]."""
        config = self.config
        total_loss = torch.zeros(1).double()
        drift = torch.zeros(len(DRIFT), len(batch.tokens)).double()
        for rows, part in self.processes.shard(batch):
            entropy = config.entropy_coef > 0
            logprobs, entropies = self.processes.forward(part, config.temperature, entropy)
            loss, sums = policy_loss(
                logprobs,
                part.behavior_logprobs,
                part.advantages,
                part.action_mask,
                part.weights,
                ratio_clip=config.ratio_clip,
                dual_clip=config.dual_clip,
                entropies=entropies,
                entropy_coef=config.entropy_coef,
                ref_logprobs=part.ref_logprobs,
                kl_coef=config.kl_loss_coef,
                batch_size=len(batch.tokens),
                scale=scale,
            )
            self.processes.backward(loss)
            total_loss += loss.item()
            drift[:, rows] += torch.stack([sums[name].double() for name in DRIFT])

        reduced = self.processes.reduce(drift).numpy()
        return self.processes.reduce(total_loss).item(), dict(zip(DRIFT, reduced, strict=True))

    def _scheduled_lr(self) -> float:
        """Return the learning rate of the next step: a linear warm-up, then a cosine to 0."""
        progress = (self.step - WARMUP_STEPS) / max(1, self.total_updates - WARMUP_STEPS)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        return self.config.lr * min(self.step / WARMUP_STEPS, cosine)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every whole parameter of the policy."""
        return self.processes.weights()

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the weights of the policy, which is saved as a model."""
        return {
            "step": self.step,
            "optimizer": self.processes.optimizer_state(),
            "reference": self.reference.model.state_dict() if self.reference else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. The learning rate goes on at its step, with the rate and length of the config."""
        self.step = state["step"]
        self.processes.load_optimizer_state(state["optimizer"])
        if self.reference:
            self.reference.model.load_state_dict(state["reference"])

    def save(self, folder: str) -> None:
        """Write the policy in the Hugging Face format."""
        save_weights(self.policy, self.weights(), folder)

    def close(self) -> None:
        """Nothing is to be closed in one process."""


def save_weights(policy: Policy, weights: Iterator[tuple[str, Tensor]], folder: str) -> None:
    """Write a policy with these whole weights in the Hugging Face format, by way of the CPU."""
    own_names = dict(policy.model.named_parameters())  # without an output layer that is tied
    on_cpu = {name: weight.detach().cpu() for name, weight in weights if name in own_names}
    policy.save(folder, on_cpu)
