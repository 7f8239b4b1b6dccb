"""Tiny Qwen2 and Qwen2.5-VL, built from scratch: they stand in for the paper's models where no weights can be had.

Paper: appendix B (Qwen2.5-0.5B-Instruct, Qwen2.5-VL-3B-Instruct). Same transformers classes, 0.1 to 0.2 M
parameters, and a tokenizer with Qwen's special tokens and chat template over bytes and a few whole words.

RL needs a policy that can already write a legal reply. The *warm start* plays the part of pre-training:
supervised learning on transcripts of a uniformly random player, never on good play. It teaches the form of a
reply and what an observation says (for pictures, by captions), and leaves the success of a random player.
Models are built once and cached; the key covers the code, the settings and the versions that shape them.

    python -m freshper.tiny            builds (or finds) both and describes them
"""

import hashlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    get_scheduler,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import envs.base
import envs.frozenlake
import freshper.episode
import freshper.models
import freshper.rollout
from envs import ENVS
from envs.base import Observation, TextEnv
from envs.frozenlake import ACTIONS
from freshper.engine_hf import HFEngine, Sampling
from freshper.episode import Batch, Episode, collate
from freshper.models import Policy, load_policy
from freshper.rollout import EVAL_SEEDS, RandomEngine, rollout, summarize
from freshper.trainer import keep_freed_memory

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
WORDS = ("system", "user", "assistant", "<answer>", "</answer>", "<think>", "</think>", *ACTIONS)
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HIDDEN, LAYERS, HEADS = 64, 2, 4
WARM_STARTS = {
    "text": {"env": "frozenlake", "schedule": [(300, 10)], "lr": 3e-3},
    "vision": {"env": "frozenlake_vlm", "schedule": [(500, 1), (150, 10)], "lr": 3e-3},
}
BATCH = 64
WARM_START_SEEDS = 2_000_000_000  # far from the seeds of training and evaluation


