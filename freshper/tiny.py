"""Tiny Qwen2 and Qwen2.5-VL models, built from scratch for machines without pretrained weights.

Paper: appendix D (Qwen2.5-0.5B-Instruct, Qwen2.5-VL-3B-Instruct). Same transformers classes, 0.1 to
0.3 M parameters, and a tokenizer with Qwen's special tokens and chat template over bytes and a few
whole words. Those of our tasks are in freshper/weights (delete a task's folder after changing the
task). That of your own environment is built at first use.

The warm start, supervised learning on episodes of the random policy, takes the place of
pre-training. It teaches the form of a reply, what an action does and what an observation shows, and
leaves the success of the random policy. A transcript is an episode, and then a user turn with the
final observation and its caption:

    <user> the state <assistant> <answer>Up</answer> <user> ... <user> last state?X b3 G b2 O b3 a4

Text models learn every token of it. Image models learn replies and captions, which train the vision
tower. A caption is no reply: RL, which pushes down the replies of failed episodes, would drive the
policy into captions.
"""

import ctypes
import hashlib
import inspect
import os
import shutil
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from envs import ENVS
from envs.base import WARM_START_SEEDS, TextEnv, UserError
from envs.frozenlake import FrozenLake
from freshper.episode import Episode, collate
from freshper.models import Policy
from freshper.rollout import Conversation, Reply, rollout

SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|>
<|video_pad|>""".split()
# Whole words, besides those of the task.
WORDS = "system user assistant <answer> </answer> <think> </think>".split()
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HIDDEN = 64
PATCH = 7  # pixels; a token is 2 x 2 patches
INITIALIZER_RANGE = 0.1  # at transformers' 0.02 so small a model hardly starts to learn
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "fullatt_block_indexes": [0],
    "out_hidden_size": HIDDEN,
    "initializer_range": INITIALIZER_RANGE,
}
BATCH = 64  # episodes of a step of the warm start
SHIPPED = Path(__file__).parent / "weights"


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep freed memory. To give activations back at every step would halve
    the speed on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


def choose_threads() -> None:
    """Compute with two threads, or with one if that is faster at this moment.

    A tiny model gains little from more. Beside a busy process, two threads can be fifty times
    slower than one: each waits in a loop for the other, which has no core. OMP_NUM_THREADS=1
    chooses one."""
    if torch.get_num_threads() == 1:
        return
    x, weight = torch.ones(16, 64, 64), torch.ones(64, 64)  # as in a small update
    seconds = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds.append(timeit.timeit(lambda: (x @ weight).relu(), number=500))
    if seconds[0] < seconds[1]:
        torch.set_num_threads(1)


def build_tokenizer(words: tuple[str, ...]) -> transformers.PreTrainedTokenizerFast:
    """Build a tokenizer of 256 bytes, Qwen's special tokens, WORDS and a task's `words`. It can
    encode any text. A word of one ASCII character is the token of its byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    core.add_tokens([*WORDS, *words])

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def build_policy(env: TextEnv, heads: int = 4) -> Policy:
    """Build a policy with random weights for a task: a Qwen2, or a Qwen2.5-VL (a token per 14 x 14
    pixels) if the task shows images. vLLM on a CPU needs heads of at least 32 numbers, and so 2
    heads. With 4 heads of 16 numbers, images are learned better."""
    torch.manual_seed(0)
    words = (*env.words, *env.actions)
    tokenizer = build_tokenizer(words)
    language: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        # On the ice, detours need depth.
        "num_hidden_layers": 4 if isinstance(env, FrozenLake) else 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 4096,
        # With Qwen's theta of 1e6 one column of an image would be an angle of 1e-4 rad, which is
        # too little for a tiny model.
        "rope_parameters": {"rope_theta": 100.0},
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }

    processor = None
    if env.reset(seed=0)[0].images:
        # Of the rotary angles a quarter is for time, and the rest for row and column.
        eighth = HIDDEN // heads // 16
        language["rope_parameters"]["mrope_section"] = [2 * eighth, 3 * eighth, 3 * eighth]
        start, end, image, video = tokenizer.convert_tokens_to_ids(SPECIAL[3:])
        config = transformers.Qwen2_5_VLConfig(
            text_config=language,
            vision_config=VISION,
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=start,
            vision_end_token_id=end,
        )
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
        processor = Qwen2VLImageProcessorPil(
            patch_size=PATCH, min_pixels=14 * 14, max_pixels=14 * 14 * 256
        )
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**language))

    # Bytes that are no words can be read but not sampled. No reply needs one, and 200 tokens that
    # the warm start never shows share one direction of the output layer, into which RL drifts.
    word_ids = tokenizer.convert_tokens_to_ids(words)
    model.generation_config.suppress_tokens = sorted(set(range(256)).difference(word_ids))
    model.config.freshper_tiny = True  # `--model` with a checkpoint of it keeps the tiny preset
    return Policy(model, tokenizer, processor)


