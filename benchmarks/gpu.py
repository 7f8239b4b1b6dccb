"""Where the time of a GPU goes: seconds and share of each phase, tokens/s, memory, and what a sync
costs.

    python benchmarks/gpu.py out/gpu                 one GPU: build models, run PLAN, print a table
    python benchmarks/gpu.py out/gpu --only 0.5B     the parts of PLAN whose names contain this
    python benchmarks/gpu.py out/gpu --only tiny     the same on a CPU, with 0.1 M parameters

A model of a real size with random weights, and a run on four GPUs:

    python benchmarks/gpu.py --build 3B-VL out/v
    torchrun --nproc_per_node 2 benchmarks/gpu.py --run out/run --model out/v --env frozenlake_vlm

Paper: section 4.1, appendix F ("GPU Layout"). Run on a CPU only so far. PLAN takes at most 42
minutes: a part of it that needs more than LIMIT seconds is stopped, and one that fails does not
stop the others.

Random weights write replies as long as allowed, so there are as many tokens as there can be.
Nothing is learned from them. The question is whether a sync through the file costs more than 5 % of
an iteration of the paper's preset.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np

LIMIT = 420  # seconds for a part of PLAN
TEXT = "--env frozenlake --backend"
IMAGES = "--env frozenlake_vlm --backend"
PAPER = "vllm+deepspeed --zero_stage 2 --engine_memory 0.4"
# name: model, flags of train.py
PLAN = {
    "0.5B, paper": ("0.5B", f"{TEXT} {PAPER}"),
    "0.5B, paper, ZeRO-3": ("0.5B", f"{TEXT} {PAPER} --zero_stage 3"),
    "0.5B, paper, plain torch trains": ("0.5B", f"{TEXT} vllm+torch --engine_memory 0.4"),
    "0.5B, small, embedded engine": ("0.5B", f"{TEXT} hf+torch --rollout_batch_size 32"),
    "3B-VL, paper": ("3B-VL", f"{IMAGES} {PAPER} --rollout_batch_size 32"),
    "tiny": ("tiny", f"{TEXT} hf+torch --rollout_batch_size 4 --batch_size 4 --max_turns 2"),
}
SHORT = "--iterations 4 --eval_every 4 --eval_episodes 8 --save_every 0 --max_new_tokens 64".split()
PEAK = 989e12  # FLOP/s of an H100 or H200 in bfloat16 without sparsity (NVIDIA's data sheet)
PHASES = ("rollout_s", "logprobs_s", "update_s", "replay_s", "sync_s")

# of Qwen2.5-0.5B-Instruct and Qwen2.5-VL-3B-Instruct
SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "3B-VL": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    },
}
VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
}


def build(size: str, folder: str) -> None:
    """Write a model of this size to the folder, with random weights and the tokenizer of the tiny
    models."""
    import torch
    import transformers as hf
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from envs import ENVS
    from freshper.models import Policy
    from freshper.tiny import build_policy, build_tokenizer

    if size == "tiny":
        build_policy(ENVS["frozenlake"](), heads=2).save(folder)
        return

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    tokenizer = build_tokenizer(ENVS["frozenlake"]().words)
    ids = tokenizer.convert_tokens_to_ids
    ends = {"eos_token_id": ids("<|im_end|>"), "pad_token_id": ids("<|endoftext|>")}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    language = {
        **SIZES[size],
        **ends,
        "bos_token_id": None,
        "vocab_size": 151_936,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
    }
    processor = None

    if size == "0.5B":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**language))
    else:
        rope["mrope_section"] = [16, 24, 24]
        config = hf.Qwen2_5_VLConfig(
            text_config=language,
            vision_config=VISION,
            tie_word_embeddings=True,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
        processor = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2)

    model.generation_config = hf.GenerationConfig(**ends)
    Policy(model, tokenizer, processor).save(folder)


def run(out: str, flags: list[str]) -> int:
    """Run train.py with these flags and print its times, without the first iteration, which warms
    up."""
    import train

    iterations: list[list] = []  # the episodes of each
    rollout = train.rollout

    def recorded_rollout(*arguments: Any) -> list:
        iterations.append(rollout(*arguments))
        return iterations[-1]

    train.rollout = recorded_rollout
    status = train.main([*SHORT, "--out", out, *flags])
    if status or int(os.environ.get("RANK", 0)):
        return status

    with open(f"{out}/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))[2:]
    episodes = sum(iterations[1:], [])
    tokens = sum(len(episode.tokens) for episode in episodes) / len(rows)
    sampled = sum(int(episode.action_mask.sum()) for episode in episodes) / len(rows)
    print_times(out, rows, tokens, sampled)
    return 0


def print_times(out: str, rows: list[dict], tokens: float, sampled: float) -> None:
    """Print the table of a run from the rows of its metrics and its tokens per iteration."""
    import torch

    mean = {}
    for phase in PHASES:
        mean[phase] = np.mean([float(row[phase] or 0) for row in rows])
    counts = {"rollout_s": sampled, "logprobs_s": tokens, "update_s": tokens}
    total = sum(mean.values())
    print(f"\n{tokens:,.0f} tokens per iteration, {sampled:,.0f} of them sampled")
    for phase, seconds in mean.items():
        name = phase.removesuffix("_s")
        speed = f"{counts[phase] / seconds:10,.0f} tokens/s" if phase in counts else ""
        print(f"{name:10s} {seconds:9.3f} s {seconds / total:7.1%} {speed}")

    # A forward and a backward pass take 6 FLOP per parameter and token, without the attention's.
    size = parameter_count(f"{out}/checkpoint")
    flops = 6 * size * tokens / mean["update_s"]
    print(f"update: {flops:.2e} FLOP/s, {flops / PEAK:.1%} of {PEAK:.3g} (H200, bfloat16)")
    if mean["sync_s"] > 1e-3:
        speed = f"{2 * size / 1e9 / mean['sync_s']:.1f} GB/s"
        print(f"sync: {speed}, at 2 bytes a parameter, its proof included")

    for name in ("mismatch", "mismatch_p01", "mismatch_p99", "sync_error"):
        values = [row[name] for row in rows if row[name]]
        print(f"{name} {max(values, key=float, default='-')}")
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"peak memory of the trainer, without vLLM's: {peak:.2f} GiB")


def parameter_count(folder: str) -> int:
    import torch
    import transformers as hf

    config = hf.AutoConfig.from_pretrained(folder)
    is_vlm = hasattr(config, "vision_config")
    model_class = hf.AutoModelForImageTextToText if is_vlm else hf.AutoModelForCausalLM
    with torch.device("meta"):
        return model_class.from_config(config).num_parameters()


def plan(out: Path, only: str) -> None:
    """Run the parts of PLAN one after the other, each in a process of its own, and print their
    tables."""
    for name, (size, flags) in PLAN.items():
        if only not in name or (not only and size == "tiny"):
            continue
        model = out / f"model-{size}"
        if not model.exists():
            build(size, str(model))

        folder = out / name.replace(", ", "-").replace(" ", "-")
        command = [sys.executable, __file__, "--run", str(folder), "--model", str(model)]
        command += flags.split()
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            log = process.stdout + process.stderr
            table = process.stdout.rpartition("\n\n")[2]
            if process.returncode:
                table = f"failed: {log[-2000:]}"
        except subprocess.TimeoutExpired as error:
            log = str(error.stdout)
            table = f"took more than {LIMIT} s"

        folder.with_suffix(".log").write_text(log)
        print(f"== {name}: {flags}\n{table}", flush=True)


def main() -> int:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("out", help="folder")
    add("--only", default="", help="run the parts of PLAN whose names contain this")
    add("--build", choices=[*SIZES, "tiny"], help="only build a model there")
    add("--run", action="store_true", help="run train.py once, with the flags that follow")
    args, flags = parser.parse_known_args()

    if args.build:
        build(args.build, args.out)
        return 0
    if args.run:
        return run(args.out, flags)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    plan(Path(args.out), args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
