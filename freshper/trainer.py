"""The trainer: the log-prob pass and the policy update.

Paper: Algorithm 1 lines 3 (behavior log-probs, recorded before training), 5 and 10 (the two
updates); Table 4 and appendix F (cosine schedule, 10 warm-up steps, BF16). The paper names no
optimizer. Ours is AdamW without weight decay.

`step` counts optimizer steps, the clock of ages in the buffer (section 3.4). Log-probs are those of
the softmax at the sampling temperature, before top-k and top-p. Logits are computed for action
tokens only. If they are more than LOGITS_AT_ONCE numbers, they are computed in chunks, and again in
the backward pass. The gradients of micro-batches add up to that of the whole batch. `mismatch` is
the difference between trainer and engine. No forward pass has dropout: with weights unchanged, all
ratios are 1.

`TorchTrainer` is one process on one device. Its last methods are hooks for others
(freshper/trainer_deepspeed.py).
"""

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from freshper.config import Config
from freshper.episode import Batch, Episode, collate
from freshper.errors import BackendError, NonFiniteError
from freshper.models import Policy
from freshper.reinforce import policy_loss

DRIFT = "log_ratio ratio ratio_sq kl clipped".split()  # sums of each row from `policy_loss`
# Numbers: 0.5 GB in float32, or 883 tokens with Qwen2.5's vocabulary of 151,936.
LOGITS_AT_ONCE = 2**27
WARMUP_STEPS = 10  # appendix F
MAX_GRAD_NORM = 1.0  # Table 3

Parameters = Iterator[tuple[str, Tensor]]  # names, and whole parameters of a model
Scores = tuple[Tensor, Tensor]  # log-probs and entropies of action tokens, [B, T]
State = dict[str, Any]  # what a checkpoint holds


class Update(NamedTuple):
    """What one optimizer step did."""

    stats: dict[str, float]  # loss, grad_norm, clip_fraction, kl, nonzero_advantages, seconds
    # per episode, [B]: the sums of DRIFT, and `tokens`, the number of its action tokens
    drift: dict[str, np.ndarray]


