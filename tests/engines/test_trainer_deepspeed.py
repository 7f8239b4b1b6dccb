"""DeepSpeed, on one rank and on two, computes what plain torch computes: real processes, real ZeRO, gloo, float32.

The oracle is TorchTrainer in one process on the same seed and episodes. 13 episodes in micro-batches of 2 leave a
rank without a row, and the third update has 3 episodes. Tolerances: Adam divides by the gradient's own size, so
a weight whose gradient is rounding noise may move by up to the learning rate; 1e-5 is a sixtieth of one step.
"""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freshper import checkpoint
from freshper.models import load_policy

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests/engines/rank_of_a_trainer.py")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
FLAGS = "--batch_size 13 --micro_batch_size 2 --warmup_steps 2 --engine vllm".split()
PICTURES = ["--env", "frozenlake_vlm"]
TORCH = ["--trainer", "torch"]
TERMS = "--kl_loss_coef 0.05 --kl_reward_coef 0.1 --entropy_coef 0.01".split()


def run(out, ranks, *flags, before="-", updates=(0, 3)):
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*launcher, SCRIPT, str(out), str(before), *map(str, updates), *FLAGS, *flags]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return torch.load(out / "found.pt", weights_only=False)


def same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_deepspeed_computes_what_torch_computes(tmp_path):
    """Pictures, ZeRO-3 on two ranks, three updates; the other stages follow in the next test."""
    expected = run(tmp_path / "torch", 1, *TORCH, *PICTURES, *TERMS)
    found = run(tmp_path / "zero", 2, "--trainer", "deepspeed", "--zero_stage", "3", *PICTURES, *TERMS)
    torch.testing.assert_close(found["before"], expected["before"], rtol=0, atol=1e-5)
    assert (expected["after"] - expected["before"]).abs().max() > 0.1  # three updates that matter
    torch.testing.assert_close(found["after"], expected["after"], rtol=0, atol=1e-4)
    assert found["mismatch"] == pytest.approx(expected["mismatch"], rel=1e-5)
    assert found["lr"] == expected["lr"]
    for (ours, our_drift), (theirs, their_drift) in zip(found["updates"], expected["updates"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        assert our_drift.keys() == their_drift.keys()
        for name, sums in their_drift.items():  # each episode's, whichever rank it was on
            np.testing.assert_allclose(our_drift[name], sums, rtol=1e-3, atol=1e-4, err_msg=name)
    same_weights(found["weights"], expected["weights"])
    saved = dict(load_policy(str(tmp_path / "zero"), "cpu", torch.float32).model.named_parameters())
    same_weights(saved, {name: expected["weights"][name] for name in saved})


def test_any_stage_on_any_ranks_goes_on_from_any_other(tmp_path):
    """Torch, ZeRO-2, 3 and 0 on two ranks, 1 on one, and torch again: an update each, from the state of the one before;
    in the end the weights and moments of as many updates of torch alone."""
    chain = [(1, TORCH)]
    chain += [(n, ["--trainer", "deepspeed", "--zero_stage", str(k)]) for n, k in ((2, 2), (2, 3), (1, 1), (2, 0))]
    chain += [(1, TORCH)]
    before = "-"
    for k, (ranks, flags) in enumerate(chain):
        found = run(tmp_path / str(k), ranks, *flags, *TERMS, before=before, updates=(k, k + 1))
        before = tmp_path / str(k)
    expected = run(tmp_path / "straight", 1, *TORCH, *TERMS, updates=(0, len(chain)))
    assert found["lr"] == expected["lr"]
    same_weights(found["weights"], expected["weights"])
    states = (torch.load(f"{folder}/state.pt", weights_only=False) for folder in (before, tmp_path / "straight"))
    found, expected = (state["optimizer"] for state in states)
    assert found["param_groups"] == expected["param_groups"]
    for k, moments in expected["state"].items():
        assert found["state"][k]["step"] == moments["step"] == len(chain)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found["state"][k][name], moments[name], rtol=1e-3, atol=1e-6)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 4))
def test_shares_hold_every_row_once_and_are_equally_many(lengths, ranks, micro_batch_size):
    from freshper.episode import Batch
    from freshper.trainer_deepspeed import DeepSpeedTrainer

    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    rewards = torch.arange(shape[0])[:, None].expand(shape).float()  # names the row
    batch = Batch(torch.zeros(shape, dtype=torch.long), mask, torch.zeros(shape), rewards, [[]] * shape[0], lengths)
    config, seen, numbers = SimpleNamespace(micro_batch_size=micro_batch_size), [], set()
    for rank in range(ranks):
        parts = list(DeepSpeedTrainer._shares(SimpleNamespace(config=config, rank=rank, ranks=ranks), batch))
        numbers.add(len(parts))
        for rows, part in parts:
            assert 1 <= len(rows) <= micro_batch_size
            assert part.rewards[:, 0].tolist() == rows
            seen += [row for row, own in zip(rows, part.action_mask, strict=True) if own.any()]
    assert sorted(seen) == list(range(len(lengths)))
    assert len(numbers) == 1


def train_on_two_ranks(model, out, *flags):
    """The real train.py with the embedded engine, in a session of its own."""
    settings = "--trainer deepspeed --zero_stage 1 --rollout_batch_size 4 --batch_size 5 --eval_episodes 4"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, "train.py", "--model", model, "--out", str(out), *settings.split(), *flags]
    return subprocess.Popen(
        [*command, "--format_penalty", "0.15"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def rows(out):
    if not (out / "metrics.csv").exists():
        return []
    with open(out / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_rank_that_does_not_answer_ends_the_run(model_folder, tmp_path):
    """train.py with the embedded engine; when it has trained, one rank is stopped."""
    out = tmp_path / "run"
    flags = "--iterations 100000 --save_every 1 --timeout 20".split()
    process = train_on_two_ranks(model_folder["text"], out, *flags)
    try:
        waited = time.monotonic() + 200
        while len(rows(out)) < 3:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < waited
            time.sleep(0.2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = sorted(pid for pid in map(int, children) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
        stopped = ranks[1]
        os.kill(stopped, signal.SIGSTOP)
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "written to" in line:  # rank 0 has given up and ends; torchrun would give the other half a minute
                os.kill(stopped, signal.SIGKILL)
    finally:
        process.terminate()
    assert process.wait(60) not in (0, None)
    found = [line for line in lines if line.startswith("stopped in iteration")]
    assert len(found) == 1
    assert "the ranks of DeepSpeed failed together in `" in found[0]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    table = rows(out)
    assert [int(r["step"]) for r in table] == [3 * (k + 1) for k in range(len(table))]
    assert all(float(r["mismatch"]) < 1e-4 for r in table)  # the engine plays with what the ranks trained
    folders = (checkpoint.find(out)[0].folder, model_folder["text"])
    after, before = (load_policy(str(f), "cpu", torch.float32).model.parameters() for f in folders)
    assert max((p - q).abs().max() for p, q in zip(after, before, strict=True)) > 1e-4
