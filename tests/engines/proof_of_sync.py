"""What vLLM's proof of a sync says of wrong weights, for test_train_for_real.py: one parameter of the trainer after the
other is changed behind vLLM's back and put right again. Prints `parameter > what the error says`, a line each.

    python tests/engines/proof_of_sync.py [flags of train.py]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from freshper.backends import BackendError, backends
from freshper.config import parse_args
from freshper.engine_vllm import VLLMEngine
from freshper.load import load
from freshper.models import Policy
from freshper.trainer import TorchTrainer


@torch.no_grad()
def main() -> None:
    config = parse_args()
    torch.set_num_threads(1)
    policy = load(config)
    with backends(policy, config) as (trainer, engine):
        for name, parameter in policy.model.named_parameters():
            right = parameter.clone()
            parameter += 0.3 * torch.randn_like(parameter)
            report(name, engine, trainer)
            parameter.copy_(right)
        if policy.model.config.get_text_config().tie_word_embeddings:
            stale_head(policy, trainer, engine)
        engine.prove(trainer)


def report(name: str, engine: VLLMEngine, trainer: TorchTrainer) -> None:
    try:
        engine.prove(trainer)
        print(f"{name} > nothing", flush=True)
    except BackendError as error:
        print(f"{name} > {error}", flush=True)


def stale_head(policy: Policy, trainer: TorchTrainer, engine: VLLMEngine) -> None:
    """vLLM is given a new embedding, and of the tied output layer nothing, as in a folder that transformers saves."""
    embedding = policy.model.get_input_embeddings().weight
    embedding += 0.3 * torch.randn_like(embedding)

    class Tied:
        step = trainer.step + 1

        def weights(self):
            return (pair for pair in trainer.weights() if pair[0] != "lm_head.weight")

    engine.config.sync_check_every = 10**9
    engine.syncs = 1  # this sync is not proven ...
    engine.sync(Tied())
    report("a tied output layer", engine, trainer)  # ... but here
    trainer.step += 2
    engine.sync(trainer)


if __name__ == "__main__":
    main()
