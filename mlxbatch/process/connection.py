"""One client's socket in the engine process. Nothing here waits for the client.

Inwards, messages are handled one after another, and reading pauses while a few wait. Outwards, deltas stay
merged in their requests until the socket takes them, and snapshots that find it full are dropped; so a client
that stops reading costs its own answers, and after STALL_SECONDS or STALL_BYTES it is cut off. A client that
still lives then reconnects and resumes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol

from mlxbatch import __version__
from mlxbatch.engine.snapshot import ClientInfo
from mlxbatch.process import frames
from mlxbatch.process.messages import (
    PROTOCOL,
    ClientMessage,
    Delta,
    Deltas,
    Hello,
    Message,
    Progress,
    Refused,
    Timing,
)
from mlxbatch.process.served import ServedRequest

log = logging.getLogger(__name__)

FLUSH_INTERVAL = 0.1  # seconds between two frames of deltas to one client
DELTAS_BYTES = 2**20  # about the most in one frame of deltas
WRITE_HIGH = 256 * 2**10  # bytes in the socket's buffer above which deltas wait and snapshots are dropped
INBOX_HIGH = 64  # messages read but not handled
HELLO_SECONDS = 10.0
CLOSE_SECONDS = 5.0
STALL_SECONDS = 600.0  # a suspended terminal may come back
STALL_BYTES = 16 * 2**20


class Handler(Protocol):
    """What the server does for a connection."""

    def greet(self, client: ClientConnection, hello: Hello) -> None: ...
    async def handle(self, client: ClientConnection, message: ClientMessage) -> None: ...
    def lost(self, client: ClientConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    """Frames in, frames out, and the requests of one client."""

    def __init__(self, client_id: str, handler: Handler, loop: asyncio.AbstractEventLoop) -> None:
        self.client_id = client_id
        self.hello: Hello | None = None
        self.requests: dict[str, ServedRequest] = {}  # by the client's own ids; finished ones leave when sent
        self.progress: Progress | None = None
        self.snapshot_interval: float | None = None
        self.next_snapshot = 0.0
        self.opened = loop.time()
        self.paused_since: float | None = None
        self.closed = False
        self._closed_at = 0.0
        self._handler = handler
        self._loop = loop
        self._frames = frames.client_frames()
        self._inbox: deque[ClientMessage] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._dirty: dict[str, ServedRequest] = {}  # requests with something unsent, by the client's ids
        self._next_flush = 0.0
        self._flush_timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def kind(self) -> str:
        return self.hello.kind if self.hello is not None else ""

    # -- the socket ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH)

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        try:
            for message in self._frames.feed(data):
                self._inbox.append(message)
        except frames.FrameError as error:
            self.refuse("protocol", str(error))
            return
        if self._inbox and (self._pump is None or self._pump.done()):
            self._pump = self._loop.create_task(self._handle_inbox())
        if len(self._inbox) > INBOX_HIGH and self._transport is not None:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self.paused_since = self._loop.time()

    def resume_writing(self) -> None:
        self.paused_since = None
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._inbox.clear()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._handler.lost(self)

    async def _handle_inbox(self) -> None:
        while self._inbox and not self.closed:
            message = self._inbox.popleft()
            if len(self._inbox) <= INBOX_HIGH // 2 and self._transport is not None:
                self._transport.resume_reading()
            if self.hello is None:
                self._greet(message)
            elif isinstance(message, Hello):
                self.refuse("protocol", "a second hello on one connection")
            else:
                await self._handle(message)

    async def _handle(self, message: ClientMessage) -> None:
        try:
            await self._handler.handle(self, message)
        except Exception as error:  # one client's message must not leave it, or the others, waiting for ever
            log.exception("client %s: a %s failed", self.client_id, type(message).__name__)
            self.refuse("protocol", f"the engine failed to handle a message: {error}")

    def _greet(self, message: ClientMessage) -> None:
        if not isinstance(message, Hello):
            self.refuse("protocol", "the first message must be a hello")
            return
        if message.protocol != PROTOCOL:
            self.refuse(
                "version",
                f"the running engine is mlxbatch {__version__} (protocol {PROTOCOL}), this client is "
                f"{message.version} (protocol {message.protocol}); stop the engine with "
                "`mlxbatch engine stop` and try again",
            )
            return
        self.hello = message
        self._frames.limit = frames.MAX_FRAME
        self._handler.greet(self, message)

    # -- sending -------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Answers to what the client asked. Their number is bounded by its own messages."""
        if not self.closed and self._transport is not None:
            try:
                self._transport.write(frames.encode(message))
            except frames.FrameError as error:
                self.refuse("protocol", str(error))

    def send_snapshot(self, frame: bytes, now: float) -> None:
        """An encoded snapshot, if this client wants one now and keeps up."""
        if self.snapshot_interval is None or now < self.next_snapshot or self.paused_since is not None:
            return
        if not self.closed and self._transport is not None:
            self.next_snapshot = now + 0.9 * self.snapshot_interval  # the engine's own beat is not exact
            self._transport.write(frame)

    def moved(self, request: ServedRequest) -> None:
        """`request` has something unsent: sent at once after a quiet moment, else ten times a second."""
        self._dirty[request.request_id] = request
        if self._flush_timer is None and self.paused_since is None and not self.closed:
            delay = max(0.0, self._next_flush - self._loop.time())
            self._flush_timer = self._loop.call_later(delay, self._flush)

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self.closed or self.paused_since is not None or not self._dirty:
            return
        self._next_flush = self._loop.time() + FLUSH_INTERVAL
        deltas: list[Delta] = []
        timings: list[Timing] = []
        size = 0
        while self._dirty and self.paused_since is None:  # sending a frame may fill the socket
            request = self._dirty.pop(next(iter(self._dirty)))
            size += request.unsent_bytes
            deltas += request.take()
            if request.finished:
                self.requests.pop(request.request_id, None)
                timing = request.wire_timing()
                timings += [timing] if timing is not None else []
            if size > DELTAS_BYTES:
                self.send(Deltas(deltas=deltas, timings=timings))
                deltas, timings, size = [], [], 0
        if deltas:
            self.send(Deltas(deltas=deltas, timings=timings))

    # -- ending --------------------------------------------------------------------------------------------

    def refuse(self, code: str, message: str, exit_code: int = 3) -> None:
        log.info("client %s refused: %s", self.client_id, message)
        self.send(
            Refused(protocol=PROTOCOL, version=__version__, code=code, message=message, exit_code=exit_code)  # type: ignore[arg-type]
        )
        self.close()

    def close(self) -> None:
        self.closed = True
        self._closed_at = self._loop.time()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Cut off a client that does not read."""
        if self._transport is not None:
            self._transport.abort()

    def trouble(self, now: float) -> str | None:
        """Why this client is to be cut off, if it is."""
        if self.closed and now - self._closed_at > CLOSE_SECONDS:
            return "it does not take its last message"
        if self.hello is None and now - self.opened > HELLO_SECONDS:
            return "it never said hello"
        if self.paused_since is None:
            return None
        if now - self.paused_since > STALL_SECONDS:
            return f"it has not read for {now - self.paused_since:.0f} s"
        unread = sum(request.unsent_bytes for request in self._dirty.values())
        if self._transport is not None:
            unread += self._transport.get_write_buffer_size()
        return f"it left {unread:,} bytes unread" if unread > STALL_BYTES else None

    def info(self) -> ClientInfo:
        hello = self.hello
        unfinished = sum(not request.finished for request in self.requests.values())
        if hello is None:
            return ClientInfo(client_id=self.client_id)
        return ClientInfo(
            client_id=self.client_id,
            kind=hello.kind,
            pid=hello.pid,
            title=hello.title,
            requests=unfinished,
            done=self.progress.done if self.progress is not None else 0,
            total=self.progress.total if self.progress is not None else 0,
        )
