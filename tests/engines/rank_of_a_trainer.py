"""One rank of test_trainer_deepspeed.py: DeepSpeed and plain torch make the same updates.

    torchrun --nproc_per_node 2 tests/engines/rank_of_a_trainer.py OUT [case ...] [--resume-only]

ZeRO-3 partitions every parameter, of a model whose output layer is tied and whose layers are
computed again in the backward pass.

Rank 0 writes OUT/<case>/, with a checkpoint after two of three updates, and OUT/<case>.pt, with the
numbers of plain torch, of DeepSpeed, and of a resumed DeepSpeed that makes the last update again.
With --resume-only the checkpoint already exists.
"""

import sys
from functools import partial
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from conftest import speakable_episodes, whitened

import freshper.backends
import freshper.trainer
from freshper.backends import join_ranks, make_env, make_trainer
from freshper.episode import collate
from freshper.flags import parse_args
from freshper.models import load_policy
from freshper.tiny import build_policy
from freshper.trainer import TorchTrainer
from freshper.trainer_deepspeed import serve

INITIALIZE = deepspeed.initialize
FLAGS = "--backend vllm+deepspeed --batch_size 13 --micro_batch_size 2 --lr 0.01 --iterations 4"
TERMS = "--kl_loss_coef 0.05 --kl_reward_coef 0.1 --entropy_coef 0.01 --dtype float32"
CASES = {
    "zero_1": f"--zero_stage 1 {TERMS}",
    "zero_2": f"--zero_stage 2 {TERMS}",
    "zero_3": f"--zero_stage 3 {TERMS}",
    "images": f"--zero_stage 3 --env frozenlake_vlm {TERMS}",
    "bfloat16": "--zero_stage 2 --dtype bfloat16",
    # for `gradients`
    "sum_1": "--zero_stage 1 --dtype bfloat16 --micro_batch_size 1",
    "sum_2": "--zero_stage 2 --dtype bfloat16 --micro_batch_size 1",
    "sum_3": "--zero_stage 3 --dtype bfloat16 --micro_batch_size 1",
}


def numbers(trainer, episodes, first=0, folder=None):
    """Log-probs, updates number `first` to 2, log-probs and parameters again. With a folder, the
    state before the last update is saved there."""
    batch = collate(episodes)
    results = {"before": trainer.logprobs(batch)}
    if first == 0:
        for episode, row in zip(episodes, results["before"].numpy(), strict=True):
            # The engine's were off by 5e-5.
            off = np.float32(5e-5) * episode.action_mask
            episode.behavior_logprobs = row[: len(episode.tokens)] + off
        results["mismatch"] = trainer.record_behavior_logprobs(episodes)["mismatch"]

    batch, few = collate(episodes), collate(episodes[:3])  # with the log-probs of line 3
    weights = np.linspace(0.2, 1.0, len(episodes))
    calls = [
        (batch, whitened(batch)),
        (few, whitened(batch)[:3, : few.tokens.shape[1]], weights[:3]),
        (batch, whitened(batch), weights),
    ]
    results["updates"] = []
    for k in range(first, 3):
        if k == 2 and folder:
            trainer.save(str(folder))
            torch.save(trainer.state_dict(), folder / "state.pt")
            trainer.save_optimizer(str(folder))
        results["updates"].append(trainer.update(*calls[k])._asdict())

    results["recorded"] = [(e.behavior_logprobs, e.ref_logprobs) for e in episodes]
    results["after"] = trainer.logprobs(batch)
    results["lr"] = trainer.lr
    parameters = list(trainer.parameters())  # as vLLM gets them
    results["parameters"] = {name: x.float().clone() for name, x in parameters}
    return results


def gradients(trainer, alone):
    """Return the direction of an update of 32 micro-batches, of DeepSpeed and of torch with its
    sum in float32. AdamW's first moments hold it."""
    total = {}

    def backward(loss):
        loss.backward()
        for parameter in alone.policy.model.parameters():
            total[parameter] = total.get(parameter, 0.0) + parameter.grad.float()
            parameter.grad = None

    alone.backward = backward
    alone.clip_and_step = lambda: 0.0
    batch = collate(speakable_episodes(alone.policy, 32))
    alone.update(batch, whitened(batch))
    expected = torch.cat([x.flatten() for x in total.values()])

    trainer.update(batch, whitened(batch))
    states = trainer.optimizer_state()["tensors"]
    computed = torch.cat([state["exp_avg"] for state in states])[: len(expected)]
    return [x / x.norm() for x in (computed, expected)]


def initialize(partitioned, **arguments):
    """Call deepspeed.initialize. With `partitioned` no parameter stays whole, which is checked."""
    if partitioned:
        arguments["config"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    made = INITIALIZE(**arguments)
    if partitioned:
        for parameter in arguments["model"].parameters():
            assert parameter.numel() == 0, "a parameter is not partitioned"
    return made


def run(case, out, resume):
    """Make the updates of a case with torch and DeepSpeed, or the last one from the checkpoint."""
    config = parse_args(f"{FLAGS} {CASES[case]}".split())
    folder = out / case
    rank = join_ranks(config)
    # DeepSpeed would keep parameters of this size whole on each rank.
    deepspeed.initialize = partial(initialize, config.zero_stage == 3)
    freshper.backends.ACTIVATIONS = 0 if config.zero_stage == 3 else 2**30
    if rank == 0 and not resume:
        policy = build_policy(make_env(config))
        if config.zero_stage == 3:
            for part in (policy.model.config, policy.model.config.get_text_config()):
                part.tie_word_embeddings = True
            policy.model.tie_weights()
        policy.save(str(folder))
    dist.barrier()
    load = partial(load_policy, str(folder), "cpu", getattr(torch, config.dtype))
    policy = load()
    if rank:
        serve(make_trainer(policy, config))
        return

    trainer = make_trainer(policy, config)
    assert policy.model.is_gradient_checkpointing == (config.zero_stage == 3)
    if case.startswith("sum"):
        alone = TorchTrainer(load(), config, total_updates=12)
        torch.save(gradients(trainer, alone), f"{folder}.pt")
        return
    episodes = speakable_episodes(policy, 13)
    if resume:
        trainer.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        trainer.load_optimizer(str(folder))
        results = torch.load(f"{folder}.pt", weights_only=False)
        for episode, fields in zip(episodes, results["deepspeed"]["recorded"], strict=True):
            episode.behavior_logprobs, episode.ref_logprobs = fields
        results["resumed"] = numbers(trainer, episodes, first=2)
    else:
        alone = TorchTrainer(load(), config, total_updates=12)
        results = {"torch": numbers(alone, speakable_episodes(policy, 13))}
        results["deepspeed"] = numbers(trainer, episodes, folder=folder)
        tensors = trainer.optimizer_state()["tensors"]
        assert {state["step"].item() for state in tensors} == {3.0}
    torch.save(results, f"{folder}.pt")
    trainer.close()


if __name__ == "__main__":
    # Three tokens of the tiny vocabulary: a text batch is cut into chunks.
    freshper.trainer.LOGITS_AT_ONCE = 1000
    # The ranks go on to the next case.
    end = dist.destroy_process_group
    dist.destroy_process_group = lambda: None
    resume_only = "--resume-only" in sys.argv
    for name in filter(CASES.get, sys.argv[2:]):
        if not resume_only:
            run(name, Path(sys.argv[1]), resume=False)
        if not name.startswith("sum"):
            run(name, Path(sys.argv[1]), resume=True)
    end()
