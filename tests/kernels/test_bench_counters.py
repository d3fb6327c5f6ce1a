"""Counts are exact: known kernels with the counts computed by hand, whatever the schedule."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from bench import Bench, Traffic

SCHEDULES = (0, 1, 2, 3, 12345)


def run(bench: Bench, source: str, inputs: dict[str, Any], grid: int, threadgroup: int, **more: Any) -> mx.array:
    kernel = bench.metal_kernel("counted", list(inputs), ["out"], source)
    (out,) = kernel(
        inputs=list(inputs.values()), grid=(grid, 1, 1), threadgroup=(threadgroup, 1, 1), output_shapes=[(grid,)],
        output_dtypes=[mx.float32], **more,
    )  # fmt: skip
    return out


@pytest.fixture
def counting(bench: Bench) -> Bench:
    bench.configure(count=True)
    return bench


def test_copy(counting: Bench) -> None:
    """Each simdgroup reads and writes 128 neighbouring bytes: two lines."""
    run(counting, "uint i = thread_position_in_grid.x; out[i] = x[i];", {"x": mx.zeros(256)}, 256, 64)
    traffic = counting.report.traffic
    assert traffic["x"] == Traffic(
        1024, read_bytes=1024, reads=256, read_lines=16, threadgroup_read_lines=16, unique_read_bytes=1024
    )
    assert traffic["out"] == Traffic(
        1024,
        written_bytes=1024,
        writes=256,
        written_lines=16,
        threadgroup_written_lines=16,
        unique_written_bytes=1024,
    )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32, mx.uint32, mx.uint8])
def test_a_vector_is_one_access(counting: Bench, dtype: mx.Dtype) -> None:
    """32 lanes read 4 elements each; every component is used, which must not count as four accesses."""
    source = """
        uint i = thread_position_in_grid.x;
        vec<T, 4> v = ((const device vec<T, 4>*)x)[i];
        out[i] = float(v.x) + float(v.y) * float(v.z) - float(v.w);
    """
    run(counting, source, {"x": mx.zeros(128, dtype=dtype)}, 32, 32, template=[("T", dtype)])
    size = 128 * dtype.size
    assert counting.report.traffic["x"] == Traffic(
        size, read_bytes=size, reads=32, read_lines=size // 64, threadgroup_read_lines=size // 64,
        unique_read_bytes=size,
    )  # fmt: skip


def test_strided_reads_touch_a_line_per_lane(counting: Bench) -> None:
    """Stride 64 floats: 32 lines an instruction. Both simdgroups of a threadgroup read the same ones."""
    source = "uint i = thread_position_in_grid.x; out[i] = x[thread_index_in_simdgroup * 64];"
    run(counting, source, {"x": mx.zeros(2048)}, 128, 64)
    assert counting.report.traffic["x"] == Traffic(
        8192, read_bytes=512, reads=128, read_lines=128, threadgroup_read_lines=64, unique_read_bytes=128
    )


def test_a_loop_is_an_instruction_each_time_round(counting: Bench) -> None:
    """16 rounds of 32 neighbouring floats, two lines each, also when lanes run one after the other."""
    source = """
        uint i = thread_position_in_grid.x;
        float sum = 0;
        for (int n = 0; n < 16; n++) sum += x[n * 32 + i];
        out[i] = sum;
    """
    run(counting, source, {"x": mx.zeros(512)}, 32, 32)
    traffic = counting.report.traffic["x"]
    assert (traffic.read_lines, traffic.threadgroup_read_lines, traffic.reads) == (32, 32, 512)


def test_an_access_across_lines_counts_both(counting: Bench) -> None:
    """Lane l reads 4 bytes at 62 + 64 l, bytewise: 3 lines for lane 0 and the last, but each line once."""
    source = """
        uint i = thread_position_in_grid.x;
        const device packed_uchar4* p = (const device packed_uchar4*)(x + 62 + 64 * i);
        uchar4 v = p[0];
        out[i] = v.x + v.y + v.z + v.w;
    """
    run(counting, source, {"x": mx.zeros(64 * 33, dtype=mx.uint8)}, 32, 32)
    traffic = counting.report.traffic["x"]
    assert traffic.read_bytes == 128
    assert traffic.threadgroup_read_lines == 33


def test_atomics(counting: Bench) -> None:
    kernel = counting.metal_kernel(
        "histogram", ["x"], ["h"],
        "uint i = thread_position_in_grid.x; atomic_fetch_add_explicit(&h[x[i]], 1, memory_order_relaxed);",
        atomic_outputs=True,
    )  # fmt: skip
    x = mx.random.randint(0, 10, (1000,))
    (h,) = kernel(
        inputs=[x], grid=(1000, 1, 1), threadgroup=(256, 1, 1), output_shapes=[(10,)], output_dtypes=[mx.int32],
        init_value=0,
    )  # fmt: skip
    assert np.array_equal(np.array(h), np.bincount(np.array(x), minlength=10))
    assert counting.report.traffic["h"] == Traffic(40, atomics=1000)


REDUCTION = """
    threadgroup float partial[4];
    uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    float s = simd_sum(x[thread_position_in_grid.x]);
    s = max(s, simd_shuffle_xor(s, 1));
    if (lane == 0) partial[simd] = s;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_barrier(mem_flags::mem_none);
    float all = 0;
    for (int n = 0; n < 4; n++) all += partial[n];
    out[thread_position_in_grid.x] = all;
