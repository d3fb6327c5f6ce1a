"""A study as a plot: goodput and throughput over rate, or over the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxbatch.capacity.plot import figure, save
from mlxbatch.engine.metrics import Targets
from mlxbatch.simulate.study import Point
from mlxbatch.units import format_seconds


def plot_study(path: Path, points: Sequence[Point], targets: Targets, title: str) -> None:
    """Draw every method's goodput and tokens per second. Raises UsageError for a wrong name or no matplotlib."""
    by_rows = len({p.rows for p in points}) > 1 or points[0].rate is None
    drawn, axes = figure(path, 2)
    for method in dict.fromkeys(p.outcome.method for p in points):
        for rate in dict.fromkeys(p.rate for p in points) if by_rows else (None,):
            chosen = [p for p in points if p.outcome.method == method and (not by_rows or p.rate == rate)]
            xs = [p.rows if by_rows else p.rate or 0.0 for p in chosen]
            label = f"{method}, {rate:g}/s" if by_rows and rate is not None else method
            axes[0].plot(xs, [100 * p.outcome.goodput for p in chosen], marker=".", label=label)
            axes[1].plot(xs, [p.outcome.tokens_per_second for p in chosen], marker=".", label=label)
    for axis in axes:
        axis.set_xlabel("max_num_seqs" if by_rows else "requests per second")
    limits = [f"{format_seconds(t)} {name}" for t, name in ((targets.ttft, "TTFT"), (targets.tpot, "TPOT")) if t]
    axes[0].set_ylabel("% within " + " and ".join(limits))
    axes[0].set_ylim(-2, 102)
    axes[1].set_ylabel("output tokens per second")
    axes[0].legend(fontsize=8)
    drawn.suptitle(title, fontsize=10)
    save(drawn, path)
