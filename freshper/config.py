"""Every setting, once: a dataclass whose defaults are the paper's, and the command line (presets: freshper/presets.py).

Paper: section 4.1 ("Implementation Details"), Tables env_details, config_comparison, training_config and
replay_config, "Common Settings" in appendix F. The README lists what the paper leaves open.

A run's settings come from the dataclass, then the method, then the preset of the environment, then the flags.
"""

import argparse
import dataclasses
import inspect
import math
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from transformers import HfArgumentParser

from envs import ENVS
from envs.base import TextEnv
from freshper.auto_tau import AutoTau
from freshper.earlier_run import check_overrides, earlier_run
from freshper.presets import chosen_preset, defaults
from freshper.priority import age_limit, exponential_decay, polynomial_decay


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text.replace("%", "%%")})


@dataclass
class Config:
    """A setting a line: its default, and after it what it means and where the paper sets it. Each is a flag."""

    env: str = _flag("frozenlake", f"the task: {', '.join(ENVS)} (appendix D)")
    method: Literal["on_policy", "per", "freshper"] = _flag(
        "freshper",
        "no replay; Standard PER, without decay and with IS; FreshPER, with decay and without IS (Table replay_config)",
    )
    preset: Literal["auto", "tiny", "paper"] = _flag(
        "auto", "tiny: a model built here, minutes on a CPU; paper: the paper's tables; auto: paper where it can run"
    )
    model: str = _flag("tiny", "a hub id, a folder, or 'tiny' (Table env_details: Qwen2.5)")
    seed: int = _flag(42, "of everything random (appendix F: 42)")
    out: str = _flag("", "folder for all that the run writes; empty: out/<env>-<method>-<seed>, numbered")

    resume: str = _flag(
        "", "folder of an earlier run to go on with, from its newest whole checkpoint and with its settings"
    )
    override: list[str] = field(
        default_factory=list, metadata={"help": "with --resume: names of flags that may differ from the earlier run's"}
    )
    save_every: int = _flag(
        20, "iterations between checkpoints; 0: none. One is always saved at a new best evaluation and at the end"
    )
    save_minutes: float = _flag(30.0, "after so many minutes there is a checkpoint in any case; 0: no")
    keep_checkpoints: int = _flag(2, "newest checkpoints to keep; the best one by held-out success stays too")

    iterations: int = _flag(400, "outer loop of Algorithm 1 (Table training_config: 400; NQ 300; VLM 100)")
    rollout_batch_size: int = _flag(128, "episodes collected an iteration (appendix F: 128)")
    group_size: int = _flag(
        1, "episodes of the same seed, of those collected an iteration (section 1: 'e.g., 8 per prompt'); GRPO's groups"
    )
    batch_size: int = _flag(
        128,
        "B, episodes drawn for a replay update (eq. weighted_loss; not given in the paper, whose BS/dev x GA is 128 "
        "for the 0.5B models)",
    )
    replay_ratio: int = _flag(2, "K, replay updates an iteration (Table replay_config: 2); 0: none")
    ppo_epochs: int = _flag(
        1, "on-policy updates an iteration, each on all fresh episodes (Table config_comparison: 1)"
    )

    capacity: int = _flag(50_000, "of the buffer, in episodes (Table replay_config: 50K)")
    eviction: Literal["fifo", "lowest_priority"] = _flag(
        "fifo", "Table replay_config: FIFO; appendix A.1: lowest effective priority"
    )
    alpha: float = _flag(0.6, "priority exponent, P(i) ~ p_i^alpha (section 4.1: 0.6)")
    epsilon: float = _flag(1e-6, "p_base = |r| + epsilon (not given in the paper; authors' code: 1e-6)")
    decay: Literal["exponential", "polynomial", "limit", "draws", "auto", "none"] = _flag(
        "exponential",
        "form of the age decay (eq. age_decay); limit: none up to age tau, gone beyond; draws: exponential in how "
        "often an episode was drawn (FPER, section 2); auto, or --tau auto: exponential, tau estimated on the way",
    )
    tau: float = _flag(
        500.0, "age decay constant in units of age (section 4.1: 500; AIME 1000; ablation 500, 1000, 1500), or auto"
    )
    age_unit: Literal["step", "iteration"] = _flag(
        "step", "of age: optimizer steps (section 3.4), or iterations (authors' code)"
    )
    is_correction: bool = _flag(
        False, "IS weights on replay updates (Table replay_config: FreshPER no, Standard PER yes)"
    )
    beta: float = _flag(0.4, "beta_0 of the IS weights, annealed to 1 (section 4.1: 0.4)")
    replay_advantage: Literal["running", "recompute", "stored"] = _flag(
        "running", "what a replayed return is measured against (not given in the paper; see freshper/reinforce.py)"
    )
    baseline_window: int = _flag(256, "episodes behind the running mean of `replay_advantage running` (ours)")

    lr: float = _flag(1e-6, "learning rate of AdamW (Table training_config: 1e-6)")
    warmup_steps: int = _flag(10, "of the cosine schedule (appendix F: 10)")
    max_grad_norm: float = _flag(1.0, "gradient clipping (Table config_comparison: 1.0)")
    ratio_clip: float = _flag(0.2, "epsilon of the PPO ratio clip (section 4.1: 0.2)")
    dual_clip: float = _flag(
        0.0, "bound c of rho A where A < 0 (Ye et al. 2020; not in the paper, see freshper/reinforce.py); 0: none"
    )
    advantage_clip: float = _flag(0.2, "Table config_comparison: Config A 0.2, Default 20")
    kl_loss_coef: float = _flag(0.0, "beta_KL (Table config_comparison: Config A 0, Default 0.05 to 0.1)")
    kl_reward_coef: float = _flag(
        0.0, "KL in the reward (Table config_comparison, 'Init KL coefficient': Config A 0, Default 0.1)"
    )
    entropy_coef: float = _flag(0.0, "lambda_ent (Table config_comparison: Config A 0, Default 0.01)")
    loss_aggregation: Literal["token_mean", "token_sum"] = _flag(
        "token_mean", "the constant C under the loss (not given in the paper; authors' code: token_sum)"
    )
    micro_batch_size: int = _flag(
        4, "episodes a forward pass; the gradient does not depend on it (Table training_config: 1 to 4)"
    )
    behavior_logprobs: Literal["trainer", "engine"] = _flag("trainer", "who records log pi_mu (Algorithm 1 line 3)")
    truncated_is: float = _flag(
        0.0, "cap of pi_trainer / pi_engine as a weight of each token (not in the paper; usual: 2); 0: no weights"
    )
    freeze_vision: bool = _flag(False, "keep the vision tower fixed and its features cached")

    temperature: float = _flag(0.99, "sampling (appendix F: 0.99)")
    top_k: int = _flag(100, "sampling (appendix F: 100); 0: off")
    top_p: float = _flag(0.99, "sampling (appendix F: 0.99)")
    max_tokens: int = _flag(2048, "of a conversation (Table env_details, 'Seq Len': 2048, VLM 4096)")
    max_new_tokens: int = _flag(256, "of a reply (not given in the paper)")
    prompt_style: Literal["full", "terse"] = _flag("full", "full: rules and form written out; terse: the state alone")
    format_penalty: float = _flag(
        0.15, "cost of a reply that cannot be read (Table env_details: reward is binary, 0; authors' code: 0.15)"
    )
    max_turns: int = _flag(0, "H, assistant turns an episode; 0: the task's own (Table env_details, 'Max Actions')")
    data: str = _flag(
        "",
        "questions: a hub id (owner/name:config), or a json, jsonl or parquet file, or a folder; empty: generated here",
    )
    search_url: str = _flag(
        "", "NQ's retrieval server (envs/search_server.py); empty: one over generated articles, in this process"
    )
    env_timeout: float = _flag(
        300.0, "seconds for one answer of an environment, after which the run ends; 0: no limit (none in the paper)"
    )
    slippery: bool = _flag(False, "FrozenLake's ice (appendix D: slippery; see the README on the image task)")
    cell_size: int = _flag(56, "pixels of a cell in FrozenLake's pictures (not given in the paper)")

    engine: Literal["hf", "vllm"] = _flag("hf", "who generates: the embedded transformers engine, or vLLM")
    trainer: Literal["torch", "deepspeed"] = _flag("torch", "who trains: plain torch, or DeepSpeed on any ranks")
    zero_stage: Literal[0, 1, 2, 3] = _flag(2, "of DeepSpeed (Table training_config: 2; NQ 3)")
    rollout_gpus: int = _flag(0, "GPUs of vLLM's own, after those of the trainer; 0: it shares the trainer's one GPU")
    engine_memory: float = _flag(0.5, "share of a GPU's memory that vLLM takes")
    sync_check_every: int = _flag(10, "iterations between proofs that vLLM computes with the trainer's weights")
    sync_tolerance: float = _flag(
        0.0, "largest |engine - trainer log-prob| such a proof allows; 0: 0.001 in float32, 0.5 in bfloat16"
    )
    timeout: float = _flag(1800.0, "longest wait for vLLM or for another rank, in seconds")
    device: str = _flag("cpu", "torch device")
    dtype: Literal["float32", "bfloat16"] = _flag("bfloat16", "of the weights (appendix F: BF16); with torch: float32")
    threads: int = _flag(1, "torch CPU threads; results depend on it in the last digits")
    eval_every: int = _flag(10, "iterations between evaluations on held-out seeds; the last is always evaluated")
    eval_episodes: int = _flag(128, "held-out episodes an evaluation (appendix F: 128)")

    checkpoint, reason = None, ""  # no settings: what --resume found; why --preset auto chose what `preset` says

    def validate(self) -> None:
        """Raises ValueError with one sentence that names the flag, its value and what is allowed."""
        positive = """iterations rollout_batch_size group_size batch_size ppo_epochs capacity baseline_window
        lr tau max_grad_norm ratio_clip advantage_clip micro_batch_size temperature epsilon
        max_new_tokens cell_size threads eval_every eval_episodes keep_checkpoints sync_check_every timeout""".split()
        not_negative = """replay_ratio seed warmup_steps kl_loss_coef kl_reward_coef entropy_coef top_k format_penalty
        max_turns save_every save_minutes env_timeout rollout_gpus sync_tolerance truncated_is""".split()
        checks = [(name, value < math.inf, "finite") for name, value in vars(self).items() if value == math.inf]
        checks += [(name, getattr(self, name) > 0, "above 0") for name in positive]
        checks += [(name, getattr(self, name) >= 0, "0 or more") for name in not_negative]
        checks += [(name, 0.0 <= getattr(self, name) <= 1.0, "between 0 and 1") for name in ("alpha", "beta")]
        checks += [
            ("env", self.env in ENVS, f"one of {', '.join(ENVS)}"),
            (
                "model",
                self.model == "tiny" or "/" in self.model or os.path.isdir(self.model),
                "tiny, a folder, or a hub id",
            ),
            ("out", bool(self.resume) or not os.path.exists(self.out), "a folder that does not exist yet"),
            (
                "dtype",
                self.dtype == "float32" or self.trainer != "torch",
                "float32 where --trainer is torch, which keeps no float32 master weights",
            ),
            ("threads", self.threads <= (os.cpu_count() or 1), f"at most the {os.cpu_count()} of this machine"),
            ("capacity", self.capacity <= 10**8, "at most 100,000,000"),
            ("env_timeout", self.env_timeout <= 10**6, "at most 1,000,000"),
            ("seed", self.seed < 2**32, "below 2**32"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            (
                "truncated_is",
                self.truncated_is == 0.0 or self.behavior_logprobs == "trainer",
                "0 with --behavior_logprobs engine, whose ratios need no correction",
            ),
            ("dual_clip", self.dual_clip == 0.0 or self.dual_clip > 1.0, "0 or above 1"),
            ("engine_memory", 0.0 < self.engine_memory < 1.0, "above 0 and below 1"),
            (
                "zero_stage",
                self.zero_stage < 3 or self.engine != "hf" or self.trainer == "torch",
                "below 3 with --engine hf, which runs on the trainer's own model",
            ),
            ("capacity", self.capacity >= max(self.batch_size, self.rollout_batch_size), "at least a batch"),
            ("group_size", self.rollout_batch_size % max(1, self.group_size) == 0, "a divisor of rollout_batch_size"),
            ("max_new_tokens", self.max_new_tokens < self.max_tokens, f"below max_tokens {self.max_tokens}"),
        ]
        if self.model.startswith((".", "/", "~")):
            checks.append(("model", os.path.isfile(f"{self.model}/config.json"), "a folder with a config.json"))
        checks += [(n, v < 2**31, "below 2**31") for n, v in vars(self).items() if type(v) is int and n != "seed"]
        for name, good, allowed in checks:
            if not good:
                raise ValueError(f"--{name} is {getattr(self, name)}, but must be {allowed}")

    def folder(self) -> Path:
        """--resume, --out, or the first out/<env>-<method>-<seed>[-n] that is not there: no run overwrites another."""
        if self.resume:
            return Path(self.resume)
        if self.out:
            return Path(self.out)
        name = f"out/{self.env}-{self.method}-{self.seed}"
        return next(path for n in range(1, 10**6) if not (path := Path(f"{name}-{n}" if n > 1 else name)).exists())

    def task(self) -> str:
        """The environment as plots name it: slippery ice or not, generated questions or whose, is said every time."""
        if "data" in inspect.signature(ENVS[self.env]).parameters:
            return f"{self.env} ({self.data or 'generated questions'})"
        ice = "slippery" if self.slippery else "not slippery"
        return f"{self.env} ({ice})" if self.env.startswith("frozenlake") else self.env

    def make_env(self) -> TextEnv:
        """The environment behind --env, with the settings that concern it."""
        settings, accepted = vars(self) | {"style": self.prompt_style}, inspect.signature(ENVS[self.env]).parameters
        return ENVS[self.env](**{name: value for name, value in settings.items() if name in accepted})

    def decay_function(self) -> Any:
        """age (or draws) -> factor for the buffer, or None (Standard PER)."""
        if self.decay == "none":
            return None
        if self.decay == "auto":
            return AutoTau(self.alpha, self.replay_ratio + self.ppo_epochs if self.age_unit == "step" else 1)
        forms: dict[str, Any] = {"polynomial": partial(polynomial_decay, power=1.0), "limit": age_limit}
        return partial(forms.get(self.decay, exponential_decay), tau=self.tau)

    def decay_by(self) -> Literal["age", "draws"]:
        """What `decay_function` counts."""
        return "draws" if self.decay == "draws" else "age"


def parse_args(argv: list[str] | None = None) -> Config:
    """Flags to a checked Config. Wrong ones print one sentence and exit with 2; nothing has been written by then."""
    argv = ["--decay=auto" if flag == "--tau=auto" else flag for flag in (sys.argv[1:] if argv is None else argv)]
    for k, pair in enumerate(pairwise(argv)):
        argv[k] = "--decay" if pair == ("--tau", "auto") else argv[k]
    first = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for name in ("preset", "env", "method", "resume"):
        first.add_argument(f"--{name}", default=fields[name].default, choices=get_args(fields[name].type) or None)
    for name in ("model", "device"):
        first.add_argument(f"--{name}")
    parser = HfArgumentParser(
        Config,
        description="FreshPER (Algorithm 1). Defaults are those of the preset.",
        usage="%(prog)s [--flag value ...]",
        allow_abbrev=False,
    )
    stored, reason = dict[str, Any](), ""
    try:
        known, _ = first.parse_known_args(argv)
        if known.resume:
            stored, found = earlier_run(Path(known.resume), Config)
        elif known.preset == "auto":
            known.preset, reason = chosen_preset(known.env, known.model, known.device)
        parser.set_defaults(**(stored or {"preset": known.preset} | defaults(known.preset, known.env, known.method)))
    except argparse.ArgumentError:
        pass  # the full parser says it better
    except ValueError as error:
        parser.exit(2, f"{Path(sys.argv[0]).name}: error: {error}\n")
    config, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if reason:
        config.preset, config.reason = known.preset, reason
    try:
        if unknown:
            raise ValueError(f"unknown flag {unknown[0]}; --help lists them all")
        if stored:
            config.checkpoint = found
            check_overrides(dataclasses.asdict(config), stored, found.done if found else 0)
        elif config.override:
            raise ValueError(f"--override is {' '.join(config.override)}, but must be empty without --resume")
        config.validate()
    except ValueError as error:
        parser.exit(2, f"{Path(sys.argv[0]).name}: error: {error}\n")
    return config
