"""Read questions with the library `datasets`: from a hub id, a file, or a folder of files.

Paper: appendix D names the tasks with data, not their files. Any source that has the fields of a
task will do.

    openai/gsm8k:main            a dataset of the hub, and after a colon its configuration
    questions.jsonl              one object per line; also .json (a list of objects), .csv, .parquet
    folder/                      train.* (or train-*.*), and validation.* or test.*,
                                 or an image folder of `datasets`

Without a validation split, `test` takes its place. If there is only one split, every tenth
different row is held out. Names of fields are compared without regard to case (AIME sets have
`Problem` or `problem`). Images stay encoded. A run leaves out the rows whose first turn is too long
for its model (freshper/backends.py), and says how many.
"""

import glob
import json
import lzma
import re
import tarfile
import textwrap
import zipfile
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import TextEnv, held_out


@cache
def load_rows(
    source: str, fields: tuple[str, ...], convert: Callable[[dict], Any]
) -> dict[str, list]:
    """Return `convert` of the `fields` of all rows, by split ("train" and "held_out"). The rows are
    shuffled, because files are often sorted by year or by difficulty.

    Raises ValueError with one sentence that names source, row and field, if there is no such
    source, a file cannot be read, a field is missing, empty or refused by `convert`, or the rows
    are too few."""
    splits = read_splits(source)
    of_held_out = "validation" if "validation" in splits else "test"
    if len(splits) > 1:
        splits = {split: splits.get(split, []) for split in ("train", of_held_out)}
    for split, rows in splits.items():
        for k, row in enumerate(rows):
            try:
                rows[k] = convert(select_fields(row, fields))
            except ValueError as error:
                raise ValueError(f"{source}, {split} row {k + 1}: {error}") from error

    if len(splits) == 1:
        parts = divide(*splits.values())
    else:
        parts = {"train": splits["train"], "held_out": splits[of_held_out]}

    if not all(parts.values()):
        counts = ", ".join(f"{len(rows)} in {split}" for split, rows in splits.items())
        raise ValueError(
            f"--data is {source}, with too few different rows to train and to hold out: {counts}"
        )
    for rows in parts.values():
        np.random.default_rng(0).shuffle(rows)
    return parts


class QuestionEnv(TextEnv):
    """The base of tasks whose questions come from `data`, or else are generated from the seed.

    Successive seeds go through all rows of their split before any row comes again.
    """

    settings: tuple[str, ...] = ("data",)
    fields: tuple[str, ...]  # of a row of data
    # It raises ValueError with a sentence about the field that cannot be used.
    from_row: Callable[[dict], Any]
    generate: Callable[[int], Any]  # the question of a seed

    def __init__(self, data: str = "", **common: Any):
        """Read the questions of `data`, if there is any. Raises ValueError if that fails."""
        super().__init__(**common)
        self.data = data
        if data:
            self.rows = load_rows(data, self.fields, self.from_row)

    def start(self, seed: int) -> None:
        rows = self.rows.get("held_out" if held_out(seed) else "train")
        self.question = rows[seed % len(rows)] if rows else self.generate(seed)


def select_fields(row: dict, fields: tuple[str, ...]) -> dict:
    """Return the fields of a row. Raises ValueError if one is missing or empty, a date, or has
    tokens."""
    values = {name.lower(): value for name, value in row.items() if name.lower() in fields}
    for name in fields:
        value = values.get(name)
        text = str(value)
        if value in (None, []) or not text.strip():
            raise ValueError(f"the field {name} is missing or empty, the row has {', '.join(row)}")
        # `datasets` makes dates of a JSON column in which every text looks like one.
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, date) for part in parts):
            allowed = "text: a Parquet file keeps it"
            raise ValueError(f"the field {name} is the date {text}, but must be {allowed}")
        # The bytes of an image may hold anything.
        if name != "image" and re.search(r"<\|\w+\|>", text):
            raise ValueError(f"the field {name} must not hold tokens such as <|im_end|>")
    return values


def divide(rows: list) -> dict[str, list]:
    """Divide the rows of a single split: every tenth different row is held out. Equal rows stay on
    one side. So do rows that show the same image."""
    parts: dict[str, list] = {"train": [], "held_out": []}
    numbers: dict[int, int] = {}  # by a hash, because rows may have large images
    for row in rows:
        shown = getattr(row, "image", None) or repr(row)
        number = numbers.setdefault(hash(shown), len(numbers))
        parts["train" if number % 10 else "held_out"].append(row)
    return parts


def rows_of(table: Any) -> list[dict]:
    """Return the rows of an Arrow table. `datasets` keeps a column of several types as JSON."""
    encoded = []
    for field in table.schema:
        if getattr(field.type, "extension_name", "") == "arrow.json":
            encoded.append(field.name)

    rows = table.to_pylist()
    for row in rows:
        row |= {name: json.loads(row[name]) for name in encoded if row[name] is not None}
    return rows


def read_splits(source: str) -> dict[str, list[dict]]:
    """Return all rows of a source by split. A lone file is the split "train". Raises ValueError if
    the source does not exist or `datasets` cannot read it."""
    path = Path(source).expanduser().absolute()
    names_a_file = path.suffix in (".json", ".jsonl", ".csv", ".parquet")
    if not path.exists() and (source.count("/") != 1 or names_a_file):
        raise ValueError(
            f"--data is {source}, but there is no such file or folder, "
            "and hub ids look like owner/name"
        )

    # The import takes a second, and generated questions do without.
    import datasets

    # Otherwise it logs what it also raises.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    splits = {}
    try:
        if path.exists():
            folder, files = path, None
            if path.is_file():
                folder, files = path.parent.resolve(), {"train": glob.escape(path.name)}
            # Streaming leaves no copy of a local file in the cache.
            loaded = datasets.load_dataset(str(folder), data_files=files, streaming=True)
        else:
            loaded = datasets.load_dataset(*source.split(":"))

        for split, rows in loaded.items():
            # Rows of Arrow tables hold images as encoded files.
            tables = rows.with_format("arrow").iter(1000)
            splits[split] = [row for table in tables for row in rows_of(table)]
    except (
        OSError,
        ValueError,
        RuntimeError,
        StopIteration,  # of an empty file
        datasets.exceptions.DatasetsError,
        zipfile.BadZipFile,
        tarfile.TarError,
        lzma.LZMAError,
        EOFError,  # of a truncated .gz
    ) as error:
        reason = textwrap.shorten(f"{type(error).__name__} {error}", 300)
        raise ValueError(
            f"--data is {source}, but `datasets` cannot read it (rows from 0): {reason}"
        ) from error
    return splits
