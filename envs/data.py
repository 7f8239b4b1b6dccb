"""Questions from a dataset: a hub id, a file, or a folder of files, as a list of rows that has been checked.

Paper: appendix D names the tasks with data (NQ, GSM8K, AIME, GeoQA), not their files; any source with the fields
a task asks for will do.

    openai/gsm8k:main            a dataset of the hub, and after a colon its configuration; read by `datasets`
    questions.jsonl              one object a line; .json: a list of objects; .parquet
    folder/                      train.* (or train-*.*), and validation.* or test.*, of these endings

Where there is no validation split, `test` takes its place; where there is one split only, every tenth different
row of it is for validation. Names of fields are compared without regard to case (AIME sets have `Problem` and
`problem`). Pictures stay encoded, as {"bytes": ..., "path": ...}, so that thousands of them fit into memory.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ENDINGS = (".json", ".jsonl", ".parquet")
VALIDATION_SHARE = 10  # one row in this many, where a source has one split only

Splits = dict[str, list[tuple[str, str, dict]]]  # split: [(where it stands, folder, row)]


@cache
def load_rows(source: str, split: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of `split` ("train" or "validation"), each with `fields` and nothing else but `where`, which says for
    error messages where it stands, and `folder`, to which a path in it may refer. Read once; every caller gets the
    same list, which nobody changes.

    Raises ValueError with one sentence that names source, row and field: no such source, an unknown ending, an
    unreadable row, a field that is missing or empty, too few rows.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split}, but must be train or validation")
    return _splits(source, fields)[split]


@cache
def _splits(source: str, fields: tuple[str, ...]) -> dict[str, list[dict]]:
    path = Path(source).expanduser()
    if path.is_dir():
        splits = _read_folder(path)
    elif path.is_file():
        splits = {"all": _read_file(path)}
    elif re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source) and path.suffix not in ENDINGS:
        splits = read_hub(*source.split(":"))
    else:
        raise ValueError(f"--data is {source}, but there is no such file or folder, and hub ids look like owner/name")
    checked = {name: [_checked(*row, fields) for row in rows] for name, rows in splits.items()}
    for name, rows in checked.items():
        if not rows:
            raise ValueError(f"--data is {source}, but its split {name} has no rows")
    validation = checked.get("validation", checked.get("test"))
    if "train" in checked and validation:
        return {"train": checked["train"], "validation": validation}
    if len(checked) != 1:
        raise ValueError(f"--data is {source}, with splits {', '.join(checked)}, but train and validation or test")
    (rows,) = checked.values()
    return _divide(source, rows, fields)


def _divide(source: str, rows: list[dict], fields: tuple[str, ...]) -> dict[str, list[dict]]:
    """Every tenth row for validation; rows with equal fields go together, so that the two parts share none."""
    number: dict[bytes, int] = {}
    parts: dict[str, list[dict]] = {"train": [], "validation": []}
    for row in rows:
        digest = hashlib.sha256(repr([row[name] for name in fields]).encode("utf-8", "surrogatepass")).digest()
        same = number.setdefault(digest, len(number))
        parts["train" if same % VALIDATION_SHARE else "validation"].append(row)
    if not parts["train"]:
        raise ValueError(f"--data is {source}, but needs at least two different rows, to divide them")
    return parts


def _checked(where: str, folder: str, row: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object with the fields {', '.join(fields)}")
    lower = {str(name).lower(): value for name, value in row.items()}
    found: dict[str, Any] = {"where": where, "folder": folder}
    for name in fields:
        value = row.get(name, lower.get(name.lower()))
        if value is None or value == [] or (isinstance(value, str) and not value.strip()):
            missing = "is empty" if name.lower() in lower else f"is missing among {', '.join(map(str, row))}"
            raise ValueError(f"{where}: the field {name} {missing}")
        found[name] = value
    return found


# -- sources -------------------------------------------------------------------------------------------------


def _read_folder(folder: Path) -> Splits:
    splits: Splits = {}
    for name in ("train", "validation", "test"):
        files = sorted(p for p in folder.iterdir() if re.match(rf"{name}[.-]", p.name) and p.suffix in ENDINGS)
        if files:
            splits[name] = [row for file in files for row in _read_file(file)]
    if not splits:
        raise ValueError(f"--data is {folder}, but must hold train.* and validation.* or test.*: {', '.join(ENDINGS)}")
    return splits


def _read_file(file: Path) -> list[tuple[str, str, dict]]:
    readers = {".json": _json, ".jsonl": _json_lines, ".parquet": _parquet}
    if file.suffix not in readers:
        raise ValueError(f"--data is {file}, but must end in one of {', '.join(ENDINGS)}")
    rows = [(f"{file}, row {n}", str(file.parent), row) for n, row in readers[file.suffix](file)]
    if not rows:
        raise ValueError(f"{file} has no rows")
    return rows


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _json(file: Path) -> Iterator[tuple[int, dict]]:
    text = _text(file)
    try:
        rows = json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{file} must be a list of objects, but is a {type(rows).__name__}")
    yield from enumerate(rows, 1)


def _json_lines(file: Path) -> Iterator[tuple[int, dict]]:
    for n, line in enumerate(_text(file).split("\n"), 1):  # not splitlines: U+2028 may stand inside a string
        if line.strip():
            try:
                yield n, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}, row {n} is not JSON: {error}") from error


def _parquet(file: Path) -> Iterator[tuple[int, dict]]:
    import pyarrow.parquet  # here, so that the generated questions do without

    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own are among these
        raise ValueError(f"{file} is not parquet: {str(error).splitlines()[0]}") from error
    yield from enumerate(rows, 1)


def read_hub(name: str, config: str | None = None) -> Splits:
    """All splits of a dataset of the hub (or of a folder in its layout). Needs a connection, or a filled cache."""
    import datasets

    try:
        loaded = datasets.load_dataset(name, config)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--data is {name}, but could not be loaded from the hub: {reason}") from error
    splits: Splits = {}
    for split, rows in loaded.items():
        for column, feature in rows.features.items():
            if isinstance(feature, datasets.Image):
                rows = rows.cast_column(column, datasets.Image(decode=False))
        splits[split] = [(f"{name}, {split} row {n}", name, row) for n, row in enumerate(rows, 1)]
    return splits


@cache
def order(n: int) -> np.ndarray:
    """A fixed shuffle of n rows, int64 [n]: files are often sorted by year or by difficulty."""
    return np.random.default_rng(0).permutation(n)


def row_for(rows: list[Any], seed: int) -> Any:
    """The row of this seed: successive seeds go through all rows, in shuffled order, before any comes again."""
    return rows[order(len(rows))[seed % len(rows)]]
