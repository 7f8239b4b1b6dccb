"""How much time does a rollout save by keeping the KV cache from turn to turn?

Two engines play the same game through `freshper.rollout.rollout`: 64 FrozenLake conversations of 10
turns, the tiny policy with random weights, one torch thread, replies of exactly 4 sampled tokens.

- `HFEngine` (ours) feeds a turn's new tokens only, and goes on from the cache of the turns before.
- `GenerateEngine` is what one writes first: at every turn it pads the whole conversations on the
  left and calls `model.generate` of transformers with the same sampling. That keeps a cache within
  the call, and the next turn starts at the first token again. It is spared the log-probs that ours
  returns. With --images every image is preprocessed once and kept, but seen by the vision tower
  again at every turn, where ours sees it once. Image conversations are all of one length here, its
  best case: no padding, so that transformers leaves out the mask.

No reply ends early (eos is suppressed), and the environment plays a legal move of its own instead
of reading the reply, until turn 10: both engines do the same work, and the lengths of all
conversations must agree. "terse" is how the tiny presets show the lake, "full" the text for
pretrained models (the paper's sequence length is 2048). "rollout" is in seconds with the
environments, "engine" without. tokens/s counts sampled tokens. "growth" is the mean of turns 8 to
10 over that of turns 2 to 4 (in ours only attention grows). All are medians over rounds in which
the engines alternate, after an untimed game of each. "fed" is how many times as many tokens
GenerateEngine runs through the model: the most to be gained where the cost of a token does not
depend on its place.

`--layers 1`: as many layers of Qwen2.5-0.5B's shape in place of the tiny model, terse prompts, one
round. There the weights take the time, as in every model in use. In the tiny one attention does,
whose work grows with the context.

    python benchmarks/rollout.py [--images]        about a minute
    python benchmarks/rollout.py --layers 1        five
"""

import time

import common
import numpy as np
import torch
from PIL import Image
from transformers import Qwen2Config, Qwen2ForCausalLM

from envs.frozenlake import FrozenLake
from freshper.engine_hf import HFEngine, Sampling
from freshper.rollout import Reply, rollout
from freshper.tiny import build_policy, keep_freed_memory

SEEDS = list(range(64))
TURNS = 10
REPLY = 4  # tokens
SAMPLED = len(SEEDS) * TURNS * REPLY
SPEEDUP = 4.0  # the target: at least
GROWTH = 1.5  # the target: at most
QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "layer_types": None,
}


class EndlessLake(FrozenLake):
    """FrozenLake whose episodes take all turns. What it shows depends on the seed alone, not on the
    replies."""

    max_turns = TURNS

    def step(self, reply):
        observation, reward, _, truncated, info = super().step(self.random_reply(self.np_random))
        return observation, reward, False, truncated, info


class GenerateEngine:
    """Plain `model.generate` over the whole conversations, every turn."""

    def __init__(self, policy, sampling):
        self.policy = policy
        self.sampling = sampling
        self.pixels = {}  # id of an image: its pixel values

    @torch.inference_mode()
    def generate(self, conversations, max_new_tokens):
        self.policy.model.eval()
        texts = [conversation.tokens for conversation in conversations]
        images = sum((conversation.images for conversation in conversations), [])
        longest = max(map(len, texts))
        pad = self.policy.tokenizer.pad_token_id
        tokens = torch.tensor([[pad] * (longest - len(text)) + text for text in texts])
        lengths = torch.tensor([[len(text)] for text in texts])  # [B, 1]

        output = self.policy.model.generate(
            input_ids=tokens,
            attention_mask=(torch.arange(longest) >= longest - lengths).long(),
            do_sample=True,
            max_new_tokens=max_new_tokens,
            suppress_tokens=self.policy.suppressed_ids,
            **vars(self.sampling),  # temperature, top_k, top_p
            **self.vision_inputs(tokens, images),
        )
        return [Reply(reply, [0.0] * len(reply)) for reply in output[:, longest:].tolist()]

    def vision_inputs(self, tokens, images):
        if not images:
            return {}
        pixels = [self.preprocessed(image) for image in images]
        return {
            "pixel_values": torch.cat([row["pixel_values"] for row in pixels]),
            "image_grid_thw": torch.cat([row["image_grid_thw"] for row in pixels]),
            "mm_token_type_ids": (tokens == self.policy.image_token_id).int(),
        }

    def preprocessed(self, image):
        if id(image) not in self.pixels:
            processor = self.policy.image_processor
            picture = Image.fromarray(image)
            self.pixels[id(image)] = processor(images=[picture], return_tensors="pt")
        return self.pixels[id(image)]


