"""Greedy tokens of one tiny model of every mode and attention kind, through the engine, equal mlx-lm's: with
prefix caching on and a pool so small that rows are preempted."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from engine_run import run_engine, small_pool
from families import tiny_model
from greedy_oracle import Comparison, greedy
from letter_tokenizer import LetterTokenizer
from mlx.utils import tree_flatten
from mlx_lm_families import VOCAB, config_of

from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.models.adapters import adapt
from mlxbatch.models.loaded import LoadedModel
from mlxbatch.models.progress import once
from mlxbatch.request import SamplingParams

NEW_TOKENS = 64
PACKED = (
    "deepseek_v3",  # latent
    "deepseek_v32",  # keys found by an index
    "gemma2",  # soft cap
    "gemma3n",  # keys shared between layers, windows
    "gpt_oss",  # sinks, windows, experts
    "llama4",  # chunks of positions
    "mimo_v2_flash",  # K and V of different widths, another number of heads in a window
    "qwen3",
)
SEGMENTED = (
    "gear",  # soft cap and window beside state
    "kimi_linear",  # latent beside state
    "mamba2",  # state alone
    "qwen3_next",
)
SETTINGS = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "block_size": 4, "seed": 0}


class WideTokenizer(LetterTokenizer):
    vocab_size = VOCAB


def load_tiny(name: str) -> LoadedModel:
    model = tiny_model(name)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=WideTokenizer(),  # type: ignore[arg-type]
        config=config_of(name),
        max_model_len=400,
        eos_token_ids=frozenset(),
        weight_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        dtype=mx.float32,
        fingerprint=name,
    )


@pytest.mark.parametrize("name", PACKED + SEGMENTED)
def test_greedy_tokens_equal_mlx_lm_under_preemption(name):
    loaded = load_tiny(name)
    numbers = random.Random(2)
    shared = [numbers.randrange(3, VOCAB) for _ in range(22)]
    prompts = [shared + [numbers.randrange(3, VOCAB) for _ in range(length)] for length in (1, 9)]
    prompts += [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in (2, 13)]
    oracle = [greedy(loaded.model, prompt, NEW_TOKENS) for prompt in prompts]
    adapt(loaded.model)
    has_kv = name != "mamba2"  # which keeps state alone
    outputs, stats = run_engine(
        loaded,
        prompts,
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
        kv_memory=small_pool(loaded, prompts, NEW_TOKENS, **SETTINGS) if has_kv else None,
        **SETTINGS,
    )
    comparison = Comparison()
    for number, (got, want) in enumerate(zip(outputs, oracle, strict=True)):
        comparison.add(f"{name} prompt {number}", got, want)
    assert comparison.ok, comparison
    assert comparison.tokens >= len(prompts) * (NEW_TOKENS - 1)
    assert stats["mode"] == ("packed" if name in PACKED else "segmented")
    assert stats["prefix_caching"] == (name in PACKED)
    if has_kv:
        assert stats["preemptions"], "the pool must be too small for this test to mean something"


def test_an_engine_says_when_prefix_caching_is_off():
    notes: list[str] = []
    for name in ("qwen3", "mamba2"):
        LocalEngine(EngineConfig(model=name), loaded=load_tiny(name), progress=once(notes.append)).close()
    assert notes == ["prefix caching is off: mamba2 has recurrent layers"]


def test_recurrent_state_is_counted_in_the_memory_budget():
    engine = LocalEngine(EngineConfig(model="mamba2", max_num_seqs=4), loaded=load_tiny("mamba2"))
    per_sequence = engine.stats()["state_bytes_per_sequence"]
    assert per_sequence
    # four slots and a scratch one, and a copy of each while a step stores its states
    assert engine._parts.budget.state == 2 * 5 * per_sequence
    engine.close()
