"""The real train.py on a CPU: Algorithm 1 in its order, every method and option, how it fails."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import read
from safetensors.torch import load_file

import train
from envs.base import EVAL_SEEDS
from envs.frozenlake import FrozenLake
from freshper import report
from freshper.buffer import ReplayBuffer
from freshper.config import Config
from freshper.engine_hf import HFEngine, Sampling
from freshper.episode import collate
from freshper.errors import BackendError, phase
from freshper.flags import parse_args
from freshper.models import load_policy
from freshper.reinforce import policy_loss
from freshper.rollout import rollout, training_seeds
from freshper.tiny import tiny_model
from freshper.trainer import TorchTrainer

ROOT = Path(__file__).parent.parent


def flags(text, out):
    """The flags of a short run."""
    short = "--seed 2 --iterations 2 --rollout_batch_size 4 --eval_episodes 4 --max_turns 3"
    if "on_policy" not in text:
        short += " --batch_size 4"
    return [*short.split(), *text.split(), "--out", str(out)]


@pytest.fixture(scope="module", autouse=True)
def no_plots():
    """Plots take longer than a short run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)
        yield


# -- Algorithm 1, a test per line, on one real run


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The calls of a run of three iterations, on its real trainer, buffer and engine: `order` has
    their names, and each name a list of what its calls gave and got, or of what they found."""
    noted = defaultdict(list)

    def record(owner, name, line, note=lambda *call: call):
        original = getattr(owner, name)

        def wrapper(*arguments):
            result = original(*arguments)
            noted["order"].append(line)
            noted[line].append(note(result, *arguments))
            return result

        patch.setattr(owner, name, wrapper)

    def line_3(_, trainer, episodes):
        again = trainer.logprobs(collate(episodes)).numpy()
        return episodes, again, [episode.behavior_logprobs.copy() for episode in episodes]

    def refresh(_, buffer, step):
        return step, threading.current_thread() is not threading.main_thread()

    def lines_5_and_10(update, trainer, batch, given, weights=None):
        measured = noted["norm"][-1].advantages(batch)
        return update, batch, weights, torch.equal(given, measured)

    def line_8(replay, buffer, batch_size, step):
        collected = np.array([e.step for e in buffer.episodes])
        return replay, step, collected, buffer.base_priorities[: len(collected)].copy()

    with pytest.MonkeyPatch.context() as patch:
        record(train, "rollout", "2")
        record(TorchTrainer, "record_behavior_logprobs", "3", line_3)
        record(train.ReturnNormalizer, "observe", "norm", lambda _, norm, batch: norm)
        record(ReplayBuffer, "add", "4")
        record(ReplayBuffer, "refresh_async", "6")
        record(ReplayBuffer, "refresh", "refresh", refresh)
        record(TorchTrainer, "update", "5/10", lines_5_and_10)
        record(ReplayBuffer, "sample", "8", line_8)
        record(train, "importance_weights", "9")
        record(ReplayBuffer, "update_base_priorities", "priorities")
        record(HFEngine, "sync", "12")
        record(report, "evaluate", "evaluation")
        text = """--iterations 3 --replay_ratio 2 --ppo_epochs 2 --beta 0.4 --max_tokens 300
        --max_new_tokens 5 --eval_episodes 6"""
        assert train.main(flags(text, tmp_path_factory.mktemp("lines") / "run")) == 0
    return noted


def test_the_lines_of_algorithm_1_come_in_their_order(lines):
    """Line 6 starts before line 5 and runs beside it."""
    replay = "8 9 5/10 priorities"
    iteration = f"2 3 norm 4 6 5/10 5/10 {replay} {replay} 12 "
    order = [line for line in lines["order"] if line != "refresh"]
    assert order == f"evaluation {3 * iteration} evaluation".split()


def test_the_evaluation_is_on_held_out_seeds(lines):
    for episodes, *_ in lines["evaluation"]:
        assert [e.seed for e in episodes] == [EVAL_SEEDS + k for k in range(6)]


def test_line_2_plays_the_seeds_of_the_iteration(lines):
    for iteration, (episodes, _, _, seeds, *limits) in enumerate(lines["2"], 1):
        assert seeds == training_seeds(Config(seed=2, rollout_batch_size=4), iteration)
        assert [e.seed for e in episodes] == seeds
        assert limits == [300, 5]


def test_line_3_records_log_probs_before_training(lines):
    """Replay measures against log pi_mu as it was recorded."""
    for (given, again, pi_mu), (episodes, *_) in zip(lines["3"], lines["2"], strict=True):
        assert given is episodes
        for e, row, recorded in zip(episodes, again, pi_mu, strict=True):
            np.testing.assert_array_equal(recorded, row[: len(e.tokens)])
            np.testing.assert_array_equal(e.behavior_logprobs, recorded)


def test_line_4_stores_each_episode_with_its_base_priority(lines):
    calls = zip(lines["4"], lines["2"], strict=True)
    for iteration, ((_, _, given, priorities, step), (episodes, *_)) in enumerate(calls):
        assert given is episodes
        assert step == 4 * iteration
        np.testing.assert_allclose(priorities, [abs(e.reward) + 0.1 for e in episodes])


def test_line_5_trains_on_the_fresh_batch(lines):
    """In its first epoch the policy is the one that played, so the ratios are 1."""
    for iteration, (episodes, *_) in enumerate(lines["2"]):
        epochs = lines["5/10"][4 * iteration : 4 * iteration + 2]
        for _, batch, weights, same in epochs:
            assert same and weights is None
            assert batch.seeds == [e.seed for e in episodes]
        first, *_ = epochs[0]
        assert np.abs(first.drift["log_ratio"]).max() < 1e-4


def test_line_6_ages_all_priorities_on_another_thread(lines):
    """As of the end of line 5: two updates after the start of each iteration."""
    assert lines["refresh"] == [(2, True), (6, True), (10, True)]


def test_line_8_draws_with_the_probabilities_of_eq_2_and_14(lines):
    for k, (replay, step, collected, base) in enumerate(lines["8"]):
        refreshed, _ = lines["refresh"][k // 2]
        leaves = (base * np.exp((collected - refreshed) / 20.0)) ** 0.6
        expected = leaves[replay.indices] / leaves.sum()
        np.testing.assert_allclose(replay.probabilities, expected, rtol=1e-9)
        np.testing.assert_array_equal(replay.ages, step - collected[replay.indices])


def test_line_9_weights_the_drawn_episodes_with_a_rising_beta(lines):
    """It reaches 1 in the last of three iterations."""
    calls = zip(lines["9"], lines["8"], strict=True)
    for k, ((_, probabilities, beta), (replay, *_)) in enumerate(calls):
        assert probabilities is replay.probabilities
        assert beta == pytest.approx(0.4 + 0.3 * (k // 2))


def test_line_10_trains_on_the_drawn_batch_with_its_weights(lines):
    updates = [line for k, line in enumerate(lines["5/10"]) if k % 4 > 1]
    calls = zip(updates, lines["9"], lines["8"], strict=True)
    for (_, batch, weights, same), (given, *_), (replay, *_) in calls:
        assert same and weights is given
        assert batch.seeds == [e.seed for e in replay.episodes]


def test_the_drawn_episodes_get_their_base_priorities_again(lines):
    calls = zip(lines["priorities"], lines["8"], strict=True)
    for (_, _, indices, priorities), (replay, *_) in calls:
        assert indices is replay.indices
        np.testing.assert_allclose(priorities, [abs(e.reward) + 0.1 for e in replay.episodes])


# -- methods, options, failures


def test_evaluations_do_not_change_training(tmp_path):
    """An evaluation draws no random number of training's, and has image features of its own."""
    tables = []
    for every in (1, 3):
        out = tmp_path / str(every)
        text = f"--env frozenlake_vlm --iterations 3 --eval_every {every}"
        assert train.main(flags(text, out)) == 0
        tables.append(read(out, "metrics.csv"))
    often, seldom = tables
    assert np.isnan(seldom["eval_success"]).sum() == 2
    for name in often:
        if not name.startswith("eval_") and not name.endswith("_s"):
            np.testing.assert_array_equal(often[name], seldom[name], err_msg=name)


