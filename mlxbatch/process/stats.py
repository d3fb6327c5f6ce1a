"""An engine's figures since one client joined it: counters that only grow are counted from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTERS = (
    "requests_submitted",
    "requests_finished",
    "requests_aborted",
    "requests_failed",
    "prompt_tokens",
    "output_tokens",
    "steps",
    "flushes",
    "preemptions",
    "recomputed_tokens",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "evictions",
    "off_target_steps",
    "prefill_tokens",
    "decode_tokens",
    "row_steps",
    "unused_tail_tokens",
    "busy_seconds",
    "prefill_seconds",
    "decode_seconds",
)
RATIOS = {
    "mean_rows_per_step": ("row_steps", "steps"),
    "prefill_tokens_per_second": ("prefill_tokens", "prefill_seconds"),
    "decode_tokens_per_second": ("decode_tokens", "decode_seconds"),
    "mean_unused_tail_tokens": ("unused_tail_tokens", "steps"),
    "prefix_hit_rate": ("prefix_hit_tokens", "prefix_query_tokens"),
}


def stats_since(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """`now` with the counters of `then` taken off, and the ratios of counters made anew. Everything else, such as
    rows in use, is the engine's as it is; `kv_peak_is_older` says that the peak was reached before."""
    values = dict(now)
    if not then:
        return values
    values["kv_peak_is_older"] = now.get("kv_peak_blocks", 0) == then.get("kv_peak_blocks", 0) > 0
    for name in COUNTERS:
        if name in values and name in then:
            values[name] = values[name] - then[name]
    for name, (total, count) in RATIOS.items():
        if name in values and total in values and count in values:
            values[name] = values[total] / values[count] if values[count] else 0.0
    return values
