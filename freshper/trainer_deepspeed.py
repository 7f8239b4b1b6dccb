"""Train with DeepSpeed: any number of ranks, ZeRO stages 1 to 3, the same numbers as one process.

Paper: Algorithm 1 lines 3, 5 and 10; section 4.1 and Table 4 (the authors train with DeepSpeed
inside ROLL).

There are two ideas, one class each. `DeepSpeedTrainer` shares the rows of a batch among the ranks:

    rows grouped by length   0  | 1 2 3 4 | 5 6 7 8      micro_batch_size 2, two ranks
    rank 0                   0    1   3     5   7
    rank 1                  (0)     2   4     6   8      (0): with an empty action mask

All ranks make the same number of forward passes, because ZeRO-3 gathers parameters in each. So a
rank without a row takes one whose action mask it empties. Gradients are added up: `backward` undoes
DeepSpeed's mean. Two things differ from one process: parameters are in --dtype, and a gradient that
is not finite is noticed only after the step.

`RankZero` is the trainer that Algorithm 1 sees. Rank 0 runs the algorithm. Each call of its trainer
also runs on the other ranks, which wait for it in `serve`. A rank that dies closes its connections:
then the call of rank 0 raises, and torchrun ends what is left.
"""

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.constants import default_pg_timeout
from torch import Tensor

from freshper.config import Config
from freshper.episode import Batch, group_by_length
from freshper.errors import SIGNALS, BackendError, NonFiniteError, phase
from freshper.models import Policy
from freshper.trainer import (
    MAX_GRAD_NORM,
    Parameters,
    Scores,
    State,
    TorchTrainer,
    action_logprobs,
    chunks_of,
)

# GPUs also need NCCL_SOCKET_IFNAME.
MEETING = "the meeting of all ranks (GLOO_SOCKET_IFNAME: the network between their machines)"


def join_ranks(config: Config) -> int:
    """Meet the other ranks that torchrun started, or be the only one. Returns the rank's number.

    Raises BackendError if one is not there in time, or cannot be reached. Each wait for a rank ends
    after ten minutes, or DEEPSPEED_TIMEOUT minutes."""
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",  # any that is free
        )
    on_gpu = config.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    deepspeed.logger.setLevel("WARNING")
    # DeepSpeed itself causes these warnings, in every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    backend = "nccl" if on_gpu else "gloo"
    with phase(MEETING, RuntimeError):
        deepspeed.init_distributed(backend, verbose=False)
    return dist.get_rank()


def meet() -> None:
    """Wait for the other ranks. Raises BackendError as `join_ranks` does."""
    with phase(MEETING, RuntimeError):
        dist.barrier()


class _ActionLogprobs(torch.nn.Module):
    """The policy's model behind the one forward call that ZeRO-3 hooks into."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.model = policy.model
        self.forward = partial(action_logprobs, policy)


class DeepSpeedTrainer(TorchTrainer):
    """The trainer of each rank. All ranks call each of its methods together."""

    def __init__(self, policy: Policy, config: Config, total_updates: int):
        if config.zero_stage == 3:
            # A cached image would let a rank skip the vision tower that the others gather.
            policy.freeze_vision = False
        super().__init__(policy, config, total_updates)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        settings = {
            "zero_optimization": {"stage": config.zero_stage},
            "bf16": {"enabled": config.dtype == "bfloat16"},
            "gradient_clipping": MAX_GRAD_NORM,
            "train_micro_batch_size_per_gpu": config.micro_batch_size,
            "managed_gradient_accumulation": False,
            "zero_allow_untested_optimizer": True,  # torch's own AdamW, as in one process
            # In bfloat16 the sum over micro-batches would be rounded after each of them.
            "data_types": {"grad_accum_dtype": "fp32"},
        }

        # Messages go beside NCCL. Ranks other than 0 wait a day for the next, or until rank 0 ends.
        patience = default_pg_timeout if self.rank == 0 else timedelta(days=1)
        with phase(MEETING, RuntimeError):
            self.messages = dist.new_group(backend="gloo", timeout=patience)
            self.engine, *_ = deepspeed.initialize(
                model=_ActionLogprobs(policy), optimizer=self.optimizer, config=settings
            )

    def broadcast(self, call: Any = None) -> Any:
        """Return on all ranks what rank 0 passes."""
        message = [call]
        dist.broadcast_object_list(message, src=0, group=self.messages)
        return message[0]

    def shard(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        for group in group_by_length(batch.lengths, self.config.micro_batch_size * self.ranks):
            rows = group[self.rank :: self.ranks] or group[:1]
            micro_batch = batch.rows(rows)
            if self.rank >= len(group):
                # The row belongs to another rank.
                empty = torch.zeros_like(micro_batch.action_mask)
                micro_batch = micro_batch._replace(action_mask=empty)
            yield rows, micro_batch

    def forward(self, micro_batch: Batch, temperature: float, entropy: bool = False) -> Scores:
        # ZeRO-3 gathers the output layer in each chunk, so all ranks need the same number of them.
        most_tokens = micro_batch.action_mask.sum()
        dist.all_reduce(most_tokens, dist.ReduceOp.MAX, group=self.messages)
        chunks = chunks_of(self.policy, int(most_tokens))
        return self.engine(micro_batch, temperature, entropy, chunks)

    def reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.messages)
        return values

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self.ranks)

    def clip_and_step(self) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def parameters(self) -> Parameters:
        """Yield (name, tensor) of every whole parameter. All ranks must use up the iterator."""
        sharded = self.config.zero_stage == 3
        for name, parameter in super().parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
                yield name, parameter.detach()

    def optimizer_state(self) -> State:
        """Return what AdamW steps on in this rank, with its moments."""
        states = []
        for tensor in self._stepped_tensors():
            state = {"parameter": tensor.detach(), **self.optimizer.state[tensor]}
            states.append({name: x.cpu() for name, x in state.items()})
        return {"tensors": states}

    def load_optimizer_state(self, state: State) -> None:
        for tensor, saved in zip(self._stepped_tensors(), state["tensors"], strict=True):
            tensor.data.copy_(saved.pop("parameter"))
            self.optimizer.state[tensor] = {name: x.to(tensor.device) for name, x in saved.items()}

    def save_optimizer(self, folder: str) -> None:
        """Write this rank's share, when all ranks have written theirs."""
        super().save_optimizer(folder)
        dist.barrier(group=self.messages)

    def load_optimizer(self, folder: str) -> None:
        """Restore this rank's share. Raises BackendError if another number of ranks wrote it."""
        saved = len(list(Path(folder).glob("optimizer-*.pt")))
        if saved != self.ranks:
            raise BackendError(
                f"--resume needs {saved} ranks, the number in the checkpoint, not {self.ranks}"
            )
        super().load_optimizer(folder)

    def _stepped_tensors(self) -> list[Tensor]:
        """Return what AdamW steps on: the parameters, or this rank's flat float32 share of them."""
        if self.config.zero_stage == 3:
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]


