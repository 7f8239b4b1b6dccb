"""Whether a long run leaks: memory, file handles and threads of the real train.py over 2,000 tiny iterations.

    python benchmarks/long_run.py
    python benchmarks/long_run.py --env frozenlake_vlm --iterations 400

The buffer is full after 50 iterations. From then on a line is fitted to the resident memory, sampled from outside
twice a second, and its slope printed, with the range of the number of file handles and threads, and what the logs
have grown by. Memory is looked at after the first fifth of the run, when caches are warm.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from envs import ENVS
from freshper.tiny import build_policy

ROOT = Path(__file__).parent.parent

FLAGS = """--rollout_batch_size 4 --batch_size 4 --eval_episodes 4 --eval_every 50 --save_every 100 --capacity 200
--format_penalty 0.15 --threads 1""".split()


def iterations_done(out):
    path = out / "metrics.csv"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def sample(pid):
    """Resident memory in kB, file handles, threads. Raises OSError where the process has ended."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in status:
        raise ProcessLookupError(f"process {pid} has ended")
    return int(status["VmRSS"].split()[0]), len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["Threads"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="frozenlake")
    parser.add_argument("--iterations", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        build_policy(ENVS[args.env]()).save(f"{folder}/model")
        task = ["--env", args.env, "--model", f"{folder}/model", "--iterations", str(args.iterations)]
        command = [sys.executable, "train.py", *task, *FLAGS]
        began = time.perf_counter()
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen([*command, "--out", str(out)], cwd=ROOT, stdout=log, stderr=log)
            samples = []
            while process.poll() is None:
                try:
                    samples.append((iterations_done(out), *sample(process.pid)))
                except OSError:
                    break
                time.sleep(0.5)
        assert process.wait() == 0, (Path(folder) / "log").read_text()[-2000:]
        logs = {name: (out / name).stat().st_size / 1e3 for name in ("metrics.csv", "replay.csv")}
        state = (out / "checkpoint/state.json").stat().st_size / 1e3
    late = np.array([row for row in samples if row[0] >= args.iterations / 5])
    slope, level = np.polyfit(late[:, 0], late[:, 1], 1)
    print(f"{args.env}, {args.iterations:,} iterations in {time.perf_counter() - began:.0f} s, buffer full at 200")
    print(f"resident memory: {level / 1e3:.0f} MB {slope:+.3f} kB an iteration ({len(late)} samples, from "
          f"{late[:, 1].min() / 1e3:.1f} to {late[:, 1].max() / 1e3:.1f} MB)")  # fmt: skip
    for name, column in (("file handles", 2), ("threads", 3)):
        values, counts = np.unique(late[:, column], return_counts=True)
        print(f"{name}: " + ", ".join(f"{v} in {n} samples" for v, n in zip(values, counts, strict=True)))
    print(", ".join(f"{name} {size:.0f} kB" for name, size in logs.items()), f"state.json {state:.0f} kB")


if __name__ == "__main__":
    main()
