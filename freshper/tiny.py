"""Tiny Qwen2 and Qwen2.5-VL, built from scratch: they stand in for the paper's models where no weights can be had.

Paper: appendix D (Qwen2.5-0.5B-Instruct, Qwen2.5-VL-3B-Instruct). Same transformers classes, 0.1 to 0.2 M
parameters, and a tokenizer with Qwen's special tokens and chat template over bytes and a few whole words.

RL needs a policy that can already write a legal reply; the warm start (freshper/warm_start.py) sees to that.
The weights that come with the repository were made by the second command and are used as long as their key,
which covers code and settings, fits; otherwise models are built once and cached.

    python -m freshper.tiny                 finds (or builds) those of FrozenLake and describes them
    python -m freshper.tiny --ship          also puts them where the repository keeps them
    python -m freshper.tiny --env gsm8k     the model of another task
"""

import argparse
import ast
import hashlib
import inspect
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import freshper.episode
import freshper.models
import freshper.rollout
import freshper.warm_start
from envs import ENVS
from envs.base import EVAL_SEEDS, TextEnv
from freshper.engine_hf import HFEngine, Sampling
from freshper.episode import collate
from freshper.models import Policy, load_policy
from freshper.presets import defaults
from freshper.rollout import rollout, summarize
from freshper.trainer import keep_freed_memory
from freshper.warm_start import transcripts, warm_start

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
WORDS = ("system", "user", "assistant", "<answer>", "</answer>", "<think>", "</think>")  # and those of the task
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HIDDEN, LAYERS, HEADS = 64, 2, 4
SHIPPED = Path(__file__).parent / "weights"


def build_tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """256 bytes, Qwen's special tokens, and the words above and of a task as one token each: any text can be
    encoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([AddedToken(word, normalized=False) for word in (*WORDS, *words)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_policy(env: TextEnv, seed: int = 0, heads: int = HEADS) -> Policy:
    """A policy with random weights for a task: a Qwen2, or a Qwen2.5-VL (14 pixels a token) if it shows pictures.

    vLLM's CPU attention wants heads of at least 32 numbers, 2 of them; with 4 of 16 the pictures are learned better.
    """
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(env.words)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    language = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,  # at transformers' 0.02 so small a model hardly starts to learn
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    # at Qwen's theta of 1e6 the angle of one column would be 1e-4 rad: nothing a tiny model could see
    rope = {"rope_type": "default", "rope_theta": 100.0}
    if not env.reset(seed=0)[0].images:
        return _speaking_words(Policy(Qwen2ForCausalLM(Qwen2Config(**language, rope_parameters=rope)), tokenizer))
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 7,
        "spatial_merge_size": 2,
        "window_size": 112,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.1,
    }
    angles = HIDDEN // heads // 2  # of a head's rotary embedding: a quarter for time, the rest for row and column
    config = Qwen2_5_VLConfig(
        text_config={**language, "rope_parameters": rope | {"mrope_section": [angles // 4, *[3 * angles // 8] * 2]}},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    processor = Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, min_pixels=14 * 14, max_pixels=14 * 14 * 256)
    return _speaking_words(Policy(Qwen2_5_VLForConditionalGeneration(config), tokenizer, processor))


def _speaking_words(policy: Policy) -> Policy:
    """Bytes can be read but not sampled. No reply needs one, none occurs in the warm start's, and 256 tokens that
    were never seen share one direction of the output layer: RL drifts into it and the policy writes garbage."""
    policy.model.generation_config.suppress_tokens = list(range(256))
    return policy


def shape_key(name: str) -> str:
    """A hash of everything of ours that shapes the model of a task: the code (not the comments) of the modules that
    make transcripts and train on them, and of those modules of `envs` from which the task's own imports anything."""
    digest = hashlib.sha256(name.encode())
    task = sys.modules[type(ENVS[name]()).__module__]
    named = {m.__name__ for m in map(inspect.getmodule, vars(task).values()) if m} | {task.__name__, "envs.base"}
    helpers = [sys.modules[module] for module in sorted(named) if module.startswith("envs.")]
    modules = (freshper.episode, freshper.models, freshper.rollout, freshper.warm_start)
    for module in (sys.modules[shape_key.__module__], *helpers, *modules):
        tree = ast.parse(inspect.getsource(module))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()[:12]