def build_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, Qwen's special tokens, and the words above as one token each: any text can be encoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[1:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_policy(family: str, seed: int = 0) -> Policy:
    """A policy with random weights. `family`: "text" (Qwen2) or "vision" (Qwen2.5-VL, 14 pixels a token)."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    language = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,  # at transformers' 0.02 so small a model hardly starts to learn
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    # at Qwen's theta of 1e6 the angle of one column would be 1e-4 rad: nothing a tiny model could see
    rope = {"rope_type": "default", "rope_theta": 100.0}
    if family == "text":
        return Policy(Qwen2ForCausalLM(Qwen2Config(**language, rope_parameters=rope)), tokenizer)
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
    config = Qwen2_5_VLConfig(
        text_config={**language, "rope_parameters": rope | {"mrope_section": [2, 3, 3]}},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    processor = Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, min_pixels=14 * 14, max_pixels=14 * 14 * 256)
    return Policy(Qwen2_5_VLForConditionalGeneration(config), tokenizer, processor)


def transcripts(policy: Policy, players: list[TextEnv], seeds: list[int]) -> list[Episode]:
    """A game of the uniformly random player in each environment. Picture games end with a caption of the last
    picture that was shown: a user turn without a picture, then what it shows."""
    engine = RandomEngine(policy, players, seeds[0])
    games = rollout(engine, policy, players, seeds, max_tokens=4096, max_new_tokens=8)
    if policy.image_processor:
        for game, player in zip(games, players, strict=True):
            ask = policy.bridge(Observation("?"), closed=True)
            tell = policy.tokenizer.encode(engine.captions[player], add_special_tokens=False)
            game.tokens = np.concatenate([game.tokens, ask, tell]).astype(np.int32)
            game.action_mask = np.concatenate([game.action_mask, [False] * len(ask), [True] * len(tell)])
            game.behavior_logprobs = np.zeros(len(game.tokens), dtype=np.float32)
            game.turn_rewards = np.append(game.turn_rewards, 0.0).astype(np.float32)
    return games


def supervised_step(policy: Policy, games: list[Episode]) -> float:
    """Accumulate the gradient of the mean cross-entropy, and return it: over every token of text games (the
    observations teach what a move does), over replies and captions of picture games (whose placeholders have
    nothing to predict)."""

    def targets(batch: Batch) -> torch.Tensor:
        if policy.image_processor:
            return batch.action_mask[:, 1:]
        return torch.arange(1, batch.tokens.shape[1]) < torch.tensor(batch.lengths)[:, None]

    batch = collate(games)
    total, n = 0.0, targets(batch).sum()
    for _, part in batch.micro_batches(16):
        mask = targets(part)
        logits = policy.model.lm_head(policy.batch_hidden(part)[:, :-1][mask])
        loss = torch.nn.functional.cross_entropy(logits, part.tokens[:, 1:][mask], reduction="sum") / n
        loss.backward()
        total += loss.item()
    return total


def warm_start(policy: Policy, make_env: Callable[[], TextEnv], schedule: list[tuple[int, int]], lr: float) -> None:
    """Supervised learning on fresh games of the random player. `schedule`: (batches, turns of their games)."""
    players = [make_env() for _ in range(BATCH)]
    total = sum(batches for batches, _ in schedule)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, weight_decay=0.0)
    rate = get_scheduler("cosine", optimizer, total // 20, total)
    policy.model.train()
    with tqdm(total=total, desc="warm start (once)", unit="batch") as progress:
        for batches, turns in schedule:
            for player in players:
                player.max_turns = turns
            for _ in range(batches):
                seeds = [WARM_START_SEEDS + progress.n * BATCH + k for k in range(BATCH)]
                optimizer.zero_grad()
                loss = supervised_step(policy, transcripts(policy, players, seeds))
                torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
                optimizer.step()
                rate.step()
                progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
                progress.update()


def cache_folder(family: str) -> Path:
    """Where the warm-started model of this family lies or will lie: FRESHPER_CACHE, or ~/.cache/freshper. The name
    covers the code and the versions that shape it."""
    shaped_by = (sys.modules[__name__], envs.base, envs.frozenlake, freshper.episode, freshper.models, freshper.rollout)
    text = "".join(inspect.getsource(module) for module in shaped_by)
    key = hashlib.sha256(f"{text} {torch.__version__} {transformers.__version__} {tokenizers.__version__}".encode())
    root = Path(os.environ.get("FRESHPER_CACHE", Path.home() / ".cache" / "freshper"))
    return root / f"tiny-{family}-{key.hexdigest()[:16]}"


def tiny_model(family: str) -> Path:
    """The folder of the warm-started model, built first where it does not exist yet."""
    folder = cache_folder(family)
    if not folder.is_dir():
        policy = build_policy(family)
        settings = WARM_STARTS[family]
        warm_start(policy, ENVS[settings["env"]], settings["schedule"], settings["lr"])
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        policy.save(str(unfinished))
        try:
            unfinished.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(unfinished)
    return folder


def describe(family: str, episodes: int = 1000) -> dict[str, float]:
    """Play held-out games with the warm-started model: it must do as well as the random player, and no better.

    Raises RuntimeError where its success is more than four standard errors from the random player's.
    """
    policy = load_policy(str(tiny_model(family)), "cpu", torch.float32)
    players = [ENVS[WARM_STARTS[family]["env"]]() for _ in range(episodes)]
    seeds = [EVAL_SEEDS + k for k in range(episodes)]
    played = summarize(rollout(HFEngine(policy, Sampling(), seed=0), policy, players, seeds, 512, 6))
    random = float(np.mean([player.baselines(seed)["random"] for player, seed in zip(players, seeds, strict=True)]))
    parameters = sum(p.numel() for p in policy.model.parameters())
    print(tiny_model(family))
    print(f"  {type(policy.model).__name__}, {parameters:,} parameters, {len(policy.tokenizer)} tokens")
    print(f"  success {played['success']:.3f} over {episodes} held-out games, a random player {random:.3f} (exact)")
    print(f"  replies that cannot be read: {played['invalid']:.2%}")
    if abs(played["success"] - random) > 4 * (random * (1 - random) / episodes) ** 0.5:
        raise RuntimeError(f"the warm-started {family} model does not play like the random player; rebuild it")
    return played | {"random": random}


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in sys.argv[1:] or WARM_STARTS:
        describe(name)