class TorchTrainer:
    """The trainer of Algorithm 1. `total_updates` is the length of the learning rate schedule."""

    rank = 0
    max_mismatch = math.inf  # allowed; an engine with a copy of the weights has a bound

    def __init__(self, policy: Policy, config: Config, total_updates: int):
        self.policy = policy
        self.config = config
        self.total_updates = total_updates
        self.step = 0
        self.lr = 0.0  # of the last step

        has_kl = config.kl_reward_coef or config.kl_loss_coef
        self.reference = policy.copy() if has_kl else None  # pi_ref, the initial policy
        trainable = [p for p in policy.model.parameters() if p.requires_grad]
        # Fused, a step needs no further memory. On a CPU it rounds differently.
        fused = config.device != "cpu"
        self.optimizer = torch.optim.AdamW(trainable, lr=config.lr, weight_decay=0.0, fused=fused)

    def record_behavior_logprobs(self, episodes: list[Episode]) -> dict[str, float]:
        """Line 3: write log pi_mu of the action tokens into the episodes, and log pi_ref if needed.

        Returns the mismatch, the mean |trainer - engine log-prob|, and the seconds. Raises
        NonFiniteError if a log-prob is not finite, BackendError if the engine generated with other
        weights than the trainer's."""
        began = time.perf_counter()
        batch = collate(episodes)
        logprobs = self.logprobs(batch).numpy()  # [B, T]
        difference = logprobs - batch.behavior_logprobs.numpy()  # 0 off the mask
        finite = np.isfinite(difference).all(1)
        if not finite.all():
            seed = batch.seeds[finite.argmin()]
            raise NonFiniteError(f"line 3 met a log-prob that is not finite; episode seed {seed}")

        of_actions = difference[batch.action_mask.numpy()]
        mismatch = float(np.abs(of_actions).mean())
        if mismatch > self.max_mismatch:
            raise BackendError(
                "the engine does not generate with the trainer's weights: log-probs of the same "
                f"tokens differ by {mismatch:.2g} in the mean (at most {self.max_mismatch:.2g})"
            )

        per_token = {"behavior_logprobs": logprobs}
        if self.reference:
            per_token["ref_logprobs"] = self.logprobs(batch, reference=True).numpy()
        for name, values in per_token.items():
            for episode, row in zip(episodes, values):
                # A view would keep the whole batch.
                setattr(episode, name, row[: len(episode.tokens)].copy())
        return {"mismatch": mismatch, "logprobs_s": time.perf_counter() - began}

    @torch.no_grad()
    def logprobs(self, batch: Batch, reference: bool = False) -> Tensor:
        """Return log pi_theta (or log pi_ref) of the action tokens, float32 [B, T]."""
        self.policy.model.eval()
        forward = self.forward
        if reference:
            assert self.reference is not None
            forward = partial(action_logprobs, self.reference)

        logprobs = torch.zeros(batch.tokens.shape)
        for rows, micro_batch in self.shard(batch):
            values, _ = forward(micro_batch, self.config.temperature)
            logprobs[rows, : values.shape[1]] += values
        return self.reduce(logprobs)

    def update(self, batch: Batch, advantages: Tensor, weights: np.ndarray | None = None) -> Update:
        """Make an optimizer step: line 5, or line 10 with the IS weights w_i [B] (None: all 1).

        The advantages [B, T] are clipped here. Raises NonFiniteError, without a step, if loss or
        gradient is not finite."""
        began = time.perf_counter()
        config = self.config
        clipped = advantages.clamp(-config.advantage_clip, config.advantage_clip)
        batch = batch._replace(advantages=clipped)
        if weights is not None:
            batch = batch._replace(weights=torch.tensor(weights).float())
        action_tokens = batch.action_mask.sum(-1).double()  # [B]: their number

        self.optimizer.zero_grad()
        recompute_layers(self.policy.model)
        loss, sums = self._accumulate_gradient(batch, scale=action_tokens.mean().item())
        drift = {"tokens": action_tokens.numpy(), **sums}

        self.lr = self._scheduled_lr()
        self.optimizer.param_groups[0]["lr"] = self.lr
        grad_norm = self.clip_and_step() if math.isfinite(loss) else math.nan
        if not math.isfinite(grad_norm):
            phase = "the on-policy update" if weights is None else "the replay update"
            finite = np.isfinite(drift["log_ratio"])
            seeds = [batch.seeds[row] for row in np.flatnonzero(~finite)]
            raise NonFiniteError(
                f"{phase} met numbers that are not finite: loss {loss}, gradient norm {grad_norm}, "
                f"and such log-probs in episode seeds {seeds or 'none'}"
            )
        self.step += 1

        n = action_tokens.sum().item()
        stats = {
            "clip_fraction": float(drift["clipped"].sum() / n),
            "kl": float(drift["kl"].sum() / n),
            "nonzero_advantages": advantages.count_nonzero().item() / n,
            "loss": loss,
            "grad_norm": grad_norm,
            "seconds": time.perf_counter() - began,
        }
        return Update(stats, drift)

    def _accumulate_gradient(
        self, batch: Batch, scale: float
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Compute the loss of eq. 16 and its gradient, a micro-batch at a time.

        Returns the loss, and the sums DRIFT of each row, [B]."""
        config = self.config
        entropy = config.entropy_coef > 0
        total_loss = torch.zeros(1).double()
        drift = torch.zeros(len(DRIFT), len(batch.tokens)).double()
        for rows, micro_batch in self.shard(batch):
            logprobs, entropies = self.forward(micro_batch, config.temperature, entropy)
            assert micro_batch.advantages is not None
            loss, sums = policy_loss(
                logprobs,
                micro_batch.behavior_logprobs,
                micro_batch.advantages,
                micro_batch.action_mask,
                micro_batch.weights,
                dual_clip=config.dual_clip,
                entropies=entropies,
                entropy_coef=config.entropy_coef,
                ref_logprobs=micro_batch.ref_logprobs,
                kl_coef=config.kl_loss_coef,
                batch_size=len(batch.tokens),
                scale=scale,
            )
            self.backward(loss)
            total_loss += loss.item()
            drift[:, rows] += torch.stack([sums[name] for name in DRIFT])

        drift = self.reduce(drift)
        total_loss = self.reduce(total_loss)
        return total_loss.item(), dict(zip(DRIFT, drift.numpy()))

    def _scheduled_lr(self) -> float:
        """Return the learning rate of the next step: a warm-up from 0 (the first step changes
        nothing), then a cosine to 0."""
        progress = (self.step - WARMUP_STEPS) / max(1, self.total_updates - WARMUP_STEPS)
        cosine = 0.5 * (1.0 + math.cos(math.pi * np.clip(progress, 0.0, 1.0)))
        return self.config.lr * min(self.step / WARMUP_STEPS, cosine)

    def state_dict(self) -> State:
        """Return everything but the policy, which is saved as a model, and the optimizer."""
        reference = self.reference.model.state_dict() if self.reference else {}
        return {"step": self.step, "reference": reference}

    def load_state_dict(self, state: State) -> None:
        """Restore a state. The learning rate goes on at its step."""
        self.step = int(state["step"])
        if self.reference:
            self.reference.model.load_state_dict(state["reference"])

    def save(self, folder: str) -> None:
        """Write the policy in the Hugging Face format."""
        self.policy.save(folder)

    def save_optimizer(self, folder: str) -> None:
        """Write this process's share of the optimizer's state."""
        with open(f"{folder}/optimizer-{self.rank}.pt", "wb") as file:
            torch.save(self.optimizer_state(), file)

    def load_optimizer(self, folder: str) -> None:
        """Restore this process's share of the optimizer's state."""
        path = f"{folder}/optimizer-{self.rank}.pt"
        self.load_optimizer_state(torch.load(path, map_location="cpu", weights_only=True))

    def close(self) -> None:
        """Do nothing: in one process nothing is left open."""

    # -- what several processes do in another way

    def shard(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """Yield the micro-batches of this process: (row numbers, batch of these rows)."""
        return batch.micro_batches(self.config.micro_batch_size)

    def forward(self, micro_batch: Batch, temperature: float, entropy: bool = False) -> Scores:
        """Return `action_logprobs` of a micro-batch."""
        return action_logprobs(self.policy, micro_batch, temperature, entropy)

    def reduce(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return values

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of the loss to that of the batch, summed over processes."""
        loss.backward()

    def clip_and_step(self) -> float:
        """Clip the gradient and step, unless its norm is not finite. Returns the norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), MAX_GRAD_NORM).item()
        if math.isfinite(norm):
            self.optimizer.step()
        return norm

    def parameters(self) -> Parameters:
        """Yield (name, tensor) of every whole parameter, also of an output layer that is tied."""
        return self.policy.model.named_parameters(remove_duplicate=False)

    def optimizer_state(self) -> State:
        """Return this process's share of the optimizer's state."""
        return self.optimizer.state_dict()["state"]

    def load_optimizer_state(self, state: State) -> None:
        """Restore what `optimizer_state` returned."""
        # The settings stay: a resumed run may be on another device, which decides them (fused).
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})


def recompute_layers(model: torch.nn.Module) -> None:
    """Let layers with gradient checkpointing compute their activations again in the backward pass.

    They do so in training mode alone. All parts within them stay in evaluation mode: no dropout."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


# -- log-probs


def token_scores(
    policy: Policy, temperature: float, entropy: bool, hidden: Tensor, tokens: Tensor
) -> Tensor:
    """Return each token's log-prob, and the entropy of its distribution, float32 [n, 2].

    Tokens are [n], the hidden states before them [n, H]. Without `entropy` entropies are 0."""
    distribution = (policy.logits(hidden) / temperature).log_softmax(-1)  # [n, V]
    logprobs = distribution.gather(1, tokens[:, None])  # [n, 1]
    entropies = torch.zeros_like(logprobs)
    if entropy:
        # 0 log 0 is 0. Ids that are never sampled have the log-prob -inf.
        finite = distribution.clamp_min(-1e9)
        entropies = -(distribution.exp() * finite).sum(-1, keepdim=True)  # [n, 1]
    return torch.cat([logprobs, entropies], dim=1)


def action_logprobs(
    policy: Policy, batch: Batch, temperature: float, entropy: bool = False, chunks: int = 0
) -> Scores:
    """Return log pi(token | all before it) of the action tokens, and entropies, [B, T] each.

    They are float32 on the CPU, and 0 off the mask. Without `entropy` all entropies are 0. Logits
    are computed in `chunks` (0: as many as needed)."""
    mask = batch.action_mask  # [B, T]
    tokens = batch.tokens[mask].to(policy.device)  # [n]
    before_each_token = policy.batch_hidden(batch)[:, :-1]  # [B, T - 1, H]
    hidden = before_each_token[mask[:, 1:]]  # [n, H]

    chunks = chunks or chunks_of(policy, len(tokens))
    score = partial(token_scores, policy, temperature, entropy)
    if chunks > 1:
        # The backward pass computes the logits of a chunk again.
        score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    scores = map(score, hidden.tensor_split(chunks), tokens.tensor_split(chunks))

    columns = torch.cat(list(scores)).cpu().T  # [2, n]
    logprobs, entropies = torch.zeros(2, *mask.shape).masked_scatter(mask, columns)
    return logprobs, entropies


def chunks_of(policy: Policy, n_tokens: int) -> int:
    """Return the number of chunks in which the logits of n tokens are computed."""
    vocabulary = policy.model.config.get_text_config().vocab_size
    return math.ceil(vocabulary * max(1, n_tokens) / LOGITS_AT_ONCE)
