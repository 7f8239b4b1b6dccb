"""Bad input: one clear sentence that names flag, value and what is allowed; exit status 2; nothing written."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from envs import ENVS
from freshper.config import Config
from freshper.earlier_run import FIXED

CPUS = os.cpu_count()
TASKS = ", ".join(ENVS)

# flags: the sentence. TEXT and VISION stand for model folders of random weights.
FLAGS = {
    "--env nowhere": f"--env is nowhere, but must be one of {TASKS}",
    "--method dqn": "argument --method: invalid choice: 'dqn' (choose from 'on_policy', 'per', 'freshper')",
    "--preset huge": "argument --preset: invalid choice: 'huge' (choose from 'auto', 'tiny', 'paper')",
    "--unknown 3": "unknown flag --unknown; --help lists them all",
    "stray": "unknown flag stray; --help lists them all",
    "--it 3": "unknown flag --it; --help lists them all",
    "-x": "unknown flag -x; --help lists them all",
    "--tau": "argument --tau: expected one argument",
    "--out": "argument --out: expected one argument",
    "--seed -1": "--seed is -1, but must be 0 or more",
    "--seed 4294967296": "--seed is 4294967296, but must be below 2**32",
    "--seed 1.5": "argument --seed: invalid int value: '1.5'",
    "--iterations 0": "--iterations is 0, but must be above 0",
    "--iterations 1e3": "argument --iterations: invalid int value: '1e3'",
    "--rollout_batch_size 0": "--rollout_batch_size is 0, but must be above 0",
    "--group_size 0": "--group_size is 0, but must be above 0",
    "--group_size 5": "--group_size is 5, but must be a divisor of rollout_batch_size",
    "--batch_size -4": "--batch_size is -4, but must be above 0",
    "--replay_ratio -1": "--replay_ratio is -1, but must be 0 or more",
    "--ppo_epochs 0": "--ppo_epochs is 0, but must be above 0",
    "--capacity 10": "--capacity is 10, but must be at least a batch",
    "--capacity 0": "--capacity is 0, but must be above 0",
    "--capacity 100000000000": "--capacity is 100000000000, but must be at most 100,000,000",
    "--eviction random": "argument --eviction: invalid choice: 'random' (choose from 'fifo', 'lowest_priority')",
    "--alpha 1.5": "--alpha is 1.5, but must be between 0 and 1",
    "--alpha nan": "--alpha is nan, but must be between 0 and 1",
    "--beta -1": "--beta is -1.0, but must be between 0 and 1",
    "--epsilon 0": "--epsilon is 0.0, but must be above 0",
    "--decay linear": "argument --decay: invalid choice: 'linear' (choose from 'exponential', 'polynomial', 'limit', "
    "'draws', 'auto', 'none')",
    "--tau 0": "--tau is 0.0, but must be above 0",
    "--tau nan": "--tau is nan, but must be above 0",
    "--tau inf": "--tau is inf, but must be finite",
    "--tau five": "argument --tau: invalid float value: 'five'",
    "--age_unit second": "argument --age_unit/--age-unit: invalid choice: 'second' (choose from 'step', 'iteration')",
    "--is_correction 7": "Truthy value expected: got 7 but expected one of yes/no, true/false, t/f, y/n, 1/0",
    "--replay_advantage none": "invalid choice: 'none' (choose from 'running', 'recompute', 'stored')",
    "--baseline_window 0": "--baseline_window is 0, but must be above 0",
    "--lr 0": "--lr is 0.0, but must be above 0",
    "--lr inf": "--lr is inf, but must be finite",
    "--warmup_steps -3": "--warmup_steps is -3, but must be 0 or more",
    "--max_grad_norm 0": "--max_grad_norm is 0.0, but must be above 0",
    "--ratio_clip 0": "--ratio_clip is 0.0, but must be above 0",
    "--dual_clip -2": "--dual_clip is -2.0, but must be 0 or above 1",
    "--dual_clip 0.9": "--dual_clip is 0.9, but must be 0 or above 1",
    "--advantage_clip -1": "--advantage_clip is -1.0, but must be above 0",
    "--kl_loss_coef -0.1": "--kl_loss_coef is -0.1, but must be 0 or more",
    "--kl_reward_coef nan": "--kl_reward_coef is nan, but must be 0 or more",
    "--entropy_coef -1": "--entropy_coef is -1.0, but must be 0 or more",
    "--loss_aggregation mean": "invalid choice: 'mean' (choose from 'token_mean', 'token_sum')",
    "--micro_batch_size 0": "--micro_batch_size is 0, but must be above 0",
    "--behavior_logprobs both": "invalid choice: 'both' (choose from 'trainer', 'engine')",
    "--temperature 0": "--temperature is 0.0, but must be above 0",
    "--temperature inf": "--temperature is inf, but must be finite",
    "--top_k -1": "--top_k is -1, but must be 0 or more",
    "--top_p 1.5": "--top_p is 1.5, but must be above 0 and at most 1",
    "--max_new_tokens 0": "--max_new_tokens is 0, but must be above 0",
    "--max_new_tokens 600": "--max_new_tokens is 600, but must be below max_tokens 512",
    "--prompt_style long": "invalid choice: 'long' (choose from 'full', 'terse')",
    "--format_penalty -1": "--format_penalty is -1.0, but must be 0 or more",
    "--max_turns -1": "--max_turns is -1, but must be 0 or more",
    "--slippery maybe": "argument --slippery: Truthy value expected: got maybe",
    "--cell_size 0": "--cell_size is 0, but must be above 0",
    "--dtype float16": "invalid choice: 'float16' (choose from 'float32', 'bfloat16')",
    "--dtype bfloat16": "--dtype is bfloat16, but must be float32 where --trainer is torch, which keeps no float32 "
    "master weights",
    "--iterations 2147483648": "--iterations is 2147483648, but must be below 2**31",
    "--env_timeout -1": "--env_timeout is -1.0, but must be 0 or more",
    "--env_timeout nan": "--env_timeout is nan, but must be 0 or more",
    "--env_timeout 1e7": "--env_timeout is 10000000.0, but must be at most 1,000,000",
    "--threads 0": "--threads is 0, but must be above 0",
    "--threads 100000": f"--threads is 100000, but must be at most the {CPUS} of this machine",
    "--eval_every 0": "--eval_every is 0, but must be above 0",
    "--eval_episodes 0": "--eval_episodes is 0, but must be above 0",
    "--save_every -1": "--save_every is -1, but must be 0 or more",
    "--save_minutes nan": "--save_minutes is nan, but must be 0 or more",
    "--keep_checkpoints 0": "--keep_checkpoints is 0, but must be above 0",
    "--engine cloud": "argument --engine: invalid choice: 'cloud'",
    "--trainer abacus": "argument --trainer: invalid choice: 'abacus'",
    "--override lr": "--override is lr, but must be empty without --resume",
    "--model TEXT --device tpu7": "--device is tpu7, but must be a torch device of this machine: ",
    "--model TEXT --device cuda:99": "--device is cuda:99, but must be a torch device of this machine: ",
    "--model ./no/such/folder": "--model is ./no/such/folder, but must be a folder with a config.json",
    "--model nothing": "--model is nothing, but must be tiny, a folder, or a hub id",
    "--model afile": "--model is afile, but must be tiny, a folder, or a hub id",
    "--model TEXT --env frozenlake_vlm":
        "--model is TEXT, which reads text only, but --env frozenlake_vlm shows pictures",
    "--model TEXT --max_tokens 20": "--max_tokens is 20, but must be at least 33: the first turn takes a prompt of 27 "
    "and --max_new_tokens 6",
    "--model TEXT --prompt_style full --max_tokens 200": "--max_tokens is 200, but must be at least ",
    "--model VISION --env frozenlake_vlm --max_tokens 30": "--max_tokens is 30, but must be at least ",
    "--model TEXT --out afile": "--out is afile, but must be a folder that does not exist yet",
    "--model TEXT --out afile/x": "--out is afile/x, but must be a folder that can be written to: [Errno 20]",
    "--resume nowhere": "--resume is nowhere, but must be the folder of a run, with a config.json",
    "--resume afile": "--resume is afile, but must be the folder of a run, with a config.json",
    "--resume TEXT": "--resume is TEXT, but no run can go on there: its settings are not those of this code",
}  # fmt: skip


def refusal(capsys, flags):
    """The sentence that train.py ends with; nothing but usage stands above it."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    try:
        status = train.main(flags.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert sorted(Path().rglob("*")) == before
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    return sentence.partition(": error: ")[2]


@pytest.mark.parametrize("flags", FLAGS)
def test_flags(flags, model_folder, tmp_path, monkeypatch, capsys):
    def filled(text):
        return text.replace("TEXT", model_folder["text"]).replace("VISION", model_folder["vision"])

    monkeypatch.chdir(tmp_path)
    Path("afile").write_text("no folder")
    assert filled(FLAGS[flags]) in refusal(capsys, filled(flags))


def edited(name, **changes):
    def edit(folder):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | changes))

    return edit


