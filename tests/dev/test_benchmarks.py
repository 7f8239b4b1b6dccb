"""The benchmark of search runs, with little work. What it measures is not tested."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_of_search_runs():
    run = [sys.executable, ROOT / "benchmarks/search.py"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FAISS / numpy" in done.stdout
