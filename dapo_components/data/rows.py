"""Reading rows of a prompt data set: JSONL, Parquet, and Hugging Face datasets, each row with where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo_components.data.names import nearest_name

_SHOWN = 80


@dataclass(frozen=True)
class Row:
    """One row as read.

    Args:
        location: File and line (or row), counted from 1, for error messages.
        fields: What the row holds; empty if it could not be read.
        problem: Why it could not be read, ``None`` if it could.
    """

    location: str
    fields: dict[str, Any]
    problem: str | None = None


def read_rows(source: str | Path, *, split: str = "train") -> Iterator[Row]:
    """Yield the rows of a data set in order.

    Args:
        source: A ``.jsonl`` or ``.parquet`` file, a folder written by ``Dataset.save_to_disk``, a folder of data files,
            or the name of a data set on the Hugging Face hub (``"owner/name"``, ``"owner/name:config"``).
        split: Split of a Hugging Face data set; files have none.

    Raises:
        ValueError: If the file does not exist, or the data set has no such split.
        ImportError: If the package that reads the format is not installed.
    """
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".parquet"):
        if not path.is_file():
            siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            raise ValueError(
                f"source file {str(source)!r} does not exist; "
                f"in {str(path.parent)!r} {nearest_name(path.name, siblings)}"
            )
        return _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)
    if path.is_file():
        raise ValueError(f"source file {str(source)!r} must end in .jsonl or .parquet")
    name = str(source)
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not name or not (path.is_dir() or is_hub_name):
        raise ValueError(
            f"source {str(source)!r} must be an existing .jsonl or .parquet file or folder, or a data set's name "
            "on the hub of the form 'owner/name'"
        )
    return _hugging_face_rows(str(source), path, split)


def field_value(fields: dict[str, Any], name: str) -> Any:
    """Return ``fields[name]``; a dotted name that is no key itself walks nested fields (``reward_model.ground_truth``).

    Raises:
        KeyError: If there is no such field; the message names the nearest one.

    Example:
        >>> field_value({"reward_model": {"ground_truth": "34"}}, "reward_model.ground_truth")
        '34'
    """
    if name in fields:
        return fields[name]
    found: Any = fields
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            inside = found if isinstance(found, dict) else {}
            raise KeyError(f"no column {name!r}; {nearest_name(part, inside)}")
        found = found[part]
    return found


def shown(value: object) -> str:
    """Return ``value`` for an error message, shortened."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_row(f"{path}:{number}", line)


def _json_row(location: str, line: bytes) -> Row:
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return Row(location, {}, f"expected UTF-8 text, found the byte {line[error.start]:#04x} at byte {error.start}")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:  # also an integer of more digits than Python converts
        reason = str(getattr(error, "msg", error)) if isinstance(error, ValueError) else "nested too deeply"
        return Row(location, {}, f"expected one JSON object a line ({reason}), found {shown(text)}")
    if not isinstance(fields, dict):
        return Row(location, {}, f"expected a JSON object, found {shown(text)}")
    return Row(location, fields)


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"reading {str(path)!r} needs pyarrow: pip install pyarrow, or convert the file to JSONL"
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"source file {str(path)!r} must be a Parquet file: {error}") from error
    return _parquet_batches(path, file)


def _parquet_batches(path: Path, file: Any) -> Iterator[Row]:
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=1024):
            for fields in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", fields)


def _hugging_face_rows(source: str, path: Path, split: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"reading {source!r} needs the Hugging Face package datasets: pip install datasets, or use JSONL"
        ) from error
    if path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        loaded = datasets.load_from_disk(str(path))
    else:
        name, _, config = source.partition(":")
        try:
            loaded = datasets.load_dataset(str(path) if path.is_dir() else name, config or None)
        # Network, format and permission errors come as many types; each means the same to the user.
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"cannot load the data set {source!r}: {reason}") from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise ValueError(f"data set {source!r} has no split {split!r}; {nearest_name(split, map(str, loaded))}")
        loaded = loaded[split]
    return (Row(f"{source}[{split}], row {number}", dict(fields)) for number, fields in enumerate(loaded, start=1))