class Game:
    """A game of an engine: `seconds` of the rollout, `turns`, the seconds of each `generate`
    [TURNS], and `lengths` of the conversations [TURNS, B]."""

    def __init__(self, policy, engine, style, images):
        # The rounds show the same images again.
        policy.features.clear()
        self.engine = engine
        self.turns = []
        self.lengths = []
        envs = [EndlessLake(image=images, style=style) for _ in SEEDS]
        start = time.perf_counter()
        episodes = rollout(self, policy, envs, SEEDS, max_tokens=4096, max_new_tokens=REPLY)
        self.seconds = time.perf_counter() - start

        for episode in episodes:
            assert len(episode.turn_rewards) == TURNS
            assert episode.action_mask.sum() == TURNS * REPLY

    def generate(self, conversations, max_new_tokens):
        self.lengths.append([len(conversation.tokens) for conversation in conversations])
        start = time.perf_counter()
        replies = self.engine.generate(conversations, max_new_tokens)
        self.turns.append(time.perf_counter() - start)
        return replies


def compare(policy, style, images, rounds):
    """Print the table of one prompt style and return the speed-up of the whole rollout, and our
    growth."""
    sampling = Sampling()
    plain = []
    ours = []
    for _ in range(1 + rounds):
        plain.append(Game(policy, GenerateEngine(policy, sampling), style, images))
        ours.append(Game(policy, HFEngine(policy, sampling, seed=0), style, images))

    lengths = np.array(ours[0].lengths)
    for game in plain + ours:
        assert game.lengths == ours[0].lengths
    within = len(SEEDS) * (REPLY - 1)
    fed = (lengths.sum() + TURNS * within) / (lengths[-1].sum() + within)
    first = lengths[0].mean()
    last = lengths[-1].mean()

    print(f"{style}: {first:.0f} tokens at turn 1, {last:.0f} at turn {TURNS}; fed {fed:.1f}x")
    print(f"{'':14} rollout  engine  tokens/s  growth   turns 1 to {TURNS}, ms")
    plain_whole, plain_inside, _ = print_row("GenerateEngine", plain[1:])
    whole, inside, growth = print_row("HFEngine", ours[1:])
    print(f"{'ratio':14} {plain_whole / whole:6.1f}x {plain_inside / inside:6.1f}x\n")
    return plain_whole / whole, growth


def print_row(name, games):
    """Print an engine's row and return its seconds with and without environments, and its
    growth."""
    turns = np.median([game.turns for game in games], axis=0)
    whole = np.median([game.seconds for game in games])
    inside = np.median([sum(game.turns) for game in games])
    growth = turns[7:10].mean() / turns[1:4].mean()
    cells = "".join(f"{1000 * seconds:6.0f}" for seconds in turns)
    speed = SAMPLED / whole
    print(f"{name:14} {whole:7.2f} {inside:7.2f} {speed:9.0f} {growth:7.2f}  {cells}")
    return whole, inside, growth


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--images", action="store_true", help="images, with the tiny Qwen2.5-VL")
    parser.add_argument("--layers", type=int, default=0, help="of Qwen2.5-0.5B's shape")
    args = parser.parse_args()
    if args.layers and args.images:
        parser.error(f"--layers is {args.layers}, but must be 0 with --images")
    torch.set_num_threads(1)
    keep_freed_memory()

    policy = build_policy(FrozenLake(image=args.images))
    rounds = {"terse": 5, "full": 1}
    if args.layers:
        shape = policy.model.config.to_dict() | QWEN
        shape["num_hidden_layers"] = args.layers
        policy.model = Qwen2ForCausalLM(Qwen2Config(**shape))
        rounds = {"terse": 1}
    # As in the tiny preset, an image is seen once and remembered.
    policy.freeze_vision = args.images
    policy.suppressed_ids = [*policy.suppressed_ids, policy.eos_id]

    for style in rounds:
        speedup, growth = compare(policy, style, args.images, rounds[style])
        text = f"{style}: rollout {speedup:.1f}x >= {SPEEDUP:g}x"
        common.print_verdict(speedup >= SPEEDUP, text)
        common.print_verdict(growth <= GROWTH, f"{style}: growth {growth:.2f} <= {GROWTH:g}\n")


if __name__ == "__main__":
    main()
