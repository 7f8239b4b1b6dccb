"""The settings of methods and presets: the paper's tables, and numbers for tiny and small models.

Paper: Table 5 (the methods), Tables 2 to 4 (the paper preset; a test compares it with the tables,
but for what docs/differences.md lists). If the paper names no dataset or reply limit, the choice is
ours. NQ Search asks generated questions, unless --data and --search_url are given. The tiny preset
was tuned on FrozenLake (docs/log.md). What a table does not name keeps its default in
freshper/config.py.
"""

from typing import Any

# Table 5. Standard PER and FreshPER differ in nothing but what their rows say.
METHODS: dict[str, dict[str, Any]] = {
    "on_policy": {"replay_ratio": 0},
    "per": {"decay": "none", "beta": 0.4},
    "freshper": {},
}

# Table 3, where the kl_loss_coef of Default is a range, 0.05 to 0.1
CONFIG_A = {
    "advantage_clip": 0.2,
    "kl_loss_coef": 0.0,
    "kl_reward_coef": 0.0,
    "entropy_coef": 0.0,
}
CONFIG_DEFAULT = {
    "advantage_clip": 20.0,
    "kl_loss_coef": 0.05,
    "kl_reward_coef": 0.1,
    "entropy_coef": 0.01,
}

# Tables 2 and 4: what the two tasks with images share
QWEN_VL_3B = {
    **CONFIG_DEFAULT,
    "model": "Qwen/Qwen2.5-VL-3B-Instruct",
    "iterations": 100,
    "max_tokens": 4096,
    "micro_batch_size": 1,
}
QWEN_0_5B = {**CONFIG_A, "model": "Qwen/Qwen2.5-0.5B-Instruct"}

PAPER = {
    "frozenlake": {**QWEN_0_5B, "slippery": True},
    "frozenlake_vlm": QWEN_VL_3B,
    "sokoban_simple": QWEN_0_5B,
    "sokoban_hard": QWEN_0_5B,
    "cliffwalking": {**QWEN_0_5B, "max_turns": 200},
    "nq_search": {
        **CONFIG_DEFAULT,
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "iterations": 300,
        "max_tokens": 12800,
        "max_new_tokens": 500,
        "micro_batch_size": 1,
        "zero_stage": 3,
    },
    "gsm8k": {
        **QWEN_0_5B,
        "data": "openai/gsm8k:main",
        "max_tokens": 4096,
        "max_new_tokens": 512,
    },
    "aime": {
        **CONFIG_A,
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "data": "AI-MO/aimo-validation-aime",
        "max_tokens": 4096,
        "max_new_tokens": 1024,
        "micro_batch_size": 2,
        "tau": 1000.0,
    },
    "geoqa": {
        **QWEN_VL_3B,
        "data": "leonardPKU/GEOQA_R1V_Train_8K",
        "max_new_tokens": 512,
    },
}

# All tasks share these in the tiny and the small preset. Their own tables say what differs.
TINY_MODEL = {
    "model": "tiny",
    "dtype": "float32",
    "max_tokens": 512,
    "max_new_tokens": 6,
    "iterations": 200,
    "rollout_batch_size": 32,
    "batch_size": 32,
    "micro_batch_size": 16,
    "lr": 1e-3,
    "advantage_clip": 20.0,
    "dual_clip": 3.0,
    "baseline": "turn",
    "capacity": 10_000,
    "epsilon": 0.1,
    "tau": 20.0,
    "eval_every": 20,
    "eval_episodes": 256,
}

TINY: dict[str, dict[str, Any]] = {
    "frozenlake": {
        "iterations": 360,
        # near the warm start, the random policy, no direction is given up before detours are found
        "kl_loss_coef": 0.03,
    },
    "frozenlake_vlm": {
        "iterations": 240,
        "kl_loss_coef": 0.03,
    },
    "sokoban_simple": {
        "max_tokens": 768,
        # A penalty of 0.15 would be nothing beside the 10 for a solved room.
        "format_penalty": 1.5,
        "batch_size": 64,
    },
    "sokoban_hard": {
        "max_tokens": 768,
        "format_penalty": 1.5,
        # one of two boxes in place is a return of 0, which only a large epsilon replays as often as
        # a failure, |r| = 1
        "epsilon": 1.0,
    },
    "cliffwalking": {
        "max_turns": 30,
        "max_tokens": 1024,
        # With a penalty of 5 an unreadable reply would be a cheap way to avoid a fall (-100).
        "format_penalty": 30.0,
        "iterations": 250,
        "rollout_batch_size": 64,
        "lr": 7e-4,
        "advantage_clip": 2.0,
        "kl_loss_coef": 0.03,
        # |r| alone would prefer the worst episodes
        "epsilon": 1000.0,
        "eval_episodes": 64,
    },
    "nq_search": {
        "iterations": 400,
        "rollout_batch_size": 64,
        "batch_size": 64,
        "lr": 5e-4,
        # Without it the policy soon guesses one kind of question for good, and never learns to
        # search for it.
        "kl_loss_coef": 0.1,
    },
    "gsm8k": {
        "iterations": 600,
        "batch_size": 64,
        "eval_every": 40,
    },
    "aime": {
        "iterations": 300,
        "batch_size": 64,
        "eval_every": 30,
    },
    "geoqa": {
        "iterations": 800,
        "eval_every": 40,
    },
}

SMALL: dict[str, dict[str, Any]] = {
    # a pretrained model of 0.1 B parameters on one CPU core; the search is in docs/log.md
    "gsm8k": {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "dtype": "bfloat16",
        "max_turns": 1,
        "max_new_tokens": 24,
        # At 0.99 fewer of the first replies are right.
        "temperature": 0.8,
        "iterations": 20,
        "lr": 3e-5,
        "capacity": 1000,
        "eval_every": 4,
        "eval_episodes": 64,
    },
}

PRESETS = {"paper": PAPER, "tiny": TINY, "small": SMALL}


def defaults(preset: str, env: str, method: str) -> dict[str, Any]:
    """Return the settings in which preset and method differ from the dataclass. A task that is not
    in the paper has no table of its own."""
    shared = {} if preset == "paper" else TINY_MODEL
    return shared | PRESETS[preset].get(env, {}) | METHODS[method]
