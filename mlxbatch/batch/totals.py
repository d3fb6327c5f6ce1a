"""The numbers of a run as it goes on, and the distributions of its latencies."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mlxbatch.request import RequestTiming

PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Distribution:
    """Values in seconds, 8 bytes each."""

    values: array[float] = field(default_factory=lambda: array("d"))

    def as_dict(self) -> dict[str, float | int | None]:
        """p50, p95, p99, mean and max; None where there are no values."""
        names = [f"p{percent}" for percent in PERCENTILES]
        if not self.values:
            return dict.fromkeys([*names, "mean", "max"]) | {"count": 0}
        values = np.frombuffer(self.values)
        points = np.percentile(values, PERCENTILES).tolist()
        return dict(zip(names, points, strict=True)) | {
            "mean": float(values.mean()),
            "max": float(values.max()),
            "count": len(values),
        }


@dataclass(slots=True)
class RunTotals:
    """Counts of one run. Tokens are those of finished and running requests alike: they grow evenly."""

    requests: int  # that this run has to answer
    earlier_answers: int = 0
    earlier_errors: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0  # of requests that gave their first token
    cached_tokens: int = 0  # of these, found in the prefix cache
    output_tokens: int = 0
    first_token_at: float | None = None  # by the monotonic clock
    ttft: Distribution = field(default_factory=Distribution)
    tpot: Distribution = field(default_factory=Distribution)
    queue_time: Distribution = field(default_factory=Distribution)

    @property
    def done(self) -> int:
        return self.answered + self.failed

    @property
    def remaining(self) -> int:
        return self.requests - self.done

    @property
    def error_records(self) -> int:
        """Over this run and the earlier ones that it goes on with."""
        return self.failed + self.earlier_errors

    def add_timings(self, timings: Iterable[RequestTiming]) -> None:
        for timing in timings:
            self.ttft.values.append(timing.ttft)
            self.queue_time.values.append(timing.queue_time)
            if timing.output_tokens > 1:
                self.tpot.values.append(timing.tpot)
