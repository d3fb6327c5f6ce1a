"""The words that clients and the engine process speak: typed structs, one msgpack map each, tagged by `type`.

    client                                        engine
      Hello ───────────────────────────────────────▶
      ◀───────────────── Loading ..., then Welcome | Refused (and the socket closes)
      Submit ──────────────────────────────────────▶
      ◀────────────────────────── Accepted | RequestFailed, then Deltas ...
      Encode | EncodeChat | Decode | StatsRequest | Ping ──▶ ◀── the answer with the same `call`
      Subscribe ───────────────────────────────────▶ ◀── Snapshot frames, at most at that rate
      Progress ────────────────────────────────────▶

The first two structs keep their field names for ever, so that any two versions can tell each other apart.
Unknown fields are ignored; a change that an older peer would misread raises PROTOCOL.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import RequestError
from mlxbatch.process.answer_format import AnswerFormat
from mlxbatch.request import OutputDelta, RequestTiming, SamplingParams, TokenLogprob

PROTOCOL = 2

OrphanPolicy = Literal["cancel", "continue"]
ClientKind = Literal["chat", "run", "top", "python", "control"]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of everything on the wire."""


# From a client.


class Hello(Message, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """`session` names a client over reconnections: requests that it left to "continue" are taken up again by
    submitting them anew under the same session and request id."""

    protocol: int
    version: str
    kind: ClientKind = "python"
    pid: int = 0
    title: str = ""
    session: str = ""


class Submit(Message, frozen=True, kw_only=True, omit_defaults=True, tag="submit"):
    """A request: exactly one of `messages`, `prompt` and `prompt_token_ids` (the last wins, so that a resumed
    request keeps its ids). Messages and text are tokenised in the engine; `Accepted` returns the ids.

    `resume_token_ids` are output tokens that the client already has; only what follows is streamed.
    `params` are the fields of SamplingParams that differ from its defaults.
    `orphan` says what becomes of the request when the client goes away.
    """

    request_id: str
    params: dict[str, Any] = {}
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    template_args: dict[str, Any] = {}
    add_bos: bool = True
    priority: int = 1
    rank: int = 0
    deadline: float | None = None
    resume_token_ids: list[int] = []
    orphan: OrphanPolicy = "cancel"
    label: str = ""


class Cancel(Message, frozen=True, kw_only=True, omit_defaults=True, tag="cancel"):
    """`anyones`: the id is engine-wide, as a Snapshot shows it, and may be another client's."""

    request_id: str
    anyones: bool = False


class Subscribe(Message, frozen=True, kw_only=True, omit_defaults=True, tag="subscribe"):
    """Ask for snapshots, `rate` a second at most (the engine's limit is 4); 0 stops them."""

    rate: float = 4.0


class Progress(Message, frozen=True, kw_only=True, omit_defaults=True, tag="progress"):
    """How much of its own work the client has done; a Snapshot shows it."""

    done: int
    total: int


class Encode(Message, frozen=True, kw_only=True, omit_defaults=True, tag="encode"):
    """Answer: Encoded. With `count_only` its token_ids stay empty."""

    call: int
    text: str
    add_bos: bool = True
    count_only: bool = False


class EncodeChat(Message, frozen=True, kw_only=True, omit_defaults=True, tag="encode_chat"):
    """Answer: Encoded, or CallFailed when the chat template refuses the messages."""

    call: int
    messages: list[dict[str, Any]]
    template_args: dict[str, Any] = {}
    count_only: bool = False


class Decode(Message, frozen=True, kw_only=True, omit_defaults=True, tag="decode"):
    """Answer: Decoded."""

    call: int
    token_ids: list[int]
    skip_special_tokens: bool = True


class StatsRequest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="stats_request"):
    """Answer: Stats."""

    call: int


class SnapshotRequest(Message, frozen=True, kw_only=True, omit_defaults=True, tag="snapshot_request"):
    """Answer: one SnapshotFrame with this `call`, taken now."""

    call: int


class Ping(Message, frozen=True, kw_only=True, omit_defaults=True, tag="ping"):
    """Answer: Pong, from the socket thread: it says that the process lives, not that steps advance."""

    call: int


class Shutdown(Message, frozen=True, kw_only=True, omit_defaults=True, tag="shutdown"):
    """Stop the engine. Without `force` it is refused (CallFailed) while requests or other clients exist."""

    call: int
    force: bool = False


class GiveWay(Message, frozen=True, kw_only=True, omit_defaults=True, tag="give_way"):
    """Another engine needs `bytes` of this one's memory. Answer: Pong when as much as can be had is free, or
    CallFailed while requests exist. Without `evict` cached blocks stay."""

    call: int
    bytes: int
    evict: bool = False


# From the engine.


class Welcome(Message, frozen=True, kw_only=True, omit_defaults=True, tag="welcome"):
    """A Snapshot names this client's requests "<client_id>/<request_id>"."""

    protocol: int
    version: str
    client_id: str
    engine_pid: int
    started: float  # Unix time
    model: str
    model_source: str = ""
    model_fingerprint: str = ""
    settings: dict[str, Any] = {}  # the EngineConfig that it was started with
    max_model_len: int = 0
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    answers: AnswerFormat = AnswerFormat()


