"""The loop around a scheduler and a runner: plan, launch, read the step before, commit, turn tokens into text.

With run-ahead, step t+1 is planned and launched before step t is read, so the device never waits for the host:

    plan 0  launch 0 | plan 1  launch 1  read 0  commit 0 | plan 2  launch 2  read 1  commit 1 | ...

Not before a step that flushes or computes prompts (`Scheduler.reads_first`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mlxbatch.engine.api import TokenizerLike
from mlxbatch.engine.metrics import EngineMetrics, KVUse
from mlxbatch.engine.output_text import OutputText
from mlxbatch.engine.snapshot import EVENTS_SHOWN, EngineEvent
from mlxbatch.engine.trace import StepTrace
from mlxbatch.errors import EngineError, RequestError
from mlxbatch.request import OutputDelta, Request, RequestTiming, SamplingParams, TokenLogprob
from mlxbatch.scheduling.plan import Runner, StepHandle, StepPlan
from mlxbatch.scheduling.scheduler import Sampled, Scheduler
from mlxbatch.scheduling.sequence import Sequence

MAX_STUCK = 3  # plans in a row that start nothing; moving memory between groups takes one


@dataclass(slots=True)
class _InFlight:
    plan: StepPlan
    handle: StepHandle
    launched: float
    preemptions: int


class EngineCore:
    """Not thread safe: one thread submits, steps and reads."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: TokenizerLike,
        *,
        run_ahead: bool = True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        trace: StepTrace | None = None,
        observe: Callable[[StepPlan, float], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.run_ahead = run_ahead
        self.clock = clock
        self.metrics = EngineMetrics(started=clock())
        self.events: deque[EngineEvent] = deque(maxlen=EVENTS_SHOWN)
        self.trace = trace
        self.observe = observe  # told of every step and its seconds, for the cost model
        self._wall = wall
        self._in_flight: _InFlight | None = None
        self._last_read = clock()
        self._texts: dict[int, OutputText] = {}
        self._open: dict[str, list[Sequence]] = {}
        self._unread: list[OutputDelta] = []
        self._timings: list[RequestTiming] = []
        self._events_seen = 0
        self._stuck = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open or self._unread)

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def check(self, request: Request) -> None:
        """Raise RequestError if the request can never run. Reads only what is fixed, so any thread may call it."""
        vocab, params = self.tokenizer.vocab_size, request.params
        prompts = (("prompt", request.prompt_token_ids), ("resume_token_ids", request.resume_token_ids))
        others = (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids))
        for name, ids in (*prompts, *others):
            for token_id in ids:
                if not 0 <= token_id < vocab:
                    message = f"{name}: token id {token_id} is outside the vocabulary of {vocab}"
                    raise RequestError(message, param=name)
        self.scheduler.check_fits(len(request.prompt_token_ids), params.max_tokens)

    def submit(self, request: Request) -> None:
        """Queue a request; raises RequestError if it can never run."""
        self.check(request)
        params = request.params
        sequences = self.scheduler.add(request)
        self._open[request.request_id] = sequences
        for seq in sequences:
            decoder = self.tokenizer.stream_decoder(params.skip_special_tokens)
            text = OutputText(decoder, tuple(params.stop), include_stop=params.include_stop_str_in_output)
            self._texts[seq.seq_id] = text
            for count, token_id in enumerate(request.resume_token_ids if seq.index == 0 else (), start=1):
                text.push(token_id, check_stop=_checks_stop(params, count))  # the client has this text already
        self.metrics.requests_submitted += 1

    def cancel(self, request_id: str) -> None:
        for seq in self.scheduler.cancel(request_id, self.clock()):
            self._unread.append(self._end(seq, self._texts[seq.seq_id].finish(), ()))
        self._close_if_done(request_id)

    def step(self) -> list[OutputDelta]:
        """Run until something was committed, or nothing is left. At most one step is read."""
        deltas, self._unread = self._unread, []
        while not deltas and self._open:
            progressed, deltas = self._iterate()
            if not progressed:
                break
        self.settle()
        return deltas

    def _iterate(self) -> tuple[bool, list[OutputDelta]]:
        if self._in_flight is not None and self.scheduler.reads_first:
            step, self._in_flight = self._in_flight, None
            return True, self._read(step)
        plan = self.scheduler.plan(self.clock())
        launched = self._launch(plan) if plan is not None else None
        ready = launched
        if self.run_ahead:
            ready, self._in_flight = self._in_flight, launched
        if ready is None:
            self._stuck = self._stuck + 1 if plan is None and len(self.scheduler.waiting) else 0
            if self._stuck > MAX_STUCK:
                raise EngineError(f"no request can make progress: {self.scheduler.wait_reason}")
            return plan is not None, []
        self._stuck = 0
        return True, self._read(ready)

    def settle(self) -> None:
        """When all requests have ended: read what is in flight, flush, give back slots, blocks and memory."""
        while not self._open and (self.scheduler.has_work or self._in_flight is not None):
            self._iterate()

    def _launch(self, plan: StepPlan) -> _InFlight | None:
        events = self.scheduler.preemptions
        for event in events:
            self.metrics.recomputed_tokens += event.lost_tokens
            self.metrics.preemption_times.append(self.clock())
            self.note("preempt", event.seq.request.request_id, f"{event.reason}; recompute {event.lost_tokens} tok")
        preemptions = len(events)
        events.clear()
        self.metrics.on_plan(plan, self.kv_use())
        now = self.clock()
        handle = self.runner.launch(plan)
        if not plan.has_rows:
            return None
        return _InFlight(plan, handle, now, preemptions)

    def _read(self, step: _InFlight) -> list[OutputDelta]:
        result = step.handle.result()
        now = self.clock()
        began = max(step.launched, self._last_read)
        self._last_read = now
        sampled = self.scheduler.commit(step.plan, result, now)
        self.metrics.on_step(step.plan, now - began, now, step.preemptions)
        if self.observe is not None:
            self.observe(step.plan, now - began)
        if self.trace is not None:
            self.trace.add_step(step.plan, began, now, len(self.scheduler.waiting))
        self.metrics.output_tokens += sum(1 for item in sampled if item.token_id >= 0)
        return [self._delta(item) for item in sampled]

    def _delta(self, item: Sampled) -> OutputDelta:
        seq, token_id, logprob = item
        text = self._texts[seq.seq_id]
        if not seq.seen:
            self._on_first_token(seq)
        logprobs = (logprob,) if logprob is not None else ()
        if seq.finish_reason is not None:
            return self._last_delta(seq, text, token_id, logprobs)
        params = seq.request.params
        words = text.push(token_id, check_stop=_checks_stop(params, seq.num_output_tokens))
        if text.found_stop is not None:
            self.scheduler.finish(seq, "stop", self.clock(), stop_reason=text.found_stop)
            return self._end(seq, words, (token_id,), logprobs)
        return OutputDelta(seq.request.request_id, seq.index, (token_id,), words, logprobs)

    def _last_delta(
        self, seq: Sequence, text: OutputText, token_id: int, logprobs: tuple[TokenLogprob, ...]
    ) -> OutputDelta:
        """The scheduler ended the sequence with this token: by overflow, a stop token, or its length."""
        if seq.finish_reason == "error":
            return self._end(seq, text.finish(), ())
        words = ""
        if seq.finish_reason != "stop" or seq.request.params.include_stop_str_in_output:
            words = text.push(token_id)
        if text.found_stop is None:
            words += text.finish()
        if text.found_stop is not None:
            seq.finish_reason, seq.stop_reason = "stop", text.found_stop
        return self._end(seq, words, (token_id,), logprobs)

    def _on_first_token(self, seq: Sequence) -> None:
        seq.seen = True
        self.metrics.prefix_query_tokens += seq.num_prompt_tokens
        self.metrics.prefix_hit_tokens += min(seq.num_cached, seq.num_prompt_tokens)
        self.metrics.prompt_tokens += seq.num_prompt_tokens

    def _end(
        self, seq: Sequence, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] = ()
    ) -> OutputDelta:
        del self._texts[seq.seq_id]
        request_id = seq.request.request_id
        took = (seq.finished_at or 0.0) - seq.request.arrival
        self.note("finish", request_id, f"{seq.finish_reason} · {seq.num_output_tokens} tok · {took:.1f} s")
        self._close_if_done(request_id)
        return OutputDelta(
            request_id,
            seq.index,
            token_ids,
            text,
            logprobs,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            error=seq.error,
            num_cached_tokens=seq.num_cached,
        )

    def _close_if_done(self, request_id: str) -> None:
        sequences = self._open.get(request_id)
        if sequences is None or any(seq.finish_reason is None for seq in sequences):
            return
        del self._open[request_id]
        reasons = {seq.finish_reason for seq in sequences}
        if "error" in reasons:
            self.metrics.requests_failed += 1
        elif "abort" in reasons:
            self.metrics.requests_aborted += 1
        else:
            self.metrics.requests_finished += 1
        first = [s.first_token for s in sequences if s.first_token is not None]
        if not first:
            return
        request = sequences[0].request
        timing = RequestTiming(
            request_id=request_id,
            arrival=request.arrival,
            first_scheduled=min(s.first_scheduled for s in sequences if s.first_scheduled is not None),
            first_token=min(first),
            finished=max(s.finished_at for s in sequences if s.finished_at is not None),
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=max(s.num_output_tokens for s in sequences),
            cached_tokens=sequences[0].num_cached,
            preemptions=sum(s.num_preemptions for s in sequences),
        )
        self.metrics.on_timing(timing)
        self._timings.append(timing)
        if self.trace is not None:
            self.trace.add_request(timing)

    def pop_timings(self) -> list[RequestTiming]:
        timings, self._timings = self._timings, []
        return timings

    def note(self, kind: str, request_id: str, text: str) -> None:
        self._events_seen += 1
        self.events.append(
            EngineEvent(number=self._events_seen, wall=self._wall(), kind=kind, request_id=request_id, text=text)
        )

    def kv_use(self) -> KVUse:
        """KV memory as it stands, counted over pools and running sequences."""
        kv, size = self.scheduler.kv, self.scheduler.kv.block_size
        live = tail = 0
        for seq in self.scheduler.running:
            flushed = seq.kv.flushed if seq.kv is not None else 0
            live += seq.num_computed
            tail += seq.num_computed - flushed
        rows = len(self.scheduler.running)
        full = [pool for pool, spec in zip(kv.pools, kv.specs, strict=True) if spec.window is None] or kv.pools[:1]
        return KVUse(
            used_blocks=sum(pool.num_used for pool in kv.pools),
            cached_blocks=sum(pool.num_cached for pool in kv.pools),
            held_tokens=full[0].num_used * size + rows * self.scheduler.tail_len if full else 0,
            live_tokens=live,
            tail_tokens=tail,
            tail_capacity=rows * self.scheduler.tail_len,
        )

    def stats(self) -> dict[str, object]:
        """Counters and the state of now; the same numbers that a Snapshot shows."""
        kv = self.scheduler.kv
        evictions = sum(pool.evictions for pool in kv.pools)
        values = self.metrics.stats(preemptions=self.scheduler.num_preemptions, evictions=evictions)
        use = self.kv_use()
        capacity = sum(kv.max_blocks(group) for group in range(len(kv.pools)))
        return values | {
            "rows": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "max_num_seqs": self.scheduler.slots.max_slots,
            "kv_blocks_used": use.used_blocks,
            "kv_blocks_cached": use.cached_blocks,
            "kv_blocks_total": capacity,
            "kv_tail_tokens": use.tail_tokens,
            "kv_budget_bytes": kv.budget,
            "kv_pool_bytes": kv.bytes_held,
            "block_size": kv.block_size,
        }


def _checks_stop(params: SamplingParams, num_tokens: int) -> bool:
    """Whether a stop string may end an output of so many tokens."""
    return not params.min_tokens or num_tokens > params.min_tokens