@pytest.mark.parametrize(
    "text", ["--method freshper --env frozenlake_vlm", "--method per", "--method on_policy"]
)
def test_every_method_runs_and_engine_and_trainer_agree(text, tmp_path, capsys):
    out = tmp_path / "run"
    name = "frozenlake_vlm" if "vlm" in text else "frozenlake"
    k = 0 if "on_policy" in text else 2
    assert train.main(flags(text, out)) == 0
    assert "held-out success, last evaluation: " in capsys.readouterr().out
    table = read(out, "metrics.csv")
    assert table["step"].tolist() == [0, 1 + k, 2 + 2 * k]
    # On-policy training keeps no episodes.
    assert table["buffer_size"][1:].tolist() == ([4, 8] if k else [0, 0])
    assert (np.isnan(table["replay_loss"][1:]) == (k == 0)).all()
    assert (table["mismatch"][1:] < 1e-4).all()

    after = load_policy(str(out / "checkpoint"), "cpu", torch.float32)
    before = load_policy(str(tiny_model(name)), "cpu", torch.float32)
    pairs = zip(after.model.named_parameters(), before.model.parameters(), strict=True)
    changed = {n for (n, p), q in pairs if not torch.equal(p, q)}
    assert any("embed_tokens" in n for n in changed)
    assert not any("visual" in n for n in changed)  # a tiny vision tower is frozen


