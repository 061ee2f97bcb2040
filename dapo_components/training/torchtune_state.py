"""Weights and optimizer state of torchtune models, in one process or sharded by FSDP2, as Hugging Face folders."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchtune import modules, training

from dapo_components.training.config import ConfigError, build
from dapo_components.training.distributed import rank_and_world_size


@final
class HFCheckpoints:
    """Read and write model weights as Hugging Face folders through torchtune's checkpointer.

    Args:
        checkpointer: Component, usually ``torchtune.training.FullModelHFCheckpointer`` with ``checkpoint_dir`` and
            ``model_type``; ``checkpoint_files`` may be left out.
        scratch: Folder for files on their way into a checkpoint; on the same file system.

    Raises:
        ConfigError: If the folder is missing or holds no weights.
    """

    def __init__(self, checkpointer: Mapping[str, Any], scratch: str | Path) -> None:
        self.config = dict(checkpointer)
        self.scratch = Path(scratch)
        self._checkpointer: Any = None

    def load(self, folder: str | Path | None = None) -> dict[str, Tensor]:
        """Return the weights in ``folder`` (or the config's ``checkpoint_dir``) under torchtune's names.

        Raises:
            ConfigError: If they cannot be read or converted.
        """
        path = Path(folder or self.config.get("checkpoint_dir", ""))
        files = self.config.get("checkpoint_files") if folder is None else None
        for pattern in ("*.safetensors", "*.bin"):  # many folders hold the same weights in both forms
            files = files or sorted(file.name for file in path.glob(pattern))
        if not (path / "config.json").exists() or not files:
            raise ConfigError(
                f"checkpointer.checkpoint_dir={path} is not a Hugging Face model folder (config.json and weights as "
                "*.safetensors or *.bin); `dapo demo` makes the one that tiny_cpu.yaml names"
            )
        try:
            checkpointer = build(
                {**self.config, "checkpoint_dir": str(path), "checkpoint_files": files, "output_dir": str(self.scratch)}
            )
            weights = checkpointer.load_checkpoint()[training.MODEL_KEY]
            # It copies the tokenizer and config files from there at every save: a checkpoint's own may be gone by then.
            if folder is None or self._checkpointer is None:
                self._checkpointer = checkpointer
            return weights
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"weights in {path} cannot be read as model_type={self.config.get('model_type')}: {error}"
            ) from error

    def save(self, state_dict: dict[str, Tensor], folder: Path) -> None:
        """Write weights and the tokenizer and config files beside them to ``folder``, which must not exist.

        Something must have been loaded before: the layout of the files is the same.
        """
        shutil.rmtree(self.scratch / "epoch_0", ignore_errors=True)
        with _quiet_torchtune():
            self._checkpointer.save_checkpoint({training.MODEL_KEY: state_dict}, epoch=0)
        shutil.move(self.scratch / "epoch_0", folder)


def build_model(
    model: Mapping[str, Any],
    weights: dict[str, Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    shard: bool = False,
    activation_checkpointing: bool = False,
) -> nn.Module:
    """Build a torchtune decoder and give it weights.

    Args:
        model: Component, a torchtune model builder.
        weights: Full state dict under torchtune's names.
        device: Where it will live.
        dtype: Of the parameters.
        shard: Shard parameters over all ranks with FSDP2, each layer on its own.
        activation_checkpointing: Recompute layers in the backward pass instead of keeping their activations.

    Raises:
        ConfigError: If names or shapes do not match the model.
    """
    with training.set_default_dtype(dtype), torch.device("meta"):
        built: nn.Module = build(model)
    check_weights_match(built, weights, model.get("_component_", "the model"))
    if activation_checkpointing:
        training.set_activation_checkpointing(built, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    if shard:
        training.shard_model(built, [partial(training.get_shard_conditions)], cpu_offload=False)  # pyright: ignore[reportArgumentType]
    with training.set_default_dtype(dtype), device:
        for module in built.modules():
            if hasattr(module, "rope_init"):  # buffers that are in no checkpoint
                module.rope_init()  # pyright: ignore[reportCallIssue]
    if shard:
        training.load_from_full_model_state_dict(built, weights, device, strict=True)  # pyright: ignore[reportArgumentType]
    else:
        # A private copy: the loaded tensors may be shared with another model.
        own = {name: tensor.to(device, dtype, copy=True) for name, tensor in weights.items()}
        built.load_state_dict(own, assign=True)
    training.validate_no_params_on_meta_device(built)
    return built.train()


def check_weights_match(model: nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    """Compare names and shapes of a state dict with a model.

    Raises:
        ConfigError: With the first few differences.
    """
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in weights.items()}
    faults = [f"missing {key}" for key in wanted.keys() - found.keys()]
    faults += [f"not in the model: {key}" for key in found.keys() - wanted.keys()]
    faults += [
        f"{key} has shape {found[key]}, the model needs {wanted[key]}"
        for key in wanted.keys() & found.keys()
        if wanted[key] != found[key]
    ]
    if faults:
        raise ConfigError(
            f"the checkpoint does not match {name}: {'; '.join(sorted(faults)[:5])}"
            f"{f' and {len(faults) - 5} more' if len(faults) > 5 else ''}; compare the builder's arguments with the "
            "checkpoint's config.json"
        )


def full_state_dict(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return all weights on the CPU of rank 0; other ranks get an empty dict. A collective."""
    rank, world_size = rank_and_world_size()
    if world_size > 1:
        return training.gather_cpu_state_dict(model, rank == 0, device)  # pyright: ignore[reportArgumentType]
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the kind of the optimizer and, on rank 0, its whole state; other ranks get an empty one. A collective."""
    rank, world_size = rank_and_world_size()
    if world_size > 1:
        state = training.get_full_optimizer_state_dict(model, optimizer, rank == 0)  # pyright: ignore[reportArgumentType]
    else:
        state = optimizer.state_dict()
    return {"kind": type(optimizer).__name__, "state": state}


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any], device: torch.device) -> None:
    """Give an optimizer the moments that :func:`optimizer_state` returned, and keep its own settings. A collective.

    Learning rate, weight decay and the like are those of the config that resumes, not of the one that was saved.
    """
    if state["kind"] != type(optimizer).__name__:
        raise ConfigError(
            f"the checkpoint holds the state of {state['kind']}, the config names {type(optimizer).__name__}; resume "
            "with the same optimizer"
        )
    state = state["state"]
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    if rank_and_world_size()[1] > 1:
        training.load_from_full_optimizer_state_dict(model, optimizer, state, device)  # pyright: ignore[reportArgumentType]
    else:
        optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


@contextmanager
def _quiet_torchtune() -> Iterator[None]:
    """Keep its notices on every file out of the middle of a progress bar."""
    logger = logging.getLogger("torchtune.utils._logging")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
