"""How much time does a rollout save by keeping the KV cache from turn to turn?

Two engines play the same game through `freshper.rollout.rollout`: 64 FrozenLake conversations of 10 turns, the
tiny policy with random weights, one torch thread, replies of exactly 4 sampled tokens.

- `HFEngine` (ours) feeds a turn's new tokens only, and goes on from the cache of the turns before.
- `GenerateEngine` is what one writes first: at every turn it pads the whole conversations on the left and calls
  `model.generate` of transformers with the same sampling. That keeps a cache within the call, and the next turn
  starts at the first token again. It is spared the log-probs that ours returns; with --images every picture is
  preprocessed once and kept, but seen by the vision tower again at every turn, where ours sees it once. Picture
  conversations are all of one length here, its best case: no padding, so that transformers leaves out the mask.

No reply ends early (eos is suppressed), and the environment plays a legal move of its own instead of reading the
reply, until turn 10: both engines do the same work, and the lengths of all conversations must agree.
"terse" is how the tiny presets show the lake, "full" the text for pretrained models (the paper's sequence length
is 2048). "rollout" is in seconds with the environments, "engine" without; tokens/s counts sampled tokens;
"growth" is the mean of turns 8 to 10 over that of turns 2 to 4 (in ours only attention grows). All are medians
over rounds in which the engines alternate, after an untimed game of each. "fed" is how many times as many tokens
GenerateEngine runs through the model: the most to be gained where the cost of a token does not depend on its place.

`--layers 1`: as many layers of Qwen2.5-0.5B's shape in place of the tiny model, terse prompts, one round. There the
weights take the time, as in every model in use; in the tiny one attention does, whose work grows with the context.

    python benchmarks/rollout.py [--images]        about a minute
    python benchmarks/rollout.py --layers 1        five
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs.frozenlake import FrozenLake
from freshper.engine_hf import HFEngine, Sampling
from freshper.rollout import Reply, rollout
from freshper.tiny import build_policy, keep_freed_memory

SEEDS, TURNS, REPLY, ROUNDS = list(range(64)), 10, 4, {"terse": 5, "full": 1}
SPEEDUP, GROWTH = 4.0, 1.5  # the targets: at least, at most
QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}


class EndlessLake(FrozenLake):
    """FrozenLake whose episodes take all turns; what it shows depends on the seed alone, not on the replies."""

    max_turns = TURNS

    def step(self, reply):
        observation, reward, _, truncated, info = super().step(self.random_reply(self.np_random))
        return observation, reward, False, truncated, info


class GenerateEngine:
    """Plain `model.generate` over the whole conversations, every turn."""

    def __init__(self, policy, sampling):
        self.policy, self.sampling = policy, sampling
        self.pixels = {}  # id of a picture -> what the image processor made of it

    @torch.inference_mode()
    def generate(self, conversations, max_new_tokens):
        self.policy.model.eval()
        longest, pad = max(len(c.tokens) for c in conversations), self.policy.tokenizer.pad_token_id
        tokens = torch.tensor([[pad] * (longest - len(c.tokens)) + c.tokens for c in conversations])
        mask = torch.tensor(
            [[0] * (longest - len(c.tokens)) + [1] * len(c.tokens) for c in conversations]
        )
        out = self.policy.model.generate(
            input_ids=tokens,
            attention_mask=mask,
            **self.vision_inputs(tokens, [image for c in conversations for image in c.images]),
            do_sample=True,
            **vars(self.sampling),  # temperature, top_k, top_p
            max_new_tokens=max_new_tokens,
            suppress_tokens=self.policy.suppressed_ids,
        )
        return [Reply(reply, [0.0] * len(reply)) for reply in out[:, longest:].tolist()]

    def vision_inputs(self, tokens, images):
        if not images:
            return {}
        for image in images:
            if id(image) not in self.pixels:
                picture = Image.fromarray(image)
                self.pixels[id(image)] = self.policy.image_processor(
                    images=[picture], return_tensors="pt"
                )
        names = ("pixel_values", "image_grid_thw")
        inputs = {
            name: torch.cat([self.pixels[id(image)][name] for image in images]) for name in names
        }
        return inputs | {"mm_token_type_ids": (tokens == self.policy.image_token_id).int()}


class Timed:
    """An engine that notes the seconds of every `generate` and the lengths of the conversations."""

    def __init__(self, engine):
        self.engine, self.seconds, self.lengths = engine, [], []

    def generate(self, conversations, max_new_tokens):
        self.lengths.append([len(c.tokens) for c in conversations])
        start = time.perf_counter()
        replies = self.engine.generate(conversations, max_new_tokens)
        self.seconds.append(time.perf_counter() - start)
        return replies


def play(policy, engine, style, images):
    """One game: seconds of the rollout, seconds of its turns [TURNS], lengths [TURNS, B]."""
    policy.features.clear()  # the rounds show the same pictures again
    envs, engine, start = (
        [EndlessLake(image=images, style=style) for _ in SEEDS],
        Timed(engine),
        time.perf_counter(),
    )
    episodes = rollout(engine, policy, envs, SEEDS, max_tokens=4096, max_new_tokens=REPLY)
    seconds = time.perf_counter() - start
    assert all(
        len(e.turn_rewards) == TURNS and e.action_mask.sum() == TURNS * REPLY for e in episodes
    )
    return seconds, np.array(engine.seconds), np.array(engine.lengths)


def compare(policy, style, images):
    """Print the table of one prompt style; returns the speed-up of the whole rollout, and our growth."""
    games, sampling = {"GenerateEngine": [], "HFEngine": []}, Sampling()
    for _ in range(1 + ROUNDS[style]):
        games["GenerateEngine"].append(
            play(policy, GenerateEngine(policy, sampling), style, images)
        )
        games["HFEngine"].append(play(policy, HFEngine(policy, sampling, seed=0), style, images))
    lengths = games["HFEngine"][0][2]
    assert all((game[2] == lengths).all() for rounds in games.values() for game in rounds)

    fed = (lengths.sum() + TURNS * len(SEEDS) * (REPLY - 1)) / (
        lengths[-1].sum() + len(SEEDS) * (REPLY - 1)
    )
    first, last = lengths[0].mean(), lengths[-1].mean()
    print(f"{style}: {first:.0f} tokens at turn 1, {last:.0f} at turn {TURNS}; fed {fed:.1f}x")
    print(f"{'':14} rollout  engine  tokens/s  growth   turns 1 to {TURNS}, ms")
    whole, inside, growth = [], [], []
    for name, (_, *rounds) in games.items():
        turns = np.median([game[1] for game in rounds], axis=0)
        whole.append(np.median([game[0] for game in rounds]))
        inside.append(np.median([game[1].sum() for game in rounds]))
        growth.append(turns[7:10].mean() / turns[1:4].mean())
        speed, cells = (
            len(SEEDS) * TURNS * REPLY / whole[-1],
            "".join(f"{1000 * t:6.0f}" for t in turns),
        )
        print(
            f"{name:14} {whole[-1]:7.2f} {inside[-1]:7.2f} {speed:9.0f} {growth[-1]:7.2f}  {cells}"
        )
    print(f"{'ratio':14} {whole[0] / whole[1]:6.1f}x {inside[0] / inside[1]:6.1f}x\n")
    return whole[0] / whole[1], growth[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--images", action="store_true", help="the lake as pictures, with the tiny Qwen2.5-VL"
    )
    parser.add_argument("--layers", type=int, default=0, help="of Qwen2.5-0.5B's shape")
    args = parser.parse_args()
    images = args.images
    torch.set_num_threads(1)
    keep_freed_memory()
    policy = build_policy(FrozenLake(image=images))
    if args.layers:
        shape = (
            policy.model.config.to_dict()
            | QWEN
            | {"num_hidden_layers": args.layers, "layer_types": None}
        )
        policy.model, ROUNDS = Qwen2ForCausalLM(Qwen2Config(**shape)), {"terse": 1}
    policy.freeze_vision = images  # as in the tiny preset: a picture is seen once and remembered
    policy.suppressed_ids = [*policy.suppressed_ids, policy.eos_id]
    for style, (speedup, growth) in {
        style: compare(policy, style, images) for style in ROUNDS
    }.items():
        print(
            f"{'met   ' if speedup >= SPEEDUP else 'MISSED'}  {style}: rollout {speedup:.1f}x >= {SPEEDUP:g}x"
        )
        print(
            f"{'met   ' if growth <= GROWTH else 'MISSED'}  {style}: growth {growth:.2f} <= {GROWTH:g}"
        )
