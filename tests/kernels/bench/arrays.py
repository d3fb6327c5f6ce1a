"""MLX arrays as the memory of kernel arguments, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import BenchError
from .signature import ArrayType, dtype_name


@dataclass(frozen=True, slots=True)
class Input:
    type: ArrayType
    data: np.ndarray  # with the array's own strides; bfloat16 as uint16

    def part(self, part: str, contiguous: bool) -> np.ndarray:
        """The memory behind a parameter: the data itself, or an array that describes it. Unless `contiguous`, strided
        data stays where it is: the memory from its first to its last element."""
        data = np.ascontiguousarray(self.data) if contiguous else self.data
        if part == "shape":
            return np.array(data.shape, np.int32)
        if part == "strides":
            return np.array([s // data.itemsize for s in data.strides], np.int64)
        if part == "ndim":
            return np.array([data.ndim], np.int32)
        return data if data.flags.c_contiguous else _span(data)


def evaluated(x: Any) -> Input:
    """An array, or a scalar, as MLX would pass it."""
    array = x if isinstance(x, mx.array) else mx.array(x)
    dtype = dtype_name(array.dtype)
    data = np.asarray(memoryview(array.view(mx.uint16) if dtype == "bfloat16" else array))
    return Input(ArrayType(dtype, array.ndim, array.size), data)


def _span(data: np.ndarray) -> np.ndarray:
    if not data.size:
        return data
    if min(data.strides) < 0:
        raise BenchError("an input with negative strides cannot be passed without a copy")
    last = sum((n - 1) * stride for n, stride in zip(data.shape, data.strides, strict=True))
    first = data[(slice(0, 1),) * data.ndim].view(np.uint8).reshape(-1)
    return np.lib.stride_tricks.as_strided(first, (last + data.itemsize,), (1,))


def fresh_output(shape: Sequence[int], dtype: str, init_value: float | None) -> np.ndarray:
    """Poisoned (NaN as a float, false as a bool), or filled with its initial value."""
    kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    out = np.empty(tuple(shape), kind)
    if init_value is None:
        out.reshape(-1).view(np.uint8)[:] = 0 if kind == np.bool_ else 0xFF
    elif dtype == "bfloat16":
        out[...] = np.asarray(memoryview(mx.array(init_value, mx.bfloat16).view(mx.uint16)))
    else:
        out[...] = init_value
    return out


def to_mlx(output: np.ndarray, dtype: str) -> mx.array:
    return mx.array(output).view(mx.bfloat16) if dtype == "bfloat16" else mx.array(output)
