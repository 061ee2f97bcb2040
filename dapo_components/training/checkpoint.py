"""Checkpoints that are either whole or absent: written aside, hashed, renamed into place, verified before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message names the file and what to do."""


class CheckpointStore:
    """Numbered checkpoint folders under one root.

    A checkpoint is first written to a hidden folder, its files are flushed to disk and hashed, and only then does it get
    its name by one rename. A crash at any moment leaves the earlier checkpoints as they were.

    Args:
        root: Folder of the checkpoints; made when the first is saved.
        keep: How many to keep; older ones are removed after a newer one is safe. 0 keeps all.

    Raises:
        ValueError: If ``keep`` is negative.

    Example:
        >>> import tempfile
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()) / "checkpoints", keep=1)
        >>> _ = store.save(1, lambda folder: (folder / "state.txt").write_text("a"))
        >>> _ = store.save(2, lambda folder: (folder / "state.txt").write_text("b"))
        >>> [path.name for path in store.list()], (store.latest() / "state.txt").read_text()
        (['step_000002'], 'b')
    """

    def __init__(self, root: str | Path, *, keep: int = 2) -> None:
        if keep < 0:
            raise ValueError(f"keep must be >= 0 (0 keeps all checkpoints), got {keep}")
        self.root = Path(root)
        self.keep = keep

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Save one checkpoint.

        Args:
            step: Its number.
            write: Fills the folder it is given.

        Returns:
            The finished folder.

        Raises:
            CheckpointError: If the disk is full or not writable; earlier checkpoints are untouched.
        """
        final = self.root / f"step_{step:06d}"
        partial = self.root / f".{final.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write(partial)
            manifest = {str(path.relative_to(partial)): _describe(path, flush=True) for path in _files(partial)}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            _flush(partial / MANIFEST)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _flush(self.root)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            kept = self.latest()
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.root}: {error}; "
                f"the newest whole checkpoint is {kept if kept else 'none'}"
            ) from error
        for old in self.list()[: -self.keep] if self.keep else []:
            shutil.rmtree(old)
        return final

    def list(self) -> list[Path]:
        """Return the finished checkpoints, oldest first."""
        return sorted(path for path in self.root.glob("step_*") if (path / MANIFEST).exists())

    def latest(self) -> Path | None:
        """Return the newest finished checkpoint, or None."""
        found = self.list()
        return found[-1] if found else None

    def verify(self, checkpoint: Path) -> None:
        """Compare every file with the manifest.

        Raises:
            CheckpointError: If a file is missing, truncated or altered; the message names it and the next older
                checkpoint.
        """
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        for name, expected in manifest.items():
            path = checkpoint / name
            found = _describe(path) if path.exists() else None
            if found != expected:
                older = [path for path in self.list() if path.name < checkpoint.name]
                remedy = f"remove that folder to resume from {older[-1].name}" if older else "there is no older one"
                what = "is missing" if found is None else f"is damaged ({found['bytes']} of {expected['bytes']} bytes)"
                if found is not None and found["bytes"] == expected["bytes"]:
                    what = "is damaged (its content changed since it was written)"
                raise CheckpointError(f"{path} {what}; {remedy}")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _describe(path: Path, *, flush: bool = False) -> dict[str, int | str]:
    if flush:
        _flush(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
