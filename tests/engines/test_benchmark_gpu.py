"""Parts of benchmarks/gpu.py run on a CPU, with tiny models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def results(out, *flags):
    command = [sys.executable, "benchmarks/gpu.py", str(out), "--small", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (out / "results.txt").read_text()


@pytest.mark.parametrize("part", ["0.5B, vLLM, ZeRO-3", "tiny, text"])
def test_the_table_of_a_part(part, tmp_path):
    text = results(tmp_path, "--only", part)
    assert 0 < float(re.search(r"FLOP/s, (\S+)% of a matrix product's", text)[1]) < 100
    assert float(re.search(r"mismatch (\S+)", text)[1]) < 1e-5
    if part.startswith("tiny"):
        assert re.search(r"^0 +0\.\d+ +0\.[12]", text, re.MULTILINE)


def test_after_its_minutes_all_parts_are_left_out(tmp_path):
    assert results(tmp_path, "--minutes", "0").count("\nleft out: ") == 10
