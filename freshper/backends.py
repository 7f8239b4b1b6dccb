"""Which model, engine and trainer a run uses. vLLM and DeepSpeed are imported only if chosen.

hf+torch          one process, a CPU or one GPU; needs requirements.txt only
vllm+deepspeed    the paper's (section 4.1: ROLL with vLLM and DeepSpeed); needs
                  requirements-gpu.txt
"""

import contextlib
import copy
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import GenerationConfig

from envs.base import EVAL_SEEDS, Observation, TextEnv
from envs.check import check_environment
from envs.search import retrieve
from freshper.checkpoint import Saved, find_saved
from freshper.config import Config
from freshper.engine_hf import HFEngine, Sampling
from freshper.flags import validate
from freshper.models import TOLERANCE, Policy, load_policy
from freshper.rollout import Conversation, Engine
from freshper.tiny import tiny_model
from freshper.trainer import TorchTrainer

# Bytes kept for the backward pass. If a micro-batch needs more, each layer is computed again.
ACTIVATIONS = 5 * 2**30
# The image processor of transformers takes no image with longer sides in relation to each other.
MAX_ASPECT = 200


def choose_backend(
    config: Config, flags_given: tuple[str, ...] = ()
) -> tuple[Config, tuple[str, ...]]:
    """Return the settings with a concrete backend, and a note on it if it was `auto`. Raises
    ValueError if a package is missing, or if one of `flags_given` does not fit the backend."""
    missing = [name for name in ("vllm", "deepspeed") if importlib.util.find_spec(name) is None]
    notes: tuple[str, ...] = ()
    if config.backend == "auto":
        on_gpu = config.device == "cuda" and not missing
        config = dataclasses.replace(config, backend="vllm+deepspeed" if on_gpu else "hf+torch")
        without = f", without {' and '.join(missing)}" if missing else ""
        notes = (f"backend {config.backend}: on {config.device}{without}",)

    backend = f"--backend is {config.backend}, but"
    for name in missing:
        if name in config.backend:
            raise ValueError(f"{backend} {name} is not installed: see requirements-gpu.txt")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if config.trainer == "torch" and ranks > 1:
        raise ValueError(f"{backend} must train with deepspeed on the {ranks} ranks started")
    validate(config, flags_given)
    return config, notes


def join_ranks(config: Config) -> int:
    """Meet the other ranks, if DeepSpeed trains, and return the number of this one."""
    if config.trainer == "torch":
        return 0
    if config.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from freshper import trainer_deepspeed

    return trainer_deepspeed.join_ranks(config)


class Loaded(NamedTuple):
    """Hold what a run starts from."""

    policy: Policy
    make_env: Callable[[], TextEnv]  # with the rows of --data that fit the policy
    saved: Saved | None  # the checkpoint to resume from


def load(config: Config, flags_given: tuple[str, ...] = ()) -> Loaded:
    """Load the policy of a run or of its checkpoint, and check it on a first prompt.

    Raises ValueError if it cannot be loaded, cannot read --env's images, or has no room for the
    first turn; if --env breaks a promise of environments; if the server at --search_url does not
    answer; or if --iterations is one of `flags_given`, and the run has done as many already."""
    env = config.make_env()
    if config.search_url:
        check_search_server(config.search_url)
    else:
        # With a server, this check would send it queries.
        check_environment(env)

    saved = find_saved(config, flags_given) if config.resume else None
    name = config.model
    if saved:
        name = str(saved.folder)
    elif name == "tiny":
        name = str(tiny_model(config.env))
    observation, _ = env.reset(seed=EVAL_SEEDS)
    policy = load_model(name, config)
    check_model(policy, name, config, len(observation.images))

    rows = env.rows
    room = config.max_tokens - config.max_new_tokens
    if rows:
        rows = rows_that_fit(policy, env, room)
    else:
        length = len(policy.user_turn(observation))
        if length > room:
            needed = f"{length + config.max_new_tokens} for the first turn"
            raise ValueError(f"--max_tokens is {config.max_tokens}, but must be at least {needed}")

    def make_env() -> TextEnv:
        env = config.make_env()
        env.rows = rows
        return env

    return Loaded(policy, make_env, saved)


