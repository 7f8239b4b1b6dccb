"""The trainer on DeepSpeed: any number of ranks, ZeRO stage 0 to 3, the same numbers as freshper/trainer.py.

Paper: Algorithm 1 lines 3, 5 and 10; Table training_config (the authors train with DeepSpeed inside ROLL).

    torchrun --nproc_per_node 4 train.py --trainer deepspeed --zero_stage 2 ...

Rank 0 is the controller: it alone has environments, buffer and engine, and runs Algorithm 1. The other ranks wait
in `serve` for the name of a method and its arguments; then all ranks run that method of TorchTrainer together, on
their shares of the rows:

    rows sorted by length   0 1 2 3 | 4 5 6 7 | 8        micro_batch_size 2, two ranks
    rank 0                  0   2     4   6     8
    rank 1                    1   3     5   7     (8)    a rank without a row gets one whose action mask is empty

All ranks thus do the same number of forward passes, else ZeRO-3, which gathers weights in each, would wait for ever.
Loss, advantages and constants are computed from the whole batch on every rank; gradients only have to be added up.
DeepSpeed averages them over ranks, hence the factor in `_backward`, and is told not to divide by the number of
micro-batches.

Where this differs from TorchTrainer: in bfloat16 DeepSpeed keeps float32 master weights; and a gradient that is not
finite is found after the step instead of before (log-probs and loss are checked before, on all ranks).
"""

import contextlib
import copy
import datetime
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from freshper.backends import BackendError
from freshper.config import Config
from freshper.episode import Batch, NonFiniteError
from freshper.models import Policy
from freshper.trainer import TorchTrainer, action_logprobs


class _ActionLogprobs(torch.nn.Module):
    """The policy's model behind the one forward call that ZeRO-3 hooks into."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy, self.model = policy, policy.model

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return action_logprobs(self.policy, *arguments)


def join_ranks(config: Config) -> int:
    """Meet the other ranks that torchrun or deepspeed started (or be the only one); returns this one's number."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.logger.setLevel("WARNING")
    deepspeed.init_distributed(
        "nccl" if config.device == "cuda" else "gloo",
        verbose=False,
        timeout=datetime.timedelta(seconds=config.timeout),
    )
    return dist.get_rank()


class DeepSpeedTrainer(TorchTrainer):
    """Every rank makes one; rank 0 calls its methods, the others call `serve`."""

    def __init__(self, policy: Policy, config: Config, total_updates: int):
        super().__init__(policy, config, total_updates)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # messages between ranks are small and may be far apart: gloo, also beside NCCL, with a day of patience
        self.control = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
        if config.zero_stage == 3:
            # a picture in one rank's cache would let it skip the vision tower whose weights the others gather
            policy.freeze_vision = False
        settings = {
            "train_micro_batch_size_per_gpu": config.micro_batch_size,
            "gradient_accumulation_steps": 1,  # the real boundaries are set in _backward
            "gradient_clipping": 0.0 if self._plain() else config.max_grad_norm,
            "bf16": {"enabled": config.dtype == "bfloat16"},
            "zero_optimization": {"stage": config.zero_stage},
            "zero_allow_untested_optimizer": True,  # torch's own AdamW, as in TorchTrainer
            "steps_per_print": 10**9,
        }
        self.model_engine, *_ = deepspeed.initialize(
            model=_ActionLogprobs(policy), optimizer=self.optimizer, config=settings
        )

    # -- all ranks together ----------------------------------------------------------------------------------

    def update(self, *arguments: Any) -> dict[str, float]:
        """TorchTrainer.update on all ranks."""
        return self._together("update", *arguments)

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """TorchTrainer.logprobs on all ranks."""
        return self._together("logprobs", batch)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, whole. With ZeRO-3 each is put together in turn and valid until the next is asked for;
        the iterator must be used up, since the other ranks take part in it."""
        if self.config.zero_stage < 3:
            yield from super().weights()
            return
        self._call("gather")
        yield from self._gathered()

    def serve(self) -> None:
        """What ranks other than 0 do: whatever rank 0 says, until it says stop."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every rank; rank 0 decides
        while True:
            name, arguments = self._receive()
            if name == "stop":
                return
            if name == "gather":
                for _ in self._gathered():
                    pass
                continue
            with contextlib.suppress(NonFiniteError):  # all ranks meet it together; rank 0 ends the run
                getattr(super(), name)(*arguments)

    def close(self) -> None:
        """Rank 0, at the end of the run: the policy's model is whole again, and the other ranks stop."""
        if self.config.zero_stage == 3:
            model = copy.copy(self.policy.model.config), self.policy.model.generation_config
            whole = type(self.policy.model)(model[0]).to(dtype=getattr(torch, self.config.dtype))
            state = {name: weight.cpu().clone() for name, weight in self.weights()}
            whole.load_state_dict(state, strict=False)  # a tied output layer is in `state` twice
            whole.generation_config = model[1]
            self.policy.model = whole
        self._call("stop")

    def _together(self, name: str, *arguments: Any) -> Any:
        self._call(name, *arguments)
        interrupted = []  # leaving in the middle would leave the other ranks waiting
        handler = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
        try:
            return getattr(super(), name)(*arguments)
        except RuntimeError as error:
            raise BackendError(f"DeepSpeed failed on rank {self.rank} in `{name}`: {error}") from error
        finally:
            signal.signal(signal.SIGINT, handler)
            if interrupted:
                raise KeyboardInterrupt

    def _call(self, name: str, *arguments: Any) -> None:
        if self.ranks > 1:
            dist.broadcast_object_list([(name, arguments)], src=0, group=self.control)

    def _receive(self) -> tuple[str, tuple]:
        message = [None]
        dist.broadcast_object_list(message, src=0, group=self.control)
        return message[0]

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters one by one, put together from all ranks' parts."""
        named = dict(self.policy.model.named_parameters())
        if "lm_head.weight" not in named:
            named["lm_head.weight"] = self.policy.model.get_input_embeddings().weight
        for name, parameter in named.items():
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.data

    # -- this rank's part ------------------------------------------------------------------------------------

    def _shares(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """The same number of micro-batches on every rank, alike in length."""
        order = sorted(range(len(batch.lengths)), key=batch.lengths.__getitem__)
        stride = self.config.micro_batch_size * self.ranks
        for k in range(0, len(order), stride):
            rows = order[k : k + stride][self.rank :: self.ranks]
            if rows:
                yield rows, batch.rows(rows)
            else:
                spare = batch.rows(order[k : k + 1])
                yield order[k : k + 1], spare._replace(action_mask=torch.zeros_like(spare.action_mask))

    def _forward(self, part: Batch, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        # as many uses of the output layer on every rank: ZeRO-3 gathers it in each
        most = part.action_mask.sum()
        if self.ranks > 1:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.control)
        return self.model_engine(part, self.config.temperature, entropy, int(most))

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        if self.ranks > 1:
            dist.all_reduce(values, group=self.control)
        return values

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        self.model_engine.set_gradient_accumulation_boundary(last)
        self.model_engine.backward(loss * self.ranks, scale_wrt_gas=False)
        if not last:
            self.model_engine.step()  # counts the micro-batch, no more

    def _plain(self) -> bool:
        """Whether DeepSpeed only adds up gradients and leaves the optimizer, and the gradient's norm, to torch."""
        return self.config.zero_stage == 0 and self.config.dtype == "float32"

    def _clip_and_step(self) -> float:
        if self._plain():
            norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.config.max_grad_norm)
            self.model_engine.step()
            return norm.item()
        self.model_engine.step()
        return float(self.model_engine.get_global_grad_norm())
