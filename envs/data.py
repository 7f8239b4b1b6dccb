"""Read questions with the library `datasets`: from a hub id, a file, or a folder of files.

Paper: appendix D names the tasks with data, not their files. Any source that has the fields of a task will do.

    openai/gsm8k:main            a dataset of the hub, and after a colon its configuration
    questions.jsonl              one object per line; also .json (a list of objects), .csv and .parquet
    folder/                      train.* (or train-*.*), and validation.* or test.*, or an image folder of `datasets`

Without a validation split, `test` takes its place. If there is only one split, every tenth different row is held out.
Names of fields are compared without regard to case (AIME sets have `Problem` or `problem`). Images stay encoded.
A run leaves out rows whose first turn its model has no room for (freshper/backends.py), and says how many.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import held_out


@cache
def load_rows(
    source: str, fields: tuple[str, ...], convert: Callable[[dict], Any]
) -> dict[str, list]:
    """Return `convert` of the `fields` of all rows, by split ("train" and "held_out"), shuffled: files are often sorted
    by year or by difficulty. Raises ValueError with one sentence that names source, row and field: no such source, an
    unreadable file, a field that is missing, empty or refused by `convert`, too few rows."""

    def converted(row: dict[str, Any], where: str) -> Any:
        lower = {name.lower(): value for name, value in row.items()}
        try:
            for name in fields:
                if lower.get(name) in (None, []) or not str(lower[name]).strip():
                    raise ValueError(
                        f"the field {name} is missing or empty, the row has {', '.join(row)}"
                    )
                if isinstance(lower[name], str) and re.search(r"<\|\w+\|>", lower[name]):
                    raise ValueError(f"the field {name} must not hold tokens such as <|im_end|>")
            return convert({name: lower[name] for name in fields})
        except ValueError as error:
            raise ValueError(f"{source}, {where}: {error}") from error

    loaded = _load(source).items()
    splits = {
        split: [converted(row, f"{split} row {n}") for n, row in enumerate(rows, 1)]
        for split, rows in loaded
    }
    parts = {
        "train": splits.get("train", []),
        "held_out": splits.get("validation", splits.get("test", [])),
    }
    if len(splits) == 1:
        numbers: dict[int, int] = {}  # of the different rows: equal ones stay on one side
        parts = {"train": [], "held_out": []}
        for row in next(iter(splits.values())):
            parts[
                "train" if numbers.setdefault(hash(repr(row)), len(numbers)) % 10 else "held_out"
            ].append(row)
    if not all(parts.values()):
        found = ", ".join(f"{len(rows)} in {name}" for name, rows in splits.items())
        raise ValueError(
            f"--data is {source}, with too few different rows to train and to hold out: {found}"
        )
    return {
        name: [rows[k] for k in np.random.default_rng(0).permutation(len(rows))]
        for name, rows in parts.items()
    }


def row_for(rows: dict[str, list], seed: int) -> Any:
    """Return the row of a seed: successive seeds go through all rows of their split before any comes again."""
    split = rows["held_out" if held_out(seed) else "train"]
    return split[seed % len(split)]


def _load(source: str) -> dict[str, list[dict]]:
    """Return all rows of a source by split. A lone file is the split `train`."""
    path = Path(source).expanduser().absolute()
    if not path.exists() and (
        source.count("/") != 1 or path.suffix in (".json", ".jsonl", ".csv", ".parquet")
    ):
        raise ValueError(
            f"--data is {source}, but there is no such file or folder, and hub ids look like owner/name"
        )
    import datasets  # here, because it takes a second and generated questions do without

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it also raises
    try:  # streaming leaves no copy in the cache
        if path.is_dir():
            loaded = datasets.load_dataset(str(path), streaming=True)
        elif path.is_file():
            loaded = datasets.load_dataset(
                str(path.parent.resolve()), data_files={"train": path.name}, streaming=True
            )
        else:
            loaded = datasets.load_dataset(*source.split(":"))
        tables = {split: rows.with_format("arrow").iter(1000) for split, rows in loaded.items()}
        return {
            split: [row for table in parts for row in table.to_pylist()]
            for split, parts in tables.items()
        }
    except (
        OSError,
        ValueError,
        RuntimeError,
        StopIteration,
        datasets.exceptions.DatasetsError,
    ) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[
            :300
        ]  # StopIteration: of an empty file
        raise ValueError(
            f"--data is {source}, but `datasets` cannot read it (rows from 0): {reason}"
        ) from error
