"""The loop of a batch run: lines in, requests to the engine, records out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from mlxbatch.batch.formats import LineReader
from mlxbatch.batch.index import InputIndex, LineState, duplicate_error, read_line
from mlxbatch.batch.interrupt import Interrupt
from mlxbatch.batch.item import BatchItem, LineError
from mlxbatch.batch.output import Output
from mlxbatch.batch.prompts import tokenize
from mlxbatch.batch.records import RecordWriter, error_fields, usage_of
from mlxbatch.batch.source import InputFile
from mlxbatch.batch.totals import RunTotals
from mlxbatch.engine.api import EngineClient
from mlxbatch.errors import EngineError, RequestError
from mlxbatch.models.reply import Reply, read_reply
from mlxbatch.models.tags import TagSet
from mlxbatch.process.answer_format import prompt_end, tags_of
from mlxbatch.request import CompletionOutput, OutputDelta, Priority, Request

Order = Literal["completion", "input"]

LEAST_AHEAD = 64  # requests in the engine at once, running and waiting
MOST_TOKENS_AHEAD = 2_000_000  # prompt tokens of these: about 70 MB
MOST_HELD_PER_AHEAD = 8  # finished records that may wait for an earlier line, with --order input
POLL_SECONDS = 0.1


@dataclass(slots=True)
class Job:
    """A line that is in the engine: one request for each of its prompts, `n` outputs for each request."""

    item: BatchItem
    outputs: list[CompletionOutput]
    request_ids: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    prompt_end: str = ""  # of a chat, which may open the thinking
    cached_tokens: dict[str, int] = field(default_factory=dict)  # by request

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def started(self) -> bool:
        return any(output.token_ids for output in self.outputs)

    @property
    def output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


class BatchRunner:
    """Runs every pending line of one input through one engine.

    The engine holds a bounded number of requests: enough to fill its rows and to look ahead, however long
    the file is. Lines are read, parsed and tokenised when they are due. `engine` may be None when no pending
    line is valid.
    """

    def __init__(
        self,
        engine: EngineClient | None,
        source: InputFile,
        reader: LineReader,
        index: InputIndex,
        output: Output,
        *,
        order: Order = "completion",
        limit: int | None = None,
        rows: int = 0,
        template_args: Mapping[str, object] | None = None,
        interrupt: Interrupt | None = None,
        on_step: Callable[[RunTotals], None] = lambda totals: None,
        on_drain: Callable[[int], None] = lambda running: None,
        on_error: Callable[[int, str], None] = lambda line, message: None,
    ) -> None:
        """`rows` is what the engine runs at once, where that is known. `on_drain` gets the number of requests
        that are finished before the run ends, `on_error` the line and the message of every error record."""
        pending = pending_lines(index, output.earlier.done, limit).requests
        self.totals = RunTotals(pending, output.earlier.answers, output.earlier.errors)
        self._client = engine
        self._reader = reader
        self._index = index
        self._output = output
        self._records = RecordWriter(reader.format, engine.model_name if engine else "", self._text_of)
        self._tags = tags_of(engine.tokenizer) if engine else TagSet()
        self._ahead = max(LEAST_AHEAD, 2 * rows)
        self._template_args = template_args or {}
        self._interrupt = interrupt or Interrupt()
        self._on_step = on_step
        self._on_drain = on_drain
        self._on_error = on_error
        self._lines = due_lines(source, index, output.earlier.done, limit)
        self._jobs: dict[int, Job] = {}
        self._requests: dict[str, tuple[Job, int]] = {}  # request id -> its job, and its first output there
        self._tokens_ahead = 0
        self._in_order = order == "input"
        self._awaited: deque[int] = deque()  # lines without a record yet, in the order of the input
        self._held: dict[int, tuple[Any, bool]] = {}  # line -> its record, and whether it is an error

    @property
    def _engine(self) -> EngineClient:
        if self._client is None:
            raise EngineError("a request needs an engine, and none was opened")
        return self._client

    def run(self) -> RunTotals:
        """Until every line has its record, or an interrupt ends the run.

        Raises EngineError when the engine or the output fails; what is written stays valid for a resume.
        """
        drained = False
        while not self._interrupt.stopping:
            self._fill()
            if self._interrupt.draining and not drained:
                drained = True
                self._drop_waiting()
            if not self._jobs:
                break
            deltas = self._engine.poll(POLL_SECONDS)
            if self.totals.first_token_at is None and any(delta.token_ids for delta in deltas):
                self.totals.first_token_at = time.monotonic()
            for delta in deltas:
                self._take(delta)
            self.totals.add_timings(self._engine.pop_timings())
            self._on_step(self.totals)
            if self._jobs and not deltas and not self._engine.has_unfinished:
                raise EngineError(f"the engine lost {len(self._jobs)} requests")
        for request_id in list(self._requests):
            self._engine.cancel(request_id)
        if self.totals.remaining and not self._interrupt.draining:
            raise EngineError(f"the input ended {self.totals.remaining} requests early: it changed during the run")
        return self.totals

    # Lines into the engine.

    def _fill(self) -> None:
        held_limit = self._ahead * MOST_HELD_PER_AHEAD
        while (
            not self._interrupt.draining
            and len(self._jobs) < self._ahead
            and self._tokens_ahead < MOST_TOKENS_AHEAD
            and len(self._awaited) < held_limit
        ):
            due = next(self._lines, None)
            if due is None:
                return
            self._start(*due)

    def _start(self, line: int, text: bytes) -> None:
        if self._in_order:
            self._awaited.append(line)
        item: BatchItem | None = None
        try:
            item = read_line(self._reader, line, text)
            first = self._index.line_of(item.custom_id)
            if first is None:
                raise LineError("the line has changed since the file was checked", code="input_changed")
            if first != line:
                raise duplicate_error(first)
            self._submit(item)
        except LineError as error:
            # An id belongs to the first line that bears it.
            owned = error.custom_id is not None and self._index.line_of(error.custom_id) == line
            self._finish(line, self._error_record(line, error.custom_id if owned else None, error), failed=True)
        except RequestError as error:
            self._drop(line)
            custom_id = None if item is None else item.custom_id
            self._finish(line, self._error_record(line, custom_id, error), failed=True)

    def _submit(self, item: BatchItem) -> None:
        tokenizer, params = self._engine.tokenizer, item.params
        prompts = tokenize(item, tokenizer, self._template_args)
        job = Job(item, [CompletionOutput(index) for index in range(item.answers)])
        if item.is_chat and self._tags.tags:
            job.prompt_end = prompt_end(tokenizer, prompts[0].token_ids)
            if self._tags.special and item.skip_special_tokens is None:
                params = replace(params, skip_special_tokens=False)  # else the tags would be missing from the text
        if params.logprobs is not None:
            for output in job.outputs:
                output.logprobs = []
        self._jobs[item.line] = job
        for number, (token_ids, text) in enumerate(prompts):
            request_id = f"{item.line}-{number}"  # the same in a later run, which may take up what this one left
            job.request_ids.append(request_id)
            job.prompt_tokens += len(token_ids)
            self._tokens_ahead += len(token_ids)
            self._requests[request_id] = (job, number * params.n)
            self._engine.submit(Request(request_id, token_ids, params, Priority.BATCH, prompt=text))

    # Deltas out of the engine.

    def _take(self, delta: OutputDelta) -> None:
        job, first = self._requests.get(delta.request_id, (None, 0))
        if job is None:
            return  # cancelled by this run
        output = job.outputs[first + delta.index]
        if delta.token_ids and not job.started:
            self.totals.prompt_tokens += job.prompt_tokens
        output.token_ids.extend(delta.token_ids)
        output.text += delta.text
        if output.logprobs is not None:
            output.logprobs.extend(delta.logprobs)
        self.totals.output_tokens += len(delta.token_ids)
        if delta.num_cached_tokens and delta.request_id not in job.cached_tokens:
            job.cached_tokens[delta.request_id] = delta.num_cached_tokens
            self.totals.cached_tokens += delta.num_cached_tokens
        if delta.finish_reason in ("error", "abort"):
            code = "engine_error" if delta.finish_reason == "error" else "aborted"
            error = RequestError(delta.error or "the request was cancelled from outside this run", code=code)
            self._drop(job.item.line)
            self._finish(job.item.line, self._error_record(job.item.line, job.item.custom_id, error), failed=True)
            return
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
        if job.finished:
            self._forget(job)
            usage = usage_of(job.prompt_tokens, job.output_tokens, sum(job.cached_tokens.values()))
            record = self._records.answer(job.item, job.outputs, [self._reply(job, o) for o in job.outputs], usage)
            self._finish(job.item.line, record, failed=False)

    def _drop_waiting(self) -> None:
        """Take back what has not begun: it costs nothing to begin it again after a resume."""
        for line in [line for line, job in self._jobs.items() if not job.started]:
            self._drop(line)
        if self._jobs:
            self._on_drain(len(self._jobs))

    def _drop(self, line: int) -> None:
        job = self._jobs.get(line)
        if job is not None:
            self._forget(job)
            for request_id in job.request_ids:
                self._engine.cancel(request_id)

    def _reply(self, job: Job, output: CompletionOutput) -> Reply:
        if not job.item.is_chat:
            return Reply(output.text)
        own = job.item.skip_special_tokens is None  # a line that asks for special tokens gets them
        return read_reply(output.text, self._tags, job.prompt_end, drop_stray=own)

    def _text_of(self, token_id: int) -> str:
        return self._engine.tokenizer.decode([token_id], skip_special_tokens=False)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.item.line]
        self._tokens_ahead -= job.prompt_tokens
        for request_id in job.request_ids:
            del self._requests[request_id]

    # Records into the output.

    def _error_record(self, line: int, custom_id: str | int | None, error: LineError | RequestError) -> Any:
        code, message, param = error_fields(error)
        self._on_error(line, message)
        return self._records.error(line, custom_id, code, message, param)

    def _finish(self, line: int, record: Any, *, failed: bool) -> None:
        if not self._in_order:
            self._write(record, failed)
            return
        self._held[line] = (record, failed)
        while self._awaited and self._awaited[0] in self._held:
            self._write(*self._held.pop(self._awaited.popleft()))

    def _write(self, record: Any, failed: bool) -> None:
        (self._output.errors if failed else self._output.answers).append(record)
        if failed:
            self.totals.failed += 1
        else:
            self.totals.answered += 1


def due_lines(
    source: InputFile, index: InputIndex, done: bytearray, limit: int | None
) -> Iterator[tuple[int, bytes]]:
    """(number, text) of the lines that a run has to answer: of the first `limit` requests, those without a record."""
    seen = 0
    for line, text in source.lines():
        if line >= len(index.states):
            return  # the file has grown since it was checked
        if index.states[line] == LineState.BLANK:
            continue
        seen += 1
        if limit is not None and seen > limit:
            return
        if not done[line]:
            yield line, text


class Pending(NamedTuple):
    """Lines that a run has to answer, and how many of these go to the engine."""

    requests: int
    valid: int


def pending_lines(index: InputIndex, done: bytearray, limit: int | None) -> Pending:
    """Of the first `limit` requests, those without a record."""
    seen = requests = valid = 0
    for state, is_done in zip(index.states, done, strict=True):
        if state != LineState.BLANK:
            seen += 1
            if limit is not None and seen > limit:
                break
            requests += not is_done
            valid += state == LineState.VALID and not is_done
    return Pending(requests, valid)
