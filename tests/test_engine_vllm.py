"""What vLLM is started with. tests/engines starts it."""

import pytest
import torch

from envs.base import UserError
from envs.frozenlake import FrozenLake
from freshper.config import Config
from freshper.engine_vllm import gpus_of_vllm, options_of_vllm, variables_of_vllm


@pytest.mark.parametrize(
    "installed, visible, ranks, left",
    [
        (1, None, 1, []),  # vLLM shares it
        (3, None, 1, ["1", "2"]),
        (4, "", 2, ["2", "3"]),
        (4, "3,0,2", 2, ["2"]),
        (8, "GPU-a,GPU-b", 1, ["GPU-b"]),
    ],
)
def test_vllm_has_the_gpus_that_the_ranks_leave(installed, visible, ranks, left, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "RANK", "MASTER_PORT", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: installed)
    monkeypatch.setattr(Config, "device", "cuda")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert gpus_of_vllm("cuda") == left

    variables = variables_of_vllm("cuda", left)
    assert variables.get("CUDA_VISIBLE_DEVICES") == (",".join(left) or visible)
    # torchrun's variables would make vLLM's processes ranks of the trainer.
    assert "LOCAL_WORLD_SIZE" not in variables

    options = options_of_vllm(Config(), FrozenLake(), left)
    assert options.get("tensor_parallel_size", 1) == max(1, len(left))
    assert options.get("gpu_memory_utilization") == (None if left else 0.5)


def test_ranks_that_leave_vllm_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="must leave a GPU for vLLM, but 4,5 are all"):
        gpus_of_vllm("cuda")
