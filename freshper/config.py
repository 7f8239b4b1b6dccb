"""Every setting of a run, with the paper's value as its default where it has one.

Paper: section 4.1 ("Implementation Details") and Tables 2 to 5; appendix F ("Common Settings"). The
settings of a run come from this dataclass, then from the preset of its task, then from its method
(both in freshper/presets.py), then from the flags (freshper/flags.py).
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envs import ENVS
from envs.base import TextEnv
from freshper.auto_tau import AutoTau
from freshper.is_weights import annealed_beta
from freshper.priority import FixedDecay, age_limit, exponential_decay, polynomial_decay

Method = Literal["on_policy", "per", "freshper"]
Eviction = Literal["fifo", "lowest_priority"]
BasePriority = Literal["reward", "advantage"]
Decay = Literal["exponential", "polynomial", "limit", "none"]
Tau = float | Literal["auto"]
BaselineKind = Literal["batch", "turn", "recompute"]
Backend = Literal["auto", "hf+torch", "hf+deepspeed", "vllm+torch", "vllm+deepspeed"]
Preset = Literal["auto", "tiny", "small", "paper"]


def flag(default: Any, text: str) -> Any:
    """Return a field of `Config` with its default and its text for --help."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """Hold every setting: its default, its meaning, what in the paper sets it. Each is a flag."""

    # task
    env: str = flag("frozenlake", "task (appendix D)")
    model: str = flag(
        "auto",
        "hub id, folder or tiny; auto: the preset's, or the paper's if that and a GPU are here",
    )
    slippery: bool = flag(False, "FrozenLake's ice (appendix D: slippery; README.md says where)")
    max_turns: int = flag(
        0,
        "H, replies per episode; 0: the task's (Table 2's, CliffWalking 50; its paper preset: 200)",
    )
    format_penalty: float = flag(0.15, "cost of an unreadable reply (paper: 0; their code: 0.15)")
    data: str = flag(
        "",
        "questions: hub id (owner/name:config), json, jsonl, parquet or folder; empty: generated",
    )
    search_url: str = flag(
        "", "NQ's search server (envs/search_server.py); empty: generated articles, no server"
    )

    # method and replay
    method: Method = flag("freshper", "no replay; Standard PER; FreshPER (Table 5)")
    replay_ratio: int = flag(2, "K, replay updates per iteration (Table 5: 2)")
    batch_size: int = flag(
        128, "B, episodes per replay update (not in the paper; 128: Table 4's BS/dev x GA, 0.5B)"
    )
    capacity: int = flag(50_000, "of the buffer, in episodes (Table 5: 50K)")
    eviction: Eviction = flag("fifo", "Table 5: FIFO; appendix A.1: lowest priority")
    alpha: float = flag(0.6, "priority exponent, P(i) ~ p_i^alpha (section 4.1: 0.6)")
    epsilon: float = flag(1e-6, "base priority |r| + epsilon (not in paper; authors' code: 1e-6)")
    base_priority: BasePriority = flag("reward", "|r_i| or |A_i|, plus epsilon (section 3.4)")
    decay: Decay = flag("exponential", "of age (eq. 13)")
    tau: Tau = flag(500.0, "age decay constant in steps, or auto (section 4.1: 500; AIME 1000)")
    beta: float = flag(0.0, "beta_0 of IS weights; 0: off (Table 5: FreshPER none, PER 0.4)")
    baseline: BaselineKind = flag("batch", "what a return is measured against (ours)")

    # optimization
    iterations: int = flag(400, "of Algorithm 1 (Table 4: 400; NQ 300; VLM 100)")
    rollout_batch_size: int = flag(128, "episodes collected per iteration (appendix F: 128)")
    group_size: int = flag(1, "episodes per environment seed (section 1: 'e.g., 8 per prompt')")
    ppo_epochs: int = flag(1, "on-policy updates per iteration (Table 3: 1)")
    lr: float = flag(1e-6, "learning rate of AdamW (Table 4: 1e-6)")
    ratio_clip: float = flag(0.2, "epsilon of the PPO ratio clip (section 4.1: 0.2)")
    dual_clip: float = flag(0.0, "bound c of rho A if A < 0 (not in the paper); 0: off")
    advantage_clip: float = flag(0.2, "Table 3: Config A 0.2, Default 20")
    kl_loss_coef: float = flag(0.0, "beta_KL (Table 3: Config A 0, Default 0.05 to 0.1)")
    kl_reward_coef: float = flag(
        0.0, "KL in the reward (Table 3, 'Init KL coefficient': Config A 0, Default 0.1)"
    )
    entropy_coef: float = flag(0.0, "lambda_ent (Table 3: Config A 0, Default 0.01)")
    micro_batch_size: int = flag(
        4, "episodes per forward pass; does not change the gradient (Table 4: 1 to 4)"
    )
    truncated_is: float = flag(0.0, "cap of token weights pi_trainer / pi_engine (ours); 0: off")

    # sampling
    temperature: float = flag(0.99, "appendix F: 0.99")
    top_k: int = flag(100, "appendix F: 100; 0: off")
    top_p: float = flag(0.99, "appendix F: 0.99; 1: off")
    max_tokens: int = flag(2048, "of a conversation (Table 2, 'Seq Len': 2048 to 12800)")
    max_new_tokens: int = flag(256, "of a reply (not in the paper)")

    # backends
    backend: Backend = flag("auto", "who generates + who trains; auto: by GPU and packages")
    dtype: Literal["float32", "bfloat16"] = flag("bfloat16", "of all passes (appendix F: BF16)")
    zero_stage: Literal[0, 1, 2, 3] = flag(2, "of DeepSpeed (Table 4: 2; NQ 3)")
    engine_memory: float = flag(0.5, "share of a GPU's memory that vLLM takes")

    # the run
    preset: Preset = flag("auto", "numbers; auto: as fits the model; small: gsm8k")
    seed: int = flag(42, "of everything random (appendix F: 42)")
    out: str = flag("", "folder of all it writes; empty: out/<env>-<method>-<seed>, numbered")
    resume: str = flag("", "folder of a run to go on with; freshper/flags.py: what may change")
    save_every: int = flag(20, "iterations between checkpoints; 0: only the best and the last")
    eval_every: int = flag(10, "iterations between evaluations on held-out seeds")
    eval_episodes: int = flag(128, "held-out episodes per evaluation (appendix F: 128)")

    @property
    def updates_per_iteration(self) -> int:
        """Return the optimizer steps of an iteration."""
        return self.ppo_epochs + self.replay_ratio

    @property
    def tiny(self) -> bool:
        """Whether the model is one that freshper/tiny.py builds."""
        return self.preset == "tiny"

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

        return "cuda" if torch.cuda.is_available() and not self.tiny else "cpu"

    def folder(self) -> Path:
        """Return --resume, --out, or the first out/<env>-<method>-<seed>[-n] that is new."""
        folder = self.resume or self.out
        if folder:
            return Path(folder)

        name = f"out/{self.env}-{self.method}-{self.seed}"
        path, number = Path(name), 1
        while path.exists():
            number += 1
            path = Path(f"{name}-{number}")
        return path

    def task(self) -> str:
        """Return the task as plots name it, with whose questions it asks and if the ice slips."""
        notes = {
            "data": self.data or "generated questions",
            "slippery": "slippery" if self.slippery else "not slippery",
            "longest": "solutions of at most 5 turns",
            "along_the_way": "training starts along the way",
        }
        if self.tiny:
            notes["search_url"] = "one passage per search"
        settings = self.env_settings()
        return " ".join([self.env, *(f"({notes[name]})" for name in notes if name in settings)])

    def title(self) -> str:
        """Return the title of the run's plots and pages."""
        return f"{self.task()}, {self.method}, preset {self.preset}, seed {self.seed}"

    def env_settings(self) -> dict[str, Any]:
        """Return the arguments of the environment: those that all tasks take, and those that the
        class of --env lists in `settings`. Prompts and images of a tiny model are terse and small,
        and some of its tasks are easier."""
        values = vars(self) | {"style": "full"}
        if self.tiny:
            values |= {"style": "terse", "longest": 5, "along_the_way": True}

        names = ("style", "format_penalty", "max_turns", *ENVS[self.env]().settings)
        return {name: values[name] for name in names if name in values}

    def make_env(self) -> TextEnv:
        """Make the environment of --env."""
        return ENVS[self.env](**self.env_settings())

    def decay_function(self) -> FixedDecay | AutoTau:
        """Return the decay of age, which gives factors in [0, 1]; 1 everywhere for Standard PER."""
        if self.decay == "none":
            return FixedDecay(exponential_decay, tau=math.inf)
        if self.decay == "polynomial":
            return FixedDecay(polynomial_decay, tau=self.tau, power=1.0)
        if self.decay == "limit":
            return FixedDecay(age_limit, tau=self.tau)
        if self.tau == "auto":
            return AutoTau(self.alpha, self.updates_per_iteration)
        return FixedDecay(exponential_decay, tau=self.tau)

    def beta_at(self, iteration: int) -> float:
        """Return beta of the IS weights, which reaches 1 in the last iteration. --beta 0 stays 0:
        no correction."""
        if self.beta == 0.0:
            return 0.0
        return annealed_beta(self.beta, iteration / max(1, self.iterations - 1))
