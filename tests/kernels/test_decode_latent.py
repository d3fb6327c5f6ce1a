"""paged_attention_latent (MLA) against the float64 oracle: decode rows and prefill chunks."""

from __future__ import annotations

import pytest
from oracle import TOLERANCE, deviation
from scene import Case, run_decode, run_prefill

from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_source import KernelFactory


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("heads", "q_len"), [(1, 1), (5, 3), (16, 1), (20, 2)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_decode(
    kernel_factory: KernelFactory, dtype: str, heads: int, q_len: int, window: int | None
) -> None:
    case = Case(dtype=dtype, latent=True, group=heads, window=window, block_size=8 if heads == 5 else 16)
    lengths = [q_len, 37, 96, 17]
    for chunk_tokens in (32, 256):  # with and without a merge
        attention = MetalAttention(kernel_factory, chunk_tokens=chunk_tokens)
        error = deviation(*run_decode(attention, case, lengths, q_len, seed=heads))
        assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("start", "count", "heads"), [(0, 9, 16), (45, 6, 5), (64, 3, 16)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_prefill(
    kernel_factory: KernelFactory, dtype: str, start: int, count: int, heads: int, window: int | None
) -> None:
    case = Case(dtype=dtype, latent=True, group=heads, window=window)
    got, expected = run_prefill(MetalAttention(kernel_factory), case, start, count, seed=start)
    assert deviation(got, expected) <= TOLERANCE[dtype]


def test_prefill_in_several_dispatches(kernel_factory: KernelFactory) -> None:
    attention = MetalAttention(kernel_factory, flops_per_second=1e7)
    got, expected = run_prefill(attention, Case(dtype="float32", latent=True, group=8), 40, 7)
    assert deviation(got, expected) <= TOLERANCE["float32"]
