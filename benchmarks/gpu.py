"""What a run of the paper's preset does with its GPUs: tokens/s, the share of each phase, memory, the cost of a sync.

Paper: section 4.1, appendix D ("GPU Layout"). Not run yet on a GPU, for want of one; a test drives it on a CPU.

    python benchmarks/gpu.py --build 0.5B m                                 random weights of a real size, in folder m
    python benchmarks/gpu.py m --env frozenlake                             1 or 2 GPUs: five iterations, then the table
    python benchmarks/gpu.py --build 3B-VL v
    torchrun --nproc_per_node 2 benchmarks/gpu.py v --env frozenlake_vlm    4 GPUs

Flags that are not ours go to train.py. Random weights write replies as long as allowed, so tokens are as many as they
can be; what is learnt from them means nothing. A sync is bounded by the bytes of the model over the bandwidth between
two GPUs (or within one), which is measured by copying.
"""

import argparse
import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).parent.parent))

import train
from envs import ENVS
from freshper.backends import backends
from freshper.config import Config
from freshper.models import Policy
from freshper.tiny import build_tokenizer

# of Qwen2.5-0.5B-Instruct and Qwen2.5-VL-3B-Instruct
SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "3B-VL": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
}
VISION = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
ROPE = {"rope_type": "default", "rope_theta": 1e6}


def build(size: str, folder: str) -> None:
    """A model of this size with random weights and the tokenizer of the tiny models, in the Hugging Face format."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    tokenizer = build_tokenizer(ENVS["frozenlake"]().words)
    ids = tokenizer.convert_tokens_to_ids
    eos, pad = ids("<|im_end|>"), ids("<|endoftext|>")
    language = SIZES[size] | {"vocab_size": 151_936, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
    language |= {"eos_token_id": eos, "pad_token_id": pad, "bos_token_id": None, "rope_parameters": ROPE}
    if size == "0.5B":
        model, processor = Qwen2ForCausalLM(Qwen2Config(**language, tie_word_embeddings=True)), None
    else:
        special = {"image_token_id": ids("<|image_pad|>"), "video_token_id": ids("<|video_pad|>")}
        special |= {"vision_start_token_id": ids("<|vision_start|>"), "vision_end_token_id": ids("<|vision_end|>")}
        text = language | {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}, "tie_word_embeddings": True}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=True, **special)
        model = Qwen2_5_VLForConditionalGeneration(config)
        processor = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    Policy(model, tokenizer, processor).save(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()):,} parameters")


class Clock:
    """Seconds and tokens of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.tokens: dict[str, int] = defaultdict(int)

    def watch(self, thing: Any, name: str, tokens: Callable[[tuple, Any], int]) -> None:
        """Replace a method of this object by one that is timed; `tokens` counts from its arguments and its result."""
        original = getattr(thing, name)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = original(*arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds[name].append(time.perf_counter() - began)
            self.tokens[name] += tokens(arguments, result)
            return result

        setattr(thing, name, timed)

    @contextlib.contextmanager
    def backends(self, policy: Policy, config: Config) -> Iterator[tuple]:
        began = time.perf_counter()
        with backends(policy, config) as (trainer, engine):
            started = time.perf_counter()
            self.watch(engine, "generate", lambda _, replies: sum(len(reply.tokens) for reply in replies))
            self.watch(engine, "sync", lambda *_: 0)
            for name in ("record_behavior_logprobs", "update"):
                self.watch(trainer, name, lambda arguments, _: sum(len(e.tokens) for e in arguments[0]))
            yield trainer, engine
            self.report(time.perf_counter() - started, started - began, policy, trainer)

    def report(self, total: float, start: float, policy: Policy, trainer: Any) -> None:
        print(f"start {start:.1f} s, then {total:.1f} s")
        for name, seconds in self.seconds.items():
            own, tokens = sum(seconds), self.tokens[name]
            speed = f"{tokens / own:10,.0f} tokens/s" if tokens else ""
            print(f"{name:26s} {own / total:6.1%}   {own / len(seconds):8.3f} s each, {len(seconds)} times {speed}")
        print(f"{'everything else':26s} {1 - sum(map(sum, self.seconds.values())) / total:6.1%}")
        size = sum(dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in trainer.shapes())
        if policy.device.type == "cuda":
            bound = size / bandwidth()
            print(f"weights {size / 2**30:.2f} GiB: a sync takes at least {bound:.3f} s at the bandwidth measured here")
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"peak memory of rank 0, without vLLM's: {peak:.2f} GiB")


def bandwidth() -> float:
    """Bytes per second of a copy of 1 GiB to the next GPU, or within the only one."""
    there = torch.device("cuda", 1 if torch.cuda.device_count() > 1 else 0)
    block = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(block, device=there)
    times = []
    for _ in range(5):
        torch.cuda.synchronize(there)
        began = time.perf_counter()
        target.copy_(block)
        torch.cuda.synchronize(there)
        times.append(time.perf_counter() - began)
    return 2**30 / min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="of the model")
    parser.add_argument("--build", choices=list(SIZES), help="build one of this size there, and end")
    args, flags = parser.parse_known_args()
    if args.build:
        build(args.build, args.folder)
        return 0
    train.backends = Clock().backends
    preset = ["--preset", "paper", "--iterations", "5", "--eval_every", "5", "--save_every", "0"]
    status = train.main([*preset, "--model", args.folder, *flags])
    return status if int(os.environ.get("RANK", 0)) == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
