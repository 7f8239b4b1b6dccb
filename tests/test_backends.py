"""Choosing engine and trainer: what cannot be run is said in one sentence before anything is written."""

import importlib.util
import time

import pytest

import train
from freshper.backends import BackendError, deadline


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
