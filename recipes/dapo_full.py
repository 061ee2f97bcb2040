"""Full-parameter DAPO (arXiv:2503.14476) on one device, or on several under FSDP2.

Run it, or a copy of it, with:

    tune run recipes/dapo_full.py --config recipes/configs/tiny_cpu.yaml [key=value ...] [--dry-run]
    tune run --nproc_per_node 2 recipes/dapo_full.py --config recipes/configs/tiny_cpu.yaml [key=value ...]

Edit first: ``DAPOConfig`` (every key, its default and meaning), ``DAPORecipe.train`` (Algorithm 1 of the paper) and
``DAPORecipe.update`` (the loss). The rest is set-up, evaluation, checkpoints and logs.
"""

# No `from __future__ import annotations`: `parse_config` needs the types of DAPOConfig as objects, and `tune run`
# executes this file without registering it as a module in which text could be looked up.

import dataclasses
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from torchtune import config, training

from dapo_components.collectors import (
    CollectionFailed,
    DynamicSamplingCollector,
    RolloutCollector,
    collect_on_all_ranks,
    evaluate_on_all_ranks,
)
from dapo_components.data import PromptLoader, stop_token_ids
from dapo_components.evaluation import accuracy_metrics
from dapo_components.filters import OverlongFilter
from dapo_components.functional import group_num_tokens
from dapo_components.generation import SamplingParams
from dapo_components.reporting import RunReport
from dapo_components.rewards import ReferenceKLPenalty
from dapo_components.training.batch_arithmetic import BatchArithmetic
from dapo_components.training.checkpoint import CheckpointError, CheckpointStore, save_on_all_ranks
from dapo_components.training.config import ConfigError, build, check_at_least, check_positive, parse_config
from dapo_components.training.config_sections import Component, DynamicSamplingConfig, EvaluationConfig, KLConfig
from dapo_components.training.distributed import all_gather, all_reduce_counts, full_parameters, start_process_group
from dapo_components.training.entry import run_recipe, user_errors
from dapo_components.training.guards import FiniteGradientGuard, InterruptGuard, RunStopped, check_sampler_agreement
from dapo_components.training.memory import describe_run
from dapo_components.training.metrics import MetricSums, Stopwatch, add_rollout_metrics, add_sampler_agreement
from dapo_components.training.policy import (
    ForwardSettings,
    batch_log_probs,
    idle_packed,
    micro_batches,
    packed_log_probs,
)
from dapo_components.training.run_folder import open_run_folder, store_config
from dapo_components.training.schedule import LearningRate, is_due
from dapo_components.training.torchtune_state import (
    HFCheckpoints,
    build_model,
    full_state_dict,
    load_optimizer_state,
    optimizer_state,
)


@dataclass(kw_only=True)
class DAPOConfig:
    """Every key of this recipe's config."""

    output_dir: str
    seed: int = 0
    num_steps: int  # rollout steps
    prompts_per_step: int  # groups trained on per rollout step, over all ranks
    group_size: int  # responses per prompt
    max_response_length: int  # tokens
    resume: bool = False
    dry_run: bool = False

    model: Component  # torchtune model builder
    checkpointer: Component  # torchtune.training.FullModelHFCheckpointer; checkpoint_dir is a Hugging Face folder
    tokenizer: Component
    dataset: Component
    max_prompt_length: int  # tokens
    reward: Component
    generator: Component
    evaluation: EvaluationConfig | None = None

    temperature: float = 1.0
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    soft_overlong: Component | None = None
    overlong_filter: bool = False  # leave truncated responses out of the loss
    advantage: Component = field(
        default_factory=lambda: {"_component_": "dapo_components.advantages.GroupNormalizedAdvantage"}
    )
    loss: Component
    kl: KLConfig = field(default_factory=KLConfig)

    responses_per_update: int | None = None  # per optimizer step, over all ranks; null takes the whole rollout
    epochs_per_rollout: int = 1
    max_tokens_per_micro_batch: int = 4096
    max_shared_length: int = 512  # longest packed row in which responses share their prompt
    optimizer: Component
    warmup_steps: int = 0  # optimizer steps
    lr_decay: Literal["constant", "cosine"] = "constant"
    max_grad_norm: float = 1.0

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"  # of parameters and optimizer; bf16 loses small updates
    compute_dtype: Literal["fp32", "bf16"] = "fp32"  # of activations, through autocast
    enable_activation_checkpointing: bool = False
    max_log_prob_difference: float = 1e-4  # largest between sampler and trainer, checked on the first update

    save_every: int = 50  # rollout steps; 0: only at the end
    keep_checkpoints: int = 2  # 0: all
    metric_logger: Component | None = None  # torchtune.training.metric_logging.*
    log_rollouts: bool = True
    max_logged_rollouts: int | None = None  # per step and rank; null: all
    collective_timeout_minutes: int = 120  # how long ranks wait for the slowest one

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        check_at_least(self, 1, "num_steps", "max_shared_length", "collective_timeout_minutes")
        check_at_least(self, 0, "save_every", "keep_checkpoints", "warmup_steps")
        check_positive(self, "temperature", "max_grad_norm", "max_log_prob_difference")

    def sizes(self, world_size: int) -> BatchArithmetic:
        """Check how the batch divides."""
        names = {entry.name for entry in dataclasses.fields(BatchArithmetic)} - {"world_size"}
        return BatchArithmetic(**{name: getattr(self, name) for name in names}, world_size=world_size)


