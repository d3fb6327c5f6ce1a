"""The one thread that touches the engine, and with it all of MLX.

    socket thread ── post(command) ──▶ inbox ──▶ engine thread: commands, one step, outputs ──▶ sink

The sink's methods are called on the engine thread and must not wait; nothing that a client does, or fails to
do, is ever waited for here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mlxbatch.engine.api import EngineClient
from mlxbatch.engine.memory_plan import MemoryClaim
from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import EngineError, MlxbatchError
from mlxbatch.models.progress import Progress
from mlxbatch.request import OutputDelta, Request, RequestTiming

log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL = 0.25  # seconds, while requests run
IDLE_INTERVAL = 1.0  # seconds between looks at an idle engine: snapshots, and memory that it may give back


class ServedEngine(EngineClient, Protocol):
    """An engine that can be put behind a socket."""

    def check(self, request: Request) -> None:
        """Raise RequestError if the request can never fit.

        Any thread may call it: it reads only what is fixed.
        """
        ...

    def snapshot(self) -> Snapshot: ...

    @property
    def model_fingerprint(self) -> str: ...

    @property
    def claim(self) -> MemoryClaim:
        """Its memory, for the registry of engines. Any thread may read it."""
        ...

    def resize(self, reserved: int, *, evict: bool = False) -> None:
        """Claim `reserved` bytes from now on, or the nearest that its bounds allow; what it gives up is free when
        this returns. Without `evict` it keeps the blocks that it holds. Called while nothing is unfinished, or
        to grow."""
        ...


EngineFactory = Callable[[Progress], ServedEngine]
Command = Callable[[ServedEngine], None]


class Sink(Protocol):
    """Where the engine thread delivers. Each method returns at once."""

    def loading(self, stage: str, done: int, total: int) -> None: ...
    def ready(self, engine: ServedEngine) -> None: ...
    def output(self, deltas: list[OutputDelta], timings: list[RequestTiming]) -> None: ...
    def snapshot(self, snapshot: Snapshot) -> None: ...
    def failed(self, error: MlxbatchError, *, loaded: bool) -> None: ...


class EngineDriver:
    """Builds an engine by `factory` on its own thread, steps it while it has work, and closes it."""

    def __init__(self, factory: EngineFactory, sink: Sink) -> None:
        self._factory = factory
        self._sink = sink
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlxbatch-engine", daemon=True)
        self._stopping = False
        self.wants_snapshots = False  # written by the socket thread, read here

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run `command` between two steps. Its exceptions end the engine, so it handles its own."""
        self._inbox.put(command)

    def stop(self, timeout: float) -> bool:
        """End after the current step; False if that takes longer than `timeout` seconds."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        engine: ServedEngine | None = None
        try:
            engine = self._factory(self._sink.loading)
            self._sink.ready(engine)
            self._serve(engine)
        except MlxbatchError as error:
            log.error("%s", error)
            self._sink.failed(error, loaded=engine is not None)
        except Exception as error:
            log.exception("the engine failed")
            wrapped = EngineError(f"the engine failed: {type(error).__name__}: {error}")
            self._sink.failed(wrapped, loaded=engine is not None)
        finally:
            if engine is not None:
                engine.close()

    def _serve(self, engine: ServedEngine) -> None:
        next_snapshot = 0.0
        changed = True  # since the last snapshot
        while not self._stopping:
            wait = 0.0
            if not engine.has_unfinished:
                due = next_snapshot - time.monotonic() if self.wants_snapshots and changed else IDLE_INTERVAL
                wait = min(max(due, 0.0), IDLE_INTERVAL)
            changed |= self._run_commands(engine, wait)
            deltas = engine.poll()
            timings = engine.pop_timings()
            if deltas or timings:
                self._sink.output(deltas, timings)
            changed |= engine.has_unfinished or bool(deltas)
            now = time.monotonic()
            if self.wants_snapshots and now >= next_snapshot:
                next_snapshot = now + SNAPSHOT_INTERVAL
                changed = engine.has_unfinished
                self._sink.snapshot(engine.snapshot())

    def _run_commands(self, engine: ServedEngine, wait: float) -> bool:
        """Run what is in the inbox, waiting up to `wait` seconds for a first command."""
        ran = False
        try:
            while not self._stopping:
                block = wait > 0 and not ran
                command = self._inbox.get(block, wait) if block else self._inbox.get_nowait()
                ran = True
                if command is not None:
                    command(engine)
        except queue.Empty:
            pass
        return ran
