"""One rank of test_trainer_deepspeed.py: DeepSpeed and plain torch make the same updates, and a resumed one the last.

    torchrun --nproc_per_node 2 tests/engines/rank_of_a_trainer.py OUT [case ...] [--resume-only]

Rank 0 writes OUT/<case>.pt with the numbers of all three, and OUT/<case>/ with a checkpoint after two of three updates.
With --resume-only the checkpoint is one that is there.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from conftest import make_episode

import freshper.trainer
from freshper.backends import join_ranks, make_trainer
from freshper.episode import collate
from freshper.flags import parse_args
from freshper.models import load_policy
from freshper.tiny import build_policy
from freshper.trainer import TorchTrainer

FLAGS = "--backend vllm+deepspeed --batch_size 13 --micro_batch_size 2 --lr 0.01 --iterations 4".split()
TERMS = "--kl_loss_coef 0.05 --kl_reward_coef 0.1 --entropy_coef 0.01 --dtype float32".split()
CASES = {f"zero_{stage}": ["--zero_stage", str(stage), *TERMS] for stage in range(4)}
CASES["images"] = ["--zero_stage", "3", "--env", "frozenlake_vlm", *TERMS]
CASES["bfloat16"] = ["--zero_stage", "2", "--dtype", "bfloat16"]


def random_episodes(policy, n):
    """Episodes of very different lengths; an image has its placeholders in the prompt."""
    rng = np.random.default_rng(0)
    speakable = np.setdiff1d(np.arange(len(policy.tokenizer)), policy.suppressed_ids)
    episodes = []
    for k in range(n):
        e = make_episode(rng, turns=1 + 2 * (k % 4), seed=k, vocabulary=len(policy.tokenizer))
        e.tokens = rng.choice(speakable, len(e.tokens)).astype(np.int32)
        if policy.image_processor:
            e.images = [np.random.default_rng(k % 3).integers(0, 255, (56, 56, 3), dtype=np.uint8)]
            e.tokens = np.append(np.full(16, policy.image_token_id, dtype=np.int32), e.tokens)
            e.action_mask = np.append(np.zeros(16, dtype=bool), e.action_mask)
            e.behavior_logprobs = np.append(np.zeros(16, dtype=np.float32), e.behavior_logprobs)
        episodes.append(e)
    return episodes


def numbers(trainer, episodes, first=0, folder=None):
    """Log-probs, the updates number `first` to 2, log-probs and weights again. Saves the state before the last."""
    found = {"mismatch": trainer.record_behavior_logprobs(episodes)["mismatch"]} if first == 0 else {}
    found["before"] = trainer.logprobs(collate(episodes))
    weights, moments = np.linspace(0.2, 1.0, len(episodes)), torch.tensor([[0.1], [0.9]])
    arguments = [(episodes,), (episodes[:3], weights[:3], moments), (episodes, weights, moments)]
    found["updates"] = []
    for k in range(first, 3):
        if k == 2 and folder:
            trainer.save(str(folder))
            torch.save(trainer.state_dict(), folder / "state.pt")
        found["updates"].append(trainer.update(*arguments[k])._asdict())
    found["recorded"] = [(e.behavior_logprobs, e.ref_logprobs) for e in episodes]
    found["after"], found["lr"] = trainer.logprobs(collate(episodes)), trainer.optimizer.param_groups[0]["lr"]
    kept = list(trainer.weights())  # as vLLM gets them
    return found | {"weights": {name: weight.float().clone() for name, weight in kept}}


def policy_from(folder, config):
    return load_policy(str(folder), "cpu", getattr(torch, config.dtype))


def run(case, out):
    """Make the updates of a case with torch and DeepSpeed, then leave a checkpoint."""
    config = parse_args([*FLAGS, *CASES[case]])
    rank, folder, found = join_ranks(config), out / case, {}
    if rank == 0:
        build_policy(config.make_env()).save(str(folder))
    dist.barrier()
    policy = policy_from(folder, config)
    trainer = make_trainer(policy, config)
    if rank:
        trainer.serve()
    else:
        alone = TorchTrainer(policy_from(folder, config), config, total_updates=12)
        found["torch"] = numbers(alone, random_episodes(policy, 13))
        found["deepspeed"] = numbers(trainer, random_episodes(policy, 13), folder=folder)
        torch.save(found, f"{folder}.pt")
        trainer.close()


def resume(case, out):
    """Make the last update of a case again, from the checkpoint."""
    config = parse_args([*FLAGS, *CASES[case]])
    rank, folder = join_ranks(config), out / case
    trainer = make_trainer(policy_from(folder, config), config)
    if rank:
        trainer.serve()
        return
    trainer.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    found = torch.load(f"{folder}.pt", weights_only=False)
    episodes = random_episodes(trainer.policy, 13)
    for episode, fields in zip(episodes, found["deepspeed"]["recorded"], strict=True):
        episode.behavior_logprobs, episode.ref_logprobs = fields
    torch.save(found | {"resumed": numbers(trainer, episodes, first=2)}, f"{folder}.pt")
    trainer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    freshper.trainer.LOGITS_AT_ONCE = 1000  # three tokens of the tiny vocabulary: a text batch is cut into chunks
    end, dist.destroy_process_group = dist.destroy_process_group, lambda: None  # the ranks go on to the next case
    for name in sys.argv[2:]:
        if name != "--resume-only":
            if "--resume-only" not in sys.argv:
                run(name, Path(sys.argv[1]))
            resume(name, Path(sys.argv[1]))
    end()
