"""Gives KV memory back to the machine: at once under memory pressure, and after idle time."""

from __future__ import annotations

from collections.abc import Callable

from mlxbatch.capacity.pressure import Pressure, PressureGovernor, read_pressure
from mlxbatch.scheduling.scheduler import Scheduler
from mlxbatch.units import format_bytes

INTERVAL = 2.0  # seconds between two looks at the machine
IDLE_AFTER = 60.0  # seconds without a request until cached blocks are given back too


class MemoryKeeper:
    """Moves the scheduler's KV budget with the machine's memory pressure. Call `tend` between steps, often.

    The pool follows in the next plan: idle blocks go first, cached prefixes with them; then running sequences are
    preempted, newest first. The longest unfinished request always keeps what it needs, so none is lost.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        note: Callable[[str, str], None] = lambda kind, text: None,
        read: Callable[[], Pressure | None] = read_pressure,
        idle_after: float = IDLE_AFTER,
    ) -> None:
        self._scheduler = scheduler
        self._governor = PressureGovernor(scheduler.kv.budget, read)
        self._note = note
        self._wanted = self._governor.budget
        self._idle_after = idle_after
        self._looked = float("-inf")
        self._idle_since: float | None = None
        self._relaxed = False

    def tend(self, now: float) -> None:
        """Look at the machine if it is time, and set the budget. `now` is on the engine's clock."""
        if self._scheduler.num_unfinished:
            self._idle_since, self._relaxed = None, False
        elif self._idle_since is None:
            self._idle_since = now
        elif not self._relaxed and now - self._idle_since >= self._idle_after:
            self._scheduler.shrink_idle()
            self._relaxed = True
        if now - self._looked >= INTERVAL:
            self._looked = now
            self._follow(self._governor.update(now))

    def allow(self, limit: int) -> None:
        """From now on `limit` bytes are all that the pool may have without pressure."""
        self._governor.allow(limit)
        self._wanted = self._governor.budget
        self._scheduler.kv.limit = limit
        self._scheduler.set_kv_budget(self._wanted)

    def _follow(self, wanted: int) -> None:
        before = self._scheduler.kv.budget
        if wanted == self._wanted and (wanted == self._governor.full or wanted == before):
            return
        self._wanted = wanted
        granted = self._scheduler.set_kv_budget(wanted)
        if granted < before:
            self._note("shrink", f"memory pressure: KV budget {format_bytes(before)} -> {format_bytes(granted)}")
        elif granted > before:
            self._note("grow", f"memory is free again: KV budget {format_bytes(before)} -> {format_bytes(granted)}")
