"""The real train.py, end to end on a CPU: Algorithm 1 in order, what it writes, and how it fails."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from envs import ENVS
from freshper.config import Config, parse_args
from freshper.models import load_policy
from freshper.presets import CONFIG_A, CONFIG_DEFAULT, METHODS, PRESETS
from freshper.report import COLUMNS

ROOT = Path(__file__).parent.parent
SHORT = [
    "--iterations",
    "3",
    "--rollout_batch_size",
    "4",
    "--batch_size",
    "4",
    "--eval_episodes",
    "4",
    "--eval_every",
    "2",
]
SHORT += ["--format_penalty", "0.15"]  # random weights never reach the goal: without it there is nothing to learn from
PICTURE = {"frozenlake": "text", "frozenlake_vlm": "vision"}


def run(model_folder, out, *flags, env="frozenlake"):
    arguments = ["--env", env, "--model", model_folder[PICTURE[env]], "--out", str(out), *SHORT, *flags]
    return train.main(arguments)


def rows(out):
    with open(Path(out) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_train_follows_algorithm_1_line_by_line():
    """Lines 2 to 12 stand in train.py in the paper's order (6 starts before 5, on its thread), each above its call."""
    source = (ROOT / "train.py").read_text()
    body = source[source.index("# Algorithm 1, line 1") :]
    calls = {
        2: "collect(seeds)", 3: "trainer.record_behavior_logprobs(episodes)", 4: "buffer.add(episodes",
        6: "buffer.refresh_async(", 5: "trainer.update(episodes)", 7: "for _ in range(config.replay_ratio)",
        8: "buffer.sample(config.batch_size, age_clock())", 9: "importance_weights(",
        10: "trainer.update(replay.episodes, weights",
        12: "engine.sync(trainer)",
    }  # fmt: skip
    position = 0
    for line, call in calls.items():
        comment = re.compile(rf"# {line}: ").search(body, position)
        assert comment, f"line {line} has no comment after the one before it"
        following = body[comment.end() :].split("\n# ")[0]
        assert call in "\n".join(following.splitlines()[:4]), f"line {line} is not followed by {call}"
        position = comment.end()
    assert source.index("refresh.result()") > source.index("# 5: ")
    loop = body[: body.index("def main")].splitlines()
    assert len(loop) < 50  # one screen


@pytest.mark.parametrize("env", ["frozenlake", "frozenlake_vlm"])
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_runs_and_leaves_everything(model_folder, tmp_path, env, method):
    out = tmp_path / "run"
    assert run(model_folder, out, "--method", method, env=env) == 0
    names = {p.name for p in out.iterdir()}
    names.remove("checkpoint-000002")  # the best evaluation, and the last checkpoint but one
    replayed = set() if method == "on_policy" else {"replay.csv", "diagnostics.png"}
    assert names == {"config.json", "metrics.csv", "curve.png", "episodes.html", "checkpoint"} | replayed
    table = rows(out)
    assert list(table[0]) == COLUMNS
    k = 0 if method == "on_policy" else PRESETS["tiny"][env].get("replay_ratio", 2)
    updates = 1 + k
    assert [int(r["step"]) for r in table] == [updates, 2 * updates, 3 * updates]
    assert [int(r["episodes"]) for r in table] == [int(r["buffer_size"]) for r in table] == [4, 8, 12]
    assert [bool(r["eval_success"]) for r in table] == [False, True, True]
    assert all((r["replay_loss"] == "") == (method == "on_policy") for r in table)
    settings = json.loads((out / "config.json").read_text())
    assert settings["replay_ratio"] == k
    if k:
        with open(out / "replay.csv", newline="") as file:
            replayed = list(csv.DictReader(file))
        assert len(replayed) == 3 * k * 4  # iterations, updates, batch
        assert {int(r["iteration"]) for r in replayed} == {0, 1, 2}
        assert all(0 < float(r["probability"]) <= 1 and int(r["age"]) >= 1 for r in replayed)
    assert (settings["is_correction"], settings["decay"] == "none") == (method == "per", method == "per")
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "episodes.html").read_text()
    assert page.count("<h2>") == 4
    assert ("data:image/png" in page) == (env == "frozenlake_vlm")
    policy = load_policy(str(out / "checkpoint"), "cpu", torch.float32)
    before = load_policy(model_folder[PICTURE[env]], "cpu", torch.float32)
    assert policy.tokenizer.chat_template == before.tokenizer.chat_template
    changed = {n: not torch.equal(p, q) for (n, p), q in zip(
        policy.model.named_parameters(), before.model.parameters(), strict=True)}  # fmt: skip
    assert any(changed.values())
    assert not any(moved for name, moved in changed.items() if "visual" in name)  # the tiny preset freezes vision


@pytest.mark.parametrize("env", ["frozenlake", "frozenlake_vlm"])
def test_the_same_seed_gives_the_same_metrics(model_folder, tmp_path, env):
    for name in "ab":
        assert run(model_folder, tmp_path / name, env=env) == 0
    assert run(model_folder, tmp_path / "other", "--seed", "7", env=env) == 0
    a, b, other = (
        [{k: v for k, v in r.items() if k != "wall_s"} for r in rows(tmp_path / n)] for n in ("a", "b", "other")
    )
    assert a == b
    assert a != other


