"""Speed of an update in bfloat16 (autocast, float32 master weights) against float32, in turn, on one thread.

Paper: appendix F ("BF16 mixed precision").

    python benchmarks/mixed_precision.py            a Llama of SmolLM2-135M's shape with random weights, about 2 minutes

A CPU gains if it multiplies bfloat16 in hardware (avx512_bf16 or amx in /proc/cpuinfo).
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from freshper.config import Config
from freshper.episode import Episode
from freshper.models import Policy
from freshper.tiny import build_tokenizer, keep_freed_memory
from freshper.trainer import TorchTrainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument(
        "--length", type=int, default=96, help="tokens of an episode, a quarter of them a reply"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    shape = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=49_152, num_key_value_heads=3, tie_word_embeddings=True, **shape)
    )
    policy = Policy(model, build_tokenizer(()))
    trainer = TorchTrainer(
        policy, Config(model="random", lr=1e-9, micro_batch_size=args.episodes), 100
    )
    rng = np.random.default_rng(0)
    mask = np.arange(args.length) >= 3 * args.length // 4
    episodes = [
        Episode(rng.integers(0, 49_152, args.length).astype(np.int32), mask, np.zeros(args.length, np.float32), reward,
                np.full(1, reward, np.float32))
        for reward in rng.random(args.episodes)
    ]  # fmt: skip
    trainer.record_behavior_logprobs(episodes)  # so that the ratios are 1
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds + 1):
        for policy.mixed in seconds:
            began = time.perf_counter()
            update = trainer.update(episodes)
            seconds[policy.mixed].append(time.perf_counter() - began)
            print(
                f"bfloat16 {policy.mixed}: k3 to float32 {update.stats['kl']:.1e}, {seconds[policy.mixed][-1]:.1f} s"
            )
    single, mixed = (
        np.median(times[1:]) for times in seconds.values()
    )  # the first of each warms up
    tokens = args.episodes * args.length
    print(
        f"float32 {tokens / single:.0f} tokens/s, bfloat16 {tokens / mixed:.0f}: ratio {single / mixed:.2f}"
    )


if __name__ == "__main__":
    main()
