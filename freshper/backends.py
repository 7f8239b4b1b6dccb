"""Which engine and which trainer a run uses; DeepSpeed is imported only when asked for.

    --trainer torch        one process, a CPU or one GPU; needs requirements.txt only
    --trainer deepspeed    the paper's, inside ROLL; requirements-gpu.txt, started with torchrun on any number of ranks

The embedded engine runs on the trainer's own model, which ZeRO-3 cuts into pieces: with it, ZeRO goes up to 2.
"""

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

from freshper.config import Config
from freshper.engine_hf import HFEngine, Sampling
from freshper.episode import NonFiniteError
from freshper.models import Policy
from freshper.trainer import TorchTrainer


class BackendError(RuntimeError):
    """DeepSpeed failed, or another rank did not answer in time. Names rank and phase."""


def join(config: Config) -> int:
    """Before anything is loaded: check the package, meet the other ranks. Returns this process's rank.

    Raises ValueError with one sentence where it is missing or the settings do not go together.
    """
    if config.trainer == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise ValueError("--trainer is deepspeed, but the package deepspeed is not installed; see requirements-gpu.txt")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if config.trainer == "torch" and ranks > 1:
        raise ValueError(f"--trainer is torch, but {ranks} ranks were started; only deepspeed uses more than one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is also stopped
    if config.trainer == "torch":
        return 0
    if config.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from freshper.trainer_deepspeed import join_ranks

    return join_ranks(config)


def make_trainer(policy: Policy, config: Config) -> TorchTrainer:
    """The trainer behind --trainer. With several ranks, each makes one."""
    updates = config.iterations * (config.ppo_epochs + config.replay_ratio)
    if config.trainer == "torch":
        return TorchTrainer(policy, config, updates)
    from freshper.trainer_deepspeed import DeepSpeedTrainer

    return DeepSpeedTrainer(policy, config, updates)


def make_engine(policy: Policy, config: Config) -> HFEngine:
    """The engine behind --engine."""
    return HFEngine(policy, Sampling(config.temperature, config.top_k, config.top_p), config.seed)


@contextlib.contextmanager
def backends(policy: Policy, config: Config) -> Iterator[tuple[TorchTrainer, HFEngine]]:
    """Trainer and engine of rank 0. Afterwards the policy's model is whole and other ranks have been told to stop;
    where a rank is what failed, no one waits for it."""
    trainer = make_trainer(policy, config)
    engine = make_engine(policy, config)
    try:
        yield trainer, engine
    except (KeyboardInterrupt, NonFiniteError):
        trainer.close()  # the other ranks are fine
        raise
    trainer.close()
