"""Make the environments, the policy, the trainer and the engine of a run. vLLM and DeepSpeed are
imported only if chosen.

hf+torch          one process, a CPU or one GPU; needs requirements.txt only
vllm+deepspeed    the paper's (section 4.1: ROLL with vLLM and DeepSpeed); needs the extra `gpu`
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import date
from importlib.util import find_spec
from typing import cast

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from envs import ENVS
from envs.base import EVAL_SEEDS, TextEnv, UserError
from envs.check import check_environment
from envs.search import retrieve
from freshper.checkpoint import Saved, find_saved
from freshper.config import Config
from freshper.engine_hf import HFEngine, Sampling
from freshper.errors import reason_of
from freshper.models import Policy, load_policy
from freshper.rollout import Engine
from freshper.tiny import choose_threads, keep_freed_memory, tiny_model
from freshper.trainer import TorchTrainer

# Share of the memory that a backward pass may keep. If a micro-batch needs more, each layer is
# computed again.
ACTIVATIONS = 0.2
# Bounds of `mismatch` under vLLM, at temperature 1. SmolLM2-135M has 5e-6 and 0.04.
MAX_MISMATCH = {"float32": 1e-4, "bfloat16": 0.2}


def join_ranks(config: Config) -> int:
    """Meet the other ranks, if DeepSpeed trains, and return the number of this one. Raises
    UserError if --backend is not installed, or cannot train on several ranks."""
    for package in ("vllm", "deepspeed"):
        if package in config.backend and not find_spec(package):
            raise UserError(
                f"--backend is {config.backend}, but {package} is not installed (docs/gpus.md)"
            )
    if config.trainer == "torch":
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UserError(f"--backend is {config.backend}, but several ranks need deepspeed")
        return 0
    if config.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from freshper import trainer_deepspeed

    return trainer_deepspeed.join_ranks(config)


def serve(config: Config) -> int:
    """Be a rank other than 0: compute a share of the updates until rank 0 ends. Returns the exit
    status."""
    from freshper import trainer_deepspeed

    trainer_deepspeed.meet()  # now rank 0 has the lock of the run, and all read the same checkpoint
    policy = load(config, find_saved(config.resume), make_env(config))
    return trainer_deepspeed.serve(make_trainer(policy, config))


def make_envs(config: Config) -> list[TextEnv]:
    """Make as many environments as episodes are played at once. Raises UserError if the task, its
    --data or the server at --search_url cannot be used."""
    env = make_env(config)
    check_environment(env)
    if config.search_url and retrieve(config.search_url, ["test"], 1) == [[]]:
        raise UserError(f"--search_url is {config.search_url}, whose server finds nothing")
    # Those with data share its rows.
    n = max(config.rollout_batch_size, config.eval_episodes)
    return [env, *(make_env(config, env.rows) for _ in range(n - 1))]


@contextlib.contextmanager
def backends(
    config: Config, saved: Saved | None, env: TextEnv
) -> Iterator[tuple[TorchTrainer, Engine]]:
    """Yield rank 0's trainer, with the policy of a checkpoint if there is one, and an engine with
    its weights. Their processes end afterwards."""
    if config.trainer == "deepspeed":
        from freshper import trainer_deepspeed

        trainer_deepspeed.meet()  # the other ranks wait in `serve` until this one has the lock
    policy = load(config, saved, env)
    check_rows(policy, env, config)
    with contextlib.closing(make_trainer(policy, config)) as trainer:
        if config.engine == "hf":
            yield trainer, HFEngine(policy, Sampling(config.temperature), config.seed)
            return

        from freshper.engine_vllm import VLLMEngine

        # vLLM must know how many images an episode has.
        with contextlib.closing(VLLMEngine(policy, config, trainer, env)) as engine:
            yield trainer, engine


def set_up_process(config: Config, saved: Saved | None) -> None:
    """Choose threads, memory, messages and torch's random numbers of this process."""
    if "OMP_NUM_THREADS" not in os.environ:
        if saved:
            torch.set_num_threads(min(saved.threads, torch.get_num_threads()))
        elif config.preset == "tiny" and config.trainer == "torch":
            choose_threads()
    keep_freed_memory()
    logging.disable_progress_bar()
    torch.manual_seed(config.seed)  # for forks: nothing here draws from it


