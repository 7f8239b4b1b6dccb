"""How long an iteration of a tiny model takes: with one thread, two, those that train.py chooses,
alone and beside a busy process. Needs two idle cores and two minutes.

    python benchmarks/threads.py

OpenMP's threads wait for each other in a loop. If another process takes one of two cores, each
parallel operation waits until the system gives it back: two threads alone are the fastest, beside a
busy process the slowest. So `choose_threads` (freshper/tiny.py) measures before a run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import numpy as np
import pandas

ITERATIONS = 4
MOST = 120  # seconds of a run


def seconds(threads: str) -> float:
    """Return the median seconds of an iteration. `threads` is OMP_NUM_THREADS, "" for none."""
    folder = Path(tempfile.mkdtemp(), "run")
    flags = f"--env frozenlake --iterations {ITERATIONS} --eval_episodes 8 --out {folder}".split()
    variables = {name: x for name, x in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads:
        variables["OMP_NUM_THREADS"] = threads
    command = [sys.executable, "train.py", *flags]
    try:
        subprocess.run(command, env=variables, capture_output=True, check=True, timeout=MOST)
    except subprocess.TimeoutExpired:
        return MOST / ITERATIONS
    metrics = pandas.read_csv(folder / "metrics.csv")
    columns = ("rollout_s", "logprobs_s", "update_s", "replay_s")
    return float(np.median(sum(metrics[name][1:] for name in columns)))


def main() -> None:
    alone = {threads: seconds(threads) for threads in ("1", "2", "")}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    beside = {threads: seconds(threads) for threads in ("1", "2", "")}
    busy.terminate()

    for name, times in (("alone", alone), ("beside a busy process", beside)):
        for threads, time in times.items():
            ratio = time / alone["1"]
            print(f"{name}, {threads or 'chosen'} threads: {time:.2f} s, {ratio:.2f} of one alone")
    common.print_verdict(
        beside[""] < 2 * alone["1"], "beside others at most twice one thread alone"
    )
    common.print_verdict(alone[""] < 1.1 * min(alone.values()), "alone as fast as the best")


if __name__ == "__main__":
    main()
