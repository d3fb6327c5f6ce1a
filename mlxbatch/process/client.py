"""The engine in another process, as an EngineClient: what `mlxbatch run` and `LLM` talk to."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from mlxbatch.config import EngineConfig
from mlxbatch.engine.api import StreamDecoder
from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import EngineError, RequestError
from mlxbatch.models.tags import TagSet
from mlxbatch.process import frames
from mlxbatch.process.launcher import Launcher, LaunchOptions
from mlxbatch.process.link import READ_SIZE, ConnectionLostError, Link, OnLoading, hello
from mlxbatch.process.messages import (
    Accepted,
    CallFailed,
    Cancel,
    ClientKind,
    Decode,
    Decoded,
    Deltas,
    Encode,
    EncodeChat,
    Encoded,
    EngineMessage,
    Message,
    OrphanPolicy,
    Progress,
    RequestFailed,
    SnapshotFrame,
    SnapshotRequest,
    Stats,
    StatsRequest,
    Stopping,
    Submit,
    params_to_wire,
)
from mlxbatch.process.paths import RuntimeDir
from mlxbatch.process.session import Session
from mlxbatch.process.stats import stats_since
from mlxbatch.process.status import (
    LinkStatus,
    RestartBudget,
    give_up_message,
    joined_status,
    restarting_status,
)
from mlxbatch.request import OutputDelta, Priority, Request, RequestTiming

Reply = Encoded | Decoded | Stats | SnapshotFrame
R = TypeVar("R", Encoded, Decoded, Stats, SnapshotFrame)
OnStatus = Callable[[LinkStatus], None]

PROGRESS_SECONDS = 1.0


class RemoteTokenizer:
    """The engine's tokenizer, asked over its socket (a TokenizerLike)."""

    def __init__(self, engine: ProcessEngine, vocab_size: int, eos_token_ids: frozenset[int], tags: TagSet) -> None:
        self._engine = engine
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.tags = tags

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        return self._engine.call(lambda call: Encode(call=call, text=text, add_bos=add_bos), Encoded).token_ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self._engine.call(
            lambda call: Decode(call=call, token_ids=token_ids, skip_special_tokens=skip_special_tokens),
            Decoded,
        ).text

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        from mlxbatch.models.stream_decoder import SlowStreamDecoder

        return SlowStreamDecoder(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))

    def encode_chat(self, messages: list[dict[str, object]], /, **template_args: object) -> list[int]:
        return self._engine.call(
            lambda call: EncodeChat(call=call, messages=messages, template_args=template_args), Encoded
        ).token_ids


