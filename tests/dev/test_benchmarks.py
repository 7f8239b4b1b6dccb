"""Benchmarks that are quick run, and what they compare agrees. What they measure is not tested."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["replay.py", "memory.py --backend hf+torch"])
def test_a_benchmark_runs(command):
    words = [sys.executable, *f"benchmarks/{command}".split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