# The methods of a trainer that compute on all ranks
TOGETHER = """record_behavior_logprobs logprobs update load_state_dict save_optimizer
load_optimizer""".split()


class RankZero:
    """The trainer of rank 0. Those of its methods that need all ranks also run on the others.

    They raise BackendError if a rank fails."""

    def __init__(self, trainer: DeepSpeedTrainer):
        self.trainer = trainer
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.trainer, name)
        if name not in TOGETHER:
            return attribute

        def call(*arguments: Any) -> Any:
            with self._on_all_ranks(name, *arguments):
                return attribute(*arguments)

        return call

    def parameters(self) -> Parameters:
        """Yield (name, tensor) of every whole parameter. The caller must use up the iterator."""
        with self._on_all_ranks("parameters"):
            yield from self.trainer.parameters()

    def save(self, folder: str) -> None:
        """Write the policy in the Hugging Face format."""
        policy = self.trainer.policy
        names = dict(policy.model.named_parameters())  # without an output layer that is tied
        whole = {name: x.cpu() for name, x in self.parameters() if name in names}
        policy.save(folder, whole)

    def close(self) -> None:
        """End the other ranks. After a failed call they end when this process does."""
        if self.broken:
            return
        # A rank may have died unnoticed, during a rollout.
        with contextlib.suppress(RuntimeError):
            self.trainer.broadcast(("stop", ()))
        dist.destroy_process_group()

    @contextlib.contextmanager
    def _on_all_ranks(self, name: str, *arguments: Any) -> Iterator[None]:
        """Make the other ranks run a method of their trainer while rank 0 runs it in the block."""
        self.broken = True  # until the block has ended
        with phase(f"`{name}` on {self.trainer.ranks} ranks of DeepSpeed", RuntimeError):
            self.trainer.broadcast((name, arguments))
            yield
        self.broken = False


def serve(trainer: TorchTrainer) -> int:
    """Run the calls that rank 0 broadcasts, until "stop" or disconnect. Returns the exit status.

    This is the worker loop of ranks other than 0."""
    assert isinstance(trainer, DeepSpeedTrainer)
    # These signals reach every rank, and rank 0 decides.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    while True:
        try:
            name, arguments = trainer.broadcast()
        except RuntimeError:
            # Rank 0 has ended, and has printed why.
            return 1
        if name == "stop":
            # gloo's threads may abort the process if they are alive when Python ends.
            dist.destroy_process_group()
            return 0

        # All ranks meet wrong numbers together, and rank 0 ends the run.
        with contextlib.suppress(NonFiniteError, BackendError):
            if name == "parameters":
                for _ in trainer.parameters():
                    pass
            else:
                getattr(trainer, name)(*arguments)
