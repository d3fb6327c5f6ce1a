"""Greedy tokens of tiny random models through the engine equal mlx-lm's, whatever the limits."""

from __future__ import annotations

import functools
import random

import pytest
import tiny_models
from engine_run import run_engine, small_pool
from greedy_oracle import Comparison, OracleAnswer, greedy

from mlxbatch.models import load
from mlxbatch.models.loaded import LoadedModel
from mlxbatch.request import SamplingParams

FAMILIES = ("llama", "qwen3", "mistral", "mixtral", "gemma3_text")
LENGTHS = (1, 3, 7, 8, 9, 15, 16, 17, 30, 33, 47, 64, 65, 90)
NEW_TOKENS = 20


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    @functools.cache
    def build(family: str) -> tuple[LoadedModel, list[list[int]], list[OracleAnswer]]:
        path = tmp_path_factory.mktemp(family)
        tiny_models.write_dir(family, path)
        loaded = load(str(path))
        numbers = random.Random(1)
        shared = [numbers.randrange(3, 400) for _ in range(40)]
        prompts = [[numbers.randrange(3, 400) for _ in range(length)] for length in LENGTHS]
        prompts += [shared + [numbers.randrange(3, 400) for _ in range(length)] for length in (1, 5, 9)]
        return loaded, prompts, [greedy(loaded.model, prompt, NEW_TOKENS) for prompt in prompts]

    return build


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 9, "block_size": 8},
        {"max_num_seqs": 4, "max_num_batched_tokens": 37, "block_size": 8, "prefix_caching": False},
        {"max_num_seqs": 4, "max_num_batched_tokens": 36, "block_size": 32},
        {"max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 16},
        {"max_num_seqs": 5, "max_num_batched_tokens": 9, "block_size": 4},
    ],
    ids=lambda s: "-".join(f"{key.removeprefix('max_num_')}={value}" for key, value in s.items()),
)
def test_tokens_equal_mlx_lm(tiny, family, settings):
    loaded, prompts, oracle = tiny(family)
    outputs, _ = run_engine(
        loaded, prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True), **settings
    )
    comparison = Comparison()
    for number, (got, want) in enumerate(zip(outputs, oracle, strict=True)):
        comparison.add(f"{family} prompt {number}", got, want)
    assert comparison.ok, comparison


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no-prefix"])
def test_tokens_survive_preemption(tiny, family, prefix):
    loaded, prompts, oracle = tiny(family)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 8, "prefix_caching": prefix}
    answers = sorted(zip(prompts, oracle, strict=True), key=lambda pair: len(pair[0]))[:8]
    prompts = [prompt for prompt, _ in answers]
    outputs, stats = run_engine(
        loaded,
        prompts,
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
        kv_memory=small_pool(loaded, prompts, NEW_TOKENS, **settings),
        **settings,
    )
    assert stats["preemptions"], "the pool must be too small for this test to mean something"
    comparison = Comparison()
    for number, (got, (_, want)) in enumerate(zip(outputs, answers, strict=True)):
        comparison.add(f"{family} prompt {number}", got, want)
    assert comparison.ok, comparison
