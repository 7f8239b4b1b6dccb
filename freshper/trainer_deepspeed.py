"""Train with DeepSpeed: any number of ranks, ZeRO stages 0 to 3, the same numbers as one process.

Paper: Algorithm 1 lines 3, 5 and 10; section 4.1 and Table 4 (the authors train with DeepSpeed inside
ROLL).

Two ideas, one class each. `DeepSpeedRanks` shares the rows of a batch among the ranks:

    rows grouped by length  0 1 2 3 | 4 5 6 7 | 8        micro_batch_size 2, two ranks
    rank 0                  0   2     4   6     8
    rank 1                    1   3     5   7     (8)    a rank without a row gets one whose action mask is empty

All ranks do as many forward passes, since ZeRO-3 gathers weights in each. Gradients are added up:
`backward` undoes DeepSpeed's mean. Unlike in one process, weights are in --dtype, and a gradient that is
not finite is noticed too late, after the step.

`RankZero` is the trainer that Algorithm 1 sees. Rank 0 runs the algorithm; each call of its trainer also
runs on the other ranks, which wait for it in `serve`.
"""

import contextlib
import os
import signal
import socket
import warnings
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from freshper.config import Config
from freshper.episode import Batch, Episode, group_by_length
from freshper.errors import TIMEOUT, BackendError, NonFiniteError, watched
from freshper.models import Policy
from freshper.trainer import (
    MAX_GRAD_NORM,
    OneProcess,
    TorchTrainer,
    Update,
    action_logprobs,
    save_weights,
)


def join_ranks(config: Config) -> int:
    """Meet the other ranks that torchrun started, or be the only one. Returns this rank's number."""
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(
            alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )  # port 0: any that is free
    on_gpu = config.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    deepspeed.logger.setLevel("WARNING")
    # DeepSpeed's own, in every call
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    backend = "nccl" if on_gpu else "gloo"
    deepspeed.init_distributed(backend, verbose=False, timeout=timedelta(seconds=TIMEOUT))
    return dist.get_rank()


class _ActionLogprobs(torch.nn.Module):
    """The policy's model behind the one forward call that ZeRO-3 hooks into."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy
        self.model = policy.model
        self.forward = partial(action_logprobs, policy)


class DeepSpeedRanks(OneProcess):
    """An update's computation on all ranks. Each rank makes one, and all call its methods together."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, config: Config):
        super().__init__(policy, optimizer, config)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        # for messages, beside NCCL; ranks other than 0 wait a day for the next one, or until rank 0 ends
        patience = timedelta(seconds=TIMEOUT if self.rank == 0 else 86_400)
        self.messages = dist.new_group(backend="gloo", timeout=patience)

        self.zero_stage = config.zero_stage
        if self.zero_stage == 3:
            # a cached image would let a rank skip the vision tower that the others gather
            policy.freeze_vision = False
        # at ZeRO 0 in float32 DeepSpeed gives no norm of the gradient
        self.own_norm = self.zero_stage == 0 and config.dtype == "float32"
        settings = {
            "zero_optimization": {"stage": config.zero_stage},
            "bf16": {"enabled": config.dtype == "bfloat16"},
            "gradient_clipping": MAX_GRAD_NORM,
            "train_micro_batch_size_per_gpu": config.micro_batch_size,
            "managed_gradient_accumulation": False,
            "zero_allow_untested_optimizer": True,  # torch's own AdamW, as in one process
        }
        self.engine, *_ = deepspeed.initialize(
            model=_ActionLogprobs(policy), optimizer=optimizer, config=settings
        )

    def shard(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        for group in group_by_length(batch.lengths, self.micro_batch_size * self.ranks):
            rows = group[self.rank :: self.ranks] or group[:1]
            part = batch.rows(rows)
            if self.rank >= len(group):  # the row belongs to another rank
                part = part._replace(action_mask=torch.zeros_like(part.action_mask))
            yield rows, part

    def forward(
        self, part: Batch, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        # as many uses of the output layer on every rank: ZeRO-3 gathers it in each
        most = part.action_mask.sum()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.messages)
        return self.engine(part, temperature, entropy, int(most))

    def reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.messages)
        return values

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self.ranks)

    def step(self) -> float:
        if not self.own_norm:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())
        self.engine.buffered_allreduce_fallback()  # `step` would do it after the norm
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), MAX_GRAD_NORM)
        self.engine.step()
        return float(norm)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """With ZeRO-3 all ranks take part: use up the iterator."""
        sharded = self.zero_stage == 3
        for name, parameter in super().weights():
            with deepspeed.zero.GatheredParameters([parameter], enabled=sharded):
                yield name, parameter.detach()

    def optimizer_state(self) -> dict[str, Any]:
        """Return, on rank 0, what AdamW steps on in each rank, with its moments."""
        on_cpu = []
        for piece in self._pieces():
            tensors = {"weights": piece.detach(), **self.optimizer.state[piece]}
            on_cpu.append({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})
        of_all_ranks = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(on_cpu, of_all_ranks, group=self.messages)
        return {"ranks": of_all_ranks}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        of_this_rank: list[Any] = [None]
        dist.scatter_object_list(of_this_rank, state["ranks"], src=0, group=self.messages)
        for piece, tensors in zip(self._pieces(), of_this_rank[0], strict=True):
            piece.data.copy_(tensors.pop("weights"))
            # AdamW keeps its step counter, which has no dimension, on the CPU
            moments = {name: x.to(piece.device) if x.dim() else x for name, x in tensors.items()}
            self.optimizer.state[piece] = moments

    def _pieces(self) -> list[Tensor]:
        """Return what AdamW steps on: the parameters, or this rank's flat float32 pieces of them."""
        if self.zero_stage == 3:
            return self.engine.optimizer.fp32_partitioned_groups_flat
        return [piece for group in self.optimizer.param_groups for piece in group["params"]]


class RankZero:
    """The trainer of rank 0: a call also runs on the other ranks. Raises BackendError if one fails."""

    def __init__(self, trainer: TorchTrainer):
        self.trainer = trainer
        self.messages = trainer.processes.messages
        self.ranks = trainer.processes.ranks
        self.broken = False
        self.processes = processes_of_this_machine(self.messages, self.ranks)

    step = property(lambda self: self.trainer.step)
    lr = property(lambda self: self.trainer.lr)

    def record_behavior_logprobs(self, episodes: list[Episode]) -> dict[str, float]:
        with self._on_all_ranks("record_behavior_logprobs", episodes):
            return self.trainer.record_behavior_logprobs(episodes)

    def logprobs(self, batch: Batch, reference: bool = False) -> Tensor:
        with self._on_all_ranks("logprobs", batch, reference):
            return self.trainer.logprobs(batch, reference)

    def update(self, *arguments: Any) -> Update:
        with self._on_all_ranks("update", *arguments):
            return self.trainer.update(*arguments)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every whole parameter. Use up the iterator: all ranks take part."""
        with self._on_all_ranks("weights"):
            yield from self.trainer.weights()

    def save(self, folder: str) -> None:
        save_weights(self.trainer.policy, self.weights(), folder)

    def state_dict(self) -> dict[str, Any]:
        with self._on_all_ranks("state_dict"):
            return self.trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that rank 0 has read. Raises BackendError if another number of ranks wrote it."""
        saved = len(state["optimizer"]["ranks"])
        if saved != self.ranks:
            need = f"--resume needs {saved} ranks, the number in the checkpoint"
            raise BackendError(f"{need}, not {self.ranks}")
        without_optimizer = state | {
            "optimizer": {"ranks": None}
        }  # each rank is sent its own part of it
        with self._on_all_ranks("load_state_dict", without_optimizer):
            self.trainer.load_state_dict(state)

    def close(self) -> None:
        """End the other ranks. After a failed call they end when this process does."""
        if not self.broken:
            with contextlib.suppress(
                RuntimeError
            ):  # of a rank that died unnoticed, during a rollout
                dist.broadcast_object_list([("stop", ())], src=0, group=self.messages)
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _on_all_ranks(self, name: str, *arguments: Any) -> Iterator[None]:
        """Make the other ranks run this method of their trainer while rank 0 runs it in the block."""
        self.broken = True  # until the block has ended
        with watched(f"`{name}` on {self.ranks} ranks of DeepSpeed", self.processes):
            dist.broadcast_object_list([(name, arguments)], src=0, group=self.messages)
            yield
        self.broken = False


def processes_of_this_machine(group: Any, ranks: int) -> dict[int, str]:
    """Return the other ranks on this machine, process id -> name. All ranks must call it."""
    this_host = socket.gethostname()
    addresses: list[Any] = [None] * ranks
    dist.all_gather_object(addresses, (this_host, os.getpid()), group=group)
    named = {pid: f"rank {rank}" for rank, (host, pid) in enumerate(addresses) if host == this_host}
    named.pop(os.getpid())
    return named


def serve(trainer: TorchTrainer) -> int:
    """Worker loop of ranks other than 0: run the calls that rank 0 broadcasts until "stop" or
    disconnect. Returns the exit status 0."""
    messages = trainer.processes.messages
    processes_of_this_machine(messages, trainer.processes.ranks)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach every rank; rank 0 decides
        signal.signal(number, signal.SIG_IGN)

    message: list[Any] = [None]
    while True:
        try:
            dist.broadcast_object_list(message, src=0, group=messages)
        except RuntimeError:  # rank 0 has ended, and has said why
            return 0
        name, arguments = message[0]
        if name == "stop":
            # gloo's threads, alive when Python ends, may abort the process
            dist.destroy_process_group()
            return 0
        with contextlib.suppress(
            NonFiniteError
        ):  # all ranks meet it together, and rank 0 ends the run
            if name == "weights":
                deque(trainer.weights(), maxlen=0)
            else:
                getattr(trainer, name)(*arguments)
