"""The paper's engines for real, without a GPU: train.py with vLLM and DeepSpeed, on one rank and on two.

    text       ZeRO-0 on one rank, then vLLM is killed; ZeRO-2 on two, with a KV cache that holds two games of sixteen,
               then vLLM has no more memory; ZeRO-3 on two, then Ctrl-C, and on with ZeRO-0 on one
    pictures   ZeRO-0 on one rank and ZeRO-3 on two, to the end; ZeRO-2 on two, then a rank is killed

Needs requirements-cpu-engines.txt; without it these tests fail, they do not skip. Every run is a subprocess in a
session of its own, so that what it leaves behind can be counted: nothing, also when a rank or vLLM is killed. Starting
vLLM takes most of the time, so a run serves several tests: it trains, is looked at, and is then ended.
"""

import csv
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from envs import ENVS
from freshper import checkpoint
from freshper.models import load_policy
from freshper.tiny import build_policy

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
SHORT = """--rollout_batch_size 4 --batch_size 5 --micro_batch_size 2 --eval_episodes 4 --eval_every 2 --max_turns 4
--format_penalty 0.15 --sync_check_every 1 --lr 0.003 --warmup_steps 0 --save_every 1 --truncated_is 2""".split()
REAL = ["--engine", "vllm", "--trainer", "deepspeed"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random weights. The text model's output layer is tied, as that of Qwen2.5-0.5B is."""
    folders = {}
    for name in ("frozenlake", "frozenlake_vlm"):
        policy = build_policy(ENVS[name](), heads=2)  # of 32 numbers, the fewest that vLLM's CPU attention knows
        if name == "frozenlake":
            policy.model.config.tie_word_embeddings = True
            policy.model.tie_weights()
        folders[name] = str(tmp_path_factory.mktemp(name))
        policy.save(folders[name])
    return folders


STARTED = []


@pytest.fixture(autouse=True)
def nothing_stays():
    """Also where a test fails in the middle of a run."""
    yield
    while STARTED:
        for pid in session(STARTED.pop()):
            os.kill(pid, signal.SIGKILL)


def start(out, ranks, *flags, script=("train.py",)):
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    with open(f"{out}.log", "a") as log:
        process = subprocess.Popen(
            [*launcher, *script, *flags],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    process.sessions = {str(process.pid)}
    STARTED.append(process)
    process.in_memory = set(SHARED_MEMORY.glob("freshper-*"))
    return process


def session(process):
    """{pid: command} of every process that is left of a run. torchrun gives its workers sessions of their own, which
    are known from the first look on, so that nothing is lost when a parent dies."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,sid=,stat=,args="], capture_output=True, text=True, check=True)
    table = [line.split(maxsplit=4) for line in listing.stdout.splitlines()]
    sids = process.sessions
    while new := {row[2] for row in table if row[1] in {r[0] for r in table if r[2] in sids}} - sids:
        sids |= new
    return {int(pid): args for pid, _, sid, stat, args in table if sid in sids and "Z" not in stat}


def finish(process, out, timeout=600):
    """(exit status, output); then no process and no file in shared memory is left."""
    end = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < end:
        session(process)
        time.sleep(0.5)
    gone = time.monotonic() + 10
    while (left := (session(process), set(SHARED_MEMORY.glob("freshper-*")) - process.in_memory)) != ({}, set()):
        if time.monotonic() > gone:
            break
        time.sleep(0.2)
    assert left == ({}, set())
    return process.wait(), Path(f"{out}.log").read_text()


def rows(out):
    path = Path(out) / "metrics.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def wait_for_rows(process, out, n, seconds=400):
    deadline = time.monotonic() + seconds
    while len(rows(out)) < n:
        assert session(process), Path(f"{out}.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.3)


def trained_and_agreed(table, first=0):
    """What three iterations with replay must show: both updates ran, and vLLM has the weights of each iteration."""
    assert [int(r["step"]) for r in table] == [
        3 * (first + k + 1) for k in range(len(table))
    ]  # one fresh, two replayed
    for row in table:
        assert row["replay_loss"]
        assert float(row["sync_error"]) < 1e-3  # vLLM has the weights of this iteration ...
        assert float(row["mismatch"]) < 1e-3  # ... and what it sampled has the log-probs it said
        assert 0.999 < float(row["mismatch_p01"]) <= float(row["mismatch_p99"]) < 1.001
        assert float(row["grad_norm"]) > 0


def moved(model, folder):
    """How far the weights of a checkpoint are from those the run began with."""
    before, after = (dict(load_policy(str(f), "cpu", torch.float32).model.named_parameters()) for f in (model, folder))
    assert before.keys() == after.keys()
    return max(float((after[name] - before[name]).abs().max()) for name in before)


def last_checkpoint(out):
    """Of a run that was killed: it is whole, and no younger than the last row of metrics.csv but one."""
    found, damaged = checkpoint.find(out)
    assert not damaged
    assert found.done >= len(rows(out)) - 1
    checkpoint.read_state(found)
    return found


def test_text_on_one_rank_until_vllm_is_killed(models, tmp_path):
    """ZeRO-0. Then vLLM's core is killed in mid-run."""
    out = tmp_path / "run"
    flags = [*REAL, *SHORT, "--env", "frozenlake", "--zero_stage", "0", "--iterations", "100000"]
    process = start(out, 1, *flags, "--model", models["frozenlake"], "--out", str(out))
    wait_for_rows(process, out, 3)
    cores = [pid for pid, command in session(process).items() if command.startswith("VLLM::EngineCore")]
    os.kill(min(cores), signal.SIGKILL)
    killed = time.monotonic()
    status, output = finish(process, out, timeout=60)
    assert time.monotonic() - killed < 60
    assert status == 1
    assert output.count("\nstopped in iteration") == 1
    assert "vLLM died in " in output
    trained_and_agreed(rows(out))
    assert moved(models["frozenlake"], last_checkpoint(out).folder) > 0.01  # far more than the proof would let pass


def test_pictures_on_two_ranks_until_one_is_killed(models, tmp_path):
    """ZeRO-2. Then the rank that is not the controller is killed in mid-run."""
    out = tmp_path / "run"
    flags = [*REAL, *SHORT, "--env", "frozenlake_vlm", "--zero_stage", "2", "--iterations", "100000"]
    process = start(out, 2, *flags, "--model", models["frozenlake_vlm"], "--out", str(out))
    wait_for_rows(process, out, 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = sorted(int(pid) for pid in children if "train.py" in session(process)[int(pid)])
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    status, output = finish(process, out, timeout=60)
    assert time.monotonic() - killed < 60
    assert status not in (0, None)
    assert output.count("\nstopped in iteration") == 1
    # torchrun ends vLLM as well, and rank 0 may see that first
    assert "the ranks of DeepSpeed failed" in output or "vLLM died in " in output
    assert "exitcode  : -9" in output  # torchrun names the rank that died
    trained_and_agreed(rows(out))
    assert moved(models["frozenlake_vlm"], last_checkpoint(out).folder) > 0.01


def test_zero_3_on_two_ranks_goes_on_as_zero_0_on_one_after_a_signal(models, tmp_path):
    """Text, three iterations; Ctrl-C's gentle end in the next; --resume adds one with another layout."""
    out = tmp_path / "run"
    flags = [*REAL, *SHORT, "--env", "frozenlake", "--zero_stage", "3", "--iterations", "100000"]
    process = start(out, 2, *flags, "--model", models["frozenlake"], "--out", str(out))
    wait_for_rows(process, out, 3)
    os.killpg(process.pid, signal.SIGINT)
    status, output = finish(process, out)
    assert status != 0
    assert "stopping after this iteration" in output
    done = len(rows(out))
    assert done >= 3
    trained_and_agreed(rows(out))
    assert last_checkpoint(out).done == done
    other = ["--zero_stage", "0", "--iterations", str(done + 1)]
    resumed = start(out, 1, "--resume", str(out), "--override", "zero_stage", "iterations", *other)
    status, output = finish(resumed, out)
    assert status == 0, output
    trained_and_agreed(rows(out))
    assert len(rows(out)) == done + 1
    assert json.loads((out / "config.json").read_text())["zero_stage"] == 0


@pytest.mark.parametrize(("ranks", "stage"), [(1, "0"), (2, "3")])
def test_pictures_to_the_end(ranks, stage, models, tmp_path):
    out = tmp_path / "run"
    flags = [*REAL, *SHORT, "--env", "frozenlake_vlm", "--zero_stage", stage, "--iterations", "3"]
    status, output = finish(start(out, ranks, *flags, "--model", models["frozenlake_vlm"], "--out", str(out)), out)
    assert status == 0, output
    assert len(rows(out)) == 3
    trained_and_agreed(rows(out))
    assert last_checkpoint(out).done == 3
    assert moved(models["frozenlake_vlm"], last_checkpoint(out).folder) > 0.01


def test_text_with_a_small_kv_cache_until_vllm_has_no_memory(models, tmp_path):
    """ZeRO-2 on two ranks. Six blocks of 32 tokens hold one whole game of 160 tokens, or three at their start: vLLM
    lets games wait, takes the cache away from some and computes it again, and log-probs are right all the same. Then
    the system gives its worker no more memory, and its next sync fails."""
    out = tmp_path / "run"
    options = json.dumps({"num_gpu_blocks_override": 7, "max_num_batched_tokens": 200})
    flags = [*REAL, *SHORT, "--env", "frozenlake", "--zero_stage", "2", "--iterations", "100000"]
    flags += ["--rollout_batch_size", "16", "--max_tokens", "160"]
    script = ("tests/engines/other_options.py", options)
    process = start(out, 2, *flags, "--model", models["frozenlake"], "--out", str(out), script=script)
    wait_for_rows(process, out, 3)
    for pid in [pid for pid, command in session(process).items() if command.startswith("VLLM::Worker")]:
        resource.prlimit(pid, resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))  # what it has, it keeps
    starved = time.monotonic()
    status, output = finish(process, out, timeout=60)
    assert time.monotonic() - starved < 60
    assert status not in (0, None)
    (sentence,) = re.findall(r"\nstopped in iteration .*", output)
    assert re.search(r"vLLM (died|failed) in (the rollout|handing the weights to vLLM|the proof of the sync)", sentence)
    assert int(re.search(r"preempted: (\d+)", output)[1]) > 0
    trained_and_agreed(rows(out))
    assert moved(models["frozenlake"], last_checkpoint(out).folder) > 0.01


def test_a_kv_cache_too_small_for_one_conversation_is_refused(models, tmp_path):
    out = tmp_path / "run"
    script = ("tests/engines/other_options.py", json.dumps({"num_gpu_blocks_override": 4}))
    flags = [*SHORT, "--env", "frozenlake", "--engine", "vllm", "--max_tokens", "160", "--out", str(out)]
    status, output = finish(start(out, 1, *flags, "--model", models["frozenlake"], script=script), out)
    assert status == 1
    (sentence,) = re.findall(r"\nstopped in iteration .*", output)
    assert "if its KV cache has no room for a conversation of --max_tokens 160, lower that or raise" in sentence
    assert "larger than the available KV cache memory" in output  # vLLM's own words
    assert not (out / "checkpoint").exists()


@pytest.mark.parametrize("env", ["frozenlake", "frozenlake_vlm"])
def test_wrong_weights_stop_the_run_and_are_named(env, models, tmp_path):
    """Each parameter of the trainer in turn is changed behind vLLM's back; vLLM stacks some into one of its own."""
    out = tmp_path / "run"
    script = ("tests/engines/proof_of_sync.py", "--env", env, "--engine", "vllm", "--freeze_vision", "False")
    status, output = finish(start(out, 1, "--model", models[env], script=script), out)
    assert status == 0, output
    said = dict(line.split(" > ") for line in output.splitlines() if " > " in line)
    changed = dict(load_policy(models[env], "cpu", torch.float32).model.named_parameters())
    assert len(changed) in (26, 45)
    tied = "lm_head.weight" not in changed
    assert list(said) == [*changed, *["a tied output layer"] * tied]
    for name, sentence in said.items():
        theirs = name.removeprefix("model.").removeprefix("language_model.")
        theirs = re.sub(r"self_attn\.[qkv]_proj", "self_attn.qkv_proj", theirs)
        theirs = re.sub(r"mlp\.(gate|up)_proj", "mlp.gate_up_proj", theirs)
        if name == "a tied output layer":  # vLLM had the new embedding and kept the old output layer
            theirs = "lm_head.weight"
        if name == "model.embed_tokens.weight" and tied:
            theirs = "embed_tokens.weight, lm_head.weight"
        found = re.fullmatch(
            r"vLLM does not compute with the trainer's weights: log-probs differ by up to (\S+), allowed is 0\.001; "
            r"the first parameters that differ: (.+)",
            sentence,
        )
        assert found, (name, sentence)
        assert float(found[1]) > 1e-3
        assert found[2] == theirs, name
