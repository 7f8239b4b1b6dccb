"""Read questions with the library `datasets`: from a hub id, a file, or a folder of files.

Paper: appendix D names the tasks with data, not their files. Any source that has the fields of a task will do.

    openai/gsm8k:main            a dataset of the hub, and after a colon its configuration
    questions.jsonl              one object per line; also .json (a list of objects) and .parquet
    folder/                      train.* (or train-*.*), and validation.* or test.*, with one of these endings

Without a validation split, `test` takes its place. If there is only one split, every tenth different row is held out.
Names of fields are compared without regard to case (AIME sets have `Problem` or `problem`). Images stay encoded.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import held_out

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@cache
def load_rows(source: str, fields: tuple[str, ...]) -> dict[str, list[dict]]:
    """Return the rows of the splits "train" and "held_out": dicts of `fields`, `where` (for error messages) and
    `folder` (to which paths in a row are relative). Raises ValueError with one sentence that names source, row and
    field: no such source, an unknown ending, an unreadable file, a field that is missing or empty, too few rows."""
    path = Path(source).expanduser()
    folder = path if path.is_dir() else path.parent
    splits = {
        split: [_checked(row, fields, f"{source}, {split} row {n}", folder) for n, row in enumerate(rows, 1)]
        for split, rows in _load(source, path).items()
    }
    parts = {"train": splits.get("train", []), "held_out": splits.get("validation", splits.get("test", []))}
    if len(splits) == 1:
        numbers: dict[int, int] = {}  # of the different rows: equal ones stay on one side
        parts = {"train": [], "held_out": []}
        for row in next(iter(splits.values())):
            number = numbers.setdefault(hash(repr([row[name] for name in fields])), len(numbers))
            parts["train" if number % 10 else "held_out"].append(row)
    if not all(parts.values()):
        found = ", ".join(f"{len(rows)} in {name}" for name, rows in splits.items())
        raise ValueError(f"--data is {source}, with too few different rows to train and to hold out: {found}")
    return parts


def row_for(rows: dict[str, list], seed: int) -> Any:
    """Return the row of a seed: successive seeds go through all rows of their split, in shuffled order, before any
    comes again."""
    split = rows["held_out" if held_out(seed) else "train"]
    return split[_order(len(split))[seed % len(split)]]


@cache
def _order(n: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(n)  # files are often sorted by year or by difficulty


def _checked(row: dict, fields: tuple[str, ...], where: str, folder: Path) -> dict[str, Any]:
    """Return the named fields of a row, `where` and `folder`. Raises ValueError if one is missing or empty."""
    lower = {name.lower(): value for name, value in row.items()}
    for name in fields:
        value = lower.get(name)
        if value in (None, []) or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"{where}: the field {name} is missing or empty, the row has {', '.join(row)}")
    return {"where": where, "folder": folder} | {name: lower[name] for name in fields}


def _load(source: str, path: Path) -> dict[str, list[dict]]:
    """Return all rows of a source by split. A lone file is the split `train`."""
    if path.is_file() and (path.suffix not in KINDS or not path.stat().st_size):
        raise ValueError(f"--data is {source}, but a file must not be empty and must end in {', '.join(KINDS)}")
    if not path.exists() and (path.suffix in KINDS or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source)):
        raise ValueError(f"--data is {source}, but there is no such file or folder, and hub ids look like owner/name")
    import datasets  # here, because it takes a second and generated questions do without

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it also raises
    try:  # streaming leaves no copy in the cache
        if path.is_file():
            loaded = datasets.load_dataset(KINDS[path.suffix], data_files={"train": str(path)}, streaming=True)
        elif path.is_dir():
            loaded = datasets.load_dataset(str(path), streaming=True)
        else:
            loaded = datasets.load_dataset(*source.split(":"))
        for split, rows in loaded.items():
            for column, feature in (rows.features or {}).items():
                if isinstance(feature, datasets.Image):
                    loaded[split] = loaded[split].cast_column(column, datasets.Image(decode=False))
        return {split: list(rows) for split, rows in loaded.items()}
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # pyarrow's are ValueErrors
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--data is {source}, but `datasets` cannot read it (rows from 0): {reason}") from error
