"""Kill a run again and again and resume it: it must end as one that was never killed, bit for bit.

SIGKILL comes at random moments of short runs of the real train.py that save after every iteration.
Half of the kills are aimed at a save. tests/test_checkpoint.py calls it.
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
    import train
    from freshper import backends

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


def written(path):
    """Return when a file or folder was last changed, 0 if there is none."""
    return path.stat().st_mtime_ns if path.exists() else 0


def wait_for(process, path, before, longest, rng):
    """Sleep until a file is written, and then for up to `longest` seconds."""
    while process.is_alive() and written(path) in (0, before):
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, longest))


def kill_and_resume(model, folder, iterations, kills):
    """Return how many kills hit a living process. Raises AssertionError if the killed run differs
    from the other."""
    rng = random.Random(0)
    hits = 0
    plain = folder / "plain"
    killed = folder / "killed"
    metrics = killed / "metrics.csv"
    new = killed / ".checkpoint-new"
    finish(start(model, plain, iterations), plain)
    while True:
        row, unfinished = written(metrics), written(new)
        process = start(model, killed, iterations)
        if hits < kills:  # a kill during the imports tests little: wait for the first row
            wait_for(process, metrics, row, 0.6, rng)
            if rng.random() < 0.5:
                wait_for(process, new, unfinished, 0.03, rng)
        if hits == kills or not process.is_alive():
            finish(process, killed)
            break
        process.kill()
        process.join()
        hits += process.exitcode == -signal.SIGKILL
    assert contents(plain) == contents(killed)
    return hits