def test_options_together(tmp_path, monkeypatch):
    """They reach the code, and the trainer has --temperature, too."""
    text = """--slippery --format_penalty 0.3 --max_turns 4 --capacity 6 --eviction lowest_priority
    --alpha 0.3 --epsilon 0.01 --base_priority advantage --decay polynomial --tau 7 --beta 0.4
    --baseline recompute --replay_ratio 1 --ppo_epochs 2 --dual_clip 2
    --advantage_clip 0.2 --kl_loss_coef 0.05 --kl_reward_coef 0.1 --entropy_coef 0.01
    --micro_batch_size 2 --temperature 0.8 --max_tokens 400"""
    loss = Mock(wraps=policy_loss)
    monkeypatch.setattr("freshper.trainer.policy_loss", loss)
    sampling = Mock(wraps=Sampling)
    monkeypatch.setattr("freshper.backends.Sampling", sampling)
    assert train.main(flags(text, tmp_path / "run")) == 0
    table = read(tmp_path / "run", "metrics.csv")
    assert table["step"].tolist() == [0, 3, 6]
    assert table["buffer_size"][1:].tolist() == [4, 6]
    assert (table["mismatch"][1:] < 1e-4).all()
    assert sampling.call_args.args == (0.8,)
    terms = [loss.call_args.kwargs[k] for k in ("dual_clip", "entropy_coef", "kl_coef")]
    assert terms == [2.0, 0.01, 0.05]
    assert loss.call_args.kwargs["ref_logprobs"] is not None


def test_mixed_precision_rounds_and_keeps_weights_in_float32(tmp_path, monkeypatch):
    """The log-probs of line 3 are those of the same computation again."""
    collected = []
    monkeypatch.setattr(
        train, "rollout", lambda *arguments: collected.append(rollout(*arguments)) or collected[-1]
    )
    assert train.main(flags("--dtype bfloat16 --env frozenlake_vlm", tmp_path / "run")) == 0
    weights = load_file(tmp_path / "run/checkpoint/model.safetensors").values()
    assert {w.dtype for w in weights} == {torch.float32}
    policy = load_policy(str(tiny_model("frozenlake_vlm")), "cpu", torch.float32)
    batch = collate(collected[0])
    trainer = TorchTrainer(policy, parse_args([]), total_updates=1)
    exact = trainer.logprobs(batch)
    policy.mixed = True
    assert torch.equal(trainer.logprobs(batch), batch.behavior_logprobs)
    assert (batch.behavior_logprobs - exact).abs().mean() > 1e-5


def test_a_run_needs_neither_a_terminal_nor_a_display_and_ctrl_c_saves_it(tmp_path):
    """stderr is closed from the start, then stdout as in `| head -1`, or as in `| tee log`, whose
    tee Ctrl-C ends first. MPLBACKEND is a notebook's."""
    command = shlex.join([sys.executable, "train.py", *flags("--iterations 999", tmp_path / "run")])
    reading, writing = os.pipe()
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command} 2>&-"],
        cwd=ROOT,
        env=os.environ | {"MPLBACKEND": "module://nothing"},
        stdout=writing,
    )
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)

    metrics = tmp_path / "run/metrics.csv"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert (tmp_path / "run/checkpoint/manifest.json").exists()
    assert (tmp_path / "run/curve.png").exists()


