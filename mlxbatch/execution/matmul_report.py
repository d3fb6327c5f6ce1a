"""The small-batch matmul's part of `mlxbatch doctor --kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import mlx.core as mx
import mlx.nn as nn

from mlxbatch.execution.attention.metal_report import KernelRow
from mlxbatch.execution.quantized_linear import (
    CUTS,
    LAYERS_MEASURED,
    TOLERANCE,
    SmallBatchKernel,
    deviation,
    shape_of,
    time_linears,
)

TIMED_ROWS = (2, 4, 8, 16, 32)


def report_matmul(kernel: SmallBatchKernel, *, timed: bool, size: int = 4096) -> Iterator[KernelRow]:
    """size x size matrices of each format; timed, one row for each of a few row counts, with the best cut.
    `least_bytes` are here the bytes of codes and scales, `plain_seconds` MLX's own time."""
    for bits, group_size in product((4, 8), (32, 64, 128)):
        linears = [_linear(size, bits, group_size) for _ in range(LAYERS_MEASURED if timed else 1)]
        shape = shape_of(linears[0])
        name = f"matmul {shape.name}"
        limit = TOLERANCE[shape.dtype]
        try:
            off = max(deviation(linears[0], kernel, cut) for cut in CUTS)
        except (RuntimeError, ValueError) as problem:
            yield KernelRow(name, None, limit, str(problem).strip().partition("\n")[0])
            continue
        if off > limit:
            yield KernelRow(name, off, limit, "differs from a float32 product")
            continue
        if not timed:
            yield KernelRow(name, off, limit, None)
            continue
        weight_bytes = sum(linears[0][part].nbytes for part in ("weight", "scales", "biases"))
        for rows in TIMED_ROWS:
            seconds = min(time_linears(linears, rows, kernel, c) for c in CUTS if c.fits(shape, rows))
            plain = time_linears(linears, rows, kernel, None)
            yield KernelRow(f"{name}, {rows} rows", off, limit, None, seconds, weight_bytes, plain)


def _linear(size: int, bits: int, group_size: int) -> nn.QuantizedLinear:
    linear = nn.QuantizedLinear(size, size, False, group_size, bits)
    linear.set_dtype(mx.float16)
    return linear
