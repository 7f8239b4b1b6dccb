"""What does the proof of a sync notice in bfloat16, where vLLM and the trainer round differently?

    python benchmarks/proof.py MODEL         a folder with SmolLM2-135M-Instruct; needs vLLM

All weights of the trainer are moved by the same amount: along the gradient of the log-probs of four
prompts, as Adam would in its first step, or up and down at random. (In the last row a layer is
shuffled instead.) vLLM gets them, but for one layer or for all, which keep the weights of before.
Prints the differences of the log-probs that the proof looks at: their mean, and the one that a
tenth of the tokens exceeds.
freshper/engine_vllm.py has the bounds. docs/gpus.md has the table.
"""

import contextlib
import sys

import common
import numpy as np
import torch

from envs.base import TextEnv
from freshper.backends import backends, load
from freshper.engine_vllm import ALLOWED, VLLMEngine, batch_of_prompt
from freshper.errors import BackendError
from freshper.flags import parse_args
from freshper.rollout import Conversation
from freshper.trainer import Parameters, TorchTrainer, action_logprobs

AMOUNTS = (0.0003, 0.001)
FLAGS = "--env gsm8k --preset small --backend vllm+torch --dtype bfloat16 --model"


class LeftBehind:
    """A trainer that hands over the weights of before where a name begins with `layer`."""

    def __init__(self, trainer: TorchTrainer, before: dict[str, torch.Tensor], layer: str):
        self.trainer = trainer
        self.before = before
        self.layer = layer
        self.logprobs = trainer.logprobs

    def parameters(self) -> Parameters:
        for name, parameter in self.trainer.parameters():
            yield name, self.before[name] if name.startswith(self.layer) else parameter


def set_gradient(trainer: TorchTrainer, env: TextEnv) -> None:
    """Compute the gradient of the log-probs of four prompts that the proof does not look at."""
    policy = trainer.policy
    for seed in range(4):
        prompt = Conversation(policy.user_turn(env.reset(seed=seed)[0]))
        batch = batch_of_prompt(policy, prompt)
        action_logprobs(policy, batch, trainer.config.temperature)[0].sum().backward()


def move(trainer: TorchTrainer, amount: float, direction: str, layer: str) -> None:
    """Move all weights, or shuffle those of the layer."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.policy.model.named_parameters():
        if direction == "gradient":
            parameter += amount * parameter.grad.sign()
        elif direction == "at random":
            signs = torch.rand(parameter.shape, generator=generator).sub(0.5).sign()
            parameter += amount * signs
        elif name.startswith(layer):
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))


def measured(
    engine: VLLMEngine, trainer: TorchTrainer, amount: float, direction: str, layer: str
) -> str:
    """Return the differences of a layer that is left behind."""
    before = {name: parameter.clone() for name, parameter in trainer.parameters()}
    move(trainer, amount, direction, layer)
    with contextlib.suppress(BackendError):
        engine.sync(LeftBehind(trainer, before, layer))  # type: ignore[arg-type]
    differences = engine.differences(trainer)

    for name, parameter in trainer.policy.model.named_parameters():
        parameter.copy_(before[name])
    return f"{np.mean(differences):.3f} ({np.quantile(differences, 0.9):.2f})"


@torch.no_grad()
def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("model")
    config = parse_args([*FLAGS.split(), parser.parse_args().model]).config
    policy, make_env, _ = load(config)
    count = policy.model.config.num_hidden_layers
    layers = {"nothing": "nothing"}
    for name, number in (("first", 0), ("middle", count // 2), ("last", count - 1)):
        layers[name] = f"model.layers.{number}."
    layers["all"] = ""

    cases = [(amount, "gradient") for amount in AMOUNTS]
    cases += [(AMOUNTS[-1], "at random"), (0.0, "other weights")]
    env = make_env()
    with backends(policy, config, env) as (trainer, engine):
        with torch.enable_grad():
            set_gradient(trainer, env)
        print(f"allowed: {ALLOWED[config.dtype]}")
        print(f"| left behind | {' | '.join(layers)} |", flush=True)
        for amount, direction in cases:
            cells = [measured(engine, trainer, amount, direction, x) for x in layers.values()]
            print(f"| {direction} {amount or ''} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
