"""Tiny Qwen2 and Qwen2.5-VL models, built from scratch for machines without pretrained weights.

Paper: appendix D (Qwen2.5-0.5B-Instruct, Qwen2.5-VL-3B-Instruct). Same transformers classes, 0.1 to 0.2 M parameters,
and a tokenizer with Qwen's special tokens and chat template over bytes and a few whole words. The warm start
(freshper/warm_start.py) teaches them to write a readable reply, which RL needs. The models of FrozenLake and NQ come
with the repository (freshper/weights; one that is deleted there is built anew), others are built at first use.

    python -m freshper.tiny --env frozenlake gsm8k     find or build models, and describe them
"""

import argparse
import ctypes
import hashlib
import inspect
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from envs import ENVS
from envs.base import EVAL_SEEDS, TextEnv
from freshper.engine_hf import HFEngine, Sampling
from freshper.models import Policy, load_policy
from freshper.presets import defaults
from freshper.report import summarize
from freshper.rollout import rollout
from freshper.warm_start import warm_start

SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>".split()
WORDS = ("system", "user", "assistant", "<answer>", "</answer>", "<think>", "</think>")  # and those of the task
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HIDDEN = 64
SHIPPED = Path(__file__).parent / "weights"


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep freed memory: giving activations back at every step halves the speed on a CPU."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for parameter, value in ((-1, 2**31 - 1), (-2, 2**28), (-3, 2**30)):  # trim threshold, top pad, mmap threshold
            mallopt(parameter, value)


def build_tokenizer(words: tuple[str, ...]) -> transformers.PreTrainedTokenizerFast:
    """Build a tokenizer of 256 bytes, Qwen's special tokens, WORDS and a task's `words`: it can encode any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken(word, normalized=False) for word in (*WORDS, *words)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_policy(env: TextEnv, seed: int = 0, heads: int = 4) -> Policy:
    """Build a policy with random weights for a task: a Qwen2, or a Qwen2.5-VL (a token per 14 x 14 pixels) if it shows
    images. vLLM on a CPU wants heads of at least 32 numbers, 2 of them; with 4 of 16 images are learned better."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(env.words)
    # at Qwen's theta of 1e6 the angle of one column of an image would be 1e-4 rad, too little for a tiny model
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
    # at transformers' initializer_range of 0.02 so small a model hardly starts to learn
    language: dict[str, Any] = {"initializer_range": 0.1, "max_position_embeddings": 4096, "rope_parameters": rope}
    language |= {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2}
    language |= {"num_attention_heads": heads, "num_key_value_heads": heads, "tie_word_embeddings": False}
    language |= {"vocab_size": len(tokenizer), "bos_token_id": None}
    language |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    processor = None
    if env.reset(seed=0)[0].images:
        angles = HIDDEN // heads // 2  # of a head's rotary embedding: a quarter for time, the rest for row and column
        rope["mrope_section"] = [angles // 4, 3 * angles // 8, 3 * angles // 8]
        vision: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
        vision |= {"patch_size": 7, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [0]}
        vision |= {"out_hidden_size": HIDDEN, "initializer_range": 0.1}
        marks = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
        whole = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in marks.items()}
        whole |= {"tie_word_embeddings": False, "initializer_range": 0.1}
        config = transformers.Qwen2_5_VLConfig(text_config=language, vision_config=vision, **whole)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        processor = Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, min_pixels=14 * 14, max_pixels=14 * 14 * 256)
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**language))
    # Bytes can be read but not sampled: no reply needs one, and 256 tokens that the warm start never shows share one
    # direction of the output layer, into which RL drifts.
    model.generation_config.suppress_tokens = list(range(256))
    model.config.freshper_tiny = True  # `--model` with a checkpoint of it keeps the tiny preset
    return Policy(model, tokenizer, processor)


def tiny_model(name: str) -> Path:
    """Return the folder of the warm-started model of a task: the repository's if it has one, else the cache's
    (FRESHPER_CACHE, or ~/.cache/freshper), built if it is missing.

    The cache's name ends with a hash over the source files that shape it: this one, the warm start's, the task's.
    """
    if (SHIPPED / name).is_dir():
        return SHIPPED / name
    task = sys.modules[type(ENVS[name]()).__module__]
    used = [m for m in map(inspect.getmodule, vars(task).values()) if m and m.__name__.startswith("envs.")]
    here = Path(__file__)
    sources = {here, here.with_name("warm_start.py"), *(Path(inspect.getfile(m)) for m in (task, *used))}
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
    root = Path(os.environ.get("FRESHPER_CACHE") or Path.home() / ".cache" / "freshper")
    folder = root / f"{name}-{digest[:8]}"
    if not folder.is_dir():
        policy = build_policy(ENVS[name]())
        warm_start(policy, ENVS[name], ENVS[name]().warm_start)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        policy.save(str(unfinished))
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder


def describe(folder: Path, name: str, episodes: int = 1000) -> dict[str, float]:
    """Play held-out episodes with a warm-started model; print and return the means of `summarize`.

    Raises RuntimeError if its success differs from the random policy's by more than three standard errors of the
    difference between two means of played episodes.
    """
    policy = load_policy(str(folder), "cpu", torch.float32)
    preset = defaults("tiny", name, "freshper")
    envs, seeds = [ENVS[name]() for _ in range(episodes)], [EVAL_SEEDS + k for k in range(episodes)]
    engine = HFEngine(policy, Sampling(), seed=0)
    played = summarize(rollout(engine, policy, envs, seeds, preset["max_tokens"], preset["max_new_tokens"]))
    random = sum(env.baselines(seed)["random"] for env, seed in zip(envs, seeds, strict=True)) / episodes
    print(f"{folder}\n  {policy.model.num_parameters():,} parameters, {len(policy.tokenizer)} tokens")
    print(f"  {episodes} held-out episodes: success {played['success']:.3f}, random policy {random:.3f}")
    print(f"  replies that could not be read: {played['invalid']:.2%}")
    if abs(played["success"] - random) > 3 * (2 * random * (1 - random) / episodes) ** 0.5:
        raise RuntimeError(f"the {name} model must do as well as the random policy, and no better: build it anew")
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description="Build (or find) and describe the tiny models.")
    parser.add_argument("--env", choices=list(ENVS), nargs="+", default=["frozenlake", "frozenlake_vlm"])
    names = parser.parse_args().env
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in names:
        describe(tiny_model(name), name)


if __name__ == "__main__":
    main()
