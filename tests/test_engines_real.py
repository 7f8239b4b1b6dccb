"""The paper's engines for real, without a GPU: train.py with vLLM and DeepSpeed, on one rank and on two.

Needs requirements-cpu-engines.txt; without it these tests fail, they do not skip. Every run is a subprocess in a
session of its own, so that what it leaves behind can be counted: nothing, also when a rank or vLLM is killed.
"""

import copy
import csv
import glob
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from envs import ENVS
from freshper.models import load_policy
from freshper.tiny import build_policy

ROOT = Path(__file__).parent.parent
SHORT = """--engine vllm --trainer deepspeed --iterations 3 --rollout_batch_size 4 --batch_size 5 --micro_batch_size 2
--eval_episodes 4 --eval_every 2 --format_penalty 0.15 --sync_check_every 1 --lr 0.003 --warmup_steps 0""".split()


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory):
    """Models with heads of 32, the smallest that vLLM's CPU attention knows; the text model's output layer is tied."""
    folders = {}
    for name in ("frozenlake", "frozenlake_vlm"):
        policy = build_policy(ENVS[name]())
        config, generation = copy.deepcopy(policy.model.config), policy.model.generation_config
        language = config.get_text_config()
        language.num_attention_heads = language.num_key_value_heads = 2
        if name == "frozenlake":
            language.tie_word_embeddings = True
        else:
            language.rope_parameters = language.rope_parameters | {"mrope_section": [4, 6, 6]}
        torch.manual_seed(0)
        policy.model = type(policy.model)(config)
        policy.model.generation_config = generation
        folders[name] = str(tmp_path_factory.mktemp(name))
        policy.save(folders[name])
    return folders


def start(out, model, ranks, *flags, script=("train.py",)):
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*launcher, *script, "--model", model, "--out", str(out), *SHORT, *flags]
    with open(f"{out}.log", "w") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, start_new_session=True
        )


def session(process):
    """{pid: command} of every process that is left of a run."""
    listing = subprocess.run(["ps", "-eo", "pid=,sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    fields = [line.split(maxsplit=3) for line in listing.splitlines()]
    return {int(pid): args for pid, sid, stat, args in fields if int(sid) == process.pid and "Z" not in stat}


def finish(process, out, timeout=400):
    """(exit status, output); then no process and no file in shared memory is left."""
    try:
        status = process.wait(timeout)
        gone = time.monotonic() + 10
        while session(process) and time.monotonic() < gone:
            time.sleep(0.2)
        left = session(process)
    finally:
        for pid in session(process):
            os.kill(pid, signal.SIGKILL)
    assert not left
    assert not glob.glob("/dev/shm/freshper-*")
    return status, Path(f"{out}.log").read_text()


def rows(out):
    with open(Path(out) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("env", "stage", "ranks"), [("frozenlake", 0, 1), ("frozenlake_vlm", 2, 2), ("frozenlake", 3, 2)]
)
def test_vllm_and_deepspeed_train_and_agree(wide_heads, tmp_path, env, stage, ranks):
    out = tmp_path / "run"
    process = start(out, wide_heads[env], ranks, "--env", env, "--zero_stage", str(stage))
    status, output = finish(process, out)
    assert status == 0, output
    table = rows(out)
    assert [int(r["step"]) for r in table] == [3, 6, 9]  # one fresh and two replayed updates an iteration
    assert all(r["replay_loss"] for r in table)
    for row in table:
        assert 0.0 < float(row["sync_error"]) < 1e-3  # vLLM has the weights of this iteration ...
        assert float(row["mismatch"]) < 1e-3  # ... and what it sampled has the log-probs it said
    policy, before = (load_policy(str(f), "cpu", torch.float32) for f in (out / "checkpoint", wide_heads[env]))
    moved = [(p - q).abs().max() for p, q in zip(policy.model.parameters(), before.model.parameters(), strict=True)]
    assert max(moved) > 0.01  # far more than the proof would let pass


def test_a_stale_output_layer_is_found_and_named(wide_heads, tmp_path):
    """A trainer that hands over all weights but one, from the second time on."""
    script = tmp_path / "stale.py"
    script.write_text(
        f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import train
from freshper.trainer import TorchTrainer

whole, old = TorchTrainer.weights, {{}}
def stale(self):
    for name, weight in whole(self):
        yield name, old.setdefault(name, weight.clone()) if name == "lm_head.weight" else weight
TorchTrainer.weights = stale
if __name__ == "__main__":
    sys.exit(train.main())
"""
    )
    out = tmp_path / "run"
    flags = ["--env", "frozenlake_vlm", "--trainer", "torch"]
    status, output = finish(start(out, wide_heads["frozenlake_vlm"], 1, *flags, script=(str(script),)), out)
    assert status == 1
    assert "stopped in iteration 0: vLLM does not compute with the trainer's weights" in output


@pytest.mark.parametrize(("ranks", "victim"), [(2, "rank 1"), (1, "VLLM::EngineCore")])
def test_a_killed_process_ends_the_run(wide_heads, tmp_path, ranks, victim):
    out = tmp_path / "run"
    process = start(out, wide_heads["frozenlake"], ranks, "--env", "frozenlake", "--iterations", "100000")
    deadline = time.monotonic() + 300
    while not ((out / "metrics.csv").exists() and len(rows(out)) > 1):
        assert process.poll() is None, Path(f"{out}.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.5)
    if victim == "rank 1":
        environment = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in session(process)}
        found = [pid for pid, text in environment.items() if b"\0RANK=1\0" in text]
    else:
        found = [pid for pid, command in session(process).items() if command.startswith(victim)]
    os.kill(min(found), signal.SIGKILL)
    status, output = finish(process, out, timeout=60)
    assert status not in (0, None)
    assert "vLLM died" in output if ranks == 1 else "SIGKILL" in output or "exitcode: -9" in output


def test_what_cannot_be_run_is_said_in_one_sentence(wide_heads, tmp_path):
    heads = tmp_path / "narrow"
    build_policy(ENVS["frozenlake"]()).save(str(heads))
    process = start(tmp_path / "run", str(heads), 1, "--env", "frozenlake", "--trainer", "torch")
    status, output = finish(process, tmp_path / "run")
    assert status == 2
    assert "--engine is vllm, which on a CPU needs attention heads of size 32, 64" in output.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()
