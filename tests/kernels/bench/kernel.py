"""A stand-in for the kernels that `mx.fast.metal_kernel` makes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from .arrays import Input, evaluated, fresh_output, to_mlx
from .errors import BenchError, KernelFault
from .report import Report, decode, over_schedules
from .signature import Signature, dtype_name, signature
from .worker import DeviceBuffer, Dispatch

if TYPE_CHECKING:
    from .session import Bench

MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class _Call:
    made: Signature
    inputs: Sequence[Input]
    output_shapes: Sequence[Sequence[int]]
    output_dtypes: Sequence[str]
    init_value: float | None
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


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
        threads = int(np.prod(threadgroup))
        if threads > MAX_THREADS:
            raise BenchError(f"kernel {self.name}: a threadgroup of {threads} threads; the limit is {MAX_THREADS}")
        arrays = [evaluated(x) for x in inputs]
        made = self._signature(arrays, output_dtypes, template)
        if verbose:
            print(made.text)
        dtypes = [dtype_name(d) for d in output_dtypes]
        call = _Call(made, arrays, output_shapes, dtypes, init_value, grid, threadgroup)
        runs = {schedule: self._run(call, schedule) for schedule in self.bench.options.schedules}
        report = over_schedules(runs, self.output_names)
        self.bench.reports.append(report)
        if report.findings and self.bench.options.raise_on_findings:
            raise KernelFault(self.name, report)
        outputs, _ = next(iter(runs.values()))
        return [to_mlx(output, dtype) for output, dtype in zip(outputs, dtypes, strict=True)]

    def signature_of(
        self,
        *,
        inputs: Sequence[Any],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] | None = None,
        **_: Any,
    ) -> Signature:
        """Of a call with these arguments; its `text` is what MLX would compile."""
        return self._signature([evaluated(x) for x in inputs], output_dtypes, template)

    def library(self, made: Signature, debug: bool = False) -> Path:
        """The compiled library of a signature; `debug` for one that knows its lines, which compiles twice as long."""
        checked = self.bench.options.checked
        key = (made, checked, debug)
        if key not in self._libraries:
            compiler = self.bench.compiler
            library = compiler.library(self.name, made, checked, debug)
            if not library.exists():
                if checked:
                    self.bench.lint.check(self.name, made)
                compiler.build(self.name, made, checked, debug)
            self._libraries[key] = library
        return self._libraries[key]

    def _signature(
        self,
        arrays: Sequence[Input],
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

    def _run(self, call: _Call, schedule: int) -> tuple[list[np.ndarray], Report]:
        """One launch. With findings it is done again, the same way, by a library that knows its lines."""
        outputs, report = self._launch(call, schedule, self.library(call.made))
        if report.findings:
            return self._launch(call, schedule, self.library(call.made, debug=True))
        return outputs, report

    def _launch(self, call: _Call, schedule: int, library: Path) -> tuple[list[np.ndarray], Report]:
        options = self.bench.options
        outputs = [
            fresh_output(shape, dtype, call.init_value)
            for shape, dtype in zip(call.output_shapes, call.output_dtypes, strict=True)
        ]
        buffers = self._buffers(call, outputs)
        dispatch = Dispatch(
            call.grid, call.threadgroup, schedule, options.count, options.checked, options.memory_limit,
            options.timeout,
        )  # fmt: skip
        started = time.perf_counter()
        raw = self.bench.worker.run(library, buffers, dispatch)
        seconds = time.perf_counter() - started
        names = [parameter.name for parameter in call.made.buffers]
        return outputs, decode(self.name, raw, library, names, [b.data.nbytes for b in buffers], seconds)

    def _buffers(self, call: _Call, outputs: Sequence[np.ndarray]) -> list[DeviceBuffer]:
        inputs = dict(zip(self.input_names, call.inputs, strict=True))
        by_name = dict(zip(self.output_names, outputs, strict=True))
        buffers = []
        for parameter in call.made.buffers:
            if parameter.output:
                partial = parameter.name in self.bench.options.partial_outputs
                buffers.append(DeviceBuffer(by_name[parameter.name], True, call.init_value is not None, partial))
            else:
                data = inputs[parameter.source].part(parameter.part, self.ensure_row_contiguous)
                buffers.append(DeviceBuffer(data))
        return buffers
