"""Choosing the trainer: what cannot be run is said in one sentence before anything is written."""

import importlib.util

import pytest

import train


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "deepspeed" else found(name, *a))
    assert train.main(["--trainer", "deepspeed", "--out", str(tmp_path / "run")]) == 2
    sentence = capsys.readouterr().err.strip().splitlines()
    assert sentence == [
        "train.py: error: --trainer is deepspeed, but the package deepspeed is not installed; see requirements-gpu.txt"
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