def rewritten(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def without(pattern):
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def pickled(folder):
    """Good weights, in the format that can carry code."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


# what happens to a model folder: the end of the sentence
MODELS = {
    "no chat template": (without("chat_template.jinja"), "the tokenizer has no chat template; choose a chat"),
    "a template that is none": (rewritten("chat_template.jinja", b"{% for"), "unexpected 'end of template'"),
    "a template without the message": (rewritten("chat_template.jinja", b"hello"), "the chat template does not show"),
    "a template that refuses": (rewritten("chat_template.jinja", b"{{ raise_exception('no') }}"), "no"),
    "no tokenizer": (without("tokenizer*"), "the tokenizer, of 1 tokens, does not belong to it (281)"),
    "a tokenizer that is none": (rewritten("tokenizer.json", b"{}"), "added_tokens"),
    "no config": (without("config.json"), "Should have a `model_type` key in its config.json"),
    "a config that is none": (rewritten("config.json", b"{oops"), "is not a valid JSON file"),
    "an unknown architecture": (edited("config.json", model_type="martian"), "model type `martian`"),
    "no decoder": (rewritten("config.json", json.dumps({"model_type": "bert", "hidden_size": 32, "vocab_size": 281,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}).encode()), "its weights lack "),
    "sizes of another model": (edited("config.json", hidden_size=128), "ignore_mismatched_sizes"),
    "layers that are missing": (edited("config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3),
                                "its weights lack 12, such as model.layers.2"),
    "no weights": (without("model.safetensors"), "no file named model.safetensors"),
    "pickled weights": (pickled, "no file named model.safetensors"),
    "truncated weights": (rewritten("model.safetensors", bytes(99)), "Error while deserializing header"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_model_folders(kind, model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder["text"], "model")
    spoil, reason = MODELS[kind]
    spoil(Path("model"))
    sentence = refusal(capsys, "--model model")
    assert sentence.startswith("--model is model, but must be a chat model that can be loaded: ")
    assert reason.lower() in sentence.lower()


def test_a_picture_model_without_its_processor(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder["vision"], "model")
    without("preprocessor_config.json")(Path("model"))
    assert "Can't load image processor" in refusal(capsys, "--env frozenlake_vlm --model model")


# config.json of a run without a checkpoint: the end of the sentence
SETTINGS = {
    "no JSON": (b"{oops", "Expecting property name"),
    "nested too deep": (b"[" * 100_000, "maximum recursion depth"),
    "a number too large": ({"lr": 10**400}, "its setting lr is 1000000"),
    "no settings": (b"[1]", "they differ in everything"),
    "too few": (b'{"lr": 1.0}', "they differ in advantage_clip, "),
    "a wrong type": ({"lr": "fast"}, "its setting lr is 'fast', but must be of type float"),
    "a wrong choice": ({"method": "dqn"}, "its setting method is 'dqn', but must be one of on_policy, per, freshper"),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_resuming_what_cannot_be(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content, reason = SETTINGS[kind]
    Path("run").mkdir()
    if isinstance(content, dict):
        content = json.dumps(vars(Config()) | content).encode()
    Path("run/config.json").write_bytes(content)
    sentence = refusal(capsys, "--resume run")
    assert sentence.startswith("--resume is run, but no run can go on there: ")
    assert reason in sentence


def test_there_are_at_least_sixty():
    assert len(FLAGS) + len(MODELS) + len(SETTINGS) >= 100
    assert set(FIXED) < set(Config.__dataclass_fields__)
