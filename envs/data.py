"""Read questions from a file, a folder of files or a data set of the hub.

Paper: appendix D names the tasks with data, not their files. Any source that has the fields of a
task will do.

    openai/gsm8k:main            a data set of the hub, and after a colon its configuration
    questions.jsonl              one object per line; also .csv and .parquet
    folder/                      train.* (or train-*.*), and validation.* or test.*

Without a validation split, `test` takes its place. If there is only one split, every tenth
different question is held out. A question of both splits is not trained on. Names of fields are
compared without regard to case (AIME sets have `Problem` or `problem`). Images stay encoded.
"""

import csv
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import TextEnv, held_out


def load_rows(source: str, from_row: Callable[[dict], Any]) -> dict[str, list]:
    """Return `from_row` of all rows, by split ("train" and "held_out"). The rows are shuffled,
    because files are often sorted by year or by difficulty.

    Raises ValueError with one sentence that names source, row and field, if there is no such
    source, a file cannot be read, a field is refused by `from_row`, or the rows are too few."""
    try:
        path = Path(source).expanduser()
        splits = read_files(path) if path.exists() else read_hub(source)
    # Their readers raise errors of a dozen libraries.
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__} {error}", 300)
        raise ValueError(f"--data is {source}, which cannot be read: {reason}") from error

    if len(splits) > 1:
        held_out_rows = splits.get("validation") or splits.get("test", [])
        splits = {"train": splits.get("train", []), "held_out": held_out_rows}
    for split, rows in splits.items():
        for k, row in enumerate(rows):
            try:
                rows[k] = from_row({name.lower(): value for name, value in row.items()})
            # A row of JSON may be no object, which has no `items`. In a CSV file, fields beyond the
            # header have the name None.
            except (AttributeError, ValueError) as error:
                raise ValueError(f"{source}, {split} row {k + 1}: {error}") from error

    if len(splits) < 2:
        rows = next(iter(splits.values()), [])
        held_out = {*list(dict.fromkeys(map(asked, rows)))[::10]}
        splits = {"train": rows, "held_out": [row for row in rows if asked(row) in held_out]}
    held_out = {asked(row) for row in splits["held_out"]}
    splits["train"] = [row for row in splits["train"] if asked(row) not in held_out]

    if not all(splits.values()):
        raise ValueError(f"--data is {source}, which has too few different rows to hold some out")
    for rows in splits.values():
        np.random.default_rng(0).shuffle(rows)
    return splits


def read_files(path: Path) -> dict[str, list]:
    """Return the rows of a file, as the split "train", or those of a folder by split."""
    if path.is_file():
        return {"train": read_file(path)}
    splits: dict[str, list] = {}
    for file in sorted(path.iterdir()):
        split = re.match("(train|validation|test)[-.]", file.name)
        # Not those of a backup: train.jsonl.bak
        if split and file.suffix in (".jsonl", ".csv", ".parquet"):
            splits.setdefault(split[1], []).extend(read_file(file))
    return splits


def read_file(path: Path) -> list:
    """Return the rows of a file."""
    if path.suffix == ".parquet":
        # Generated questions do without.
        from pyarrow import parquet

        return parquet.read_table(path).to_pylist()
    if path.suffix == ".csv":
        with open(path, encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file, strict=True))
    if path.suffix != ".jsonl":
        raise ValueError("a file must be .jsonl, .csv or .parquet")
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def read_hub(source: str) -> dict[str, list]:
    """Return the rows of a data set of the hub by split."""
    name, *configuration = source.split(":")
    # `datasets` would take the name of a folder for a pattern.
    if name.count("/") != 1 or Path(name).exists():
        raise ValueError("there is no such file or folder of files, nor is it a hub's owner/name")

    # The import takes a second, and files and generated questions do without.
    import datasets

    loaded = datasets.load_dataset(name, *configuration)
    # So images stay encoded files.
    return {split: rows.with_format("arrow")[:].to_pylist() for split, rows in loaded.items()}


class QuestionEnv(TextEnv):
    """The base of tasks whose questions come from `data`, or else are generated from the seed.

    Successive seeds go through all rows of their split before any row comes again.
    """

    settings: tuple[str, ...] = ("data",)
    # Of a row of data, its names in lower case. It raises ValueError with a sentence about the
    # field that cannot be used.
    from_row: Callable[[dict], Any]
    generate: Callable[[int], Any]  # the question of a seed

    def __init__(self, data: str = "", rows: Mapping[str, list] | None = None, **common: Any):
        """Read the questions of `data`, if there is any, unless its `rows` are given. Raises
        ValueError if that fails."""
        super().__init__(**common)
        self.data = data
        if data:
            self.rows = rows or load_rows(data, self.from_row)

    def start(self, seed: int) -> None:
        rows = self.rows.get("held_out" if held_out(seed) else "train")
        self.question = rows[seed % len(rows)] if rows else self.generate(seed)


def field_of(row: dict, name: str) -> Any:
    """Return a field of a row. Raises ValueError if it is missing or empty."""
    value = row.get(name)
    if value in (None, "", []):
        raise ValueError(f"the field {name} is missing or empty, the row has {', '.join(row)}")
    return value


def text_of(row: dict, name: str) -> str:
    """Return a field of a row as text. Raises ValueError if it is missing, or no text."""
    return as_text(field_of(row, name), name)


def as_text(value: Any, name: str) -> str:
    """Return a text, or a number as a person writes it: 1969.0, which pandas makes of 1969 in a
    column with gaps, is 1969. Raises ValueError for anything else."""
    if type(value) is float and math.isfinite(value):
        return np.format_float_positional(value, trim="-")
    if type(value) not in (str, int) or not str(value).strip():
        raise ValueError(f"the field {name} is {value!r:.80}, but must be a text or a number")
    return str(value)


def asked(row: Any) -> Any:
    """Return what a row asks: its image, or else its text, whatever the answer is. Spaces do not
    count."""
    text = getattr(row, "text", repr(row))
    return getattr(row, "image", None) or " ".join(text.split())
