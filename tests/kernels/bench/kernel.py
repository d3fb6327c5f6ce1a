"""The bench itself: a stand-in for `mx.fast.metal_kernel` that runs the Metal source on the CPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .compile import Compiler
from .errors import BenchError, KernelFault
from .lint import Lint
from .report import Finding, Kind, Report, decode
from .signature import ArrayType, Signature, dtype_name, signature
from .toolchain import find_toolchain
from .worker import DeviceBuffer, Dispatch, Worker

FORWARD, BACKWARD = 0, 1
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Options:
    """How kernels are run.

    checked: instrument every memory access (about three times slower) and lint the source.
    count: count 64-byte lines and unique bytes of device traffic; needs checked.
    schedules: each launch runs once per schedule and the results must be the same bits. 0 runs the threads forward,
        1 backward, any other number is the seed of a random order.
    raise_on_findings: raise KernelFault; else read `Bench.report`.
    partial_outputs: names of outputs that a kernel may leave partly unwritten.
    memory_limit: bytes of threadgroup memory on an Apple GPU.
    timeout: seconds for one launch.
    """

    checked: bool = True
    count: bool = False
    schedules: tuple[int, ...] = (FORWARD,)
    raise_on_findings: bool = True
    partial_outputs: frozenset[str] = frozenset()
    memory_limit: int = 32768
    timeout: int = 120


class Bench:
    """Compilers, a worker process, and the reports of the launches so far (the last 1000).

    Raises Unavailable where the bench cannot run (macOS, or no clang).
    """

    def __init__(self, options: Options | None = None, *, cache: Path | None = None):
        self.options = options or Options()
        folder = cache or Path(tempfile.gettempdir()) / f"mlxbatch-metal-bench-{os.getuid()}"
        self.compiler = Compiler(find_toolchain(), folder)
        self.lint = Lint(self.compiler)
        self.reports: deque[Report] = deque(maxlen=1000)

    @cached_property
    def worker(self) -> Worker:
        return Worker(self.compiler.runtime())

    @property
    def report(self) -> Report:
        """Of the last launch."""
        if not self.reports:
            raise BenchError("nothing has run on this bench yet")
        return self.reports[-1]

    def configure(self, **changes: Any) -> None:
        """Changes options for the launches that follow."""
        self.options = replace(self.options, **changes)

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object | None = None,
    ) -> MetalKernel:
        """As `mx.fast.metal_kernel`; the source may name its file with `#line` directives."""
        return MetalKernel(
            self, name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs
        )

    def compile_all(self, calls: Iterable[tuple[MetalKernel, dict[str, Any]]]) -> None:
        """Compiles what these calls need, in parallel: pairs of a kernel and the arguments it will be called with."""
        signatures = [(kernel, kernel.signature_of(**arguments)) for kernel, arguments in calls]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for done in [pool.submit(kernel.library, made) for kernel, made in signatures]:
                done.result()

    def close(self) -> None:
        if "worker" in self.__dict__:
            self.worker.close()


class MetalKernel:
    """Called like the object that `mx.fast.metal_kernel` returns; runs at once and returns evaluated arrays."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
    ):
        self.bench = bench
        self.name = name
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs
        self._signatures: dict[object, Signature] = {}
        self._libraries: dict[object, Path] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object | None = None,
    ) -> list[mx.array]:
        options = self.bench.options
        threads = int(np.prod(threadgroup))
        if threads > MAX_THREADS:
            raise BenchError(f"kernel {self.name}: a threadgroup of {threads} threads; the limit is {MAX_THREADS}")
        arrays = [_evaluated(x) for x in inputs]
        made = self._signature(arrays, output_dtypes, template)
        if verbose:
            print(made.text)
        library = self._library(made, options)
        dtypes = [dtype_name(d) for d in output_dtypes]
        results: list[list[np.ndarray]] = []
        report: Report | None = None
        for schedule in options.schedules:
            outputs = [_fresh(shape, dtype, init_value) for shape, dtype in zip(output_shapes, dtypes, strict=True)]
            buffers = self._buffers(made, arrays, outputs, init_value is not None)
            dispatch = Dispatch(
                grid, threadgroup, schedule, options.count and options.checked, options.checked, options.memory_limit,
                options.timeout,
            )  # fmt: skip
            started = time.perf_counter()
            raw = self.bench.worker.run(library, buffers, dispatch)
            names = [p.name for p in made.buffers]
            sizes = [b.data.nbytes for b in buffers]
            new = decode(self.name, raw, library, names, sizes, time.perf_counter() - started)
            report = new if report is None else _merge(report, new)
            results.append(outputs)
        assert report is not None
        report = self._finish(report, results, options)
        self.bench.reports.append(report)
        if report.findings and options.raise_on_findings:
            raise KernelFault(self.name, report)
        return [
            mx.array(o).view(mx.bfloat16) if dtype == "bfloat16" else mx.array(o)
            for o, dtype in zip(results[0], dtypes, strict=True)
        ]

    def signature_of(
        self,
        *,
        inputs: Sequence[Any],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] | None = None,
        **_: Any,
    ) -> Signature:
        """Of a call with these arguments; its `text` is what MLX would compile."""
        return self._signature([_evaluated(x) for x in inputs], output_dtypes, template)

    def library(self, made: Signature) -> Path:
        """The compiled library of a signature."""
        return self._library(made, self.bench.options)

    def _signature(
        self,
        arrays: Sequence[_Input],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] | None,
    ) -> Signature:
        types = tuple(a.type for a in arrays)
        dtypes = tuple(dtype_name(d) for d in output_dtypes)
        key = (types, dtypes, tuple((n, str(value)) for n, value in template or ()))
        if key not in self._signatures:
            self._signatures[key] = signature(
                self.name, self.input_names, self.output_names, self.source, self.header, types, dtypes,
                template or (), self.atomic_outputs,
            )  # fmt: skip
        return self._signatures[key]

    def _library(self, made: Signature, options: Options) -> Path:
        key = (made, options.checked)
        if key not in self._libraries:
            compiler = self.bench.compiler
            library = compiler.library(self.name, made, options.checked)
            if not library.exists():
                if options.checked:
                    self.bench.lint.check(self.name, made)
                compiler.build(self.name, made, options.checked)
            self._libraries[key] = library
        return self._libraries[key]

    def _buffers(
        self, made: Signature, arrays: Sequence[_Input], outputs: Sequence[np.ndarray], initialised: bool
    ) -> list[DeviceBuffer]:
        by_name = dict(zip(self.input_names, arrays, strict=True))
        by_output = dict(zip(self.output_names, outputs, strict=True))
        buffers = []
        for parameter in made.buffers:
            if parameter.output:
                partial = parameter.name in self.bench.options.partial_outputs
                buffers.append(DeviceBuffer(by_output[parameter.name], True, initialised, partial))
            else:
                array = by_name[parameter.source]
                buffers.append(DeviceBuffer(array.part(parameter.part, self.ensure_row_contiguous)))
        return buffers

    def _finish(self, report: Report, results: list[list[np.ndarray]], options: Options) -> Report:
        for schedule, outputs in zip(options.schedules[1:], results[1:], strict=True):
            for name, first, other in zip(self.output_names, results[0], outputs, strict=True):
                if first.tobytes() != other.tobytes() and not report.aborted:
                    message = f"{name} differs between schedule {options.schedules[0]} and {schedule}"
                    finding = Finding(Kind.SCHEDULE, message, None, (), 1)
                    report = replace(report, findings=(*report.findings, finding))
        return report


