"""Do vLLM and DeepSpeed learn what the embedded engine and plain torch learn? Same task, model and
seeds, both ways.

    python benchmarks/engines_learn.py --seeds 64 65 66 --iterations 100 --eval_every 25

On a CPU, in the environment of requirements-cpu-engines.txt. vLLM's CPU attention needs heads of 32
numbers, and the tiny model has heads of 16. So one with two heads is built and warm-started once,
in --out, and both arms begin with it. The rest is compare.py's, with its table and figure. Flags
that are not this script's go to it.

Updates, replay and held-out seeds are the same, but the engines draw their replies from generators
of their own: the curves are two samples of the same distribution, not the same curve.
"""

import subprocess
import sys
from pathlib import Path

import common
import torch

from envs import ENVS
from freshper.tiny import build_policy, keep_freed_memory, warm_start

ARMS = ["--arm", "freshper --backend hf+torch", "--arm", "freshper --backend vllm+deepspeed"]


def build(env: str, folder: Path) -> None:
    """Write the tiny model of a task with two heads, warm-started as the one with four is
    (freshper/tiny.py)."""
    torch.set_num_threads(1)
    keep_freed_memory()
    policy = build_policy(ENVS[env](), heads=2)
    warm_start(policy, ENVS[env])
    policy.save(str(folder))


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--env", choices=["frozenlake", "frozenlake_vlm"], default="frozenlake")
    parser.add_argument("--out", type=Path, default=Path("out/engines-learn"))
    args, flags = parser.parse_known_args()

    out = args.out.resolve()
    model = out / f"model-{args.env}"
    if not model.exists():
        build(args.env, model)

    command = [sys.executable, "compare.py", "--env", args.env, "--jobs", "1", "--out", str(out)]
    return subprocess.call(
        [*command, *ARMS, "--model", str(model), *flags], cwd=Path(__file__).parent.parent
    )


if __name__ == "__main__":
    sys.exit(main())
