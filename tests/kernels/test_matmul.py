"""quantized_matmul_small_batch against float64, and where QuantizedLinear layers use it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from bench import Bench
from quick_compile import quick_to_compile
from scene import numpy64

from mlxbatch.execution.attention.metal_source import KernelFactory
from mlxbatch.execution.quantized_linear import (
    CUTS,
    Cut,
    SmallBatchKernel,
    SmallBatchQuantizedLinear,
    shape_of,
    use_small_batch_kernels,
)

TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}  # of the largest result


def quantized(
    outputs: int, inputs: int, bits: int, group_size: int, dtype: str, bias: bool = False
) -> nn.QuantizedLinear:
    linear = nn.Linear(inputs, outputs, bias=bias)
    linear.set_dtype(getattr(mx, dtype))
    return nn.QuantizedLinear.from_linear(linear, group_size, bits)


def matmul(
    factory: KernelFactory,
    *,
    rows: int,
    outputs: int,
    inputs: int,
    bits: int,
    group_size: int,
    cut: Cut,
    dtype: str = "float16",
) -> tuple[np.ndarray, np.ndarray, int]:
    """The kernel's result, float64's, and the bytes of codes, scales and biases."""
    mx.random.seed(rows)
    linear = quantized(outputs, inputs, bits, group_size, dtype)
    x = mx.random.normal((rows, inputs)).astype(getattr(mx, dtype))
    got = SmallBatchKernel(factory)(x, linear, cut)
    scales, biases = linear["scales"].astype(mx.float32), linear["biases"].astype(mx.float32)
    weights = mx.dequantize(linear["weight"], scales, biases, group_size, bits)
    size = sum(linear[name].nbytes for name in ("weight", "scales", "biases"))
    return numpy64(got), numpy64(x) @ numpy64(weights).T, size


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.nan_to_num(np.abs(got - expected), nan=np.inf).max() / np.abs(expected).max())


@pytest.mark.parametrize(("bits", "group_size"), list(itertools.product((4, 8), (32, 64, 128))))
@pytest.mark.parametrize(("dtype", "cut"), list(zip(TOLERANCE, CUTS, strict=True)))
def test_every_format(
    kernel_factory: KernelFactory, dtype: str, cut: Cut, bits: int, group_size: int
) -> None:
    shape = shape_of(quantized(72, 5 * group_size, bits, group_size, dtype))
    assert cut.fits(shape, 2)
    for rows in (2, 9):
        if not cut.fits(shape, rows):
            continue
        got, expected, _ = matmul(
            kernel_factory,
            rows=rows,
            outputs=72,
            inputs=5 * group_size,
            bits=bits,
            group_size=group_size,
            cut=cut,
            dtype=dtype,
        )
        assert relative_error(got, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_number_of_rows(kernel_factory: KernelFactory, cut: Cut) -> None:
    shape = shape_of(quantized(24, 128, 4, 64, "float16"))
    counts = [rows for rows in range(2, 33) if cut.fits(shape, rows)]
    assert counts[-1] >= 24
    for rows in counts:
        got, expected, _ = matmul(
            kernel_factory, rows=rows, outputs=24, inputs=128, bits=4, group_size=64, cut=cut
        )
        assert relative_error(got, expected) <= TOLERANCE["float16"], rows


def test_a_row_does_not_depend_on_the_number_of_rows(kernel_factory: KernelFactory) -> None:
    linear = quantized(40, 256, 4, 64, "float16")
    kernel = SmallBatchKernel(kernel_factory)
    x = mx.random.normal((32, 256)).astype(mx.float16)
    whole = kernel(x, linear, CUTS[0])
    for rows in (2, 7, 8, 17):
        assert mx.array_equal(kernel(x[:rows], linear, CUTS[0]), whole[:rows])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [quantized(64, 128, 4, 64, "float32", bias=index == 0) for index in range(3)]
        self.other_mode = nn.QuantizedLinear.from_linear(nn.Linear(128, 64, bias=False), 32, 4, mode="mxfp4")
        self.dense = nn.Linear(64, 8)


def fake_timer(own: dict[int, float]):  # type: ignore[no-untyped-def]
    """MLX takes 1 s a row count, our kernel with `splits` of the cut what `own` says, beyond 8 rows 2 s."""

    def timer(
        linears: Sequence[nn.QuantizedLinear], rows: int, kernel: SmallBatchKernel, cut: Cut | None
    ) -> float:
        if cut is None:
            return 1.0
        return own[cut.splits] if rows <= 8 else 2.0

    return timer


def test_layers_use_the_kernel_where_it_measured_faster(bench: Bench) -> None:
    model = Model()
    x = mx.random.normal((5, 1, 128))
    before = [layer(x) for layer in model.layers]
    kernel = SmallBatchKernel(quick_to_compile(bench.metal_kernel))
    chosen = use_small_batch_kernels(model, kernel, timer=fake_timer({1: 0.99, 2: 0.6, 4: 0.8}))
    (shape,) = chosen
    assert (shape.outputs, shape.inputs, shape.bits, shape.group_size) == (64, 128, 4, 64)
    assert chosen[shape] == {rows: Cut(4, 2) for rows in range(2, 9)}
    assert all(isinstance(layer, SmallBatchQuantizedLinear) for layer in model.layers)
    assert type(model.other_mode) is nn.QuantizedLinear
    for layer, expected in zip(model.layers, before, strict=True):
        bench.reports.clear()
        assert mx.allclose(layer(x), expected, atol=1e-5)
        assert len(bench.reports) == 1
        layer(x[:1]), layer(mx.concatenate([x, x]))  # 1 and 10 rows are MLX's
        assert len(bench.reports) == 1


def test_layers_stay_where_mlx_is_as_fast(bench: Bench) -> None:
    model = Model()
    kernel = SmallBatchKernel(quick_to_compile(bench.metal_kernel))
    chosen = use_small_batch_kernels(model, kernel, timer=fake_timer({1: 0.98, 2: 1.0, 4: 1.5}))
    assert list(chosen.values()) == [{}]
    assert all(type(layer) is nn.QuantizedLinear for layer in model.layers)


def test_a_wrong_kernel_is_reported_and_not_used(bench: Bench) -> None:
    def broken(*, source: str, **names):  # type: ignore[no-untyped-def]
        return bench.metal_kernel(source=source.replace("+ scale_bias.y", "- scale_bias.y"), **names)

    model, reported = Model(), []
    chosen = use_small_batch_kernels(
        model, SmallBatchKernel(broken), timer=fake_timer({1: 0.1, 2: 0.1, 4: 0.1}), report=reported.append
    )
    assert list(chosen.values()) == [{}]
    assert len(reported) == len(CUTS) and "is off by" in reported[0]


def test_a_kernel_that_does_not_compile_is_reported(bench: Bench) -> None:
    def refusing(**names):  # type: ignore[no-untyped-def]
        def call(**arguments):  # type: ignore[no-untyped-def]
            raise RuntimeError("[metal::Device] Unable to build metal library from source\nerror: ...")

        return call

    reported: list[str] = []
    use_small_batch_kernels(
        Model(),
        SmallBatchKernel(refusing),
        timer=fake_timer({1: 0.1, 2: 0.1, 4: 0.1}),
        report=reported.append,
    )
    assert "does not run ([metal::Device] Unable to build metal library from source)" in reported[0]
