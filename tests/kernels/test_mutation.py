"""Barriers: without any one of them a check fails, and with them the order of threads does not matter."""

from __future__ import annotations

from collections.abc import Callable

import mutate
import pytest
from bench import BACKWARD, FORWARD, Bench
from oracle import deviation
from quick_compile import quick_to_compile
from scene import Case, run_decode, run_prefill
from test_matmul import matmul

from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_source import KernelFactory
from mlxbatch.execution.quantized_linear import Cut


def run_attention(factory: KernelFactory, latent: bool = False) -> None:
    # Two tiles of queries, so that the merge of simdgroups goes round its loop more than once.
    case = Case(key_dim=64, value_dim=64, group=9, kv_heads=1, latent=latent)
    got, expected = run_decode(MetalAttention(factory, chunk_tokens=32), case, [70])
    assert deviation(got, expected) < 1e-3


def run_prefills(factory: KernelFactory) -> None:
    case = Case(key_dim=64, value_dim=64, group=9, kv_heads=1)
    got, expected = run_prefill(MetalAttention(factory, own_prefill=True), case, 60, 8)
    assert deviation(got, expected) < 1e-3


def run_matmul(factory: KernelFactory) -> None:
    matmul(factory, rows=9, outputs=24, inputs=640, bits=4, group_size=64, cut=Cut(2, 2))


CASES: dict[str, Callable[[KernelFactory], None]] = {
    "paged_attention_decode.metal": run_attention,
    "paged_attention_merge.metal": run_attention,
    "paged_attention_prefill.metal": run_prefills,
    "paged_attention_latent.metal": lambda factory: run_attention(factory, latent=True),
    "quantized_matmul_small_batch.metal": run_matmul,
}


def run(factory: KernelFactory, file: str) -> None:
    """For `python tests/kernels/mutate.py test_mutation:run` too."""
    CASES[file](quick_to_compile(factory))


@pytest.mark.parametrize("file", CASES)
def test_no_barrier_can_go(bench: Bench, file: str) -> None:
    CASES[file](bench.metal_kernel)  # all barriers in place, and loops unrolled as MLX gets them
    barriers = [barrier for barrier in mutate.kernel_barriers() if barrier.file == file]
    assert barriers
    print(*barriers, sep="\n")
    assert not list(mutate.survivors(bench, barriers, run))


@pytest.mark.parametrize("file", CASES)
def test_any_thread_schedule_gives_the_same_bits(bench: Bench, file: str) -> None:
    bench.configure(schedules=(FORWARD, BACKWARD, 5, 6))
    run(bench.metal_kernel, file)


def test_every_kernel_with_a_barrier_has_a_case() -> None:
    assert {barrier.file for barrier in mutate.kernel_barriers()} == set(CASES)
