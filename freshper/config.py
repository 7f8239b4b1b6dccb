"""Every setting, once: a dataclass whose defaults are the paper's.

Paper: section 4.1 ("Implementation Details") and Tables 2 to 5; appendix F ("Common Settings"). A run's settings come
from the dataclass, then the preset of the task, then the method, then the flags (freshper/flags.py).
"""

import dataclasses
import inspect
import math
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from envs import ENVS
from envs.base import TextEnv
from freshper.auto_tau import AutoTau
from freshper.is_weights import annealed_beta
from freshper.priority import FixedDecay, age_limit, exponential_decay, polynomial_decay


def _flag(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass
class Config:
    """A setting a line: its default, and after it what it means and what in the paper sets it. Each is a flag."""

    # task
    env: str = _flag("frozenlake", "appendix D")
    model: str = _flag(
        "auto",
        "hub id, folder or tiny; auto: the preset's, or the paper's if that and a GPU are here",
    )
    slippery: bool = _flag(
        False, "FrozenLake's ice (appendix D: slippery; docs/differences.md on the image task)"
    )
    max_turns: int = _flag(0, "H, replies per episode; 0: the task's own (Table 2, 'Max Actions')")
    format_penalty: float = _flag(
        0.15, "cost of a reply that cannot be read (paper: 0; authors' code: 0.15)"
    )
    data: str = _flag(
        "",
        "questions: hub id (owner/name:config), json, jsonl, parquet or folder; empty: generated",
    )
    search_url: str = _flag(
        "", "NQ's search server (envs/search_server.py); empty: generated articles, no server"
    )
    # method and replay
    method: Literal["on_policy", "per", "freshper"] = _flag(
        "freshper", "no replay; Standard PER; FreshPER (Table 5)"
    )
    replay_ratio: int = _flag(2, "K, replay updates per iteration (Table 5: 2)")
    batch_size: int = _flag(
        128, "B, episodes per replay update (not in the paper; Table 4's BS/dev x GA is 128)"
    )
    capacity: int = _flag(50_000, "of the buffer, in episodes (Table 5: 50K)")
    eviction: Literal["fifo", "lowest_priority"] = _flag(
        "fifo", "Table 5: FIFO; appendix A.1: lowest priority"
    )
    alpha: float = _flag(0.6, "priority exponent, P(i) ~ p_i^alpha (section 4.1: 0.6)")
    epsilon: float = _flag(
        1e-6, "base priority |r| + epsilon (not in the paper; authors' code: 1e-6)"
    )
    base_priority: Literal["reward", "advantage"] = _flag(
        "reward", "|r_i| or |A_i|, plus epsilon (section 3.4)"
    )
    decay: Literal["exponential", "polynomial", "limit", "none"] = _flag(
        "exponential", "of age (eq. 13)"
    )
    tau: float | Literal["auto"] = _flag(
        500.0, "age decay constant in steps, or auto (section 4.1: 500; AIME 1000)"
    )
    beta: float = _flag(
        0.0, "beta_0 of the IS weights; 0: no correction (Table 5: FreshPER none, Standard PER 0.4)"
    )
    baseline: Literal["batch", "turn", "recompute"] = _flag(
        "batch", "what a return is measured against (ours)"
    )
    # optimization
    iterations: int = _flag(400, "of Algorithm 1 (Table 4: 400; NQ 300; VLM 100)")
    rollout_batch_size: int = _flag(128, "episodes collected per iteration (appendix F: 128)")
    group_size: int = _flag(1, "episodes per environment seed (section 1: 'e.g., 8 per prompt')")
    ppo_epochs: int = _flag(1, "on-policy updates per iteration (Table 3: 1)")
    lr: float = _flag(1e-6, "learning rate of AdamW (Table 4: 1e-6)")
    ratio_clip: float = _flag(0.2, "epsilon of the PPO ratio clip (section 4.1: 0.2)")
    dual_clip: float = _flag(
        0.0, "bound c of rho A if A < 0 (not in the paper; freshper/reinforce.py); 0: off"
    )
    advantage_clip: float = _flag(0.2, "Table 3: Config A 0.2, Default 20")
    kl_loss_coef: float = _flag(0.0, "beta_KL (Table 3: Config A 0, Default 0.05 to 0.1)")
    kl_reward_coef: float = _flag(
        0.0, "KL in the reward (Table 3, 'Init KL coefficient': Config A 0, Default 0.1)"
    )
    entropy_coef: float = _flag(0.0, "lambda_ent (Table 3: Config A 0, Default 0.01)")
    micro_batch_size: int = _flag(
        4, "episodes per forward pass; does not change the gradient (Table 4: 1 to 4)"
    )
    truncated_is: float = _flag(
        0.0, "cap of the token weight pi_trainer / pi_engine (not in the paper); 0: off"
    )
    # sampling
    temperature: float = _flag(0.99, "appendix F: 0.99")
    top_k: int = _flag(100, "appendix F: 100; 0: off")
    top_p: float = _flag(0.99, "appendix F: 0.99; 1: off")
    max_tokens: int = _flag(2048, "of a conversation (Table 2, 'Seq Len': 2048, VLM 4096)")
    max_new_tokens: int = _flag(256, "of a reply (not in the paper)")
    # backends
    backend: Literal["auto", "hf+torch", "hf+deepspeed", "vllm+torch", "vllm+deepspeed"] = _flag(
        "auto", "who generates + who trains; auto: by GPU and packages"
    )
    dtype: Literal["float32", "bfloat16"] = _flag(
        "bfloat16", "of forward and backward passes (appendix F: BF16)"
    )
    zero_stage: Literal[0, 1, 2, 3] = _flag(2, "of DeepSpeed (Table 4: 2; NQ 3)")
    engine_memory: float = _flag(0.5, "share of a GPU's memory that vLLM takes")
    # the run
    preset: Literal["auto", "tiny", "small", "paper"] = _flag(
        "auto", "numbers; auto: as fits the model; small: gsm8k"
    )
    seed: int = _flag(42, "of everything random (appendix F: 42)")
    out: str = _flag(
        "", "folder for all that the run writes; empty: out/<env>-<method>-<seed>, numbered"
    )
    resume: str = _flag(
        "", "folder of an earlier run to go on with; which flags may change: freshper/flags.py"
    )
    save_every: int = _flag(20, "iterations between checkpoints; 0: only the best and the last")
    eval_every: int = _flag(10, "iterations between evaluations on held-out seeds")
    eval_episodes: int = _flag(128, "held-out episodes per evaluation (appendix F: 128)")

    # no settings: the flags that were given, what the run says of its settings, the checkpoint that it goes on from
    # (freshper/checkpoint.py), the rows of --data as `backends.load` has divided them, and what follows from them
    given, notes, saved, rows = (
        tuple[str, ...](),
        tuple[str, ...](),
        tuple[Any, ...](),
        dict[str, list](),
    )
    tiny = property(
        lambda self: self.preset == "tiny"
    )  # the model is one that freshper/tiny.py builds
    engine = property(lambda self: self.backend.partition("+")[0])  # who generates: hf or vllm
    trainer = property(
        lambda self: self.backend.partition("+")[2]
    )  # who trains: torch or deepspeed

    @property
    def device(self) -> str:
        """Return cuda if torch finds a GPU and the model is not tiny, else cpu."""
        import torch

        return "cuda" if torch.cuda.is_available() and not self.tiny else "cpu"

    def folder(self) -> Path:
        """Return --resume, --out, or the first out/<env>-<method>-<seed>[-n] that does not exist."""
        name = f"out/{self.env}-{self.method}-{self.seed}"
        paths = (Path(f"{name}-{n}" if n > 1 else name) for n in count(1))
        return Path(self.resume or self.out or next(path for path in paths if not path.exists()))

    def task(self) -> str:
        """Return the task as plots name it, with whose questions it asks and whether the ice is slippery."""
        ice = "slippery" if self.slippery else "not slippery"
        said = {
            "data": self.data or "generated questions",
            "slippery": ice,
            "longest": "solutions of at most 5 turns",
        }
        if self.tiny:
            said |= {
                "search_url": "one passage per search",
                "along_the_way": "training starts along the way",
            }
        return " ".join(
            [self.env, *(f"({said[name]})" for name in said if name in self.env_settings())]
        )

    def title(self) -> str:
        """Return the title of the run's plots and pages."""
        return f"{self.task()}, {self.method}, preset {self.preset}, seed {self.seed}"

    def env_settings(self) -> dict[str, Any]:
        """Return what the environment takes of the settings. Prompts and images of a tiny model are terse and small."""
        easy = {"style": "terse", "longest": 5, "along_the_way": True}
        known = vars(self) | (easy if self.tiny else {"style": "full"})
        own, common = (
            inspect.signature(ENVS[self.env]).parameters,
            inspect.signature(TextEnv).parameters,
        )
        taken = own | common if any(p.kind == p.VAR_KEYWORD for p in own.values()) else own
        return {name: known[name] for name in taken if name in known}

    def make_env(self) -> TextEnv:
        """Make the environment of --env. After `backends.load`, it asks only questions that fit."""
        env = ENVS[self.env](**self.env_settings())
        env.rows = self.rows or env.rows
        return env

    def decay_function(self) -> FixedDecay | AutoTau:
        """Return the decay of age, which gives factors in [0, 1]; 1 everywhere for Standard PER."""
        if self.decay == "none":
            return FixedDecay(exponential_decay, tau=math.inf)
        if self.decay == "polynomial":
            return FixedDecay(polynomial_decay, tau=self.tau, power=1.0)
        if self.decay == "limit":
            return FixedDecay(age_limit, tau=self.tau)
        if self.tau == "auto":
            return AutoTau(self.alpha, self.replay_ratio + self.ppo_epochs)
        return FixedDecay(exponential_decay, tau=self.tau)

    def beta_at(self, iteration: int) -> float:
        """Return beta of the IS weights, which reaches 1 in the last iteration; --beta 0 stays 0: no correction."""
        return (
            annealed_beta(self.beta, iteration / max(1, self.iterations - 1)) if self.beta else 0.0
        )
