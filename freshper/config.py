"""Every setting of a run, and the paper's tables as data.

Paper: section 4.1 ("Implementation Details"), Tables 2 to 5, appendix F ("Common Settings").

The defaults of `Config` are the paper's. A preset replaces them by the numbers of its task
(PRESETS), the method by those of Table 5 (METHODS), and flags by their own (freshper/flags.py):

    tiny     a model of 0.1 to 0.3 M parameters that freshper/tiny.py builds, on a laptop
    small    a pretrained model of up to 1 B on one machine: numbers for any task, and for gsm8k
    paper    the paper's models on vLLM and DeepSpeed
"""

from dataclasses import dataclass
from typing import Any, Literal

from freshper.is_weights import annealed_beta

Preset = Literal["tiny", "small", "paper"]
Method = Literal["on_policy", "per", "freshper"]
Decay = Literal["exponential", "polynomial", "limit", "none"]
Backend = Literal["hf+torch", "hf+deepspeed", "vllm+torch", "vllm+deepspeed"]


@dataclass(frozen=True)
class Config:
    """Hold every setting. Each is a flag, whose text in --help is the comment behind it."""

    # task
    env: str = "frozenlake"  # task (appendix D)
    preset: Preset = "tiny"  # which model, numbers and backend
    model: str = "tiny"  # tiny, the hub id of a chat model, or a folder
    slippery: bool = False  # FrozenLake's ice (appendix D: slippery; docs/differences.md)
    max_turns: int = 0  # H, replies per episode; 0: the task's own (Table 2)
    format_penalty: float = 0.15  # cost of an unreadable reply (paper: 0; their code: 0.15)
    data: str = ""  # questions: hub id (owner/name:config), file or folder; empty: generated ones
    search_url: str = ""  # NQ's search server (envs/search_server.py); empty: generated texts

    # method and replay
    method: Method = "freshper"  # no replay; Standard PER; FreshPER (Table 5)
    replay_ratio: int = 2  # K, replay updates per iteration (Table 5: 2)
    batch_size: int = 128  # B, episodes per replay update (ours: BS/dev x GA of Table 4, 0.5B)
    capacity: int = 50_000  # of the buffer, in episodes (Table 5: 50K)
    eviction: Literal["fifo", "lowest_priority"] = "fifo"  # Table 5: FIFO; A.1: lowest priority
    alpha: float = 0.6  # priority exponent, P(i) ~ p_i^alpha (section 4.1: 0.6)
    epsilon: float = 1e-6  # base priority |r| + epsilon (not in paper; authors' code: 1e-6)
    base_priority: Literal["reward", "advantage"] = "reward"  # of |r_i| or |A_i| (section 3.4)
    decay: Decay = "exponential"  # of age (eq. 13)
    tau: float = 500.0  # age decay constant in steps (section 4.1: 500; AIME 1000)
    beta: float = 0.0  # beta_0 of IS weights; 0: off (Table 5: FreshPER none, PER 0.4)
    baseline: Literal["batch", "turn", "recompute"] = "batch"  # measure of returns (ours)

    # optimization
    iterations: int = 400  # of Algorithm 1 (Table 4: 400; NQ 300; VLM 100)
    rollout_batch_size: int = 128  # episodes collected per iteration (appendix F: 128)
    ppo_epochs: int = 1  # on-policy updates per iteration (Table 3: 1)
    lr: float = 1e-6  # learning rate of AdamW (Table 4: 1e-6)
    dual_clip: float = 0.0  # bound c of rho A if A < 0 (not in the paper); 0: off
    advantage_clip: float = 0.2  # Table 3: Config A 0.2, Default 20
    kl_loss_coef: float = 0.0  # beta_KL (Table 3: Config A 0, Default 0.05 to 0.1)
    kl_reward_coef: float = 0.0  # of KL in the reward (Table 3, 'Init KL': Config A 0, Default 0.1)
    entropy_coef: float = 0.0  # lambda_ent (Table 3: Config A 0, Default 0.01)
    micro_batch_size: int = 4  # episodes per forward pass, not of the gradient (Table 4: 1 to 4)

    # sampling
    temperature: float = 0.99  # appendix F: 0.99; its top-k and top-p: freshper/engine_hf.py
    max_tokens: int = 2048  # of a conversation (Table 2, 'Seq Len': 2048 to 12800)
    max_new_tokens: int = 256  # of a reply (not in the paper)

    # backends
    backend: Backend = "hf+torch"  # who generates + who trains
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of all passes (appendix F: BF16)
    zero_stage: Literal[1, 2, 3] = 2  # of DeepSpeed (Table 4: 2; NQ 3)
    engine_memory: float = 0.5  # share of a GPU's memory that vLLM takes

    # the run
    seed: int = 42  # of everything random (appendix F: 42)
    out: str = ""  # folder of all it writes; empty: out/<env>-<method>-<seed>, numbered
    resume: str = ""  # folder of a run to go on with; freshper/flags.py: what may change
    save_every: int = 20  # iterations between checkpoints; 0: only the last
    eval_every: int = 10  # iterations between evaluations on held-out seeds
    eval_episodes: int = 128  # held-out episodes per evaluation (appendix F: 128)

    @property
    def updates_per_iteration(self) -> int:
        """Return the optimizer steps of an iteration."""
        return self.ppo_epochs + self.replay_ratio

    @property
    def engine(self) -> str:
        """Who generates: hf or vllm."""
        return self.backend.partition("+")[0]

    @property
    def trainer(self) -> str:
        """Who trains: torch or deepspeed."""
        return self.backend.partition("+")[2]

    @property
    def device(self) -> str:
        """Return cuda if torch finds a GPU and the model is not tiny, else cpu."""
        # --help must answer before torch is imported
        import torch

        return "cuda" if torch.cuda.is_available() and self.preset != "tiny" else "cpu"

    def beta_at(self, iteration: int) -> float:
        """Return beta of the IS weights, which reaches 1 in the last iteration. --beta 0 stays 0:
        no correction."""
        if self.beta == 0.0:
            return 0.0
        return annealed_beta(self.beta, iteration / max(1, self.iterations - 1))


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