PROGRESS = ("step", "num_updates", "seconds", "evaluations")
"""What a checkpoint stores of the recipe's own state."""


class DAPORecipe:
    """torchtune's recipe contract: ``setup``, ``train``, ``save_checkpoint``, ``cleanup``."""

    def __init__(self, cfg: DAPOConfig, *, rank: int = 0, world_size: int = 1) -> None:
        self.cfg, self.rank, self.world_size = cfg, rank, world_size
        self.sizes = cfg.sizes(world_size)
        cfg.dynamic_sampling.check_correction(cfg.loss)
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cfg.device == "cuda" else "cpu")
        self.dtype = training.get_dtype(cfg.dtype, self.device)
        self.forward = ForwardSettings(
            temperature=cfg.temperature,
            max_tokens=cfg.max_tokens_per_micro_batch,
            max_shared_length=cfg.max_shared_length,
            compute_dtype=cfg.compute_dtype,
        )
        self.step = 0  # rollout steps done
        self.num_updates = 0  # optimizer steps done; the version of the policy
        self.seconds = 0.0
        self.evaluations: dict[int, dict[str, float]] = {}  # by rollout step
        self.stop_reason = "failed"

    def setup(self) -> None:
        """Build what the config names, load weights, and resume if asked."""
        cfg, folder = self.cfg, Path(self.cfg.output_dir)
        if cfg.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device=cuda needs a GPU and a CUDA build of torch; set device=cpu or see `dapo doctor`")
        training.set_seed(cfg.seed)
        if self.rank == 0:
            for change in open_run_folder(folder, resume=cfg.resume, config=dataclasses.asdict(cfg)):
                print(f"changed since this run was started: {change}", flush=True)
        self.checkpoints = CheckpointStore(folder / "checkpoints", keep=cfg.keep_checkpoints)
        self.hf_checkpoints = HFCheckpoints(cfg.checkpointer, folder / ".scratch")
        checkpoint = self.checkpoints.latest() if cfg.resume else None
        if checkpoint:
            self.checkpoints.verify(checkpoint)
        elif cfg.resume and self.rank == 0:
            print(f"no checkpoint in {self.checkpoints.root}: starting from step 0", flush=True)
        self._setup_models(checkpoint)
        self.optimizer = build(cfg.optimizer, self.model.parameters())
        num_steps = cfg.num_steps * self.sizes.updates_per_rollout
        schedule = {"warmup_steps": cfg.warmup_steps, "num_steps": num_steps, "decay": cfg.lr_decay}
        self.learning_rate = LearningRate(self.optimizer, **schedule)
        self.soft_overlong, self.advantage = build(cfg.soft_overlong), build(cfg.advantage)
        self.overlong_filter = OverlongFilter()
        self.kl_penalty = ReferenceKLPenalty(**cfg.kl.reward_arguments()) if cfg.kl.in_reward else None
        self.loss = build(cfg.loss, **cfg.kl.loss_arguments(cfg.loss))
        self.gradients = FiniteGradientGuard()
        self._setup_rollouts()
        if checkpoint:
            self._load_state(torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True))
        self.report = RunReport(
            folder,
            step=self.step,
            num_steps=cfg.num_steps,
            num_updates=self.num_updates,
            rank=self.rank,
            log_rollouts=cfg.log_rollouts,
            max_logged_rollouts=cfg.max_logged_rollouts,
            metric_logger=build(cfg.metric_logger) if self.rank == 0 else None,
        )
        store_config(folder, dataclasses.asdict(cfg), rank=self.rank)

    def _setup_models(self, checkpoint: Path | None) -> None:
        """The policy, the sampler's full copy where the policy is sharded, and the reference if there is a KL term."""
        cfg = self.cfg
        make = partial(build_model, cfg.model, device=self.device, dtype=self.dtype)
        initial = self.hf_checkpoints.load()
        weights = self.hf_checkpoints.load(checkpoint / "model") if checkpoint else initial
        shard = self.world_size > 1
        self.model = make(weights, shard=shard, activation_checkpointing=cfg.enable_activation_checkpointing)
        self.sampler_model = make(weights) if shard else self.model
        self.reference = make(initial, shard=shard).requires_grad_(False).eval() if cfg.kl.coef else None

    def _setup_rollouts(self) -> None:
        """Prompts, rewards and the engine become a collector."""
        cfg, sampling_cfg = self.cfg, self.cfg.dynamic_sampling
        tokenizer = build(cfg.tokenizer)
        self.generator = build(cfg.generator, self.sampler_model)
        self.sizes.check_model_length(getattr(self.generator, "max_model_len", None))
        pad_id = tokenizer.pad_token_id or 0
        collector = partial(
            RolloutCollector, self.generator, build(cfg.reward), tokenizer, seed=cfg.seed, pad_id=pad_id
        )
        sampling = SamplingParams(
            temperature=cfg.temperature, max_tokens=cfg.max_response_length, stop_token_ids=stop_token_ids(tokenizer)
        )
        dataset = build(cfg.dataset, tokenizer, max_prompt_length=cfg.max_prompt_length)
        if self.rank == 0 and any(dataset.num_dropped.values()):
            print(f"prompts left out: {dataset.num_dropped}; {len(dataset)} remain", flush=True)
        self.collector = DynamicSamplingCollector(
            collector(sampling=sampling, group_size=cfg.group_size),
            PromptLoader(dataset, seed=cfg.seed, rank=self.rank, world_size=self.world_size),
            build(sampling_cfg.filter) if sampling_cfg.enabled else None,
            prompts_per_step=self.sizes.prompts_per_rank,
            **sampling_cfg.collector_arguments(),
            rank=self.rank,
            world_size=self.world_size,
            on_rollouts=lambda rows: self.report.rollouts(rows),
        )
        if cfg.evaluation:
            held_out = build(cfg.evaluation.dataset, tokenizer, max_prompt_length=cfg.max_prompt_length)
            self.held_out = [held_out[index] for index in range(self.rank, len(held_out), self.world_size)]
            sampling = dataclasses.replace(sampling, temperature=cfg.evaluation.temperature, top_p=cfg.evaluation.top_p)
            self.evaluator = collector(sampling=sampling, group_size=cfg.evaluation.num_samples)

    def train(self) -> None:
        """Algorithm 1 of DAPO: sample until enough groups are informative, then update on them."""
        cfg, first_step = self.cfg, self.step
        started = time.perf_counter() - self.seconds
        with InterruptGuard() as interrupt:
            if self.step == 0:
                self.evaluate()
            while self.step < cfg.num_steps and not interrupt.requested():
                clock = Stopwatch()
                batch = self.collect()  # lines 2 and 4-8: sample, score, filter, refill
                clock.lap("time/generate")
                batch = self.snapshot_log_probs(batch)
                batch = self.shape_reward(batch)
                batch = self.advantage(batch)  # line 9
                batch = self.overlong_filter(batch) if cfg.overlong_filter else batch
                updates = [self.update(minibatch) for minibatch in self.minibatches(batch)]  # lines 10-11
                clock.lap("time/train")
                # Line 3 of the next step: the policy that samples becomes the current one.
                self.generator.update_weights(full_parameters(self.model), version=self.num_updates)
                clock.lap("time/sync")
                self.step += 1
                self.log_step(batch, updates, clock)
                if self.step == cfg.num_steps or (cfg.evaluation and is_due(self.step, cfg.evaluation.every)):
                    self.evaluate()
                self.seconds = time.perf_counter() - started
                if is_due(self.step, cfg.save_every) and self.step < cfg.num_steps:
                    self.save_checkpoint()
            self.stop_reason = "finished" if self.step >= cfg.num_steps else "interrupted"
            if self.step > first_step or self.stop_reason == "interrupted":
                self.save_checkpoint()

    def collect(self) -> TensorDict:
        """Collect this rank's share of the batch; all ranks stop together if one runs out of informative groups."""
        try:
            return collect_on_all_ranks(self.collector)
        except CollectionFailed as error:
            self._stop(error)

    def _stop(self, error: CollectionFailed) -> NoReturn:
        """Save what is worth saving, and end the run with the reason."""
        self.stop_reason = error.reason
        if not error.weights_are_suspect:
            self.save_checkpoint()
        raise RunStopped(f"{error}; the newest checkpoint is {self.checkpoints.latest()}") from error

    def snapshot_log_probs(self, batch: TensorDict) -> TensorDict:
        """Log-probs before the first update, and under the reference.

        With a single update per rollout the old policy is the current one, so :meth:`update` takes its log-probs and
        saves a forward pass.
        """
        if self.sizes.updates_per_rollout > 1 or self.kl_penalty:
            batch["old_log_prob"] = batch_log_probs(self.model, batch, self.forward)
        if self.reference:
            batch["ref_log_prob"] = batch_log_probs(self.reference, batch, self.forward)
        return batch

    def shape_reward(self, batch: TensorDict) -> TensorDict:
        """Add what is not correctness: the soft overlong punishment (Eq. 13), and the KL if it goes into the reward."""
        if self.soft_overlong:
            batch = self.soft_overlong(batch)
        if self.kl_penalty:
            batch = self.kl_penalty(batch)
        return batch

    def minibatches(self, batch: TensorDict) -> Iterator[TensorDict]:
        """Split whole groups into the optimizer steps of a rollout."""
        for _ in range(self.cfg.epochs_per_rollout):
            # A short batch still takes part in every optimizer step, with nothing if need be.
            for groups in torch.arange(batch.shape[0]).tensor_split(self.sizes.updates_per_epoch):
                yield batch[groups]

    def update(self, minibatch: TensorDict) -> dict[str, float]:
        """One optimizer step; micro-batches and ranks add up to the loss of the whole minibatch."""
        counts = all_reduce_counts(minibatch["loss_mask"])
        minibatch["group_num_tokens"] = group_num_tokens(minibatch["loss_mask"])
        rows: Any = minibatch.flatten(0, 1)
        metrics = MetricSums()
        for packed in micro_batches(minibatch, self.forward, device=self.device):
            log_prob, entropy = packed_log_probs(
                self.model, packed or idle_packed(self.device), self.forward, with_entropy=True
            )
            if packed is None:  # other ranks still have work: take part in their collectives
                (0.0 * log_prob.sum()).backward()
                continue
            part: TensorDict = rows[packed.responses.cpu()].to(self.device)
            width = part["loss_mask"].shape[-1]
            part["log_prob"], part["entropy"] = packed.scatter(log_prob, width), packed.scatter(entropy, width)
            if "old_log_prob" not in part.keys():
                part["old_log_prob"] = part["log_prob"].detach()
            output = self.loss(part, counts)
            output.loss.backward()
            metrics.add_shares(*output.metrics())
            add_sampler_agreement(metrics, part, version=self.generator.version)
        reduced = metrics.reduce()
        if self.num_updates == 0:
            check_sampler_agreement(
                reduced.get("sampling/log_prob_diff_max", 0.0), limit=self.cfg.max_log_prob_difference
            )
        learning_rate = self.learning_rate.set(self.num_updates)
        grad_norm, is_finite = self.gradients.clip(self.model.parameters(), self.cfg.max_grad_norm)
        if is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # gradients take no memory while the engine samples
        self.num_updates += 1
        return reduced | {"lr": learning_rate, "grad_norm": grad_norm}

    def evaluate(self) -> None:
        """Sampled accuracy on the held-out prompts, with the same seeds every time."""
        if not self.cfg.evaluation or self.step in self.evaluations:
            return
        try:
            accuracy = evaluate_on_all_ranks(self.evaluator, self.held_out)
        except CollectionFailed as error:
            self._stop(error)
        scores = accuracy_metrics(accuracy, ks=self.cfg.evaluation.pass_at)
        self.evaluations[self.step] = scores
        self.report.evaluation(scores)

    def log_step(self, batch: TensorDict, updates: list[dict[str, float]], clock: Stopwatch) -> None:
        """Measure the rollout and hand everything to the report; docs/recipes/dapo.md explains each name."""
        metrics = MetricSums()
        self.collector.report(metrics)
        add_rollout_metrics(metrics, batch)
        rollout = metrics.reduce() | clock.laps
        rollout["tokens_per_second"] = rollout["num_tokens"] / sum(clock.laps.values())
        self.report.step_done(updates, rollout, num_updates=self.num_updates)

    def save_checkpoint(self) -> None:
        """Write weights as a Hugging Face folder, and everything else that an exact continuation needs."""
        weights = full_state_dict(self.model, self.device)
        state = {
            "optimizer": optimizer_state(self.model, self.optimizer),
            "collectors": all_gather(self.collector.state_dict()),
            "progress": {name: getattr(self, name) for name in PROGRESS},
        }

        def write(folder: Path) -> None:
            self.hf_checkpoints.save(weights, folder / "model")
            torch.save(state, folder / "state.pt")

        save_on_all_ranks(self.checkpoints, self.step, write)

    def _load_state(self, state: dict[str, Any]) -> None:
        if len(state["collectors"]) != self.world_size:
            raise ConfigError(
                f"the checkpoint was written by {len(state['collectors'])} processes, this run has {self.world_size}; "
                "resume with the same --nproc_per_node"
            )
        load_optimizer_state(self.model, self.optimizer, state["optimizer"], self.device)
        self.collector.load_state_dict(state["collectors"][self.rank])
        for name in PROGRESS:
            setattr(self, name, state["progress"][name])
        self.generator.update_weights(full_parameters(self.model), version=self.num_updates)

    def cleanup(self) -> None:
        """Write the summary, close logs and the engine."""
        self.report.close(
            evaluations=self.evaluations,
            num_updates=self.num_updates,
            seconds=round(self.seconds, 1),
            stop_reason=self.stop_reason,
            seed=self.cfg.seed,
            checkpoint=self.checkpoints.latest(),
        )
        self.generator.close()
        if self.world_size > 1:
            dist.destroy_process_group()

    def describe(self) -> str:
        """What a dry run prints: batch arithmetic and a memory estimate; builds on the meta device, loads nothing."""
        return describe_run(
            self.cfg.model,
            self.sizes,
            dtype=self.cfg.dtype,
            compute_dtype=self.cfg.compute_dtype,
            activation_checkpointing=self.cfg.enable_activation_checkpointing,
            reference_model=bool(self.cfg.kl.coef),
        )


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Read the config, then set up, train and clean up."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    with user_errors(ValueError, FileNotFoundError, ImportError):
        values: Any = OmegaConf.to_container(cfg, resolve=True)
        settings = parse_config(values, DAPOConfig)
        recipe = DAPORecipe(settings, rank=int(os.environ.get("RANK", 0)), world_size=world_size)
        if settings.dry_run:
            if recipe.rank == 0:
                print(recipe.describe(), flush=True)
            return
        if world_size > 1:
            start_process_group(recipe.device, timeout_minutes=settings.collective_timeout_minutes)
        recipe.setup()
    with user_errors(RunStopped, CheckpointError, OSError):
        try:
            recipe.train()
        finally:
            recipe.cleanup()


if __name__ == "__main__":
    run_recipe(recipe_main)
