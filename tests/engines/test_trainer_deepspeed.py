"""DeepSpeed at each ZeRO stage computes what plain torch computes, and a resumed trainer goes on bit for bit.

Real processes, real ZeRO, gloo; the oracle is TorchTrainer in one process on the same episodes. 13 episodes
leave a rank fewer rows than the other, and 3 in the second of three updates none. Tolerance: Adam divides by the
gradient's own size, so a weight whose gradient is rounding noise may move by up to the learning rate; 1e-5 is a
fiftieth of the first step.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from freshper.models import load_policy

SCRIPT = Path(__file__).with_name("rank_of_a_trainer.py")
TWO_RANKS = ["zero_0", "zero_1", "zero_2", "zero_3", "images", "bfloat16"]


def run(ranks, out, *cases):
    """Run the cases in one launch. Returns the exit status and the output."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks > 1
        else []
    )
    command = [sys.executable, *launcher, str(SCRIPT), str(out), *cases]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "FRESHPER_TIMEOUT": "300"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What rank_of_a_trainer.py found in each case, by case, and its folder."""
    out = tmp_path_factory.mktemp("two")
    status, output = run(2, out, *TWO_RANKS)
    assert status == 0, output
    return {case: torch.load(out / f"{case}.pt", weights_only=False) for case in TWO_RANKS}, out


def same_weights(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name], weight, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def agrees_with_torch(case):
    found, expected = case["deepspeed"], case["torch"]
    torch.testing.assert_close(found["before"], expected["before"], rtol=0, atol=1e-5)
    assert (expected["after"] - expected["before"]).abs().max() > 0.1  # three updates that matter
    torch.testing.assert_close(found["after"], expected["after"], rtol=0, atol=1e-4)
    assert found["mismatch"] == pytest.approx(expected["mismatch"], rel=1e-5)
    assert found["lr"] == expected["lr"]
    for ours, theirs in zip(found["updates"], expected["updates"], strict=True):
        del ours["stats"]["seconds"], theirs["stats"]["seconds"]
        assert ours["stats"] == pytest.approx(theirs["stats"], rel=1e-3, abs=1e-5)
        assert ours["drift"].keys() == theirs["drift"].keys()
        for name, sums in theirs["drift"].items():  # of each episode, on whichever rank it was
            np.testing.assert_allclose(
                ours["drift"][name], sums, rtol=1e-3, atol=1e-4, err_msg=name
            )
    same_weights(found["weights"], expected["weights"], 1e-5)


def goes_on_bit_for_bit(case):
    found, expected = case["resumed"], case["deepspeed"]
    same_weights(found["weights"], expected["weights"], 0.0)
    assert torch.equal(found["after"], expected["after"])
    assert found["lr"] == expected["lr"]


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_compute_what_torch_computes_and_resume_bit_for_bit(case, two_ranks):
    """To resume in bfloat16, which rounds elsewhere, needs the float32 master weights of every rank."""
    if case != "bfloat16":
        agrees_with_torch(two_ranks[0][case])
    goes_on_bit_for_bit(two_ranks[0][case])


def test_zero_3_saves_whole_weights(two_ranks):
    """The model of the checkpoint after two updates: the third moves each weight a little."""
    found, out = two_ranks
    saved = dict(load_policy(str(out / "images"), "cpu", torch.float32).model.named_parameters())
    last = found["images"]["deepspeed"]["weights"]
    assert all(
        0.0 < float((weight.detach() - last[name]).abs().max()) < 0.02
        for name, weight in saved.items()
    )


def test_one_rank_and_another_number_of_ranks(two_ranks, tmp_path):
    """One rank does the same; it refuses the checkpoint of two."""
    status, output = run(1, tmp_path, "zero_1")
    assert status == 0, output
    case = torch.load(tmp_path / "zero_1.pt", weights_only=False)
    agrees_with_torch(case)
    goes_on_bit_for_bit(case)
    status, output = run(1, two_ranks[1], "zero_1", "--resume-only")
    assert status == 1
    assert "--resume needs 2 ranks, the number in the checkpoint, not 1" in output
