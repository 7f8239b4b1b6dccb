"""Kill a run again and again and resume it: in the end it must be the run that was never killed, byte for byte.

    python tests/kill_loop.py --kills 50

SIGKILL comes at random moments of short runs of the real train.py that save after every iteration, so that many
of them fall into a save. A run that was killed before it had a config.json is started anew. tests/test_resume.py
does the same with fewer kills.
"""

import argparse
import csv
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
SHORT = """--rollout_batch_size 2 --batch_size 2 --eval_episodes 2 --eval_every 4 --format_penalty 0.15 --max_turns 3
--save_every 1 --threads 1""".split()


SERVER = multiprocessing.get_context("forkserver")  # imports torch once, not once a kill
SERVER.set_forkserver_preload(["train"])


def child(flags, log):
    """A process of its own that runs train.py with these flags."""
    import train

    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(train.main(flags))


def start(model, out, iterations):
    """A new run, or the rest of one. One that was killed before it had a config.json is started anew."""
    if (out / "config.json").is_file():
        flags = ["--resume", str(out)]
    else:
        shutil.rmtree(out, ignore_errors=True)
        flags = ["--model", model, "--out", str(out), "--iterations", str(iterations), *SHORT]
    process = SERVER.Process(target=child, args=(flags, f"{out}.log"))
    process.start()
    return process


def finish(process, out):
    process.join()
    assert process.exitcode == 0, Path(f"{out}.log").read_text()


def wait_for_work(out, process, seen):
    """Until the run has begun to write rows of its own: a kill during the imports tests little."""
    while process.is_alive():
        path = out / "metrics.csv"
        if path.exists() and path.stat().st_mtime_ns != seen:
            return
        time.sleep(0.002)


def contents(out):
    """What must be equal: rows without the clock, weights, arrays of the state, episodes. How these are spread over
    files depends on when checkpoints were saved, and may differ."""
    from safetensors.torch import load_file, save

    from freshper import checkpoint
    from freshper.packing import flatten, pack_episodes

    with open(out / "metrics.csv", newline="") as file:
        rows = [{k: v for k, v in row.items() if k != "wall_s"} for row in csv.DictReader(file)]
    found = checkpoint.find(out)[0]
    assert found.folder == out / "checkpoint"
    arrays = load_file(out / "checkpoint/state.safetensors")
    del arrays["/episodes/places"]
    infos = flatten(pack_episodes(checkpoint.read_state(found)["episodes"]), arrays)
    return rows, infos, save(arrays), (out / "checkpoint/model.safetensors").read_bytes()


def kill_and_resume(model, folder, iterations, kills, seed):
    """Returns (kills that hit a living process, of these how many hit an unfinished save). Raises AssertionError
    where the killed run differs from the other one."""
    rng = random.Random(seed)
    plain, killed = folder / "plain", folder / "killed"
    finish(start(model, plain, iterations), plain)
    hits = saves = 0
    while True:
        path = killed / "metrics.csv"
        seen = path.stat().st_mtime_ns if path.exists() else None
        process = start(model, killed, iterations)
        if hits < kills:
            wait_for_work(killed, process, seen)
            time.sleep(rng.uniform(0, 0.6))
            if rng.random() < 0.5:  # in the middle of a save
                while process.is_alive() and not (killed / ".checkpoint-unfinished").exists():
                    time.sleep(0.0005)
                time.sleep(rng.uniform(0, 0.03))
        if hits == kills or not process.is_alive():
            finish(process, killed)
            break
        process.kill()
        process.join()
        hits += process.exitcode == -signal.SIGKILL
        saves += (killed / ".checkpoint-unfinished").exists()
    assert contents(plain) == contents(killed)
    return hits, saves


def main():
    from envs import ENVS
    from freshper.tiny import build_policy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        build_policy(ENVS["frozenlake"]()).save(model)
        began = time.perf_counter()
        hits, saves = kill_and_resume(model, Path(folder), args.iterations, args.kills, args.seed)
    print(
        f"killed {hits} times, {saves} of them in a save, over {args.iterations} iterations: the same run, byte for "
        f"byte ({time.perf_counter() - began:.0f} s)"
    )


if __name__ == "__main__":
    main()
