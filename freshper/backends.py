"""Which engine and which trainer a run uses: the embedded ones, or vLLM and DeepSpeed, imported only when asked for.

    --engine hf     --trainer torch        one process, a CPU or one GPU; needs requirements.txt only
    --engine vllm   --trainer deepspeed    the paper's (ROLL with vLLM and DeepSpeed); requirements-gpu.txt

Any pairing works but one: the embedded engine runs on the trainer's own model, which ZeRO-3 has cut into pieces.
"""

import contextlib
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from freshper.config import Config
from freshper.engine_hf import HFEngine, Sampling
from freshper.models import Policy
from freshper.rollout import Engine
from freshper.time_limit import alarm
from freshper.trainer import TorchTrainer


class BackendError(RuntimeError):
    """vLLM or DeepSpeed failed, or did not answer in time. Names the phase."""


GRACE = 10.0  # seconds, for an error to be raised by the one who waits


class TrainingEngine(Engine, Protocol):
    """Generation with the trainer's weights."""

    def sync(self, trainer: TorchTrainer) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def deadline(phase: str, seconds: float, processes: Sequence[int] = ()) -> Iterator[None]:
    """Raise BackendError, naming the phase, in the main thread if the block takes longer, or if one of these processes
    has died (vLLM waits for ever for an answer of its own)."""
    end = time.monotonic() + seconds

    def problem() -> str:
        if time.monotonic() >= end:
            return f"{phase} took longer than --timeout {seconds:g} s"
        dead = [pid for pid in processes if not alive(pid)]
        return f"vLLM died in {phase} (process {dead[0]}); if it said why, that stands above" if dead else ""

    def look(*_: object) -> None:
        if text := problem():
            raise BackendError(text)

    with last_resort(problem), alarm(look, min(1.0, seconds), every=min(1.0, seconds)):
        yield


@contextlib.contextmanager
def last_resort(problem: Callable[[], str]) -> Iterator[None]:
    """End the process where the block goes on for GRACE seconds although there is a problem (a sentence, or ""). While
    NCCL, or DeepSpeed's shared memory on a CPU, waits for another process, no signal handler runs and nothing can be
    raised. vLLM and the other ranks notice that they are alone."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            if (text := problem()) and not over.wait(GRACE):
                print(f"\nstopped: {text}", file=sys.stderr, flush=True)
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def alive(pid: int) -> bool:
    """Whether a process runs, and is not only waiting to be buried by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    """A port of the loopback interface that no one listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join(config: Config) -> int:
    """Before anything is loaded: check the packages, meet the other ranks. Returns this process's rank.

    Raises ValueError with one sentence where a package is missing or the settings do not go together.
    """
    wanted = {"engine": ("vllm", config.engine), "trainer": ("deepspeed", config.trainer)}
    for flag, (package, chosen) in wanted.items():
        if chosen == package and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--{flag} is {package}, but the package {package} is not installed; see requirements-gpu.txt"
            )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if config.trainer == "torch" and ranks > 1:
        raise ValueError(f"--trainer is torch, but {ranks} ranks were started; only deepspeed uses more than one")
    if config.engine == "vllm" and config.device == "cuda" and ranks > 1 and not config.rollout_gpus:
        raise ValueError(f"--rollout_gpus is 0, but must be above 0 where {ranks} ranks train")
    layout = config.rollout_gpus if config.preset == "paper" else 0
    if layout > 1 and ranks == 1:
        print(f"one rank trains; the paper's layout has {layout}: torchrun --nproc_per_node {layout} train.py ...")
    if config.trainer == "torch":
        return 0
    if config.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from freshper.trainer_deepspeed import join_ranks

    return join_ranks(config)


def check(policy: Policy, config: Config) -> None:
    """Before anything is written: raises ValueError where the engine cannot run this model."""
    if config.engine == "vllm":
        from freshper.vllm_processes import check_vllm

        check_vllm(policy, config)


def make_trainer(policy: Policy, config: Config) -> TorchTrainer:
    """The trainer behind --trainer. With several ranks, each makes one."""
    updates = config.iterations * (config.ppo_epochs + config.replay_ratio)
    if config.trainer == "torch":
        return TorchTrainer(policy, config, updates)
    from freshper.trainer_deepspeed import DeepSpeedTrainer

    return DeepSpeedTrainer(policy, config, updates)


def make_engine(policy: Policy, config: Config, trainer: TorchTrainer) -> TrainingEngine:
    """The engine behind --engine, with the trainer's weights."""
    if config.engine == "hf":
        return HFEngine(policy, Sampling(config.temperature, config.top_k, config.top_p), config.seed)
    from freshper.engine_vllm import VLLMEngine

    return VLLMEngine(policy, config, trainer)


@contextlib.contextmanager
def backends(policy: Policy, config: Config) -> Iterator[tuple[TorchTrainer, Any]]:
    """Trainer and engine of rank 0. Afterwards what they started is gone, also where one of them failed."""
    with (
        contextlib.closing(make_trainer(policy, config)) as trainer,
        contextlib.closing(make_engine(policy, config, trainer)) as engine,
    ):
        yield trainer, engine


def serve(policy: Policy, config: Config) -> int:
    """The whole run of a rank other than 0. Returns its exit status."""
    trainer: Any = make_trainer(policy, config)  # DeepSpeed's: plain torch has one process
    return trainer.serve()
