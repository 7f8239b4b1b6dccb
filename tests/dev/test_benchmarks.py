"""The benchmarks that need one CPU and no weights run, with little work. What they measure is not
tested."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "checkpoint.py --episodes 50": "to save",
    "mixed_precision.py --episodes 4 --length 24 --rounds 1": "ratio",
    "search.py": "FAISS / numpy",
    "update.py --vocabulary 1000 --length 64": "in chunks",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_runs(command):
    name, *flags = command.split()
    run = [sys.executable, ROOT / "benchmarks" / name, *flags]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert COMMANDS[command] in done.stdout
