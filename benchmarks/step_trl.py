"""TRL's side of the whole-step comparison: its ``GRPOTrainer``. Run by ``bench_step``: work file in, result file out.

Needs trl, transformers and datasets, nothing of ours: it may run in an environment of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks.step_work import StepLog, Work, vowel_share


def trainer_config(work: Work) -> Any:
    """The same settings in TRL's words; those at its defaults are written out where ours could differ."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=work.output_dir,
        seed=work.seed,
        max_steps=work.num_steps,
        per_device_train_batch_size=work.responses_per_micro_batch,
        gradient_accumulation_steps=work.num_responses // work.responses_per_micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.response_length,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="dapo",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=work.activation_checkpointing,
        dataloader_pin_memory=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )


def main(work_file: str, result_file: str) -> None:
    import transformers
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    work, log = Work.read(work_file), StepLog()

    class Marks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            log.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            log.mark()

    trainer = trl.GRPOTrainer(
        model=work.model,
        reward_funcs=vowel_share,
        args=trainer_config(work),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in work.prompts()]),
        callbacks=[Marks()],
    )
    model: Any = trainer.model
    model.generate = log.timing_generation(model.generate)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "completions/mean_length" in row]
    log.write(
        result_file,
        lengths=[row["completions/mean_length"] for row in rows],
        entropy=rows[0]["entropy"],
        threads=torch.get_num_threads(),
        versions={"torch": torch.__version__, "trl": trl.__version__, "transformers": transformers.__version__},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
