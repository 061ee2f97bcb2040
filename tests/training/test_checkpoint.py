"""Whatever happens while a checkpoint is written, the newest one on disk is whole."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dapo_components.training import checkpoint
from dapo_components.training.checkpoint import CheckpointError, CheckpointStore, save_on_all_ranks


def writes(text: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(text * 100)
        (folder / "state.pt").write_text(text)

    return write


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (1, 2):
        store.save(step, writes(f"step {step}"))
    return store


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def content(path: Path | None) -> str:
    assert path is not None
    return (path / "state.pt").read_text()


class TestSave:
    def test_checkpoints_are_numbered_folders_with_a_manifest(self, store):
        latest = store.latest()
        assert latest == store.root / "step_000002"
        assert sorted(str(path.relative_to(latest)) for path in latest.rglob("*")) == [
            "manifest.json",
            "model",
            "model/weights.bin",
            "state.pt",
        ]
        store.verify(latest)

    def test_nothing_saved_yet(self, tmp_path):
        store = CheckpointStore(tmp_path / "none")
        assert store.list() == []
        assert store.latest() is None

    @pytest.mark.parametrize(("keep", "kept"), [(1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4]), (0, [1, 2, 3, 4])])
    def test_keeps_the_newest(self, tmp_path, keep, kept):
        store = CheckpointStore(tmp_path, keep=keep)
        for step in range(1, 5):
            assert store.save(step, writes(str(step))) == tmp_path / f"step_{step:06d}"
        assert names(store) == [f"step_{step:06d}" for step in kept]

    def test_a_repeated_step_replaces_the_former_one(self, store):
        store.save(2, writes("again"))
        assert content(store.latest()) == "again"
        assert names(store) == ["step_000001", "step_000002"]

    def test_steps_are_ordered_as_numbers(self, store):
        store.save(1_000_000, writes("late"))
        store.save(999_999, writes("before"))
        assert [path.name for path in store.list()] == ["step_000002", "step_999999", "step_1000000"]

    def test_other_folders_are_left_alone(self, store):
        (store.root / "step_best").mkdir()
        (store.root / "step_best" / "manifest.json").write_text("{}")
        store.save(3, writes("c"))
        assert [path.name for path in store.list()] == ["step_000001", "step_000002", "step_000003"]
        assert (store.root / "step_best").exists()

    def test_negative_keep_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"keep must be >= 0 .*, got -1"):
            CheckpointStore(tmp_path, keep=-1)


class TestFailedWrite:
    @pytest.mark.parametrize(
        "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 576 vs 534")]
    )
    def test_earlier_checkpoints_stay_and_are_named(self, store, error):
        def write(folder: Path) -> None:
            (folder / "state.pt").write_text("half")
            raise error

        with pytest.raises(CheckpointError) as caught:
            store.save(3, write)
        assert f"checkpoint of step 3 could not be written to {store.root} (" in str(caught.value)
        assert f"{type(error).__name__}: {error}" in str(caught.value)
        assert str(caught.value).endswith(f"the newest whole checkpoint is {store.root / 'step_000002'}")
        assert names(store) == ["step_000001", "step_000002"]
        store.verify(store.root / "step_000002")

    def test_a_failed_repetition_keeps_the_former_one(self, store, monkeypatch):
        rename = Path.rename

        def fails_to_appear(path: Path, target: Path) -> Path:
            if path.name.endswith(".partial"):
                raise OSError(errno.EIO, "Input/output error")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", fails_to_appear)
        with pytest.raises(CheckpointError, match=r"newest whole checkpoint is .*/step_000002$"):
            store.save(2, writes("again"))
        assert content(store.latest()) == "step 2"
        assert names(store) == ["step_000001", "step_000002"]

    def test_ctrl_c_leaves_nothing_behind(self, store):
        def write(folder: Path) -> None:
            (folder / "state.pt").write_text("half")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.save(3, write)
        assert names(store) == ["step_000001", "step_000002"]

    @pytest.mark.parametrize("kind", ["torch", "safetensors", "python"])
    def test_a_real_write_error_of_each_writer(self, store, kind):
        """A limit on file sizes stands for the full disk; torch and safetensors do not raise OSError then."""
        tensor = torch.zeros(100_000)

        def write(folder: Path) -> None:
            if kind == "torch":
                torch.save(tensor, folder / "state.pt")
            elif kind == "safetensors":
                save_file({"weight": tensor}, folder / "model.safetensors")
            else:
                (folder / "state.pt").write_bytes(bytes(400_000))

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(CheckpointError, match="checkpoint of step 3 could not be written"):
                store.save(3, write)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names(store) == ["step_000001", "step_000002"]
        store.save(3, write)
        store.verify(store.root / "step_000003")

    def test_a_root_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(CheckpointError, match="the newest whole checkpoint is none"):
            CheckpointStore(tmp_path / "file" / "checkpoints").save(1, writes("a"))


CHILD = """
import importlib.util, os, shutil, signal, sys, types
from pathlib import Path

