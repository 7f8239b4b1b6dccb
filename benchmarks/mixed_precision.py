"""Speed of an update in bfloat16 (autocast, float32 master weights) against float32, in turn, on
one thread.

Paper: appendix F ("BF16 mixed precision").

    python benchmarks/mixed_precision.py            about 2 minutes

The model is a Llama of SmolLM2-135M's shape with random weights. A CPU gains if it multiplies
bfloat16 in hardware (avx512_bf16 or amx in /proc/cpuinfo).
"""

import time

import common
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from freshper.config import Config
from freshper.models import Policy
from freshper.tiny import build_tokenizer, keep_freed_memory
from freshper.trainer import TorchTrainer


def build_policy() -> Policy:
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return Policy(LlamaForCausalLM(config), build_tokenizer(()))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--length", type=int, default=96, help="tokens, a quarter a reply")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)

    policy = build_policy()
    config = Config(model="random", lr=1e-9, micro_batch_size=args.episodes)
    trainer = TorchTrainer(policy, config, 100)
    prompt = 3 * args.length // 4
    episodes = common.random_episodes(args.episodes, args.length, 49_152, prompt)
    # Stored log-probs make all ratios 1.
    trainer.record_behavior_logprobs(episodes)

    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds + 1):
        for mixed in times:
            policy.mixed = mixed
            began = time.perf_counter()
            kl = trainer.update(episodes).stats["kl"]
            seconds = time.perf_counter() - began
            times[mixed].append(seconds)
            print(f"bfloat16 {mixed}: k3 to float32 {kl:.1e}, {seconds:.1f} s")

    # The first round warms up.
    tokens = args.episodes * args.length
    single = tokens / np.median(times[False][1:])
    mixed = tokens / np.median(times[True][1:])
    print(f"float32 {single:.0f} tokens/s, bfloat16 {mixed:.0f}: ratio {mixed / single:.2f}")


if __name__ == "__main__":
    main()
