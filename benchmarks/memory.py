"""Bytes per parameter that a trainer holds, and at the peak of an update: the table of
docs/gpus.md.

    python benchmarks/memory.py              plain torch, ZeRO 0 to 3
    python benchmarks/memory.py --only torch
    python benchmarks/memory.py --only ZeRO --ranks 2      of rank 0

Each line is a process of its own, or one per rank, on the CPU: a model of 68 million parameters in
bfloat16 as --dtype means it, and two micro-batches so small that activations do not count. `held`
is the resident memory between two updates, `peak` the highest during one, both above what the
process had before the model. AdamW is torch's fused one, which the trainer asks for on a GPU. The
lines with ZeRO need DeepSpeed.
"""

import multiprocessing
import os
import socket
from pathlib import Path

import common
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from freshper.backends import join_ranks, make_trainer, serve
from freshper.flags import parse_args
from freshper.models import Policy
from freshper.tiny import build_tokenizer

TRAINERS = {
    "torch": "--backend hf+torch",
    "ZeRO-0": "--backend hf+deepspeed --zero_stage 0",
    "ZeRO-1": "--backend hf+deepspeed --zero_stage 1",
    "ZeRO-2": "--backend hf+deepspeed --zero_stage 2",
    "ZeRO-3": "--backend hf+deepspeed --zero_stage 3",
}
# Without KL terms there is no copy of the policy.
SETTINGS = "--micro_batch_size 1 --kl_loss_coef 0 --kl_reward_coef 0"
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


def measure(rank: int, variables: dict[str, str], flags: str, queue: multiprocessing.Queue) -> None:
    """Put bytes held per parameter, and bytes at the peak, on rank 0."""
    torch.set_num_threads(1)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    config = parse_args(f"{flags} --preset tiny --dtype bfloat16 {SETTINGS}".split())
    join_ranks(config)
    adamw = torch.optim.AdamW
    torch.optim.AdamW = lambda *given, **named: adamw(*given, **named | {"fused": True})
    before = resident("VmRSS")

    policy = build_policy(torch.float32 if config.trainer == "torch" else torch.bfloat16)
    policy.mixed = config.trainer == "torch"
    parameters = sum(x.numel() for x in policy.model.parameters())
    if rank:
        serve(policy, config)
        return
    trainer = make_trainer(policy, config)
    episodes = common.random_episodes(2, LENGTH, VOCABULARY, LENGTH // 2)
    for _ in range(UPDATES):
        held = resident("VmRSS") - before
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        trainer.update(episodes)

    peak = resident("VmHWM") - before
    queue.put((held / parameters, peak / parameters))
    trainer.close()


def run(flags: str, ranks: int) -> tuple[float, float]:
    """Start a process per rank. Returns what `measure` puts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = []
    for rank in range(ranks):
        arguments = (rank, world, flags, queue)
        processes.append(context.Process(target=measure, args=arguments))
        processes[-1].start()

    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"{flags} failed")
    return queue.get()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", help="trainers whose name contains this")
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    # Freed memory goes back to the system at once.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"

    print("trainer   held  peak  bytes per parameter", flush=True)
    for name, flags in TRAINERS.items():
        if args.only in name:
            held, peak = run(flags, args.ranks)
            print(f"{name:8s}  {held:4.1f}  {peak:4.1f}", flush=True)


if __name__ == "__main__":
    main()