class RandomEngine:
    """The random policy as an engine."""

    def __init__(self, policy: Policy, envs: list[TextEnv], seeds: list[int]):
        self.policy = policy
        self.rng = np.random.default_rng(seeds[0])
        self.env_of = dict(zip(seeds, envs))

    def generate(self, conversations: list[Conversation], max_new_tokens: int) -> list[Reply]:
        """Return one random reply to each conversation. Raises UserError if the policy could not
        write one."""
        replies = []
        for conversation in conversations:
            env = self.env_of[conversation.seed]
            text = env.random_reply(self.rng)
            tokens = [*self.policy.encode(text), self.policy.eos_id]
            if {*tokens} & {*self.policy.suppressed_ids}:
                name = type(env).__name__
                raise UserError(
                    f"{name}.random_reply() returned {text!r}, which a tiny model cannot write: "
                    f"its words must be in {name}.words or {name}.actions, in ASCII"
                )
            replies.append(Reply(tokens, [0.0] * len(tokens)))
        return replies


def transcripts(policy: Policy, envs: list[TextEnv], seeds: list[int]) -> list[Episode]:
    """Return an episode of the random policy in each environment, with one more turn: the final
    observation and its caption. The action mask covers replies and captions."""
    suffix = policy.template(0, first=False)[1]
    engine = RandomEngine(policy, envs, seeds)
    episodes = rollout(engine, envs, seeds, max_tokens=4096, max_new_tokens=8)

    for episode, env in zip(episodes, envs):
        final = env.observe()
        caption = env.caption()
        turn = policy.bridge(final._replace(text=f"{final.text}?{caption}"), closed=True)

        # The caption stands before what the chat template puts after a user's text.
        end = len(turn) - len(policy.encode(suffix))
        start = end - len(policy.encode(caption))
        in_caption = np.zeros(len(turn), bool)
        in_caption[start:end] = True

        episode.tokens = np.append(episode.tokens, np.array(turn, np.int32))
        episode.action_mask = np.append(episode.action_mask, in_caption)
        episode.behavior_logprobs = np.zeros(len(episode.tokens), np.float32)
        episode.turn_rewards = np.append(episode.turn_rewards, np.float32(0))
        episode.images += final.images
    return episodes


def supervised_step(policy: Policy, episodes: list[Episode]) -> None:
    """Accumulate the gradient of the mean cross-entropy of all tokens (text) or of replies and
    captions (images)."""
    batch = collate(episodes)
    if policy.image_processor is None:
        for row, length in enumerate(batch.lengths):
            batch.action_mask[row, :length] = True
    n = int(batch.action_mask[:, 1:].sum())

    for _, part in batch.micro_batches(16):
        mask = part.action_mask[:, 1:]  # [B, T - 1]
        hidden = policy.batch_hidden(part)[:, :-1]  # [B, T - 1, hidden]
        logits = policy.model.lm_head(hidden[mask])  # [tokens to learn, V]
        targets = part.tokens[:, 1:][mask]  # [tokens to learn]
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / n
        loss.backward()


def warm_start(policy: Policy, make_env: Callable[[], TextEnv]) -> None:
    """Train the policy on fresh episodes of the random policy, as many as the environment's
    `warm_start` says."""
    envs = [make_env() for _ in range(BATCH)]
    max_turns = [turns for batches, turns in envs[0].warm_start for _ in range(batches)]
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    n = len(max_turns)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, n // 20, n)

    seed = WARM_START_SEEDS
    for turns in tqdm(max_turns, desc="warm start (once)", unit="batch"):
        for env in envs:
            env.max_turns = turns
        episodes = transcripts(policy, envs, list(range(seed, seed + BATCH)))
        seed += BATCH

        optimizer.zero_grad()
        supervised_step(policy, episodes)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def tiny_model(name: str) -> Path:
    """Return the folder of the warm-started model of a task. It is the repository's, or one of the
    cache (FRESHPER_CACHE, or ~/.cache/freshper), built if missing, whose name ends with a hash over
    the sources of this file and of the task's classes."""
    if (SHIPPED / name).is_dir():
        return SHIPPED / name

    env = ENVS[name]()
    classes = [kind for kind in type(env).__mro__ if issubclass(kind, TextEnv)]
    sources = [__file__, *map(inspect.getfile, classes)]
    code = b"".join(Path(source).read_bytes() for source in sources)

    cache = os.environ.get("FRESHPER_CACHE") or Path.home() / ".cache/freshper"
    folder = Path(cache, f"{name}-{hashlib.sha256(code).hexdigest()[:8]}")
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        unfinished.mkdir(parents=True)
        policy = build_policy(env)
        warm_start(policy, ENVS[name])
        policy.save(str(unfinished))
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder
