"""Tiny Qwen2 and Qwen2.5-VL models, built from scratch for machines without pretrained weights.

Paper: appendix D (Qwen2.5-0.5B-Instruct, Qwen2.5-VL-3B-Instruct). Same transformers classes, 0.1 to 0.3 M parameters,
and a tokenizer with Qwen's special tokens and chat template over bytes and a few whole words. Those of our tasks are
in freshper/weights (delete a task's folder after changing the task); your own environment's is built at first use.

The warm start, supervised learning on episodes of the random policy, takes the place of pre-training. It teaches the
form of a reply, what an action does and what an observation shows, and leaves the success of the random policy. A
transcript is an episode, and then a user turn with the final observation and its caption:

    <user> the state <assistant> <answer>Up</answer> <user> ... <user> the last state ? X b3 G b2 O b3 c3 a4

Text models learn every token of it; image models learn replies and captions, which train the vision tower. A caption is
no reply: RL, which pushes down the replies of failed episodes, would drive the policy into captions.
"""

import ctypes
import hashlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from envs import ENVS
from envs.base import WARM_START_SEEDS, Observation, TextEnv
from freshper.episode import Episode, collate
from freshper.models import Policy
from freshper.rollout import Conversation, Reply, rollout

SPECIAL = "<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>".split()
WORDS = (
    "system",
    "user",
    "assistant",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
)  # and those of the task
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HIDDEN = 64
BATCH = 64  # episodes of a step of the warm start
SHIPPED = Path(__file__).parent / "weights"


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep freed memory: giving activations back at every step halves the speed on a CPU."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for parameter, value in (
            (-1, 2**31 - 1),
            (-2, 2**28),
            (-3, 2**30),
        ):  # trim threshold, top pad, mmap threshold
            mallopt(parameter, value)


