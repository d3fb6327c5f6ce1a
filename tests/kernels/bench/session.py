"""The bench itself: compilers, a process for the kernels, options, and the reports of what ran."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .compile import Compiler
from .errors import BenchError
from .kernel import MetalKernel
from .lint import Lint
from .report import Report
from .toolchain import find_toolchain
from .worker import Worker

FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, slots=True)
class Options:
    """How kernels are run.

    checked: instrument every memory access (two to four times slower) and lint the source.
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

    def __post_init__(self) -> None:
        if self.count and not self.checked:
            raise BenchError("only checked kernels count their accesses: count=True needs checked=True")
        if not self.schedules:
            raise BenchError("schedules is empty: give at least one, (0,)")


def _own_temporary_folder() -> Path:
    """Code from here is executed: nobody else may have put it there."""
    folder = Path(tempfile.gettempdir()) / f"mlxbatch-metal-bench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BenchError(f"{folder} belongs to another user: remove it, or give the bench another cache folder")
    return folder


class Bench:
    """Raises Unavailable where the bench cannot run (macOS, or no clang). Keeps the last 1000 reports."""

    def __init__(self, options: Options | None = None, *, cache: Path | None = None):
        self.options = options or Options()
        self.compiler = Compiler(find_toolchain(), cache or _own_temporary_folder())
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
        """Ends the process of the kernels; a later launch starts a new one."""
        if "worker" in self.__dict__:
            self.worker.close()