def check_search_server(url: str) -> None:
    """Raise ValueError if no search server answers at the address."""
    try:
        retrieve(url, ["test"], 1)
    except ConnectionError as error:
        raise ValueError(f"--search_url must be the address of a search server: {error}") from error


def load_model(name: str, config: Config) -> Policy:
    """Load a policy by hub id or folder. Raises ValueError if that fails, or if model and tokenizer
    do not belong together."""
    # Plain torch keeps float32 parameters and computes in --dtype. DeepSpeed keeps its own copy.
    dtype = "float32" if config.trainer == "torch" else config.dtype
    with refused(name, "loaded"):
        policy = load_policy(name, config.device, getattr(torch, dtype), freeze_vision=config.tiny)
        tokens = len(policy.tokenizer)
        embedded = policy.model.get_input_embeddings().num_embeddings
        if tokens > embedded or not policy.tokenizer.encode("text", add_special_tokens=False):
            raise ValueError(
                f"its tokenizer, of {tokens} tokens, does not belong to it ({embedded})"
            )

    # It says how the engine samples, and is saved with the model. A hub model's own may be invalid,
    # and then the save would fail.
    policy.model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        eos_token_id=policy.eos_id,
        pad_token_id=policy.tokenizer.pad_token_id,
        suppress_tokens=policy.suppressed_ids,
    )
    return policy


def check_model(policy: Policy, name: str, config: Config, n_images: int) -> None:
    """Raise ValueError if the model has too few positions, cannot read the `n_images` of a first
    turn, or is computed wrong. From then on it computes in --dtype."""
    text_config = policy.model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or config.max_tokens
    if config.max_tokens > positions:
        allowed = f"at most {positions} with --model {name}"
        raise ValueError(f"--max_tokens is {config.max_tokens}, but must be {allowed}")
    if n_images and not policy.image_processor:
        raise ValueError(
            f"--model is {name}, which reads text only, but --env {config.env} shows images"
        )

    with refused(name, "computed"):
        check(policy, config)
        # This renders both forms of its chat template.
        image = np.zeros((56, 56, 3), np.uint8)
        question = Observation("?", (image,) * n_images)
        policy.user_turn(question, True)
        policy.user_turn(question, False)
        if n_images:
            # The image processor may be another model's.
            policy.image_features([image])
            policy.features.clear()
    policy.mixed = config.trainer == "torch" and config.dtype == "bfloat16"


def rows_that_fit(policy: Policy, env: TextEnv, room: int) -> dict[str, list]:
    """Return the environment's rows by split, in their order, and as `left_out` those whose first
    turn takes more than `room` tokens or has an image too narrow. Raises ValueError if a split has
    no others."""
    rows: dict[str, list] = {"train": [], "held_out": [], "left_out": []}
    for split, first in (("train", 0), ("held_out", EVAL_SEEDS)):
        for k, row in enumerate(env.rows[split]):
            # This is the first seed of the split that gets this row.
            seed = first + (k - first) % len(env.rows[split])
            observation = env.reset(seed=seed)[0]
            rows[split if first_turn_fits(policy, observation, room) else "left_out"].append(row)

        if not rows[split]:
            limit = f"{room} tokens, --max_tokens less --max_new_tokens"
            raise ValueError(
                f"--data is {env.data}, but no {split} row has a first turn of at most {limit}"
            )
    return rows


def first_turn_fits(policy: Policy, observation: Observation, room: int) -> bool:
    """Return whether the policy can read the images of a first turn, and has room for it."""
    for image in observation.images:
        sides = image.shape[:2]
        if max(sides) > MAX_ASPECT * min(sides):
            return False
    return len(policy.user_turn(observation)) <= room


