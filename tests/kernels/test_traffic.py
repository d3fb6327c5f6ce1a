"""How much device memory the kernels read, counted exactly, against the least that the work needs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from bench import Bench, Report
from quick_compile import quick_to_compile
from scene import Case, run_decode, run_prefill
from test_matmul import matmul

from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_source import KernelFactory
from mlxbatch.execution.quantized_linear import CUTS, Cut

LINE = 64
KV_BUFFERS = ("pool_k", "pool_v", "tail_k", "tail_v")


@pytest.fixture
def factory(bench: Bench) -> KernelFactory:
    bench.configure(count=True)
    return quick_to_compile(bench.metal_kernel)


@dataclass(frozen=True)
class Ratios:
    """Bytes of distinct lines of each threadgroup, and of the lines of each simdgroup instruction, over `least`."""

    threadgroup: float
    instruction: float


def ratios(report: Report, buffers: tuple[str, ...], least: int) -> Ratios:
    traffic = [report.traffic[name] for name in buffers]
    return Ratios(
        sum(t.threadgroup_read_lines for t in traffic) * LINE / least,
        sum(t.read_lines for t in traffic) * LINE / least,
    )


def decode_ratios(bench: Bench, factory: KernelFactory, case: Case, lengths: list[int]) -> Ratios:
    bench.reports.clear()
    run_decode(MetalAttention(factory), case, lengths, unflushed=5)
    report = next(r for r in bench.reports if r.kernel == "paged_attention_decode")
    row_bytes = case.kv_heads * (case.key_dim + case.value_dim) * case.mlx_dtype.size
    found = ratios(report, KV_BUFFERS, row_bytes * sum(min(n, case.window or n) for n in lengths))
    print(f"contexts {lengths}, window {case.window}, group {case.group}: {found}")
    return found


def test_short_contexts_partly_in_the_tail(bench: Bench, factory: KernelFactory) -> None:
    found = decode_ratios(bench, factory, Case(kv_heads=2, group=4), [1, 37, 200])
    assert found.threadgroup <= 1.05 and found.instruction <= 1.7


def test_long_context(bench: Bench, factory: KernelFactory) -> None:
    found = decode_ratios(bench, factory, Case(kv_heads=2, group=4), [4096])
    assert found.threadgroup <= 1.02 and found.instruction <= 1.1


def test_a_window_is_skipped_not_masked(bench: Bench, factory: KernelFactory) -> None:
    found = decode_ratios(bench, factory, Case(kv_heads=2, group=4, window=512), [4096])
    assert found.threadgroup <= 1.2 and found.instruction <= 1.2


@pytest.mark.parametrize(("group", "dim"), [(1, 128), (8, 128), (16, 128), (8, 64), (8, 256)])
def test_a_whole_group_shares_one_read(bench: Bench, factory: KernelFactory, group: int, dim: int) -> None:
    found = decode_ratios(bench, factory, Case(kv_heads=1, group=group, key_dim=dim, value_dim=dim), [300])
    assert found.threadgroup <= 1.02 and found.instruction <= 1.1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_latent_decode_reads_the_latent_once_for_keys_and_values(
    bench: Bench, factory: KernelFactory, dtype: str
) -> None:
    bench.reports.clear()
    case = Case(latent=True, group=16, dtype=dtype)
    run_decode(MetalAttention(factory), case, [250], unflushed=5)
    least = 250 * 512 * case.mlx_dtype.size
    latent = ratios(bench.reports[0], ("pool_latent", "tail_latent"), least)
    print(latent)
    assert latent.threadgroup <= 1.02 and latent.instruction <= 1.1


def test_prefill_reads_its_context_once_a_threadgroup(bench: Bench, factory: KernelFactory) -> None:
    case = Case(kv_heads=1, group=4)
    run_prefill(MetalAttention(factory, own_prefill=True), case, 200, 16)
    least = 200 * 256 * case.mlx_dtype.size  # 64 queries: one threadgroup
    found = ratios(bench.report, KV_BUFFERS, least)
    print(found)
    assert found.threadgroup <= 1.02 and found.instruction <= 1.1


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_matmul_reads_each_weight_once(bench: Bench, factory: KernelFactory, cut: Cut) -> None:
    _, _, weights = matmul(factory, rows=8, outputs=512, inputs=512, bits=4, group_size=64, cut=cut)
    traffic = [bench.report.traffic[name] for name in ("weight", "scales", "biases")]
    read = sum(t.read_bytes for t in traffic) / weights
    lines = bench.report.traffic["weight"].read_lines * LINE / bench.report.traffic["weight"].size
    print(f"{cut}: weight bytes read {read:.3f}, lines of codes per instruction {lines:.3f}")
    assert read <= 1.05 and lines <= 1.05
