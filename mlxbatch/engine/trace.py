"""Steps and requests in Chrome's trace event format, which Perfetto and chrome://tracing open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxbatch.request import RequestTiming
from mlxbatch.scheduling.plan import StepPlan

_STEPS, _REQUESTS = 1, 2  # process ids of the two tracks
MAX_EVENTS = 1_000_000


class StepTrace:
    """Keeps events in memory (about 300 bytes each) until they are written; past MAX_EVENTS it stops adding."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._events: list[dict[str, Any]] = [
            {"ph": "M", "pid": _STEPS, "name": "process_name", "args": {"name": "engine steps"}},
            {"ph": "M", "pid": _REQUESTS, "name": "process_name", "args": {"name": "requests"}},
        ]
        self._lanes: list[float] = []  # when each request lane becomes free, microseconds

    def _micros(self, moment: float) -> float:
        return round((moment - self._origin) * 1e6, 1)

    def _add(self, **event: Any) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)

    def add_step(self, plan: StepPlan, began: float, ended: float, waiting: int) -> None:
        rows, prefill = len(plan.decode), plan.num_chunk_tokens
        name = "mixed" if rows and prefill else "prefill" if prefill else "decode"
        args = {
            "step": plan.step,
            "decode_rows": rows,
            "prefill_tokens": prefill,
            "chunks": len(plan.chunks),
            "flush": plan.flush is not None,
            "off_target": plan.off_target,
        }
        start = self._micros(began)
        self._add(ph="X", pid=_STEPS, tid=0, name=name, ts=start, dur=self._micros(ended) - start, args=args)
        self._add(ph="C", pid=_STEPS, name="rows", ts=start, args={"decode": rows, "chunks": len(plan.chunks)})
        self._add(ph="C", pid=_STEPS, name="waiting", ts=start, args={"requests": waiting})

    def add_request(self, timing: RequestTiming) -> None:
        arrival, end = self._micros(timing.arrival), self._micros(timing.finished)
        lane = next((n for n, free in enumerate(self._lanes) if free <= arrival), len(self._lanes))
        self._lanes[lane : lane + 1] = [end]
        args = {
            "prompt_tokens": timing.prompt_tokens,
            "output_tokens": timing.output_tokens,
            "cached_tokens": timing.cached_tokens,
            "preemptions": timing.preemptions,
        }
        marks = (
            ("queue", timing.arrival, timing.first_scheduled),
            ("prefill", timing.first_scheduled, timing.first_token),
        )
        where: dict[str, Any] = {"pid": _REQUESTS, "tid": lane}
        self._add(ph="X", **where, name=timing.request_id, ts=arrival, dur=end - arrival, args=args)
        for name, began, ended in (*marks, ("decode", timing.first_token, timing.finished)):
            start = self._micros(began)
            self._add(ph="X", **where, name=name, ts=start, dur=self._micros(ended) - start)

    def write(self, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            json.dump({"traceEvents": self._events, "displayTimeUnit": "ms"}, file)
