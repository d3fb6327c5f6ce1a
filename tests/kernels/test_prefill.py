"""paged_attention_prefill against the float64 oracle, checked, on NaN-poisoned memory."""

from __future__ import annotations

import sys

import mlx.core as mx
import numpy as np
import pytest
from bench import Bench
from oracle import TOLERANCE, deviation
from quick_compile import compile_first, quick_to_compile
from scene import Case, run_prefill
from variants import Variant, prefill_variants, random_variant

from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_prefill import DISPATCH_SECONDS, positions_per_dispatch, staged_keys
from mlxbatch.execution.attention.metal_source import KernelFactory

VARIANTS = prefill_variants()


def run(factory: KernelFactory, variant: Variant) -> float:
    random = np.random.default_rng(variant.seed)
    start, count = int(random.integers(0, 130)), int(random.integers(1, 40))
    attention = MetalAttention(factory, own_prefill=True)
    return deviation(*run_prefill(attention, variant.case, start, count, variant.seed))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    if sys.platform == "darwin":
        return
    bench = request.getfixturevalue("shared_bench")
    number = compile_first(bench, [lambda factory, v=v: run(factory, v) for v in VARIANTS])
    print(f"{number} kernels for {len(VARIANTS)} variants")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_variant(kernel_factory: KernelFactory, variant: Variant) -> None:
    error = run(kernel_factory, variant)
    print(f"deviation {error:.1e}")
    assert error <= TOLERANCE[variant.case.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(20_000, 20_500, 50))
def test_random_variants(kernel_factory: KernelFactory, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        variant = random_variant(seed)
        assert run(kernel_factory, variant) <= TOLERANCE[variant.case.dtype], f"seed {seed}: {variant.name}"


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_chunk_starts_anywhere(kernel_factory: KernelFactory, block_size: int, window: int | None) -> None:
    """Every start within two blocks, with every flushed length that the tail allows, chunks of 1 to 2 blocks."""
    case = Case(
        key_dim=64, value_dim=64, group=2, kv_heads=1, block_size=block_size, window=window, dtype="float32"
    )
    attention = MetalAttention(kernel_factory, own_prefill=True)
    for start in range(4 * block_size, 6 * block_size, 3):
        for unflushed in (0, block_size - 1, block_size, 2 * block_size - 1):
            for count in (1, block_size, 2 * block_size):
                got, expected = run_prefill(attention, case, start, count, seed=start, unflushed=unflushed)
                assert deviation(got, expected) <= TOLERANCE["float32"], (start, unflushed, count)


@pytest.mark.parametrize("seconds", [0.5, 2.0])
def test_long_chunks_are_split_by_estimated_time(bench: Bench, seconds: float) -> None:
    """A device so slow that the whole chunk would take `seconds` runs it in dispatches of 0.1 s."""
    case, start, count = Case(key_dim=64, value_dim=64), 50, 40
    multiply_adds = 2.0 * case.kv_heads * case.group * 128 * (start + count) * count
    attention = MetalAttention(
        quick_to_compile(bench.metal_kernel), own_prefill=True, flops_per_second=multiply_adds / seconds
    )
    bench.reports.clear()
    got, expected = run_prefill(attention, case, start, count)
    assert deviation(got, expected) <= TOLERANCE["float16"]
    assert len(bench.reports) == round(seconds / DISPATCH_SECONDS)


def test_dispatches_stay_below_the_limit() -> None:
    for context in (1_000, 100_000, 1_000_000):
        flops = 5e12
        count = positions_per_dispatch(8192, context, None, 64, 256, flops)
        assert count == 1 or 2.0 * 64 * 256 * context * count / flops <= DISPATCH_SECONDS
    assert positions_per_dispatch(512, 4_000, None, 32, 256, 5e12) == 512
    assert (
        positions_per_dispatch(8192, 1_000_000, 1024, 64, 256, 5e12) == 8192
    )  # a window is all that is seen


def test_staging_leaves_room_for_a_second_threadgroup() -> None:
    assert staged_keys(128, 128, 2) == 32
    assert staged_keys(256, 256, 2) == 16
    assert staged_keys(256, 256, 4) == 8


def test_a_fresh_prompt_goes_to_mlx(bench: Bench) -> None:
    bench.reports.clear()
    attention = MetalAttention(bench.metal_kernel)
    got, expected = run_prefill(attention, Case(key_dim=64, value_dim=64, dtype="float32"), 0, 19)
    assert deviation(got, expected) <= TOLERANCE["float32"]
    assert not bench.reports
    run_prefill(MetalAttention(quick_to_compile(bench.metal_kernel)), Case(softcap=9.0), 0, 19)
    assert len(bench.reports) == 1


def test_output_has_the_queries_dtype(kernel_factory: KernelFactory) -> None:
    """float32 queries on a bfloat16 cache, as models with a float32 rope hand them over."""
    attention = MetalAttention(kernel_factory, own_prefill=True)

    class Widened:
        def prefill(self, q: mx.array, *rest: object) -> mx.array:
            out = attention.prefill(q.astype(mx.float32), *rest)  # type: ignore[arg-type]
            assert out.dtype == mx.float32
            return out

    got, expected = run_prefill(Widened(), Case(dtype="bfloat16"), 33, 5)  # type: ignore[arg-type]
    assert deviation(got, expected) <= TOLERANCE["bfloat16"]
