"""Chunks and their merge: a row's result is the same bits whoever its neighbours are and wherever K and V lie."""

from __future__ import annotations

import numpy as np
import pytest
from bench import Bench
from oracle import TOLERANCE, deviation
from quick_compile import quick_to_compile
from scene import Case, run_decode

from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_source import KernelFactory
from mlxbatch.execution.attention.metal_work import chunk_range

DTYPES = ("float16", "bfloat16", "float32")


def launched(bench: Bench) -> list[str]:
    return [report.kernel for report in bench.reports]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_context_in_many_chunks(kernel_factory: KernelFactory, dtype: str, sinks: bool) -> None:
    case = Case(dtype=dtype, key_dim=64, value_dim=96, sinks=sinks, group=3)
    got, expected = run_decode(MetalAttention(kernel_factory, chunk_tokens=16), case, [700, 3, 16])
    assert deviation(got, expected) <= TOLERANCE[dtype]


def test_merge_is_skipped_when_every_row_has_one_chunk(bench: Bench) -> None:
    bench.reports.clear()
    attention = MetalAttention(quick_to_compile(bench.metal_kernel), chunk_tokens=256)
    run_decode(attention, Case(), [5, 100, 200], unflushed=1)
    assert launched(bench) == ["paged_attention_decode"]
    run_decode(attention, Case(), [5, 100, 300])
    assert launched(bench) == ["paged_attention_decode"] * 2 + ["paged_attention_merge"]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_do_not_change_a_row(kernel_factory: KernelFactory, dtype: str, sinks: bool) -> None:
    """Alone the row has one chunk and no merge; beside a long row its chunk is merged with nothing."""
    attention = MetalAttention(kernel_factory, chunk_tokens=256)
    case = Case(dtype=dtype, sinks=sinks)
    alone, _ = run_decode(attention, case, [90], seed=3)
    beside, _ = run_decode(attention, case, [90, 600], seed=3)
    assert np.array_equal(alone[0], beside[0])


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_time_of_a_flush_does_not_change_a_row(
    kernel_factory: KernelFactory, dtype: str, window: int | None
) -> None:
    attention = MetalAttention(kernel_factory, chunk_tokens=48)
    case = Case(dtype=dtype, window=window, block_size=8, tail_blocks=4)
    results = [run_decode(attention, case, [90, 131], unflushed=held, seed=4)[0] for held in (1, 9, 17, 25)]
    for result in results[1:]:
        assert np.array_equal(results[0], result)


def test_a_row_is_cut_into_absolute_chunks() -> None:
    assert chunk_range(flushed=0, first_block=0, block_size=16, tail_len=32, chunk=256) == range(1)
    assert chunk_range(flushed=224, first_block=0, block_size=16, tail_len=32, chunk=256) == range(1)
    assert chunk_range(flushed=240, first_block=0, block_size=16, tail_len=32, chunk=256) == range(2)
    assert chunk_range(flushed=4096, first_block=250, block_size=16, tail_len=32, chunk=256) == range(15, 17)
