"""Which engines run on this machine, and the bytes that each reserves.

Every engine writes one small file; it counts as long as its writer holds its lock (paths.py). Only one
engine at a time works out its budget and loads, under `registry.lock`, so that two never count on the same
bytes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from mlxbatch.process.paths import EnginePaths, FileLock, RuntimeDir, is_alive
from mlxbatch.units import format_bytes, format_seconds


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as others see it. Times are Unix time; `reserved_bytes` is 0 until its model is loaded, and an idle
    engine gives way down to `least_bytes`."""

    key: str
    pid: int
    model: str
    version: str
    started: float
    ready: bool = False
    reserved_bytes: int = 0
    least_bytes: int = 0
    clients: int = 0
    requests: int = 0
    idle_since: float | None = None  # no client and no request since then
    log: str = ""

    def idle_seconds(self, now: float) -> float | None:
        return None if self.idle_since is None else max(0.0, now - self.idle_since)

    @property
    def spare_bytes(self) -> int:
        """What it gives up when it is asked to."""
        return self.reserved_bytes - self.least_bytes if self.ready and not self.requests else 0

    def describe(self, now: float) -> str:
        """One line: who holds what, and whether it is in use."""
        idle = self.idle_seconds(now)
        if idle is not None:
            use = f"idle for {format_seconds(idle)}"
        else:
            use = f"{_count(self.clients, 'client')}, {_count(self.requests, 'request')}"
        return f"{self.model} holds {format_bytes(self.reserved_bytes)} ({use}, process {self.pid})"


class Registry:
    """Reads the engines' records, and writes that of the engine in this process, from any thread."""

    def __init__(self, runtime: RuntimeDir) -> None:
        self.runtime = runtime
        self._mutex = threading.Lock()
        self._record: EngineRecord | None = None
        self._reserved = self._least = 0

    def publish(self, record: EngineRecord) -> None:
        """Write what has changed of this process's record; its bytes are those of reserve()."""
        with self._mutex:
            record = msgspec.structs.replace(record, reserved_bytes=self._reserved, least_bytes=self._least)
            if record != self._record:
                self._record = record
                self._write(record)

    def reserve(self, reserved_bytes: int, least_bytes: int) -> None:
        """What the engine of this process holds from now on; others count on it when this returns."""
        with self._mutex:
            self._reserved, self._least = reserved_bytes, least_bytes
            if self._record is not None:
                changed = {"reserved_bytes": reserved_bytes, "least_bytes": least_bytes}
                self._record = msgspec.structs.replace(self._record, **changed)
                self._write(self._record)

    def _write(self, record: EngineRecord) -> None:
        # Replaced whole, so that a reader never sees half of it.
        target = self.runtime.engine(record.key).record
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        partial.write_bytes(msgspec.json.encode(record))
        partial.chmod(0o600)
        os.replace(partial, target)

    def remove(self, key: str) -> None:
        self.runtime.engine(key).record.unlink(missing_ok=True)

    def read(self, paths: EnginePaths) -> EngineRecord | None:
        """The record of an engine that is alive."""
        return _read(paths.record) if is_alive(paths) else None

    def live(self) -> list[EngineRecord]:
        records = [self.read(paths) for paths in self.runtime.engines()]
        return sorted((record for record in records if record is not None), key=lambda record: record.started)

    def others(self, key: str) -> list[EngineRecord]:
        return [record for record in self.live() if record.key != key]

    @contextmanager
    def budgeting(self, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wait for the engine that is loading just now, if there is one, and keep further ones waiting."""
        lock = FileLock(self.runtime.registry_lock)
        if not lock.try_acquire():
            on_wait()
            lock.wait()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def budgeting_now(self) -> Iterator[bool]:
        """The same without waiting: False when another engine is at it."""
        lock = FileLock(self.runtime.registry_lock)
        taken = lock.try_acquire()
        try:
            yield taken
        finally:
            if taken:
                lock.release()


def reserved(records: Iterable[EngineRecord]) -> int:
    return sum(record.reserved_bytes for record in records)


def who_holds_what(records: Iterable[EngineRecord], now: float | None = None) -> str:
    """For the error of an engine that finds too little memory: the holders, and the way out of it."""
    now = time.time() if now is None else now
    held = sorted(records, key=lambda record: record.reserved_bytes, reverse=True)
    if not held:
        return ""
    lines = ["Other engines hold memory:"]
    lines += [f"  {record.describe(now)}" for record in held]
    idle = [record for record in held if record.idle_since is not None]
    if idle:
        lines.append(f"Stop an idle one with: mlxbatch engine stop {idle[0].model}")
    else:
        lines.append("None of them is idle; `mlxbatch engine stop MODEL --force` ends one and its requests")
    return "\n".join(lines)


def _read(path: Path) -> EngineRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
