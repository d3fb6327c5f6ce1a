"""A part of smollm2_grid.py: real tokens of a real model equal mlx-lm's, alone and in company."""

from __future__ import annotations

import pytest
from engine_run import run_engine, small_pool
from greedy_oracle import Comparison, OracleAnswer, greedy
from prompts_of_mixed_length import chat_prompts

from mlxbatch.models import load
from mlxbatch.models.loaded import LoadedModel
from mlxbatch.request import SamplingParams

NEW_TOKENS = 16  # two blocks of the small pool


@pytest.fixture(scope="module")
def smollm2() -> tuple[LoadedModel, list[list[int]], list[OracleAnswer]]:
    loaded = load("smollm2-135m")
    prompts = [list(prompt) for prompt in chat_prompts(loaded.tokenizer, 6)]
    return loaded, prompts, [greedy(loaded.model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    ("rows", "budget", "block", "prefix", "small"),
    [(1, 9, 8, True, False), (4, 37, 16, False, False), (16, 512, 32, True, False), (5, 77, 8, True, True)],
)
def test_tokens_equal_mlx_lm(smollm2, rows, budget, block, prefix, small):
    loaded, prompts, oracle = smollm2
    settings = {"max_num_seqs": rows, "max_num_batched_tokens": budget, "block_size": block}
    settings["prefix_caching"] = prefix
    answers = list(zip(prompts, oracle, strict=True))
    if small:
        answers = sorted(answers, key=lambda pair: len(pair[0]))[:rows]
        prompts = [prompt for prompt, _ in answers]
        settings["kv_memory"] = small_pool(loaded, prompts, NEW_TOKENS, **settings)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs, stats = run_engine(loaded, prompts, params, **settings)
    comparison = Comparison()
    for number, (got, (_, want)) in enumerate(zip(outputs, answers, strict=True)):
        comparison.add(f"prompt {number}", got, want)
    assert comparison.ok, comparison
    assert bool(stats["preemptions"]) == small