def make_env(config: Config, rows: Mapping[str, list] | None = None) -> TextEnv:
    """Make the environment of --env, with the rows of --data if they have been read. Prompts and
    images of a tiny model are terse and small, and some of its tasks are easier."""
    task = ENVS[config.env]
    names = ("format_penalty", "max_turns", *task.settings)
    arguments = {name: getattr(config, name) for name in names}
    if config.preset == "tiny":
        arguments |= task.tiny
    if rows:
        arguments["rows"] = rows
    return task(style="terse" if config.preset == "tiny" else "full", **arguments)


def load(config: Config, saved: Saved | None, env: TextEnv) -> Policy:
    """Set up this process, and load the policy of a run, or of its checkpoint. Raises UserError if
    that fails, or if it cannot read an observation of the task."""
    set_up_process(config, saved)
    observation, _ = env.reset(seed=EVAL_SEEDS)
    name = config.model
    today = date.today()
    if saved:
        name = str(saved.folder)
        today = saved.today
    elif name == "tiny":
        name = str(tiny_model(config.env))

    # Plain torch keeps float32 parameters and computes in --dtype. DeepSpeed keeps its own copy.
    mixed = config.trainer == "torch" and config.dtype == "bfloat16"
    dtype = torch.float32 if mixed else getattr(torch, config.dtype)
    try:
        policy = load_policy(
            name,
            config.device,
            dtype,
            config.max_tokens,
            freeze_vision=config.preset == "tiny",
            mixed=mixed,
            today=today,
        )
        if observation.images and not policy.image_processor:
            raise UserError(f"it reads text only, but --env {config.env} shows images")
        policy.user_turn(observation)
        policy.bridge(observation, closed=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    # A folder of another program may raise anything: a panic of `tokenizers` is no Exception.
    except BaseException as error:
        raise UserError(
            f"--model is {name}, but must be a chat model that can be loaded: {reason_of(error)}"
        ) from error

    # It is saved with the model. A hub model's own may be invalid, and then the save would fail.
    policy.model.generation_config = GenerationConfig(
        eos_token_id=policy.eos_id, suppress_tokens=policy.suppressed_ids
    )
    logging.set_verbosity_error()  # what it warned of while it loaded, it would say at each save
    return policy


def check_rows(policy: Policy, env: TextEnv, config: Config) -> None:
    """Raise UserError unless the policy can read the first turn of each row, and has room for a
    reply."""
    needed = 0
    for first, rows in zip((0, EVAL_SEEDS), env.rows.values()):
        for seed in range(first, first + len(rows)):
            observation, _ = env.reset(seed=seed)
            needed = max(needed, len(policy.user_turn(observation)) + config.max_new_tokens)
    if needed > config.max_tokens:
        raise UserError(
            f"--max_tokens is {config.max_tokens}, but must be at least {needed} "
            f"for the longest row of {config.data}"
        )


def total_memory(device: str) -> int:
    """Return the memory of the GPU, or of this machine, in bytes."""
    if device == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def make_trainer(policy: Policy, config: Config) -> TorchTrainer:
    """Make the trainer of this rank. That of rank 0 also runs those of the others."""
    text = policy.model.config.get_text_config()
    tokens = config.micro_batch_size * config.max_tokens
    # Bytes: Korthikanti et al., arXiv 2205.05198, without those of the attention.
    activations = 34 * tokens * text.num_hidden_layers * text.hidden_size
    if activations > ACTIVATIONS * total_memory(config.device):
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})

    updates = config.iterations * config.updates_per_iteration
    if config.trainer == "torch":
        trainer = TorchTrainer(policy, config, updates)
    else:
        from freshper.trainer_deepspeed import DeepSpeedTrainer, RankZero

        trainer = DeepSpeedTrainer(policy, config, updates)
    if config.engine == "vllm":
        trainer.max_mismatch = MAX_MISMATCH[config.dtype] / config.temperature
    if config.trainer == "torch" or trainer.rank > 0:
        return trainer
    # `RankZero` has the methods of its trainer.
    return cast(TorchTrainer, RankZero(cast(DeepSpeedTrainer, trainer)))
