"""Memory pressure from the rest of the system, and how far the KV pool should give way."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxbatch.capacity.machine_memory import meminfo_bytes

LOW = 0.10  # below this share of free memory the pool shrinks
OK = 0.20  # above it the pool may grow back; between the two it stays
PSI_STALL = 10.0  # percent of the last 10 s in which some task waited for memory
SHRINK = 0.5  # of the present budget, at each sign of pressure
RECOVER = 1.25  # of the present budget, after each calm spell
SETTLE = 5.0  # seconds between two changes: a shrink needs time to be felt
CALM = 30.0  # seconds without pressure before the pool grows back
FLOOR = 1 / 64  # of the full budget: what running sequences need to finish one at a time


@dataclass(frozen=True, slots=True)
class Pressure:
    """`available` is the share of memory that can still be had, `stalled` percent of time lost waiting."""

    available: float
    stalled: float = 0.0

    @property
    def high(self) -> bool:
        return self.available < LOW or self.stalled >= PSI_STALL

    @property
    def low(self) -> bool:
        return self.available >= OK and self.stalled < PSI_STALL / 2


def _read_macos() -> Pressure | None:
    """kern.memorystatus_level is the percentage of memory that macOS counts as available."""
    try:
        done = subprocess.run(
            ("sysctl", "-n", "kern.memorystatus_level"),
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
        )
        return Pressure(int(done.stdout) / 100)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _read_linux(proc: Path = Path("/proc")) -> Pressure | None:
    """MemAvailable, and avg10 of PSI's "some" line where the kernel keeps it."""
    memory = meminfo_bytes(proc)
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable")
    if not total or available is None:
        return None
    stalled = 0.0
    try:
        for line in (proc / "pressure" / "memory").read_text().splitlines():
            if line.startswith("some"):
                stalled = float(line.split("avg10=")[1].split()[0])
    except (OSError, IndexError, ValueError):
        pass
    return Pressure(available / total, stalled)


def read_pressure() -> Pressure | None:
    """This machine's memory pressure now; None where it cannot be read."""
    return _read_macos() if platform.system() == "Darwin" else _read_linux()


class PressureGovernor:
    """Turns readings into a budget for the pool: halves it under pressure, lets it recover slowly.

    `full` is the budget without pressure. Call `update` once in a while with the time and a reading.
    """

    def __init__(self, full: int, read: Callable[[], Pressure | None] = read_pressure) -> None:
        self.full = full
        self.budget = full
        self._read = read
        self._changed = float("-inf")
        self._pressed = float("-inf")

    def update(self, now: float) -> int:
        """The budget that the pool should have at time `now`, in bytes."""
        reading = self._read()
        if reading is None:
            return self.budget
        if not reading.low:
            self._pressed = now
        if now - self._changed < SETTLE:
            return self.budget
        if reading.high:
            self._set(max(int(self.full * FLOOR), int(self.budget * SHRINK)), now)
        elif now - self._pressed >= CALM and self.budget < self.full:
            self._set(min(self.full, int(self.budget * RECOVER) + 1), now)
        return self.budget

    def allow(self, full: int) -> None:
        """Change the budget without pressure. One that pressure lowered grows to it as before."""
        self.budget = full if self.budget == self.full else min(self.budget, full)
        self.full = full

    def _set(self, budget: int, now: float) -> None:
        if budget != self.budget:
            self.budget = budget
            self._changed = now
