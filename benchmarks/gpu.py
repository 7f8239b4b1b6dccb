"""What a model's training costs with each backend: a few iterations of train.py, a table of each.

    python benchmarks/gpu.py out/gpu --model FOLDER_OR_HUB_ID     all of PLAN, on one GPU
    python benchmarks/gpu.py out/gpu --only hf+torch --preset tiny --dtype float32     also on a CPU

Paper: section 4.1, appendix F. The first column is the iteration. The first one warms up, and the
column `mismatch` shows whether a sync arrived. Other flags than those below are train.py's, and
replace those of SHORT. A part that fails, perhaps because its packages are not installed, does not
stop the others, and its last lines are printed. Begin with nothing else on the card: vLLM measures
what is free.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import common  # noqa: F401
import pandas

PLAN = [
    "vllm+deepspeed --zero_stage 2",
    "vllm+deepspeed --zero_stage 3",
    "vllm+torch",
    "hf+deepspeed --zero_stage 2",
    "hf+torch",
]
SHORT = """--preset paper --env frozenlake --iterations 3 --eval_every 3 --eval_episodes 8
--max_turns 2 --max_new_tokens 32 --max_tokens 1024 --rollout_batch_size 32 --batch_size 32
--save_every 0"""
COLUMNS = "tokens rollout_s logprobs_s update_s replay_s sync_s wall_s mismatch"


def table(folder: Path, flags: list[str], minutes: float) -> str:
    """Return what a run measured, and how it ended."""
    command = [sys.executable, "train.py", "--out", str(folder), *flags]
    log = folder.with_suffix(".log")
    ended = ""
    with open(log, "w") as file:
        try:
            subprocess.run(command, stdout=file, stderr=file, timeout=60 * minutes, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as failure:
            ended = f"{type(failure).__name__}: {log.read_text()[-1500:]}"
    ended = ended or log.read_text().splitlines()[-1]  # with the run's memory
    rows = folder / "metrics.csv"
    if not rows.exists():
        return ended
    numbers = pandas.read_csv(rows, index_col="iteration")[1:].filter(COLUMNS.split())
    return f"{numbers.to_string(float_format='%.4g')}\n{ended}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the runs and their output")
    parser.add_argument("--only", default="", help="parts of PLAN that contain this")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each part, at most")
    args, others = parser.parse_known_args()

    args.out.mkdir(parents=True)
    for part in PLAN:
        if args.only in part:
            print(f"== {part}")
            flags = [*SHORT.split(), "--backend", *part.split(), *others]
            print(table(args.out / part.replace(" --zero_stage ", "-"), flags, args.minutes))


if __name__ == "__main__":
    main()
