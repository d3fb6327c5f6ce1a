"""An engine in this process: model, runner, scheduler and loop behind the EngineClient interface."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxbatch.capacity.pressure import Pressure, read_pressure
from mlxbatch.config import EngineConfig
from mlxbatch.engine.assembly import Assembly, assemble, load_for
from mlxbatch.engine.core import EngineCore
from mlxbatch.engine.memory_keeper import MemoryKeeper
from mlxbatch.engine.memory_plan import MemoryClaim, Neighbours
from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.engine.snapshotter import Snapshotter
from mlxbatch.engine.trace import StepTrace
from mlxbatch.errors import EngineError
from mlxbatch.models.progress import Progress, silent
from mlxbatch.request import OutputDelta, Request, RequestTiming
from mlxbatch.units import format_bytes

if TYPE_CHECKING:
    from mlxbatch.models.loaded import LoadedModel
    from mlxbatch.models.tokenizer import ModelTokenizer

class LocalEngine:
    """Loads a model and serves it; all of MLX's work happens on the thread that calls it.

    `progress` is told what is being loaded. `neighbours` are the other engines on this machine.
    `trace` keeps every step for write_trace(). `loaded` is a model that is in memory already. `pressure` reads
    the machine's memory pressure. `tuned` False leaves the curve that `mlxbatch tune` stored alone.
    Raises ModelError or UsageError if the model cannot be run.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        neighbours: Neighbours = lambda claim: 0,
        trace: bool = False,
        loaded: LoadedModel | None = None,
        pressure: Callable[[], Pressure | None] = read_pressure,
        tuned: bool = True,
    ) -> None:
        self.config = config
        self._trace = StepTrace(time.monotonic()) if trace else None
        if loaded is None:
            loaded = load_for(config, progress or silent)
        parts = assemble(config, loaded, neighbours, tuned=tuned)
        if progress is not None:
            for note in parts.notes(config):
                progress(note, 0, 0)
        self._parts: Assembly | None = parts
        self._core = EngineCore(
            parts.scheduler, parts.runner, parts.loaded.tokenizer, trace=self._trace, observe=parts.observe
        )
        self._core.metrics.targets = parts.targets
        self._keeper = MemoryKeeper(
            parts.scheduler, note=lambda kind, text: self._core.note(kind, "", text), read=pressure
        )
        facts = (parts.model_facts, parts.machine_facts)
        self._snapshots = Snapshotter(self._core, *facts, memory=parts.memory_use, curve=parts.curve)

    @property
    def core(self) -> EngineCore:
        self._open()
        return self._core

    @property
    def loaded(self) -> LoadedModel:
        return self._open().loaded

    @property
    def model_name(self) -> str:
        return self.loaded.name

    @property
    def model_fingerprint(self) -> str:
        return self.loaded.fingerprint

    @property
    def max_model_len(self) -> int:
        return self._core.scheduler.max_model_len

    @property
    def tokenizer(self) -> ModelTokenizer:
        return self.loaded.tokenizer

    @property
    def has_unfinished(self) -> bool:
        return self._core.has_unfinished

    @property
    def claim(self) -> MemoryClaim:
        return self._open().claim

    def resize(self, reserved: int, *, evict: bool = False) -> None:
        """Claim `reserved` bytes from now on, or the nearest that the claim's bounds allow. Unless told to evict,
        an engine keeps the blocks that it holds; those that it gives up are back when this returns."""
        parts = self._open()
        kv = parts.scheduler.kv
        limit = parts.pools.within(parts.budget, reserved)
        if not evict:
            limit = max(limit, min(kv.bytes_held, kv.limit))
        if limit == kv.limit:
            return
        kind = "shrink" if limit < kv.limit else "grow"
        self._core.note(kind, "", f"beside other engines: KV limit {format_bytes(kv.limit)} -> {format_bytes(limit)}")
        self._keeper.allow(limit)
        self._core.settle()

    def check(self, request: Request) -> None:
        self._core.check(request)

    def submit(self, request: Request) -> None:
        self._open()
        if not request.arrival:
            request = replace(request, arrival=self._core.clock())
        self._core.submit(request)

    def cancel(self, request_id: str) -> None:
        self._core.cancel(request_id)

    def poll(self, timeout: float = 0.0) -> list[OutputDelta]:
        self._open()
        self._keeper.tend(self._core.clock())
        return self._core.step()

    def pop_timings(self) -> list[RequestTiming]:
        return self._core.pop_timings()

    def stats(self) -> dict[str, object]:
        parts = self._open()
        return self._core.stats() | parts.stats()

    def snapshot(self) -> Snapshot:
        self._open()
        return self._snapshots.take()

    def report_progress(self, done: int, total: int) -> None:
        """Nobody else looks at this engine."""

    def write_trace(self, path: Path) -> None:
        """Write the Chrome trace of everything since the start. Raises EngineError without `trace=True`."""
        if self._trace is None:
            raise EngineError("this engine keeps no trace; start it with trace=True")
        self._trace.write(path)

    def close(self) -> None:
        """Give the memory of model and KV back. The engine cannot be used afterwards."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        import mlx.core as mx

        mx.synchronize()  # a step may be in flight, and holds memory
        del self._core, self._snapshots, self._keeper
        parts.release()
        del parts
        gc.collect()
        mx.clear_cache()

    def _open(self) -> Assembly:
        if self._parts is None:
            raise EngineError("this engine is closed")
        return self._parts
