"""JSON Lines files that survive a crash: half a last line is cut off, a resumed run overwrites what it repeats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

_CHUNK = 1 << 16


@final
class StepFile:
    """Append rows that carry a ``step``.

    Args:
        path: The file; its folder is created.
        resume_step: Steps that the resumed run has behind it: rows of later steps, left by the part of the run that is
            now repeated, are dropped. ``None`` keeps all rows.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.num_repaired = _cut(self.path, _end_of_last_line(self.path)) if self.path.exists() else 0
        self.num_dropped = 0
        if resume_step is not None and self.path.exists():
            self.num_dropped = _drop_after(self.path, resume_step)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows in one call, so that a crash leaves at most one of them incomplete.

        Raises:
            OSError: If they cannot be written (a full disk, say); the message names the file.
        """
        text = "".join(to_json(row) + "\n" for row in rows)
        try:
            with self.path.open("ab") as file:
                # A lone surrogate cannot be UTF-8; as the escape it is valid JSON and reads back the same.
                file.write(text.encode("utf-8", errors="backslashreplace"))
        except OSError as error:
            raise OSError(error.errno, f"cannot write {self.path}: {error.strerror}") from error


def to_json(row: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinities, which JSON does not have, become null.

    Example:
        >>> to_json({"step": 1, "loss": float("nan")})
        '{"step": 1, "loss": null}'
    """
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; a last line without its end is the mark of a crash and left out.

    Raises:
        ValueError: If the file does not exist or another line is not a JSON object; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"path must be an existing JSON Lines file, got {str(path)!r}")
    return _rows(path)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            yield _parse(path, number, line)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}:{number}: expected one JSON object a line, found {line[:80]!r} ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}:{number}: expected a JSON object, found {line[:80]!r}")
    return row


def _plain(value: Any) -> Any:
    """Turn tensors and NumPy numbers into plain ones, and what is not finite into None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_of_last_line(path: Path) -> int:
    """Return the size of the file without an incomplete last line."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        while end > 0:
            start = max(0, end - _CHUNK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _cut(path: Path, size: int) -> int:
    """Shorten the file to ``size`` bytes and return how many went."""
    removed = path.stat().st_size - size
    if removed:
        with path.open("r+b") as file:
            file.truncate(size)
    return removed


def _drop_after(path: Path, resume_step: int) -> int:
    """Drop the rows from the first one on whose step is beyond ``resume_step``; steps never decrease in a file."""
    keep, dropped = 0, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            step = _parse(path, number, line).get("step")
            if dropped or (isinstance(step, int) and step > resume_step):
                dropped += 1
            else:
                keep += len(line)
    _cut(path, keep)
    return dropped
