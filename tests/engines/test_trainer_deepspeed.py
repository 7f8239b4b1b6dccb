"""DeepSpeed at each ZeRO stage computes what plain torch does, and resumes bit for bit.

Real processes, real ZeRO, gloo. The oracle is TorchTrainer in one process on the same episodes. 13
episodes leave a rank fewer rows than the other, and 3 in the second of three updates none.
Tolerance: Adam divides by the gradient's own size, so a parameter whose gradient is rounding noise
may move by up to the learning rate. 1e-5 is a fiftieth of the first step.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from freshper.models import load_policy

SCRIPT = Path(__file__).with_name("rank_of_a_trainer.py")
TWO_RANKS = ["zero_1", "zero_2", "zero_3", "images", "bfloat16"]


def run(ranks, out, *cases):
    """Run the cases in one launch. Returns the exit status and the output."""
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [sys.executable, *launcher, str(SCRIPT), str(out), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The numbers that rank_of_a_trainer.py wrote, by case, and its folder."""
    out = tmp_path_factory.mktemp("two")
    status, output = run(2, out, *TWO_RANKS)
    assert status == 0, output
    results = {case: torch.load(out / f"{case}.pt", weights_only=False) for case in TWO_RANKS}
    return results, out


def same_parameters(ours, expected, tolerance):
    assert ours.keys() == expected.keys()
    for name, parameter in expected.items():
        difference = (ours[name] - parameter).abs().max()
        assert difference <= tolerance, name


def agrees_with_torch(case):
    ours = case["deepspeed"]
    expected = case["torch"]
    torch.testing.assert_close(ours["before"], expected["before"], rtol=0, atol=1e-5)
    assert (expected["after"] - expected["before"]).abs().max() > 0.1  # three updates that matter
    torch.testing.assert_close(ours["after"], expected["after"], rtol=0, atol=1e-4)
    assert ours["mismatch"] == pytest.approx(5e-5, abs=1e-6)
    assert ours["lr"] == expected["lr"]
    same_parameters(ours["parameters"], expected["parameters"], 1e-5)

    for update, right in zip(ours["updates"], expected["updates"], strict=True):
        del update["stats"]["seconds"], right["stats"]["seconds"]
        assert update["stats"] == pytest.approx(right["stats"], rel=1e-3, abs=1e-5)
        drift = update["drift"]
        assert drift.keys() == right["drift"].keys()
        for name, sums in right["drift"].items():  # of each episode, on whichever rank it was
            np.testing.assert_allclose(drift[name], sums, rtol=1e-3, atol=1e-4, err_msg=name)


def goes_on_bit_for_bit(case):
    resumed = case["resumed"]
    expected = case["deepspeed"]
    same_parameters(resumed["parameters"], expected["parameters"], 0.0)
    assert torch.equal(resumed["after"], expected["after"])
    assert resumed["lr"] == expected["lr"]


@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_compute_what_torch_computes_and_resume_bit_for_bit(case, two_ranks):
    """Bfloat16 rounds elsewhere. To resume it needs the float32 parameters of every rank."""
    results, _ = two_ranks
    if not case.startswith("bfloat16"):
        agrees_with_torch(results[case])
    goes_on_bit_for_bit(results[case])


def test_zero_3_saves_whole_parameters(two_ranks):
    """The checkpoint is from after two updates, and the third moves each parameter a little."""
    results, out = two_ranks
    last = results["images"]["deepspeed"]["parameters"]
    policy = load_policy(str(out / "images"), "cpu", torch.float32)
    for name, parameter in policy.model.named_parameters():
        difference = (parameter.detach() - last[name]).abs().max()
        assert 0.0 < difference < 0.02, name


def test_micro_batches_are_summed_in_float32(tmp_path):
    """The oracle adds the same gradients of 32 micro-batches, one by one, in float32. At stage 1
    DeepSpeed rounds the sum once. Sums in bfloat16 are off by 0.007."""
    cases = ["sum_1", "sum_2", "sum_3"]
    status, output = run(1, tmp_path, *cases)
    assert status == 0, output
    for case in cases:
        computed, expected = torch.load(tmp_path / f"{case}.pt")
        assert (computed - expected).norm() < (3e-3 if case == "sum_1" else 1e-5)


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
