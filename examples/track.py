"""Follow a run in TensorBoard, and with --wandb in W&B, until it ends, or Ctrl-C.

    python examples/track.py out/frozenlake-freshper-42 [--wandb PROJECT]
    tensorboard --logdir out
They are packages of their own: pip install tensorboard wandb
"""

import argparse
import csv
import json
import time
import uuid
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser(description="Follow a run in TensorBoard or W&B.")
parser.add_argument("run", type=Path, help="the folder of a run")
parser.add_argument("--wandb", metavar="PROJECT", help="log to this project of W&B, too")
args = parser.parse_args()
table = args.run / "metrics.csv"
if args.wandb:
    import wandb

    # A run that W&B has goes on, and it ignores the steps that it has. The names of folders are
    # those of other comparisons, too.
    file = args.run / "wandb_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex)
    wandb.init(
        project=args.wandb,
        id=file.read_text(),
        name="/".join(args.run.resolve().parts[-2:]),
        config=json.loads((args.run / "config.json").read_text()),
        resume="allow",
    )


def trains() -> bool:
    """Return whether a process has the run's lock."""
    try:
        with FileLock(args.run / ".lock", timeout=0):
            return False
    except Timeout:
        return True


iteration = -1
# The whole table is written again: what an earlier call, or the run before --resume, has left in
# the folder is purged from step 0 on.
writer = SummaryWriter(args.run / "tensorboard", purge_step=0, flush_secs=2)
with suppress(KeyboardInterrupt), writer:
    more = True
    while more:
        time.sleep(1)
        more = trains()
        # A run's first evaluation comes before its table, whose last line may be half written.
        text = table.read_text() if table.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()
        for row in list(csv.DictReader(lines))[iteration + 1 :]:
            values = {name: float(value) for name, value in row.items() if value}
            iteration = int(values.pop("iteration"))
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)
            if args.wandb:
                wandb.log(values, step=iteration)
