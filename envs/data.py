"""Read questions with the library `datasets`: from a hub id, a file, or a folder of files.

Paper: appendix D names the tasks with data (NQ, GSM8K, AIME, GeoQA), not their files. Any source that has the fields
of a task will do.

    openai/gsm8k:main            a dataset of the hub, and after a colon its configuration
    questions.jsonl              one object per line; also .json (a list of objects) and .parquet
    folder/                      train.* (or train-*.*), and validation.* or test.*, with one of these endings

Without a validation split, `test` takes its place. If there is only one split, every tenth different row is held out.
Names of fields are compared without regard to case (AIME sets have `Problem` or `problem`). Images stay encoded, as
{"bytes": ..., "path": ...}, so that thousands of them fit into memory.
"""

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
HELD_OUT_SHARE = 10  # one row in this many, if a source has one split only

Rows = list[dict[str, Any]]


def load_rows(source: str, split: str, fields: tuple[str, ...]) -> Rows:
    """Return the rows of `split` ("train" or "validation"): dicts of `fields`, `where` and `folder`.

    `where` names file and row for error messages, and paths in a row are relative to `folder`. All callers share the
    list. Raises ValueError with one sentence that names source, row and field: no such source, an unknown ending, an
    unreadable file, a field that is missing or empty, too few rows.
    """
    return _splits(source, fields)[split]


def row_for(rows: list[Any], seed: int) -> Any:
    """Return the row of a seed: successive seeds go through all rows, in shuffled order, before any comes again."""
    return rows[_order(len(rows))[seed % len(rows)]]


def data_summary(source: str, fields: tuple[str, ...]) -> str:
    """Return a sentence that counts the rows for training and those held out, or "" without a source."""
    counts = {split: len(rows) for split, rows in _splits(source, fields).items()} if source else {}
    return f"{source}: {counts['train']} rows for training, {counts['validation']} held out" if source else ""


@cache
def _order(n: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(n)  # files are often sorted by year or by difficulty


@cache
def _splits(source: str, fields: tuple[str, ...]) -> dict[str, Rows]:
    splits = {name: [_checked(row, fields) for row in rows] for name, rows in _load(source).items()}
    for name, rows in splits.items():
        if not rows:
            raise ValueError(f"--data is {source}, but its split {name} has no rows")
    held_out = splits.get("validation", splits.get("test"))
    if "train" in splits and held_out:
        return {"train": splits["train"], "validation": held_out}
    if len(splits) != 1:
        raise ValueError(f"--data is {source}, with splits {', '.join(splits)}, but train and validation or test")
    numbers: dict[bytes, int] = {}  # of the different rows: equal ones stay on one side
    parts: dict[str, Rows] = {"train": [], "validation": []}
    for row in next(iter(splits.values())):
        content = repr([row[name] for name in fields]).encode("utf-8", "surrogatepass")
        number = numbers.setdefault(hashlib.sha256(content).digest(), len(numbers))
        parts["train" if number % HELD_OUT_SHARE else "validation"].append(row)
    if not parts["train"]:
        raise ValueError(f"--data is {source}, but needs at least two different rows, to divide them")
    return parts


def _checked(row: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the named fields of a row. Raises ValueError if one is missing or empty."""
    lower = {name.lower(): value for name, value in row.items()} | row
    for name in fields:
        value = lower.get(name, lower.get(name.lower()))
        if value is None or value == [] or (isinstance(value, str) and not value.strip()):
            others = ", ".join(other for other in row if other not in ("where", "folder"))
            problem = "is empty" if name.lower() in lower else f"is missing among {others}"
            raise ValueError(f"{row['where']}: the field {name} {problem}")
        lower[name] = value
    return {name: lower[name] for name in ("where", "folder", *fields)}


def _load(source: str) -> dict[str, Rows]:
    """Return all rows of a source by split, with `where` and `folder`. A lone file is the split `train`."""
    path = Path(source).expanduser()
    if path.is_file() and (path.suffix not in KINDS or not path.stat().st_size):
        raise ValueError(f"--data is {source}, but a file must not be empty and must end in {', '.join(KINDS)}")
    if not path.exists() and (path.suffix in KINDS or not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source)):
        raise ValueError(f"--data is {source}, but there is no such file or folder, and hub ids look like owner/name")
    import datasets  # here, because it takes a second and generated questions do without

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it also raises
    splits: dict[str, Rows] = {}
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
                    rows = rows.cast_column(column, datasets.Image(decode=False))
            where = f"{source}, row" if path.is_file() else f"{source}, {split} row"
            folder = str(path if path.is_dir() else path.parent)
            splits[split] = [row | {"where": f"{where} {n}", "folder": folder} for n, row in enumerate(rows, 1)]
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # pyarrow's are ValueErrors
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--data is {source}, but `datasets` cannot read it (rows from 0): {reason}") from error
    return splits
