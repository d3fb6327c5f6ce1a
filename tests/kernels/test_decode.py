"""paged_attention_decode (and the merge behind it) against the float64 oracle, checked, on NaN-poisoned memory."""

from __future__ import annotations

import sys

import pytest
from oracle import TOLERANCE, deviation
from quick_compile import compile_first
from scene import Case, run_decode
from variants import Variant, decode_lengths, decode_variants, random_variant

from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_source import KernelFactory

VARIANTS = decode_variants()


def run(factory: KernelFactory, variant: Variant) -> float:
    attention = MetalAttention(factory, chunk_tokens=variant.chunk_tokens)
    got, expected = run_decode(attention, variant.case, decode_lengths(variant), variant.q_len, variant.seed)
    return deviation(got, expected)


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
@pytest.mark.parametrize("first_seed", range(10_000, 11_500, 50))
def test_random_variants(kernel_factory: KernelFactory, first_seed: int) -> None:
    worst: dict[str, float] = {}
    for seed in range(first_seed, first_seed + 50):
        variant = random_variant(seed)
        error = run(kernel_factory, variant)
        worst[variant.case.dtype] = max(error, worst.get(variant.case.dtype, 0.0))
        assert error <= TOLERANCE[variant.case.dtype], f"seed {seed}: {variant.name}"
    print("worst deviations", {dtype: f"{error:.1e}" for dtype, error in worst.items()})


def with_neighbours(step: int, longest: int) -> set[int]:
    return {n + d for n in range(step, longest + 1, step) for d in (-1, 0, 1) if n + d <= longest}


@pytest.mark.parametrize("block_size", [32, 16, 8])
def test_every_boundary_up_to_4096(kernel_factory: KernelFactory, block_size: int) -> None:
    """Chunk boundaries with their neighbours; block boundaries, those up to 256 with their neighbours (of blocks of 8
    only these)."""
    lengths = {1} | with_neighbours(256, 4096) | with_neighbours(block_size, 256)
    lengths |= set(range(block_size, 4097, block_size)) if block_size > 8 else set()
    case = Case(key_dim=64, value_dim=64, kv_heads=1, group=2, block_size=block_size, dtype="float32")
    got, expected = run_decode(MetalAttention(kernel_factory), case, sorted(lengths))
    error = deviation(got, expected)
    print(f"{len(lengths)} lengths from {min(lengths)} to {max(lengths)}: deviation {error:.1e}")
    assert error <= TOLERANCE["float32"]


def test_rows_that_see_nothing_give_zeros(kernel_factory: KernelFactory) -> None:
    got, expected = run_decode(MetalAttention(kernel_factory), Case(), [0, 40, 0])
    assert not got[0].any() and not got[2].any()
    assert deviation(got, expected) <= TOLERANCE["float16"]