def build_tokenizer(words: tuple[str, ...]) -> transformers.PreTrainedTokenizerFast:
    """Build a tokenizer of 256 bytes, Qwen's special tokens, WORDS and a task's `words`: it can encode any text. A word
    of one ASCII character is the token of its byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([AddedToken(word, normalized=False) for word in (*WORDS, *words)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        additional_special_tokens=SPECIAL[1:], clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_policy(env: TextEnv, seed: int = 0, heads: int = 4) -> Policy:
    """Build a policy with random weights for a task: a Qwen2, or a Qwen2.5-VL (a token per 14 x 14 pixels) if it shows
    images. vLLM on a CPU wants heads of at least 32 numbers, 2 of them; with 4 of 16 images are learned better."""
    torch.manual_seed(seed)
    words = (*env.words, *env.actions)
    tokenizer = build_tokenizer(words)
    # at Qwen's theta of 1e6 the angle of one column of an image would be 1e-4 rad, too little for a tiny model
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
    # at transformers' initializer_range of 0.02 so small a model hardly starts to learn
    shared: dict[str, Any] = {"initializer_range": 0.1, "tie_word_embeddings": False}
    language: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN} | shared
    language |= {"num_hidden_layers": env.layers, "rope_parameters": rope}
    language |= {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 4096,
    }
    language |= {"vocab_size": len(tokenizer), "bos_token_id": None}
    language |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    processor = None
    if env.reset(seed=0)[0].images:
        angles = (
            HIDDEN // heads // 2
        )  # of a head's rotary embedding: a quarter for time, the rest for row and column
        rope["mrope_section"] = [angles // 4, 3 * angles // 8, 3 * angles // 8]
        vision: dict[str, Any] = {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
        }
        vision |= {
            "patch_size": 7,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [0],
        }
        vision |= {"out_hidden_size": HIDDEN, "initializer_range": 0.1}
        names = {
            "image_pad": "image",
            "video_pad": "video",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }
        marks = {
            f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{x}|>")
            for x, name in names.items()
        }
        config = transformers.Qwen2_5_VLConfig(
            text_config=language, vision_config=vision, **marks, **shared
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        processor = Qwen2VLImageProcessorPil(
            patch_size=7, merge_size=2, min_pixels=14 * 14, max_pixels=14 * 14 * 256
        )
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**language))
    # Bytes that are no words can be read but not sampled: no reply needs one, and 200 tokens that
    # the warm start never shows share one direction of the output layer, into which RL drifts.
    bytes_alone = set(range(256)).difference(tokenizer.convert_tokens_to_ids(words))
    model.generation_config.suppress_tokens = sorted(bytes_alone)
    model.config.freshper_tiny = True  # `--model` with a checkpoint of it keeps the tiny preset
    return Policy(model, tokenizer, processor)


class RandomEngine:
    """The random policy as an engine."""

    def __init__(self, policy: Policy, envs: list[TextEnv], seeds: list[int]):
        self.policy, self.rng = policy, np.random.default_rng(seeds[0])
        self.env_of = dict(zip(seeds, envs, strict=True))

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        return [
            self.reply(self.env_of[conversation.seed].random_reply(self.rng))
            for conversation in conversations
        ]

    def reply(self, text: str) -> Reply:
        """Return the reply of this text, with an eos."""
        tokens = self.policy.tokenizer.encode(text, add_special_tokens=False)
        return Reply([*tokens, self.policy.eos_id], [0.0] * (len(tokens) + 1))


def transcripts(policy: Policy, envs: list[TextEnv], seeds: list[int]) -> list[Episode]:
    """Return an episode of the random policy in each environment, with one more turn: the final observation and its
    caption. The action mask covers replies and captions."""
    episodes = rollout(
        RandomEngine(policy, envs, seeds), policy, envs, seeds, max_tokens=4096, max_new_tokens=8
    )
    for episode, env in zip(episodes, envs, strict=True):
        final, caption = env.observe(), env.caption()
        turn = policy.bridge(Observation(f"{final.text}?{caption}", final.images), closed=True)
        _, suffix = policy.template(
            0, first=False
        )  # what the chat template puts after a user's text
        end = len(turn) - len(policy.tokenizer.encode(suffix, add_special_tokens=False))
        told = np.zeros(len(turn), dtype=bool)
        told[end - len(policy.tokenizer.encode(caption, add_special_tokens=False)) : end] = True
        episode.tokens = np.append(episode.tokens, turn).astype(np.int32)
        episode.action_mask = np.append(episode.action_mask, told)
        episode.behavior_logprobs = np.zeros(len(episode.tokens), dtype=np.float32)
        episode.turn_rewards = np.append(episode.turn_rewards, 0.0).astype(np.float32)
        episode.images = [*episode.images, *final.images]
    return episodes


def supervised_step(policy: Policy, episodes: list[Episode]) -> None:
    """Accumulate the gradient of the mean cross-entropy of all tokens (text) or replies and captions (images)."""
    images = policy.image_processor is not None
    n = sum(int(e.action_mask[1:].sum()) if images else len(e.tokens) - 1 for e in episodes)
    for _, part in collate(episodes).micro_batches(16):
        real = torch.arange(part.tokens.shape[1]) < torch.tensor(part.lengths)[:, None]
        mask = (part.action_mask if images else real)[:, 1:]
        logits = policy.model.lm_head(policy.batch_hidden(part)[:, :-1][mask])
        loss = (
            torch.nn.functional.cross_entropy(logits, part.tokens[:, 1:][mask], reduction="sum") / n
        )
        loss.backward()


def check_words(policy: Policy, envs: list[TextEnv]) -> None:
    """Raise ValueError if a caption is empty, or a random reply holds what the policy never samples."""
    rng, name = np.random.default_rng(0), type(envs[0]).__name__
    for seed, env in enumerate(envs, WARM_START_SEEDS):
        env.reset(seed=seed)
        if not env.caption():
            raise ValueError(f"{name}.caption() is empty, but must say what the observation shows")

        reply = env.random_reply(rng)
        tokens = policy.tokenizer.encode(reply, add_special_tokens=False)
        written = policy.tokenizer.decode(
            [token for token in tokens if token not in policy.suppressed_ids]
        )
        if written != reply:
            rest = f"its words must be listed in {name}.words or {name}.actions, in ASCII"
            raise ValueError(
                f"{name}.random_reply() returned {reply!r}, of which a tiny model writes {written!r}: {rest}"
            )


def warm_start(policy: Policy, make_env: Callable[[], TextEnv]) -> None:
    """Train the policy on fresh episodes of the random policy, as many as the environment's `warm_start` says."""
    envs = [make_env() for _ in range(BATCH)]
    check_words(policy, envs)
    turns_of_batches = [turns for batches, turns in envs[0].warm_start for _ in range(batches)]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=3e-3, weight_decay=0.0)
    rate = transformers.get_scheduler(
        "cosine", optimizer, len(turns_of_batches) // 20, len(turns_of_batches)
    )
    policy.model.train()
    for batch, turns in enumerate(tqdm(turns_of_batches, desc="warm start (once)", unit="batch")):
        for env in envs:
            env.max_turns = turns
        seeds = [WARM_START_SEEDS + batch * BATCH + k for k in range(BATCH)]
        optimizer.zero_grad()
        supervised_step(policy, transcripts(policy, envs, seeds))
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        rate.step()


def tiny_model(name: str) -> Path:
    """Return the folder of the warm-started model of a task: the repository's, or the cache's (FRESHPER_CACHE, or
    ~/.cache/freshper), built if missing, whose name ends with a hash over the source files that shape it."""
    if (SHIPPED / name).is_dir():
        return SHIPPED / name
    task = sys.modules[type(ENVS[name]()).__module__]
    used = [
        m
        for m in map(inspect.getmodule, vars(task).values())
        if m and m.__name__.startswith("envs.")
    ]
    sources = {Path(__file__), *(Path(inspect.getfile(m)) for m in (task, *used))}
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()
    folder = (
        Path(os.environ.get("FRESHPER_CACHE") or Path.home() / ".cache/freshper")
        / f"{name}-{digest[:8]}"
    )
    if not folder.is_dir():
        warm_start(policy := build_policy(ENVS[name]()), ENVS[name])
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        policy.save(str(unfinished))
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder
