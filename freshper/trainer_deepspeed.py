"""Train with DeepSpeed: any number of ranks, ZeRO stages 0 to 3, the same numbers as freshper/trainer.py.

Paper: Algorithm 1 lines 3, 5 and 10; section 4.1 and Table 4 (the authors train with DeepSpeed inside ROLL).

Rank 0 runs Algorithm 1. The others `serve`: they run the methods that it names, each on its share of the rows:

    rows grouped by length  0 1 2 3 | 4 5 6 7 | 8        micro_batch_size 2, two ranks
    rank 0                  0   2     4   6     8
    rank 1                    1   3     5   7     (8)    a rank without a row gets one whose action mask is empty

All ranks do as many forward passes, since ZeRO-3 gathers weights in each. Gradients are added up: `_backward` undoes
DeepSpeed's mean. Unlike in TorchTrainer, weights are in --dtype, and a gradient that is not finite is found too late.
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
from freshper.episode import Batch, alike
from freshper.errors import TIMEOUT, BackendError, NonFiniteError, watched
from freshper.models import Policy
from freshper.trainer import MAX_GRAD_NORM, TorchTrainer, Update, action_logprobs


def join_ranks(config: Config) -> int:
    """Meet the other ranks that torchrun started, or be the only one. Returns this rank's number."""
    if "RANK" not in os.environ:  # port 0: any that is free
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if gpu := config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's, every call
    deepspeed.init_distributed("nccl" if gpu else "gloo", verbose=False, timeout=timedelta(seconds=TIMEOUT))
    return dist.get_rank()