# Importing torch dozens of times would take minutes, and CheckpointStore does not use it.
sys.modules["dapo_components.training.distributed"] = stub = types.ModuleType("distributed")
stub.all_gather = stub.rank_and_world_size = None

source, root, fatal = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
spec = importlib.util.spec_from_file_location("checkpoint", source)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
events = 0

def counted(function):
    def call(*arguments, **options):
        global events
        events += 1
        if events == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

def write(folder):
    with (folder / "state.pt").open("w") as file:
        file.write("ne")
        file.flush()
        os.fsync(file.fileno())
        file.write("w")

os.fsync = counted(lambda descriptor: None)
shutil.rmtree, os.rmdir, os.unlink = map(counted, (shutil.rmtree, os.rmdir, os.unlink))
Path.rename = counted(Path.rename)
module.CheckpointStore(root, keep=1).save(3, write)
"""


def test_killed_at_any_point_the_latest_checkpoint_is_whole(tmp_path, monkeypatch):
    """SIGKILL before each flush, rename and removal of a save that replaces the only checkpoint."""
    # What a killed process wrote is not lost; flushing would only cost time.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    outcomes = []
    for fatal in range(1, 100):
        store = CheckpointStore(tmp_path / str(fatal), keep=1)
        store.save(3, writes("old"))
        child = subprocess.run([sys.executable, "-c", CHILD, checkpoint.__file__, store.root, str(fatal)], check=False)
        assert child.returncode in (0, -signal.SIGKILL)
        latest = store.latest()
        assert latest is not None
        store.verify(latest)
        outcomes.append(content(latest))
        assert outcomes[-1] in ("old", "new")
        store.save(4, writes("next"))
        assert names(store) == ["step_000004"]
        if child.returncode == 0:
            break
    assert child.returncode == 0
    # Some points lie before the new one is in place and some after it, and it never goes back.
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes.count("old") >= 4
    assert outcomes.count("new") >= 3


class TestSaveOnAllRanks:
    """In one process; several ranks are in tests/distributed/test_ranks.py."""

    def test_it_saves(self, store):
        save_on_all_ranks(store, 3, writes("c"))
        assert content(store.latest()) == "c"

    def test_a_failed_write_raises_as_it_does_alone(self, store):
        def write(folder: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(CheckpointError, match=r"step 3 could not be written .*No space left.*/step_000002$"):
            save_on_all_ranks(store, 3, write)


class TestVerify:
    def refusal(self, store: CheckpointStore, step: int = 2) -> str:
        with pytest.raises(CheckpointError) as caught:
            store.verify(store.root / f"step_{step:06d}")
        return str(caught.value)

    def test_a_truncated_file_is_named_with_the_older_checkpoint(self, store):
        path = store.root / "step_000002" / "model" / "weights.bin"
        os.truncate(path, 599)
        assert self.refusal(store) == (
            f"{path} is damaged (599 of 600 bytes); remove that folder to resume from step_000001"
        )
        store.verify(store.root / "step_000001")

    def test_a_flipped_bit_is_found(self, store):
        path = store.root / "step_000002" / "model" / "weights.bin"
        damaged = bytearray(path.read_bytes())
        damaged[300] ^= 1
        path.write_bytes(damaged)
        assert self.refusal(store) == (
            f"{path} is damaged (its content changed since it was written); remove that folder to resume from "
            "step_000001"
        )

    def test_a_missing_file_is_named(self, store):
        (store.root / "step_000001" / "state.pt").unlink()
        assert self.refusal(store, 1) == (
            f"{store.root / 'step_000001' / 'state.pt'} is missing; there is no older one"
        )

    @pytest.mark.parametrize("text", ["", '{"state.pt": ', "[]", '{"state.pt": 3}', '{"state.pt": {"bytes": 6}}'])
    def test_a_damaged_manifest_is_refused(self, store, text):
        path = store.root / "step_000002" / "manifest.json"
        path.write_text(text)
        assert self.refusal(store) == (
            f"{path} is damaged (it is not a list of files); remove that folder to resume from step_000001"
        )
