"""Bytes per parameter that a trainer holds, and at the peak of an update: the table of
docs/gpus.md.

    export MALLOC_MMAP_THRESHOLD_=65536        freed memory goes back to the system at once
    python benchmarks/memory.py --backend hf+torch
    python benchmarks/memory.py --backend vllm+deepspeed --zero_stage 2
    torchrun --nproc_per_node 2 benchmarks/memory.py --backend vllm+deepspeed --zero_stage 2

On the CPU: a model of 68 million parameters in bfloat16 as --dtype means it, and two micro-batches
so small that activations do not count. `held` is the resident memory between two updates, `peak`
the highest during one, both above what rank 0 had before the model. AdamW is torch's fused one,
which the trainer asks for on a GPU. Without KL terms there is no copy of the policy.
"""

import sys
from pathlib import Path

import common  # noqa: F401
import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from freshper.backends import join_ranks, make_trainer
from freshper.episode import Episode, collate
from freshper.flags import parse_args
from freshper.models import Policy
from freshper.tiny import build_tokenizer

SETTINGS = """--preset tiny --dtype bfloat16 --micro_batch_size 1 --kl_loss_coef 0
--kl_reward_coef 0""".split()
VOCABULARY = 1000
LENGTH = 16  # tokens of an episode
UPDATES = 3  # Adam's moments exist after the first, and the last one is measured


def resident(name: str) -> int:
    """Return bytes of resident memory: VmRSS, those of now, or VmHWM, the most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def build_policy(dtype: torch.dtype) -> Policy:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    return Policy(Qwen2ForCausalLM(config).to(dtype), build_tokenizer(()))


def main() -> None:
    torch.set_num_threads(1)
    config = parse_args([*SETTINGS, *sys.argv[1:]])
    rank = join_ranks(config)
    adamw = torch.optim.AdamW
    torch.optim.AdamW = lambda *given, **named: adamw(*given, **named | {"fused": True})
    before = resident("VmRSS")

    plain = config.trainer == "torch"
    policy = build_policy(torch.float32 if plain else torch.bfloat16)
    policy.mixed = plain
    parameters = sum(x.numel() for x in policy.model.parameters())
    trainer = make_trainer(policy, config)
    if rank:
        from freshper.trainer_deepspeed import serve

        serve(trainer)
        return

    mask = np.arange(LENGTH) >= LENGTH // 2
    zeros = np.zeros(LENGTH, np.float32)
    tokens = zeros.astype(np.int32)
    episodes = [Episode(tokens, mask, zeros, reward, np.array([reward])) for reward in (0.0, 1.0)]
    batch = collate(episodes)
    advantages = torch.where(batch.action_mask, torch.tensor([[-1.0], [1.0]]), 0.0)
    for _ in range(UPDATES):
        held = resident("VmRSS") - before
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        trainer.update(batch, advantages)
    peak = resident("VmHWM") - before
    print(f"{held / parameters:.1f} held, {peak / parameters:.1f} at the peak, bytes per parameter")
    trainer.close()


if __name__ == "__main__":
    main()
