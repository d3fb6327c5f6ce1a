"""What a simulated run gave: throughput, latencies, goodput, occupancy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mlxbatch.engine.metrics import Targets, percentiles
from mlxbatch.engine.snapshot import Percentiles
from mlxbatch.request import RequestTiming


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `goodput` is the share of requests inside both targets, `good_per_second` their rate.

    `occupancy` is rows in use over rows allowed, averaged over the time that the device was busy.
    """

    method: str
    requests: int
    seconds: float
    output_tokens: int
    prompt_tokens: int
    steps: int
    rows_allowed: int
    mean_rows: float
    busy_seconds: float
    on_target: int
    ttft: Percentiles
    tpot: Percentiles
    preemptions: int = 0
    off_target_steps: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        return self.on_target / self.requests if self.requests else 0.0

    @property
    def good_per_second(self) -> float:
        return self.on_target / self.seconds if self.seconds else 0.0

    @property
    def occupancy(self) -> float:
        return self.mean_rows / self.rows_allowed

    @property
    def busy_share(self) -> float:
        return self.busy_seconds / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        values = asdict(self)
        for name in ("ttft", "tpot"):
            p: Percentiles = getattr(self, name)
            values[name] = {"p50": p.p50, "p95": p.p95, "p99": p.p99}
        for name in ("tokens_per_second", "goodput", "good_per_second", "occupancy", "busy_share"):
            values[name] = getattr(self, name)
        return values


@dataclass(slots=True)
class RowTime:
    """Sums rows over busy time."""

    seconds: float = 0.0
    row_seconds: float = 0.0
    steps: int = 0

    def add(self, rows: float, seconds: float, steps: int = 1) -> None:
        self.seconds += seconds
        self.row_seconds += rows * seconds
        self.steps += steps


def outcome(
    method: str,
    timings: Sequence[RequestTiming],
    rows: RowTime,
    *,
    rows_allowed: int,
    targets: Targets,
    off_target_steps: int = 0,
) -> Outcome:
    """Sum up a run whose requests all finished. Time runs from the first arrival to the last token."""
    began = min((t.arrival for t in timings), default=0.0)
    ended = max((t.finished for t in timings), default=0.0)
    return Outcome(
        method=method,
        requests=len(timings),
        seconds=ended - began,
        output_tokens=sum(t.output_tokens for t in timings),
        prompt_tokens=sum(t.prompt_tokens for t in timings),
        steps=rows.steps,
        rows_allowed=rows_allowed,
        mean_rows=rows.row_seconds / rows.seconds if rows.seconds else 0.0,
        busy_seconds=rows.seconds,
        on_target=sum(targets.met(t) for t in timings),
        ttft=percentiles(t.ttft for t in timings),
        tpot=percentiles(t.tpot for t in timings if t.output_tokens > 1),
        preemptions=sum(t.preemptions for t in timings),
        off_target_steps=off_target_steps,
    )
