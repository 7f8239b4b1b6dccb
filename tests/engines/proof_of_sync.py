"""The engine alone, for test_train_for_real.py: a small KV cache, and weights that are not the
trainer's.

    python tests/engines/proof_of_sync.py BLOCKS [flags of train.py]

The KV cache has BLOCKS blocks of 32 tokens. Prints a JSON object per line, and ends by killing
itself in a rollout: the test looks at what vLLM leaves behind.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
import vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from freshper.backends import backends, load
from freshper.errors import BackendError
from freshper.flags import parse_args
from freshper.rollout import rollout, training_seeds


def say(**fields):
    print(json.dumps(fields), flush=True)


def attempt(proof, trainer, name):
    """Print the error that a proof returns, or its refusal."""
    try:
        say(name=name, error=proof(trainer))
    except BackendError as refusal:
        say(name=name, refusal=str(refusal))


@torch.no_grad()
def main(blocks, *flags):
    start = vllm.LLM
    changes = {"num_gpu_blocks_override": int(blocks), "disable_log_stats": False}
    vllm.LLM = lambda **options: start(**options | changes)
    config = parse_args(list(flags)).config
    torch.set_num_threads(1)
    seeds = training_seeds(config.seed, 0, config.rollout_batch_size, config.group_size)
    policy, make_env, _ = load(config)
    policy.freeze_vision = False  # else the trainer keeps features of the images
    with backends(policy, config, make_env()) as (trainer, engine):
        envs = [make_env() for _ in seeds]
        episodes = rollout(engine, policy, envs, seeds, config.max_tokens, config.max_new_tokens)
        counts = {metric.name: metric for metric in engine.llm.get_metrics()}
        preempted = counts["vllm:num_preemptions"].value
        say(preempted=preempted, **trainer.record_behavior_logprobs(episodes))

        attempt(engine.prove, trainer, "the same")
        for name, parameter in policy.model.named_parameters():
            right = parameter.clone()
            parameter += 0.3 * torch.randn_like(parameter)
            attempt(engine.prove, trainer, name)
            parameter.copy_(right)

        for parameter in policy.model.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
        attempt(engine.prove, trainer, "all")
        say(name="all, synced", error=engine.sync(trainer)["sync_error"])

        # vLLM gets a new embedding, and of the tied output layer nothing, as transformers would
        # save it.
        class Tied:
            logprobs = trainer.logprobs

            def parameters(self):
                return (pair for pair in trainer.parameters() if pair[0] != "lm_head.weight")

        embedding = policy.model.get_input_embeddings().weight
        embedding += 0.3 * torch.randn_like(embedding)
        attempt(engine.sync, Tied(), "tied output layer")
        say(name="tied output layer, synced", error=engine.sync(trainer)["sync_error"])
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            rollout(engine, policy, envs, seeds, config.max_tokens, config.max_new_tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
