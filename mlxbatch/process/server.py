"""The engine process from the inside: sockets on the main thread, the engine on one other.

clients ◀── connection.py ◀── EngineServer, EngineService ──post──▶ EngineDriver (engine thread)
                                    ▲──────── call_soon_threadsafe ────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from mlxbatch import __version__
from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import MlxbatchError
from mlxbatch.process import frames
from mlxbatch.process.answer_format import answer_format
from mlxbatch.process.awake import Awake
from mlxbatch.process.connection import ClientConnection
from mlxbatch.process.driver import EngineDriver, EngineFactory, ServedEngine
from mlxbatch.process.idle import IdleTimer
from mlxbatch.process.messages import (
    PROTOCOL,
    CallFailed,
    ClientMessage,
    GiveWay,
    Hello,
    Loading,
    Pong,
    Progress,
    Shutdown,
    SnapshotFrame,
    Stopping,
    Subscribe,
    Welcome,
)
from mlxbatch.process.paths import EnginePaths
from mlxbatch.process.registry import EngineRecord, Registry
from mlxbatch.process.room import MemoryShare
from mlxbatch.process.served import RequestTable
from mlxbatch.process.service import EngineService
from mlxbatch.request import OutputDelta, RequestTiming

log = logging.getLogger(__name__)

MAX_CLIENTS = 64
SNAPSHOT_RATE = 4.0  # a second, at most
TICK = 0.5  # seconds between looks at timeouts, idleness and the registry
TOUCH_SECONDS = 3600.0
LINGER_SECONDS = 10.0  # a process that could not load the model waits so long for somebody to tell it to
STOP_SECONDS = 10.0  # a step that takes longer is not waited for at the end


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`model` as the user named it; `idle_exit` in seconds, None for never; `settings` is the EngineConfig."""

    model: str
    idle_exit: float | None = 1800.0
    allow_sleep: bool = False
    settings: dict[str, object] = field(default_factory=dict)


