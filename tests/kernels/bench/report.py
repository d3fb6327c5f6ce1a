"""What a launch did: findings with their place in the Metal source, and exact counts."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from . import abi
from .symbols import Location, Symbols
from .worker import STACK_BYTES


class Kind(StrEnum):
    """The order is that of Kind in runtime/abi.h."""

    DEVICE_BOUNDS = "device access out of bounds"
    THREADGROUP_BOUNDS = "threadgroup memory access out of bounds"
    ARRAY_BOUNDS = "array index out of bounds"
    WILD_POINTER = "wild pointer"
    PRIVATE_ACCESS = "access to another thread's private memory"
    READ_ONLY_WRITE = "write to read-only memory"
    THREADGROUP_RACE = "race in threadgroup memory (missing barrier)"
    DEVICE_RACE = "race in device memory"
    UNINITIALISED_THREADGROUP = "read of uninitialised threadgroup memory"
    UNINITIALISED_OUTPUT = "read of an output that was not written"
    UNWRITTEN_OUTPUT = "output not fully written"
    DIVERGENT_BARRIER = "divergent threadgroup_barrier"
    DIVERGENT_COLLECTIVE = "divergent simdgroup operation"
    INACTIVE_LANE = "shuffle from an inactive lane"
    THREADGROUP_MEMORY = "too much threadgroup memory"
    MISALIGNED = "misaligned access"
    INTEGER_OVERFLOW = "signed integer overflow"
    DIVISION = "integer division by zero or overflow"
    FLOAT_CONVERSION = "conversion to integer overflows"
    INVALID_VALUE = "invalid value of a bool"
    MISSING_RETURN = "function ends without a return"
    STACK_OVERFLOW = "stack overflow"
    CRASH = "crash"
    TIMEOUT = "timeout"
    SCHEDULE = "result depends on the thread schedule"


_KINDS = tuple(Kind)
# The order is that of bench_collective in shim/language.h.
COLLECTIVES = (
    "simd_sum simd_product simd_max simd_min simd_and simd_or simd_xor simd_shuffle simd_shuffle_xor simd_shuffle_up "
    "simd_shuffle_down simd_shuffle_and_fill_up simd_shuffle_and_fill_down simd_shuffle_rotate simd_broadcast "
    "simd_broadcast_first simd_ballot simd_prefix_inclusive_sum simd_prefix_exclusive_sum "
    "simd_prefix_inclusive_product simd_prefix_exclusive_product quad simdgroup_multiply"
)


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    message: str
    location: Location | None
    callers: tuple[Location, ...]  # from the innermost call outwards
    count: int

    def __str__(self) -> str:
        where = str(self.location) if self.location else "?"
        calls = "".join(f"\n      called from {caller}" for caller in self.callers)
        times = f" [{self.count} times]" if self.count > 1 else ""
        return f"{where}: {self.kind.value}: {self.message}{times}{calls}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Device memory traffic of one buffer. Lines are 64 bytes.

    `read_lines` counts the lines that each instruction of a simdgroup touches, `threadgroup_read_lines` the distinct
    lines of each threadgroup, `unique_read_bytes` every byte of the buffer at most once.
    """

    size: int
    read_bytes: int = 0
    written_bytes: int = 0
    reads: int = 0
    writes: int = 0
    read_lines: int = 0
    written_lines: int = 0
    threadgroup_read_lines: int = 0
    threadgroup_written_lines: int = 0
    unique_read_bytes: int = 0
    unique_written_bytes: int = 0
    atomics: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Of a launch. Traffic is counted in checked launches only, its lines and unique bytes with `count`."""

    kernel: str
    findings: tuple[Finding, ...]
    traffic: dict[str, Traffic]
    collectives: dict[str, int]  # simdgroup operations by name; each counts once for its simdgroup
    threadgroup_barriers: int
    simdgroup_barriers: int
    threadgroups: int
    threads: int
    threadgroup_memory: int  # bytes
    threadgroup_read_bytes: int
    threadgroup_written_bytes: int
    partial_collectives: int  # with some lanes inactive: legal, but often not meant
    aborted: bool
    seconds: float = field(compare=False, default=0.0)

    @property
    def simd_operations(self) -> int:
        return sum(self.collectives.values())

    def kinds(self) -> set[Kind]:
        return {finding.kind for finding in self.findings}


def decode(
    kernel: str, raw: abi.Report, library: Path, names: Sequence[str], sizes: Sequence[int], seconds: float
) -> Report:
    """`names` and `sizes` are those of the buffers, in the order of the kernel's parameters."""
    symbols = Symbols(library) if raw.findings else None
    merged: dict[tuple[Kind, Location | None, str], Finding] = {}
    for finding in raw.finding[: raw.findings]:
        assert symbols is not None
        made = _finding(finding, symbols, names, sizes)
        key = (made.kind, made.location, made.message)
        before = merged.get(key)
        if before is not None:
            made = Finding(made.kind, made.message, made.location, before.callers, made.count + before.count)
        merged[key] = made
    fields = [field[0] for field in abi.Traffic._fields_]
    return Report(
        kernel=kernel,
        findings=tuple(merged.values()),
        traffic={
            name: Traffic(size, **{f: getattr(raw.traffic[i], f) for f in fields})
            for i, (name, size) in enumerate(zip(names, sizes, strict=True))
        },
        collectives={name: raw.collectives[i] for i, name in enumerate(COLLECTIVES.split()) if raw.collectives[i]},
        threadgroup_barriers=raw.threadgroup_barriers,
        simdgroup_barriers=raw.simdgroup_barriers,
        threadgroups=raw.threadgroups,
        threads=raw.threads,
        threadgroup_memory=raw.threadgroup_memory,
        threadgroup_read_bytes=raw.threadgroup_read_bytes,
        threadgroup_written_bytes=raw.threadgroup_written_bytes,
        partial_collectives=raw.partial_collectives,
        aborted=bool(raw.aborted),
        seconds=seconds,
    )