@dataclass(frozen=True, slots=True)
class _Input:
    type: ArrayType
    data: np.ndarray  # with the array's own strides; bfloat16 as uint16

    def part(self, part: str, contiguous: bool) -> np.ndarray:
        """The bytes behind a parameter: the data itself, or one of the arrays that describe it."""
        data = np.ascontiguousarray(self.data) if contiguous else self.data
        if part == "shape":
            return np.array(data.shape, np.int32)
        if part == "strides":
            return np.array([s // data.itemsize for s in data.strides], np.int64)
        if part == "ndim":
            return np.array([data.ndim], np.int32)
        return data if data.flags.c_contiguous else _span(data)


def _evaluated(x: Any) -> _Input:
    array = x if isinstance(x, mx.array) else mx.array(x)
    dtype = dtype_name(array.dtype)
    data = np.asarray(memoryview(array.view(mx.uint16) if dtype == "bfloat16" else array))
    return _Input(ArrayType(dtype, array.ndim, array.size), data)


def _span(data: np.ndarray) -> np.ndarray:
    """The memory from the first to the last element of a strided array."""
    if not data.size:
        return data
    if min(data.strides) < 0:
        raise BenchError("an input with negative strides cannot be passed without a copy")
    last = sum((n - 1) * stride for n, stride in zip(data.shape, data.strides, strict=True))
    first = data[(slice(0, 1),) * data.ndim].view(np.uint8).reshape(-1)
    return np.lib.stride_tricks.as_strided(first, (last + data.itemsize,), (1,))


def _fresh(shape: Sequence[int], dtype: str, init_value: float | None) -> np.ndarray:
    """An output: poisoned (NaN as a float), or filled with its initial value."""
    kind = np.dtype({"bfloat16": "uint16"}.get(dtype, dtype))
    out = np.empty(tuple(shape), kind)
    if init_value is None:
        out.reshape(-1).view(np.uint8)[:] = 0 if kind == np.bool_ else 0xFF
    elif dtype == "bfloat16":
        out[...] = np.asarray(memoryview(mx.array(init_value, mx.bfloat16).view(mx.uint16)))
    else:
        out[...] = init_value
    return out


def _merge(first: Report, other: Report) -> Report:
    """The first schedule's counts with the findings of both."""
    known = {(f.kind, f.location) for f in first.findings}
    new = tuple(f for f in other.findings if (f.kind, f.location) not in known)
    return replace(first, findings=first.findings + new, aborted=first.aborted or other.aborted)