"""


def test_barriers_collectives_and_threadgroup_memory(counting: Bench) -> None:
    """3 threadgroups of 4 simdgroups."""
    run(counting, REDUCTION, {"x": mx.ones(384)}, 384, 128)
    report = counting.report
    assert (report.threadgroups, report.threads) == (3, 384)
    assert report.collectives == {"simd_sum": 12, "simd_shuffle_xor": 12}
    assert report.simd_operations == 24
    assert (report.threadgroup_barriers, report.simdgroup_barriers) == (3, 12)
    assert report.threadgroup_memory == 16
    assert report.threadgroup_written_bytes == 3 * 4 * 4
    assert report.threadgroup_read_bytes == 384 * 16


def test_simdgroup_matrix_product(counting: Bench) -> None:
    source = """
        simdgroup_float8x8 a, b, c(0);
        simdgroup_load(a, x, 8);
        simdgroup_load(b, y, 8, ulong2(0), true);
        simdgroup_multiply_accumulate(c, a, b, c);
        simdgroup_multiply_accumulate(c, a, b, c);
        simdgroup_store(c, out, 8);
    """
    kernel = counting.metal_kernel("product", ["x", "y"], ["out"], source)
    x, y = (mx.random.normal((8, 8)) for _ in range(2))
    (out,) = kernel(
        inputs=[x, y], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(8, 8)], output_dtypes=[mx.float32]
    )
    expected = 2 * np.array(x, np.float64) @ np.array(y, np.float64).T
    assert np.abs(np.array(out) - expected).max() < 1e-5
    assert counting.report.collectives == {"simdgroup_multiply": 2}
    assert counting.report.traffic["x"].unique_read_bytes == 256
    assert counting.report.traffic["out"].unique_written_bytes == 256


def test_schedules_change_neither_results_nor_counts(counting: Bench) -> None:
    x = mx.random.normal((384,))
    results = []
    for schedule in SCHEDULES:
        counting.configure(schedules=(schedule,))
        results.append((run(counting, REDUCTION, {"x": x}, 384, 128).tolist(), counting.report))
    assert all(result == results[0] for result in results)


def test_counts_are_the_same_again(counting: Bench) -> None:
    x = mx.random.normal((384,))
    reports = []
    for _ in range(2):
        run(counting, REDUCTION, {"x": x}, 384, 128)
        reports.append(counting.report)
    assert reports[0] == reports[1]


def test_a_result_that_depends_on_the_schedule_is_a_finding(bench: Bench) -> None:
    """Atomic tickets: which thread draws which one depends on who comes first."""
    kernel = bench.metal_kernel(
        "tickets", ["x"], ["out", "counter"],
        "uint i = thread_position_in_grid.x; device atomic_int* next = (device atomic_int*)counter;\n"
        "out[i] = atomic_fetch_add_explicit(next, 1, memory_order_relaxed) + x[0];",
    )  # fmt: skip
    bench.configure(schedules=SCHEDULES, raise_on_findings=False)
    kernel(
        inputs=[mx.zeros(8)], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,), (1,)],
        output_dtypes=[mx.float32, mx.int32], init_value=0,
    )  # fmt: skip
    messages = [finding.message for finding in bench.report.findings]
    assert messages == [f"out differs between schedule 0 and {n}" for n in SCHEDULES[1:]]
