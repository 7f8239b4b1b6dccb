"""Off-policy corrections on replay: what bounds the ratio rho_t = pi_theta / pi_mu of a stale
trajectory?

The paper keeps PPO's clip (section 3.1) for replayed trajectories. Here are five rivals, each a
function from ratio and advantage to the objective of a token. All of them have the gradient of the
plain policy gradient at rho = 1, so they differ on replay alone. KL terms and the entropy bonus are
those of the settings.

    python examples/corrections.py --seeds 121 122 123 --iterations 100

Any flag of train.py may follow; its clips (--ratio_clip, --dual_clip) change PPO alone. The script
trains each on text FrozenLake with FreshPER, two runs at a time, and prints the table of
compare.py.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two runs at a time

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import freshper.trainer
import train
from compare import check_folder, finished, summary, table
from freshper.errors import NonFiniteError
from freshper.flags import parse_args
from freshper.reinforce import MAX_LOG_RATIO, policy_loss

CLIP = 0.2
CAP = 2.0
LOWEST = 0.5
HIGHEST = 5.0


def plain(rho: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Return rho A, [B, T]: importance sampling without a bound."""
    return rho * advantages


def truncated(rho: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Return min(rho, c) A, [B, T]: a token beyond the cap has no gradient."""
    return rho.clamp(max=CAP) * advantages


def cispo(rho: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Return sg(min(rho, c)) A log pi, [B, T]: beyond the cap a token keeps its gradient (arXiv
    2506.13585). log rho stands for log pi: they differ by a constant."""
    return rho.detach().clamp(max=CAP) * advantages * rho.log()


def icepop(rho: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Return rho A of tokens with a ratio between LOWEST and HIGHEST, else 0, [B, T] (IcePop, Ling
    team, 2025)."""
    kept = (rho > LOWEST) & (rho < HIGHEST)
    return torch.where(kept, rho * advantages, 0.0)


def gspo(rho: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Return PPO's objective with one ratio per episode, the geometric mean of its tokens', [B, T]
    (GSPO-token, arXiv 2507.18071: its gradient is that of the token). GSPO's own clip of 4e-4 would
    silence every replayed episode; CLIP is PPO's default."""
    log_rho = torch.where(action_mask, rho.log(), 0.0)
    of_episode = (log_rho.sum(-1) / action_mask.sum(-1)).exp().detach()[:, None]  # [B, 1]
    s = of_episode * rho / rho.detach()
    return torch.minimum(s * advantages, s.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages)


RIVALS: dict[str, Callable] = {f.__name__: f for f in (plain, truncated, cispo, icepop, gspo)}


def corrected_loss(
    objective: Callable,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    weights: Tensor,
    *,
    batch_size: int,
    scale: float,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what `policy_loss` does, with another objective of a token.

    --ratio_clip and --dual_clip have no part in it. `clipped` is the share of tokens that PPO's
    clip of 0.2 would stop."""
    arguments = (logprobs, behavior_logprobs, advantages, action_mask, weights)
    _, stats = policy_loss(*arguments, batch_size=batch_size, scale=scale)
    # KL terms and the entropy bonus do not depend on the advantages.
    arguments = (logprobs, behavior_logprobs, torch.zeros_like(advantages), action_mask, weights)
    rest, _ = policy_loss(*arguments, batch_size=batch_size, scale=scale, **options)

    log_ratio = torch.where(action_mask, logprobs - behavior_logprobs, 0.0)
    rho = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # [B, T]
    gain = torch.where(action_mask, objective(rho, advantages, action_mask), 0.0)  # [B, T]
    sample_loss = -gain.sum(-1) / scale  # [B]
    return (weights * sample_loss).sum() / batch_size + rest, stats


def folder_of(out: Path, name: str, seed: int) -> Path:
    """Return the folder of the run of a correction with a seed."""
    return out / f"{name}-seed{seed}"


def run(job: tuple[str, int], out: Path, flags: list[str]) -> dict[str, float]:
    """Train one run, or the rest of an interrupted one, and return its summary."""
    name, seed = job
    folder = folder_of(out, name, seed)
    if name in RIVALS:
        freshper.trainer.policy_loss = partial(corrected_loss, RIVALS[name])
    if not finished(folder):
        new = [*flags, "--seed", str(seed), "--out", str(folder)]
        train_loop = train.train

        def training(*arguments: Any) -> None:
            """Note that a run has diverged: train.main has the same exit status for a full disk."""
            try:
                train_loop(*arguments)
            except NonFiniteError as error:
                (folder / "stopped.txt").write_text(str(error))
                raise

        train.train = training
        status = train.main(["--resume", str(folder)] if folder.exists() else new)
        if status and not (folder / "stopped.txt").exists():
            raise SystemExit(status)
    return summary(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("out/corrections"))
    args, flags = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)

    # A process per run: a rival replaces the loss of its whole process.
    jobs = list(product(["PPO clip and dual clip", *RIVALS], args.seeds))
    try:
        for name, seed in jobs:
            config = parse_args([*flags, f"--seed={seed}"]).config
            check_folder(folder_of(args.out, name, seed), config)
    except ValueError as error:
        parser.error(str(error))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawn, max_tasks_per_child=1) as pool:
        summaries = list(pool.map(partial(run, out=args.out, flags=flags), jobs))

    rows: dict[str, list] = {}
    for (name, _), summary_of_run in zip(jobs, summaries, strict=True):
        rows.setdefault(name, []).append(summary_of_run)
    print(table(rows))


if __name__ == "__main__":
    main()
