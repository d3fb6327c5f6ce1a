"""Requests as the engine process keeps them: whose they are, and what of their answers is not sent yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from mlxbatch.engine.snapshot import EVENTS_SHOWN
from mlxbatch.process.messages import Delta, OrphanPolicy, Timing
from mlxbatch.request import OutputDelta, Request, RequestTiming, TokenLogprob

if TYPE_CHECKING:
    from mlxbatch.process.connection import ClientConnection

NAMES_KEPT = 4 * EVENTS_SHOWN  # each request has an event of its end, so no more are on show


@dataclass(slots=True)
class OutputBuffer:
    """Deltas of one answer, merged: however slow its reader is, it holds at most the answer itself."""

    last: OutputDelta
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        self.token_ids.extend(delta.token_ids)
        if delta.text:
            self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        cached = max(self.last.num_cached_tokens, delta.num_cached_tokens)
        self.last = replace(delta, num_cached_tokens=cached)

    @property
    def size(self) -> int:
        """About as many bytes as it will take on the wire."""
        return 5 * len(self.token_ids) + sum(map(len, self.text)) + 32 * len(self.logprobs)

    def copy(self) -> OutputBuffer:
        return OutputBuffer(self.last, list(self.token_ids), list(self.text), list(self.logprobs))

    def merged(self, request_id: str) -> Delta:
        return Delta.from_output(
            replace(
                self.last,
                token_ids=tuple(self.token_ids),
                text="".join(self.text),
                logprobs=tuple(self.logprobs),
            ),
            request_id,
        )


@dataclass(slots=True)
class ServedRequest:
    """One request of one client. `transcript` keeps whole answers, for a client that may come back."""

    request: Request  # under its engine-wide id
    request_id: str  # the client's own id
    session: str
    orphan: OrphanPolicy
    label: str
    owner: ClientConnection | None
    pending: dict[int, OutputBuffer] = field(default_factory=dict)
    transcript: dict[int, OutputBuffer] | None = None
    timing: RequestTiming | None = None
    num_finished: int = 0
    left_at: float | None = None  # when its client went away

    @property
    def engine_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return self.num_finished >= self.request.params.n

    @property
    def left_behind(self) -> bool:
        return self.left_at is not None

    @property
    def unsent_bytes(self) -> int:
        return sum(buffer.size for buffer in self.pending.values())

    def add(self, delta: OutputDelta) -> None:
        if self.owner is not None:
            self.pending.setdefault(delta.index, OutputBuffer(delta)).add(delta)
        if self.transcript is not None:
            self.transcript.setdefault(delta.index, OutputBuffer(delta)).add(delta)
        if delta.finish_reason is not None:
            self.num_finished += 1

    def wire_timing(self) -> Timing | None:
        return Timing.from_timing(self.timing, self.request_id) if self.timing is not None else None

    def take(self) -> list[Delta]:
        """What is not sent yet, as one Delta for each output that moved."""
        deltas = [buffer.merged(self.request_id) for buffer in self.pending.values()]
        self.pending = {}
        return deltas

    def replay(self, owner: ClientConnection) -> None:
        """Give the request to `owner`, its answer from the start on."""
        self.owner, self.left_at = owner, None
        self.pending = {}
        for index, whole in (self.transcript or {}).items():
            self.pending[index] = whole.copy()

    @property
    def name(self) -> str:
        return self.label or self.request_id

    @property
    def owner_name(self) -> str:
        hello = self.owner.hello if self.owner is not None else None
        return (hello.title or hello.kind) if hello is not None else ""

    def asks_the_same(self, other: Request) -> bool:
        return self.request.prompt_token_ids == other.prompt_token_ids and self.request.params == other.params


class RequestTable:
    """All requests in the engine process, by engine-wide id, and by session for those whose client is gone.

    Orphans that ran to their end are kept for `keep_seconds` and up to `keep_bytes`, oldest dropped first.
    """

    def __init__(self, keep_seconds: float = 6 * 3600.0, keep_bytes: int = 64 * 2**20) -> None:
        self._requests: dict[str, ServedRequest] = {}
        self._ended: dict[str, tuple[str, str]] = {}  # names of the last ones: events go on to show them
        self._orphans: dict[tuple[str, str], ServedRequest] = {}
        self._keep_seconds = keep_seconds
        self._keep_bytes = keep_bytes

    @property
    def num_unfinished(self) -> int:
        return sum(not request.finished for request in self._requests.values())

    def unfinished(self) -> list[ServedRequest]:
        return [request for request in self._requests.values() if not request.finished]

    def get(self, engine_id: str) -> ServedRequest | None:
        return self._requests.get(engine_id)

    def add(self, request: ServedRequest) -> None:
        self._requests[request.engine_id] = request

    def name_of(self, engine_id: str) -> tuple[str, str]:
        """What a request is called, and whose it is; an empty owner where that is not known."""
        request = self._requests.get(engine_id)
        if request is not None:
            return request.name, request.owner_name
        return self._ended.get(engine_id) or (engine_id.partition("/")[2], "")

    def remove(self, request: ServedRequest) -> None:
        self._forget(request)
        self._orphans.pop((request.session, request.request_id), None)

    def leave(self, request: ServedRequest, now: float) -> bool:
        """Its client is gone. True if the request goes on without it."""
        request.owner, request.pending = None, {}
        if request.orphan != "continue" or not request.session:
            return False
        request.left_at = now
        self._orphans[request.session, request.request_id] = request
        return True

    def orphan(self, session: str, request_id: str) -> ServedRequest | None:
        return self._orphans.get((session, request_id)) if session else None

    def adopt(self, request: ServedRequest, owner: ClientConnection) -> None:
        del self._orphans[request.session, request.request_id]
        request.replay(owner)
        if request.finished:
            self._forget(request)

    def _forget(self, request: ServedRequest) -> None:
        if self._requests.pop(request.engine_id, None) is not None:
            self._ended[request.engine_id] = (request.name, request.owner_name)
            if len(self._ended) > NAMES_KEPT:
                del self._ended[next(iter(self._ended))]

    def sweep(self, now: float) -> None:
        """Forget finished orphans that are too old, or too many."""
        done = [request for request in self._orphans.values() if request.finished]
        held = 0
        for request in sorted(done, key=lambda r: r.left_at or 0.0, reverse=True):
            held += sum(buffer.size for buffer in (request.transcript or {}).values())
            if held > self._keep_bytes or now - (request.left_at or now) > self._keep_seconds:
                self.remove(request)
