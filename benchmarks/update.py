"""Memory and speed of the log-prob pass with gradients, in chunks of tokens against all logits at once.

Paper: Algorithm 1 lines 3, 5, 10 at the size of Table 4 (Qwen2.5: a vocabulary of 151,936).

    python benchmarks/update.py                     one line each; every variant in a process of its own

The model is a two-layer Qwen2 with the real vocabulary, so that the output layer is what counts, as it is for the
0.5B model. `peak` is the highest resident memory of the process above what it held before the first pass.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

import freshper.trainer
from freshper.episode import Episode, collate
from freshper.models import Policy
from freshper.tiny import build_tokenizer, keep_freed_memory
from freshper.trainer import action_logprobs


def measure(
    at_once: int, vocabulary: int, episodes: int, length: int, queue: multiprocessing.Queue
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, num_key_value_heads=4, **shape))
    policy = Policy(model, build_tokenizer(()))
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= length // 4
    batch = collate(
        [
            Episode(rng.integers(0, vocabulary, length).astype(np.int32), mask, np.zeros(length, np.float32), 0.0,
                    np.zeros(1, np.float32))
            for _ in range(episodes)
        ]
    )  # fmt: skip
    freshper.trainer.LOGITS_AT_ONCE = at_once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    logprobs, _ = action_logprobs(policy, batch, 0.99)
    logprobs.sum().backward()
    seconds = time.perf_counter() - began
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    gradient = policy.model.model.layers[0].mlp.up_proj.weight.grad
    queue.put(
        (
            int(batch.action_mask.sum()) / seconds,
            peak,
            logprobs.sum().item(),
            gradient.norm().item(),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--episodes", type=int, default=4, help="of a micro-batch")
    parser.add_argument(
        "--length", type=int, default=512, help="tokens of an episode; three quarters are actions"
    )
    a = parser.parse_args()
    keep_freed_memory()
    context = multiprocessing.get_context("spawn")
    for name, at_once in (("all at once", 2**62), ("in chunks", freshper.trainer.LOGITS_AT_ONCE)):
        queue = context.Queue()
        process = context.Process(
            target=measure, args=(at_once, a.vocabulary, a.episodes, a.length, queue)
        )
        process.start()
        speed, peak, total, norm = queue.get()
        process.join()
        print(
            f"{name:12s} {speed:8,.0f} action tokens/s   peak {peak:5.2f} GiB   sum {total:.3f}   gradient {norm:.6f}"
        )


if __name__ == "__main__":
    main()