class EngineServer:
    """Serves one engine on one Unix socket until it is stopped, idle for long, or the engine fails.

    `clock` (seconds, monotonic) is for idleness alone.
    """

    def __init__(
        self,
        paths: EnginePaths,
        factory: EngineFactory,
        options: ServeOptions,
        registry: Registry,
        *,
        awake: Awake | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._options = options
        self._registry = registry
        self._awake = awake or Awake(allow_sleep=options.allow_sleep)
        self._clock = clock
        self._driver = EngineDriver(factory, self)
        self._table = RequestTable()
        self._engine: ServedEngine | None = None
        self._load_error: MlxbatchError | None = None
        self._service: EngineService | None = None
        self._share: MemoryShare | None = None
        self._clients: dict[str, ClientConnection] = {}
        self._next_client = 1
        self._idle = IdleTimer(options.idle_exit, clock())
        self._started = time.time()
        self._touched = clock()
        self._stage = Loading(stage="starting the engine")
        self._record: EngineRecord | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Future[Stopping] | None = None

    async def run(self) -> int:
        """Serve; returns the process's exit code. The socket exists from the first moment on, so that clients
        can watch the model load."""
        self._loop = loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        self._paths.socket.unlink(missing_ok=True)  # stale: the caller holds the engine's lock
        mask = os.umask(0o177)
        try:
            server = await loop.create_unix_server(self._new_connection, str(self._paths.socket))
        finally:
            os.umask(mask)
        self._write_record()
        self._driver.start()
        ticking = loop.create_task(self._tick_forever())
        try:
            stopping = await self._stopped
        finally:
            ticking.cancel()
            server.close()
            self._paths.socket.unlink(missing_ok=True)
            self._registry.remove(self._paths.key)
            self._awake.set_busy(False)
        log.info("stopping (%s): %s", stopping.reason, stopping.message)
        await self._say_goodbye(stopping)
        if self._service is not None:
            self._service.close()
        patience = STOP_SECONDS if self._engine is not None else 0.0  # loading cannot be interrupted
        if not await loop.run_in_executor(None, self._driver.stop, patience):
            log.warning("the engine's thread is still at work; the process ends all the same")
        return 1 if stopping.reason == "error" else 0

    def stop(self, reason: Literal["asked", "idle", "error"] = "asked", message: str = "") -> None:
        """End `run`. Called on the socket thread."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(Stopping(reason=reason, message=message))

    async def _say_goodbye(self, stopping: Stopping) -> None:
        for client in list(self._clients.values()):
            if client.hello is not None:
                client.send(stopping)
            client.close()
        deadline = time.monotonic() + 1.0
        while self._clients and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for client in list(self._clients.values()):
            client.abort()

    # -- from the engine thread ----------------------------------------------------------------------------

    def _on_loop(self, function: Callable[..., object], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *args)

    def loading(self, stage: str, done: int, total: int) -> None:
        self._on_loop(self._set_stage, Loading(stage=stage, done=done, total=total))

    def ready(self, engine: ServedEngine) -> None:
        self._on_loop(self._set_ready, engine)

    def output(self, deltas: list[OutputDelta], timings: list[RequestTiming]) -> None:
        assert self._service is not None
        self._on_loop(self._service.deliver, deltas, timings)

    def snapshot(self, snapshot: Snapshot) -> None:
        self._on_loop(self._publish, snapshot)

    def failed(self, error: MlxbatchError, *, loaded: bool) -> None:
        self._on_loop(self._fail, error, loaded)

    # -- the engine's life ---------------------------------------------------------------------------------

    def _set_stage(self, stage: Loading) -> None:
        before, self._stage = self._stage, stage
        if stage.stage != before.stage:
            log.info("%s", stage.stage)
        if stage.text != before.text:  # a client hears of every per cent
            self._tell_loading()

    def _set_ready(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._share = MemoryShare(engine, self._driver, self._registry, self._paths.key, self._on_loop)
        self._service = EngineService(
            engine, self._driver, self._table, self._clients, self._on_loop, self._share.take_back
        )
        log.info("ready: %s, %d bytes reserved", engine.model_name, engine.claim.reserved)
        self._write_record()
        for client in list(self._clients.values()):
            if client.hello is not None:
                self._welcome(client, engine)

    def _fail(self, error: MlxbatchError, loaded: bool) -> None:
        if loaded:
            self.stop("error", str(error))
            return
        assert self._loop is not None
        self._load_error = error
        for client in list(self._clients.values()):
            if client.hello is not None:
                self._refuse_to_load(client, error)
        # The client that started this process may not have come through yet, and shall hear the reason.
        self._loop.call_later(LINGER_SECONDS, self.stop, "error", str(error))

    def _refuse_to_load(self, client: ClientConnection, error: MlxbatchError) -> None:
        client.refuse("load", str(error), error.exit_code)
        self.stop("error", str(error))

    def _tell_loading(self) -> None:
        if self._engine is None:
            message = msgspec.structs.replace(self._stage, seconds=time.time() - self._started)
            for client in list(self._clients.values()):
                if client.hello is not None and client.paused_since is None:
                    client.send(message)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.tick()

    def tick(self) -> None:
        """Timeouts, idleness, the registry, and whether the Mac must stay awake."""
        assert self._loop is not None
        for client in list(self._clients.values()):
            trouble = client.trouble(self._loop.time())
            if trouble is not None:
                log.warning("client %s is cut off: %s", client.client_id, trouble)
                client.abort()
        self._tell_loading()
        now = self._clock()
        unfinished = self._table.num_unfinished
        self._table.sweep(now)
        if unfinished and self._share is not None:
            self._share.begin_to_take_back()
        self._awake.set_busy(unfinished > 0)
        self._idle.update(bool(unfinished or self._engine is None or self._users()), now)
        self._write_record()
        if self._idle.expired(now):
            self.stop("idle", f"no client for {self._idle.idle_seconds(now):.0f} s")
        elif self._idle.idle_seconds(now) > 0 and not self._paths.socket.exists():
            self.stop("idle", "its socket has been removed, so nobody could join it")
        elif now - self._touched > TOUCH_SECONDS:
            self._touch(now)

    def _touch(self, now: float) -> None:
        """Systems clear their temporary folders of files that look forgotten."""
        self._touched = now
        for path in (self._paths.socket, self._paths.lock, self._paths.record):
            with contextlib.suppress(OSError):
                os.utime(path)

    def _users(self) -> list[ClientConnection]:
        """Clients that want something of the engine, not only about it."""
        greeted = [client for client in self._clients.values() if client.hello is not None]
        return [client for client in greeted if client.kind != "control"]

    def _write_record(self) -> None:
        idle = self._idle.idle_seconds(self._clock())
        before = self._record.idle_since if self._record is not None else None
        record = EngineRecord(
            key=self._paths.key,
            pid=os.getpid(),
            model=self._options.model,
            version=__version__,
            started=self._started,
            ready=self._engine is not None,
            clients=len(self._users()),
            requests=self._table.num_unfinished,
            idle_since=None if idle == 0.0 else before or time.time() - idle,
            log=str(self._paths.log),
        )
        self._registry.publish(record)
        self._record = record

    # -- clients -------------------------------------------------------------------------------------------

    def _new_connection(self) -> ClientConnection:
        assert self._loop is not None
        client = ClientConnection(f"c{self._next_client}", self, self._loop)
        self._next_client += 1
        self._clients[client.client_id] = client
        return client

    def greet(self, client: ClientConnection, hello: Hello) -> None:
        if len(self._clients) > MAX_CLIENTS:
            client.refuse("full", f"the engine already has {MAX_CLIENTS} clients; close one and try again")
        elif self._engine is not None:
            self._welcome(client, self._engine)
        elif self._load_error is not None:
            self._refuse_to_load(client, self._load_error)
        else:
            self._tell_loading()

    def _welcome(self, client: ClientConnection, engine: ServedEngine) -> None:
        client.send(
            Welcome(
                protocol=PROTOCOL,
                version=__version__,
                client_id=client.client_id,
                engine_pid=os.getpid(),
                started=self._started,
                model=engine.model_name,
                model_source=self._options.model,
                model_fingerprint=engine.model_fingerprint,
                settings=self._options.settings,
                max_model_len=engine.max_model_len,
                vocab_size=engine.tokenizer.vocab_size,
                eos_token_ids=sorted(engine.tokenizer.eos_token_ids),
                answers=answer_format(engine.tokenizer),
            )
        )

    async def handle(self, client: ClientConnection, message: ClientMessage) -> None:
        if isinstance(message, Shutdown):
            self._shutdown(client, message)
        elif isinstance(message, GiveWay):
            self._give_way(client, message)
        elif isinstance(message, Subscribe):
            client.snapshot_interval = 1.0 / min(message.rate, SNAPSHOT_RATE) if message.rate > 0 else None
            self._update_subscriptions()
        elif isinstance(message, Progress):
            client.progress = message
        elif self._service is None or isinstance(message, Hello):
            client.refuse("protocol", f"a {type(message).__name__} before the engine's welcome")
        else:
            await self._service.handle(client, message)

    def lost(self, client: ClientConnection) -> None:
        self._clients.pop(client.client_id, None)
        self._update_subscriptions()
        if self._service is not None:
            self._service.abandon(client.requests.values(), self._clock())
        client.requests = {}

    def _shutdown(self, client: ClientConnection, message: Shutdown) -> None:
        others = [user for user in self._users() if user is not client]
        unfinished = self._table.num_unfinished
        if (others or unfinished) and not message.force:
            busy = f"{self._options.model} is in use ({len(others)} clients, {unfinished} requests)"
            client.send(CallFailed(call=message.call, code="busy", message=busy))
            return
        client.send(Pong(call=message.call))
        self.stop("asked", "a user stopped the engine")

    def _give_way(self, client: ClientConnection, message: GiveWay) -> None:
        if self._share is None or self._share.is_growing or self._table.num_unfinished:
            busy = f"{self._options.model} is in use"
            client.send(CallFailed(call=message.call, code="busy", message=busy))
            return
        answer = Pong(call=message.call)
        self._share.give_way(message.bytes, evict=message.evict, done=lambda: client.send(answer))

    def _update_subscriptions(self) -> None:
        self._driver.wants_snapshots = any(client.snapshot_interval for client in self._clients.values())

    def _publish(self, snapshot: Snapshot) -> None:
        assert self._loop is not None and self._service is not None
        now = self._loop.time()
        frame = frames.encode(SnapshotFrame(snapshot=self._service.decorated(snapshot)))
        for client in list(self._clients.values()):
            client.send_snapshot(frame, now)
