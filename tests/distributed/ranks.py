"""What two gloo processes do for tests/distributed/test_ranks.py: every check of them runs in one spawn."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from dapo_components.collectors import CollectionFailed, collect_on_all_ranks
from dapo_components.data.loader import PromptLoader
from dapo_components.losses import DAPOLoss
from dapo_components.training.checkpoint import CheckpointError, CheckpointStore, save_on_all_ranks
from dapo_components.training.distributed import (
    all_gather,
    all_reduce_counts,
    all_reduce_max,
    all_reduce_sum,
    full_parameters,
    rank_and_world_size,
)
from dapo_components.training.guards import FiniteGradientGuard, InterruptGuard
from dapo_components.training.metrics import MetricSums
from dapo_components.training.policy import (
    ForwardSettings,
    batch_log_probs,
    idle_packed,
    micro_batches,
    packed_log_probs,
)
from dapo_components.training.torchtune_state import (
    build_model,
    full_state_dict,
    load_optimizer_state,
    optimizer_state,
)
from tests.collectors.scripted import collector, prompt_ids
from tests.helpers import tiny_torchtune
from tests.helpers_training import ragged_batch

CPU = torch.device("cpu")
MODEL: dict[str, Any] = {
    "_component_": "torchtune.models.llama3_2.llama3_2",
    "vocab_size": 13,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 16,
    "max_seq_len": 64,
    "intermediate_dim": 32,
    "rope_base": 10_000,
    "scale_factor": 1,
}
# Four micro-batches on rank 0, one on rank 1.
SETTINGS = ForwardSettings(max_tokens=16, max_shared_length=12, chunk_size=4)
MODES = ("token_mean", "seq_mean_token_mean", "group_token_mean")


def whole_batch() -> TensorDict:
    """Two groups for each rank, 44 tokens on rank 0 and 5 on rank 1, with ratios on both sides of the clip."""
    batch = ragged_batch([([9, 7, 8], 4), ([10, 9, 1], 6), ([1, 1, 1], 2), ([1, 1, 0], 3)], seed=5)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        current = batch_log_probs(tiny_torchtune(seed=4), batch, SETTINGS)
    batch["old_log_prob"] = current + 0.3 * torch.randn(current.shape, generator=generator)
    batch["advantage"] = torch.randn(batch.shape, generator=generator)
    return counted(batch)


def counted(batch: TensorDict) -> TensorDict:
    """Write the tokens of each row's whole group."""
    batch["group_num_tokens"] = batch["loss_mask"].sum(-1).sum(-1)[:, None].expand(batch.shape)
    return batch


def masked_batch(which: str) -> TensorDict:
    """Leave all tokens, those of rank 0, or none."""
    batch = whole_batch()
    if which != "all":
        batch["loss_mask"][2 if which == "rank 0" else 0 :] = False
    return counted(batch)


def backward(model: nn.Module, share: TensorDict, loss: DAPOLoss) -> tuple[float, int]:
    """Accumulate the gradient of one optimizer step over this rank's micro-batches; returns loss and passes."""
    counts = all_reduce_counts(share["loss_mask"])
    rows: Any = share.flatten(0, 1)
    total, passes = 0.0, 0
    for packed in micro_batches(share, SETTINGS, device=CPU):
        passes += 1
        log_prob, _ = packed_log_probs(model, packed or idle_packed(CPU), SETTINGS)
        if packed is None:
            (0.0 * log_prob.sum()).backward()
            continue
        part = rows[packed.responses]
        part["log_prob"] = packed.scatter(log_prob, part["loss_mask"].shape[-1])
        output = loss(part, counts)
        output.loss.backward()
        total += float(output.loss.detach())
    return total, passes


