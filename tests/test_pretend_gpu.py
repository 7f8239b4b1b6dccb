"""Runs of the real train.py on the pretend GPU (tests/pretend_gpu.py), resumed there or on the CPU.

The device computes what the CPU computes, so the oracle of a run is the same run on the CPU, never
stopped.
"""

import multiprocessing
import os
import signal
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

import train
from freshper.config import Config
from freshper.diagnostics import read
from freshper.report import Report

SERVER = multiprocessing.get_context("forkserver")  # imports torch once, not at every start
SERVER.set_forkserver_preload(["train"])
SHORT = """--iterations 3 --rollout_batch_size 8 --eval_episodes 4 --eval_every 3
--save_every 0 --max_turns 2 --micro_batch_size 8 --lr 0.01""".split()
# the device that a run is resumed on, its flags
RUNS = {
    "text": ("pretend", "--env gsm8k --batch_size 4 --entropy_coef 0.01 --kl_reward_coef 0.1"),
    "images": ("cpu", "--env geoqa --batch_size 4 --kl_loss_coef 0.05 --base_priority advantage"),
}


def child(second, out, flags):
    """Run train.py on the pretend GPU until it is stopped in the second of three iterations, and
    resume it on the device `second`."""
    with open(f"{out}.log", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pretend_gpu

    pretend_gpu.install()
    Figure.savefig = lambda *_, **__: None
    row = Report.row

    def row_and_stop(report, *arguments):
        if report.done == 1:
            signal.raise_signal(signal.SIGTERM)
        return row(report, *arguments)

    Report.row = row_and_stop
    Config.device = pretend_gpu.NAME
    status = train.main(["--out", out, *SHORT, *flags])
    if status == 143:
        Config.device = second
        status = train.main(["--resume", out, "--iterations", "3"])
    sys.exit(status)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu_is_the_run_on_a_cpu(name, tmp_path, monkeypatch):
    second, flags = RUNS[name]
    process = SERVER.Process(target=child, args=(second, str(tmp_path / "gpu"), flags.split()))
    process.start()
    process.join()
    output = (tmp_path / "gpu.log").read_text()
    assert process.exitcode == 0, output
    assert f"resuming from {tmp_path / 'gpu/checkpoint'}, after iteration 2 of 3" in output
    table = read(tmp_path / "gpu", "metrics.csv")

    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    assert train.main(["--out", str(tmp_path / "cpu"), *SHORT, *flags.split()]) == 0
    expected = read(tmp_path / "cpu", "metrics.csv")
    for column in expected:
        if not column.endswith("_s"):
            close = {"rtol": 1e-3, "atol": 1e-5, "err_msg": column}
            np.testing.assert_allclose(table[column], expected[column], **close)
