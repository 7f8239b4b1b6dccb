"""The trainer on DeepSpeed: any number of ranks, ZeRO stage 0 to 3, the same numbers as freshper/trainer.py.

Paper: Algorithm 1 lines 3, 5 and 10; Table training_config (the authors train with DeepSpeed inside ROLL).

    torchrun --nproc_per_node 4 train.py --trainer deepspeed --zero_stage 2 ...

Rank 0 is the controller: it alone has environments, buffer and engine, and runs Algorithm 1. The other ranks wait
in `serve` for the name of a method and its arguments; then all ranks run that method of TorchTrainer together, on
their shares of the rows:

    rows alike in length    0 1 2 3 | 4 5 6 7 | 8        micro_batch_size 2, two ranks
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
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from freshper.backends import BackendError, free_port, last_resort
from freshper.config import Config
from freshper.episode import Batch, Episode, NonFiniteError, alike
from freshper.models import Policy
from freshper.trainer import TorchTrainer, action_logprobs
from freshper.zero_state import put_state, whole_state


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
        own = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(own, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's, every call
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
        # messages between ranks are small: gloo, also beside NCCL. They may be far apart, so ranks other than 0 have a
        # day of patience; when rank 0 loses its own and ends, so do they
        patience = config.timeout if self.rank == 0 else 86_400
        self.control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=patience))
        self.broken = False
        # in this case DeepSpeed only adds up gradients and leaves the optimizer, and the gradient's norm, to torch
        self.plain = config.zero_stage == 0 and config.dtype == "float32"
        if config.zero_stage == 3:
            # a picture in one rank's cache would let it skip the vision tower whose weights the others gather
            policy.freeze_vision = False
        settings = {
            "train_micro_batch_size_per_gpu": config.micro_batch_size,
            "gradient_accumulation_steps": 1,  # the real boundaries are set in _backward
            "gradient_clipping": 0.0 if self.plain else config.max_grad_norm,
            "bf16": {"enabled": config.dtype == "bfloat16"},
            "zero_optimization": {"stage": config.zero_stage},
            "zero_allow_untested_optimizer": True,  # torch's own AdamW, as in TorchTrainer
            "steps_per_print": 10**9,
        }
        self.model_engine, *_ = deepspeed.initialize(
            model=_ActionLogprobs(policy), optimizer=self.optimizer, config=settings
        )

    # -- all ranks together ----------------------------------------------------------------------------------

    def update(
        self, episodes: list[Episode], weights: np.ndarray | None = None, moments: torch.Tensor | None = None
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """TorchTrainer.update on all ranks."""
        return self._together("update", episodes, weights, moments)

    def logprobs(self, batch: Batch, reference: bool = False) -> torch.Tensor:
        """TorchTrainer.logprobs on all ranks."""
        return self._together("logprobs", batch, reference)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, whole. With ZeRO-3 each is put together in turn and takes memory as long as it is kept; the
        iterator must be used up, since the other ranks take part in it."""
        if self.config.zero_stage < 3:
            yield from super().weights()
            return
        self._call("gather")
        yield from self._gathered()

    def serve(self) -> int:
        """What ranks other than 0 do: whatever rank 0 says, until it says stop or is gone. Returns an exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):  # they reach every rank; rank 0 decides
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                name, arguments = self._receive()
            except RuntimeError:  # rank 0 is gone, and has said why
                return 0
            if name == "stop":
                dist.destroy_process_group()  # gloo's threads, alive when Python ends, may abort the process
                return 0
            try:
                if name == "gather":
                    for _ in self._gathered():
                        pass
                else:
                    getattr(super(), name)(*arguments)
            except NonFiniteError:
                pass  # all ranks meet it together; rank 0 ends the run
            except RuntimeError as error:
                print(f"rank {self.rank} stopped in `{name}`: {error}", file=sys.stderr)
                return 1

    def close(self) -> None:
        """Rank 0, at the end of the run: the other ranks stop. Where they failed, no one waits for them."""
        if not self.broken:
            with contextlib.suppress(RuntimeError):  # gone already: torchrun says which, and with what signal
                self._call("stop")
                dist.destroy_process_group()

    def _together(self, name: str, *arguments: Any, others: tuple | None = None) -> Any:
        self.broken = True  # until it is through: the other ranks may be left waiting, or be gone
        end, limit = time.monotonic() + self.config.timeout, f"--timeout {self.config.timeout:g} s"
        late = f"the ranks of DeepSpeed took longer than {limit} in `{name}`"
        try:
            with last_resort(lambda: late if time.monotonic() > end else ""):
                self._call(name, *(arguments if others is None else others))
                result = getattr(super(), name)(*arguments)
        except NonFiniteError:
            self.broken = False
            raise
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise BackendError(
                f"the ranks of DeepSpeed failed together in `{name}`, seen by rank 0: {reason}"
            ) from error
        self.broken = False
        return result

    def _call(self, name: str, *arguments: Any) -> None:
        if self.ranks > 1:
            dist.broadcast_object_list([(name, arguments)], src=0, group=self.control)

    def _receive(self) -> tuple[str, tuple]:
        message: list[Any] = [None]
        dist.broadcast_object_list(message, src=0, group=self.control)
        return message[0]

    def state_dict(self) -> dict[str, Any]:
        """As TorchTrainer's, whatever the stage and the number of ranks: any of them can go on from it."""
        return self._together("state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. Rank 0 alone has read the state; arrays reach the other ranks one at a time."""
        self._together("load_state_dict", state, others=(state | {"optimizer": {}, "reference": {}},))

    def whole_policy(self) -> Policy:
        """With ZeRO-3 a copy, in the memory of rank 0's CPU."""
        if self.config.zero_stage < 3:
            return self.policy
        whole, model = copy.copy(self.policy), self.policy.model
        state = {name: weight.cpu().clone() for name, weight in self.weights()}
        with torch.device("meta"):
            whole.model = type(model)(model.config)
        whole.model.load_state_dict(state, strict=False, assign=True)  # a tied output layer is in `state` twice
        whole.model.tie_weights()
        whole.model.generation_config = model.generation_config
        return whole

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters one by one, put together from all ranks' parts."""
        for name, parameter in self._named().items():
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.data

    # -- this rank's part ------------------------------------------------------------------------------------

    def _shares(self, batch: Batch) -> Iterator[tuple[list[int], Batch]]:
        """The same number of micro-batches on every rank, alike in length."""
        for group in alike(batch.lengths, self.config.micro_batch_size * self.ranks):
            rows = group[self.rank :: self.ranks]
            if rows:
                yield rows, batch.rows(rows)
            else:
                spare = batch.rows(group[:1])
                yield group[:1], spare._replace(action_mask=torch.zeros_like(spare.action_mask))

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

    def _clip_and_step(self) -> float:
        if self.plain:
            norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.config.max_grad_norm)
            self.model_engine.step()
            return norm.item()
        self.model_engine.step()
        return float(self.model_engine.get_global_grad_norm())

    def shared(self, value: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor that rank 0 alone has, in float32 on all ranks; the others give None."""
        tensor = torch.empty(shape) if value is None else value.detach().float().cpu().contiguous()
        if self.ranks > 1:
            dist.broadcast(tensor, src=0, group=self.control)
        return tensor.to(self.policy.device)

    def _optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict() if self.plain else whole_state(self)

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        put_state(self, state)
