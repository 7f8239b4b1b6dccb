"""Benchmarks that are quick run, and what they compare agrees. What they measure is not tested."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


COMMANDS = ["replay.py", "memory.py --backend hf+torch"]
COMMANDS += ["gpu.py OUT --only hf+torch --preset tiny --dtype float32 --iterations 1"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_runs(command, tmp_path):
    command = command.replace("OUT", str(tmp_path / "out"))
    words = [sys.executable, *f"benchmarks/{command}".split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    if "gpu.py" in command:
        row = done.stdout.split("\n1 ", 1)[1].splitlines()[0]
        assert float(row.split()[-1]) < 1e-6  # mismatch
