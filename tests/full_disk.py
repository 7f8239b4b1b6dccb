"""A disk that runs full under the real train.py, and is made larger again. tests/test_faults.py starts this.

    python tests/full_disk.py tmpfs MODEL FOLDER     on a file system of 8 MB, mounted on FOLDER: needs `unshare`
    python tests/full_disk.py limit MODEL FOLDER     where nothing can be mounted: no file may grow beyond a size

Prints, as JSON, what each of the runs said and left behind.
"""

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import train
from freshper import checkpoint

FLAGS = """--iterations 4 --rollout_batch_size 4 --batch_size 4 --eval_episodes 4 --eval_every 100 --save_every 2
--format_penalty 0.15 --max_turns 3 --threads 1""".split()


def squeeze(how, folder, kilobytes):
    """Leave so much space; None: enough."""
    ballast = folder / "ballast"
    ballast.unlink(missing_ok=True)
    if how == "limit":
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if kilobytes is None else kilobytes * 1024, hard))
    elif kilobytes is not None:
        disk = os.statvfs(folder)
        ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - kilobytes * 1024))


def started(out, *flags):
    """One run: its exit status, what it said on both channels, the whole checkpoint it left, and its files."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = train.main(list(flags))
        except SystemExit as stop:
            status = stop.code
    found, problems = checkpoint.find(out)
    files = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
    whole = {"done": found.done, "problems": problems, "files": files, "rows": (out / "metrics.csv").read_text()}
    return {"status": status, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()} | whole


def main(how, model, folder):
    folder, out = Path(folder), Path(folder) / "run"
    if how == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
        assert os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize == 8 << 20
    more = ["--resume", str(out), "--iterations", "200", "--override", "iterations"]
    runs = {"before": started(out, "--model", model, "--out", str(out), *FLAGS)}
    squeeze(how, folder, 300)
    runs["checkpoint"] = started(out, *more)
    squeeze(how, folder, 20)
    runs["metrics"] = started(out, *more, "save_every", "--save_every", "0")
    squeeze(how, folder, 0)
    runs["nothing"] = started(out, *more)
    squeeze(how, folder, None)
    runs["after"] = started(out, "--resume", str(out), "--iterations", "6", "--override", "iterations")
    print(json.dumps(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
