"""examples/corrections.py: rivals of PPO's clip differ from it on replay alone."""

import json
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

import train
from examples import corrections
from examples.corrections import RIVALS, corrected_loss
from freshper.errors import NonFiniteError
from freshper.flags import parse_args
from freshper.reinforce import policy_loss

MASK = torch.rand(6, 9, generator=torch.Generator().manual_seed(0)) > 0.3
OPTIONS = {"ratio_clip": 0.2, "dual_clip": 3.0, "kl_coef": 0.03, "batch_size": 6, "scale": 5.0}


def gradient(loss_of, log_ratio):
    """Return the gradient of a loss where log pi_theta - log pi_mu has this value, [B, T]."""
    draw = torch.Generator().manual_seed(1)
    behavior, reference, advantages = torch.randn(3, 6, 9, generator=draw)
    logprobs = (behavior + log_ratio).requires_grad_()
    arguments = (logprobs, behavior, advantages, MASK, torch.rand(6, generator=draw))
    loss, _ = loss_of(*arguments, ref_logprobs=reference, **OPTIONS)
    loss.backward()
    return logprobs.grad


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_has_the_gradient_of_the_policy_loss_until_the_policy_moves(name):
    def rival(*arguments, **options):
        return corrected_loss(RIVALS[name], *arguments, **options)

    torch.testing.assert_close(gradient(rival, 0.0), gradient(policy_loss, 0.0))
    moved = torch.randn(6, 9, generator=torch.Generator().manual_seed(2))
    assert (gradient(rival, moved) - gradient(policy_loss, moved)).abs().max() > 0.01


FAILURES = [
    (NonFiniteError("loss"), nullcontext(), True),
    (OSError("full"), pytest.raises(SystemExit, match="1"), False),
]


@pytest.mark.parametrize("error, ends, diverged", FAILURES)
def test_only_numbers_that_are_not_finite_count_as_divergence(
    error, ends, diverged, tmp_path, monkeypatch
):
    monkeypatch.setattr(train, "train", Mock(side_effect=error))
    monkeypatch.setattr(corrections, "summary", lambda _: {})
    with ends:
        corrections.run(("ppo", 121), tmp_path, ["--model=tiny", "--iterations=1"])
    stopped = corrections.folder_of(tmp_path, "ppo", 121) / "stopped.txt"
    assert stopped.exists() == diverged


def test_a_run_with_other_settings_is_not_taken_for_the_new_one(tmp_path, monkeypatch, capsys):
    folder = corrections.folder_of(tmp_path, "cispo", 121)
    folder.mkdir()
    settings = vars(parse_args(["--preset=tiny", "--seed=121"]).config)
    (folder / "config.json").write_text(json.dumps(settings))
    command = ["corrections.py", "--preset=tiny", "--lr=0.5", "--seeds=121", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(corrections, "ProcessPoolExecutor", None)  # nothing is trained
    with pytest.raises(SystemExit, match="2"):
        corrections.main()
    assert f"--lr is 0.5, but must be 0.001 as in {folder}" in capsys.readouterr().err
