"""Throughput over the last minute and the latency percentiles."""

from __future__ import annotations

from mlxbatch.engine.snapshot import Percentiles, Snapshot
from mlxbatch.tui.drawing import Line, sparkline
from mlxbatch.tui.numbers import UNKNOWN, count, percent, rate, seconds


def rate_rows(snapshot: Snapshot, width: int) -> list[Line]:
    rates = snapshot.rates
    bars = max(0, width - 22)
    return [
        Line((f"{name:<8}", "dim"), (f"{rate(value):>6}", "strong"), (" tok/s  ", "dim")).add(
            sparkline(history, bars), role
        )
        for name, value, history, role in (
            ("decode", rates.decode, rates.decode_history, "decode"),
            ("prefill", rates.prefill, rates.prefill_history, "prefill"),
        )
    ]


def percentile_rows(snapshot: Snapshot, width: int) -> list[Line]:
    cells = min(14, (width - 8) // 3)
    rows = [Line((f"{'':<8}{'p50':>{cells}}{'p95':>{cells}}{'p99':>{cells}}", "dim"))]
    for name, figures in (("queue", snapshot.queue_time), ("TTFT", snapshot.ttft), ("TPOT", snapshot.tpot)):
        row = Line((f"{name:<8}", "dim"))
        for value in (figures.p50, figures.p95, figures.p99):
            row.add(
                f"{seconds(value) if figures.count else UNKNOWN:>{cells}}",
                "text" if figures.count else "faint",
            )
        rows.append(row)
    return rows


def counter_rows(snapshot: Snapshot) -> list[Line]:
    counters = snapshot.counters
    minute = snapshot.preemptions_last_minute
    preemptions = Line(("preempt ", "dim"), (count(counters.preemptions), "bad" if minute else "text"))
    if counters.preemptions:
        preemptions.add(f" ({minute}/min)", "bad" if minute else "dim")
    return [
        Line(("prefix hits ", "dim"), (f"{hit_rate(snapshot):<6}", "text")).extend(preemptions.pieces),
        Line(("done ", "dim"), (count(counters.requests_finished), "text"), (" · steps ", "dim")).add(
            count(counters.steps), "text"
        ),
    ]


def hit_rate(snapshot: Snapshot) -> str:
    """Prompt tokens that came from the prefix cache, of all that were looked up."""
    counters = snapshot.counters
    return percent(counters.prefix_hit_tokens, counters.prefix_query_tokens)


def span(figures: Percentiles) -> str:
    """p50 / p95 with one unit where both share it."""
    if not figures.count:
        return UNKNOWN
    low, high = seconds(figures.p50), seconds(figures.p95)
    number, _, unit = low.partition(" ")
    return f"{number} / {high}" if unit and high.endswith(f" {unit}") else f"{low} / {high}"


def compact_rate_rows(snapshot: Snapshot, width: int) -> list[Line]:
    """Rates, counters and percentiles in two lines."""
    rates, counters = snapshot.rates, snapshot.counters
    first = Line(("decode ", "dim"), (rate(rates.decode), "strong"), (" ", "text"))
    first.add(sparkline(rates.decode_history, 6), "decode").add("  prefill ", "dim")
    first.add(rate(rates.prefill), "strong").add(" ").add(sparkline(rates.prefill_history, 6), "prefill")
    first.add(" tok/s", "dim").add("  hits ", "dim").add(hit_rate(snapshot), "text")
    minute = snapshot.preemptions_last_minute
    first.add("  preempt ", "dim").add(count(counters.preemptions), "bad" if minute else "text")
    now = snapshot.eff.now
    if now is not None and now.of_roof is not None:
        first.add("  roof ", "dim").add(f"{now.of_roof * 100:.0f} %", "text")
    second = Line(("p50/p95", "dim"))
    for name, figures in (("queue", snapshot.queue_time), ("TTFT", snapshot.ttft), ("TPOT", snapshot.tpot)):
        second.add(f"   {name} ", "dim").add(span(figures), "text")
    return [first, second]
