"""The engine in another process, for an interface that runs on asyncio.

A reader task takes in what the engine sends and, when the engine is gone, brings it back and sends every
unfinished request again. What is to be sent is remembered before it is sent, so a failed send is nobody's
concern: the reader notices the lost link and repeats it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import EngineError, MlxbatchError, RequestError
from mlxbatch.process import frames
from mlxbatch.process.answer_format import AnswerFormat
from mlxbatch.process.launcher import Launcher
from mlxbatch.process.link import READ_SIZE, ConnectionLostError, Link, hello
from mlxbatch.process.messages import (
    Accepted,
    CallFailed,
    Cancel,
    ClientKind,
    Deltas,
    Encode,
    EncodeChat,
    Encoded,
    EngineMessage,
    Loading,
    Message,
    Pong,
    RequestFailed,
    Shutdown,
    SnapshotFrame,
    Stats,
    StatsRequest,
    Stopping,
    Submit,
    Subscribe,
    Welcome,
)
from mlxbatch.process.session import Session
from mlxbatch.process.status import LinkStatus, RestartBudget, give_up_message, loading_status, restarting_status
from mlxbatch.request import OutputDelta, RequestTiming

ClientEvent = OutputDelta | RequestTiming | Snapshot | LinkStatus
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenLink:
    """A link whose socket belongs to the event loop."""

    frames: frames.FrameReader[EngineMessage]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class AsyncEngineClient:
    """One model's engine, started if need be and started again if it dies. Belongs to one event loop.

    `snapshots` is how many a second are wanted (at most 4; 0: none). `start_engine` False only joins one that
    runs. Requests sample with fresh seeds unless they name one.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        kind: ClientKind = "chat",
        title: str = "",
        session: str = "",
        snapshots: float = 4.0,
        start_engine: bool = True,
    ) -> None:
        self._launcher = launcher
        self._hello = hello(kind, title, session)
        self._snapshots = snapshots
        self._start_engine = start_engine
        self._session = Session()
        self._budget = RestartBudget()
        self._events: deque[ClientEvent] = deque()
        self._news = asyncio.Event()
        self._submits: dict[str, asyncio.Future[int]] = {}
        self._calls: dict[int, tuple[Message, asyncio.Future[EngineMessage]]] = {}
        self._next_call = 1
        self._link: OpenLink | None = None
        self._welcome: Welcome | None = None
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._closed = False
        self.restarts = 0  # how often the engine was brought back under this client

    @property
    def model(self) -> str:
        """The model as it was asked for."""
        return self._launcher.config.model

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together; 0 before the first welcome."""
        return self._welcome.max_model_len if self._welcome is not None else 0

    @property
    def answers(self) -> AnswerFormat:
        """How the model marks thinking in its answers; nothing before the first welcome."""
        return self._welcome.answers if self._welcome is not None else AnswerFormat()

    @property
    def engine_pid(self) -> int:
        return self._welcome.engine_pid if self._welcome is not None else 0

    def request_key(self, request_id: str) -> str:
        """The engine-wide name of one of our requests, as snapshots have it. It changes with a restart."""
        return f"{self._welcome.client_id}/{request_id}" if self._welcome is not None else request_id

    async def start(self) -> None:
        """Join the model's engine, or start it, and wait until it is ready. Raises EngineError."""
        async with self._starting:
            if self._link is None and not self._closed:
                await self._open()
                self._reader = asyncio.create_task(self._read_forever())

    async def submit(self, submit: Submit) -> int:
        """Queue a request; returns the tokens of its prompt. Raises RequestError when it is refused, EngineError
        when there is no engine."""
        if submit.request_id in self._session:
            raise RequestError(f"request id {submit.request_id!r} is already in use", param="request_id")
        await self._ensure_started()
        submit = self._session.start(submit)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._submits[submit.request_id] = future
        try:
            self._send(submit)
            return await future
        except asyncio.CancelledError:
            self._session.forget(submit.request_id)
            self._send(Cancel(request_id=submit.request_id))
            raise
        except MlxbatchError:
            self._session.forget(submit.request_id)
            raise
        finally:
            self._submits.pop(submit.request_id, None)

    async def cancel(self, request_key: str) -> None:
        """End any request of this engine, ours or another client's, by its engine-wide name."""
        own = request_key.removeprefix(self.request_key(""))
        if request_key != own:
            self._session.cancel(own)
        self._send(Cancel(request_id=request_key, anyones=True))

    async def count_chat(self, messages: list[dict[str, object]], /, **template_args: object) -> int:
        """Tokens of a conversation through the chat template. Raises RequestError."""
        reply = await self._call(
            lambda call: EncodeChat(call=call, messages=messages, template_args=template_args, count_only=True),
            Encoded,
        )
        return reply.count

    async def count_text(self, text: str) -> int:
        """Tokens of plain text, without BOS."""
        reply = await self._call(lambda call: Encode(call=call, text=text, add_bos=False, count_only=True), Encoded)
        return reply.count

    async def stats(self) -> dict[str, object]:
        return (await self._call(lambda call: StatsRequest(call=call), Stats)).values

    async def shut_down(self, *, force: bool = False) -> None:
        """Stop the engine. Raises RequestError (code "busy") while others use it, unless `force`."""
        await self._call(lambda call: Shutdown(call=call, force=force), Pong)

    async def events(self) -> AsyncIterator[ClientEvent]:
        """Everything that happens, until `close`. For one consumer; of unread snapshots only the last is kept."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self._closed:
                return
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        """Disconnect. The engine cancels what is unfinished, and stays for others."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._drop_link()
        self._fail_waiting(EngineError("the client was closed"))
        self._news.set()

    # -- the link ------------------------------------------------------------------------------------------

    async def _ensure_started(self) -> None:
        # While the reader brings the engine back there is no link, but there will be one.
        if self._link is None and (self._reader is None or self._reader.done()):
            await self.start()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()

        def on_loading(message: Loading) -> None:
            with contextlib.suppress(RuntimeError):  # the loop ended while the model was loading
                loop.call_soon_threadsafe(self._emit, loading_status(message))

        def connect() -> Link | None:
            if self._start_engine:
                return self._launcher.connect(self._hello, on_loading)
            return self._launcher.join(self._hello, on_loading)

        link = await _in_thread(connect)
        if link is None:
            raise EngineError(f"no engine runs for {self.model}; `mlxbatch engine start` starts one")
        if self._closed:
            link.close()
            raise EngineError("the client was closed")
        reader, writer = await asyncio.open_unix_connection(sock=link.sock)
        self._link, self._welcome = OpenLink(link.frames, reader, writer), link.welcome
        self._receive(link.early)
        if self._snapshots > 0:
            self._send(Subscribe(rate=self._snapshots))
        self._emit(LinkStatus("ready", f"{link.welcome.model}, process {link.welcome.engine_pid}"))

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.writer.close()
            self._link = None

    def _send(self, message: Message) -> None:
        """Sent if there is a link. If there is none, or it breaks, the reader repeats what is remembered."""
        data = frames.encode(message)
        if self._link is not None:
            self._link.writer.write(data)

    async def _call(self, make: Callable[[int], Message], reply_type: type[T]) -> T:
        await self._ensure_started()
        number, self._next_call = self._next_call, self._next_call + 1
        message = make(number)
        future: asyncio.Future[EngineMessage] = asyncio.get_running_loop().create_future()
        self._calls[number] = (message, future)
        try:
            self._send(message)
            reply = await future
        finally:
            self._calls.pop(number, None)
        if not isinstance(reply, reply_type):
            raise EngineError(f"the engine answered with a {type(reply).__name__}")
        return reply

    async def _read_forever(self) -> None:
        while (link := self._link) is not None:
            try:
                data = await link.reader.read(READ_SIZE)
                if not data:
                    raise ConnectionLostError("the engine closed the connection")
                self._receive(list(link.frames.feed(data)))
            except (OSError, ConnectionLostError) as error:
                await self._recover(error)
            except frames.FrameError as error:
                self._give_up(str(error))

    async def _recover(self, error: OSError | ConnectionLostError) -> None:
        """A new link for a lost one, with every unfinished request and question sent again; or none, and all of
        them failed."""
        self._drop_link()
        stopping = error.stopping if isinstance(error, ConnectionLostError) else None
        if stopping is not None and stopping.reason in ("asked", "idle"):
            self._give_up(f"the engine was stopped: {stopping.message}")
            return
        if not self._budget.allows_another():
            self._give_up(give_up_message(self._launcher.paths.log, stopping))
            return
        self.restarts += 1
        self._emit(restarting_status(len(self._session)))
        try:
            await self._open()
        except MlxbatchError as failure:
            self._give_up(str(failure))
            return
        submits, ended = self._session.resubmissions()
        self._emit_all(ended)
        for submit in submits:
            self._send(submit)
        for message, _ in list(self._calls.values()):
            self._send(message)

    def _give_up(self, text: str) -> None:
        self._drop_link()
        self._emit_all(self._session.fail_all(text))
        self._fail_waiting(EngineError(text))
        self._emit(LinkStatus("lost", text))

    def _fail_waiting(self, error: EngineError) -> None:
        for future in self._submits.values():
            _reject(future, error)
        for _, reply in self._calls.values():
            _reject(reply, error)

    # -- what comes in -------------------------------------------------------------------------------------

    def _receive(self, messages: list[EngineMessage]) -> None:
        for message in messages:
            match message:
                case Deltas():
                    self._budget.progressed()
                    self._emit_all(self._session.receive(message.deltas))
                    self._emit_all(timing.to_timing() for timing in message.timings)
                case SnapshotFrame():
                    self._emit(message.snapshot)
                case Accepted():
                    self._session.accepted(message)
                    _resolve(self._submits.get(message.request_id), message.num_prompt_tokens)
                case RequestFailed():
                    self._refused(message)
                case CallFailed():
                    error = RequestError(message.message, code=message.code, param=message.param)
                    _reject(self._calls.get(message.call, (None, None))[1], error)
                case Encoded() | Stats() | Pong():
                    _resolve(self._calls.get(message.call, (None, None))[1], message)
                case Stopping():
                    raise ConnectionLostError(message.message or "the engine was stopped", message)
                case _:
                    pass

    def _refused(self, message: RequestFailed) -> None:
        future = self._submits.get(message.request_id)
        if future is not None:
            _reject(future, RequestError(message.message, code=message.code, param=message.param))
        else:
            self._emit_all(self._session.fail(message.request_id, message.message))

    def _emit_all(self, events: Iterable[ClientEvent]) -> None:
        for event in events:
            self._emit(event)

    def _emit(self, event: ClientEvent) -> None:
        if isinstance(event, Snapshot) and self._events and isinstance(self._events[-1], Snapshot):
            self._events.pop()
        self._events.append(event)
        self._news.set()


def _resolve(future: asyncio.Future[T] | None, value: T) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[T] | None, error: MlxbatchError) -> None:
    if future is not None and not future.done():
        future.set_exception(error)


async def _in_thread(function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but on a daemon thread: quitting does not wait for a model that still loads."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # delivered to the waiting task
            _deliver(future.set_exception, error)
        else:
            _deliver(future.set_result, result)

    def _deliver(setter: Callable[..., None], value: object) -> None:
        def deliver() -> None:
            if not future.done():
                setter(value)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(deliver)

    threading.Thread(target=run, name="mlxbatch-connect", daemon=True).start()
    return await future
