"""examples/track.py puts every row of a run that is still going into TensorBoard, once."""

import json
import subprocess
import sys
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TRACK = Path(__file__).parents[2] / "examples/track.py"


def test_rows_become_steps_while_the_run_goes_on(tmp_path):
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

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    values = {}
    for name in events.Tags()["scalars"]:
        values[name] = [(point.step, point.value) for point in events.Scalars(name)]

    assert values == {"loss": [(1, 0.5), (2, 0.125)], "eval_success": [(0, 0.25), (2, 0.75)]}


def test_a_folder_without_a_run_is_refused(tmp_path):
    done = subprocess.run([sys.executable, TRACK, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"run is {tmp_path}, but must be a folder with a metrics.csv" in done.stderr