def tiny_model(name: str) -> Path:
    """The folder of the warm-started model of a task: the shipped one if it belongs to this code, else the one in
    the cache (FRESHPER_CACHE, or ~/.cache/freshper), whose name also covers the library versions and which is
    built first where it does not exist yet."""
    key = f"{name}-{shape_key(name)}"
    if (SHIPPED / key).is_dir():
        return SHIPPED / key
    versions = f"torch{torch.__version__}-transformers{transformers.__version__}-tokenizers{tokenizers.__version__}"
    root = Path(os.environ.get("FRESHPER_CACHE", Path.home() / ".cache" / "freshper"))
    folder = root / f"{key}-{versions}"
    if not folder.is_dir():
        policy = build_policy(ENVS[name]())
        warm_start(policy, ENVS[name], ENVS[name]().warm_start)
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        policy.save(str(unfinished))
        try:
            unfinished.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(unfinished)
    return folder


@torch.no_grad()
def caption_accuracy(policy: Policy, name: str, games: int = 256) -> float:
    """The share of tokens of captions of held-out states that the model predicts right, given those before: how well
    it reads what it is shown."""
    players = [ENVS[name](max_turns=1) for _ in range(games)]
    right = total = 0
    batch = collate(transcripts(policy, players, [EVAL_SEEDS + k for k in range(games)]))
    for _, part in batch.micro_batches(64):
        predicted = policy.model.lm_head(policy.batch_hidden(part)).argmax(-1)  # [B, T]
        for row, n in enumerate(part.lengths):
            told = np.flatnonzero(part.action_mask[row, :n])
            told = told[np.flatnonzero(np.diff(told, prepend=-2) > 1)[-1] :]  # the last run: after it no reply
            right += int((predicted[row, told - 1] == part.tokens[row, told]).sum())
            total += len(told)
    return right / total


def describe(folder: Path, name: str, episodes: int = 1000) -> dict[str, float]:
    """Play held-out games with a warm-started model: it must do as well as the random player, and no better.

    Raises RuntimeError where its success is more than four standard errors from the random player's.
    """
    policy = load_policy(str(folder), "cpu", torch.float32)
    preset = defaults("tiny", name, "freshper")
    players = [ENVS[name]() for _ in range(episodes)]
    seeds = [EVAL_SEEDS + k for k in range(episodes)]
    engine = HFEngine(policy, Sampling(), seed=0)
    played = summarize(rollout(engine, policy, players, seeds, preset["max_tokens"], preset["max_new_tokens"]))
    random = float(np.mean([player.baselines(seed)["random"] for player, seed in zip(players, seeds, strict=True)]))
    exact = players[0].has_exact_baselines()
    parameters = sum(p.numel() for p in policy.model.parameters())
    print(f"{folder}")
    print(f"  {type(policy.model).__name__}, {parameters:,} parameters, {len(policy.tokenizer)} tokens")
    how = "exact" if exact else "one game a seed"
    print(f"  success {played['success']:.3f} over {episodes} held-out games, a random player {random:.3f} ({how})")
    print(f"  replies that cannot be read: {played['invalid']:.2%}")
    played["caption"] = caption_accuracy(policy, name)
    print(f"  tokens right in captions of held-out states: {played['caption']:.2%}")
    standard_error = (random * (1 - random) * (1 if exact else 2) / episodes) ** 0.5
    if abs(played["success"] - random) > 4 * standard_error:
        raise RuntimeError(f"the warm-started {name} model does not play like the random player; rebuild it")
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description="Build (or find) and describe the tiny models.")
    parser.add_argument("--env", choices=list(ENVS), nargs="+", default=["frozenlake", "frozenlake_vlm"])
    parser.add_argument("--ship", action="store_true", help="copy them to where the repository keeps them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in args.env:
        folder = tiny_model(name)
        describe(folder, name)
        if args.ship and folder.parent != SHIPPED:
            for old in SHIPPED.glob(f"{name}-*"):
                shutil.rmtree(old)
            shutil.copytree(folder, SHIPPED / f"{name}-{shape_key(name)}")


if __name__ == "__main__":
    main()
