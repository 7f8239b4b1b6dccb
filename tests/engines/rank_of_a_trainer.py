"""One rank of test_trainer_deepspeed.py: DeepSpeed and plain torch make the same updates, and a resumed one the last.

    torchrun --nproc_per_node 2 tests/engines/rank_of_a_trainer.py OUT [case ...] [--resume-only]

Rank 0 writes OUT/<case>.pt with the numbers of all three, and OUT/<case>/ with a checkpoint after two of three updates.
With --resume-only the checkpoint is one that is there.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from conftest import speakable_episodes

import freshper.trainer
from freshper.backends import join_ranks, make_trainer, serve
from freshper.episode import collate
from freshper.flags import parse_args
from freshper.models import load_policy
from freshper.reinforce import Baseline
from freshper.tiny import build_policy
from freshper.trainer import TorchTrainer

FLAGS = (
    "--backend vllm+deepspeed --batch_size 13 --micro_batch_size 2 --lr 0.01 --iterations 4".split()
)
TERMS = "--kl_loss_coef 0.05 --kl_reward_coef 0.1 --entropy_coef 0.01 --dtype float32".split()
CASES = {f"zero_{stage}": ["--zero_stage", str(stage), *TERMS] for stage in range(4)}
CASES["images"] = ["--zero_stage", "3", "--env", "frozenlake_vlm", *TERMS]
CASES["bfloat16"] = ["--zero_stage", "2", "--dtype", "bfloat16"]


def numbers(trainer, episodes, first=0, folder=None):
    """Log-probs, the updates number `first` to 2, log-probs and weights again. Saves the state before the last."""
    found = (
        {"mismatch": trainer.record_behavior_logprobs(episodes)["mismatch"]} if first == 0 else {}
    )
    found["before"] = trainer.logprobs(collate(episodes))
    baseline = Baseline("turn", 0.0)
    weights = np.linspace(0.2, 1.0, len(episodes))
    baseline.observe(episodes[2:])
    replays = [
        (batch, baseline.advantages(batch), weights[: len(batch)])
        for batch in (episodes[:3], episodes)
    ]
    arguments = [(episodes,), *replays]
    found["updates"] = []
    for k in range(first, 3):
        if k == 2 and folder:
            trainer.save(str(folder))
            torch.save(trainer.state_dict(), folder / "state.pt")
        found["updates"].append(trainer.update(*arguments[k])._asdict())
    found["recorded"] = [(e.behavior_logprobs, e.ref_logprobs) for e in episodes]
    found["after"], found["lr"] = trainer.logprobs(collate(episodes)), trainer.lr
    kept = list(trainer.weights())  # as vLLM gets them
    return found | {"weights": {name: weight.float().clone() for name, weight in kept}}


def run(case, out, resume):
    """Make the updates of a case with torch and DeepSpeed; or, from the checkpoint, the last one again."""
    config, folder = parse_args([*FLAGS, *CASES[case]]).config, out / case
    rank = join_ranks(config)
    if rank == 0 and not resume:
        build_policy(config.make_env()).save(str(folder))
    dist.barrier()
    load = partial(load_policy, str(folder), "cpu", getattr(torch, config.dtype))
    policy = load()
    if rank:
        serve(policy, config)
        return
    trainer = make_trainer(policy, config)
    episodes = speakable_episodes(policy, 13)
    if resume:
        trainer.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        found = torch.load(f"{folder}.pt", weights_only=False)
        for episode, fields in zip(episodes, found["deepspeed"]["recorded"], strict=True):
            episode.behavior_logprobs, episode.ref_logprobs = fields
        found["resumed"] = numbers(trainer, episodes, first=2)
    else:
        alone = TorchTrainer(load(), config, total_updates=12)
        found = {"torch": numbers(alone, speakable_episodes(policy, 13))}
        found["deepspeed"] = numbers(trainer, episodes, folder=folder)
    torch.save(found, f"{folder}.pt")
    trainer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    freshper.trainer.LOGITS_AT_ONCE = (
        1000  # three tokens of the tiny vocabulary: a text batch is cut into chunks
    )
    end, dist.destroy_process_group = (
        dist.destroy_process_group,
        lambda: None,
    )  # the ranks go on to the next case
    resume_only = "--resume-only" in sys.argv
    for name in filter(CASES.get, sys.argv[2:]):
        for resume in (True,) if resume_only else (False, True):
            run(name, Path(sys.argv[1]), resume)
    end()
