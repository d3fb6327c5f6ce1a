"""Runs launches in a process of their own (executor.py), with device memory shared between the two."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import abi
from .errors import BenchError
from .executor import LAUNCH_OFFSET, REPORT_OFFSET

_CONTROL = 1 << 16
_ALIGNMENT = 256
# Poisoned bytes on both sides of a buffer, as POISONED in runtime/checker.h.
_POISON = 4096
_LEAST_GAP = 1 << 16
STACK_BYTES = 1 << 18
# A larger arena gives its memory back after each launch.
_KEEP_BYTES = 1 << 28


@dataclass(slots=True)
class DeviceBuffer:
    """A kernel argument: its bytes before the launch and, when writable, after it."""

    data: np.ndarray
    writable: bool = False
    initialised: bool = True
    may_be_partial: bool = False  # an output that need not be written everywhere


@dataclass(frozen=True, slots=True)
class Dispatch:
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    schedule: int
    count: bool
    checked: bool
    memory_limit: int
    timeout: int


class Worker:
    """Starts its process when first needed, and again after a crash."""

    def __init__(self, runtime: Path):
        self._runtime = runtime
        self._fd = os.memfd_create("metal-bench")
        self._arena: mmap.mmap | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self, library: Path, buffers: Sequence[DeviceBuffer], dispatch: Dispatch) -> abi.Report:
        """Launches the kernel in `library`; writable buffers are updated in place."""
        if len(buffers) > abi.MAX_BUFFERS:
            raise BenchError(f"a Metal kernel has at most 31 buffers, not {len(buffers)}")
        with self._lock:
            offsets = self._place(buffers)
            arena = self._arena
            assert arena is not None
            memory = np.frombuffer(arena, np.uint8)
            launch = abi.Launch.from_buffer(arena, LAUNCH_OFFSET)
            launch.grid[:] = dispatch.grid
            launch.threadgroup[:] = dispatch.threadgroup
            launch.buffers = len(buffers)
            launch.schedule = dispatch.schedule
            launch.count = dispatch.count
            launch.checked = dispatch.checked
            launch.memory_limit = dispatch.memory_limit
            launch.stack_bytes = STACK_BYTES
            for described, buffer, offset in zip(launch.buffer, buffers, offsets, strict=False):
                end = offset + buffer.data.nbytes
                memory[offset - _POISON : offset] = 0xFF
                memory[offset:end] = buffer.data.reshape(-1).view(np.uint8)
                memory[end : end + _POISON] = 0xFF
                described.offset, described.size = offset, buffer.data.nbytes
                described.writable, described.initialised = buffer.writable, buffer.initialised
                described.may_be_partial = buffer.may_be_partial
            self._command(f"{len(arena)} {dispatch.timeout} {library}\n", dispatch.timeout)
            report = abi.Report.from_buffer_copy(arena, REPORT_OFFSET)
            for buffer, offset in zip(buffers, offsets, strict=True):
                if buffer.writable:
                    flat = buffer.data.reshape(-1).view(np.uint8)
                    flat[:] = memory[offset : offset + buffer.data.nbytes]
            if len(arena) > _KEEP_BYTES:
                arena.madvise(mmap.MADV_REMOVE)
            return report

    def close(self) -> None:
        """Ends the process. The worker can still be used: it starts a new one."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def _place(self, buffers: Sequence[DeviceBuffer]) -> list[int]:
        """Where each buffer goes, so far apart that an index error of one does not land in another."""
        largest = max((buffer.data.nbytes for buffer in buffers), default=0)
        gap = max(_LEAST_GAP, 2 * largest)
        offsets, top = [], _CONTROL
        for buffer in buffers:
            offset = -(-(top + gap) // _ALIGNMENT) * _ALIGNMENT
            offsets.append(offset)
            top = offset + buffer.data.nbytes
        needed = top + gap
        if self._arena is None or len(self._arena) < needed:
            size = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._fd, size)
            self._arena = mmap.mmap(self._fd, size)
        return offsets

    def _command(self, line: str, timeout: int) -> None:
        if self._process is None:
            executor = Path(__file__).resolve().with_name("executor.py")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(executor), str(self._runtime), str(self._fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._fd],
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None and self._arena is not None
        # A stale report must not be taken for this launch's.
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self._arena, REPORT_OFFSET)), 0,
                      ctypes.sizeof(abi.Report))  # fmt: skip
        process.stdin.write(line.encode())
        process.stdin.flush()
        # The executor's own alarm comes first; this is for one that cannot even handle a signal.
        if select.select([process.stdout], [], [], timeout + 30)[0] and os.read(process.stdout.fileno(), 1):
            return
        finished = abi.Report.from_buffer_copy(self._arena, REPORT_OFFSET).finished
        self.close()
        if not finished:
            raise BenchError(f"the bench's process ended with status {process.returncode} and no report")
