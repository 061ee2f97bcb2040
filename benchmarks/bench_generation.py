"""Sampling: ``CausalLMGenerator`` beside ``transformers.generate`` on the same requests.

With pytest-benchmark on a tiny model: ``pytest benchmarks/bench_generation.py``. On a real one, interleaved::

    THP_MEM_ALLOC_ENABLE=1 python -m benchmarks.bench_generation --model models/smollm2-135m

8 prompts of 45 tokens, 8 samples each, 24 new tokens, temperature 1. Only our side reports log-probs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dapo_components.generation import CausalLMGenerator, GenerationRequest, SamplingParams

PEER = "transformers.generate"
NUM_PROMPTS, NUM_SAMPLES, PROMPT_LENGTH, NEW_TOKENS = 8, 8, 45, 24


def make_prompts(vocab_size: int) -> list[tuple[int, ...]]:
    """Random ids: no pass takes longer or shorter for what they mean."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab_size, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def run_ours(generator: CausalLMGenerator, prompts: list[tuple[int, ...]]) -> int:
    sampling = SamplingParams(max_tokens=NEW_TOKENS)
    repeated = [prompt for prompt in prompts for _ in range(NUM_SAMPLES)]
    generator.submit(
        [
            GenerationRequest(request_id=index, prompt_tokens=prompt, sampling=sampling, seed=index)
            for index, prompt in enumerate(repeated)
        ]
    )
    num_tokens = 0
    while generator.num_in_flight():
        num_tokens += sum(len(completion.tokens) for completion in generator.step())
    return num_tokens


def run_transformers(model: Any, prompts: list[tuple[int, ...]]) -> int:
    input_ids = torch.tensor(prompts)
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        num_return_sequences=NUM_SAMPLES,
        pad_token_id=0,
    )
    return (output.shape[1] - PROMPT_LENGTH) * output.shape[0]


@pytest.mark.benchmark(group="generate 64 x 24 tokens, tiny model")
@pytest.mark.parametrize("side", ["ours_torchtune", "ours_huggingface", "transformers"])
def test_generate(benchmark: Any, side: str) -> None:
    helpers = pytest.importorskip("tests.helpers")
    build = helpers.tiny_torchtune if side == "ours_torchtune" else helpers.tiny_huggingface
    model = build(max_seq_len=128)
    prompts = make_prompts(helpers.TINY_VOCAB)
    if side == "transformers":
        num_tokens = benchmark(run_transformers, model, prompts)
    else:
        num_tokens = benchmark(run_ours, CausalLMGenerator(model), prompts)
    assert num_tokens == NUM_PROMPTS * NUM_SAMPLES * NEW_TOKENS


def load_both(folder: Path) -> tuple[nn.Module, nn.Module]:
    """Load a Hugging Face Llama folder as it is, and as a torchtune decoder."""
    from torchtune.models.convert_weights import hf_to_tune
    from torchtune.models.llama3_2 import llama3_2
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = hf.config
    heads = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
    decoder = llama3_2(
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        embed_dim=config.hidden_size,
        max_seq_len=2048,
        intermediate_dim=config.intermediate_size,
        rope_base=int(config.rope_parameters["rope_theta"]),
        norm_eps=config.rms_norm_eps,
        scale_factor=1,
        tie_word_embeddings=config.tie_word_embeddings,
        **heads,
    )
    weights = hf.state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    decoder.load_state_dict(hf_to_tune(weights, dim=config.hidden_size, **heads))
    return hf, decoder.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Llama in Hugging Face form")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    hf, decoder = load_both(arguments.model)
    prompts = make_prompts(hf.config.vocab_size)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    ours = {"ours, torchtune decoder": CausalLMGenerator(decoder), "ours, Hugging Face model": CausalLMGenerator(hf)}
    sides: dict[str, Callable[[], int]] = {PEER: lambda: run_transformers(hf, prompts)}
    for name, generator in ours.items():
        sides[name] = lambda generator=generator: run_ours(generator, prompts)
    wall: dict[str, list[float]] = {name: [] for name in sides}
    busy: dict[str, list[float]] = {name: [] for name in sides}
    loads = [os.getloadavg()[0]]
    for _ in range(arguments.rounds + 1):
        for name, run in sides.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            assert run() == NUM_PROMPTS * NUM_SAMPLES * NEW_TOKENS
            wall[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - cpu_start)
        loads.append(os.getloadavg()[0])
    report(wall, busy, loads)


def report(wall: dict[str, list[float]], busy: dict[str, list[float]], loads: list[float]) -> None:
    """Print medians; the first round is left out, it fills caches."""
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, THP_MEM_ALLOC_ENABLE="
        f"{os.environ.get('THP_MEM_ALLOC_ENABLE')}, load average {min(loads):.1f} to {max(loads):.1f}"
    )
    wall_median = {name: statistics.median(values[1:]) for name, values in wall.items()}
    busy_median = {name: statistics.median(values[1:]) for name, values in busy.items()}
    for name in wall:
        seconds, busy_seconds = wall_median[name], busy_median[name]
        rate = NUM_PROMPTS * NUM_SAMPLES * NEW_TOKENS / seconds
        print(
            f"{name:26} {seconds:6.2f} s {rate:6.0f} tokens/s {wall_median[PEER] / seconds:5.2f}x | processor time "
            f"{busy_seconds:6.2f} s {busy_median[PEER] / busy_seconds:5.2f}x | "
            f"rounds {' '.join(f'{value:.2f}' for value in wall[name])}"
        )


if __name__ == "__main__":
    main()
