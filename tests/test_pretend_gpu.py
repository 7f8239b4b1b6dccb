"""Runs of the real train.py on the pretend GPU (tests/pretend_gpu.py), resumed there or on the CPU.

The device computes what the CPU computes, so the oracle of a run is the same run on the CPU, never
stopped.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from kill_loop import SERVER
from matplotlib.figure import Figure

import train
from freshper import trainer
from freshper.config import Config
from freshper.diagnostics import read
from freshper.report import Report

SHORT = """--iterations 3 --rollout_batch_size 8 --eval_episodes 4 --eval_every 3
--save_every 0 --max_turns 2 --micro_batch_size 8 --lr 0.01""".split()
IMAGES = "--env geoqa --batch_size 4"
CPU = "cpu"
GPU = "pretend"
# where a run starts, where it is resumed, its flags
RUNS = {
    "text": (GPU, GPU, "--env gsm8k --batch_size 4 --entropy_coef 0.01"),
    "images from the GPU": (GPU, CPU, f"{IMAGES} --kl_loss_coef 0.05 --base_priority advantage"),
    "images to the GPU": (CPU, GPU, f"{IMAGES} --kl_reward_coef 0.1 --micro_batch_size 2"),
}


def child(first, second, out, flags, bug=False):
    """Run train.py on the device `first` until it is stopped in the second of three iterations, and
    resume it on `second`."""
    with open(f"{out}.log", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pretend_gpu

    pretend_gpu.install()
    if bug:
        # Sampled tokens stay on the CPU.
        score = trainer.token_scores
        trainer.token_scores = lambda *given: score(*given[:-1], given[-1].cpu())
    Figure.savefig = lambda *_, **__: None
    row = Report.row

    def row_and_stop(report, *arguments):
        if report.done == 1:
            signal.raise_signal(signal.SIGTERM)
        return row(report, *arguments)

    Report.row = row_and_stop
    Config.device = first
    status = train.main(["--out", out, *SHORT, *flags])
    if status == 143:
        Config.device = second
        status = train.main(["--resume", out, "--iterations", "3"])
    sys.exit(status)


def run_and_resume(first, second, out, flags, bug=False):
    """Return the exit status of `child`, and what it printed."""
    arguments = (first, second, str(out), flags.split(), bug)
    process = SERVER.Process(target=child, args=arguments)
    process.start()
    process.join()
    return process.exitcode, Path(f"{out}.log").read_text()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_gpu_is_the_run_on_a_cpu(name, tmp_path, monkeypatch):
    first, second, flags = RUNS[name]
    status, output = run_and_resume(first, second, tmp_path / "gpu", flags)
    assert status == 0, output
    assert f"resuming from {tmp_path / 'gpu/checkpoint'}, after iteration 2 of 3" in output
    table = read(tmp_path / "gpu", "metrics.csv")

    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    assert train.main(["--out", str(tmp_path / "cpu"), *SHORT, *flags.split()]) == 0
    expected = read(tmp_path / "cpu", "metrics.csv")
    for column in expected:
        if not column.endswith("_s"):
            close = {"rtol": 1e-3, "atol": 1e-5, "err_msg": column}
            np.testing.assert_allclose(table[column], expected[column], **close)


def test_a_planted_bug_is_noticed(tmp_path):
    first, second, flags = RUNS["text"]
    status, output = run_and_resume(first, second, tmp_path / "gpu", flags, bug=True)
    assert status == 1
    assert "RuntimeError: Expected all tensors to be on the same device" in output