@contextlib.contextmanager
def refused(name: str, how: str) -> Iterator[None]:
    """Raise ValueError for whatever transformers, or a model of another build, may raise in the
    block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"--model is {name}, but the GPU's memory is too small for it: see docs/gpus.md"
        ) from error
    except (
        OSError, ValueError, LookupError, AttributeError, TypeError, ImportError, RuntimeError,
        ArithmeticError, MemoryError, SafetensorError, TemplateError, StrictDataclassError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"--model is {name}, but must be a chat model that can be {how}: {reason}"
        ) from error


def engine_logits(policy: Policy, tokens: list[int]) -> torch.Tensor:
    """Return the next-token logits of a conversation, [V], as the embedded engine computes them. It
    reads two chunks, so that the second one uses the cache."""
    engine = HFEngine(policy, Sampling(), seed=0)
    conversation = [Conversation(tokens)]
    cache = engine.cache_of(conversation)
    engine.feed(cache, conversation, [tokens[:-3]])
    return engine.feed(cache, conversation, [tokens[-3:]])[0]


@torch.no_grad()
def check(policy: Policy, config: Config) -> None:
    """Compare the logits of trainer and engine with those of the model's own forward pass, in the
    precision of its weights. The text is longer than any window of its attention that a
    conversation may reach, because the engine knows no sliding windows. Raises ValueError if the
    logits differ."""
    window = getattr(policy.model.config.get_text_config(), "sliding_window", 0) or 0
    length = min(config.max_tokens, max(512, 2 * window))
    text = policy.user_turn(Observation("Is this computed right? " * length))[:length]
    tokens = torch.tensor([text], device=policy.device)
    expected = policy.model(input_ids=tokens, logits_to_keep=1).logits[0, -1].float()  # [V]

    positions = policy.positions(text, [])[:, None]
    hidden = policy.hidden(tokens, positions, [])[:, -1]
    computed = {"the trainer": policy.logits(hidden)[0]}
    if config.engine == "hf":
        computed["the embedded engine"] = engine_logits(policy, text)

    dtype = "float32" if policy.model.dtype == torch.float32 else "bfloat16"
    for name, logits in computed.items():
        difference = (expected - logits)[logits.isfinite()].abs().max().item()
        # NaN is a difference, too
        if not difference <= TOLERANCE[dtype]:
            other = f"other logits than a {type(policy.model).__name__} itself, by {difference:.2g}"
            raise ValueError(f"{name} computes {other}; try a smaller --max_tokens")


def make_trainer(policy: Policy, config: Config) -> TorchTrainer:
    """Make the trainer of this rank. That of rank 0 also runs those of the others."""
    text = policy.model.config.get_text_config()
    tokens = config.micro_batch_size * config.max_tokens
    # Bytes: Korthikanti et al., arXiv 2205.05198, without those of the attention.
    activations = 34 * tokens * text.num_hidden_layers * text.hidden_size
    if activations > ACTIVATIONS:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})

    updates = config.iterations * config.updates_per_iteration
    if config.trainer == "torch":
        return TorchTrainer(policy, config, updates)
    from freshper.trainer_deepspeed import DeepSpeedRanks, RankZero

    trainer = TorchTrainer(policy, config, updates, DeepSpeedRanks)
    # `RankZero` has the methods of its trainer.
    return cast(TorchTrainer, RankZero(trainer)) if trainer.strategy.rank == 0 else trainer


def serve(policy: Policy, config: Config) -> int:
    """Compute the share of a rank other than 0 of all updates. Returns the exit status."""
    from freshper import trainer_deepspeed

    return trainer_deepspeed.serve(make_trainer(policy, config))


@contextlib.contextmanager
def backends(policy: Policy, config: Config, env: TextEnv) -> Iterator[tuple[TorchTrainer, Engine]]:
    """Yield rank 0's trainer and an engine with its weights. Their processes end afterwards. `env`
    is one of the run's, which vLLM must prepare for."""
    of_engine = policy
    if config.backend == "hf+deepspeed" and config.zero_stage == 3:
        # The trainer's model will have no whole parameters.
        of_engine = copy.deepcopy(policy)
        of_engine.freeze_vision = False  # as with the trainer's
    with contextlib.closing(make_trainer(policy, config)) as trainer:
        if config.engine == "hf":
            sampling = Sampling(config.temperature, config.top_k, config.top_p)
            yield trainer, HFEngine(of_engine, sampling, config.seed, shared=of_engine is policy)
            return

        from freshper.engine_vllm import VLLMEngine

        with contextlib.closing(VLLMEngine(policy, config, trainer, env)) as engine:
            yield trainer, engine
