"""Shorter compile times for kernel tests: no unrolling, and all kernels of a test module at once on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from bench import Bench, MetalKernel

from mlxbatch.execution.attention.metal_source import Kernel, KernelFactory


class _Recorder:
    """Stands for one kernel: remembers how it is called and returns zeros."""

    def __init__(self, kernel: MetalKernel, calls: list[tuple[MetalKernel, dict[str, Any]]]) -> None:
        self._kernel, self._calls = kernel, calls

    def __call__(self, **call: Any) -> list[mx.array]:
        self._calls.append((self._kernel, call))
        return [
            mx.zeros(tuple(shape), dtype)
            for shape, dtype in zip(call["output_shapes"], call["output_dtypes"], strict=True)
        ]


def quick_to_compile(factory: KernelFactory) -> KernelFactory:
    """Unrolled loops make no difference on the bench and take three times as long to compile."""

    def make(*, header: str, **names: Any) -> Kernel:
        return factory(header="#define UNROLL\n" + header, **names)

    return make


def compile_first(
    bench: Bench,
    cases: Sequence[Callable[[KernelFactory], object]],
) -> int:
    """Each case takes a kernel factory, as the fixture `kernel_factory` is, and calls what it makes. Returns the
    number of different kernels."""
    calls: list[tuple[MetalKernel, dict[str, Any]]] = []

    def record(**names: Any) -> Kernel:
        return _Recorder(bench.metal_kernel(**names), calls)

    for case in cases:
        case(quick_to_compile(record))
    unique = {}
    for kernel, call in calls:
        types = tuple((str(x.dtype), x.ndim, x.size >= 8) for x in call["inputs"])
        dtypes = tuple(map(str, call["output_dtypes"]))
        unique[kernel.name, types, dtypes, str(call["template"])] = (kernel, call)
    bench.compile_all(unique.values())
    return len(unique)
