"""Follow a run in TensorBoard, and with --wandb in W&B, up to its last iteration or Ctrl-C.

    python examples/track.py out/frozenlake-freshper-42 [--wandb PROJECT]
    tensorboard --logdir out
They are packages of their own: pip install tensorboard wandb
"""

import argparse
import csv
import json
import time
from contextlib import suppress
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser(description="Follow a run in TensorBoard or W&B.")
parser.add_argument("run", type=Path, help="the folder of a run")
parser.add_argument("--wandb", metavar="PROJECT", help="log to this project of W&B, too")
args = parser.parse_args()
table = args.run / "metrics.csv"
config = json.loads((args.run / "config.json").read_text())
if args.wandb:
    import wandb

    # A run that W&B has goes on, and it ignores the steps that it has.
    wandb.init(project=args.wandb, id=args.run.name, config=config, resume="allow")
iteration = -1
# The whole table is written again: what an earlier call, or the run before --resume, has left in
# the folder is purged from step 0 on.
writer = SummaryWriter(args.run / "tensorboard", purge_step=0, flush_secs=2)
with suppress(KeyboardInterrupt), writer:
    while iteration < config["iterations"]:
        time.sleep(1)
        # The last line may be only half written.
        lines = table.read_text().rpartition("\n")[0].splitlines()
        for row in list(csv.DictReader(lines))[iteration + 1 :]:
            values = {name: float(value) for name, value in row.items() if value}
            iteration = int(values.pop("iteration"))
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)
            if args.wandb:
                wandb.log(values, step=iteration)
