"""examples/track.py puts every row of a run into TensorBoard, once."""

import json
import subprocess
import sys
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TRACK = Path(__file__).parents[2] / "examples/track.py"


def scalars(run):
    """Return the steps and values of each name, as TensorBoard shows them."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in names}


def test_rows_become_steps_while_a_run_goes_on_and_after_it_is_resumed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"iterations": 2}))
    table = tmp_path / "metrics.csv"
    table.write_text("iteration,loss,eval_success\n0,,0.25\n1,0.5,\n2,0.")  # the last row half
    process = subprocess.Popen([sys.executable, TRACK, tmp_path])
    while not list(tmp_path.glob("tensorboard/events*")):
        time.sleep(0.1)
        assert process.poll() is None
    time.sleep(2)
    with table.open("a") as file:
        file.write("125,0.75\n")
    assert process.wait(60) == 0
    first = {"loss": [(1, 0.5), (2, 0.125)], "eval_success": [(0, 0.25), (2, 0.75)]}
    assert scalars(tmp_path) == first

    # resumed from the checkpoint of iteration 1
    table.write_text("iteration,loss,eval_success\n0,,0.25\n1,0.5,\n2,0.25,\n3,0.125,1.0\n")
    (tmp_path / "config.json").write_text(json.dumps({"iterations": 3}))
    subprocess.run([sys.executable, TRACK, tmp_path], check=True)
    loss = [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert scalars(tmp_path) == {"loss": loss, "eval_success": [(0, 0.25), (3, 1.0)]}
