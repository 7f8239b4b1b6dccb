"""Parts of benchmarks/gpu.py run on a CPU, with tiny models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def results(out, *flags):
    command = [sys.executable, "benchmarks/gpu.py", str(out), "--small", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (out / "results.txt").read_text()


@pytest.mark.parametrize("part", ["0.5B, vLLM, ZeRO-3", "tiny, text"])
def test_the_table_of_a_part(part, tmp_path):
    text = results(tmp_path, "--only", part, "--minutes", "150")  # vLLM starts slowly
    assert 0 < float(re.search(r"FLOP/s, (\S+)% of a matrix product's", text)[1]) < 100
    assert float(re.search(r"mismatch (\S+)", text)[1]) < 1e-5
    if part.startswith("tiny"):
        assert re.search(r"^0 +0\.\d+ +0\.[12]", text, re.MULTILINE)


def test_after_its_minutes_all_parts_are_left_out(tmp_path):
    assert results(tmp_path, "--minutes", "0").count("\nleft out: ") == 10


def test_a_part_has_a_fifth_of_the_minutes(tmp_path):
    # Of 21 seconds: a second part would have fewer than it needs.
    text = results(tmp_path, "--minutes", "0.35", "--only", "tiny")
    assert text.count("\nstopped: ") == text.count("\nleft out: ") == 1


def test_kernels_of_a_call(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    class Adder:
        def add(self, x, times):
            for _ in range(times):
                x = x + x
            return x

    lines = []
    gpu.profile_call(Adder, "add", 2, lines)
    assert [Adder().add(torch.ones(3), times).sum() for times in (9, 5, 7)] == [1536, 96, 384]
    assert len(lines) == 1 and lines[0].startswith("a call of add: 5 kernels")
