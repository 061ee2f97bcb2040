"""Our side of the whole-step comparison: the recipe itself. Run by ``bench_step``: work file in, result file out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_work import StepLog, Work
from dapo_components.reporting import read_metrics
from tests.recipes.recipe_runs import make


def recipe_config(work: Work) -> dict[str, Any]:
    """The recipe's config of the work; model sizes come from the folder's ``config.json``."""
    sizes = json.loads((Path(work.model) / "config.json").read_text("utf-8"))
    row_length = work.prompt_length + work.group_size * (work.response_length - 1)
    return {
        "output_dir": work.output_dir,
        "seed": work.seed,
        "num_steps": work.num_steps,
        "prompts_per_step": work.num_prompts,
        "group_size": work.group_size,
        "max_response_length": work.response_length,
        "model": {
            "_component_": "torchtune.models.llama3_2.llama3_2",
            "vocab_size": sizes["vocab_size"],
            "num_layers": sizes["num_hidden_layers"],
            "num_heads": sizes["num_attention_heads"],
            "num_kv_heads": sizes["num_key_value_heads"],
            "embed_dim": sizes["hidden_size"],
            "max_seq_len": min(2048, sizes["max_position_embeddings"]),
            "intermediate_dim": sizes["intermediate_size"],
            "rope_base": int(sizes.get("rope_theta") or sizes["rope_parameters"]["rope_theta"]),
            "norm_eps": sizes["rms_norm_eps"],
            "scale_factor": 1,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": work.model,
            "model_type": "LLAMA3_2",
        },
        "tokenizer": {"_component_": "dapo_components.data.load_tokenizer", "folder": work.model},
        "dataset": {
            "_component_": "dapo_components.data.PromptDataset",
            "source": work.prompts_file,
            "columns": {"problem": "problem"},
            "template": "plain",
        },
        "max_prompt_length": work.prompt_length,
        "reward": {
            "_component_": "dapo_components.rewards.RewardSet",
            "rewards": {"vowels": "benchmarks.step_work:vowel_share"},
        },
        "generator": {
            "_component_": "dapo_components.generation.CausalLMGenerator",
            "max_slots": work.num_responses,
        },
        "dynamic_sampling": {"enabled": False},
        "loss": {"_component_": "dapo_components.losses.DAPOLoss"},
        "max_tokens_per_micro_batch": work.responses_per_micro_batch // work.group_size * row_length,
        "max_shared_length": row_length,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": work.lr, "weight_decay": 0.0, "fused": True},
        "enable_activation_checkpointing": work.activation_checkpointing,
    }


def main(work_file: str, result_file: str) -> None:
    work = Work.read(work_file)
    recipe = make(recipe_config(work))
    recipe.setup()
    log = StepLog()
    log_step = recipe.log_step

    def log_step_and_mark(*args: Any) -> None:
        log_step(*args)
        log.mark()

    recipe.log_step = log_step_and_mark
    recipe.save_checkpoint = lambda: None  # the other side saves nothing either
    recipe.generator.step = log.timing_generation(recipe.generator.step)
    log.start()
    recipe.train()
    recipe.cleanup()
    rows = list(read_metrics(Path(work.output_dir) / "metrics.jsonl"))
    log.write(
        result_file,
        lengths=[row["completions/mean_length"] for row in rows],
        entropy=rows[0]["entropy"],
        threads=torch.get_num_threads(),
        versions={"torch": torch.__version__},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