def test_every_setting_reaches_the_run(model_folder, tmp_path):
    """The less common paths, through the real train.py."""
    flags = {
        "decay": "polynomial", "is_correction": "True", "replay_ratio": "2",
        "kl_loss_coef": "0.05", "kl_reward_coef": "0.1", "entropy_coef": "0.01",
        "eviction": "lowest_priority", "capacity": "6", "behavior_logprobs": "engine", "age_unit": "iteration",
        "replay_advantage": "stored", "loss_aggregation": "token_sum", "ppo_epochs": "2", "slippery": "True",
        "prompt_style": "full", "max_tokens": "4000", "micro_batch_size": "2", "top_k": "0",
    }  # fmt: skip
    arguments = [part for name, value in flags.items() for part in (f"--{name}", value)]
    assert run(model_folder, tmp_path / "run", *arguments) == 0
    table = rows(tmp_path / "run")
    assert [int(r["step"]) for r in table] == [4, 8, 12]
    assert [int(r["buffer_size"]) for r in table] == [4, 6, 6]
    assert float(table[-1]["mean_age"]) <= 2  # iterations, not steps
    assert float(table[0]["mismatch"]) < 1e-4


def test_engine_and_trainer_agree(model_folder, tmp_path):
    assert run(model_folder, tmp_path / "run", env="frozenlake_vlm") == 0
    assert all(float(r["mismatch"]) < 1e-4 for r in rows(tmp_path / "run"))


def test_replies_are_escaped_in_the_page(text_policy):
    import numpy as np

    from freshper.episode import Episode
    from freshper.pages import episodes_page

    encode = text_policy.tokenizer.encode
    prompt, reply = encode("<b>state</b>"), encode("<script>alert(1)</script>")
    n = len(prompt) + len(reply)
    mask = np.arange(n) >= len(prompt)
    e = Episode(
        np.array(prompt + reply), mask, np.zeros(n, np.float32), 0.0, np.zeros(1, np.float32), info={"success": False}
    )
    page = episodes_page([e], text_policy, "<i>title</i>")
    assert "<script>" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;alert(1)" in page


