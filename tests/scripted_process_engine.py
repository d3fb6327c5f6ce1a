"""An engine without a model, to put behind a socket: every answer is a function of its prompt alone.

Its tokens are bytes, so text splits inside characters, as with a real tokenizer. `pace` seconds pass per
step; `crash_after` kills the process at that many tokens, as a GPU fault would.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlxbatch.engine.memory_plan import MemoryClaim
from mlxbatch.engine.snapshot import EVENTS_SHOWN, EngineEvent, ModelFacts, SlotState, Snapshot, WaitingRequest
from mlxbatch.errors import RequestError
from mlxbatch.request import OutputDelta, Request, RequestTiming

MAX_MODEL_LEN = 4096
LETTERS = "abcdefghijklmnopqrstuvwxyz äöüß€😀 "


def answer_text(prompt_token_ids: tuple[int, ...], seed: int | None, index: int, length: int) -> bytes:
    """`length` bytes of the answer. Multi-byte characters may be cut at the end."""
    digest = hashlib.sha256(repr((prompt_token_ids, seed, index)).encode()).digest()
    letters = random.Random(digest).choices(LETTERS, k=length)
    return "".join(letters).encode()[:length]


class ByteTokenizer:
    eos_token_ids = frozenset({256})
    vocab_size = 257

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def encode_chat(self, messages: list[dict[str, object]], /, **template_args: object) -> list[int]:
        if not messages:
            raise RequestError("a conversation needs a message", param="messages")
        named = "".join(f"<{name}={value}>" for name, value in template_args.items())
        return self.encode(named + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def stream_decoder(self, skip_special_tokens: bool = True) -> ByteStreamDecoder:
        return ByteStreamDecoder()


class ByteStreamDecoder:
    def __init__(self) -> None:
        self.pending = b""

    def push(self, token_id: int) -> str:
        self.pending += bytes([token_id])
        try:
            text = self.pending.decode()
        except UnicodeDecodeError:
            return ""
        self.pending = b""
        return text

    def finish(self) -> str:
        text, self.pending = self.pending.decode(errors="replace"), b""
        return text


@dataclass
class Row:
    request: Request
    index: int
    answer: bytes
    decoder: ByteStreamDecoder
    position: int
    arrival: float


@dataclass
class Script:
    slots: int = 8
    burst: int = 1
    pace: float = 0.0
    crash_after: int | None = None
    on_step: Callable[[], None] = field(default=lambda: None)
    on_submit: Callable[[Request], None] = field(default=lambda request: None)


class ScriptedEngine:
    """The ServedEngine contract; `burst` tokens per running row and step."""

    model_name = "scripted"
    model_fingerprint = "of a script"
    max_model_len = MAX_MODEL_LEN
    claim = MemoryClaim(1_000_000, 1_000_000, 1_000_000, 10**9)

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.tokenizer = ByteTokenizer()
        self.running: list[Row] = []
        self.waiting: list[Row] = []
        self.unread: list[OutputDelta] = []
        self.timings: list[RequestTiming] = []
        self.events: list[EngineEvent] = []
        self.tokens = 0
        self.steps = 0
        self.snapshots = 0
        self.closed = False

    def check(self, request: Request) -> None:
        wanted = len(request.prompt_token_ids) + (request.params.max_tokens or 1)
        if not request.prompt_token_ids:
            raise RequestError("the prompt has no tokens", code="empty_prompt", param="prompt")
        if wanted > MAX_MODEL_LEN:
            raise RequestError(
                f"{wanted} tokens, but the context holds {MAX_MODEL_LEN}", code="context_length_exceeded"
            )

    def submit(self, request: Request) -> None:
        self.script.on_submit(request)
        self.check(request)
        params = request.params
        room = MAX_MODEL_LEN - len(request.prompt_token_ids)
        length = min(room, params.max_tokens or room)
        for index in range(params.n):
            answer = answer_text(request.prompt_token_ids, params.seed, index, length)
            decoder = ByteStreamDecoder()
            resumed = request.resume_token_ids if index == 0 else ()
            for token in resumed:
                decoder.push(token)
            self.waiting.append(Row(request, index, answer, decoder, len(resumed), time.monotonic()))
        self.waiting.sort(key=lambda row: row.request.priority)

    def cancel(self, request_id: str) -> None:
        for row in [*self.running, *self.waiting]:
            if row.request.request_id == request_id:
                self._drop(row)
                self.unread.append(
                    OutputDelta(request_id, row.index, (), row.decoder.finish(), finish_reason="abort")
                )

    def poll(self, timeout: float = 0.0) -> list[OutputDelta]:
        while self.waiting and len(self.running) < self.script.slots:
            self.running.append(self.waiting.pop(0))
        if not self.running:
            deltas, self.unread = self.unread, []
            return deltas
        self.script.on_step()
        if self.script.pace:
            time.sleep(self.script.pace)
        self.steps += 1
        deltas, self.unread = self.unread, []
        return deltas + [self._advance(row) for row in list(self.running)]

    def _advance(self, row: Row) -> OutputDelta:
        tokens = tuple(row.answer[row.position : row.position + self.script.burst])
        self.tokens += len(tokens)
        if self.script.crash_after is not None and self.tokens > self.script.crash_after:
            os.kill(os.getpid(), signal.SIGKILL)
        row.position += len(tokens)
        text, reason = "".join(map(row.decoder.push, tokens)), None
        if row.position == len(row.answer):
            text, reason = text + row.decoder.finish(), "length"
            self._drop(row)
            self._note_timing(row)
        return OutputDelta(row.request.request_id, row.index, tokens, text, finish_reason=reason)

    def _drop(self, row: Row) -> None:
        (self.running if row in self.running else self.waiting).remove(row)

    def _note_timing(self, row: Row) -> None:
        if any(r.request is row.request for r in [*self.running, *self.waiting]):
            return
        self.events.append(
            EngineEvent(number=len(self.events), wall=time.time(), kind="finish", request_id=row.request.request_id)
        )
        now = time.monotonic()
        prompt, output = len(row.request.prompt_token_ids), len(row.answer)
        self.timings.append(
            RequestTiming(row.request.request_id, row.arrival, row.arrival, now, now, prompt, output, 0, 0)
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting or self.unread)

    def pop_timings(self) -> list[RequestTiming]:
        timings, self.timings = self.timings, []
        return timings

    def stats(self) -> dict[str, object]:
        return {"steps": self.steps, "output_tokens": self.tokens, "rows": len(self.running)}

    def snapshot(self) -> Snapshot:
        self.snapshots += 1
        return Snapshot(
            number=self.snapshots,
            clock=time.monotonic(),
            model=ModelFacts(name=self.model_name, max_model_len=MAX_MODEL_LEN),
            max_num_seqs=self.script.slots,
            slots=tuple(
                SlotState(slot=slot, request_id=row.request.request_id, output_tokens=row.position)
                for slot, row in enumerate(self.running)
            ),
            waiting=tuple(WaitingRequest(request_id=row.request.request_id) for row in self.waiting[:32]),
            waiting_count=len(self.waiting),
            head_reason="no free slot" if self.waiting else "",
            events=tuple(self.events[-EVENTS_SHOWN:]),
        )

    def resize(self, reserved: int, *, evict: bool = False) -> None:
        self.claim = replace(self.claim, reserved=min(self.claim.full, max(self.claim.least, reserved)))

    def report_progress(self, done: int, total: int) -> None:
        raise NotImplementedError("clients of the process report to its server")

    def write_trace(self, path: Path) -> None:
        raise NotImplementedError("no test traces a script")

    def close(self) -> None:
        self.closed = True
