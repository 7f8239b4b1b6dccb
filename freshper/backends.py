"""Which model, engine and trainer a run uses. vLLM and DeepSpeed are imported only if chosen.

    hf+torch          one process, a CPU or one GPU; needs requirements.txt only
    vllm+deepspeed    the paper's (section 4.1: ROLL with vLLM and DeepSpeed); needs requirements-gpu.txt

The preset follows from the model, the backend from what is installed.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError

from envs.base import EVAL_SEEDS, Observation
from freshper.checkpoint import newest
from freshper.config import Config
from freshper.engine_hf import HFEngine, Sampling
from freshper.flags import validate
from freshper.models import Policy, load_policy
from freshper.rollout import Conversation
from freshper.tiny import tiny_model
from freshper.trainer import TorchTrainer

UNUSABLE = AttributeError, KeyError, OSError, RuntimeError, ValueError  # raised for a folder that is no chat model
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}  # of a logit


def choose_backend(config: Config) -> None:
    """Replace `--backend auto` by a concrete one and note why. Raises ValueError if a package is missing or the flags
    do not go together."""
    missing = [package for package in ("vllm", "deepspeed") if importlib.util.find_spec(package) is None]
    if config.backend == "auto":
        why = "the tiny model runs on the CPU" if config.tiny else "torch finds no GPU"
        if config.device == "cuda":
            why = f"{missing[0]} is not installed" if missing else ""
        config.backend = "hf+torch" if why else "vllm+deepspeed"
        config.notes += (f"backend {config.backend}: {why or 'there is a GPU, with vLLM and DeepSpeed'}",)
    for package in missing:
        if package in config.backend:
            raise ValueError(f"--backend is {config.backend}, but {package} is not installed: see requirements-gpu.txt")
    if config.trainer == "torch" and (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(f"--backend is {config.backend}, but must train with deepspeed on the {ranks} ranks started")
    validate(config)


def join_ranks(config: Config) -> int:
    """Meet the other ranks, if DeepSpeed trains, and return this one's number."""
    if config.trainer == "torch":
        return 0
    if config.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from freshper import trainer_deepspeed

    return trainer_deepspeed.join_ranks(config)


def model_folder(config: Config) -> str:
    """Return what the policy is loaded from: the newest checkpoint of --resume, a tiny model, or --model. Raises
    ValueError if no checkpoint of an earlier run can be read, or if that run has done as many iterations."""
    saved = newest(Path(config.resume)) if config.resume else None
    if saved and "iterations" in config.given:
        done = torch.load(saved / "state.pt", weights_only=True, mmap=True)["report"]["rows"][-1]["iteration"]
        if done >= config.iterations:
            which = "finished" if done == config.iterations else "longer"
            raise ValueError(
                f"--iterations is {config.iterations}, but must be above {done}: the run in {config.resume} is {which}"
            )
    return str(saved or (tiny_model(config.env) if config.model == "tiny" else config.model))


def load(config: Config, seeds: list[int]) -> Policy:
    """Load the policy of a run and check it on the first prompts of `seeds`.

    Raises ValueError if it is no chat model, cannot read --env's images, or has no room for the first turn.
    """
    name, env = model_folder(config), config.make_env()
    observations = [env.reset(seed=seed)[0] for seed in (*seeds, EVAL_SEEDS)]
    # plain torch keeps float32 master weights and computes in --dtype; DeepSpeed keeps its own
    mixed = config.dtype == "bfloat16" and config.trainer == "torch"
    dtype = torch.float32 if mixed else getattr(torch, config.dtype)
    try:
        policy = load_policy(name, config.device, dtype, freeze_vision=config.tiny)
        policy.mixed = mixed
        check(policy, config)
    except (*UNUSABLE, SafetensorError, StrictDataclassError, TemplateError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--model is {name}, but must be a chat model that can be loaded: {reason}") from error
    if any(o.images for o in observations) and not policy.image_processor:
        raise ValueError(f"--model is {name}, which reads text only, but --env {config.env} shows images")
    longest = max(len(policy.first_prompt(o)) for o in observations)
    if longest + config.max_new_tokens > config.max_tokens:
        raise ValueError(
            f"--max_tokens is {config.max_tokens}, but must be at least {longest + config.max_new_tokens}: the first "
            f"turn takes a prompt of {longest} and --max_new_tokens {config.max_new_tokens}"
        )
    return policy


@torch.no_grad()
def check(policy: Policy, config: Config) -> None:
    """Compare trainer and engine with the model's own forward, on a text as long as a conversation may get.

    Raises ValueError if the logits differ (the embedded engine knows no sliding windows, for example), or if the
    tokenizer is that of another model.
    """
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    if not policy.tokenizer.encode("text", add_special_tokens=False) or len(policy.tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer, of {len(policy.tokenizer)} tokens, does not belong to it ({vocabulary})")
    text = policy.first_prompt(Observation("Is this computed right? " * config.max_tokens))[: config.max_tokens]
    tokens = torch.tensor([text], device=policy.device)
    own = policy.model(input_ids=tokens, logits_to_keep=1).logits[0, -1].float()  # [V]
    positions = torch.from_numpy(policy.positions(np.array(text), []))[:, None].to(policy.device)
    found = {"the trainer": policy.logits(policy.hidden(tokens, positions, [])[:, -1])[0]}
    if config.engine == "hf":
        engine = HFEngine(policy, Sampling(temperature=1.0), seed=0)
        found["the embedded engine"] = engine.logits(Conversation(text))
    for name, logits in found.items():
        difference = (own - logits)[logits.isfinite()].abs().max().item()
        if not difference <= TOLERANCE[config.dtype]:
            raise ValueError(
                f"{name} computes other logits than a {type(policy.model).__name__} itself, by {difference:.2g} after "
                f"{len(text)} tokens; with a smaller --max_tokens they may agree"
            )


def make_trainer(policy: Policy, config: Config) -> Any:
    """Make this rank's trainer."""
    updates = config.iterations * (config.ppo_epochs + config.replay_ratio)
    if config.trainer == "torch":
        return TorchTrainer(policy, config, updates)
    from freshper.trainer_deepspeed import DeepSpeedTrainer

    return DeepSpeedTrainer(policy, config, updates)


@contextlib.contextmanager
def backends(policy: Policy, config: Config) -> Iterator[tuple[TorchTrainer, Any]]:
    """Yield rank 0's trainer and an engine with its weights; whatever happens, their processes end afterwards."""
    with contextlib.closing(make_trainer(policy, config)) as trainer:
        engine: Any
        if config.engine == "hf":
            engine = HFEngine(policy, Sampling(config.temperature, config.top_k, config.top_p), config.seed)
        else:
            from freshper.engine_vllm import VLLMEngine

            engine = VLLMEngine(policy, config, trainer)
        with contextlib.closing(engine):
            yield trainer, engine
