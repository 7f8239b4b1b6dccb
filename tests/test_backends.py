"""Choosing engine and trainer: what cannot be run is said in one sentence before anything is written."""

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from freshper.backends import BackendError, deadline
from freshper.config import parse_args
from freshper.vllm_processes import check_vllm

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("flag", "package"), [("engine", "vllm"), ("trainer", "deepspeed")])
def test_a_missing_package_is_named(flag, package, tmp_path, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else found(name, *a))
    assert train.main([f"--{flag}", package, "--out", str(tmp_path / "run")]) == 2
    sentence = capsys.readouterr().err.strip().splitlines()
    assert sentence == [
        f"train.py: error: --{flag} is {package}, but the package {package} is not installed; see requirements-gpu.txt"
    ]
    assert not (tmp_path / "run").exists()


def test_ranks_need_deepspeed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["--out", str(tmp_path / "run")]) == 2
    assert "--trainer is torch, but 2 ranks were started" in capsys.readouterr().err


def test_zero_3_leaves_the_embedded_engine_no_model(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main("--trainer deepspeed --zero_stage 3".split())
    assert stop.value.code == 2
    assert "--zero_stage is 3, but must be below 3 with --engine hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "packages", "model_is_there", "preset", "reason"),
    [
        (0, True, True, "tiny", "there is no GPU"),
        (2, False, True, "tiny", "vllm is not installed"),
        (2, True, False, "tiny", "Qwen/Qwen2.5-0.5B-Instruct is not on this machine"),
        (2, True, True, "paper", "2 GPUs, vLLM, DeepSpeed and Qwen/Qwen2.5-0.5B-Instruct are there"),
        (1, True, True, "paper", "1 GPU, vLLM, DeepSpeed and Qwen/Qwen2.5-0.5B-Instruct are there"),
    ],
)
def test_the_preset_is_the_papers_only_where_all_it_needs_is_there(
    gpus, packages, model_is_there, preset, reason, monkeypatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: packages or None)
    monkeypatch.setattr("freshper.presets.try_to_load_from_cache", lambda *_: "config.json" if model_is_there else None)
    config = parse_args(["--env", "frozenlake"])
    assert (config.preset, config.reason) == (preset, reason)
    assert config.rollout_gpus == (0 if gpus < 2 else 1 if preset == "paper" else 0)
    asked = parse_args(["--env", "frozenlake", "--preset", "paper"])
    assert (asked.preset, asked.reason, asked.model) == ("paper", "", "Qwen/Qwen2.5-0.5B-Instruct")


def test_two_gpus_do_not_hold_the_layout_of_four(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    config = parse_args(["--env", "frozenlake_vlm"])
    assert config.preset == "tiny"
    assert config.reason == "there are 2 GPUs, the paper's layout takes 4, or a single one"


def test_vllm_needs_a_position_for_each_token(text_policy):
    assert text_policy.model.config.max_position_embeddings == 4096
    allowed = r"--max_tokens is 4096, but must be below the 4096 positions of the model, where --engine is vllm"
    with pytest.raises(ValueError, match=allowed):
        check_vllm(text_policy, parse_args("--preset tiny --engine vllm --max_tokens 4096".split()))


def test_a_wait_has_a_deadline_that_names_its_phase():
    began = time.monotonic()
    with (
        pytest.raises(BackendError, match=r"the rollout took longer than --timeout 0\.2 s"),
        deadline("the rollout", 0.2),
    ):
        time.sleep(5)
    assert time.monotonic() - began < 2
    with deadline("nothing", 0.2):
        pass
    time.sleep(0.3)  # no alarm is left behind


def test_a_wait_that_no_signal_reaches_ends_all_the_same():
    """As one for NCCL: the main thread waits in C for a lock that it holds, and Python's signal handlers never run."""
    script = """
import ctypes
from freshper import backends
backends.GRACE = 1.0
lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
with backends.deadline("the sync", 0.5):
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == "stopped: the sync took longer than --timeout 0.5 s"


def test_the_measurements_for_gpus_can_be_taken_on_a_cpu(model_folder, tmp_path):
    settings = """--preset tiny --device cpu --engine hf --trainer torch --iterations 2 --rollout_batch_size 4
    --batch_size 4 --eval_episodes 4 --max_turns 2 --format_penalty 0.15""".split()
    command = [sys.executable, "benchmarks/gpu.py", model_folder["text"], *settings, "--out", str(tmp_path / "run")]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for phase, times in (("generate", 2 * 2 + 2), ("record_behavior_logprobs", 2), ("update", 2 * 3)):
        assert re.search(rf"^{phase} +\d+\.\d% .* {times} times", output, re.MULTILINE), output