class ProcessEngine:
    """An EngineClient on a shared engine process. Not thread safe.

    If the engine dies it is started again, and every unfinished request goes on from the tokens it had;
    `on_status` is told. If it was stopped by a user, `poll` raises EngineError. `priority` None takes each
    request's own. Requests with `orphan` "continue" go on when this client dies, and a later client with the
    same `session` takes their answers by submitting them again.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        kind: ClientKind = "python",
        title: str = "",
        session: str = "",
        priority: Priority | None = None,
        orphan: OrphanPolicy = "cancel",
        on_status: OnStatus | None = None,
        on_loading: OnLoading | None = None,
    ) -> None:
        self._launcher = launcher
        self._hello = hello(kind, title, session)
        self._priority = priority
        self._orphan = orphan
        self._on_status = on_status or (lambda status: None)
        self._on_loading = on_loading
        self._session = Session(seed=launcher.config.seed)
        self._budget = RestartBudget()
        self._deltas: list[OutputDelta] = []
        self._timings: list[RequestTiming] = []
        self._awaited: str | None = None  # the request that submit() waits for
        self._refusal: RequestError | None = None
        self._replies: dict[int, Reply | RequestError] = {}
        self._next_call = 1
        self._next_progress = 0.0
        self._connection = 0  # counts links, so that call() sees when its question was lost with one
        self._link: Link | None = None
        self._baseline: dict[str, Any] = {}
        self._connect()
        if not launcher.started:
            self._baseline = self._engine_stats()
            joined = joined_status(self._welcome, launcher.config)
            self._on_status(joined)

    # -- EngineClient --------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self._welcome.model

    @property
    def model_fingerprint(self) -> str:
        return self._welcome.model_fingerprint

    @property
    def max_model_len(self) -> int:
        return self._welcome.max_model_len

    @property
    def tokenizer(self) -> RemoteTokenizer:
        welcome = self._welcome
        return RemoteTokenizer(self, welcome.vocab_size, frozenset(welcome.eos_token_ids), welcome.answers.tags)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError as the engine would, and EngineError when there is none."""
        if request.request_id in self._session:
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        priority = request.priority if self._priority is None else self._priority
        submit = self._session.start(
            Submit(
                request_id=request.request_id,
                params=params_to_wire(request.params),
                prompt=request.prompt,
                prompt_token_ids=list(request.prompt_token_ids),
                priority=int(priority),
                rank=request.rank,
                deadline=request.deadline,
                resume_token_ids=list(request.resume_token_ids),
                orphan=self._orphan,
            )
        )
        self._awaited, self._refusal = request.request_id, None
        try:
            self._send(submit)
            while self._awaited is not None:
                self._read(None)
        except BaseException:
            self._session.forget(request.request_id)
            raise
        finally:
            self._awaited = None
        if self._refusal is not None:
            raise self._refusal

    def cancel(self, request_id: str) -> None:
        if request_id in self._session:
            self._session.cancel(request_id)
            self._send(Cancel(request_id=request_id))

    def poll(self, timeout: float = 0.0) -> list[OutputDelta]:
        """What came since the last call; waits up to `timeout` seconds for the first of it."""
        deadline = time.monotonic() + timeout
        while len(self._session) and not self._deltas:
            left = deadline - time.monotonic()
            self._read(max(0.0, left))
            if left <= 0:
                break
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def has_unfinished(self) -> bool:
        return bool(len(self._session) or self._deltas)

    def pop_timings(self) -> list[RequestTiming]:
        timings, self._timings = self._timings, []
        return timings

    def stats(self) -> dict[str, object]:
        """The engine's counters since this client joined it (other clients' work included), or since its last
        restart, and its state of now."""
        return stats_since(self._engine_stats(), self._baseline)

    def _engine_stats(self) -> dict[str, Any]:
        return self.call(lambda call: StatsRequest(call=call), Stats).values

    def report_progress(self, done: int, total: int) -> None:
        """Sent once a second at most, and when all is done."""
        now = time.monotonic()
        if done >= total or now >= self._next_progress:
            self._next_progress = now + PROGRESS_SECONDS
            self._send(Progress(done=done, total=total))

    def write_trace(self, path: Path) -> None:
        raise EngineError("an engine process keeps no trace; load the model in this process for one")

    def snapshot(self) -> Snapshot:
        return self.call(lambda call: SnapshotRequest(call=call), SnapshotFrame).snapshot

    def close(self) -> None:
        """Disconnect. The engine stays for others, and cancels or keeps what is unfinished as was asked."""
        if self._link is not None:
            self._link.close()
            self._link = None

    # -- the connection ------------------------------------------------------------------------------------

    @property
    def started_engine(self) -> bool:
        """Whether this client started the engine, rather than joined a running one."""
        return self._launcher.started

    @property
    def engine_pid(self) -> int:
        return self._welcome.engine_pid

    def call(self, make: Callable[[int], Message], reply_type: type[R]) -> R:
        """Ask the engine something and wait for the answer, through a restart if need be."""
        number, self._next_call = self._next_call, self._next_call + 1
        asked_on = 0
        while number not in self._replies:
            if asked_on != self._connection or self._link is None:
                link = self._connected()
                asked_on = self._connection
                self._send_on(link, make(number))
            else:
                self._read(None)
        reply = self._replies.pop(number)
        if isinstance(reply, RequestError):
            raise reply
        if not isinstance(reply, reply_type):
            raise EngineError(f"the engine answered with a {type(reply).__name__}")
        return reply

    def _connect(self) -> Link:
        self._link = link = self._launcher.connect(self._hello, self._on_loading)
        self._next_progress = 0.0
        self._connection += 1
        self._welcome = link.welcome
        self._receive(link.early)
        return link

    def _connected(self) -> Link:
        return self._link if self._link is not None else self._connect()

    def _send(self, message: Message) -> None:
        self._send_on(self._connected(), message)

    def _send_on(self, link: Link, message: Message) -> None:
        """Send one message. What the engine sends meanwhile is read, so that neither waits for the other.

        If the link breaks, a new one is made and every tracked request is sent again on it.
        """
        view = memoryview(frames.encode(message))
        try:
            while view:
                readable, writable, _ = select.select([link.sock], [link.sock], [])
                if readable:
                    self._receive_data(link, link.sock.recv(READ_SIZE))
                if writable:
                    view = view[link.sock.send(view) :]
        except (OSError, ConnectionLostError) as error:
            self._recover(error)

    def _read(self, timeout: float | None) -> None:
        """Take in what the engine sent, waiting for it up to `timeout` seconds (None: as long as it takes)."""
        link = self._connected()
        try:
            if select.select([link.sock], [], [], timeout)[0]:
                self._receive_data(link, link.sock.recv(READ_SIZE))
        except (OSError, ConnectionLostError) as error:
            self._recover(error)

    def _recover(self, error: OSError | ConnectionLostError) -> None:
        """Go on after a lost link: on a new engine, or on the same one if only the link broke."""
        self.close()
        stopping = error.stopping if isinstance(error, ConnectionLostError) else None
        unfinished = len(self._session)
        if stopping is not None and stopping.reason == "asked":
            self._deltas += self._session.fail_all(f"the engine was stopped: {stopping.message}")
            self._on_status(LinkStatus("lost", stopping.message))
            raise EngineError(f"the engine was stopped with {unfinished} requests unfinished: {stopping.message}")
        if not self._budget.allows_another():
            message = give_up_message(self._launcher.paths.log, stopping)
            self._deltas += self._session.fail_all(message)
            self._on_status(LinkStatus("lost", message))
            raise EngineError(message)
        self._on_status(restarting_status(unfinished))
        pid = self.engine_pid
        self._connect()
        if self.engine_pid != pid:
            self._baseline = {}
        connection = self._connection
        submits, ended = self._session.resubmissions()
        self._deltas += ended
        for submit in submits:
            self._send(submit)
            if self._connection != connection:
                return  # lost again; that recovery has sent them all
        self._on_status(LinkStatus("ready", f"{self.model_name} goes on, in process {self.engine_pid}"))

    def _receive_data(self, link: Link, data: bytes) -> None:
        if not data:
            raise ConnectionLostError("the engine closed the connection")
        self._receive(list(link.frames.feed(data)))

    def _receive(self, messages: list[EngineMessage]) -> None:
        for message in messages:
            match message:
                case Deltas():
                    self._budget.progressed()
                    self._deltas += self._session.receive(message.deltas)
                    self._timings += [timing.to_timing() for timing in message.timings]
                case Accepted():
                    self._session.accepted(message)
                    if message.request_id == self._awaited:
                        self._awaited = None
                case RequestFailed():
                    self._refused(message)
                case CallFailed():
                    error = RequestError(message.message, code=message.code, param=message.param)
                    self._replies[message.call] = error
                case Encoded() | Decoded() | Stats():
                    self._replies[message.call] = message
                case SnapshotFrame(call=call) if call is not None:
                    self._replies[call] = message
                case Stopping():
                    raise ConnectionLostError(message.message or "the engine was stopped", message)
                case _:
                    pass

    def _refused(self, message: RequestFailed) -> None:
        """submit() raises the refusal that it waits for; a later one ends the request."""
        if message.request_id == self._awaited:
            self._awaited = None
            self._refusal = RequestError(message.message, code=message.code, param=message.param)
            self._session.forget(message.request_id)
        else:
            self._deltas += self._session.fail(message.request_id, message.message)


def connect(
    config: EngineConfig,
    *,
    priority: Priority | None = None,
    kind: ClientKind = "run",
    title: str = "",
    session: str = "",
    orphan: OrphanPolicy = "cancel",
    options: LaunchOptions | None = None,
    runtime: RuntimeDir | None = None,
    on_status: OnStatus | None = None,
    on_loading: OnLoading | None = None,
) -> ProcessEngine:
    """Join the engine of `config`'s model, or start it; returns when the model is loaded.

    Raises EngineError when there will be no engine, with what its log says.
    """
    launcher = Launcher(config, runtime=runtime, options=options or LaunchOptions())
    return ProcessEngine(
        launcher,
        kind=kind,
        title=title,
        session=session,
        priority=priority,
        orphan=orphan,
        on_status=on_status,
        on_loading=on_loading,
    )
