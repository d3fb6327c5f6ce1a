"""The whole engine with its attention on our kernels, checked on the CPU bench: mlx-lm's tokens come out."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
import tiny_models
from bench import Bench
from engine_run import run_engine
from greedy_oracle import Comparison, greedy
from quick_compile import quick_to_compile

from mlxbatch.engine import assembly
from mlxbatch.execution.attention.choice import CheckedAttention
from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.reference import ReferenceAttention
from mlxbatch.models import load
from mlxbatch.models.loaded import LoadedModel
from mlxbatch.request import SamplingParams


@pytest.fixture
def kernels_serve(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> CheckedAttention:
    """Engines assembled in this test take kernels that run on the bench, self-check included."""
    metal = MetalAttention(quick_to_compile(bench.metal_kernel), chunk_tokens=32, own_prefill=True)
    attention = CheckedAttention(metal, ReferenceAttention(), chunk_tokens=32, report=pytest.fail)
    monkeypatch.setattr(assembly, "choose_attention", lambda choice, **options: attention)
    return attention


def same_tokens(loaded: LoadedModel, prompts: list[list[int]], new_tokens: int, **settings: object) -> None:
    oracle = [greedy(loaded.model, prompt, new_tokens) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outputs, stats = run_engine(loaded, prompts, params, **settings)
    comparison = Comparison()
    for number, (got, want) in enumerate(zip(outputs, oracle, strict=True)):
        comparison.add(f"prompt {number}", got, want)
    assert comparison.ok, comparison
    assert stats["attention"] == "metal"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_tiny_models(bench: Bench, kernels_serve: CheckedAttention, tmp_path, family: str) -> None:
    """Ragged prompts, chunks that start inside a block, a shared prefix, sliding windows."""
    tiny_models.write_dir(family, tmp_path)
    numbers = random.Random(1)
    shared = [numbers.randrange(3, 400) for _ in range(24)]
    prompts = [[numbers.randrange(3, 400) for _ in range(length)] for length in (1, 9, 40)]
    prompts += [shared + [numbers.randrange(3, 400) for _ in range(length)] for length in (2, 7)]
    bench.reports.clear()
    same_tokens(load(str(tmp_path)), prompts, 8, max_num_seqs=3, max_num_batched_tokens=23, block_size=8)
    kernels = {report.kernel for report in bench.reports}
    assert {"paged_attention_decode", "paged_attention_merge", "paged_attention_prefill"} <= kernels
    assert kernels_serve.replaced == ()


def test_smollm2(bench: Bench, kernels_serve: CheckedAttention) -> None:
    loaded = load("smollm2-135m")
    prompts = [
        loaded.tokenizer.encode(text) for text in ("The capital of France is", "def add(a, b):\n    return")
    ]
    bench.reports.clear()
    same_tokens(loaded, prompts, 3, max_num_seqs=2, max_num_batched_tokens=32, block_size=16)
    assert len([r for r in bench.reports if r.kernel == "paged_attention_decode"]) >= 2 * 30
    assert loaded.dtype == mx.float32