class Loading(Message, frozen=True, kw_only=True, omit_defaults=True, tag="loading"):
    """The model is not ready yet. Sent at least once a second until Welcome or Refused.

    `done` and `total` count the same unit, bytes or tensors; a total of 0 is unknown.
    """

    stage: str
    seconds: float = 0.0
    done: int = 0
    total: int = 0

    @property
    def text(self) -> str:
        return f"{self.stage} {100 * self.done // self.total} %" if self.total else self.stage


class Refused(Message, frozen=True, kw_only=True, omit_defaults=True, tag="refused"):
    """The handshake failed, the model cannot be loaded, or a peer broke the protocol. Then the socket closes.

    `exit_code` is that of the error which stopped the loading.
    """

    protocol: int
    version: str
    code: Literal["version", "protocol", "full", "stopping", "load"]
    message: str
    exit_code: int = 3


class Accepted(Message, frozen=True, kw_only=True, omit_defaults=True, tag="accepted"):
    """The request is queued. `prompt_token_ids` are empty when the client sent them itself. `adopted`: it was
    already running for this session and goes on; its answer is streamed from the start."""

    request_id: str
    prompt_token_ids: list[int] = []
    num_prompt_tokens: int = 0
    adopted: bool = False


class RequestFailed(Message, frozen=True, kw_only=True, omit_defaults=True, tag="request_failed"):
    """The request was refused and never ran; the fields are RequestError's."""

    request_id: str
    message: str
    code: str = "invalid_request"
    param: str | None = None


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was added to one output since the last Delta; several engine steps in one, about ten a second."""

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[Logprob] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_cached_tokens: int = 0

    @classmethod
    def from_output(cls, delta: OutputDelta, request_id: str) -> Delta:
        return cls(
            request_id=request_id,
            index=delta.index,
            token_ids=list(delta.token_ids),
            text=delta.text,
            logprobs=cls.logprobs_of(delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            error=delta.error,
            num_cached_tokens=delta.num_cached_tokens,
        )

    @staticmethod
    def logprobs_of(entries: Iterable[TokenLogprob]) -> list[Logprob]:
        return [Logprob(entry.token_id, entry.logprob, entry.top) for entry in entries]

    def to_output(self) -> OutputDelta:
        return OutputDelta(
            request_id=self.request_id,
            index=self.index,
            token_ids=tuple(self.token_ids),
            text=self.text,
            logprobs=tuple(TokenLogprob(entry.token_id, entry.logprob, entry.top) for entry in self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            num_cached_tokens=self.num_cached_tokens,
        )


class Timing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RequestTiming's fields, on the engine's clock."""

    request_id: str
    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    @classmethod
    def from_timing(cls, timing: RequestTiming, request_id: str) -> Timing:
        values = {field: getattr(timing, field) for field in cls.__struct_fields__}
        return cls(**(values | {"request_id": request_id}))

    def to_timing(self) -> RequestTiming:
        return RequestTiming(**msgspec.structs.asdict(self))


class Deltas(Message, frozen=True, kw_only=True, omit_defaults=True, tag="deltas"):
    """What moved for this client, and the timings of requests that end with it."""

    deltas: list[Delta]
    timings: list[Timing] = []


class Encoded(Message, frozen=True, kw_only=True, omit_defaults=True, tag="encoded"):
    call: int
    count: int
    token_ids: list[int] = []


class Decoded(Message, frozen=True, kw_only=True, omit_defaults=True, tag="decoded"):
    call: int
    text: str


class Stats(Message, frozen=True, kw_only=True, omit_defaults=True, tag="stats"):
    call: int
    values: dict[str, Any]


class SnapshotFrame(Message, frozen=True, kw_only=True, omit_defaults=True, tag="snapshot"):
    snapshot: Snapshot
    call: int | None = None


class Pong(Message, frozen=True, kw_only=True, omit_defaults=True, tag="pong"):
    call: int


class CallFailed(Message, frozen=True, kw_only=True, omit_defaults=True, tag="call_failed"):
    call: int
    message: str
    code: str = "invalid_request"
    param: str | None = None


class Stopping(Message, frozen=True, kw_only=True, omit_defaults=True, tag="stopping"):
    """The engine ends on purpose. Clients with unfinished requests restart it, unless `reason` is "asked"."""

    reason: Literal["asked", "idle", "error"]
    message: str = ""


ClientMessage = (
    Hello
    | Submit
    | Cancel
    | Subscribe
    | Progress
    | Encode
    | EncodeChat
    | Decode
    | StatsRequest
    | SnapshotRequest
    | Ping
    | Shutdown
    | GiveWay
)
EngineMessage = (
    Loading
    | Welcome
    | Refused
    | Accepted
    | RequestFailed
    | Deltas
    | Encoded
    | Decoded
    | Stats
    | SnapshotFrame
    | Pong
    | CallFailed
    | Stopping
)


def params_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Fields that differ from the defaults."""
    defaults = SamplingParams().as_dict()
    return {name: value for name, value in params.as_dict().items() if value != defaults[name]}


def params_from_wire(values: dict[str, Any]) -> SamplingParams:
    """The inverse. Raises RequestError for an unknown field or a value out of range or of the wrong type."""
    unknown = set(values) - set(SamplingParams.__dataclass_fields__)
    if unknown:
        name = sorted(unknown)[0]
        raise RequestError(f"unknown sampling parameter {name!r}", code="unknown_parameter", param=name)
    try:
        return msgspec.convert(values, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling parameters: {error}") from None