class _ActionLogprobs(torch.nn.Module):
    """The policy's model behind the one forward call that ZeRO-3 hooks into."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy, self.model, self.forward = policy, policy.model, partial(action_logprobs, policy)


class DeepSpeedTrainer(TorchTrainer):
    """Every rank makes one. Rank 0 calls its methods, the others `serve`. Raises BackendError if one fails."""

    def __init__(self, policy: Policy, config: Config, total_updates: int):
        super().__init__(policy, config, total_updates)
        self.rank, self.ranks, self.broken = dist.get_rank(), dist.get_world_size(), False
        # for messages, beside NCCL; ranks other than 0 wait a day for the next one, or until rank 0 ends
        patience = timedelta(seconds=TIMEOUT if self.rank == 0 else 86_400)
        self.control = dist.new_group(backend="gloo", timeout=patience)
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, (socket.gethostname(), os.getpid()), group=self.control)
        self.processes = {pid: f"rank {k}" for k, (host, pid) in enumerate(every) if k and host == socket.gethostname()}
        if config.zero_stage == 3:  # a cached image would let a rank skip the vision tower that the others gather
            policy.freeze_vision = False
        settings: dict[str, Any] = {"zero_optimization": {"stage": config.zero_stage}}
        settings |= {"bf16": {"enabled": config.dtype == "bfloat16"}, "gradient_clipping": MAX_GRAD_NORM}
        settings |= {"train_micro_batch_size_per_gpu": config.micro_batch_size, "managed_gradient_accumulation": False}
        settings |= {"zero_allow_untested_optimizer": True}  # torch's own AdamW, as in TorchTrainer
        model = _ActionLogprobs(policy)
        self.model_engine, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)

    def update(self, *arguments: Any) -> Update:
        with self._together("update", *arguments):
            return super().update(*arguments)

    def logprobs(self, batch: Batch, reference: bool = False) -> Tensor:
        with self._together("logprobs", batch, reference):
            return super().logprobs(batch, reference)

    def state_dict(self) -> dict[str, Any]:
        with self._together("state_dict"):
            return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that rank 0 has read. Raises BackendError if another number of ranks wrote it."""
        if (saved := len(state["optimizer"]["ranks"])) != self.ranks:
            raise BackendError(f"--resume needs {saved} ranks, the number in the checkpoint, not {self.ranks}")
        with self._together("load_state_dict", state | {"optimizer": {"ranks": None}}):
            super().load_state_dict(state)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every whole parameter. With ZeRO-3 all ranks take part: use up the iterator."""
        with self._together("weights"):
            yield from self._gathered()

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in super().weights():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.config.zero_stage == 3):
                yield name, parameter.detach()

    def close(self) -> None:
        """End the other ranks. After a failed call they end when this process does."""
        if not self.broken:
            with contextlib.suppress(RuntimeError):  # of a rank that has died unseen, during a rollout
                dist.broadcast_object_list([("stop", ())], src=0, group=self.control)
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _together(self, name: str, *arguments: Any) -> Iterator[None]:
        """Make the other ranks run this method during the block, in which rank 0 runs it too."""
        self.broken = True  # until the block has ended
        with watched(f"`{name}` on {self.ranks} ranks of DeepSpeed", self.processes):
            dist.broadcast_object_list([(name, arguments)], src=0, group=self.control)
            yield
        self.broken = False

    def serve(self) -> int:
        """Worker loop: run the calls that rank 0 broadcasts until "stop" or disconnect. Returns the exit status 0."""
        for number in (signal.SIGINT, signal.SIGTERM):  # they reach every rank; rank 0 decides
            signal.signal(number, signal.SIG_IGN)
        message: list[Any] = [None]
        while True:
            try:
                dist.broadcast_object_list(message, src=0, group=self.control)
            except RuntimeError:  # rank 0 has ended, and has said why
                return 0
            name, arguments = message[0]
            if name == "stop":
                dist.destroy_process_group()  # gloo's threads, alive when Python ends, may abort the process
                return 0
            with contextlib.suppress(NonFiniteError):  # all ranks meet it together, and rank 0 ends the run
                if name == "weights":
                    deque(self._gathered(), maxlen=0)
                else:
                    getattr(super(), name)(*arguments)

    def _shares(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        for group in alike(batch.lengths, self.config.micro_batch_size * self.ranks):
            rows = group[self.rank :: self.ranks] or group[:1]
            part = batch.rows(rows)
            if self.rank >= len(group):
                part = part._replace(action_mask=torch.zeros_like(part.action_mask))
            yield rows, part

    def _forward(self, part: Batch, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        most = part.action_mask.sum()  # as many uses of the output layer on every rank: ZeRO-3 gathers it in each
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.control)
        return self.model_engine(part, self.config.temperature, entropy, int(most))

    def _sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.control)
        return values

    def _backward(self, loss: Tensor) -> None:
        self.model_engine.backward(loss * self.ranks)

    def _clip_and_step(self) -> float:
        plain = self.config.zero_stage == 0 and self.config.dtype == "float32"  # here DeepSpeed gives no norm
        if plain:
            self.model_engine.buffered_allreduce_fallback()  # over the ranks: `step` would do it after the norm
            norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), MAX_GRAD_NORM)
        self.model_engine.step()
        return float(norm if plain else self.model_engine.get_global_grad_norm())

    def _parts(self) -> list[Tensor]:
        """Return what AdamW steps on: the parameters, or this rank's flat float32 pieces of them."""
        if self.config.zero_stage == 3:
            return self.model_engine.optimizer.fp32_partitioned_groups_flat
        return [part for group in self.optimizer.param_groups for part in group["params"]]

    def _optimizer_state(self) -> dict[str, Any]:
        """Return, on rank 0, the parts of each rank with their moments."""
        parts = [{"weights": part.detach(), **self.optimizer.state[part]} for part in self._parts()]
        own = [{name: tensor.to("cpu", copy=True) for name, tensor in part.items()} for part in parts]
        every = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(own, every, group=self.control)
        return {"ranks": every}

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        own: list[Any] = [None]
        dist.scatter_object_list(own, state["ranks"], src=0, group=self.control)
        for part, saved in zip(self._parts(), own[0], strict=True):
            part.data.copy_(saved.pop("weights"))
            # AdamW keeps its step counter on the CPU
            self.optimizer.state[part] = {k: v.to(part.device) if v.dim() else v for k, v in saved.items()}
