"""The policy that a run starts from, with everything checked that a model folder can get wrong.

What fails here fails before anything is written, in a sentence of ours rather than in the depths of a library.
Not in the paper.
"""

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError

from envs.base import EVAL_SEEDS, Observation
from freshper.config import Config
from freshper.models import Policy, load_policy
from freshper.rollout import training_seeds
from freshper.tiny import tiny_model


def load(config: Config) -> Policy:
    """The policy behind --model, or of the checkpoint. Raises ValueError where there is none, where it is not a
    chat model, cannot see --env's pictures, or has no room for the first turn of an episode."""
    try:
        torch.zeros(1, device=config.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--device is {config.device}, but must be a torch device of this machine: {reason}"
        ) from error
    env = config.make_env()
    seeds = training_seeds(config.seed, 0, config.rollout_batch_size) + [EVAL_SEEDS]
    observations = [env.reset(seed=seed)[0] for seed in seeds]
    if config.checkpoint:
        name = str(config.checkpoint.folder)
    else:
        name = str(tiny_model(config.env)) if config.model == "tiny" else config.model
    try:
        policy = load_policy(name, config.device, getattr(torch, config.dtype), config.freeze_vision)
        longest = check_chat(policy, observations)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, TemplateError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--model is {name}, but must be a chat model that can be loaded: {reason}") from error
    if any(o.images for o in observations) and not policy.image_processor:
        raise ValueError(f"--model is {name}, which reads text only, but --env {config.env} shows pictures")
    needed = longest + config.max_new_tokens
    if needed > config.max_tokens:
        raise ValueError(
            f"--max_tokens is {config.max_tokens}, but must be at least {needed}: the first turn takes a prompt of "
            f"{longest} and --max_new_tokens {config.max_new_tokens}"
        )
    for parameter in policy.model.parameters():  # out of the file's mapping, whose alignment can show in a last bit
        parameter.data = parameter.data.clone()
    return policy


def check_chat(policy: Policy, observations: list[Observation]) -> int:
    """The length of the longest first prompt. Raises ValueError where the model, its tokenizer or its chat template
    cannot hold a conversation."""
    kind = type(policy.model).__name__
    if not (hasattr(policy.model, "model") and hasattr(policy.model, "lm_head")):
        raise ValueError(f"a {kind} is not a decoder with a `model` and an `lm_head`")
    if policy.tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token, so no reply could end")
    if policy.image_processor is None:  # what a text model makes of pictures, nobody wants to know
        observations = [Observation(o.text) for o in observations]
    try:
        lengths = [len(policy.first_prompt(o)) for o in observations]
        lengths += [len(policy.bridge(observations[0], closed=True))]
    except (ValueError, IndexError) as error:
        raise ValueError("the chat template does not show a user's text exactly once a turn") from error
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    if min(lengths) < 2 or len(policy.tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer, of {len(policy.tokenizer)} tokens, does not belong to it ({vocabulary})")
    return max(lengths[:-1])
