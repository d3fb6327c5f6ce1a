"""What the engine process does for its clients: requests, tokenising, statistics, snapshots.

Everything here runs on the socket thread, but for the commands that it posts to the engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never

import msgspec

from mlxbatch.engine.snapshot import ClientInfo, Snapshot, decorate
from mlxbatch.errors import RequestError
from mlxbatch.process.connection import ClientConnection
from mlxbatch.process.driver import EngineDriver, ServedEngine
from mlxbatch.process.messages import (
    Accepted,
    CallFailed,
    Cancel,
    Decode,
    Decoded,
    Encode,
    EncodeChat,
    Encoded,
    Ping,
    Pong,
    RequestFailed,
    SnapshotFrame,
    SnapshotRequest,
    Stats,
    StatsRequest,
    Submit,
    params_from_wire,
)
from mlxbatch.process.served import RequestTable, ServedRequest
from mlxbatch.request import OutputDelta, Priority, Request, RequestTiming

MAX_RESUMED = 10**7  # tokens, where max_tokens says nothing
MAX_REQUESTS = 20_000  # unfinished, of one client

OnLoop = Callable[..., None]
ServiceMessage = Submit | Cancel | Encode | EncodeChat | Decode | StatsRequest | SnapshotRequest | Ping


class EngineService:
    """Serves the requests of all clients on one engine.

    `on_loop(function, *args)` hands a call from the engine thread to the socket thread. `take_back` claims memory
    that the engine gave up while it was idle.
    """

    def __init__(
        self,
        engine: ServedEngine,
        driver: EngineDriver,
        table: RequestTable,
        clients: Mapping[str, ClientConnection],
        on_loop: OnLoop,
        take_back: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._driver = driver
        self._table = table
        self._clients = clients
        self._on_loop = on_loop
        self._take_back = take_back
        self._tokenizing = ThreadPoolExecutor(1, "mlxbatch-tokenizer")

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def handle(self, client: ClientConnection, message: ServiceMessage) -> None:
        on_loop = self._on_loop
        match message:
            case Submit():
                await self._submit(client, message)
            case Cancel():
                self._cancel_by_id(client, message)
            case Encode() | EncodeChat() | Decode():
                await self._tokenizer_call(client, message)
            case StatsRequest(call=call):
                self._driver.post(lambda engine: on_loop(client.send, Stats(call=call, values=engine.stats())))
            case SnapshotRequest(call=call):
                self._driver.post(lambda engine: on_loop(self._answer_snapshot, client, call, engine.snapshot()))
            case Ping(call=call):
                client.send(Pong(call=call))
            case _:
                assert_never(message)

    # -- requests ------------------------------------------------------------------------------------------

    async def _submit(self, client: ClientConnection, submit: Submit) -> None:
        try:
            request = await self._request_of(client, submit)
        except RequestError as error:
            _refuse(client, submit.request_id, error)
            return
        if client.closed or client.hello is None:
            return
        ids = request.prompt_token_ids
        accepted = Accepted(
            request_id=submit.request_id,
            prompt_token_ids=[] if submit.prompt_token_ids is not None else list(ids),
            num_prompt_tokens=len(ids),
        )
        session = client.hello.session
        orphan = self._table.orphan(session, submit.request_id)
        if orphan is not None and orphan.asks_the_same(request):
            self._table.adopt(orphan, client)
            client.requests[submit.request_id] = orphan
            client.send(msgspec.structs.replace(accepted, adopted=True))
            client.moved(orphan)
            return
        if orphan is not None:
            self.cancel(orphan)
        served = ServedRequest(
            request=request,
            request_id=submit.request_id,
            session=session,
            orphan=submit.orphan,
            label=submit.label,
            owner=client,
            transcript={} if submit.orphan == "continue" and session else None,
        )
        self._table.add(served)
        client.requests[submit.request_id] = served
        client.send(accepted)
        self._driver.post(lambda engine: self._submit_to(engine, served))

    async def _request_of(self, client: ClientConnection, submit: Submit) -> Request:
        """The engine's request, tokenised and checked. Raises RequestError."""
        if submit.request_id in client.requests:
            raise RequestError(f"request id {submit.request_id!r} is already in use", param="request_id")
        if len(client.requests) >= MAX_REQUESTS:
            raise RequestError(f"more than {MAX_REQUESTS:,} unfinished requests", code="too_many_requests")
        if submit.priority not in list(Priority):
            raise RequestError(f"priority must be 0 or 1, not {submit.priority}", param="priority")
        params = params_from_wire(submit.params)
        if submit.resume_token_ids and len(submit.resume_token_ids) >= (params.max_tokens or MAX_RESUMED):
            raise RequestError("the answer to resume is complete already", param="resume_token_ids")
        request = Request(
            request_id=f"{client.client_id}/{submit.request_id}",
            prompt_token_ids=tuple(await self._prompt_ids(submit)),
            params=params,
            priority=Priority(submit.priority),
            rank=submit.rank,
            deadline=submit.deadline,
            prompt=submit.prompt,
            resume_token_ids=tuple(submit.resume_token_ids),
        )
        await self._take_back()
        self._engine.check(request)  # nothing waits between this and the engine: it does not give way meanwhile
        return request

    def _submit_to(self, engine: ServedEngine, served: ServedRequest) -> None:
        try:
            engine.submit(served.request)
        except RequestError as error:
            self._on_loop(self._drop_refused, served, error)

    def _drop_refused(self, served: ServedRequest, error: RequestError) -> None:
        self._table.remove(served)
        if served.owner is not None:
            served.owner.requests.pop(served.request_id, None)
            _refuse(served.owner, served.request_id, error)

    def _cancel_by_id(self, client: ClientConnection, message: Cancel) -> None:
        requests = self._table if message.anyones else client.requests
        request = requests.get(message.request_id)
        if request is not None and not request.finished:
            self.cancel(request)

    def cancel(self, request: ServedRequest) -> None:
        """End a request in the engine, whose last delta then frees it here; forget it if it has ended."""
        if request.finished:
            self._table.remove(request)
            return
        engine_id = request.engine_id
        self._driver.post(lambda engine: engine.cancel(engine_id))

    def abandon(self, requests: Iterable[ServedRequest], now: float) -> None:
        """Their client is gone: each is cancelled or goes on alone, as it asked."""
        for request in requests:
            if not self._table.leave(request, now):
                self.cancel(request)

    def deliver(self, deltas: list[OutputDelta], timings: list[RequestTiming]) -> None:
        """What a step produced, to the clients that it belongs to."""
        for timing in timings:
            request = self._table.get(timing.request_id)
            if request is not None:
                request.timing = timing
        for delta in deltas:
            request = self._table.get(delta.request_id)
            if request is None:
                continue
            request.add(delta)
            if request.owner is not None:
                request.owner.moved(request)
            if request.finished and not request.left_behind:
                self._table.remove(request)

    # -- tokens --------------------------------------------------------------------------------------------

    async def _prompt_ids(self, submit: Submit) -> list[int]:
        tokenizer = self._engine.tokenizer
        if submit.prompt_token_ids is not None:
            return submit.prompt_token_ids
        if submit.messages is not None:
            return await self._tokenize(tokenizer.encode_chat, submit.messages, **submit.template_args)
        if submit.prompt is not None:
            return await self._tokenize(tokenizer.encode, submit.prompt, add_bos=submit.add_bos)
        raise RequestError("a request needs messages, a prompt, or token ids", param="prompt")

    async def _tokenize(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """On a thread of its own: a long prompt delays neither the engine nor the sockets."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._tokenizing, lambda: function(*args, **kwargs))
        except RequestError:
            raise
        except Exception as error:  # a tokenizer or template may fail on what it is given
            raise RequestError(f"the prompt cannot be tokenised: {error}", code="tokenizer_error") from None

    async def _tokenizer_call(self, client: ClientConnection, message: Encode | EncodeChat | Decode) -> None:
        tokenizer = self._engine.tokenizer
        try:
            if isinstance(message, Decode):
                skip = message.skip_special_tokens
                text = await self._tokenize(tokenizer.decode, message.token_ids, skip_special_tokens=skip)
                client.send(Decoded(call=message.call, text=text))
                return
            if isinstance(message, Encode):
                ids = await self._tokenize(tokenizer.encode, message.text, add_bos=message.add_bos)
            else:
                ids = await self._tokenize(tokenizer.encode_chat, message.messages, **message.template_args)
        except RequestError as error:
            failed = CallFailed(call=message.call, message=str(error), code=error.code, param=error.param)
            client.send(failed)
            return
        client.send(Encoded(call=message.call, count=len(ids), token_ids=[] if message.count_only else ids))

    # -- snapshots -----------------------------------------------------------------------------------------

    def decorated(self, snapshot: Snapshot) -> Snapshot:
        """The engine's snapshot with what only this process knows: whose requests these are."""
        infos = [client.info() for client in self._clients.values() if client.hello is not None]
        left = sum(request.left_behind for request in self._table.unfinished())
        if left:
            infos.append(ClientInfo(client_id="", title="left behind", requests=left, connected=False))

        return decorate(snapshot, self._table.name_of, tuple(infos))

    def _answer_snapshot(self, client: ClientConnection, call: int, snapshot: Snapshot) -> None:
        client.send(SnapshotFrame(snapshot=self.decorated(snapshot), call=call))


def _refuse(client: ClientConnection, request_id: str, error: RequestError) -> None:
    client.send(RequestFailed(request_id=request_id, message=str(error), code=error.code, param=error.param))