BAD = {
    "--env nowhere": f"--env is nowhere, but must be one of {', '.join(ENVS)}",
    "--method dqn": "argument --method: invalid choice: 'dqn'",
    "--preset huge": "argument --preset: invalid choice: 'huge'",
    "--model ./no/such/folder": "--model is ./no/such/folder, but must be a folder with a config.json",
    "--model nothing": "--model is nothing, but must be tiny, a folder, or a hub id",
    "--tau 0": "--tau is 0.0, but must be above 0",
    "--tau -5": "--tau is -5.0, but must be above 0",
    "--tau nan": "--tau is nan, but must be above 0",
    "--tau five": "argument --tau: invalid float value: 'five'",
    "--alpha 1.5": "--alpha is 1.5, but must be between 0 and 1",
    "--alpha -0.1": "--alpha is -0.1, but must be between 0 and 1",
    "--beta 2": "--beta is 2.0, but must be between 0 and 1",
    "--capacity 10 --batch_size 32": "--capacity is 10, but must be at least a batch",
    "--max_new_tokens 600": "--max_new_tokens is 600, but must be below max_tokens 512",
    "--epsilon 0": "--epsilon is 0.0, but must be above 0",
    "--lr 0": "--lr is 0.0, but must be above 0",
    "--iterations 0": "--iterations is 0, but must be above 0",
    "--replay_ratio -1": "--replay_ratio is -1, but must be 0 or more",
    "--temperature 0": "--temperature is 0.0, but must be above 0",
    "--top_p 0": "--top_p is 0.0, but must be above 0 and at most 1",
    "--eviction random": "argument --eviction: invalid choice: 'random'",
    "--unknown 3": "--unknown",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_get_one_sentence_and_exit_2(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = train.main(flags.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    *usage, sentence = capsys.readouterr().err.strip().splitlines()
    assert BAD[flags] in sentence
    assert len(usage) <= 1
    assert not list(tmp_path.iterdir())


def test_a_text_model_cannot_play_a_picture_task(model_folder, tmp_path, capsys):
    assert train.main(["--env", "frozenlake_vlm", "--model", model_folder["text"], "--out", str(tmp_path / "run")]) == 2
    assert "reads text only, but --env frozenlake_vlm shows pictures" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_no_run_overwrites_another(tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit) as stop:
        parse_args(["--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "must be a folder that does not exist yet" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert parse_args([]).folder() == Path("out/frozenlake-freshper-42")
    (tmp_path / "out/frozenlake-freshper-42").mkdir(parents=True)
    assert parse_args([]).folder() == Path("out/frozenlake-freshper-42-2")


@pytest.mark.parametrize(("flags", "phase"), [(("--lr", "1e30"), "update|rollout"), ((), "rollout")])
def test_numbers_that_stop_being_numbers_end_the_run(model_folder, tmp_path, capsys, flags, phase):
    """A learning rate that blows the weights up, and a model that holds a NaN from the start."""
    folder = model_folder
    if not flags:
        policy = load_policy(model_folder["text"], "cpu", torch.float32)
        with torch.no_grad():
            policy.model.lm_head.weight[policy.eos_id] = torch.nan
        policy.save(str(tmp_path / "broken"))
        folder = {"text": str(tmp_path / "broken")}
    assert run(folder, tmp_path / "run", "--warmup_steps", "0", *flags) == 1
    output = capsys.readouterr().out
    assert re.search(rf"stopped in iteration \d: .*({phase}).*episode seeds? \d+", output)
    written = {p.name for p in (tmp_path / "run").iterdir()}
    assert {"config.json", "metrics.csv"} <= written
    assert len(rows(tmp_path / "run")) < 3


def test_ctrl_c_writes_everything(model_folder, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "train.py", "--model", model_folder["text"], "--out", str(out), "--iterations", "100000"]
    process = subprocess.Popen([*command, *SHORT[2:]], cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((out / "metrics.csv").exists() and len(rows(out)) >= 3):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert {p.name for p in out.iterdir() if not p.name.startswith("checkpoint-")} == {
        "config.json", "metrics.csv", "replay.csv", "curve.png", "diagnostics.png", "episodes.html", "checkpoint"
    }  # fmt: skip
    assert len(rows(out)) >= 3


def test_help_documents_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Config.__dataclass_fields__.items():
        assert f"--{name}" in text
        sentence = " ".join(field.metadata["help"].replace("%%", "%").split())
        assert sentence in text
    assert text.count("(default: ") >= len(Config.__dataclass_fields__) - 2


def paper_table(name):
    """A table of the paper, typed in tests/data: row -> column -> value."""
    table = json.loads((ROOT / "tests/data/paper_tables.json").read_text())[name]
    columns = table.pop("columns")
    return {row: dict(zip(columns, values, strict=True)) for row, values in table.items()}


@pytest.mark.parametrize("env", list(paper_table("env_details")))
def test_the_paper_preset_holds_the_tables(env):
    """env_details, training_config, config_comparison; section 4.1 and appendix F."""
    config = parse_args(["--preset", "paper", "--env", env])
    row, training = paper_table("env_details")[env], paper_table("training_config")[env]
    assert config.model == f"Qwen/Qwen2.5-{row['model']}-Instruct"
    assert config.max_tokens == row["seq_len"]
    assert (config.max_turns or ENVS[env]().max_turns) == row["max_actions"]
    assert (config.micro_batch_size, config.iterations) == (training["micro_batch"], training["max_steps"])
    assert (config.engine, config.trainer, config.zero_stage) == ("vllm", "deepspeed", training["zero"])
    assert config.rollout_gpus == training["gpus"] / 2  # appendix F, "GPU Layout": one half trains
    for name, value in paper_table("config_comparison")[row["config"]].items():
        assert getattr(config, name) == value, name
    common = json.loads((ROOT / "tests/data/paper_tables.json").read_text())["common"]
    for name, value in common.items():
        assert getattr(config, name) == value, name
    assert config.tau == (1000 if env == "aime" else 500)  # section 4.1
    assert config.batch_size == 128  # BS/dev x GA of Table training_config, on one training GPU
    assert config.slippery is (env == "frozenlake")  # decision: see the README


@pytest.mark.parametrize("method", ["per", "freshper"])
def test_the_methods_hold_their_rows_of_replay_config(method):
    config = parse_args(["--preset", "paper", "--method", method])
    row = paper_table("replay_config")[method]
    assert (config.capacity, config.replay_ratio) == (row["capacity"], row["K"])
    assert (config.tau if config.decay == "exponential" else None) == row["tau"]
    assert (config.beta if config.is_correction else None) == row["beta"]


def test_the_methods_differ_in_nothing_but_their_rows():
    assert set(CONFIG_A) == set(CONFIG_DEFAULT)
    for preset in PRESETS:
        fresh, standard, on_policy = (
            vars(parse_args(["--preset", preset, "--method", m])) for m in ("freshper", "per", "on_policy")
        )
        assert {k for k in fresh if fresh[k] != standard[k]} == {"method", "decay", "is_correction"}
        assert {k for k in fresh if fresh[k] != on_policy[k]} == {"method", "replay_ratio"}


@settings(deadline=None, max_examples=50)
@given(st.floats(), st.floats(), st.integers())
def test_arbitrary_numbers_are_accepted_or_refused_in_one_sentence(tau, alpha, capacity):
    flags = [f"--tau={tau}", f"--alpha={alpha}", f"--capacity={capacity}"]
    try:
        config = parse_args(flags)
    except SystemExit as stop:
        assert stop.code == 2
    else:
        assert config.tau > 0
        assert 0 <= config.alpha <= 1
        assert config.capacity >= config.batch_size