def over_schedules(runs: Mapping[int, tuple[Sequence[np.ndarray], Report]], outputs: Sequence[str]) -> Report:
    """The first schedule's counts, with the findings of all, and with one where the results differ."""
    (first, (results, report)), *others = runs.items()
    findings = {(f.kind, f.location): f for f in report.findings}
    aborted = report.aborted
    for _, (_, other) in others:
        findings = {(f.kind, f.location): f for f in other.findings} | findings
        aborted |= other.aborted
    made = list(findings.values())
    for schedule, (other_results, other) in others:
        for name, a, b in zip(outputs, results, other_results, strict=True):
            if not report.aborted and not other.aborted and a.tobytes() != b.tobytes():
                message = f"{name} differs between schedule {first} and {schedule}"
                made.append(Finding(Kind.SCHEDULE, message, None, (), 1))
    return replace(report, findings=tuple(made), aborted=aborted)


def _place(place: abi.Place) -> Location | None:
    return Location(place.file.decode(errors="replace"), place.line) if place.line else None


def _finding(raw: abi.Finding, symbols: Symbols, names: Sequence[str], sizes: Sequence[int]) -> Finding:
    kind = _KINDS[raw.kind]
    frames = [place for address in raw.frames if address for place in symbols.locations(address)]
    stated = _place(raw.place)
    if stated is not None and stated in frames:
        frames = frames[frames.index(stated) :]
    elif stated is not None:
        frames.insert(0, stated)
    message = _message(kind, raw, symbols, names, sizes)
    return Finding(kind, message, frames[0] if frames else None, tuple(frames[1:]), raw.count)


def _message(kind: Kind, raw: abi.Finding, symbols: Symbols, names: Sequence[str], sizes: Sequence[int]) -> str:
    parts = []
    if kind is Kind.UNWRITTEN_OUTPUT:
        return f"{raw.amount} of the {sizes[raw.buffer]} bytes of {names[raw.buffer]}, the first at byte {raw.offset}"
    if kind is Kind.STACK_OVERFLOW:
        return f"more than {STACK_BYTES >> 10} KB of private memory in a thread"
    if kind is Kind.CRASH:
        return f"{signal.Signals(raw.amount).name} in thread {raw.thread} of threadgroup {raw.threadgroup}"
    if kind is Kind.TIMEOUT:
        return f"still running, in thread {raw.thread} of threadgroup {raw.threadgroup}"
    if kind is Kind.THREADGROUP_MEMORY:
        return f"{raw.amount} bytes in {raw.size} variables with {raw.variable.decode()}"
    if raw.size:
        parts.append(f"{'write' if raw.write else 'read'} of {raw.size} byte{'s' if raw.size > 1 else ''}")
    if raw.buffer != abi.NO_BUFFER:
        parts.append(f"at byte {raw.offset} of {names[raw.buffer]} ({sizes[raw.buffer]} bytes)")
    elif raw.variable:
        parts.append(f"at byte {raw.offset} of threadgroup variable {raw.variable.decode()}")
    if kind is Kind.DIVERGENT_BARRIER:
        parts.append(f"{raw.amount} threads are here, {raw.finished} have returned or are elsewhere")
    if kind is Kind.DIVERGENT_COLLECTIVE:
        parts.append(f"{raw.amount} lanes are here")
    other_place = _place(raw.other_place)
    if other_place is not None:
        parts.append(f"others at {other_place}")
    parts.append(f"by thread {raw.thread} of threadgroup {raw.threadgroup}")
    if kind in (Kind.THREADGROUP_RACE, Kind.DEVICE_RACE):
        places = symbols.locations(raw.other_frame)
        where = f" at {places[0]}" if places else ""
        parts.append(f"conflicts with thread {raw.other_thread} of threadgroup {raw.other_threadgroup}{where}")
    if kind is Kind.PRIVATE_ACCESS:
        parts.append(f"the memory is thread {raw.other_thread}'s")
    return ", ".join(parts)
