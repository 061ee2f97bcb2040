"""The warm-up of the embedded default through torchtune's own recipe, cut to a few optimizer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dapo_components.tiny_model import build_tiny
from tests.recipes.recipe_runs import ROOT

TUNE = Path(sys.executable).with_name("tune")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not TUNE.exists(), reason="torchtune's command is not installed")]


@pytest.fixture(scope="module")
def warm_up(tmp_path_factory):
    """The folders before and after 30 optimizer steps of 256 tokens."""
    folder = tmp_path_factory.mktemp("warm_up")
    initial = build_tiny(folder / "initial", seed=3)
    command = [
        str(TUNE), "run", "full_finetune_single_device", "--config", "recipes/configs/tiny_cpu_sft.yaml",
        f"model_dir={initial}", f"output_dir={folder / 'out'}", "seed=3", "dataset.num_demonstrations=300",
        "batch_size=1", "log_every_n_steps=1", "lr_scheduler.num_warmup_steps=3",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return initial, folder / "out"


def test_the_loss_falls(warm_up):
    (log,) = (warm_up[1] / "logs").glob("log_*.txt")
    losses = [float(value) for value in re.findall(r"loss:([\d.]+)", log.read_text())]
    assert len(losses) >= 28  # 300 demonstrations of 26 tokens in rows of 256
    # Equal odds for 99 tokens cost 4.6; the digits and signs that occur at all, about 2.6.
    assert losses[0] > 4.0
    assert sum(losses[-5:]) / 5 < 2.6


def test_the_result_is_a_folder_that_transformers_loads(warm_up):
    transformers = pytest.importorskip("transformers")
    from dapo_components.data import load_tokenizer

    initial, output_dir = warm_up
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (initial, output_dir / "epoch_0")
    )
    moved = (after.lm_head.weight - before.lm_head.weight).abs().max()
    assert 1e-3 < moved < 1  # 30 steps of at most 2e-3 each
    assert after.lm_head.weight is after.model.embed_tokens.weight
    assert load_tokenizer(output_dir / "epoch_0")("1+2?")["input_ids"] == [6, 77, 7, 87]
