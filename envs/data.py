"""Read questions from a file, a folder of files or a data set of the hub.

Paper: appendix D names the tasks with data, not their files. Any source that has the fields of a
task will do.

    openai/gsm8k:main            a data set of the hub, and after a colon its configuration
    questions.jsonl              one object per line; also .csv and .parquet
    folder/                      train.* (or train-*.*), and validation.* or test.*

For example, with SmolLM2, which must have room for the longest row and for a reply:

    python train.py --env gsm8k --preset small --data openai/gsm8k:main --max_tokens 1024 \
        --max_new_tokens 256

Without a validation split, `test` takes its place. If there is neither, every tenth different
question is held out. A question of both splits is not trained on. Names of fields are compared
without regard to case (AIME sets have `Problem` or `problem`), unless a row has the exact name.
Images stay encoded.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from envs.base import TextEnv, UserError, held_out


def load_rows(source: str, from_row: Callable[[dict], Any]) -> dict[str, list]:
    """Return `from_row` of all rows, by split ("train" and "held_out"). The rows are shuffled,
    because files are often sorted by year or by difficulty.

    Raises UserError with one sentence that names source, row and field, if there is no such
    source, a file cannot be read, a field is refused by `from_row`, or the rows are too few."""
    try:
        path = Path(source)
        splits = read_files(path) if path.exists() else read_hub(source)
    # Their readers raise errors of a dozen libraries.
    except Exception as error:
        raise UserError(f"--data is {source}, which cannot be read: {error!r:.300}") from error

    if len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    kept = splits.get("validation") or splits.get("test", [])
    splits = {"train": splits.get("train", []), "held_out": kept}
    for split, rows in splits.items():
        for k, row in enumerate(rows):
            place = f"{source}, {split} row {k + 1}"
            # A line of JSON may be no object. In a CSV file, values beyond the header have the name
            # None.
            if not isinstance(row, dict) or None in row:
                raise UserError(f"{place} is {row!r:.80}, but each value must have a name")
            try:
                rows[k] = from_row({name.lower(): value for name, value in row.items()} | row)
            except UserError as error:
                raise UserError(f"{place}: {error}; it has {', '.join(row)}") from error

    train = splits["train"]
    tenth = list(dict.fromkeys(map(asked, train)))[::10]
    held_out = {*map(asked, kept)} or {*tenth}
    splits["held_out"] = kept or [row for row in train if asked(row) in held_out]
    splits["train"] = [row for row in train if asked(row) not in held_out]

    if not all(splits.values()):
        few = "no files of rows, or too few different rows to hold some out"
        raise UserError(f"--data is {source}, which has {few}")
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

    with open(path, encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            rows = csv.DictReader(file, strict=True)
            names = rows.fieldnames or ()
            if len({*names}) < len(names):
                raise ValueError("two columns have the same name")
            return list(rows)
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in file if line.strip()]
    raise ValueError("a file must be .jsonl, .csv or .parquet")


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
    # Of a row of data, its names in lower case, too. It raises UserError with a sentence about the
    # field that cannot be used.
    from_row: Callable[[dict], Any]
    generate: Callable[[int], Any]  # the question of a seed

    def __init__(self, data: str = "", rows: Mapping[str, list] | None = None, **common: Any):
        """Read the questions of `data`, if there is any, unless its `rows` are given. Raises
        UserError if that fails."""
        super().__init__(**common)
        self.data = data
        if data:
            self.rows = rows or load_rows(data, self.from_row)

    def start(self, seed: int) -> None:
        rows = self.rows.get("held_out" if held_out(seed) else "train")
        self.question = rows[seed % len(rows)] if rows else self.generate(seed)


def as_text(value: Any, name: str) -> str:
    """Return a text, or a number as a person writes it: 1969.0, which pandas makes of 1969 in a
    column with gaps, is 1969. Raises UserError for anything else, and for a text of spaces."""
    if type(value) is float and math.isfinite(value):
        return np.format_float_positional(value, trim="-")
    if type(value) not in (str, int) or not str(value).strip():
        raise UserError(f"the field {name} is {value!r:.80}, but must be a text or a number")
    return str(value)


def asked(question: Any) -> Any:
    """Return what a question asks: its image, or else its text, whatever the answer is. Spaces do
    not count."""
    return getattr(question, "image", None) or " ".join(question.text.split())
