"""Checkpoints that are either whole or absent: written aside, hashed, renamed into place, verified before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from dapo_components.training.distributed import all_gather, rank_and_world_size

MANIFEST = "manifest.json"
_PARTIAL, _REPLACED = ".partial", ".replaced"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written; the message names the file and what to do."""


class CheckpointStore:
    """Numbered checkpoint folders under one root.

    A checkpoint is first written to a hidden folder, its files are flushed to disk and hashed, and only then does it
    get its name by one rename. A crash at any moment leaves the earlier checkpoints as they were.

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
            CheckpointError: If ``write`` fails or the disk is full; earlier checkpoints are untouched.
        """
        final = self.root / f"step_{step:06d}"
        try:
            self._install(final, write)
        # A full disk is an OSError here, a RuntimeError in torch.save and an error of its own in safetensors.
        except Exception as error:
            kept = self.latest()
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.root} ({_free_space(self.root)}): "
                f"{type(error).__name__}: {error}; the newest whole checkpoint is {kept if kept else 'none'}"
            ) from error
        for old in self.list()[: -self.keep] if self.keep else []:
            old.rename(self.root / f".{old.name}{_PARTIAL}")
        self._clean()
        return final

    def list(self) -> list[Path]:
        """Return the finished checkpoints, oldest first."""
        found: dict[int, Path] = {}
        # A crash between the two renames of a repeated step leaves the former checkpoint under its hidden name.
        for path in [*self.root.glob(f".step_*{_REPLACED}"), *self.root.glob("step_*")]:
            step = path.name.removeprefix(".").removesuffix(_REPLACED).removeprefix("step_")
            if step.isdecimal() and (path / MANIFEST).exists():
                found[int(step)] = path
        return [found[step] for step in sorted(found)]

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
        fault = _first_fault(checkpoint)
        if fault:
            names = [path.name for path in self.list()]
            older = names[: names.index(checkpoint.name)] if checkpoint.name in names else []
            remedy = f"remove that folder to resume from {older[-1]}" if older else "there is no older one"
            raise CheckpointError(f"{fault}; {remedy}")

    def _install(self, final: Path, write: Callable[[Path], object]) -> None:
        partial = self.root / f".{final.name}{_PARTIAL}"
        self._clean()
        try:
            partial.mkdir(parents=True)
            write(partial)
            _write_manifest(partial)
            if final.exists():
                final.rename(self.root / f".{final.name}{_REPLACED}")
            partial.rename(final)
            _flush(self.root)
        finally:
            self._clean()

    def _clean(self) -> None:
        """Remove what an interrupted :meth:`save` left, and give a set-aside checkpoint its name back."""
        for path in self.root.glob(f".step_*{_REPLACED}"):
            final = self.root / path.name.removeprefix(".").removesuffix(_REPLACED)
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(final)
        for path in self.root.glob(f".step_*{_PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)


def _write_manifest(folder: Path) -> None:
    """Flush and hash everything in a folder, and list it in the manifest."""
    paths = sorted(folder.rglob("*"))
    manifest = {str(path.relative_to(folder)): _describe(path, flush=True) for path in paths if path.is_file()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [folder / MANIFEST, *(path for path in paths if path.is_dir()), folder]:
        _flush(path)


def _first_fault(checkpoint: Path) -> str | None:
    """Compare a checkpoint with its manifest and say what differs first."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        entries = [(checkpoint / name, expected["bytes"], expected["sha256"]) for name, expected in manifest.items()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{checkpoint / MANIFEST} is damaged (it is not a list of files)"
    for path, size, digest in entries:
        if not path.exists():
            return f"{path} is missing"
        found = _describe(path)
        if found["bytes"] != size:
            return f"{path} is damaged ({found['bytes']} of {size} bytes)"
        if found["sha256"] != digest:
            return f"{path} is damaged (its content changed since it was written)"
    return None


def _free_space(folder: Path) -> str:
    existing = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    return f"{shutil.disk_usage(existing).free / 1024**3:.2f} GiB free"


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


def save_on_all_ranks(store: CheckpointStore, step: int, write: Callable[[Path], object]) -> None:
    """Save from rank 0 while the others wait until the checkpoint is whole. A collective.

    Args:
        store: Same folder on every rank.
        step: Number of the checkpoint.
        write: Fills the folder it is given; called on rank 0 only.

    Raises:
        CheckpointError: On every rank, if rank 0 cannot write it.

    Example:
        >>> import tempfile
        >>> store = CheckpointStore(tempfile.mkdtemp())
        >>> save_on_all_ranks(store, 3, lambda folder: (folder / "state.txt").write_text("a"))
        >>> store.latest().name
        'step_000003'
    """
    failure = ""
    if rank_and_world_size()[0] == 0:
        try:
            store.save(step, write)
        except CheckpointError as error:
            failure = str(error)
    if any(failures := all_gather(failure)):
        raise CheckpointError(failures[0])
