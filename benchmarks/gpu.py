"""Where the time of a GPU goes: seconds and share of each phase, tokens/s, memory, and what a sync costs.

    python benchmarks/gpu.py out/gpu                     one GPU: builds models, runs everything in PLAN, prints a table
    python benchmarks/gpu.py out/gpu --only 0.5B         the part of PLAN whose names contain this
    python benchmarks/gpu.py out/gpu --only tiny         the same program on a CPU, with a model of 0.1 M parameters
    python benchmarks/gpu.py --build 3B-VL out/v         a model of a real size with random weights, to be used as in
    torchrun --nproc_per_node 2 benchmarks/gpu.py --run out/run --model out/v --env frozenlake_vlm    (4 GPUs)

Paper: section 4.1, appendix F ("GPU Layout"). Run on a CPU only so far. PLAN takes at most 42 minutes: a part of it
that needs more than LIMIT seconds is stopped, and one that fails does not stop the others.

Random weights write replies as long as allowed, so there are as many tokens as there can be; nothing is learned from
them. The question is whether a sync through the file costs more than 5 % of an iteration of the paper's preset.
"""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMIT = 420  # seconds for a part of PLAN
SHARED = "--backend vllm+deepspeed --zero_stage 2 --engine_memory 0.4"
PLAN = {  # name: model, flags of train.py
    "0.5B, paper": ("0.5B", f"--env frozenlake {SHARED}"),
    "0.5B, paper, ZeRO-3": ("0.5B", f"--env frozenlake {SHARED} --zero_stage 3"),
    "0.5B, paper, plain torch trains": (
        "0.5B",
        "--env frozenlake --backend vllm+torch --engine_memory 0.4",
    ),
    "0.5B, small, embedded engine": (
        "0.5B",
        "--env frozenlake --backend hf+torch --rollout_batch_size 32",
    ),
    "3B-VL, paper": ("3B-VL", f"--env frozenlake_vlm {SHARED} --rollout_batch_size 32"),
    "tiny": (
        "tiny",
        "--env frozenlake --backend hf+torch --rollout_batch_size 4 --batch_size 4 --max_turns 2",
    ),
}
COMMON = (
    "--iterations 4 --eval_every 4 --eval_episodes 8 --save_every 0 --max_new_tokens 64".split()
)
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
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def build(size: str, folder: str) -> None:
    """Write a model of this size, with random weights and the tokenizer of the tiny models, to the folder."""
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
    eos, pad = ids("<|im_end|>"), ids("<|endoftext|>")
    language = SIZES[size] | {
        "vocab_size": 151_936,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
    }
    language |= {
        "eos_token_id": eos,
        "pad_token_id": pad,
        "bos_token_id": None,
        "rope_parameters": ROPE,
    }
    language |= {"tie_word_embeddings": True}
    if size == "0.5B":
        model, processor = hf.Qwen2ForCausalLM(hf.Qwen2Config(**language)), None
    else:
        special = {"image_token_id": ids("<|image_pad|>"), "video_token_id": ids("<|video_pad|>")}
        special |= {
            "vision_start_token_id": ids("<|vision_start|>"),
            "vision_end_token_id": ids("<|vision_end|>"),
        }
        text = language | {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}}
        config = hf.Qwen2_5_VLConfig(
            text_config=text, vision_config=VISION, tie_word_embeddings=True, **special
        )
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
        processor = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2)
    model.generation_config = hf.GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    Policy(model, tokenizer, processor).save(folder)


def run(out: str, flags: list[str]) -> int:
    """Run train.py with these flags and print its times, without the first iteration, which warms up."""
    import torch
    import transformers

    import train

    collected: list[list] = []  # the episodes of each iteration
    rollout = train.rollout
    train.rollout = lambda *arguments: collected.append(rollout(*arguments)) or collected[-1]
    status = train.main([*COMMON, "--out", out, *flags])
    if status or int(os.environ.get("RANK", 0)):
        return status
    with open(f"{out}/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))[2:]
    every = [e for episodes in collected[1:] for e in episodes]
    tokens = sum(len(e.tokens) for e in every) / len(rows)
    sampled = sum(int(e.action_mask.sum()) for e in every) / len(rows)
    mean = {phase: sum(float(row[phase] or 0) for row in rows) / len(rows) for phase in PHASES}
    print(f"\n{tokens:,.0f} tokens per iteration, {sampled:,.0f} of them sampled")
    for phase, seconds in mean.items():
        count = {"rollout_s": sampled, "logprobs_s": tokens, "update_s": tokens}.get(phase, 0)
        speed = f"{count / seconds:10,.0f} tokens/s" if count else ""
        print(
            f"{phase.removesuffix('_s'):10s} {seconds:9.3f} s {seconds / sum(mean.values()):7.1%} {speed}"
        )
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(f"{out}/checkpoint")
        kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
        size = getattr(transformers, f"AutoModelFor{kind}").from_config(config).num_parameters()
    flops = (
        6 * size * tokens / mean["update_s"]
    )  # of a forward and a backward pass, without the attention's
    print(f"update: {flops:.2e} FLOP/s, {flops / PEAK:.1%} of {PEAK:.3g} (H200, bfloat16)")
    if mean["sync_s"] > 1e-3:
        print(
            f"sync: {2 * size / 1e9 / mean['sync_s']:.1f} GB/s, at 2 bytes a parameter, its proof included"
        )
    for name in ("mismatch", "mismatch_p01", "mismatch_p99", "sync_error"):
        print(
            f"{name} {max((row[name] for row in rows), key=lambda value: float(value or 0)) or '-'}"
        )
    if torch.cuda.is_available():
        print(
            f"peak memory of the trainer, without vLLM's: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
        )
    return 0


def plan(out: Path, only: str) -> None:
    """Run the parts of PLAN one after the other, each in a process of its own, and print their tables."""
    for name, (size, flags) in PLAN.items():
        if only not in name or (not only and size == "tiny"):
            continue
        model, folder = out / f"model-{size}", out / name.replace(", ", "-").replace(" ", "-")
        if not model.exists():
            build(size, str(model))
        command = [
            sys.executable,
            __file__,
            "--run",
            str(folder),
            "--model",
            str(model),
            *flags.split(),
        ]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            log, said = found.stdout + found.stderr, found.stdout.partition(" tokens per iteration")
            table = said[0].split()[-1] + said[1] + said[2] if said[1] else f"failed: {log[-2000:]}"
        except subprocess.TimeoutExpired as late:
            log, table = str(late.stdout), f"took more than {LIMIT} s"
        folder.with_suffix(".log").write_text(log)
        print(f"== {name}: {flags}\n{table}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("out", help="folder")
    parser.add_argument("--only", default="", help="run the parts of PLAN whose names contain this")
    parser.add_argument("--build", choices=[*SIZES, "tiny"], help="only build a model there")
    parser.add_argument(
        "--run", action="store_true", help="run train.py once, with the flags that follow"
    )
    args, flags = parser.parse_known_args()
    if args.build:
        build(args.build, args.out)
    elif args.run:
        return run(args.out, flags)
    else:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        plan(Path(args.out), args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