@pytest.mark.parametrize(
    ("status", "sentence"),
    [(3, "the rollout met a reward nan and"), (1, "CUDA out of memory. Tried to allocate 2 GiB")],
)
def test_a_reward_that_is_not_finite_and_a_full_gpu_end_the_run(
    status, sentence, tmp_path, monkeypatch, capsys
):
    if status == 1:
        full = Mock(side_effect=torch.OutOfMemoryError(f"{sentence}."))
        monkeypatch.setattr(TorchTrainer, "update", full)
    else:
        ending = float("nan"), True, False, {"success": False, "valid": True}
        monkeypatch.setattr(
            FrozenLake, "step_many", lambda envs, _: [(env.observe(), *ending) for env in envs]
        )
    assert train.main(flags("", tmp_path / "run")) == status
    out = capsys.readouterr().out
    (line,) = re.findall(f"^stopped after iteration 0: {sentence}.*", out, re.MULTILINE)
    assert ("episode seed" in line) is (status == 3)


def test_what_fails_in_a_backend_has_its_line():
    sentence = r"^x failed: IndexError: .* \(\S+test_train.py:\d+\)$"
    with pytest.raises(BackendError, match=sentence), phase("x", Exception):
        [][0]


# What is wrong with a model folder: a file, its new content (None: it is deleted; a pair: what is
# replaced, by what), and a part of the sentence.
MODELS = {
    "no chat template": ("chat_template.jinja", None, "tokenizer.chat_template is not set"),
    "a template without the text": ("chat_template.jinja", b"hello", "a user's text exactly once"),
    "pickled weights": ("model.safetensors", None, "no file named model.safetensors"),
    "another family": (
        "config.json",
        (b'"qwen2"', b'"gpt2"'),
        "it is a gpt2, but must be",
    ),
    "a rope that changes with the length": (
        "config.json",
        (b'"rope_type": "default"', b'"rope_type": "dynamic", "factor": 2.0'),
        "its rope is of the type dynamic, but must be one of",
    ),
    "a window": (
        "config.json",
        (b'"use_sliding_window": false', b'"use_sliding_window": true, "sliding_window": 32'),
        "--max_tokens is 512, but must be at most 32",
    ),
    "no tokenizer": ("tokenizer.json", None, "not appear to have a file named tokenizer.json"),
    "a panic of the tokenizer": (
        "tokenizer.json",
        (
            b'"normalizer": null',
            b'"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}',
        ),
        "Cannot parse precompiled_charsmap",
    ),
}


def refusal(capsys, text):
    """The only line on stderr, with exit status 2 and nothing written."""
    before = sorted(Path().rglob("*"))
    assert train.main([*text.split(), *"--iterations 1 --eval_episodes 1 --out run".split()]) == 2
    assert sorted(Path().rglob("*")) == before
    lines = re.split("[\r\n]+", capsys.readouterr().err)
    (line,) = [line for line in lines if line and "Loading weights" not in line]
    return line.removeprefix("train.py: error: ")


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_folder_that_cannot_be_used(kind, model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, content, reason = MODELS[kind]
    shutil.copytree(model_folder["text"], "model")
    file = Path("model") / name
    if kind == "pickled weights":  # good ones, in the format that can carry code
        torch.save(load_file(file), "model/pytorch_model.bin")
    if content is None:
        file.unlink()
    elif isinstance(content, tuple):
        file.write_bytes(file.read_bytes().replace(*content))
    else:
        file.write_bytes(content)

    sentence = refusal(capsys, "--model model")
    assert sentence.startswith("--model is model, but must be a chat model that can be loaded: ")
    assert reason.lower() in sentence.lower()
    if kind == "a panic of the tokenizer":  # not an error of ours
        assert re.search(r": \w+: .* \(\S+\.py:\d+\)$", sentence)


def test_a_model_that_does_not_fit_the_task(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = model_folder["text"]
    sentence = refusal(capsys, f"--model {text} --env frozenlake_vlm")
    assert sentence.endswith("it reads text only, but --env frozenlake_vlm shows images")
