"""Kill a run again and again and resume it: it must end as one that was never killed, bit for bit.

SIGKILL comes at random moments of short runs of the real train.py that save after every iteration.
tests/test_checkpoint.py calls it.
"""

import csv
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

SHORT = """--rollout_batch_size 2 --batch_size 2 --eval_episodes 2 --eval_every 4
--max_turns 2 --max_new_tokens 4 --save_every 1""".split()
SERVER = multiprocessing.get_context("forkserver")  # imports torch once, not at every start
SERVER.set_forkserver_preload(["train"])


def child(flags, model, log):
    """Run train.py on a tiny model with random weights, in a process of its own."""
    import torch

    import train
    from freshper import backends

    torch.set_num_threads(1)  # a run that starts over could choose another number
    backends.tiny_model = lambda env: Path(model)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(train.main(flags))


def start(model, out, iterations):
    """Start a run, or resume it if it has a config.json."""
    flags = ["--resume", str(out)]
    if not (out / "config.json").is_file():
        shutil.rmtree(out, ignore_errors=True)
        flags = ["--out", str(out), "--iterations", str(iterations), *SHORT]
    process = SERVER.Process(target=child, args=(flags, model, f"{out}.log"))
    process.start()
    return process


def finish(process, out):
    process.join()
    assert process.exitcode == 0, Path(f"{out}.log").read_text()


def state_of(folder):
    """Return what state.pt and optimizer-0.pt hold, tensors as type and values."""
    import torch
    from torch.utils import _pytree

    state = torch.load(folder / "state.pt", weights_only=True)
    state["optimizer"] = torch.load(folder / "optimizer-0.pt", weights_only=True)
    return _pytree.tree_map_only(torch.Tensor, lambda x: (x.dtype, x.tolist()), state)


def contents(out):
    """Return what must be equal: metrics.csv without seconds, replay.csv, the state without that of
    the report, and the weights."""
    with open(out / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for name in list(row):
            if name.endswith("_s"):
                del row[name]
    state = state_of(out / "checkpoint") | {"report": None}
    return (
        rows,
        (out / "replay.csv").read_text(),
        state,
        (out / "checkpoint/model.safetensors").read_bytes(),
    )


def rows(out):
    """Return the number of lines of metrics.csv."""
    metrics = out / "metrics.csv"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def kill_and_resume(model, folder, iterations, kills):
    """Return how many kills hit a living process. Raises AssertionError if the killed run differs
    from the other."""
    plain, killed = folder / "plain", folder / "killed"
    finish(start(model, plain, iterations), plain)
    rng = random.Random(0)
    hits = 0
    for _ in range(kills):
        before = rows(killed)
        process = start(model, killed, iterations)
        while process.is_alive() and rows(killed) == before:
            time.sleep(0.001)
        process.join(rng.uniform(0, 0.5))
        process.kill()
        process.join()
        hits += process.exitcode == -signal.SIGKILL
    finish(start(model, killed, iterations), killed)
    assert contents(plain) == contents(killed)
    return hits
