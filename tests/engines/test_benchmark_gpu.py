"""Every part of benchmarks/gpu.py runs on a CPU, with tiny models and SmolLM2."""

import os
import re
import subprocess
import sys
from pathlib import Path

from pretrained import smollm2

ROOT = Path(__file__).parents[2]


def test_every_part_of_the_plan(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", str(tmp_path), "--small"]
    command += ["--smollm2", str(smollm2())]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    results = (tmp_path / "results.txt").read_text()
    assert results in done.stdout + "\n"

    parts = results.split("== ")[1:]
    assert len(parts) == 11, done.stderr
    for part in parts:
        assert re.search(r"^CPU; torch 2\S+, transformers \d", part, re.MULTILINE), part
        counts = re.search(
            r"([\d,]+) tokens collected, ([\d,]+) .*, ([\d,]+) tokens replayed", part
        )
        collected, sampled, replayed = (int(n.replace(",", "")) for n in counts.groups())
        assert 0 < sampled < collected < replayed  # two replay updates of as many episodes
        curve = re.findall(r"^iteration +(\d): success \d", part, re.MULTILINE)
        assert curve == (["0", "2"] if part.startswith(("tiny", "SmolLM2")) else [])
        if part.startswith("tiny, text"):
            assert re.search(r"^iteration +0: success \S+, on a CPU 0\.[12]", part, re.MULTILINE)
        assert re.search(r"replay .* s .*% .* tokens/s", part)
        assert re.search(r"update: \S+ FLOP/s, \S+% of a matrix product's \S+", part)
        for name in ("gather", "write", "reload", "proof"):
            assert (f"sync, {name}: " in part) == ("--backend vllm" in part)


def test_one_part_without_its_package_and_an_unknown_part(tmp_path):
    """vLLM is installed here, so it is hidden from the benchmark."""
    hidden = "import sys, runpy; sys.modules['vllm'] = None; sys.argv = sys.argv[1:]; "
    hidden += "sys.path.insert(0, 'benchmarks'); runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", hidden, "benchmarks/gpu.py", str(tmp_path / "out"), "--only"]
    done = subprocess.run([*command, "3B"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("== ") == 1
    assert "left out: vllm is not installed" in done.stdout
    done = subprocess.run([*command, "4B"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--only is 4B, but must be in a name of tiny, text; tiny, images; 0.5B" in done.stderr
