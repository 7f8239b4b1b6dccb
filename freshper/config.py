"""Every setting of a run, and the paper's tables as data.

Paper: section 4.1 ("Implementation Details"), Tables 2 to 5, appendix F ("Common Settings").

The defaults of `Config` are the paper's numbers where it gives one, except for model, backend, ice
and format penalty. A preset replaces them by the numbers of its task, the method by those of
Table 5 (freshper/tables.toml), and flags by their own (freshper/flags.py):

    tiny     a model of 0.1 to 0.3 M parameters that freshper/tiny.py builds, on a laptop
    small    a pretrained model of up to 1 B on one machine, for any task
    paper    the paper's models on vLLM and DeepSpeed
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from freshper.is_weights import annealed_beta

Preset = Literal["tiny", "small", "paper"]
Method = Literal["on_policy", "per", "freshper"]
Decay = Literal["exponential", "polynomial", "limit", "none"]
Backend = Literal["hf+torch", "hf+deepspeed", "vllm+torch", "vllm+deepspeed"]


@dataclass(frozen=True)
class Config:
    """Hold every setting. Each is a flag, and the text below it is that of --help."""

    # task
    env: str = "frozenlake"
    """task (appendix D)"""
    preset: Preset = "tiny"
    """model, numbers and backend to start from"""
    model: str = "tiny"
    """tiny, the hub id of a chat model, or a folder"""
    slippery: bool = False
    """FrozenLake's ice (appendix D: slippery; docs/differences.md)"""
    max_turns: int = 0
    """H, replies per episode; 0: the task's own (Table 2)"""
    format_penalty: float = 0.15
    """cost of an unreadable reply (paper: 0; their code: 0.15)"""
    data: str = ""
    """questions: hub id (owner/name:config), file or folder; empty: generated ones"""
    search_url: str = ""
    """NQ's search server (examples/search_server.py); empty: generated texts"""

    # method and replay
    method: Method = "freshper"
    """arm of Table 5: no replay, Standard PER, FreshPER"""
    replay_ratio: int = 2
    """K, replay updates per iteration (Table 5: 2)"""
    batch_size: int = 128
    """B, episodes per replay update (ours: BS/dev x GA of Table 4, 0.5B)"""
    capacity: int = 50_000
    """size of the buffer, in episodes (Table 5: 50K)"""
    eviction: Literal["fifo", "lowest_priority"] = "fifo"
    """which episode leaves a full buffer (Table 5: FIFO; A.1: lowest priority)"""
    alpha: float = 0.6
    """priority exponent, P(i) ~ p_i^alpha (section 4.1: 0.6)"""
    epsilon: float = 1e-6
    """constant of the base priority |r| + epsilon (not in paper; authors' code: 1e-6)"""
    base_priority: Literal["reward", "advantage"] = "reward"
    """signal whose size is the base priority: r_i or A_i (section 3.4)"""
    decay: Decay = "exponential"
    """form of the age factor (eq. 13)"""
    tau: float = 500.0
    """age decay constant in steps (section 4.1: 500; AIME 1000)"""
    beta: float = 0.0
    """beta_0 of IS weights; 0: off (Table 5: FreshPER none, PER 0.4)"""
    baseline: Literal["batch", "turn", "recompute"] = "batch"
    """mean and std against which returns are measured (ours)"""

    # optimization
    iterations: int = 400
    """iterations of Algorithm 1 (Table 4: 400; NQ 300; VLM 100)"""
    rollout_batch_size: int = 128
    """episodes collected per iteration (appendix F: 128)"""
    ppo_epochs: int = 1
    """on-policy updates per iteration (Table 3: 1)"""
    lr: float = 1e-6
    """learning rate of AdamW (Table 4: 1e-6)"""
    dual_clip: float = 0.0
    """bound c of rho A if A < 0 (not in the paper); 0: off"""
    advantage_clip: float = 0.2
    """bound of |A_t| (Table 3: Config A 0.2, Default 20)"""
    kl_loss_coef: float = 0.0
    """beta_KL, weight of KL in the loss (Table 3: Config A 0, Default 0.05 to 0.1)"""
    kl_reward_coef: float = 0.0
    """weight of KL in the reward (Table 3, 'Init KL': Config A 0, Default 0.1)"""
    entropy_coef: float = 0.0
    """lambda_ent, weight of the entropy (Table 3: Config A 0, Default 0.01)"""
    micro_batch_size: int = 4
    """episodes per forward pass, not of the gradient (Table 4: 1 to 4)"""

    # sampling
    temperature: float = 0.99
    """sampling temperature (appendix F: 0.99; top-k and top-p: freshper/engine_hf.py)"""
    max_tokens: int = 2048
    """longest conversation (Table 2, 'Seq Len': 2048 to 12800)"""
    max_new_tokens: int = 256
    """longest reply (not in the paper)"""

    # backends
    backend: Backend = "hf+torch"
    """engine that generates + trainer"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """precision of all passes (appendix F: BF16; without it in the CPU, float32 is faster)"""
    zero_stage: Literal[1, 2, 3] = 2
    """ZeRO stage of DeepSpeed (Table 4: 2; NQ 3)"""

    # the run
    seed: int = 42
    """seed of everything random (appendix F: 42)"""
    out: str = ""
    """folder of all it writes; empty: out/<env>-<method>-<seed>, numbered"""
    resume: str = ""
    """folder of a run to go on with; freshper/flags.py: what may change"""
    save_every: int = 20
    """iterations between checkpoints; 0: only the last"""
    eval_every: int = 10
    """iterations between evaluations on held-out seeds"""
    eval_episodes: int = 128
    """held-out episodes per evaluation (appendix F: 128)"""

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

    def is_due(self, every: int, iteration: int) -> bool:
        """Return whether something that happens every so many iterations, and after the last one,
        is due. 0: only then."""
        return iteration == self.iterations or (every > 0 and iteration % every == 0)

    def beta_at(self, iteration: int) -> float:
        """Return beta of the IS weights: beta_0 in iteration 1, 1 in the last one. --beta 0 stays
        0: no correction."""
        if not self.beta:
            return 0.0
        return annealed_beta(self.beta, (iteration - 1) / max(1, self.iterations - 1))


TABLES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
)


def defaults(config: Config) -> dict[str, Any]:
    """Return the settings in which preset and method differ from the dataclass."""
    tables = TABLES[config.preset]
    return tables["shared"] | tables.get(config.env, {}) | TABLES["method"][config.method]
