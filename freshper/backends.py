"""Which model, engine and trainer a run uses. vLLM and DeepSpeed are imported only if chosen.

hf+torch          one process, a CPU or one GPU; needs requirements.txt only
vllm+deepspeed    the paper's (section 4.1: ROLL with vLLM and DeepSpeed); needs requirements-gpu.txt
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import GenerationConfig

from envs.base import EVAL_SEEDS, Observation, TextEnv, check_environment
from envs.search_server import retrieve
from freshper.checkpoint import find_saved
from freshper.config import Config
from freshper.engine_hf import HFEngine, Sampling
from freshper.flags import validate
from freshper.models import TOLERANCE, Policy, load_policy
from freshper.rollout import Conversation
from freshper.tiny import tiny_model
from freshper.trainer import TorchTrainer

MAX_ASPECT = 200  # of an image: transformers' image processor takes no other


def choose_backend(config: Config) -> None:
    """Replace `--backend auto` by a concrete one. Raises ValueError if a package is missing or flags do not fit it."""
    missing = [
        package for package in ("vllm", "deepspeed") if importlib.util.find_spec(package) is None
    ]
    if config.backend == "auto":
        config.backend = "vllm+deepspeed" if config.device == "cuda" and not missing else "hf+torch"
        lacks = f", without {' and '.join(missing)}" if missing else ""
        config.notes += (f"backend {config.backend}: on {config.device}{lacks}",)
    if lacking := [package for package in missing if package in config.backend]:
        raise ValueError(
            f"--backend is {config.backend}, but {lacking[0]} is not installed: see requirements-gpu.txt"
        )
    if config.trainer == "torch" and (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"--backend is {config.backend}, but must train with deepspeed on the {ranks} ranks started"
        )
    validate(config)


def join_ranks(config: Config) -> int:
    """Meet the other ranks, if DeepSpeed trains, and return this one's number."""
    if config.trainer == "torch":
        return 0
    if config.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from freshper import trainer_deepspeed

    return trainer_deepspeed.join_ranks(config)


def load(config: Config, seeds: list[int]) -> Policy:
    """Load the policy of a run or its checkpoint, check it on the first prompts of `seeds`, and leave
    out rows of --data that do not fit it. Raises ValueError if it cannot be loaded, cannot read --env's
    images, has no room for the first turn, or has done --iterations already; if --env breaks a promise
    of environments, or the server at --search_url does not answer."""
    env = config.make_env()
    if not config.search_url:  # a server of one's own would be asked
        check_environment(env)
    saved = find_saved(config) if config.resume else None
    name = str(saved or (tiny_model(config.env) if config.model == "tiny" else config.model))
    if config.search_url:
        try:
            retrieve(config.search_url, ["test"], 1)
        except ConnectionError as error:
            raise ValueError(
                f"--search_url must be the address of a search server: {error}"
            ) from error

    observations = [env.reset(seed=seed)[0] for seed in (*seeds, EVAL_SEEDS)]
    # plain torch keeps float32 master weights and computes in --dtype; DeepSpeed keeps its own
    mixed = config.dtype == "bfloat16" and config.trainer == "torch"
    dtype = torch.float32 if mixed else getattr(torch, config.dtype)
    with refused(name, "loaded"):
        policy = load_policy(name, config.device, dtype, freeze_vision=config.tiny)
        known, vocabulary = (
            len(policy.tokenizer),
            policy.model.get_input_embeddings().num_embeddings,
        )
        if not policy.tokenizer.encode("text", add_special_tokens=False) or known > vocabulary:
            raise ValueError(
                f"its tokenizer, of {known} tokens, does not belong to it ({vocabulary})"
            )
    policy.model.generation_config = generation_config(policy, config)
    positions = (
        getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
        or config.max_tokens
    )
    if config.max_tokens > positions:
        raise ValueError(
            f"--max_tokens is {config.max_tokens}, but must be at most {positions} with --model {name}"
        )
    if any(o.images for o in observations) and not policy.image_processor:
        raise ValueError(
            f"--model is {name}, which reads text only, but --env {config.env} shows images"
        )
    with refused(name, "computed"):
        check(policy, config)
        for first in (
            True,
            False,
        ):  # both forms of its chat template, with images if the task has any
            shown = tuple(np.zeros((56, 56, 3), dtype=np.uint8) for _ in observations[-1].images)
            policy.user_turn(Observation("?", shown), first)
    policy.mixed = mixed
    if env.rows:
        config.rows = rows_that_fit(policy, env, config.max_tokens - config.max_new_tokens)
        return policy

    longest = max(len(policy.user_turn(o)) for o in observations)
    if (needed := longest + config.max_new_tokens) > config.max_tokens:
        raise ValueError(
            f"--max_tokens is {config.max_tokens}, but must be at least {needed} for the first turn"
        )
    return policy


