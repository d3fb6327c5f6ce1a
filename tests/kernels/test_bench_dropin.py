"""The stand-in takes what `mx.fast.metal_kernel` takes, and Metal's arithmetic and functions give Metal's results."""

from typing import Any

import mlx.core as mx
import mlx_lm.models.gated_delta as gated_delta
import mlx_lm.models.ssm as ssm
import numpy as np
import pytest
from bench import Bench

DTYPES = [mx.float16, mx.bfloat16, mx.float32]


def elementwise(
    bench: Bench, source: str, inputs: dict[str, Any], dtype: mx.Dtype = mx.float32, **more: Any
) -> mx.array:
    """One thread per element of the first input."""
    kernel = bench.metal_kernel(
        "elementwise", list(inputs), ["out"], "uint i = thread_position_in_grid.x;\n" + source
    )
    first = next(iter(inputs.values()))
    (out,) = kernel(
        inputs=list(inputs.values()), grid=(first.size, 1, 1), threadgroup=(32, 1, 1), output_shapes=[first.shape],
        output_dtypes=[dtype], **more,
    )  # fmt: skip
    return out


def views() -> dict[str, Any]:
    return {
        "slice": lambda a: a[::2, 3:],
        "transpose": lambda a: a.T,
        "broadcast": lambda a: mx.broadcast_to(a[:1], a.shape),
        "contiguous": lambda a: a,
    }


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", views())
def test_strided_inputs(bench: Bench, view: str, dtype: mx.Dtype, contiguous: bool) -> None:
    """With scalars, a small array (constant memory) and a ragged last threadgroup."""
    kernel = bench.metal_kernel(
        "strided", ["inp", "factor", "small"], ["out"],
        """
        uint elem = thread_position_in_grid.x;
        out[elem] = float(inp[elem_to_loc(elem, inp_shape, inp_strides, inp_ndim)]) * factor + small[elem % 3];
        """,
        ensure_row_contiguous=contiguous,
    )  # fmt: skip
    a = views()[view](mx.random.normal((8, 16)).astype(dtype))
    (out,) = kernel(
        inputs=[a, 0.5, mx.array([1, 2, 3])], grid=(a.size, 1, 1), threadgroup=(48, 1, 1), output_shapes=[a.shape],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    expected = np.array(a.astype(mx.float32)) * np.float32(0.5) + (np.arange(a.size) % 3 + 1).reshape(a.shape).astype(
        "f4"
    )
    assert np.array_equal(np.array(out), expected)
    read = bench.report.traffic["inp"].size // dtype.size
    assert read == (
        a.size if contiguous else {"slice": 109, "transpose": 128, "broadcast": 16, "contiguous": 128}[view]
    )


def test_outputs_templates_and_init_value(bench: Bench) -> None:
    kernel = bench.metal_kernel(
        "several", ["x"], ["a", "b", "c", "flags"],
        """
        uint i = thread_position_in_grid.x;
        a[i] = F ? T(x[i]) : T(-x[i]);
        b[i] = N + int(x[i]);
        if (x[i] > 1) c[i] += 5;
        flags[i] = x[i] > 1;
        """,
    )  # fmt: skip
    x = mx.array([0.5, 1.5, 2.5, -3.5, 0, 1, 2, 3])
    for flag, number in ((True, 3), (False, -2)):
        a, b, c, flags = kernel(
            inputs=[x], template=[("T", mx.bfloat16), ("F", flag), ("N", number)], grid=(8, 1, 1),
            threadgroup=(8, 1, 1), output_shapes=[(8,), (2, 4), (8,), (8,)],
            output_dtypes=[mx.bfloat16, mx.int64, mx.bfloat16, mx.bool_], init_value=2,
        )  # fmt: skip
        assert [y.dtype for y in (a, b, c, flags)] == [mx.bfloat16, mx.int64, mx.bfloat16, mx.bool_]
        assert mx.array_equal(a, (x if flag else -x).astype(mx.bfloat16))
        assert mx.array_equal(b, (number + x.astype(mx.int64)).reshape(2, 4))
        assert mx.array_equal(c.astype(mx.float32), mx.where(x > 1, 7.0, 2.0))
        assert mx.array_equal(flags, x > 1)


def test_positions_of_a_ragged_grid(bench: Bench) -> None:
    """A 5 x 3 x 2 grid of 2 x 2 x 1 threadgroups: the last ones are cut."""
    kernel = bench.metal_kernel(
        "positions", ["x"], ["out"],
        """
        uint3 p = thread_position_in_grid, g = threadgroup_position_in_grid, t = thread_position_in_threadgroup;
        uint3 size = threads_per_threadgroup, full = dispatch_threads_per_threadgroup;
        uint3 groups = threadgroups_per_grid;
        uint at = ((p.z * grid_size.y + p.y) * threads_per_grid.x + p.x) * 8;
        out[at] = all(p == g * full + t);
        out[at + 1] = size.x * 100 + size.y * 10 + size.z;
        out[at + 2] = thread_index_in_threadgroup == (t.z * size.y + t.y) * size.x + t.x;
        out[at + 3] = groups.x * 100 + groups.y * 10 + groups.z;
        out[at + 4] = thread_index_in_simdgroup + 32 * simdgroup_index_in_threadgroup == thread_index_in_threadgroup;
        out[at + 5] = simdgroups_per_threadgroup * 100 + threads_per_simdgroup;
        out[at + 6] = all(grid_origin == uint3(0));
        out[at + 7] = x[0] + full.x * 10 + full.y;
        """,
    )  # fmt: skip
    (out,) = kernel(
        inputs=[mx.zeros(8)], grid=(5, 3, 2), threadgroup=(2, 2, 1), output_shapes=[(2, 3, 5, 8)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    got = np.array(out)
    sizes = [[[(1 if x == 4 else 2) * 100 + (1 if y == 2 else 2) * 10 + 1 for x in range(5)] for y in range(3)]] * 2
    assert np.array_equal(got[..., 1], sizes)
    assert np.array_equal(got[0, 0, 0], [1, 221, 1, 322, 1, 132, 1, 22])
    for column in (0, 2, 4, 6):
        assert (got[..., column] == 1).all()


def test_half_rounds_after_each_operation(bench: Bench) -> None:
    a, b, c = (np.random.default_rng(n).standard_normal(4096).astype(np.float16) for n in range(3))
    inputs = {"a": mx.array(a), "b": mx.array(b), "c": mx.array(c)}
    out = elementwise(bench, "half x = a[i], y = b[i], z = c[i]; out[i] = x * y + z;", inputs, mx.float16)
    assert np.array_equal(np.array(out), a * b + c)
    out = elementwise(bench, "out[i] = half(float(a[i]) * float(b[i]) + float(c[i]));", inputs, mx.float16)
    wide = a.astype(np.float32) * b.astype(np.float32) + c.astype(np.float32)
    assert np.array_equal(np.array(out), wide.astype(np.float16))


def test_bfloat_arithmetic_is_that_of_mlx(bench: Bench) -> None:
    a, b, c = (mx.random.normal((4096,), key=mx.random.key(n)).astype(mx.bfloat16) for n in range(3))
    inputs = {"a": a, "b": b, "c": c}
    body = "bfloat16_t x = a[i], y = b[i], z = c[i];"
    for source, expected in (
        ("out[i] = x * y + z;", a * b + c),
        ("out[i] = x / y;", a / b),
        ("out[i] = max(x, y);", mx.maximum(a, b)),
        ("x -= y; out[i] = -x;", -(a - b)),
        ("out[i] = bfloat16_t(exp(float(x)));", mx.exp(a.astype(mx.float32)).astype(mx.bfloat16)),
    ):
        assert mx.array_equal(elementwise(bench, body + source, inputs, mx.bfloat16), expected)


def test_collectives(bench: Bench) -> None:
    x = mx.random.normal((64,))
    rows = np.array(x).reshape(2, 32)
    exclusive = np.cumsum(rows, 1) - rows
    cases = {
        "simd_sum(v)": np.repeat(rows.sum(1), 32).reshape(2, 32),
        "simd_max(v) - simd_min(v)": np.repeat(np.ptp(rows, 1), 32).reshape(2, 32),
        "simd_prefix_exclusive_sum(v)": exclusive,
        "simd_prefix_inclusive_sum(v)": exclusive + rows,
        "simd_shuffle(v, 31 - lane)": rows[:, ::-1],
        "simd_shuffle_xor(v, 5)": rows[:, np.arange(32) ^ 5],
        "simd_shuffle_up(v, 1)": np.concatenate([rows[:, :1], rows[:, :-1]], 1),
        "simd_shuffle_down(v, 2)": np.concatenate([rows[:, 2:], rows[:, -2:]], 1),
        "simd_shuffle_and_fill_up(v, 9.0f, 1)": np.concatenate([np.full((2, 1), 9.0), rows[:, :-1]], 1),
        "simd_shuffle_rotate_down(v, 3)": np.roll(rows, -3, 1),
        "simd_broadcast(v, 7)": np.repeat(rows[:, 7], 32).reshape(2, 32),
        "simd_broadcast_first(v)": np.repeat(rows[:, 0], 32).reshape(2, 32),
        "float(popcount(uint(simd_vote::vote_t(simd_ballot(v > 0)))))": np.repeat((rows > 0).sum(1), 32).reshape(
            2, 32
        ),
        "float(simd_all(v > -99) && !simd_any(v > 99))": np.ones((2, 32)),
        "quad_sum(v)": rows.reshape(2, 8, 4).sum(2).repeat(4, 1),
        "quad_max(v)": rows.reshape(2, 8, 4).max(2).repeat(4, 1),
        "simd_sum(float2(v, 1)).y": np.full((2, 32), 32.0),
    }
    lines = "\n".join(f"out[{n} * 64 + i] = {expression};" for n, expression in enumerate(cases))
    kernel = bench.metal_kernel(
        "collectives", ["x"], ["out"],
        f"uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup; float v = x[i];\n{lines}",
    )  # fmt: skip
    (out,) = kernel(
        inputs=[x], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(len(cases), 2, 32)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    for (expression, expected), got in zip(cases.items(), np.array(out), strict=True):
        assert np.allclose(got, expected, atol=1e-5), expression


def test_vectors_and_bits(bench: Bench) -> None:
    """Each expression is true."""
    truths = [
        "all(float4(1, 2, 3, 4).wzyx == float4(4, 3, 2, 1))",
        "all(float4(float2(1, 2), 3, 4).xz == float2(1, 3))",
        "all(float3(v).xyz == float3(2))",
        "dot(float4(1, 2, 3, 4), float4(1)) == 10",
        "all(clamp(int4(-5, 0, 5, 9), 0, 7) == int4(0, 0, 5, 7))",
        "all(select(int2(1, 2), int2(3, 4), bool2(true, false)) == int2(3, 2))",
        "all(uint4(1, 2, 3, 4) << 1u == uint4(2, 4, 6, 8))",
        "as_type<uint>(1.0f) == 0x3f800000u",
        "all(as_type<half2>(0x3c004000u) == half2(2, 1))",
        "as_type<ushort>(bfloat(1.0f)) == 0x3f80",
        "all(as_type<uchar4>(0x04030201u) == uchar4(1, 2, 3, 4))",
        "clz(1u) == 31 && ctz(8) == 3 && popcount(255ul) == 8",
        "mulhi(0x80000000u, 4u) == 2",
        "isinf(-INFINITY) && isnan(NAN) && !isfinite(INFINITY)",
        "fast::exp2(3.0f) == 8 && precise::sqrt(16.0f) == 4 && rsqrt(4.0f) == 0.5f",
        "fma(2.0f, 3.0f, 1.0f) == 7 && exp(-INFINITY) == 0",
        "0.5 + 0.25 == 0.75f && sizeof(0.5) == 4",
        "numeric_limits<half>::max() == 65504.0h && numeric_limits<float>::lowest() < -3e38f",
        "metal::max(v, 1.0f) == 2 && metal::abs(-3) == 3 && sign(-v) == -1",
        "(int(v) > 1 ? float2(1, 2) : float2(3, 4)).y == 2",
    ]
    lines = "\n".join(f"out[{n}] = {truth};" for n, truth in enumerate(truths))
    kernel = bench.metal_kernel("truths", ["x"], ["out"], f"float v = x[0];\n{lines}")
    (out,) = kernel(
        inputs=[mx.full((8,), 2.0)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(len(truths),)],
        output_dtypes=[mx.bool_],
    )  # fmt: skip
    assert [truth for truth, holds in zip(truths, out.tolist(), strict=True) if not holds] == []


@pytest.fixture
def mlx_lm_kernels(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """mlx-lm's own kernels run on the bench, as if there were a GPU."""
    monkeypatch.setattr(mx.fast, "metal_kernel", bench.metal_kernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    return bench


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


@pytest.mark.parametrize("vector_gate", [False, True])
def test_mlx_lm_gated_delta_kernel(mlx_lm_kernels: Bench, vector_gate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_gated_delta_kernel", "_gated_delta_kernel_vec"):
        kernel = gated_delta._make_gated_delta_kernel(False, "vec" in name)
        monkeypatch.setattr(gated_delta, name, kernel)
    q, k, v = normal(1, 5, 2, 64), normal(1, 5, 2, 64) * 0.1, normal(1, 5, 4, 32)
    gate = mx.random.uniform(shape=(1, 5, 4, 64) if vector_gate else (1, 5, 4))
    beta, state = mx.random.uniform(shape=(1, 5, 4)), normal(1, 4, 32, 64)
    outputs = gated_delta.gated_delta_kernel(q, k, v, gate, beta, state)
    expected = gated_delta.gated_delta_ops(q, k, v, gate, beta, state)
    assert mlx_lm_kernels.report.findings == ()
    for got, want in zip(outputs, expected, strict=True):
        assert mx.abs(got - want).max().item() < 1e-4


def test_mlx_lm_ssm_kernel(mlx_lm_kernels: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())
    x, a, d, dt, bias = normal(1, 1, 4, 64), normal(4), normal(4), normal(1, 1, 4), normal(4)
    b, c, state = normal(1, 1, 2, 128), normal(1, 1, 2, 128), normal(1, 4, 64, 128)
    limits = (0.0, float("inf"))
    outputs = ssm.ssm_update_kernel(x, a, b, c, d, dt, bias, state, limits)
    expected = ssm.ssm_attn(x, a, b, c, d, dt, bias, state, limits)
    for got, want in zip(outputs, expected, strict=True):
        assert mx.abs(got - want).max().item() < 1e-3
