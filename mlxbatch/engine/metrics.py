"""What the engine counts. Every figure is an observation; nothing here is estimated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mlxbatch.engine.snapshot import STEPS_SHOWN, Counters, Percentiles, Rates, StepMark
from mlxbatch.request import RequestTiming
from mlxbatch.scheduling.plan import StepPlan

RATE_SECONDS = 60  # history of tokens per second
RATE_NOW = 3  # whole seconds over which "now" is averaged
TIMINGS_KEPT = 2000


def percentiles(values: Iterable[float]) -> Percentiles:
    data = np.fromiter(values, dtype=np.float64)
    if not data.size:
        return Percentiles()
    p50, p95, p99 = np.percentile(data, (50, 95, 99)).tolist()
    return Percentiles(p50, p95, p99, int(data.size))


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in seconds; None: no target. TPOT is a request's mean time per output token after the first."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, timing: RequestTiming) -> bool:
        late = self.ttft is not None and timing.ttft > self.ttft
        return not late and (self.tpot is None or timing.tpot <= self.tpot)


@dataclass(slots=True)
class KVUse:
    """KV memory at the end of a plan, in tokens and blocks."""

    used_blocks: int
    cached_blocks: int
    held_tokens: int  # referenced blocks and the tails of running rows, in tokens of full attention
    live_tokens: int  # positions of running sequences whose K and V exist
    tail_tokens: int  # of these, in tails
    tail_capacity: int  # tail places of running rows


@dataclass(slots=True)
class EngineMetrics:
    """`tape` and rates serve the display, the rest `stats()`. Times are seconds on the engine's clock."""

    started: float
    targets: Targets = Targets()
    on_target: int = 0  # finished requests inside both targets
    timed: int = 0  # finished requests that have a timing
    requests_submitted: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    prompt_tokens: int = 0  # computed in prefill chunks or found in the prefix cache, at first admission
    output_tokens: int = 0
    prefill_tokens: int = 0  # computed in chunks, recomputation included
    decode_tokens: int = 0  # decode rows run
    steps: int = 0
    flushes: int = 0
    recomputed_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    off_target_steps: int = 0
    row_steps: int = 0
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_peak_blocks: int = 0
    kv_held_ratio_sum: float = 0.0
    kv_samples: int = 0
    unused_tail_tokens: int = 0
    tape: deque[StepMark] = field(default_factory=lambda: deque(maxlen=STEPS_SHOWN))
    timings: deque[RequestTiming] = field(default_factory=lambda: deque(maxlen=TIMINGS_KEPT))
    preemption_times: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    _seconds: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_SECONDS + 1))

    def on_plan(self, plan: StepPlan, kv: KVUse) -> None:
        if plan.flush is not None:
            self.flushes += 1
        if not plan.has_rows:
            return
        self.steps += 1
        self.row_steps += len(plan.decode) + len(plan.chunks)
        self.off_target_steps += plan.off_target
        self.decode_tokens += len(plan.decode)
        self.prefill_tokens += plan.num_chunk_tokens
        self.kv_peak_blocks = max(self.kv_peak_blocks, kv.used_blocks)
        self.unused_tail_tokens += kv.tail_capacity - kv.tail_tokens
        if kv.live_tokens:
            self.kv_held_ratio_sum += kv.held_tokens / kv.live_tokens
            self.kv_samples += 1

    def on_step(self, plan: StepPlan, seconds: float, now: float, preemptions: int) -> None:
        """A step's samples were read. `seconds` since the step before was read, or since its own launch."""
        chunk_tokens, rows = plan.num_chunk_tokens, len(plan.decode)
        self.busy_seconds += seconds
        share = chunk_tokens / max(1, chunk_tokens + rows)  # a mixed step's time is shared out by tokens
        self.prefill_seconds += seconds * share
        self.decode_seconds += seconds * (1 - share)
        self.tape.append(
            StepMark(
                plan.step, chunk_tokens, rows, preemptions, seconds, now, plan.flush is not None, plan.off_target
            )
        )
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            _, decoded, prefilled = self._seconds[-1]
            self._seconds[-1] = (second, decoded + len(plan.samples), prefilled + chunk_tokens)
        else:
            self._seconds.append((second, len(plan.samples), chunk_tokens))

    def on_timing(self, timing: RequestTiming) -> None:
        self.timings.append(timing)
        self.timed += 1
        self.on_target += self.targets.met(timing)

    def counters(self, *, preemptions: int, evictions: int) -> Counters:
        return Counters(
            requests_submitted=self.requests_submitted,
            requests_finished=self.requests_finished,
            requests_aborted=self.requests_aborted,
            requests_failed=self.requests_failed,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            steps=self.steps,
            flushes=self.flushes,
            preemptions=preemptions,
            recomputed_tokens=self.recomputed_tokens,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            evictions=evictions,
            off_target_steps=self.off_target_steps,
        )

    def rates(self, now: float) -> Rates:
        """Tokens per second, now and in each of the last RATE_SECONDS whole seconds, oldest first."""
        last = int(now) - 1  # the running second is not complete
        by_second = {second: (decoded, prefilled) for second, decoded, prefilled in self._seconds}
        history = [by_second.get(s, (0, 0)) for s in range(last - RATE_SECONDS + 1, last + 1)]
        recent = history[-RATE_NOW:]
        return Rates(
            decode=sum(d for d, _ in recent) / RATE_NOW,
            prefill=sum(p for _, p in recent) / RATE_NOW,
            decode_history=tuple(float(d) for d, _ in history),
            prefill_history=tuple(float(p) for _, p in history),
        )

    def latencies(self) -> dict[str, Percentiles]:
        return {
            "queue_time": percentiles(t.queue_time for t in self.timings),
            "ttft": percentiles(t.ttft for t in self.timings),
            "tpot": percentiles(t.tpot for t in self.timings if t.output_tokens > 1),
        }

    def preemptions_since(self, moment: float) -> int:
        return sum(1 for t in self.preemption_times if t >= moment)

    def stats(self, *, preemptions: int, evictions: int) -> dict[str, object]:
        """Every counter and ratio by name, JSON-able."""
        import msgspec

        values: dict[str, object] = dict(
            msgspec.structs.asdict(self.counters(preemptions=preemptions, evictions=evictions))
        )

        def per(total: float, count: float) -> float:
            return total / count if count else 0.0

        values |= {
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "mean_rows_per_step": per(self.row_steps, self.steps),
            "row_steps": self.row_steps,
            "unused_tail_tokens": self.unused_tail_tokens,
            "busy_seconds": self.busy_seconds,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "prefill_tokens_per_second": per(self.prefill_tokens, self.prefill_seconds),
            "decode_tokens_per_second": per(self.decode_tokens, self.decode_seconds),
            "kv_peak_blocks": self.kv_peak_blocks,
            "kv_held_over_live": per(self.kv_held_ratio_sum, self.kv_samples),
            "mean_unused_tail_tokens": per(self.unused_tail_tokens, self.steps),
            "prefix_hit_rate": per(self.prefix_hit_tokens, self.prefix_query_tokens),
        }
        if self.targets != Targets():
            values["goodput"] = per(self.on_target, self.timed)  # share of requests inside their targets
        for name, p in self.latencies().items():
            values[name] = {"p50": p.p50, "p95": p.p95, "p99": p.p99, "count": p.count}
        return values