def full(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gather the gradients by plain parameter name; a collective."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def sharded(**options: Any) -> nn.Module:
    weights = tiny_torchtune(seed=4).state_dict()
    return build_model(MODEL, weights, device=CPU, dtype=torch.float32, shard=True, **options)


def gradients_of_every_split(share_of: Any) -> dict[str, Any]:
    """Losses, passes and gradients for each choice of mask and aggregation."""
    found: dict[str, Any] = {}
    for which in ("all", "rank 0", "none"):
        for mode in MODES if which == "all" else MODES[:1]:
            model = sharded(activation_checkpointing=mode == MODES[1])
            loss, passes = backward(model, share_of(masked_batch(which)), DAPOLoss(aggregation=mode))
            found[f"{which}/{mode}"] = {"loss": loss, "passes": passes, "gradients": full_gradients(model)}
    return found


def two_steps(share: TensorDict, folder: Path) -> dict[str, Any]:
    """Clip and step, save, load into a fresh model and optimizer, and step once more."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model, share, DAPOLoss())
    norm, allowed = FiniteGradientGuard().clip(model.parameters(), 0.1)
    optimizer.step()
    weights, state = full_state_dict(model, CPU), optimizer_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "state": state}, folder / "state.pt")
    dist.barrier()
    saved = torch.load(folder / "state.pt", weights_only=True)
    resumed = build_model(MODEL, saved["weights"], device=CPU, dtype=torch.float32, shard=True)
    restored = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    load_optimizer_state(resumed, restored, saved["state"], CPU)
    backward(resumed, share, DAPOLoss())
    restored.step()
    return {
        "norm": norm,
        "allowed": allowed,
        "weights": weights,
        "num_state": len(state["state"]),
        "after": {name: tensor.clone() for name, tensor in full_parameters(resumed)},
    }


def metric_sums(rank: int) -> dict[str, float]:
    """Rank 1 knows fewer names; a mean over ranks weighs every value the same."""
    metrics = MetricSums()
    metrics.mean("mean", torch.tensor([1.0, 2.0, 3.0] if rank == 0 else [10.0]))
    metrics.add_shares({"share": torch.tensor(0.25), "largest": torch.tensor(float(rank))}, {"largest"})
    if rank == 0:
        metrics.mean("only_rank_0", torch.tensor([4.0]))
        metrics.sum("sum_of_rank_0", 7.0)
        metrics.maximum("largest_of_rank_0", -3.0)
        metrics.mean("nothing", torch.tensor([]))
    metrics.maximum("broken", float("nan") if rank == 0 else 1.0)
    metrics.maximum("also_broken", 1.0 if rank == 0 else float("nan"))
    return metrics.reduce()


def interrupted(rank: int) -> list[bool]:
    """Only rank 1 gets the signal."""
    with InterruptGuard() as guard:
        before = guard.requested()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return [before, guard.requested()]


def collected(rank: int) -> dict[str, Any]:
    """Rank 1 finds no informative group at first, then some; rank 0 always does."""
    options = {"prompts_per_step": 1, "oversampling": 1.0, "max_oversampling": 1.0, "max_gen_batches": 1}
    source = collector("IIIIIIII" if rank == 0 else "IHHHIIII", **options)
    # A rank takes every other prompt: rank 1 draws H, H and I of the three rounds below.
    loader: Any = source.loader.dataset
    source.loader = PromptLoader(loader, seed=0, shuffle=False, rank=rank, world_size=2)
    found: dict[str, Any] = {"failures": [], "reasons": []}
    for _ in range(3):
        try:
            found["batch"] = prompt_ids(collect_on_all_ranks(source))
        except CollectionFailed as error:
            found["failures"].append(str(error))
            found["reasons"].append((error.reason, error.weights_are_suspect))
    return found


def saved_together(rank: int, folder: Path) -> list[str]:
    """Rank 0 writes one checkpoint and fails at the next."""
    store = CheckpointStore(folder / "checkpoints")
    messages = []

    def write(path: Path) -> None:
        if rank != 0:
            raise AssertionError("only rank 0 writes")
        if path.name.startswith(".step_000002"):
            raise OSError("disk full")
        time.sleep(0.2)
        (path / "state.txt").write_text("whole")

    for step in (1, 2):
        try:
            save_on_all_ranks(store, step, write)
        except CheckpointError as error:
            messages.append(str(error))
        # No rank goes on before the checkpoint is whole.
        messages += [path.name for path in store.list()]
    return messages


def work(rank: int, folder: Path) -> None:
    """Run everything on one rank and leave the results in ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )

    def share_of(batch: TensorDict) -> Any:
        return batch[2 * rank : 2 * rank + 2]

    share = share_of(whole_batch())
    counts = all_reduce_counts(share["loss_mask"])
    model = sharded()
    results = {
        "rank_and_world_size": rank_and_world_size(),
        "counts": [float(counts.num_tokens), float(counts.num_sequences), float(counts.num_groups), counts.world_size],
        "reduced": [float(all_reduce_sum({"a": 10**rank, "b": 0.5})["a"]), all_reduce_max(5 - rank)],
        "gathered": all_gather({"rank": rank}),
        "log_probs": batch_log_probs(model, share, SETTINGS),
        "parameters": {name: tensor.clone() for name, tensor in full_parameters(model)},
        "is_sharded": all(hasattr(parameter, "full_tensor") for parameter in model.parameters()),
        "splits": gradients_of_every_split(share_of),
        "two_steps": two_steps(share, folder),
        "metrics": metric_sums(rank),
        "interrupted": interrupted(rank),
        "collected": collected(rank),
        "saved_together": saved_together(rank, folder),
    }
    torch.save(results, folder / f"rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