def rows_that_fit(policy: Policy, env: TextEnv, room: int) -> dict[str, list]:
    """Return the environment's rows by split, in their order, and as `left_out` those whose first turn
    takes more than `room` tokens or has an image too narrow. Raises ValueError if a split has no others."""
    rows: dict[str, list] = {"train": [], "held_out": [], "left_out": []}
    for split, first in (("train", 0), ("held_out", EVAL_SEEDS)):
        for k, row in enumerate(env.rows[split]):
            seed = first + (k - first) % len(env.rows[split])  # the first that asks for this row
            observation = env.reset(seed=seed)[0]
            sizes = [image.shape[:2] for image in observation.images]
            readable = all(max(size) <= MAX_ASPECT * min(size) for size in sizes)
            fits = readable and len(policy.user_turn(observation)) <= room
            rows[split if fits else "left_out"].append(row)

        if not rows[split]:
            limit = f"{room} tokens, --max_tokens less --max_new_tokens"
            raise ValueError(
                f"--data is {env.data}, but no {split} row has a first turn of at most {limit}"
            )
    return rows


@contextlib.contextmanager
def refused(name: str, how: str) -> Iterator[None]:
    """Make one ValueError of what transformers, or a model of another build, may raise in the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"--model is {name}, but the GPU's memory is too small for it: see docs/gpus.md"
        ) from error
    except (OSError, ValueError, LookupError, AttributeError, TypeError, ImportError, RuntimeError, ArithmeticError,
            MemoryError, SafetensorError, TemplateError, StrictDataclassError) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"--model is {name}, but must be a chat model that can be {how}: {reason}"
        ) from error


def generation_config(policy: Policy, config: Config) -> GenerationConfig:
    """Return how the engine samples, to be saved with the model. That of a model from a hub may not be savable."""
    return GenerationConfig(
        do_sample=True,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        eos_token_id=policy.eos_id,
        pad_token_id=policy.tokenizer.pad_token_id,
        suppress_tokens=policy.suppressed_ids,
    )


@torch.no_grad()
def check(policy: Policy, config: Config) -> None:
    """Compare trainer and engine with the model's own forward, in the precision of its weights, on a text beyond any
    window of its attention that a conversation may reach. Raises ValueError if logits differ: the engine knows no
    sliding windows."""
    window = getattr(policy.model.config.get_text_config(), "sliding_window", 0) or 0
    length = min(config.max_tokens, max(512, 2 * window))
    text = policy.user_turn(Observation("Is this computed right? " * length))[:length]
    tokens = torch.tensor([text], device=policy.device)
    own = policy.model(input_ids=tokens, logits_to_keep=1).logits[0, -1].float()  # [V]
    positions = policy.positions(text, [])[:, None]
    found = {"the trainer": policy.logits(policy.hidden(tokens, positions, [])[:, -1])[0]}
    if config.engine == "hf":
        found["the embedded engine"] = HFEngine(policy, Sampling(), seed=0).logits(
            Conversation(text)
        )
    for name, logits in found.items():
        difference = (own - logits)[logits.isfinite()].abs().max().item()
        if (
            not difference
            <= TOLERANCE["float32" if policy.model.dtype == torch.float32 else "bfloat16"]
        ):
            other = f"other logits than a {type(policy.model).__name__} itself, by {difference:.2g}"
            raise ValueError(f"{name} computes {other}; try a smaller --max_tokens")


def make_trainer(policy: Policy, config: Config) -> Any:
    """Make the trainer of rank 0, of which the other ranks are a part."""
    updates = config.iterations * (config.ppo_epochs + config.replay_ratio)
    if config.trainer == "torch":
        return TorchTrainer(policy, config, updates)
    from freshper.trainer_deepspeed import DeepSpeedRanks, RankZero

    return RankZero(TorchTrainer(policy, config, updates, DeepSpeedRanks))


def serve(policy: Policy, config: Config) -> int:
    """Compute the share of a rank other than 0 of all updates. Returns the exit status."""
    from freshper import trainer_deepspeed

    updates = config.iterations * (config.ppo_epochs + config.replay_ratio)
    trainer = TorchTrainer(policy, config, updates, trainer_deepspeed.DeepSpeedRanks)
    return trainer_deepspeed.serve(trainer)


@contextlib.contextmanager
def backends(policy: Policy, config: Config) -> Iterator[tuple[TorchTrainer, Any]]:
    """Yield rank 0's trainer and an engine with its weights; their processes end afterwards."""
    with contextlib.closing(make_trainer(policy, config)) as trainer:
        if config.engine == "hf":
            yield (
                trainer,
                HFEngine(
                    policy, Sampling(config.temperature, config.top_k, config.top_p), config.seed
                ),
            )
            return
        from freshper.engine_vllm import VLLMEngine

        with contextlib.closing(VLLMEngine(policy, config, trainer)) as engine:
            yield trainer, engine
