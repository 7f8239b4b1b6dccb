"""What the methods and the presets set: the paper's tables, and settings for tiny models.

Paper: Tables replay_config (the methods), config_comparison, env_details, training_config. A test compares the paper
presets with the tables, value for value. Where the paper names no dataset or reply limit, the choice is ours.

The paper's GPU layouts (appendix F) give half of the GPUs to vLLM: 2 for 0.5B, 4 for VL-3B, 8 for 7B. On one GPU it
shares that one with the trainer. docs/gpus.md has the commands.

The tiny presets were tuned on FrozenLake (RESULTS.md tells how); the other tasks took over its settings.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

# Standard PER and FreshPER differ in nothing but what their rows of Table replay_config say.
METHODS: dict[str, dict[str, Any]] = {
    "on_policy": {"replay_ratio": 0},
    "per": {"decay": "none", "is_correction": True},
    "freshper": {},
}

# Table config_comparison
CONFIG_A = {"advantage_clip": 0.2, "kl_loss_coef": 0.0, "kl_reward_coef": 0.0, "entropy_coef": 0.0}
CONFIG_DEFAULT = {"advantage_clip": 20.0, "kl_loss_coef": 0.05, "kl_reward_coef": 0.1, "entropy_coef": 0.01}

_TINY = {
    "model": "tiny",
    "dtype": "float32",
    "prompt_style": "terse",
    "cell_size": 14,
    "capacity": 10_000,
    "max_tokens": 512,
    "max_new_tokens": 6,
    "micro_batch_size": 16,
    "advantage_clip": 20.0,
    "dual_clip": 3.0,
    "epsilon": 0.1,
    "tau": 20.0,
    "lr": 1e-3,
    "iterations": 200,
    "rollout_batch_size": 32,
    "batch_size": 32,
    "eval_every": 20,
    "eval_episodes": 256,
}
_SOKOBAN = _TINY | {"format_penalty": 1.5, "max_tokens": 768}

_GPU = {"device": "cuda", "engine": "vllm", "trainer": "deepspeed"}
_PAPER_0_5B = {"model": "Qwen/Qwen2.5-0.5B-Instruct", "rollout_gpus": 1, **_GPU}
_PAPER_7B = {"model": "Qwen/Qwen2.5-7B-Instruct", "rollout_gpus": 4, **_GPU}
_PAPER_3B = {"model": "Qwen/Qwen2.5-VL-3B-Instruct", "rollout_gpus": 2, **_GPU}

_PAPER_VLM = {
    **_PAPER_3B,
    "iterations": 100,
    "max_tokens": 4096,
    "micro_batch_size": 1,
    **CONFIG_DEFAULT,
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "paper": {
        "frozenlake": {**_PAPER_0_5B, "slippery": True, **CONFIG_A},
        "frozenlake_vlm": _PAPER_VLM,
        "sokoban_simple": {**_PAPER_0_5B, **CONFIG_A},
        "sokoban_hard": {**_PAPER_0_5B, **CONFIG_A},
        "cliffwalking": {**_PAPER_0_5B, "max_turns": 200, **CONFIG_A},
        # not in the paper: as its FrozenLake in pictures
        "sokoban_simple_vlm": _PAPER_VLM,
        "sokoban_hard_vlm": {**_PAPER_VLM, "cell_size": 28},  # 64 tokens a picture; 56 pixels would make it 256
        "nq_search": {
            **_PAPER_7B,
            "zero_stage": 3,
            "iterations": 300,
            "max_tokens": 12800,
            "max_new_tokens": 500,
            "micro_batch_size": 1,
            **CONFIG_DEFAULT,
        },
        "gsm8k": {
            **_PAPER_0_5B,
            "data": "openai/gsm8k:main",
            "max_tokens": 4096,
            "max_new_tokens": 512,
            **CONFIG_A,
        },
        "aime": {
            **_PAPER_7B,
            "data": "AI-MO/aimo-validation-aime",
            "max_tokens": 4096,
            "max_new_tokens": 1024,
            "micro_batch_size": 2,
            "tau": 1000.0,
            **CONFIG_A,
        },
        "geoqa": {
            **_PAPER_3B,
            "data": "leonardPKU/GEOQA_R1V_Train_8K",
            "iterations": 100,
            "max_tokens": 4096,
            "max_new_tokens": 512,
            "micro_batch_size": 1,
            **CONFIG_DEFAULT,
        },
    },
    "tiny": {
        "frozenlake": {**_TINY, "batch_size": 64},
        "frozenlake_vlm": {**_TINY, "freeze_vision": True},
        # returns from -13 to -600: |r| prefers the worst games, an epsilon this large treats all alike; and beside
        # them 0.15 an unreadable reply is nothing, as it is beside Sokoban's 10 for a solved room
        "cliffwalking": {
            **_TINY,
            "epsilon": 1000.0,
            "format_penalty": 5.0,
            "max_tokens": 1024,
            "iterations": 60,
            "eval_every": 15,
            "eval_episodes": 64,
        },
        "sokoban_simple": {**_SOKOBAN, "batch_size": 64},
        # one of two boxes in place is a return of 0: only a large epsilon replays it like a failure, |r| = 1
        "sokoban_hard": {**_SOKOBAN, "epsilon": 1.0, "iterations": 120},
        "sokoban_simple_vlm": {**_SOKOBAN, "freeze_vision": True, "iterations": 140},
        "sokoban_hard_vlm": {**_SOKOBAN, "epsilon": 1.0, "freeze_vision": True, "max_tokens": 1024, "iterations": 30},
        "nq_search": {**_TINY, "batch_size": 64, "rollout_batch_size": 64},
        "gsm8k": {**_TINY, "batch_size": 64},
        "aime": {**_TINY, "batch_size": 64},
        "geoqa": {**_TINY, "freeze_vision": True},
    },
}


def defaults(preset: str, env: str, method: str) -> dict[str, Any]:
    """The settings in which a preset and a method differ from the dataclass."""
    settings = PRESETS[preset].get(env, _TINY if preset == "tiny" else {}) | METHODS[method]
    if settings.get("rollout_gpus") and torch.cuda.device_count() == 1:
        settings["rollout_gpus"] = 0
    return settings


def chosen_preset(env: str, model: str | None, device: str | None) -> tuple[str, str]:
    """What `--preset auto` means here, and why, in a few words. Looks at nothing outside this machine."""
    paper = PRESETS["paper"].get(env)
    if not paper or model == "tiny" or device == "cpu":
        return "tiny", "as --env, --model or --device demand"
    gpus, model = torch.cuda.device_count(), model or paper["model"]
    if not gpus:
        return "tiny", "there is no GPU"
    for package in ("vllm", "deepspeed"):
        if importlib.util.find_spec(package) is None:
            return "tiny", f"{package} is not installed"
    if 1 < gpus < 2 * paper["rollout_gpus"]:
        return "tiny", f"there are {gpus} GPUs, the paper's layout takes {2 * paper['rollout_gpus']}, or a single one"
    if not (Path(model).is_dir() or isinstance(try_to_load_from_cache(model, "config.json"), str)):
        return "tiny", f"{model} is not on this machine"
    return "paper", f"{gpus} GPU{'s' * (gpus > 1)}, vLLM, DeepSpeed and {model} are there"
