"""Memory and speed of the log-prob pass with gradients, in chunks of tokens against all logits at
once.

Paper: Algorithm 1 lines 3, 5, 10 at the size of Table 4 (Qwen2.5: a vocabulary of 151,936).

    python benchmarks/update.py                     one line per variant, in a process of its own

The model is a two-layer Qwen2 with the real vocabulary, so that the output layer is what counts, as
it is for the 0.5B model. `peak` is the highest resident memory of the process above what it held
before the first pass.
"""

import argparse
import multiprocessing
import resource
import time

import common
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import freshper.trainer
from freshper.episode import collate
from freshper.models import Policy
from freshper.tiny import build_tokenizer, keep_freed_memory
from freshper.trainer import action_logprobs


def build_policy(vocabulary: int) -> Policy:
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return Policy(Qwen2ForCausalLM(config), build_tokenizer(()))


def peak_gib() -> float:
    """Return the highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(args: argparse.Namespace, at_once: int, queue: multiprocessing.Queue) -> None:
    """Put action tokens/s, the peak, and two numbers by which the variants must agree."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = build_policy(args.vocabulary)
    prompt = args.length // 4
    episodes = common.random_episodes(args.episodes, args.length, args.vocabulary, prompt)
    batch = collate(episodes)
    freshper.trainer.LOGITS_AT_ONCE = at_once

    before = peak_gib()
    began = time.perf_counter()
    logprobs, _ = action_logprobs(policy, batch, 0.99)
    logprobs.sum().backward()
    speed = int(batch.action_mask.sum()) / (time.perf_counter() - began)

    gradient = policy.model.model.layers[0].mlp.up_proj.weight.grad
    queue.put((speed, peak_gib() - before, logprobs.sum().item(), gradient.norm().item()))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--episodes", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--length", type=int, default=512, help="tokens, a quarter a prompt")
    args = parser.parse_args()
    keep_freed_memory()

    context = multiprocessing.get_context("spawn")
    variants = {"all at once": 2**62, "in chunks": freshper.trainer.LOGITS_AT_ONCE}
    for name, at_once in variants.items():
        queue = context.Queue()
        process = context.Process(target=measure, args=(args, at_once, queue))
        process.start()
        speed, peak, total, norm = queue.get()
        process.join()
        agreement = f"sum {total:.3f}   gradient {norm:.6f}"
        print(f"{name:12s} {speed:8,.0f} action tokens/s   peak {peak:5.2f} GiB   {agreement}")


if __name__ == "__main__":
    main()
