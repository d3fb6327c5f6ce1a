"""An engine without a model: the EngineClient contract with tokens computed from the request alone.

Its tokens are bytes, so any text goes in and comes out. A prompt's answer is a function of prompt and
parameters, whatever runs beside it. Words in a prompt script the rest:

    BREAK   this request ends with an error instead of its first token
    LONG    an answer of 60 tokens
    SAY     what follows in the same message is the answer
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from mlxbatch.config import EngineConfig
from mlxbatch.errors import RequestError
from mlxbatch.models.tags import TagSet
from mlxbatch.request import OutputDelta, Request, RequestTiming, SamplingParams, TokenLogprob

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
VOCAB_SIZE = 260
_MARKS = {BOS: "<s>", EOS: "</s>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
_LETTERS = b"abcdefghijklmnopqrstuvwxyz      "


class ByteTokenizer:
    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB_SIZE

    def __init__(self, tags: TagSet | None = None) -> None:
        self.tags = tags or TagSet()

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        return [BOS] * add_bos + list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text = b"".join(
            bytes([token]) if token < 256 else b"" if skip_special_tokens else _MARKS[token].encode()
            for token in token_ids
        )
        return text.decode("utf-8", "replace")

    def encode_chat(self, messages: list[dict[str, object]], /, **template_args: object) -> list[int]:
        if template_args.get("broken"):
            raise RequestError("the chat template refuses these messages", param="messages")
        ids = []
        for message in messages:
            ids += [IM_START, *f"{message['role']}\n{message['content']}".encode(), IM_END]
        return [*ids, IM_START, *b"assistant\n", *(b"<think>\n" if template_args.get("think") else b"")]

    def stream_decoder(self, skip_special_tokens: bool = True) -> object:
        raise NotImplementedError("no test of the batch layer decodes a stream")


def answer_tokens(prompt: tuple[int, ...], params: SamplingParams, index: int) -> list[int]:
    """The whole answer, EOS excluded."""
    key = json.dumps([prompt, params.temperature, params.seed, index]).encode()
    digest = hashlib.sha256(key).digest()
    _, said, after = bytes(min(t, 255) for t in prompt).partition(b"SAY ")
    if said:
        return list(after.partition(b"\xff")[0])[: params.max_tokens]
    wanted = 60 if b"LONG" in bytes(t for t in prompt if t < 256) else 3 + digest[0] % 12
    length = wanted if params.max_tokens is None else min(wanted, params.max_tokens)
    stream = b"".join(hashlib.sha256(digest + bytes([i])).digest() for i in range(8))
    return [_LETTERS[byte % len(_LETTERS)] for byte in stream[:length]]


@dataclass
class Row:
    request: Request
    answers: list[list[int]]
    arrival: float
    scheduled: float = 0.0
    first: float = 0.0
    position: int = 0
    done: set[int] = field(default_factory=set)


class FakeEngine:
    """At most `config.max_num_seqs` (4 when auto) requests run; each gains a token per step and output."""

    max_model_len = 400

    def __init__(self, config: EngineConfig, tags: TagSet | None = None) -> None:
        self.config = config
        self.model_name = Path(config.model).name
        self.tokenizer = ByteTokenizer(tags)
        self.model_fingerprint = "of a fake"
        self.progress: list[tuple[int, int]] = []
        self.most_held = 0
        self.submitted: list[Request] = []
        self.closed = False
        self._max_rows = config.max_num_seqs or 4
        self._clock = 0.0
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._timings: list[RequestTiming] = []
        self._aborted: list[OutputDelta] = []
        self._steps = self._rows_sum = self._prompt_tokens = self._output_tokens = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running or self._aborted)

    def submit(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise RequestError("the prompt has no tokens", code="empty_prompt", param="prompt")
        need = len(request.prompt_token_ids) + (request.params.max_tokens or 1)
        if need > self.max_model_len:
            raise RequestError(
                f"{len(request.prompt_token_ids)} prompt tokens and {request.params.max_tokens} new ones exceed "
                f"the context of {self.max_model_len}",
                code="context_length_exceeded",
                param="max_tokens",
            )
        self.submitted.append(request)
        answers = [
            answer_tokens(request.prompt_token_ids, request.params, index) for index in range(request.params.n)
        ]
        self._waiting.append(Row(request, answers, self._clock))
        self.most_held = max(self.most_held, len(self._waiting) + len(self._running))

    def cancel(self, request_id: str) -> None:
        for rows in (self._waiting, self._running):
            for row in [row for row in rows if row.request.request_id == request_id]:
                rows.remove(row)
                self._aborted += [
                    OutputDelta(request_id, index, (), "", finish_reason="abort")
                    for index in range(row.request.params.n)
                    if index not in row.done
                ]

    def poll(self, timeout: float = 0.0) -> list[OutputDelta]:
        deltas, self._aborted = self._aborted, []
        while self._waiting and len(self._running) < self._max_rows:
            row = self._waiting.popleft()
            row.scheduled = self._clock
            self._running.append(row)
            self._prompt_tokens += len(row.request.prompt_token_ids)
        if self._running:
            self._clock += 1.0
            self._steps += 1
            self._rows_sum += len(self._running)
        for row in list(self._running):
            deltas += self._advance(row)
        return deltas

    def _advance(self, row: Row) -> list[OutputDelta]:
        request, position = row.request, row.position
        if "BREAK" in self._words(request):
            self._running.remove(row)
            return [OutputDelta(request.request_id, 0, (), "", finish_reason="error", error="scripted failure")]
        if position == 0:
            row.first = self._clock
        deltas = []
        for index, tokens in enumerate(row.answers):
            if index in row.done:
                continue
            last = position == len(tokens) - 1
            reason = None
            if last:
                row.done.add(index)
                full = request.params.max_tokens is not None and len(tokens) == request.params.max_tokens
                reason = "length" if full else "stop"
            token = tokens[position]
            self._output_tokens += 1
            logprobs: tuple[TokenLogprob, ...] = ()
            if request.params.logprobs is not None:
                top = tuple((97 + i, -0.5 - i) for i in range(request.params.logprobs))
                logprobs = (TokenLogprob(token, -0.25, top),)
            deltas.append(
                OutputDelta(
                    request.request_id,
                    index,
                    (token,),
                    chr(token),
                    logprobs,
                    reason,
                    num_cached_tokens=16 if len(request.prompt_token_ids) > 100 else 0,
                )
            )
        row.position += 1
        if len(row.done) == len(row.answers):
            self._running.remove(row)
            self._timings.append(
                RequestTiming(
                    request.request_id,
                    row.arrival,
                    row.scheduled,
                    row.first,
                    self._clock,
                    len(request.prompt_token_ids),
                    sum(map(len, row.answers)),
                    0,
                    0,
                )
            )
        return deltas

    def pop_timings(self) -> list[RequestTiming]:
        timings, self._timings = self._timings, []
        return timings

    def stats(self) -> dict[str, object]:
        """The keys that front ends read, as engine/metrics.py names them."""
        return {
            "rows": len(self._running),
            "waiting": len(self._waiting),
            "max_num_seqs": self._max_rows,
            "steps": self._steps,
            "mean_rows_per_step": self._rows_sum / max(1, self._steps),
            "kv_blocks_used": 10 * len(self._running),
            "kv_blocks_total": 10 * self._max_rows,
            "kv_peak_blocks": 10 * self._max_rows,
            "kv_budget_bytes": 1_000_000 * self._max_rows,
            "mean_unused_tail_tokens": 0.0,
            "prefix_hit_tokens": 0,
            "prefix_query_tokens": self._prompt_tokens,
            "prefill_tokens_per_second": float(self._prompt_tokens),
            "decode_tokens_per_second": self._output_tokens / max(1, self._steps),
            "preemptions": 0,
        }

    def report_progress(self, done: int, total: int) -> None:
        self.progress.append((done, total))

    def write_trace(self, path: Path) -> None:
        raise NotImplementedError("no test of the batch layer traces a run")

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def _words(request: Request) -> str:
        return bytes(token for token in request.prompt_token_ids if token < 256).decode("utf-8", "replace")
