"""Runs workloads on both engines in alternation, and puts the ratios side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxbatch.bench.contenders import run_mlx_lm, run_ours
from mlxbatch.bench.measured import Measured
from mlxbatch.bench.workloads import WORKLOADS, Workload
from mlxbatch.models.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both sides: medians over the repetitions, and the median of the pairwise ratios."""

    workload: str
    name: str
    unit: str
    ours: float
    mlx_lm: float
    ratio: float


_FIGURES: dict[str, tuple[str, Callable[[Measured], float]]] = {
    "total": ("s", lambda m: m.total),
    "prefill": ("s", lambda m: m.prefill_seconds),
    "decode": ("ms/token", lambda m: 1e3 * m.decode_seconds_per_token),
    "KV held over live": ("x", lambda m: m.held_over_live),
    "chat TTFT p99": ("s", lambda m: m.p99("ttft")),
    "chat TPOT p99": ("ms", lambda m: 1e3 * m.p99("tpot")),
    "chat token gap p99": ("ms", lambda m: 1e3 * m.p99("token_gaps")),
}
_LATENCY_FIGURES = ("total", "chat TTFT p99", "chat TPOT p99", "chat token gap p99")
_THROUGHPUT_FIGURES = ("total", "prefill", "decode", "KV held over live")


def compare(
    loaded: LoadedModel,
    names: Sequence[str],
    repetitions: int,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Figure]:
    """Measure each workload `repetitions` times on each side, in alternation, after one warm-up of each."""
    figures: list[Figure] = []
    for name in names:
        workload = WORKLOADS[name](loaded.tokenizer.vocab_size)
        rounds: list[tuple[Measured, Measured]] = []
        for number in range(repetitions):
            progress(f"{name}: ours, run {number + 1} of {repetitions}")
            ours = run_ours(loaded, workload)
            progress(f"{name}: mlx-lm, run {number + 1} of {repetitions}")
            rounds.append((ours, run_mlx_lm(loaded, workload)))
        chosen = _LATENCY_FIGURES if any(job.chat for job in workload.jobs) else _THROUGHPUT_FIGURES
        figures += [_figure(workload, key, rounds) for key in chosen]
        if workload.prefix_len:
            progress(f"{name}: mlx-lm with the prefix given")
            given = [(ours, run_mlx_lm(loaded, workload, give_prefix=True)) for ours, _ in rounds]
            figures.append(_figure(workload, "total", given, title="total, prefix given"))
    return figures


def _figure(
    workload: Workload, key: str, rounds: Sequence[tuple[Measured, Measured]], title: str | None = None
) -> Figure:
    unit, value = _FIGURES[key]
    pairs = [(value(ours), value(theirs)) for ours, theirs in rounds]
    return Figure(
        workload.name,
        title or key,
        unit,
        statistics.median(ours for ours, _ in pairs),
        statistics.median(theirs for _, theirs in pairs),
        statistics.median(ours / theirs if theirs else float("nan") for ours, theirs in pairs),
    )


def as_json(figures: Sequence[Figure], facts: dict[str, Any]) -> dict[str, Any]:
    return {**facts, "figures": [asdict(figure) for figure in figures]}