# Tables 2 to 4. Datasets and reply limits are ours where the paper names none
# (docs/differences.md). NQ Search asks generated questions, unless --data and --search_url are
# given.
PAPER_SHARED = {"backend": "vllm+deepspeed"}
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

# Tuned on FrozenLake (docs/log.md)
TINY_SHARED = {
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

# Found with SmolLM2-135M on GSM8K (docs/log.md)
SMALL_SHARED = {
    **TINY_SHARED,
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "dtype": "bfloat16",
    "max_tokens": 2048,
    "max_new_tokens": 64,
    "micro_batch_size": 4,
    # At 0.99 fewer of the first replies are right.
    "temperature": 0.8,
    "iterations": 100,
    "lr": 3e-5,
    "capacity": 1000,
    "eval_every": 4,
    "eval_episodes": 64,
}
SMALL: dict[str, dict[str, Any]] = {
    # its generated questions have 20 words, on one CPU core
    "gsm8k": {
        "max_turns": 1,
        "max_tokens": 512,
        "max_new_tokens": 24,
        "micro_batch_size": 16,
        "iterations": 20,
    },
}

# Of each preset: what all tasks share, and what differs by task
PRESETS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "tiny": (TINY_SHARED, TINY),
    "small": (SMALL_SHARED, SMALL),
    "paper": (PAPER_SHARED, PAPER),
}


def defaults(preset: str, env: str, method: str) -> dict[str, Any]:
    """Return the settings in which preset and method differ from the dataclass."""
    shared, of_task = PRESETS[preset]
    return shared | of_task.get(env, {}) | METHODS[method]
