"""examples/track.py puts every row of a run into TensorBoard, once."""

import os
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TRACK = Path(__file__).parents[2] / "examples/track.py"


def scalars(run):
    """Return the steps and values of each name, as TensorBoard shows them."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in names}


def test_rows_become_steps_while_a_run_goes_on_and_after_it_is_resumed(tmp_path):
    table = tmp_path / "metrics.csv"
    with FileLock(tmp_path / ".lock"):
        process = subprocess.Popen([sys.executable, TRACK, tmp_path])
        while not list(tmp_path.glob("tensorboard/events*")):
            time.sleep(0.1)
            assert process.poll() is None
        # the last row half
        table.write_text("iteration,loss,eval_success\n0,,0.25\n1,0.5,\n2,0.")
        time.sleep(2)
        with table.open("a") as file:
            file.write("125,0.75\n")
        assert process.poll() is None
    assert process.wait(60) == 0
    first = {"loss": [(1, 0.5), (2, 0.125)], "eval_success": [(0, 0.25), (2, 0.75)]}
    assert scalars(tmp_path) == first

    # resumed from the checkpoint of iteration 1
    table.write_text("iteration,loss,eval_success\n0,,0.25\n1,0.5,\n2,0.25,\n3,0.125,1.0\n")
    subprocess.run([sys.executable, TRACK, tmp_path], check=True)
    loss = [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert scalars(tmp_path) == {"loss": loss, "eval_success": [(0, 0.25), (3, 1.0)]}


def test_runs_of_two_comparisons_are_two_in_wandb_and_a_resumed_one_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "wandb.py").write_text("def init(id, **_): print(id)")
    ids = []
    for comparison in ("one", "two", "one"):
        run = tmp_path / comparison / "freshper-seed1"
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.json").write_text("{}")
        ids.append(subprocess.check_output([sys.executable, TRACK, run, "--wandb", "lakes"]))
    assert ids[0] == ids[2] != ids[1]
